from moeplan.layer_pair import LAYER_PAIR, Work


def _place(work: Work) -> tuple[int, int]:
    """Step, and place inside it: an exchange starts first and is there for the steps after it."""
    for number, step in enumerate(LAYER_PAIR):
        if work == step.exchange:
            return number, -1
        if work in step.compute:
            return number, step.compute.index(work)
    raise AssertionError(f"{work} is in no step")


def test_every_segment_runs_once_and_after_what_it_needs() -> None:
    forward = [Work("f", segment, "fwd") for segment in ("before", "dispatch", "expert", "combine")]
    backward = [Work("b", segment, "dgrad") for segment in ("combine", "expert", "dispatch", "before")]
    weights = [Work("b", segment, "wgrad") for segment in ("expert", "before")]
    listed = [work for step in LAYER_PAIR for work in (step.exchange, *step.compute) if work is not None]
    assert sorted(listed) == sorted([*forward, *backward, *weights])
    for chain in (forward, backward):
        steps = [_place(work)[0] for work in chain]
        assert steps == sorted(set(steps)), "what an exchange brings is used in a later step"
    for gradient in weights:
        assert _place(gradient) > _place(Work("b", gradient.segment, "dgrad"))


def test_no_exchange_runs_beside_compute_of_its_own_micro_batch_except_weight_gradients() -> None:
    for step in LAYER_PAIR:
        if step.exchange is not None:
            other = {work.layer for work in step.compute if work.phase != "wgrad"}
            assert step.exchange.layer not in other
            assert other
