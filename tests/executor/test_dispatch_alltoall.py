import torch
from hypothesis import given
from hypothesis import strategies as st

from moeplan.executor.dispatch_alltoall import inverse_order, sort_chunks


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
