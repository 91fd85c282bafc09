import torch
from hypothesis import given
from hypothesis import strategies as st

from moeplan.executor.dispatch import AllToAllDispatcher, inverse_order, sort_chunks
from moeplan.executor.mesh import build_mesh
from moeplan.folding import Folding


@given(st.data())
def test_sorting_chunks_is_undone_by_its_inverse(data: st.DataObject) -> None:
    sizes = tuple(data.draw(st.lists(st.integers(0, 4), min_size=1, max_size=8)))
    order = tuple(data.draw(st.permutations(range(len(sizes)))))
    x = torch.arange(sum(sizes), dtype=torch.float64).requires_grad_()
    chunk_of_row = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))
    mixed = sort_chunks(x, sizes, order)
    assert chunk_of_row[mixed.detach().long()].tolist() == [index for index in order for _ in range(sizes[index])]
    torch.testing.assert_close(sort_chunks(mixed, *inverse_order(sizes, order)), x)
    weights = torch.linspace(1, 2, len(x), dtype=torch.float64)
    (mixed * weights).sum().backward()
    torch.testing.assert_close(x.grad, sort_chunks(weights, *inverse_order(sizes, order)))


@given(num_tokens=st.integers(1, 9), seed=st.integers(0, 99))
def test_tokens_come_back_where_they_were(num_tokens: int, seed: int) -> None:
    num_experts, top_k = 5, 2
    generator = torch.Generator().manual_seed(seed)
    x_LH = torch.randn(num_tokens, 3, dtype=torch.float64, generator=generator)
    index_LK = torch.stack([torch.randperm(num_experts, generator=generator)[:top_k] for _ in range(num_tokens)])
    probs_LK = torch.rand(num_tokens, top_k, dtype=torch.float64, generator=generator)
    dispatcher = AllToAllDispatcher(build_mesh(Folding(1), 0), num_experts)
    arrived = dispatcher.dispatch(x_LH, index_LK, probs_LK)
    assert arrived.probs is not None
    expert_of_row = torch.searchsorted(arrived.offsets, torch.arange(num_tokens * top_k), right=True)
    assert torch.bincount(expert_of_row, minlength=num_experts).tolist() == (
        torch.bincount(index_LK.flatten(), minlength=num_experts).tolist()
    )
    scale_R = (1.0 + expert_of_row) * arrived.probs
    got = dispatcher.combine(arrived.rows * scale_R[:, None], arrived.routes, None)
    torch.testing.assert_close(got, x_LH * ((1.0 + index_LK) * probs_LK).sum(1, keepdim=True))
    weighed_after = dispatcher.dispatch(x_LH, index_LK, None)
    assert weighed_after.probs is None
    got = dispatcher.combine(weighed_after.rows, weighed_after.routes, probs_LK)
    torch.testing.assert_close(got, x_LH * probs_LK.sum(1, keepdim=True))
