"""What every dispatcher must do, against a dense computation in float64; a new one inherits Contract."""

import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import pytest
import torch
from torch import Tensor
from torch.autograd.functional import vjp

from moeplan.errors import InvalidInputError
from moeplan.executor.dispatch import DISPATCHERS
from moeplan.executor.dispatch_options import DispatchOptions
from moeplan.executor.exchange import combine, dispatch
from moeplan.executor.mesh import Mesh, build_mesh
from moeplan.folding import Folding
from moeplan.kernels.capacity import expert_capacity, within_capacity
from moeplan.kernels.grouped_gemm import grouped_gemm
from tests.executor import fake_deep_ep
from tests.executor.gloo_pool import GlooPool, gloo_pool

WORLD_SIZE = 4
NUM_EXPERTS, HIDDEN, FFN, NUM_TOKENS = 8, 4, 8, 6
TOLERANCE = 1e-9

# How tokens choose: by name, experts a token.
ROUTINGS = {"random": 3, "one expert takes all": 1, "a rank gets no token": 3, "one host each": 2, "few tokens": 2}


@dataclass(frozen=True)
class Case:
    """One exchange: who takes part, how tokens choose, whether copies are dropped or padded to a capacity."""

    etp: int
    ep: int
    routing: str
    probs_before_fc2: bool = True
    capacity: str = "none"
    ranks_per_host: int = 0

    @property
    def options(self) -> DispatchOptions:
        drops = self.capacity != "none"
        top_k, padded = ROUTINGS[self.routing], self.capacity == "pad"
        return DispatchOptions(NUM_EXPERTS, top_k, self.probs_before_fc2, drops, padded, 1.0)


@dataclass(frozen=True)
class Inputs:
    """Of all ranks, and weights of all experts."""

    x: Tensor
    probs: Tensor
    index: Tensor
    first: Tensor
    second: Tensor
    grad: Tensor


def inputs(case: Case) -> Inputs:
    generator = torch.Generator().manual_seed(len(case.routing) + case.ep)
    num_tokens, top_k = WORLD_SIZE * NUM_TOKENS, ROUTINGS[case.routing]

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    scores = torch.rand(num_tokens, NUM_EXPERTS, generator=generator)
    if case.routing == "one expert takes all":
        scores[:, 5] = 2
    elif case.routing == "a rank gets no token":
        scores[:, NUM_EXPERTS - NUM_EXPERTS // case.ep :] = -1
    elif case.routing == "one host each":
        half = torch.arange(num_tokens) % 2 * (NUM_EXPERTS // 2)
        scores.scatter_(1, half[:, None] + torch.arange(NUM_EXPERTS // 2), 2.0)
    index, probs = scores.topk(top_k, 1).indices, draw(num_tokens, top_k).abs()
    if case.routing == "few tokens":
        index[3:] = NUM_EXPERTS  # all but three dropped, so that some rank sends none
    if case.capacity != "none":
        capacity = expert_capacity(NUM_TOKENS, top_k, NUM_EXPERTS, 1.0)
        parts = zip(index.split(NUM_TOKENS), probs.split(NUM_TOKENS), strict=True)
        index = torch.cat([within_capacity(i, p, NUM_EXPERTS, capacity, "probs") for i, p in parts])
    weights = draw(NUM_EXPERTS, HIDDEN, FFN), draw(NUM_EXPERTS, FFN, HIDDEN)
    return Inputs(draw(num_tokens, HIDDEN), probs, index, *weights, draw(num_tokens, HIDDEN))


def dense(case: Case) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Outputs of all tokens, and gradients of tokens, probabilities and both weights: every expert for every token."""
    given = inputs(case)

    def run(x: Tensor, probs: Tensor, weight_EHF: Tensor, weight_EFH: Tensor) -> Tensor:
        weight_TE = probs.new_zeros(len(x), NUM_EXPERTS + 1).scatter(1, given.index, probs)[:, :-1]
        outputs = torch.einsum("teF,eFh->teh", torch.einsum("th,ehF->teF", x, weight_EHF) ** 2, weight_EFH)
        return torch.einsum("te,teh->th", weight_TE, outputs)

    result: tuple[Tensor, tuple[Tensor, ...]] = vjp(run, (given.x, given.probs, given.first, given.second), given.grad)
    return result


@lru_cache
def mesh_of(rank: int, etp: int, ep: int) -> Mesh:
    """Made once in each process: groups cost more than what is done with them here."""
    return build_mesh(Folding(WORLD_SIZE, etp=etp, ep=ep), rank)


def exchange_on(rank: int, name: str, case: Case) -> tuple[Tensor, ...]:
    """One rank's output and gradients; its parts of the weights' gradients lie in whole tensors of zeros."""
    sys.modules["deep_ep"] = fake_deep_ep
    os.environ["LOCAL_WORLD_SIZE"] = str(case.ranks_per_host)
    return exchange(rank, name, case, mesh_of(rank, case.etp, case.ep))


def exchange(rank: int, name: str, case: Case, mesh: Mesh) -> tuple[Tensor, ...]:
    given = inputs(case)
    own = slice(rank * NUM_TOKENS, (rank + 1) * NUM_TOKENS)
    num_local, width = NUM_EXPERTS // case.ep, FFN // case.etp
    experts = slice(mesh.ep.index * num_local, (mesh.ep.index + 1) * num_local)
    columns = slice(mesh.etp.index * width, (mesh.etp.index + 1) * width)
    x, probs = given.x[own].clone().requires_grad_(), given.probs[own].clone().requires_grad_()
    weight_EHF, weight_EFH = given.first.clone().requires_grad_(), given.second.clone().requires_grad_()
    dispatcher = DISPATCHERS[name](case.options, mesh)
    arrived, way = dispatch(dispatcher, x, given.index[own], probs)
    assert int(arrived.offsets[-1]) == len(arrived.rows)
    hidden = grouped_gemm(arrived.rows, weight_EHF[experts, :, columns], arrived.offsets, backend="reference") ** 2
    if case.probs_before_fc2:
        assert arrived.probs is not None
        hidden = hidden * arrived.probs[:, None]
    out = grouped_gemm(hidden, weight_EFH[experts, columns], arrived.offsets, backend="reference")
    y = combine(way, out, arrived, probs)
    y.backward(given.grad[own])
    grads = [tensor.grad for tensor in (x, probs, weight_EHF, weight_EFH)]
    return (y.detach(), *(torch.empty(0) if grad is None else grad for grad in grads))


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GlooPool]:
    with gloo_pool(WORLD_SIZE, tmp_path_factory.mktemp("gloo")) as pool:
        yield pool


class Contract:
    name: str

    def check(self, pool: GlooPool, case: Case) -> None:
        ranks = pool.run(exchange_on, self.name, case)
        y, (grad_x, grad_probs, *grad_weights) = dense(case)
        for part, whole in enumerate((y, grad_x, grad_probs)):
            got = torch.cat([result[part] for result in ranks])
            torch.testing.assert_close(got, whole, rtol=0, atol=TOLERANCE)
        for part, whole in enumerate(grad_weights, 3):
            got = torch.stack([result[part] for result in ranks]).sum(0)
            torch.testing.assert_close(got, whole, rtol=0, atol=TOLERANCE)

    @pytest.mark.parametrize("capacity", ["none", "drop", "pad"])
    @pytest.mark.parametrize("probs_before_fc2", [True, False])
    def test_equals_a_dense_computation(self, pool: GlooPool, capacity: str, probs_before_fc2: bool) -> None:
        self.check(pool, Case(2, 2, "random", probs_before_fc2, capacity))

    @pytest.mark.parametrize("routing", list(ROUTINGS))
    @pytest.mark.parametrize("etp,ep", [(1, 4), (2, 2), (4, 1)])
    def test_any_routing(self, pool: GlooPool, routing: str, etp: int, ep: int) -> None:
        capacity = "drop" if routing == "few tokens" else "none"
        self.check(pool, Case(etp, ep, routing, capacity=capacity))

    @pytest.mark.parametrize("routing", ["random", "one host each", "one expert takes all"])
    @pytest.mark.parametrize("etp,ep,ranks_per_host", [(1, 4, 2), (2, 2, 2), (1, 4, 1), (1, 4, 3)])
    def test_any_hosts(self, pool: GlooPool, routing: str, etp: int, ep: int, ranks_per_host: int) -> None:
        self.check(pool, Case(etp, ep, routing, probs_before_fc2=False, ranks_per_host=ranks_per_host))

    @pytest.mark.parametrize("etp,ep", [(1, 2), (2, 1)])
    def test_two_groups_side_by_side(self, pool: GlooPool, etp: int, ep: int) -> None:
        self.check(pool, Case(etp, ep, "a rank gets no token", capacity="pad", ranks_per_host=2))


class TestAllToAll(Contract):
    name = "alltoall"


class TestAllGather(Contract):
    name = "allgather"


class TestFlexTorch(Contract):
    name = "torch"


class TestDeepEp(Contract):
    name = "deepep"


class TestHybridEp(Contract):
    name = "hybridep"


def test_every_dispatcher_has_a_contract_test() -> None:
    assert {contract.name for contract in Contract.__subclasses__()} == set(DISPATCHERS)


@pytest.mark.parametrize("name", ["deepep", "hybridep"])
def test_a_missing_library_is_named(name: str) -> None:
    sys.modules.pop("deep_ep", None)
    options, mesh = Case(1, 1, "random").options, build_mesh(Folding(1), 0)
    with pytest.raises(InvalidInputError, match="flex_backend: the package deep_ep") as caught:
        DISPATCHERS[name](options, mesh)
    assert "flex_backend = 'torch'" in caught.value.hint


@pytest.mark.parametrize("name", ["alltoall", "allgather", "torch"])
@pytest.mark.parametrize("capacity", ["none", "drop", "pad"])
def test_one_rank_alone(name: str, capacity: str) -> None:
    """The first rank's tokens, whose experts are all its own."""
    case = Case(1, 1, "random", capacity=capacity)
    y, grad_x, grad_probs, *_ = exchange(0, name, case, build_mesh(Folding(1), 0))
    whole, grads = dense(case)
    for got, expected in ((y, whole), (grad_x, grads[0]), (grad_probs, grads[1])):
        torch.testing.assert_close(got, expected[:NUM_TOKENS], rtol=0, atol=TOLERANCE)
