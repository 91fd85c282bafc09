"""Rows of measured runs become plans by rule; what they do not say comes from the stack."""

from pathlib import Path

import pytest

from moeplan.errors import InvalidInputError
from moeplan.planner.published_names import stack_name
from moeplan.planner.published_plan import plan_of
from moeplan.planner.published_rows import CellError, PublishedRow, read_published_rows
from moeplan.planner.scoring import profile_of, stack_of

SAMPLE = Path(__file__).parents[1] / "data" / "published_runs_sample.csv"
ROWS = {row.id: row for row in read_published_rows(SAMPLE)[0]}
BRIDGE = "mb-2608-deepseek-v3-GB300-mxfp8-g256-t1p2v8c1e32-m1-b4096-s4096"


def row(**cells: str) -> PublishedRow:
    """The Bridge row of DeepSeek-V3 on 256 GB300 with some cells changed."""
    return PublishedRow(2, ROWS[BRIDGE].cells | cells)


def test_a_row_that_states_everything() -> None:
    plan = plan_of(row(), stack_of("megatron-bridge-26.08"), profile_of("gb300"))
    assert (plan.pp, plan.vp, plan.ep, plan.dp, plan.num_micro_batches) == (2, 8, 32, 128, 32)
    assert (plan.dispatcher, plan.flex_backend, plan.dispatch_sms) == ("flex", "hybridep", 32)
    assert plan.ep_overlap
    assert plan.delay_wgrad
    assert plan.fused_grouped_mlp
    assert plan.fp8_attention
    assert plan.cuda_graph == ("full_iteration",)
    assert (plan.recompute, plan.grad_dtype, plan.moment_dtype) == ((), "bf16", "bf16")


def test_empty_cells_take_the_default_of_the_stack_and_never_of_a_row() -> None:
    blank = row(dispatcher="", ep_overlap="", cuda_graph="", delay_wgrad="", grad_dtype="", moment_dtype="")
    plan = plan_of(blank, stack_of("megatron-bridge-26.04"), profile_of("gb300"))
    assert plan.flex_backend == "hybridep"
    assert plan.cuda_graph == ("attn", "moe_preprocess", "moe_router")
    assert (plan.ep_overlap, plan.delay_wgrad, plan.grad_dtype) == (False, False, "bf16")
    older = plan_of(blank, stack_of("megatron-bridge-25.09"), profile_of("b200"))
    assert (older.dispatcher, older.cuda_graph) == ("alltoall", ())


def test_layers_spread_evenly_with_embedding_and_loss_where_only_that_divides() -> None:
    even = row(model="llama3-70b", pp="4", vp="5", ep="1", pipeline_layout="", mtp_layers="", ep_overlap="0")
    stack, profile = stack_of("megatron-bridge-26.08"), profile_of("gb300")
    plain = {"cuda_graph": "none", "fused_grouped_mlp": "", "delay_wgrad": ""}
    assert plan_of(PublishedRow(2, even.cells | plain), stack, profile).layout == "Et*4|(tttt|)*18t*4L"
    cut = even.cells | plain | {"model": "llama3.1-405b", "pp": "8", "vp": "8", "gbs": "1024"}
    assert plan_of(PublishedRow(2, cut), stack, profile).layout == "Et|(tt|)*62tL"


def test_mtp_depths_take_a_balanced_layout_as_embedding_and_loss_cannot_be_counted_with_them() -> None:
    cells = {"pp": "8", "vp": "4", "ep": "32", "pipeline_layout": "", "mtp_layers": "1", "cuda_graph": "none"}
    stack, profile = stack_of("megatron-bridge-26.08"), profile_of("gb300")
    assert plan_of(PublishedRow(2, row().cells | cells), stack, profile).layout == "Ett|(tt|)*29tm|L"


@pytest.mark.parametrize(
    "cells",
    [
        {"recompute": "full"},
        {"recompute": "selective:moe"},
        {"cuda_graph": "te:mlp"},
        {"fsdp": "1"},
        {"vp": "1", "pipeline_layout": ""},
    ],
)
def test_a_default_gives_way_to_what_a_row_states(cells: dict[str, str]) -> None:
    """Recipes of 26.08 overlap; a row that states what overlap excludes ran without it."""
    blank = {"dispatcher": "", "ep_overlap": "", "delay_wgrad": "", "cuda_graph": "", "precision": "bf16"}
    sizes = {"fused_grouped_mlp": "", "fp8_attention": "", "fp8_primary_weights": ""}
    bridge, profile = stack_of("megatron-bridge-26.08"), profile_of("gb300")
    assert plan_of(row(**blank | sizes), bridge, profile).ep_overlap
    assert not plan_of(row(**blank | sizes | cells), bridge, profile).ep_overlap


def test_whole_graphs_and_dispatchers_find_each_other() -> None:
    blank = {"dispatcher": "", "ep_overlap": "0", "delay_wgrad": "", "cuda_graph": ""}
    newer, older, profile = stack_of("megatron-bridge-26.06"), stack_of("megatron-bridge-25.09"), profile_of("gb200")
    assert plan_of(row(**blank), newer, profile).cuda_graph == ("full_iteration",)
    assert plan_of(row(**blank | {"dispatcher": "alltoall"}), newer, profile).cuda_graph == ()
    graphed = plan_of(row(**blank | {"cuda_graph": "full_iteration"}), older, profile)
    assert (graphed.dispatcher, graphed.flex_backend) == ("flex", "hybridep")


def test_a_written_layout_says_how_many_mtp_depths_there_are() -> None:
    cells = {"pipeline_layout": "Et*4|(tttt|)*14tL", "mtp_layers": ""}
    plan = plan_of(row(**cells), stack_of("megatron-bridge-26.08"), profile_of("gb300"))
    assert plan.model.num_mtp_layers == 0


def test_overlap_without_a_word_on_virtual_stages_has_two() -> None:
    cells = {"vp": "", "pp": "4", "pipeline_layout": "", "ep_overlap": "1"}
    assert plan_of(row(**cells), stack_of("megatron-bridge-26.08"), profile_of("gb300")).vp == 2


def test_other_ways_to_write_a_cell() -> None:
    bridge, profile = stack_of("megatron-bridge-26.08"), profile_of("gb300")
    eager = {"ep_overlap": "0", "cuda_graph": "none", "dispatcher": "All-to-All"}
    plan = plan_of(row(recompute="selective:moe_act, mlp", **eager), bridge, profile)
    assert (plan.recompute, plan.dispatcher) == (("mlp", "moe_act"), "alltoall")
    assert plan_of(row(recompute="selective"), bridge, profile).recompute == ("core_attn",)
    with pytest.raises(CellError, match="has alltoall, deepep, hybridep, got allgather"):
        plan_of(row(**eager | {"dispatcher": "allgather"}), bridge, profile)


@pytest.mark.parametrize(
    "cells, column",
    [
        ({"n_gpus": "many"}, "n_gpus"),
        ({"gbs": ""}, "gbs"),
        ({"precision": "fp6"}, "precision"),
        ({"model": "deepseek-v9"}, "model"),
        ({"dispatcher": "pigeon"}, "dispatcher"),
        ({"offload": "act_layers:x"}, "offload"),
        ({"offload": "act_fine"}, "offload"),
        ({"recompute": "selective:dreams"}, "recompute"),
        ({"cuda_graph": "te:dreams"}, "cuda_graph"),
        ({"task": "lora"}, "task"),
        ({"ep_overlap": "2"}, "ep_overlap"),
        ({"tp": "3"}, "plan"),
        ({"pipeline_layout": "Et|L"}, "plan"),
    ],
)
def test_what_cannot_be_expressed_names_its_column(cells: dict[str, str], column: str) -> None:
    with pytest.raises(CellError) as caught:
        plan_of(row(**cells), stack_of("megatron-bridge-26.08"), profile_of("gb300"))
    assert caught.value.column == column


def test_lines_that_are_no_rows_are_told_and_the_rest_is_read(tmp_path: Path) -> None:
    path = tmp_path / "runs.csv"
    text = SAMPLE.read_text().splitlines()
    path.write_text("\n".join([text[0], "too,few", text[1], ""]) + "\n")
    rows, bad = read_published_rows(path)
    assert [one.id for one in rows] == [BRIDGE]
    assert bad == [(2, f"2 cells, the header has {len(text[0].split(','))} columns")]
    path.write_text("id,model\n")
    with pytest.raises(InvalidInputError, match="no column gpu"):
        read_published_rows(path)


def test_a_run_noted_as_eager_has_a_stack_without_compilation() -> None:
    assert stack_name(row(stack="torchtitan-2024.12", notes="eager")) == "torchtitan-eager-2024.12"
    assert stack_name(row(stack="torchtitan-2024.12", notes="torch.compile")) == "torchtitan-2024.12"
    assert stack_name(row(stack="megatron-bridge-26.08", notes="eager")) == "megatron-bridge-26.08"


def test_adapters_need_a_stack_that_trains_them() -> None:
    assert stack_name(row(stack="dgxc-25.04", task="lora")) == "dgxc-lora-25.04"
    lora = stack_of("megatron-bridge-lora-26.06")
    assert plan_of(row(task="lora"), lora, profile_of("gb300")).stack == "megatron-bridge-lora-26.06"
    with pytest.raises(CellError, match="allows lora"):
        plan_of(row(), lora, profile_of("gb300"))


def test_fine_tuning_of_all_weights_is_predicted_as_pre_training() -> None:
    bridge, profile = stack_of("megatron-bridge-26.08"), profile_of("gb300")
    assert plan_of(row(task="sft"), bridge, profile) == plan_of(row(), bridge, profile)
