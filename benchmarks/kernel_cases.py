"""What every back end of every operation runs at the shapes of one model and micro-batch, and the work that is in it.

FLOPs and bytes are those the operation cannot do without: each operand read or written once, forward and backward.

Shapes: T tokens, K experts a token, R = T K rows, E experts, H hidden, F expert width, G = 2 F (gated), V vocabulary,
B sequences of S tokens, O heads of a projection, D width of a head.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as Fn

from moeplan.executor.expert_tuning import ExpertProduct, together
from moeplan.kernels import activation, adam, cross_entropy, permute, split_qkv
from moeplan.kernels.norm import residual_rms_norm, rms_norm
from moeplan.kernels.rotary import rotary_tables
from moeplan.kernels.router import RouterOptions, Routing, route, route_reference
from moeplan.kernels.row_map import RowMap, row_map
from moeplan.kernels.weight_grad_pairs import Operands
from moeplan.mixers import GqaAttention
from moeplan.model_spec import Moe
from moeplan.plan import Plan

BF16, FP32 = 2, 4
Run = Callable[[], object]
ADAM_ELEMENTS = 1 << 28


@dataclass(frozen=True)
class Case:
    """One operation at one shape: what each back end runs, and its work."""

    operation: str
    shape: str
    runs: Mapping[str, Run]
    num_flops: float
    num_bytes: float


def cases(plan: Plan, device: torch.device) -> Iterator[Case]:
    """Cases of the plan's model, one after the other, so that each may take all memory."""
    torch.manual_seed(0)
    assert plan.model.moe is not None
    yield from _expert_cases(plan, plan.model.moe, device)
    yield from _row_cases(plan, plan.model.moe, device)
    yield from _token_cases(plan, device)


def _normal(device: torch.device, *shape: int, grad: bool = False) -> Tensor:
    return torch.randn(shape, device=device, dtype=torch.bfloat16).requires_grad_(grad)


def _both_ways(function: Callable[..., Tensor | Sequence[Tensor]], inputs: Sequence[Tensor]) -> Run:
    """Forward, and the gradients of ``inputs`` for random ones of the output."""
    first = function(*inputs)
    outputs = [first] if isinstance(first, Tensor) else list(first)
    directions = [torch.randn_like(one) for one in outputs]

    def run() -> object:
        return torch.autograd.grad(function(*inputs), inputs, directions)

    return run


def _rows(plan: Plan, moe: Moe, device: torch.device) -> RowMap:
    index_TK = torch.rand(plan.tokens_per_rank, moe.num_experts, device=device).topk(moe.top_k).indices
    return row_map(index_TK, moe.num_experts)


def _expert_cases(plan: Plan, moe: Moe, device: torch.device) -> Iterator[Case]:
    """Both matrices of the experts: forward with input gradient, and weight gradients of one and two micro-batches."""
    E, H, F, R = moe.num_experts, plan.model.expert_hidden_size, moe.expert_ffn_size, plan.tokens_per_rank * moe.top_k
    for width, out in ((H, F * (plan.model.mlp_matrices - 1)), (F, H)):
        shape, weights, num_flops = f"{E} x {R // E}, {width} x {out}", E * width * out, 2.0 * R * width * out
        product = ExpertProduct((E, width, out), R, device, num_micro_batches=2)
        runs = together([product.forward(), product.input_gradient()])
        moved = 2 * BF16 * (R * (width + out) + weights)
        yield Case("experts: forward and input gradient", shape, runs, 2 * num_flops, moved)
        for count, what in ((1, "weight gradient"), (2, "weight gradients of a pair")):
            moved = 2 * FP32 * weights + count * BF16 * R * (width + out)
            yield Case(f"experts: {what}", shape, product.additions(count), count * num_flops, moved)
        del product, runs  # before the next is made


def _row_cases(plan: Plan, moe: Moe, device: torch.device) -> Iterator[Case]:
    """What experts need beside their GEMMs."""
    T, H, F, K, E = plan.tokens_per_rank, plan.model.expert_hidden_size, moe.expert_ffn_size, moe.top_k, moe.num_experts
    rows, model = _rows(plan, moe, device), plan.model
    R, G = T * K, F * (model.mlp_matrices - 1)
    options = RouterOptions(K)
    logits = torch.randn((T, E), device=device, requires_grad=True)
    ways: dict[str, Callable[..., Sequence[Tensor]]] = {
        "triton" if device.type == "cuda" else "torch": lambda x: _weights(route(x, options)),
        "reference": lambda x: _weights(route_reference(x, options)),
    }
    runs = {name: _both_ways(way, [logits]) for name, way in ways.items()}
    yield Case("routing", f"{T} x {E}, {K}", runs, 0, 5 * FP32 * T * E)
    moved = BF16 * 2 * (T + R) * H
    copied = {
        name: _both_ways(partial(permute.permute, rows=rows, backend=name), [_normal(device, T, H, grad=True)])
        for name in ("torch", "triton")
    }
    yield Case("rows copied, and their gradients summed", f"{T} x {K}, {H}", copied, 0, moved)
    del copied
    summed = {
        name: _both_ways(partial(permute.unpermute, rows=rows, backend=name), [_normal(device, R, H, grad=True)])
        for name in ("torch", "triton")
    }
    yield Case("rows summed, and their gradient copied", f"{T} x {K}, {H}", summed, 0, moved)
    del summed
    yield _waiting_case(Operands(_normal(device, R, H), _normal(device, R, F), rows.offsets_E, rows), rows)
    hidden, probs = _normal(device, R, G, grad=True), torch.rand(R, device=device, requires_grad=True)

    def act(name: str) -> Callable[..., Tensor]:
        return lambda x, p: activation.activation(x, model.activation, p, backend=name)

    acts = {name: _both_ways(act(name), [hidden, probs]) for name in ("torch", "triton")}
    yield Case("activation", f"{R} x {G}", acts, 0, BF16 * R * (3 * G + 2 * F))


def _waiting_case(operands: Operands, rows: RowMap) -> Case:
    """What pairs of weight gradients cost where a micro-batch's rows wait as tokens."""
    (T, K), (R, H) = rows.row_of_slot_TK.shape, operands.x_TH.shape
    runs = {"triton" if rows.offsets_E.is_cuda else "torch": lambda: operands.put_aside().brought_back()}
    return Case("rows put aside as tokens, and copied again", f"{T} x {K}, {H}", runs, 0, BF16 * (3 * T + R) * H)


def _weights(routing: Routing) -> list[Tensor]:
    assert routing.share_TE is not None
    return [routing.probs_TK, routing.share_TE]


def _residual_case(T: int, H: int, device: torch.device) -> Case:
    """A sum of the residual stream, its norm, and the gradients of both."""
    inputs = [_normal(device, T, H, grad=True), _normal(device, T, H, grad=True), _normal(device, H, grad=True)]

    def apart(x: Tensor, update: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        total = x + update
        return total, rms_norm(total, weight, 1e-6)

    fused = _both_ways(lambda x, update, weight: residual_rms_norm(x, update, weight, 1e-6), inputs)
    return Case("residual sum and norm", f"{T} x {H}", {"one": fused, "apart": _both_ways(apart, inputs)}, 0,
                BF16 * 8 * T * H)  # fmt: skip


def _token_cases(plan: Plan, device: torch.device) -> Iterator[Case]:
    """What tokens meet outside the experts."""
    T, H, V, attention = plan.tokens_per_rank, plan.model.hidden_size, plan.model.vocab_size, plan.model.attention
    x, weight = _normal(device, T, H, grad=True), _normal(device, H, grad=True)
    norms: dict[str, Callable[..., Tensor]] = {
        "triton" if device.type == "cuda" else "torch": lambda x, w: rms_norm(x, w, 1e-6),
        "torch.nn.functional": lambda x, w: Fn.rms_norm(x, (H,), w, 1e-6),
    }
    runs = {name: _both_ways(norm, [x, weight]) for name, norm in norms.items()}
    yield Case("norm", f"{T} x {H}", runs, 0, BF16 * 5 * T * H)
    yield _residual_case(T, H, device)
    if isinstance(attention, GqaAttention):
        yield from _qkv_cases(plan, attention, device)
    logits, target = _normal(device, T, V), torch.randint(V, (T,), device=device)

    def entropy(name: str) -> object:
        highest_T, sum_T, _ = cross_entropy.logit_stats(logits, target, backend=name)
        log_sum_T = highest_T + sum_T.log()
        return cross_entropy.logit_gradient_(logits, log_sum_T, torch.ones_like(log_sum_T), target, backend=name)

    losses = {name: partial(entropy, name) for name in cross_entropy.BACKENDS}
    yield Case("cross entropy", f"{T} x {V}", losses, 0, BF16 * 3 * T * V)
    size = ADAM_ELEMENTS if device.type == "cuda" else 1 << 12
    main, grad, first, second = torch.rand((4, size), device=device)
    flats, weight = (grad, first, second, torch.full((), 7.0, device=device)), main.bfloat16()
    remainder = torch.zeros_like(weight, dtype=torch.int16)
    for title, state, num_bytes in (
        ("Adam", adam.AdamState(main, *flats, weight), 30),
        ("Adam, main weights in halves", adam.AdamState(weight.clone(), *flats, remainder_N=remainder), 28),
    ):
        steps = {
            name: partial(adam.adam_, state, adam.AdamOptions(1e-6, 0.9, 0.95, 1e-8, 0.1), backend=name)
            for name in ("torch", "triton")
        }
        yield Case(title, f"{size}", steps, 0, num_bytes * size)


def _qkv_cases(plan: Plan, attention: GqaAttention, device: torch.device) -> Iterator[Case]:
    """Splitting the projection, with norms of queries and keys and without."""
    D, N, M, S = attention.head_dim, attention.num_heads, attention.num_kv_heads, plan.seq_len
    tables = rotary_tables(torch.arange(S, device=device), D, plan.model.rope_theta)
    qkv = _normal(device, plan.mbs, S, N + 2 * M, D, grad=True)
    norms = [_normal(device, D, grad=True) for _ in range(2)]

    def split(name: str) -> Callable[..., Sequence[Tensor]]:
        def run(qkv: Tensor, *norms: Tensor) -> Sequence[Tensor]:
            pair = (norms[0], norms[1]) if norms else None
            return split_qkv.split_qkv(qkv, M, tables, pair, 1e-6, backend=name)

        return run

    for inputs, what in (([qkv], "rotation"), ([qkv, *norms], "norm and rotation")):
        runs = {name: _both_ways(split(name), inputs) for name in ("torch", "triton")}
        turned = BF16 * plan.mbs * S * (N + M) * D
        values = BF16 * plan.mbs * S * M * D
        moved = 4 * turned + 4 * values if len(inputs) == 1 else 5 * turned + 2 * values
        yield Case(f"{what} of queries and keys", f"{plan.mbs} x {S} x {N} + {M}, {D}", runs, 0, moved)
