import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moeplan.kernels.capacity import DropPolicy, expert_capacity, within_capacity

E = 4


def test_capacity_is_rounded_up() -> None:
    assert expert_capacity(4096, 8, 256, 1.0) == 128
    assert expert_capacity(10, 2, 8, 1.0) == 3
    assert expert_capacity(10, 2, 8, 2.0) == 5


def test_policies_of_a_case_done_by_hand() -> None:
    index_TK = torch.tensor([[0, 1], [0, 2], [0, 1]])
    probs_TK = torch.tensor([[0.1, 0.9], [0.4, 0.6], [0.8, 0.2]])
    assert within_capacity(index_TK, probs_TK, E, 1, "position").tolist() == [[0, 1], [E, 2], [E, E]]
    assert within_capacity(index_TK, probs_TK, E, 1, "probs").tolist() == [[E, 1], [E, 2], [0, E]]
    assert within_capacity(index_TK, probs_TK, E, 2, "probs").tolist() == [[E, 1], [0, 2], [0, 1]]


@pytest.mark.parametrize("policy", ["probs", "position"])
@given(st.data())
def test_each_expert_keeps_what_the_policy_prefers(policy: DropPolicy, data: st.DataObject) -> None:
    num_tokens, top_k = data.draw(st.integers(1, 9)), data.draw(st.integers(1, E))
    capacity = data.draw(st.integers(1, 5))
    index_TK = torch.tensor([data.draw(st.permutations(range(E)))[:top_k] for _ in range(num_tokens)])
    probs_TK = torch.tensor(
        data.draw(st.lists(st.integers(1, 9), min_size=num_tokens * top_k, max_size=num_tokens * top_k))
    ).view(num_tokens, top_k)
    kept = within_capacity(index_TK, probs_TK, E, capacity, policy).flatten().tolist()
    index, probs = index_TK.flatten().tolist(), probs_TK.flatten().tolist()
    for expert in range(E):
        slots = [slot for slot in range(len(index)) if index[slot] == expert]
        preferred = sorted(slots, key=lambda slot: -probs[slot]) if policy == "probs" else slots
        assert {slot for slot in slots if kept[slot] == expert} == set(preferred[:capacity])
        assert all(kept[slot] in (expert, E) for slot in slots)


def test_nothing_is_dropped_from_nothing() -> None:
    empty = torch.empty(0, 2, dtype=torch.int64)
    assert within_capacity(empty, torch.empty(0, 2), E, 1, "probs").shape == (0, 2)
