"""Layout strings and the balance rule."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moeplan.errors import InvalidInputError
from moeplan.layout import PipelineLayout, balanced_layout
from moeplan.presets import load_model

DEEPSEEK = load_model("deepseek-v3")


@pytest.mark.parametrize(
    "num_stages, text",
    [
        (16, "Et*4|(tttt|)*14tmL"),  # report section 8: GB200 (PP4 VPP4)
        (32, "Ett|(tt|)*29tm|L"),  # heads of model and MTP weigh two layers; the report's Et*3|(tt|)*29m|L does too
    ],
)
def test_the_rule_gives_the_layouts_of_deepseek(num_stages: int, text: str) -> None:
    assert balanced_layout(DEEPSEEK, num_stages).text == text


@given(st.integers(1, 62))
def test_balanced_layouts_hold_the_model_and_parse_back(num_stages: int) -> None:
    layout = balanced_layout(DEEPSEEK, num_stages)
    layout.check(DEEPSEEK, num_stages)
    assert PipelineLayout.from_string(layout.text) == layout
    covered = [layer for stage in layout.stages for layer in stage.layers]
    assert covered == list(range(DEEPSEEK.num_layers))


@given(st.lists(st.integers(0, 5), min_size=1, max_size=8), st.integers(0, 2))
def test_any_layout_survives_a_round_trip(layers: list[int], num_mtp: int) -> None:
    parts = ["t" * count for count in layers]
    text = "E" + "|".join(parts) + "m" * num_mtp + "L"
    layout = PipelineLayout.from_string(text)
    assert [stage.num_layers for stage in layout.stages] == layers
    assert PipelineLayout.from_string(layout.text) == layout


def test_stage_k_is_on_rank_k_mod_pp() -> None:
    layout = PipelineLayout.from_string("Et*4|(tttt|)*14tmL")
    rank_2 = layout.stages_of_rank(4, 2)
    assert [stage.first_layer for stage in rank_2] == [8, 24, 40, 56]
    assert sum(stage.num_layers for stage in rank_2) == 16


@pytest.mark.parametrize("text", ["", "(tt", "Et*3x", "Ett|mL|", "EL|t", "tL", "Et*9999999L", "Et|Et|L"])
def test_bad_strings_are_refused_with_the_notation(text: str) -> None:
    with pytest.raises(InvalidInputError, match="layout"):
        PipelineLayout.from_string(text)


def test_a_layout_of_another_size_is_refused_with_the_balanced_one() -> None:
    with pytest.raises(InvalidInputError, match="3 stages") as raised:
        PipelineLayout.from_string("Et*4|t|L").check(DEEPSEEK, 16)
    assert "Et*4|(tttt|)*14tmL" in raised.value.hint


def test_more_stages_than_layers_are_refused() -> None:
    with pytest.raises(InvalidInputError, match="only 61 layers"):
        balanced_layout(DEEPSEEK, 64)


@pytest.mark.parametrize("num_stages", [1, 2, 14, 90])
def test_mtp_depths_of_a_pattern_stay_beside_the_loss(num_stages: int) -> None:
    layout = balanced_layout(load_model("nemotron3-super-120b-a12b"), num_stages)
    assert len(layout.stages) == num_stages
    assert (layout.stages[-1].num_mtp, layout.stages[-1].has_loss, layout.num_layers) == (2, True, 88)
