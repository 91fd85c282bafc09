"""What every permutation back end must do; a new one inherits Contract."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from moeplan.kernels.permute import BACKENDS, permute, permute_probs, unpermute
from moeplan.kernels.row_map import RowMap, padded_row_map, row_map

E = 5
INDEX_TK = torch.tensor([[4, 0], [0, 2], [2, 4]])


@st.composite
def gaps(draw: st.DrawFn) -> RowMap:
    """A map with dropped copies, some with rows of padding."""
    index_TK = draw(routings())
    for slot in draw(st.lists(st.integers(0, index_TK.numel() - 1), min_size=1)):
        index_TK.view(-1)[slot] = E
    if draw(st.booleans()):
        return padded_row_map(index_TK, E, draw(st.integers(len(index_TK), len(index_TK) + 2)))
    rows = row_map(index_TK, E, has_gaps=True)
    return rows.first(int(rows.offsets_E[-1]))


@st.composite
def routings(draw: st.DrawFn) -> torch.Tensor:
    T, K = draw(st.integers(1, 7)), draw(st.integers(1, 4))
    return torch.tensor([draw(st.permutations(range(E)))[:K] for _ in range(T)])


def _inputs(rows: RowMap, H: int = 3) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    T, K = rows.row_of_slot_TK.shape
    generator = torch.Generator().manual_seed(T * K)
    shapes = ((T, H), (len(rows.slot_of_row_R), H), (T, K))
    x, r, p = (torch.randn(s, generator=generator, dtype=torch.float64).requires_grad_() for s in shapes)
    return x, r, p


def test_row_map_of_a_case_done_by_hand() -> None:
    rows = row_map(INDEX_TK, E)
    # Slots by expert: expert 0 slots 1, 2; expert 2 slots 3, 4; expert 4 slots 0, 5.
    assert rows.slot_of_row_R.tolist() == [1, 2, 3, 4, 0, 5]
    assert rows.token_of_row_R.tolist() == [0, 1, 1, 2, 0, 2]
    assert rows.row_of_slot_TK.tolist() == [[4, 0], [1, 2], [3, 5]]
    assert rows.offsets_E.tolist() == [2, 2, 4, 4, 6]
    assert rows.num_rows_E.tolist() == [2, 0, 2, 0, 2]
    assert {tensor.dtype for tensor in (rows.slot_of_row_R, rows.row_of_slot_TK, rows.offsets_E)} == {torch.int32}


@given(routings())
def test_row_map_is_a_stable_sort_and_its_inverse(index_TK: torch.Tensor) -> None:
    rows = row_map(index_TK, E)
    slots = rows.slot_of_row_R.tolist()
    experts = index_TK.flatten().tolist()
    assert slots == sorted(range(len(experts)), key=lambda slot: experts[slot])
    assert rows.row_of_slot_TK.flatten()[rows.slot_of_row_R.long()].tolist() == list(range(len(slots)))
    assert rows.num_rows_E.tolist() == [experts.count(expert) for expert in range(E)]


def test_dropped_copies_and_rows_of_padding_by_hand() -> None:
    index_TK = torch.tensor([[4, E], [0, 2], [E, 4]])
    rows = row_map(index_TK, E, has_gaps=True).first(4)
    assert rows.slot_of_row_R.tolist() == [2, 3, 0, 5]
    assert rows.row_of_slot_TK.tolist() == [[2, -1], [0, 1], [-1, 3]]
    padded = padded_row_map(index_TK, E, 2)
    assert padded.slot_of_row_R.tolist() == [2, -1, -1, -1, 3, -1, -1, -1, 0, 5]
    assert padded.token_of_row_R.tolist() == [1, -1, -1, -1, 1, -1, -1, -1, 0, 2]
    assert padded.row_of_slot_TK.tolist() == [[8, -1], [0, 4], [-1, 9]]
    assert padded.offsets_E.tolist() == [2, 4, 6, 8, 10]


# A contract test runs once per back end, in a class of its own each time; examples do not depend on the class.
contract = settings(suppress_health_check=[HealthCheck.differing_executors])


class Contract:
    backend: str

    @contract
    @given(routings())
    def test_each_row_is_its_token(self, index_TK: torch.Tensor) -> None:
        rows = row_map(index_TK, E)
        x_TH, _, probs_TK = _inputs(rows)
        rows_RH = permute(x_TH, rows, backend=self.backend)
        probs_R = permute_probs(probs_TK, rows, backend=self.backend)
        for row, slot in enumerate(rows.slot_of_row_R.tolist()):
            token, choice = divmod(slot, index_TK.shape[1])
            assert torch.equal(rows_RH[row], x_TH[token])
            assert probs_R[row] == probs_TK[token, choice]

    @contract
    @given(routings())
    def test_there_and_back_gives_each_token_times_its_probabilities(self, index_TK: torch.Tensor) -> None:
        rows = row_map(index_TK, E)
        x_TH, _, probs_TK = _inputs(rows)
        rows_RH = permute(x_TH, rows, backend=self.backend)
        torch.testing.assert_close(unpermute(rows_RH, rows, backend=self.backend), x_TH * index_TK.shape[1])
        weighted_TH = unpermute(rows_RH, rows, probs_TK, backend=self.backend)
        torch.testing.assert_close(weighted_TH, x_TH * probs_TK.sum(1, keepdim=True))

    @contract
    @given(routings())
    def test_gradients_are_exact(self, index_TK: torch.Tensor) -> None:
        self.check_gradients(index_TK)

    @contract
    @given(gaps())
    def test_gradients_around_gaps_are_exact(self, rows: RowMap) -> None:
        self.check_gradients_of(rows)

    def check_gradients(self, index_TK: torch.Tensor) -> None:
        self.check_gradients_of(row_map(index_TK, E))

    def check_gradients_of(self, rows: RowMap) -> None:
        x_TH, rows_RH, probs_TK = _inputs(rows)
        assert torch.autograd.gradcheck(lambda x: permute(x, rows, backend=self.backend), (x_TH,))
        assert torch.autograd.gradcheck(lambda r: unpermute(r, rows, backend=self.backend), (rows_RH,))
        assert torch.autograd.gradcheck(lambda r, p: unpermute(r, rows, p, backend=self.backend), (rows_RH, probs_TK))
        assert torch.autograd.gradcheck(lambda p: permute_probs(p, rows, backend=self.backend), (probs_TK,))

    @contract
    @given(gaps())
    def test_gaps_are_zero_and_take_no_part(self, rows: RowMap) -> None:
        x_TH, rows_RH, probs_TK = _inputs(rows)
        slots = rows.slot_of_row_R.tolist()
        sent_RH = permute(x_TH, rows, backend=self.backend)
        probs_R = permute_probs(probs_TK, rows, backend=self.backend)
        top_k = probs_TK.shape[1]
        sent, weights = (
            torch.stack([x[slot // k] if slot >= 0 else torch.zeros_like(x[0]) for slot in slots]) if slots else x[:0]
            for x, k in ((x_TH, top_k), (probs_TK.flatten(), 1))
        )
        assert torch.equal(sent_RH, sent)
        assert torch.equal(probs_R, weights)
        got_TH = unpermute(rows_RH, rows, probs_TK, backend=self.backend)
        expected_TH = torch.zeros_like(x_TH)
        for row, slot in enumerate(slots):
            if slot >= 0:
                expected_TH[slot // top_k] += rows_RH[row] * probs_TK.flatten()[slot]
        torch.testing.assert_close(got_TH, expected_TH)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_the_dtype_of_the_rows_is_kept(self, dtype: torch.dtype) -> None:
        rows = row_map(INDEX_TK, E)
        x_TH = torch.ones(3, 8, dtype=dtype, requires_grad=True)
        rows_RH = permute(x_TH, rows, backend=self.backend)
        y_TH = unpermute(rows_RH, rows, torch.full((3, 2), 0.25), backend=self.backend)
        y_TH.sum().backward()
        assert y_TH.dtype == rows_RH.dtype == dtype
        assert x_TH.grad is not None
        assert x_TH.grad.dtype == dtype
        assert y_TH.unique().tolist() == x_TH.grad.unique().tolist() == [0.5]

    def test_no_rows_at_all(self) -> None:
        rows = row_map(torch.empty(0, 2, dtype=torch.int64), E)
        x_TH = torch.empty(0, 8, requires_grad=True)
        y_TH = unpermute(permute(x_TH, rows, backend=self.backend), rows, backend=self.backend)
        y_TH.sum().backward()
        assert y_TH.shape == (0, 8)
        assert rows.offsets_E.tolist() == [0] * E


class TestReference(Contract):
    backend = "reference"


class TestTorch(Contract):
    backend = "torch"

    def test_unpermute_without_probabilities_keeps_only_indices(self) -> None:
        rows = row_map(INDEX_TK, E)
        saved: list[torch.Tensor] = []

        def keep(tensor: torch.Tensor) -> torch.Tensor:
            saved.append(tensor)
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            unpermute(torch.ones(6, 8, requires_grad=True), rows, backend="torch")
        assert [tensor.dtype for tensor in saved] == [torch.int32]


@pytest.mark.skipif(torch.cuda.is_available(), reason="compiled for the GPU: test_on_gpu.py")
class TestTriton(Contract):
    backend = "triton"

    def test_gradients_are_exact(self) -> None:
        """One case: the interpreter takes a second or two for each."""
        self.check_gradients(INDEX_TK)

    def test_gradients_around_gaps_are_exact(self) -> None:
        self.check_gradients_of(padded_row_map(torch.tensor([[4, E], [0, 2]]), E, 1))


def test_every_back_end_has_a_contract_test() -> None:
    assert {contract.backend for contract in Contract.__subclasses__()} == set(BACKENDS)
