"""Search: what it returns is legal, fits, is ranked, and what it turns down is explained."""

import pytest

from moeplan.errors import InvalidInputError
from moeplan.hwprofiles.load import load_profile
from moeplan.legality import violations
from moeplan.planner.families import Tally, families
from moeplan.planner.request import SearchRequest, parse_forbidden, parse_pins
from moeplan.planner.search import SearchOutcome, search, to_plan
from moeplan.planner.space import default_space, recompute_sets, vp_values
from moeplan.point import Point
from moeplan.presets import load_model
from moeplan.simulator.memory import peak_memory_bytes, state_bytes
from moeplan.simulator.stack import load_stack
from moeplan.simulator.step_model import step_model


def request(
    gpus: int = 256,
    fix: str = "",
    forbid: str = "",
    top: int = 10,
    *,
    model: str = "deepseek-v3",
    hardware: str = "gb300",
    stack: str = "megatron-bridge-26.08",
    batch: int = 8192,
) -> SearchRequest:
    """A search, of sequences of 4096 tokens."""
    return SearchRequest(
        model=load_model(model),
        hardware=hardware,
        profile=load_profile(hardware),
        stack=load_stack(stack),
        num_gpus=gpus,
        seq_len=4096,
        global_batch_size=batch,
        fixed=parse_pins(fix, "--fix"),
        forbidden=parse_forbidden(forbid, "--forbid"),
        top_k=top,
    )


def by_rule(_request: SearchRequest, points: list[tuple[float, Point]]) -> list[tuple[float, Point]]:
    """Stands for the choice of layouts, which comes after what is tested here."""
    return points


@pytest.fixture(scope="module")
def pinned() -> tuple[SearchRequest, SearchOutcome]:
    """Plans of DeepSeek-V3 with tp 1 and ep 64, pipeline free, in the layouts of the report's rule."""
    asked = request(fix="tp=1,ep=64,etp=1", top=400)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("moeplan.planner.search.best_layouts", by_rule)
        return asked, search(asked)


def test_plans_are_legal_fit_and_come_best_first(pinned: tuple[SearchRequest, SearchOutcome]) -> None:
    asked, outcome = pinned
    assert len(outcome.plans) >= 10
    steps = [ranked.predicted.step_s for ranked in outcome.plans]
    assert steps == sorted(steps)
    for ranked in outcome.plans:
        assert list(violations(asked.model, ranked.plan.point)) == []
        assert list(asked.stack.violations(asked.model, ranked.plan.point)) == []
        assert ranked.predicted.peak_memory_bytes <= asked.usable_bytes
        assert ranked.predicted.peak_memory_bytes == pytest.approx(
            peak_memory_bytes(asked.model, ranked.plan.point, asked.stack, asked.profile)
        )
    assert {ranked.plan.ep for ranked in outcome.plans} == {64}
    assert max(ranked.plan.pp for ranked in outcome.plans) > 1


def test_no_kept_plan_recomputes_more_than_it_must(pinned: tuple[SearchRequest, SearchOutcome]) -> None:
    asked, outcome = pinned
    for ranked in outcome.plans:
        point = ranked.plan.point
        if not point.recompute:
            continue
        without = ranked.plan.replace(layout=point.layout, recompute=()).point
        assert peak_memory_bytes(asked.model, without, asked.stack, asked.profile) > asked.usable_bytes


def test_the_bound_loses_nothing(pinned: tuple[SearchRequest, SearchOutcome], monkeypatch: pytest.MonkeyPatch) -> None:
    """The ten best of a short search are the ten best of one that had to open every family."""
    _, everything = pinned
    monkeypatch.setattr("moeplan.planner.search.best_layouts", by_rule)
    short = search(request(fix="tp=1,ep=64,etp=1"))
    assert [one.plan.plan_id for one in short.plans] == [one.plan.plan_id for one in everything.plans[:10]]
    assert short.num_costed < everything.num_costed


def test_bounds_lie_below_what_they_bound() -> None:
    """Of step and memory, over pipelines with and without virtual stages, overlap, tp, cp and recompute."""
    for fix in (
        "tp=1,ep=64,etp=1,mbs=1",
        "tp=4,ep=16,precision=bf16,dispatcher=alltoall,mbs=2",
        "pp=8,ep=8,tp=2,etp=2",
    ):
        asked = request(fix=fix)
        model = step_model(asked.model, asked.stack, asked.profile)
        found = [one for group in families(asked, default_space(asked), Tally()) for one in group][::12]
        assert found
        points = [family.base for family in found] + [family.lightest for family in found]
        for point, family, time in zip(points, found * 2, model.step_times(points), strict=True):
            assert model.least_step_s(family.base) <= time.step_s * (1 + 1e-9)
            held = state_bytes(asked.model, point, asked.stack, asked.profile)
            assert held <= peak_memory_bytes(asked.model, point, asked.stack, asked.profile)


def test_what_the_bound_left_out_is_counted(pinned: tuple[SearchRequest, SearchOutcome]) -> None:
    _, everything = pinned
    short = search(request(fix="tp=1,ep=64,etp=1", top=1))
    slower = next(rejection for rejection in short.rejections if rejection.wall == "time")
    assert slower.count > 0
    assert "slower than" in slower.nearest_miss
    assert all(rejection.wall != "time" for rejection in everything.rejections)


def test_the_memory_wall_names_its_nearest_miss(pinned: tuple[SearchRequest, SearchOutcome]) -> None:
    _, outcome = pinned
    memory = next(rejection for rejection in outcome.rejections if rejection.wall == "memory")
    assert memory.needed is not None
    assert memory.available is not None
    assert memory.needed > memory.available
    assert "ep64" in memory.nearest_miss
    assert outcome.is_complete


def test_fix_pins_and_prints_the_layout() -> None:
    outcome = search(request(fix="pp=4,vp=4,ep=64,tp=1"))
    assert outcome.plans
    assert {ranked.plan.layout for ranked in outcome.plans} == {"Et*4|(tttt|)*14tmL"}
    written = search(request(fix="pp=4,vp=4,ep=64,tp=1,layout=Et*3|(tttt|)*14ttmL"))
    assert {ranked.plan.layout for ranked in written.plans} == {"Et*3|(tttt|)*14ttmL"}


def test_a_pinned_layout_finds_its_number_of_stages() -> None:
    outcome = search(request(fix="ep=64,tp=1,mbs=1,layout=Et*3|(tttt|)*14ttmL,recompute=full"))
    assert {ranked.plan.pp * ranked.plan.vp for ranked in outcome.plans} == {16}
    with pytest.raises(InvalidInputError, match="layout 'Et\\*10L' has"):
        search(request(fix="ep=64,tp=1,pp=1,mbs=1,layout=Et*10L"))


def test_forbid_leaves_out() -> None:
    outcome = search(request(fix="tp=1,ep=64,etp=1,pp=4", forbid="precision=mxfp8,mbs=1"))
    assert {ranked.plan.precision for ranked in outcome.plans} == {"bf16"}
    assert 1 not in {ranked.plan.mbs for ranked in outcome.plans}


def test_forbidding_a_back_end_leaves_the_other_dispatchers() -> None:
    asked = request(fix="tp=1,ep=64,etp=1,pp=4,vp=4,mbs=1", forbid="dispatcher=hybridep")
    found = [one.base for group in families(asked, default_space(asked), Tally()) for one in group]
    assert {point.dispatcher for point in found} >= {"alltoall"}
    assert not [point for point in found if point.dispatcher == "flex" and point.flex_backend == "hybridep"]


def test_more_memory_never_makes_a_feasible_plan_infeasible() -> None:
    asked = request(fix="tp=1,ep=64,etp=1,pp=4,vp=4", top=1000)
    bytes_now = asked.profile.memory_bytes.value
    larger = asked.profile.memory_bytes.model_copy(update={"value": 1.2 * bytes_now})
    roomier = SearchRequest(
        **{name: getattr(asked, name) for name in SearchRequest.__slots__}
        | {"profile": asked.profile.model_copy(update={"memory_bytes": larger})}
    )
    before, after = search(asked), search(roomier)
    assert after.plans[0].predicted.step_s <= before.plans[0].predicted.step_s
    bases = [
        {ranked.plan.replace(recompute=(), ep_overlap=False, delay_wgrad=False).plan_id for ranked in outcome.plans}
        for outcome in (before, after)
    ]
    assert bases[0] <= bases[1]


def test_nothing_legal_is_an_error_that_says_why() -> None:
    with pytest.raises(InvalidInputError, match="ep 48"):
        search(request(fix="ep=48"))


def test_nothing_fits_is_an_outcome_with_the_nearest_miss() -> None:
    outcome = search(request(gpus=8, fix="ep=8"))
    assert outcome.plans == ()
    assert outcome.rejections[0].wall == "memory"


def test_a_time_limit_is_owned_up_to() -> None:
    asked = request()
    limited = SearchRequest(**{name: getattr(asked, name) for name in SearchRequest.__slots__} | {"time_limit_s": 0.0})
    tally = Tally()
    assert next(families(limited, default_space(limited), tally), None) is not None
    with pytest.raises(InvalidInputError, match="time limit"):
        search(limited)


def test_virtual_stages_grow_only_where_the_largest_stage_shrinks() -> None:
    model = load_model("deepseek-v3")
    assert vp_values(model, 1) == (1,)
    assert vp_values(model, 4) == (1, 2, 3, 4, 6, 8)
    assert all(4 * vp <= model.num_layers + 1 for vp in vp_values(model, 4))


def test_recompute_sets_are_those_the_model_has() -> None:
    stack = load_stack("megatron-bridge-26.08")
    deepseek, qwen = (recompute_sets(load_model(name), stack) for name in ("deepseek-v3", "qwen3-30b-a3b"))
    assert deepseek[0] == qwen[0] == ()
    assert deepseek[-1] == qwen[-1] == ("full",)
    assert ("mla_up_proj",) in deepseek
    assert not any("mla_up_proj" in chosen or "shared_experts" in chosen for chosen in qwen)
    assert recompute_sets(load_model("llama3-8b"), stack) == ((), ("layernorm",), ("layernorm", "mlp"), ("full",))


@pytest.mark.parametrize(
    "fix,tried", [("", {"alltoall", "allgather", "torch"}), ("flex_backend=hybridep", {"hybridep"})]
)
def test_libraries_that_may_be_missing_are_searched_only_where_asked_for(fix: str, tried: set[str]) -> None:
    pins = f"tp=1,pp=1,cp=1,ep=16,dispatcher=flex,{fix}" if fix else "tp=1,pp=1,cp=1,ep=16"
    asked = request(16, pins, top=50, model="qwen3-30b-a3b", hardware="h100", stack="native", batch=64)
    plans = [ranked.plan for ranked in search(asked).plans]
    assert {plan.flex_backend if plan.dispatcher == "flex" else plan.dispatcher for plan in plans} == tried


@pytest.mark.parametrize("forbid, kept", [("", "alltoall"), ("dispatcher=alltoall", "allgather")])
def test_whole_experts_on_each_rank_need_no_choice_of_dispatcher(forbid: str, kept: str) -> None:
    pins = "tp=1,pp=1,precision=bf16"
    asked = request(2, pins, forbid, model="tiny-moe", hardware="h200", stack="native", batch=8)
    found = [family.base for group in families(asked, default_space(asked), Tally()) for family in group]
    assert {point.dispatcher for point in found if point.ep == 1} == {kept}
    assert {point.dispatcher for point in found if point.ep == 2} == {"alltoall", "allgather", "flex"} - {forbid[11:]}


def test_dispatchers_that_fail_on_a_machine_are_turned_down_with_the_report() -> None:
    pins = "tp=1,ep=64,pp=4,vp=4,etp=1,mbs=1,dispatcher=flex,flex_backend=deepep,precision=mxfp8"
    asked = request(fix=pins, hardware="b300")
    tally = Tally()
    assert not [family for group in families(asked, default_space(asked), tally) for family in group]
    assert "issue 5067" in tally.examples["dispatcher"]


@pytest.mark.parametrize(
    "fix, kept",
    [
        # Delayed scaling excludes layernorm and moe_act; all but attention includes layernorm.
        (
            "precision=fp8_delayed",
            {(), ("mla_up_proj",), ("shared_experts",), ("mla_up_proj", "shared_experts"), ("full",)},
        ),
        ("shared_expert_overlap=true,recompute=shared_experts", set()),
        ("paged_stash_factor=1.5,recompute=full", set()),
        ("ep_overlap=true,recompute=full", set()),
        ("recompute=full+moe_act", set()),
        ("recompute=core_attn", {("core_attn",)}),
    ],
)
def test_recompute_that_a_plan_excludes_is_never_proposed(fix: str, kept: set[tuple[str, ...]]) -> None:
    """Such points once reached the ranking, where making a plan of them failed."""
    pins = f"tp=1,etp=1,ep=8,pp=1,mbs=1,dispatcher=alltoall,{fix}"
    asked = request(8, pins, model="deepseek-v2-lite", hardware="h100", stack="native", batch=64)
    tally = Tally()
    found = [family for group in families(asked, default_space(asked), tally) for family in group]
    assert {chosen for family in found for chosen in family.recompute} == kept
    for family in found:
        for point in family.points():
            to_plan(asked, point)
    if not kept:
        with pytest.raises(InvalidInputError, match="no legal plan with"):
            search(asked)


def test_forbidden_modules_are_recomputed_in_no_set() -> None:
    for forbid, present, absent in (
        ("recompute=moe_act", ("layernorm", "full"), ("moe_act",)),
        ("recompute=full", ("moe_act",), ("full",)),
    ):
        asked = request(fix="tp=1,ep=64,etp=1,pp=4,vp=4,mbs=1", forbid=forbid)
        sets = [
            set(chosen)
            for group in families(asked, default_space(asked), Tally())
            for one in group
            for chosen in one.recompute
        ]
        assert all(any(name in chosen for chosen in sets) for name in present)
        assert not any(name in chosen for chosen in sets for name in absent)
    asked = request(fix="tp=1,ep=64,etp=1,pp=4,vp=4,mbs=1", forbid="recompute=layernorm+moe_act,recompute=none")
    sets = [
        set(chosen)
        for group in families(asked, default_space(asked), Tally())
        for one in group
        for chosen in one.recompute
    ]
    assert {"layernorm"} in sets
    assert set() not in sets
    assert not any({"layernorm", "moe_act"} <= chosen for chosen in sets)
