"""Backward ops of a part, made from its forward ops: the same graph with every edge turned round.

A linear layer becomes two GEMMs, data gradient and weight gradient; an exchange or a collective its mirror image.
Recomputed modules run their forward again first (report section 1.6).
"""

from collections.abc import Sequence
from dataclasses import replace

from moeplan.simulator.op import Op
from moeplan.simulator.op_shapes import OpShape
from moeplan.simulator.stack_time import StackTime

MAIN_GRAD_PASSES = 2  # a weight gradient is added to the main gradient: one read, one write


def predecessors(ops: Sequence[Op]) -> dict[str, tuple[str, ...]]:
    """Names each op waits for: its ``after``, or the op before it."""
    before: tuple[str, ...] = ()
    found: dict[str, tuple[str, ...]] = {}
    for op in ops:
        found[op.name] = before if op.after is None else op.after
        before = (op.name,)
    return found


def backward_ops(ops: Sequence[Op], shape: OpShape, stack: StackTime) -> list[Op]:
    """Recomputed forward ops, then the backward of every op, last first."""
    waits = predecessors(ops)
    followers: dict[str, list[str]] = {op.name: [] for op in ops}
    for name, earlier in waits.items():
        for before in earlier:
            followers[before].append(name)
    again = [replace(op, name=f"{op.name}.again", after=None) for op in ops if _is_recomputed(op, shape)]
    start: tuple[str, ...] = (again[-1].name,) if again else ()
    backward: list[Op] = []
    # Frozen weights have no gradient to wait for.
    linears = {op.name for op in ops if op.kind in ("gemm", "grouped_gemm") and not stack.trains_adapters}
    for op in reversed(ops):
        # An engine hands on a data gradient only when the weight gradient is launched too; a reduce-scatter over tp
        # alone starts before it.
        ends = ("dgrad",) if op.stream == "tp" else ("dgrad", "wgrad")
        after = tuple(
            f"{name}.{end}" for name in followers[op.name] for end in ends if end == "dgrad" or name in linears
        )
        backward += _backward(op, after or start, shape, stack)
    return [*again, *backward]


def _is_recomputed(op: Op, shape: OpShape) -> bool:
    if op.repeats:
        return True
    if "full" in shape.recompute:
        return op.scope != "outside"  # embedding, head and loss are never recomputed
    return not op.modules.isdisjoint(shape.recompute)


def _backward(op: Op, after: tuple[str, ...], shape: OpShape, stack: StackTime) -> list[Op]:
    name = f"{op.name}.dgrad"
    match op.kind:
        case "gemm" | "grouped_gemm":
            return _gemm_backward(op, after, shape, stack)
        case "attention":
            return [_attention_backward(op, name, after)]
        case "memory" | "gather":
            moved = op.backward_hbm_bytes
            kernels = op.backward_num_kernels or op.num_kernels
            return [replace(op, name=name, phase="dgrad", hbm_bytes=moved, num_kernels=kernels, after=after)]
        case "all_gather":
            return [replace(op, name=name, phase="dgrad", kind="reduce_scatter", after=after)]
        case "reduce_scatter":
            return [replace(op, name=name, phase="dgrad", kind="all_gather", after=after)]
        case "send_recv":  # keys and values pass again, with their gradients
            return [replace(op, name=name, phase="dgrad", comm_bytes=2 * op.comm_bytes, after=after)]
        case "exchange":
            inside, outside = op.comm_bytes - op.forward_comm_bytes, op.network_bytes - op.forward_network_bytes
            return [replace(op, name=name, phase="dgrad", comm_bytes=inside, network_bytes=outside, after=after)]
        case "all_reduce" | "all_to_all":
            return [replace(op, name=name, phase="dgrad", after=after)]


def _attention_backward(op: Op, name: str, after: tuple[str, ...]) -> Op:
    """Five GEMMs: the scores again, dP, dV, dQ, dK: 3 of the key width and 2 of the value width, over 1 and 1."""
    qk, v = op.qk_head_dim, op.v_head_dim
    flops = op.flops * (3 * qk + 2 * v) / (qk + v)
    return replace(op, name=name, phase="dgrad", flops=flops, hbm_bytes=op.backward_hbm_bytes, after=after)


def _gemm_backward(op: Op, after: tuple[str, ...], shape: OpShape, stack: StackTime) -> list[Op]:
    """Data gradient dY W^T: rows x inner over cols. Weight gradient X^T dY: inner x cols over rows."""
    data = replace(op, name=f"{op.name}.dgrad", phase="dgrad", cols=op.inner, inner=op.cols, after=after)
    if stack.trains_adapters:
        return [data]
    weights = op.num_groups * op.inner * op.cols
    is_paired = op.name in shape.paired_wgrad and stack.fused_grad_accumulation
    adds_frac = shape.paired_adds_frac if is_paired else 1.0  # of the micro-batches: one addition for two
    grads = MAIN_GRAD_PASSES * weights * shape.grad_bytes * adds_frac
    # A tile's gradients are added when its products are done, on top of either bound unless the machine overlaps that.
    # Outputs of this GEMM are the main gradients (or, unfused, a copy that is then added to them), not activations.
    unfused = 0.0 if stack.fused_grad_accumulation else 2 * weights * shape.element_bytes
    inputs = op.hbm_bytes - op.num_groups * op.rows * op.cols * shape.element_bytes
    moved = inputs + unfused
    copies = _copies(op, after, shape, stack)
    weight = replace(
        op,
        name=f"{op.name}.wgrad",
        phase="wgrad",
        rows=op.inner,
        inner=op.rows,
        hbm_bytes=moved,
        epilogue_hbm_bytes=grads,
        adds_fp32=stack.fused_grad_accumulation and shape.grad_dtype == "fp32",
        paired_frac=2 * (1 - adds_frac),
        after=tuple(one.name for one in copies) or after,
    )
    return [data, *copies, weight]


def _copies(op: Op, after: tuple[str, ...], shape: OpShape, stack: StackTime) -> list[Op]:
    """Input rows that wait as tokens: one copy of each is put aside, and all are made again for its partner.

    Not of quantized rows, which wait as they are.
    """
    tokens, rows = shape.own_tokens, op.rows * op.num_groups
    waits_as_tokens = shape.pairs_wait_as_tokens and shape.format.quantized_bytes is None
    if op.name != "expert_fc1" or not waits_as_tokens or rows <= tokens:
        return []
    waiting_frac = 1 - shape.paired_adds_frac  # of the micro-batches
    moved = waiting_frac * (3 * tokens + rows) * op.inner * shape.element_bytes * stack.permute_factor.value
    return [
        Op(
            name=f"{op.name}.copies",
            kind="gather",
            family="permute",
            phase="wgrad",
            segment=op.segment,
            scope=op.scope,
            hbm_bytes=moved,
            num_kernels=2 * waiting_frac,
            after=after,
        )
    ]
