"""Names of tables in other spellings are those names; what nobody knows is refused with its column."""

import pytest

from moeplan.planner.published_names import (
    backend_name,
    find_stack,
    hardware_name,
    parts_of,
    precision_name,
    routing_name,
)
from moeplan.planner.published_rows import CellError, PublishedRow


def row(**cells: str) -> PublishedRow:
    """A row of these cells alone."""
    return PublishedRow(2, cells)


@pytest.mark.parametrize(
    "written, found",
    [
        ("megatron-bridge-26.08", "megatron-bridge-26.08"),
        ("Megatron-Bridge 26.08", "megatron-bridge-26.08"),
        ("megatron-bridge-26.04.01", "megatron-bridge-26.04"),
        ("megatron-bridge-27.01", "megatron-bridge-26.08"),
        ("dgxc-v25.12", "dgxc-25.08"),
        ("torchtitan-2024.10", "torchtitan-2024.12"),  # before the first
        ("megatron-lm-2024.06", "megatron-lm-2025.04"),  # that of 2022 has unfused attention
        ("megatron-lm-2022.05", "megatron-lm-2022"),
    ],
)
def test_a_release_runs_as_the_last_earlier_stack(written: str, found: str) -> None:
    assert find_stack(written) == found


@pytest.mark.parametrize("written", ["hai-llm-2024", "", "megatron-bridge", "bridge-26.08", "megatron-bridge-"])
def test_engines_without_a_stack_are_refused(written: str) -> None:
    with pytest.raises(CellError, match="no stack of"):
        find_stack(written)


@pytest.mark.parametrize(
    "written, found",
    [
        ("H100", "h100"),
        ("NVIDIA H100 SXM5 80GB HBM3", "h100"),
        ("HGX-H200-141GB", "h200"),
        ("GB200 NVL72", "gb200"),
        ("H100-96GB-500W", "h100-96gb-500w"),
    ],
)
def test_machines_by_the_names_their_vendors_give_them(written: str, found: str) -> None:
    assert hardware_name(row(gpu=written)) == found


@pytest.mark.parametrize("written", ["MI300X", "H100 PCIe", "H100 NVL", "H100 64GB", "GH200", "nvidia", ""])
def test_other_machines_are_not_taken_for_their_neighbours(written: str) -> None:
    with pytest.raises(CellError, match="no hardware profile"):
        hardware_name(row(gpu=written))


@pytest.mark.parametrize(
    "written, found",
    [("BF16", "bf16"), ("FP8-CS", "fp8_current"), ("fp8 sc", "fp8_blockwise"), ("FP8-MX", "mxfp8"), ("NVFP4", "nvfp4")],
)
def test_precisions_as_recipes_name_them(written: str, found: str) -> None:
    assert precision_name(row(precision=written)) == found


def test_fp8_without_a_recipe_is_no_precision() -> None:
    with pytest.raises(CellError, match="fp8_current"):
        precision_name(row(precision="fp8"))


@pytest.mark.parametrize(
    "written, found",
    [
        ("", None),
        ("DeepEP", "deepep"),
        ("all-to-all", "alltoall"),
        ("flex:hybridep", "hybridep"),
        ("Hybrid-EP", "hybridep"),
    ],
)
def test_dispatchers(written: str, found: str | None) -> None:
    assert backend_name(written) == found


def test_flex_alone_names_no_back_end() -> None:
    with pytest.raises(CellError, match="allowed"):
        backend_name("flex")


def test_routings_and_lists() -> None:
    routings = ["", "forced balance", "token-drop CF=1.0 padded", "Natural, capacity 1.1"]
    assert [routing_name(one) for one in routings] == ["balanced", "balanced", "drop", "natural"]
    assert parts_of("moe_act, mlp+layernorm") == ("moe_act", "mlp", "layernorm")


def test_words_for_an_empty_cell_and_for_yes_and_no() -> None:
    cells = row(vp="n/a", ep_overlap="True", delay_wgrad="no", tp_comm_overlap="unknown")
    assert cells.count("vp", 1) == 1
    assert [cells.flag(name) for name in ("ep_overlap", "delay_wgrad", "tp_comm_overlap")] == [True, False, None]
