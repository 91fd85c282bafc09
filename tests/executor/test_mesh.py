import pytest
from hypothesis import given
from hypothesis import strategies as st

from moeplan.executor.mesh import GROUP_AXES, build_mesh
from moeplan.folding import Folding


def test_a_world_of_one_needs_no_process_group() -> None:
    mesh = build_mesh(Folding(1), 0)
    for name, _, _ in GROUP_AXES:
        group = getattr(mesh, name)
        assert (group.ranks, group.index, group.process_group) == ((0,), 0, None)


@given(tp=st.sampled_from([1, 2]), dp=st.sampled_from([1, 2, 4]), etp=st.sampled_from([1, 2]), data=st.data())
def test_groups_are_those_of_the_folding(tp: int, dp: int, etp: int, data: st.DataObject) -> None:
    world_size = tp * dp
    if world_size % etp:
        etp = 1
    ep = data.draw(st.sampled_from([ep for ep in (1, 2, 4, 8) if world_size // etp % ep == 0]))
    folding = Folding(world_size, tp=tp, etp=etp, ep=ep)
    rank = data.draw(st.integers(0, world_size - 1))
    created: list[tuple[int, ...]] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("torch.distributed.new_group", lambda ranks: created.append(tuple(ranks)))
        mesh = build_mesh(folding, rank)
    for name, grid, axes in GROUP_AXES:
        group = getattr(mesh, name)
        assert group.ranks == folding.group(grid, axes, rank)
        assert group.ranks[group.index] == rank
    assert (mesh.cp_heads.ranks, mesh.cp_ring) == ((rank,), mesh.cp)
    assert len(created) == len(set(created)), "groups with the same members share a communicator"
    assert mesh.tp.size * mesh.dp_cp.size == mesh.etp_ep.size * mesh.edp.size == world_size


@pytest.mark.parametrize("cp_head_ranks", [1, 2, 4, 8])
def test_the_two_axes_of_a_context_group(cp_head_ranks: int) -> None:
    folding = Folding(32, tp=2, cp=8)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("torch.distributed.new_group", lambda ranks: ranks)
        meshes = [build_mesh(folding, rank, cp_head_ranks=cp_head_ranks) for rank in range(32)]
    for rank, mesh in enumerate(meshes):
        assert mesh.cp_heads.size == cp_head_ranks
        assert set(mesh.cp_heads.ranks) | set(mesh.cp_ring.ranks) <= set(mesh.cp.ranks)
        assert set(mesh.cp_heads.ranks) & set(mesh.cp_ring.ranks) == {rank}
        assert mesh.cp.index == mesh.cp_ring.index * cp_head_ranks + mesh.cp_heads.index, "neighbours split heads"
