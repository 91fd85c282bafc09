"""Rank grids of both meshes."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moeplan.errors import InvalidInputError
from moeplan.folding import AXES, Folding

degrees = st.sampled_from([1, 2, 3, 4])


@st.composite
def foldings(draw: st.DrawFn) -> Folding:
    """Foldings of up to a few hundred ranks whose degrees multiply out."""
    tp, cp, dp, pp = (draw(degrees) for _ in range(4))
    stage = tp * cp * dp
    etp = draw(st.sampled_from([value for value in range(1, stage + 1) if stage % value == 0]))
    rest = stage // etp
    ep = draw(st.sampled_from([value for value in range(1, rest + 1) if rest % value == 0]))
    return Folding(stage * pp, tp=tp, cp=cp, pp=pp, etp=etp, ep=ep)


@given(foldings())
def test_groups_of_every_axis_partition_the_world(folding: Folding) -> None:
    for mesh, axes in AXES.items():
        sizes = folding.sizes(mesh)
        for axis in axes:
            groups = folding.groups(mesh, (axis,))
            assert sorted(rank for group in groups for rank in group) == list(range(folding.world_size))
            assert {len(group) for group in groups} == {sizes[axis]}


@given(foldings())
def test_both_meshes_multiply_out_and_share_the_pipeline(folding: Folding) -> None:
    assert folding.tp * folding.cp * folding.dp == folding.etp * folding.ep * folding.edp == folding.stage_size
    assert folding.groups("attention", ("pp",)) == folding.groups("expert", ("pp",))


@given(foldings())
def test_coordinates_place_each_rank_in_its_own_group(folding: Folding) -> None:
    for mesh, axes in AXES.items():
        for rank in range(folding.world_size):
            position = folding.coordinates(mesh, rank)
            for axis in axes:
                assert folding.group(mesh, (axis,), rank)[position[axis]] == rank


def test_worked_example_of_the_report() -> None:
    """Report section 4.1: 256 ranks, TP4 CP2 DP8 PP4 folded to ETP1 EP64 EDP1."""
    folding = Folding(256, tp=4, cp=2, pp=4, ep=64)
    assert (folding.dp, folding.edp, folding.stage_size) == (8, 1, 64)
    assert folding.group("attention", ("tp",), 5) == (4, 5, 6, 7)
    assert folding.group("attention", ("cp",), 5) == (1, 5)
    assert folding.group("attention", ("dp",), 5) == tuple(range(5, 64, 8))
    assert folding.group("attention", ("dp", "cp"), 5) == tuple(range(1, 64, 4))
    assert folding.group("expert", ("ep",), 70) == tuple(range(64, 128))


@pytest.mark.parametrize("degrees", [{"tp": 3}, {"ep": 3}, {"pp": 5}, {"tp": 0}])
def test_degrees_that_do_not_multiply_out_are_refused(degrees: dict[str, int]) -> None:
    with pytest.raises(InvalidInputError, match=next(iter(degrees))):
        Folding(8, **degrees)
