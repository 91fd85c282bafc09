"""Parameters by rank: nothing lost, nothing twice, and splitting never adds."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moeplan.layout import balanced_layout
from moeplan.model_spec import DENSE_LAYER, MOE_LAYER, ModelSpec
from moeplan.parameters import embedding_parameters, total_parameters
from moeplan.plan import Plan
from moeplan.presets import load_model, model_names
from moeplan.simulator.placement import Chunk, rank_chunks, rank_parameters


def elements(model: ModelSpec, pp: int, *, tp: int = 1, etp: int = 1, ep: int = 1) -> list[float]:
    layout = balanced_layout(model, pp).text
    ranks = rank_parameters(model, layout, pp, tp=tp, etp=etp, ep=ep)
    return [sum(group.num_elements for group in groups) for groups in ranks]


@pytest.mark.parametrize("name", model_names())
def test_one_rank_holds_the_published_number_of_parameters(name: str) -> None:
    model = load_model(name)
    assert elements(model, pp=1) == [total_parameters(model, with_mtp=True)]


@pytest.mark.parametrize("name", ["deepseek-v3", "qwen3-30b-a3b", "llama3-8b", "gpt-oss-20b"])
def test_stages_sum_to_the_model_with_a_copy_of_the_embedding_for_mtp(name: str) -> None:
    model = load_model(name)
    copies = embedding_parameters(model) * bool(model.num_mtp_layers)
    assert sum(elements(model, pp=4)) == total_parameters(model, with_mtp=True) + copies


def test_tied_head_is_a_copy_only_away_from_the_embedding() -> None:
    model = load_model("llama3-8b").model_copy(update={"tied_embeddings": True})
    assert sum(elements(model, pp=1)) == total_parameters(model)
    assert sum(elements(model, pp=2)) == total_parameters(model) + embedding_parameters(model)


def test_deepseek_v3_chunks_of_the_report(report_plan: Plan) -> None:
    ranks, four = rank_chunks(report_plan.model, report_plan.layout, 4), Chunk(((MOE_LAYER, 4),), 0, has_loss=False)
    assert ranks[0] == (Chunk(((DENSE_LAYER, 3), (MOE_LAYER, 1)), 0, False), *[four] * 3)
    assert ranks[2] == (four,) * 4
    assert ranks[3][-1] == Chunk(((MOE_LAYER, 1),), 1, has_loss=True)


@given(
    name=st.sampled_from(["deepseek-v3", "qwen3-235b-a22b", "mixtral-8x7b", "gpt-oss-120b", "llama3-70b"]),
    pp=st.sampled_from([1, 2, 4]),
    axis=st.sampled_from(["tp", "etp", "ep"]),
    degree=st.sampled_from([1, 2, 4]),
)
def test_splitting_more_never_adds_parameters(name: str, pp: int, axis: str, degree: int) -> None:
    model = load_model(name)
    if model.moe is None and axis != "tp":
        axis = "tp"
    wide, narrow = (elements(model, pp, **{axis: size}) for size in (degree, 2 * degree))
    assert all(more >= less for more, less in zip(wide, narrow, strict=True))
    assert max(elements(model, 2 * pp)) <= max(elements(model, pp))


def test_splits_leave_whole_what_is_replicated(report_plan: Plan) -> None:
    def by_component(tp: int, etp: int, ep: int) -> dict[str, float]:
        groups = rank_parameters(report_plan.model, report_plan.layout, 4, tp=tp, etp=etp, ep=ep)[2]
        return {group.component: group.num_elements for group in groups}

    whole, split = by_component(1, 1, 1), by_component(8, 2, 64)
    assert split["experts"] * 128 == whole["experts"]
    assert split["shared_experts"] * 8 == whole["shared_experts"]
    assert split["norms"] == whole["norms"]
    assert split["router"] == whole["router"]
    down = 16 * 7168 * (1536 + 512 + 64)  # latent down projections of 16 layers
    assert (split["attention"] - down) * 8 == whole["attention"] - down


def test_ranks_of_a_point_follow_its_layout(report_plan: Plan) -> None:
    even = replace(report_plan.point, layout=balanced_layout(report_plan.model, 16).text)
    assert rank_chunks(report_plan.model, even.layout, 4) == rank_chunks(report_plan.model, report_plan.layout, 4)
