"""Whatever a search on the native stack can propose, the executor accepts: planner and executor know of no other."""

from collections.abc import Iterator
from dataclasses import replace

import pytest

from moeplan.errors import InvalidInputError
from moeplan.executor import check
from moeplan.executor.check import check_supported
from moeplan.model_spec import ModelSpec
from moeplan.plan import Plan
from moeplan.planner.families import Tally, families
from moeplan.planner.nearest import _candidates
from moeplan.planner.request import PINNABLE, SearchRequest, parse_pins
from moeplan.planner.scoring import profile_of, stack_of
from moeplan.planner.search import to_plan
from moeplan.planner.space import default_space
from moeplan.point import Point
from moeplan.presets import load_model

# Machine, GPUs and length: one GPU, a node, folding over nodes, and a ring that leaves the node.
SETTINGS = (("h200", 1, 4096), ("h100", 8, 4096), ("b200", 16, 8192), ("gb300", 8, 4096), ("h100", 32, 262_144))
EVERY = 23  # of the points of a space one in so many, a number that no axis has as its stride
# A value of every pin that the executor might refuse, alone or beside another one.
VALUES = {
    "tp": (2,),
    "cp": (2,),
    "cp_comm": ("all_gather", "a2a", "a2a+p2p"),
    "cp_a2a_size": (2,),
    "packed_lengths": ("4096+4096",),
    "pp": (2,),
    "vp": (2,),
    "etp": (2,),
    "ep": (8,),
    "mbs": (2,),
    "layout": ("E(t|)*47tL",),
    "precision": ("fp32", "fp64", "fp8_delayed", "fp8_current", "fp8_blockwise", "mxfp8", "nvfp4"),
    "recompute": ("full", "moe_act", "core_attn", "mlp+moe"),
    "dispatcher": ("alltoall", "allgather", "flex"),
    "flex_backend": ("torch", "deepep", "hybridep"),
    "memory_efficient_permutation": ("false",),
    "sharding": ("none", "full"),
    "grad_dtype": ("bf16", "fp64"),
    "moment_dtype": ("bf16", "fp8", "fp64"),
    "micro_batch_group_size": (4,),
    "overlap_grad_reduce": ("false",),
    "overlap_param_gather": ("false",),
    "ep_overlap": ("true",),
    "delay_wgrad": ("true",),
    "shared_expert_overlap": ("true",),
    "dispatch_sms": (20,),
    "echo_slots": (1,),
    "paged_stash_factor": (1.5,),
    "routing": ("natural", "drop"),
    "cuda_graph": ("full_iteration", "attn"),
    "fused_grouped_mlp": ("true",),
    "permute_fusion": ("false",),
    "router_fusion": ("false",),
    "fp8_primary_weights": ("true",),
    "fp8_attention": ("true",),
    "tp_comm_overlap": ("true",),
    "offload_layers": (2,),
    "offload_modules": ("expert_fc1", "attn_norm", "core_attn+attn_proj"),
    "offload_optimizer_states": ("true",),
    "optimizer_cpu_frac": (0.5,),
    "dp_replicate": (2,),
    "main_weight_remainders": ("true",),
    "paired_wgrad": ("expert_fc1", "expert_fc1+expert_fc2"),
    "bf16_first_layers": (1,),
    "bf16_last_layers": (1,),
    "bf16_modules": ("attention",),
}
PINS = tuple(f"{key}={value}" for key, values in VALUES.items() for value in values)
# Pins that need another one to be legal at all.
BESIDE = {
    "delay_wgrad": "ep_overlap=true,ep=8",
    "ep_overlap": "ep=8",
    "cp_comm": "cp=4",
    "cp_a2a_size": "cp=4,cp_comm=a2a+p2p",
    "packed_lengths": "cp=1",
    "fp8_attention": "precision=fp8_current",
    "fp8_primary_weights": "precision=fp8_current",
    "echo_slots": "ep=8",
    "dispatch_sms": "dispatcher=flex,flex_backend=deepep",
    "flex_backend": "dispatcher=flex",
    "layout": "pp=8,vp=6",
    "vp": "pp=2",
    "dp_replicate": "ep=4,etp=1",
    "bf16_first_layers": "precision=fp8_current",
    "bf16_last_layers": "precision=fp8_current",
    "bf16_modules": "precision=fp8_current",
}


@pytest.fixture(autouse=True)
def libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    """deep_ep may be missing where a plan is made and be there where it runs."""
    monkeypatch.setattr(check, "find_spec", lambda name: name)


def asked(model: ModelSpec, setting: tuple[str, int, int], fix: str = "") -> SearchRequest:
    hardware, num_gpus, seq_len = setting
    pins = parse_pins(fix, "--fix")
    return SearchRequest(model, hardware, profile_of(hardware), stack_of("native"), num_gpus, seq_len, 256, pins)


def proposed(request: SearchRequest) -> Iterator[Point]:
    """Every point that a search may open; the ranking takes from these and no others."""
    for group in families(request, default_space(request), Tally()):
        for family in group:
            yield from family.points()


def refused(request: SearchRequest, points: Iterator[Point]) -> dict[str, Point]:
    """Why the executor turns points down, with the last one it does so for."""
    found = {}
    for point in points:
        try:
            check_supported(to_plan(request, point))
        except InvalidInputError as error:
            found[error.message] = point
    return found


# Together they have what the executor looks at: MLA, MTP, biases and groups of experts, shared experts, no experts.
@pytest.mark.parametrize("name", ["deepseek-v3-l4", "gpt-oss-20b", "qwen2-57b-a14b", "llama3-8b", "tiny-moe"])
def test_what_a_search_proposes_runs(name: str) -> None:
    num_seen = 0
    for setting in SETTINGS:
        request = asked(load_model(name), setting, "mbs=1,etp=1")
        points = [point for at, point in enumerate(proposed(request)) if at % EVERY == 0]
        num_seen += len(points)
        assert not refused(request, iter(points))
    assert num_seen > 10


def test_odd_sizes_are_proposed_only_where_they_divide() -> None:
    model = load_model("gpt-oss-20b")
    odd = model.model_copy(update={"vocab_size": 151_935, "hidden_size": 2884})
    request = asked(odd, ("h100", 8, 4096), "mbs=1,cp=1,recompute=none")
    points = list(proposed(request))
    assert not refused(request, iter(points))
    assert {point.tp for point in points} > {1, 2}  # a vocabulary is split unevenly, biases of experts are not
    assert {point.etp for point in points} == {1, 2, 4}


def test_every_pin_has_values_here() -> None:
    assert set(VALUES) == set(PINNABLE)
    assert set(BESIDE) <= set(VALUES)


@pytest.mark.parametrize("pin", PINS)
def test_no_two_pins_lead_to_a_plan_that_does_not_run(pin: str) -> None:
    """Each pin alone and beside each later one, on models with shared experts, biases and MLA, and one without."""
    for name in ("deepseek-v2-lite", "gpt-oss-20b", "llama3-8b"):
        model = load_model(name)
        for other in ("", *PINS[PINS.index(pin) + 1 :]):
            fix = _joined("mbs=1", "pp=1", "cp=1", "etp=1", "tp=1", "recompute=none", pin, other)
            if fix is None:
                continue
            num_gpus = 1 if "cuda_graph=full_iteration" in fix else 8
            try:
                request = asked(model, ("b200", num_gpus, 8192), fix)
                points = [point for at, point in enumerate(proposed(request)) if at % EVERY == 0]
            except InvalidInputError:
                continue  # nothing legal, and the search says so
            assert not refused(request, iter(points)), fix


def _joined(*pins: str) -> str | None:
    """One --fix of them all with what they need beside them; later ones win. None where the same key comes twice."""
    if pins[-1].partition("=")[0] == pins[-2].partition("=")[0]:
        return None
    chosen: dict[str, str] = {}
    for pin in (*pins[:-2], *(BESIDE.get(one.partition("=")[0], "") for one in pins[-2:]), *pins[-2:]):
        chosen |= dict(part.split("=", 1) for part in pin.split(",") if part)
    return ",".join(f"{key}={value}" for key, value in chosen.items())


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"moment_dtype": "fp8"},
        {"main_weight_remainders": True},
        {"precision": "fp8_current", "fp8_primary_weights": True},
        {"precision": "fp8_blockwise"},
        {"sharding": "full"},
        {"ep": 8, "ep_overlap": True, "delay_wgrad": True},
    ],
)
def test_the_plan_that_a_run_out_of_memory_is_given_runs(changes: dict[str, object]) -> None:
    request = asked(load_model("deepseek-v2-lite"), ("h100", 8, 4096))
    fields = {"model": request.model, "hardware": "h100", "num_gpus": 8, "seq_len": 4096, "global_batch_size": 32}
    plan = Plan.model_validate(fields | {"precision": "bf16", "mbs": 2} | changes)
    check_supported(plan)
    points = [point for at, point in enumerate(_candidates(plan, request.stack)) if at % EVERY == 0]
    assert len(points) > 5
    assert not refused(request, (replace(point, layout=plan.layout) for point in points))
