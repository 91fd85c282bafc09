"""Plans: what is legal, what identifies them, what a file may say."""

from pathlib import Path
from typing import Any

import pytest

from moeplan.errors import InvalidInputError
from moeplan.files import read_toml, toml_text, validate
from moeplan.plan import Plan
from moeplan.presets import load_model

DEEPSEEK = load_model("deepseek-v3")


def fields(**changes: Any) -> dict[str, Any]:
    """Fields of the DeepSeek-V3 plan of the report on 256 GPUs."""
    plan = {"model": DEEPSEEK, "hardware": "gb300", "num_gpus": 256, "seq_len": 4096, "global_batch_size": 8192}
    return plan | {"pp": 4, "vp": 4, "ep": 64} | changes


def test_degrees_layout_and_micro_batches_follow() -> None:
    plan = Plan(**fields())
    assert (plan.dp, plan.edp, plan.num_micro_batches) == (64, 1, 128)
    assert plan.layout == "Et*4|(tttt|)*14tmL"
    assert plan.tokens_per_rank == 4096


@pytest.mark.parametrize(
    "changes, named",
    [
        ({"ep": 48}, "ep 48"),
        ({"ep": 3, "num_gpus": 192, "global_batch_size": 9216}, "256 experts"),
        ({"tp": 3}, "tp 3"),
        ({"pp": 3}, "pp 3"),
        ({"dp": 3}, "dp 3"),
        ({"layout": "Et*4|tttt|L"}, "3 stages"),
        ({"layout": "Et*4|(tttt"}, "layout"),
        ({"mbs": 3}, "mbs 3"),
        ({"vp": 40}, "160 stages"),
        ({"global_batch_size": 128}, "interleaving"),
        ({"recompute": ["full", "moe"]}, "full alone"),
        ({"precision": "fp7"}, "precision"),
        ({"nonsense": 1}, "nonsense"),
        ({"num_gpus": "many"}, "num_gpus"),
    ],
)
def test_illegal_plans_are_one_error_naming_the_key(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(InvalidInputError) as raised:
        validate(Plan, fields(**changes), "plan.toml")
    assert named in raised.value.message
    assert raised.value.message.startswith("plan.toml: ")
    assert "\n" not in raised.value.message
    assert raised.value.hint


def test_a_plan_file_reads_back_as_the_same_plan(tmp_path: Path) -> None:
    plan = Plan(**fields(recompute=("moe_act", "layernorm"), precision="mxfp8"))
    path = tmp_path / "plan.toml"
    path.write_text(toml_text(plan))
    assert validate(Plan, read_toml(path), "plan.toml") == plan


def test_plan_id_sees_costs_and_nothing_else() -> None:
    plan = Plan(**fields())
    assert plan.plan_id == Plan(**fields(model=DEEPSEEK.model_copy(update={"source": "elsewhere"}))).plan_id
    assert plan.plan_id == Plan(**fields(layout="Et*4|" + "tttt|" * 14 + "tmL")).plan_id
    assert plan.plan_id != plan.replace(vp=2).plan_id
    assert Plan(**fields(recompute=("moe_act", "layernorm"))).plan_id == (
        Plan(**fields(recompute=("layernorm", "moe_act"))).plan_id
    )


def test_plan_id_does_not_see_where_a_profile_lies() -> None:
    named = Plan(**fields(hardware="mine")).plan_id
    assert {Plan(**fields(hardware=path)).plan_id for path in ("mine.toml", "./a/mine.toml", "/b/mine.toml")} == {named}
    assert Plan(**fields(hardware="/b/other.toml")).plan_id != named


def test_plan_id_is_pinned_so_that_recorded_ids_stay_valid() -> None:
    assert Plan(**fields()).plan_id == "25b3d925b59e"


def test_replace_derives_again() -> None:
    changed = Plan(**fields()).replace(pp=8, ep=32)
    assert (changed.dp, changed.edp, changed.layout) == (32, 1, "Ett|(tt|)*29tm|L")


DYNAMIC = {"dynamic_cp": True, "document_lengths": (64, 32, 16, 16)}


@pytest.mark.parametrize(
    "changes,problem",
    [
        ({"dynamic_cp": False}, "document_lengths: needs dynamic_cp"),
        ({"document_lengths": ()}, "needs the lengths of the documents"),
        ({"document_lengths": (64, 32)}, "96 tokens in all, allowed: global_batch_size 2 x seq_len 64 = 128"),
        ({"document_lengths": (65, 63)}, "document of 65 tokens, allowed: at most seq_len 64"),
        ({"max_tokens_per_rank": 8}, "document of 64 tokens, allowed: at most 16 in the largest group, 2 ranks"),
        ({"max_tokens_per_rank": 65}, "65 tokens .* are not a multiple of 2 x tp 1"),
        ({"packed_lengths": (32, 32)}, "packed_lengths: .* give dynamic_cp document_lengths"),
        ({"cp": 2, "cp_comm": "all_gather"}, "cp_comm: .* allowed p2p, got all_gather"),
        ({"cuda_graph": ("attn",)}, "cuda_graph: .* shapes of every micro-batch"),
    ],
)
def test_rules_of_dynamic_context_parallelism(changes: dict[str, Any], problem: str) -> None:
    tiny = {"model": load_model("tiny-moe"), "hardware": "h100", "num_gpus": 2, "seq_len": 64, "global_batch_size": 2}
    Plan(**tiny, **DYNAMIC)
    with pytest.raises(ValueError, match=problem):
        Plan(**(tiny | DYNAMIC | changes))
