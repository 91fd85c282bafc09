from collections.abc import Callable

import pytest
import torch

from moeplan.kernels import grouped_gemm as module
from moeplan.kernels.back_end_choice import choices, choose, chosen, forget
from moeplan.kernels.host_offsets import host_offsets, start_host_copy


@pytest.fixture(autouse=True)
def _nothing_chosen() -> None:
    forget()


def test_a_choice_holds_for_its_shape_alone() -> None:
    choose("grouped_gemm", (2, 3, 4), "by_expert")
    assert chosen("grouped_gemm", (2, 3, 4)) == "by_expert"
    assert chosen("grouped_gemm", (2, 4, 3)) is None
    assert choices() == {"grouped_gemm 2x3x4": "by_expert"}


def test_the_chosen_back_end_runs_each_product(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[tuple[str, tuple[int, ...]]] = []

    def product(name: str) -> Callable[..., torch.Tensor]:
        def run(x_TH: torch.Tensor, weight_EHF: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
            ran.append((name, tuple(weight_EHF.shape)))
            return x_TH @ weight_EHF[0]

        return run

    for name in ("one", "other"):
        monkeypatch.setitem(module.PRODUCTS, name, product(name))
    choose("grouped_gemm", (1, 2, 3), "one")
    choose("grouped_input_grad", (1, 2, 3), "other")
    x_TH, weight_EHF = torch.ones(1, 2, requires_grad=True), torch.ones(1, 2, 3)
    offsets_E = torch.tensor([1], dtype=torch.int32)
    module.grouped_gemm(x_TH, weight_EHF, offsets_E).sum().backward()
    module.grouped_gemm(x_TH, weight_EHF, offsets_E, backend="torch").sum().backward()
    assert ran == [("one", (1, 2, 3)), ("other", (1, 3, 2))]


@pytest.mark.gpu
def test_offsets_sent_ahead_arrive() -> None:
    offsets_E = torch.arange(4, device="cuda", dtype=torch.int32).cumsum(0).to(torch.int32)
    start_host_copy(offsets_E)
    offsets_E.zero_()
    assert host_offsets(offsets_E) == host_offsets(offsets_E) == (0, 1, 3, 6)


def test_offsets_are_read_once() -> None:
    offsets_E = torch.tensor([1, 3], dtype=torch.int32)
    start_host_copy(offsets_E)
    assert host_offsets(offsets_E) == (1, 3)
    offsets_E[0] = 2
    assert host_offsets(offsets_E) == (1, 3)
