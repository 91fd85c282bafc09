"""Placement of groups against the real rank order of both grids."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moeplan.folding import Folding, Mesh
from moeplan.hwprofiles.load import load_profile
from moeplan.plan import Plan
from moeplan.presets import load_model
from moeplan.simulator.op import Placement
from moeplan.simulator.rank_groups import block_size, group_placement, rank_groups

AXES: list[tuple[Mesh, tuple[str, ...]]] = [
    ("attention", ("tp",)),
    ("attention", ("cp",)),
    ("attention", ("cp", "dp")),
    ("expert", ("etp",)),
    ("expert", ("ep",)),
    ("expert", ("edp",)),
]
DEGREES = st.sampled_from([1, 2, 4])


def stride_of(folding: Folding, mesh: Mesh, axes: tuple[str, ...]) -> int:
    stride = 1
    for axis, size in folding.sizes(mesh).items():
        if axis in axes:
            return stride
        stride *= size
    raise AssertionError(axes)


FOLDINGS = st.builds(Folding, st.just(64), tp=DEGREES, cp=DEGREES, pp=DEGREES, etp=DEGREES, ep=DEGREES)


@given(folding=FOLDINGS, block=st.sampled_from([4, 8, 16, 64]))
def test_worst_group_is_that_of_the_folding(folding: Folding, block: int) -> None:
    for mesh, axes in AXES:
        groups = folding.groups(mesh, axes)
        worst = max(len({rank // block for rank in group}) for group in groups)
        placed = group_placement(64, len(groups[0]), stride_of(folding, mesh, axes), block)
        assert placed == Placement(len(groups[0]), worst)


@pytest.mark.parametrize("world, domain, block", [(256, 72, 64), (72, 72, 72), (1024, 8, 8), (4, 8, 4), (144, 72, 72)])
def test_jobs_take_equal_blocks_of_domains(world: int, domain: int, block: int) -> None:
    assert block_size(world, domain) == block


def test_ep64_of_the_report_lies_in_one_rack_and_stages_in_several(report_plan: Plan) -> None:
    groups = rank_groups(report_plan.point, load_profile("gb300"))
    assert groups.ep == Placement(64, 1)
    assert groups.edp == Placement(1, 1)
    assert groups.pp == Placement(2, 2)
    on_h100 = rank_groups(report_plan.point, load_profile("h100"))
    assert on_h100.ep == Placement(64, 8)


def test_heads_are_split_among_neighbours_and_the_ring_goes_on_from_them() -> None:
    plan = Plan(
        model=load_model("llama3-8b"), hardware="h100", num_gpus=16, seq_len=32_768, global_batch_size=16,
        tp=2, cp=8, cp_comm="a2a+p2p", cp_a2a_size=4,
    )  # fmt: skip
    groups = rank_groups(plan.point, load_profile("h100"))
    assert groups.cp == Placement(8, 2)
    assert groups.cp_heads == Placement(4, 1)
    assert groups.cp_ring == Placement(2, 2)
