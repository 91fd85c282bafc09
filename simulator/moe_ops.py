"""Forward ops of the Mixture-of-Experts block: shared expert, router, permute, exchange, grouped GEMMs (report 2.2)."""

from dataclasses import replace
from math import log2
from typing import Literal

from moeplan.model_spec import Moe
from moeplan.simulator.dispatch import (
    LIBRARIES,
    PROBABILITY_BYTES,
    ExchangeBytes,
    exchange_bytes,
    expected_distinct_bins,
    routed_load,
    routing_map_bytes,
)
from moeplan.simulator.echo import clone_elements, levelled_load
from moeplan.simulator.layer_builder import ACTIVATION_BACKWARD, NORM_BACKWARD, LayerBuilder
from moeplan.simulator.op import Op, Segment
from moeplan.vocabulary import RecomputeModule

# Mask, sort, index and scatter kernels of a permutation without its fused kernel. Router and preprocess: 72 kernels, 31
# with the fused router, 17 where the flex dispatcher does the preprocess (report section 3.3).
UNFUSED_PERMUTE_KERNELS, UNFUSED_ROUTER_KERNELS, ALLTOALL_PREPROCESS_KERNELS = 10, 72 - 31, 31 - 17
# Beyond other recipes an expert's rows take the magnitudes of their Hadamard transform, then one cast by rows and one
# by columns (Transformer Engine, csrc/quantizer.cpp, NVFP4Quantizer).
NVFP4_LAUNCHES = 2


def _shared_expert(build: LayerBuilder, moe: Moe) -> tuple[list[Op], list[Op]]:
    """Ops of the shared expert up to its second matrix, and the rest."""
    if not moe.shared_ffn_size:
        return [], []
    model, shape = build.model, build.shape
    hidden, tokens = model.hidden_size, shape.gathered_tokens
    width, gates = moe.shared_ffn_size / shape.tp, model.mlp_matrices - 1
    modules: tuple[RecomputeModule, ...] = ("shared_experts", "moe")
    first = [
        *build.tp_collective("all_gather", "shared_all_gather", hidden, "router"),
        *build.quantize(
            "shared.quantize",
            (tokens * (hidden + width), tokens * (gates * width + hidden)),
            "elementwise",
            "before",
            "router",
        ),
        build.gemm("shared_fc1", (tokens, gates * width, hidden), scope="router", modules=modules),
        build.memory("shared_act", (gates + 1) * tokens * width, ACTIVATION_BACKWARD, scope="router", modules=modules),
    ]
    second = [
        build.gemm("shared_fc2", (tokens, hidden, width), scope="router", modules=modules),
        *build.tp_collective("reduce_scatter", "shared_reduce_scatter", hidden, "router"),
    ]
    return first, second


def _beside_exchanges(
    shared: tuple[list[Op], list[Op]], to_experts: list[Op], experts: list[Op], from_experts: list[Op]
) -> list[Op]:
    """The shared expert on its own stream: its first part beside the dispatch, the second beside the combine.

    Report section 2.6. Ops wait for their own chain instead of the op before them; graphs do not hold them then.
    """
    dispatch = next(at for at, op in enumerate(to_experts) if op.name == "dispatch")
    combine = next(at for at, op in enumerate(from_experts) if op.name == "combine")
    before, after = to_experts[:dispatch], from_experts[combine:]
    first, second = ([replace(op, scope="moe") for op in part] for part in shared)
    first[0] = replace(first[0], after=("router",))
    second[0] = replace(second[0], after=(first[-1].name,))
    waited_for = before[-1].name if before else "router"
    inside = [replace(to_experts[dispatch], after=(waited_for,)), *to_experts[dispatch + 1 :], *experts]
    inside += from_experts[:combine]
    after[0] = replace(after[0], after=(inside[-1].name,))
    return [*before, *first, *inside, *second, *after]


def moe_ops(build: LayerBuilder, moe: Moe) -> list[Op]:
    """Forward ops of the Mixture-of-Experts block, its norm and residual included."""
    model, shape, stack = build.model, build.shape, build.stack.time
    hidden, own = model.hidden_size, shape.own_tokens
    logits_bytes = own * moe.num_experts * 4
    router_kernels = Op(
        name="router",
        kind="memory",
        family="router",
        # fp32 scores: written by the GEMM, read and written by scoring and top-k, read by the auxiliary loss.
        hbm_bytes=4 * logits_bytes,
        backward_hbm_bytes=4 * logits_bytes,
        num_kernels=stack.router_kernels.value
        + (0 if shape.router_fusion else UNFUSED_ROUTER_KERNELS)
        + (0 if shape.backend in LIBRARIES else ALLTOALL_PREPROCESS_KERNELS),
        scope="router",
        modules=frozenset(("moe",)),
    )
    shared, routed = (
        _shared_expert(build, moe),
        (_to_experts(build, moe), _experts(build, moe), _from_experts(build, moe)),
    )
    overlaps = shape.shared_expert_overlap and shape.ep > 1 and bool(shared[0])
    ends = (routed[2][-1].name, shared[1][-1].name) if overlaps else None
    return [
        build.memory("pre_mlp_norm", 2 * own * hidden, NORM_BACKWARD, scope="router", modules=("layernorm",)),
        *([] if overlaps else [*shared[0], *shared[1]]),
        build.gemm("router_proj", (own, moe.num_experts, hidden), "router", plain=True, scope="router"),
        router_kernels,
        *(_beside_exchanges(shared, *routed) if overlaps else [*routed[0], *routed[1], *routed[2]]),
        build.memory("moe_residual", 3 * own * hidden, 1 / 3, segment="after", scope="moe", after=ends),
    ]


def _gathering(build: LayerBuilder, moe: Moe, name: str, segment: Segment) -> list[Op]:
    """Dispatch or combine of the all-gather dispatcher: every token, with its probabilities, on every rank."""
    shape = build.shape
    row_bytes = build.model.expert_hidden_size * shape.element_bytes
    if segment == "dispatch":
        row_bytes += PROBABILITY_BYTES * moe.top_k
    return [
        Op(
            name=name,
            kind="all_gather" if segment == "dispatch" else "reduce_scatter",
            family="dispatch",
            stream="dispatch",
            segment=segment,
            scope="moe",
            comm_bytes=shape.own_tokens * shape.etp_ep_group.num_ranks * row_bytes,
            group=shape.etp_ep_group,
            modules=frozenset(("moe",)),
        )
    ]


def _exchange(build: LayerBuilder, moe: Moe, name: str, segment: Segment) -> list[Op]:
    """Dispatch or combine; alltoall with etp > 1 adds a collective over the expert tensor-parallel group."""
    if build.shape.backend == "allgather":
        return _gathering(build, moe, name, segment)
    shape, hidden = build.shape, build.model.expert_hidden_size
    token_bytes = hidden * shape.element_bytes
    load = _load(build)
    wait_s = 0.0 if shape.is_device_driven else build.stack.time.exchange_wait_s.value * log2(max(shape.ep, 2))
    sent = exchange_bytes(moe, shape.own_tokens * load, token_bytes, shape.backend, shape.ep_group, etp=shape.etp)
    known = ExchangeBytes(0.0, 0.0)
    if segment == "dispatch":
        known = routing_map_bytes(moe, shape.own_tokens, shape.backend, shape.etp_ep_group)
    ops = []
    if shape.ep > 1 or shape.backend != "alltoall":
        ops.append(
            Op(
                name=name,
                kind="exchange",
                family="dispatch",
                stream="dispatch",
                segment=segment,
                scope="moe",
                comm_bytes=sent.scale_up + known.scale_up,
                network_bytes=sent.network + known.network,
                forward_comm_bytes=known.scale_up,
                forward_network_bytes=known.network,
                wait_s=wait_s,
                backend=shape.backend,
                group=shape.ep_group,
                modules=frozenset(("moe",)),
            )
        )
    if shape.etp > 1 and shape.backend == "alltoall":
        gathered = shape.own_tokens * moe.top_k * shape.etp * token_bytes
        ops.append(
            Op(
                name=f"{name}_etp",
                kind="all_gather" if segment == "dispatch" else "reduce_scatter",
                family="dispatch",
                stream="dispatch",
                segment=segment,
                scope="moe",
                comm_bytes=gathered,
                group=shape.etp_group,
                modules=frozenset(("moe",)),
            )
        )
    return ops if segment == "dispatch" else ops[::-1]


def _permute(build: LayerBuilder, moe: Moe, name: str, segment: Segment, *, local: bool) -> list[Op]:
    """Gather by expert, or its inverse. ``local``: on the experts' side of the exchange."""
    shape, stack, hidden = build.shape, build.stack.time, build.model.expert_hidden_size
    own, copies = shape.own_tokens, moe.top_k * shape.etp
    if shape.backend == "allgather":
        if not local:
            return []
        elements = own * (shape.etp_ep_group.num_ranks + copies) * hidden
    elif shape.backend == "alltoall":
        if local and shape.ep in {1, moe.num_experts}:
            return []  # already in order: one rank holds all experts, or one
        elements = own * (2 * copies if local else 1 + moe.top_k) * hidden
    else:
        in_library = not local and shape.backend in LIBRARIES
        if in_library or (stack.permute_in_dispatch and shape.backend == "hybridep"):
            return []
        router = moe.router
        seen = expected_distinct_bins(moe.num_experts, moe.top_k, shape.ep, router.num_groups, router.top_groups)
        elements = own * (seen * shape.etp + (copies if local else 1)) * hidden
    # All-to-all leaves its rows in chunks that need only be split and joined in another order; a graph of the whole
    # iteration takes the dispatcher's own permutation, because index kernels ask the host for shapes.
    is_fused = shape.permute_fusion or shape.is_device_driven or (local and shape.backend == "alltoall")
    factor = stack.permute_factor if is_fused else stack.unfused_permute_factor
    num_bytes = elements * shape.element_bytes * factor.value
    # Copies that are quantized as they are made are counted there (:func:`_quantized`); sums stay: of outputs, and of
    # gradients of inputs.
    is_copied_there, is_sum = build.copies_quantize, name.endswith("unpermute")
    return [
        Op(
            name=name,
            kind="gather",
            family="permute",
            hbm_bytes=0.0 if is_copied_there and not is_sum else num_bytes,
            backward_hbm_bytes=0.0 if is_copied_there and is_sum else num_bytes,
            segment=segment,
            scope="moe",
            num_kernels=2 if is_fused else UNFUSED_PERMUTE_KERNELS,
            modules=frozenset(("moe",)),
        )
    ]


def _clones(build: LayerBuilder) -> list[Op]:
    """Weights of clones from their homes; backward brings their gradients back."""
    shape = build.shape
    num_elements = clone_elements(build.model, shape.echo_slots, shape.etp)
    if not num_elements:
        return []
    return [
        Op(
            name="clone_weights",
            kind="all_to_all",
            family="dispatch",
            stream="dispatch",
            scope="moe",
            comm_bytes=num_elements * shape.element_bytes,
            group=shape.ep_group,
            modules=frozenset(("moe",)),
        )
    ]


def _to_experts(build: LayerBuilder, moe: Moe) -> list[Op]:
    return [
        *_clones(build),
        *_latent(build, moe, "latent_down", "before"),
        *_permute(build, moe, "permute", "before", local=False),
        *_exchange(build, moe, "dispatch", "dispatch"),
        *_permute(build, moe, "local_permute", "expert", local=True),
    ]


def _from_experts(build: LayerBuilder, moe: Moe) -> list[Op]:
    return [
        *_permute(build, moe, "local_unpermute", "expert", local=True),
        *_exchange(build, moe, "combine", "combine"),
        *_permute(build, moe, "unpermute", "after", local=False),
        *_latent(build, moe, "latent_up", "after"),
    ]


def _latent(build: LayerBuilder, moe: Moe, name: Literal["latent_down", "latent_up"], segment: Segment) -> list[Op]:
    """The projection to the width that experts work in, or back; whole on each rank, of its own tokens."""
    if not moe.latent_size:
        return []
    own, hidden, latent = build.shape.own_tokens, build.model.hidden_size, moe.latent_size
    cols, inner = (latent, hidden) if name == "latent_down" else (hidden, latent)
    linear = build.of_module("latent")
    quantized = linear.quantize(f"{name}.quantize", (own * inner, own * cols), "elementwise", segment, "moe")
    return [*quantized, linear.gemm(name, (own, cols, inner), segment=segment, scope="moe", modules=("moe",))]


def _experts(build: LayerBuilder, moe: Moe) -> list[Op]:
    model, shape = build.model, build.shape
    rows, width = shape.expert_rows(moe) * _load(build), moe.expert_ffn_size / shape.etp
    local_experts, gates = moe.num_experts // shape.ep, model.mlp_matrices - 1
    total, hidden = rows * local_experts, model.expert_hidden_size
    low_precision = shape.format.quantized_bytes is not None
    act = build.memory(
        "expert_act",
        (gates + 1) * total * width,
        ACTIVATION_BACKWARD,
        segment="expert",
        scope="moe",
        modules=("moe_act", "moe"),
    )
    # The kernels that read their shapes on the device come with the activation and its quantization; not with biases.
    is_fused = (shape.fused_grouped_mlp or shape.is_device_driven) and low_precision and not moe.mlp_bias
    bias = build.memory(  # added to both outputs; backward sums their gradients over rows
        "expert_bias",
        2 * total * (gates * width + hidden) * moe.mlp_bias,
        0.5,
        segment="expert",
        scope="moe",
        modules=("moe",),
    )
    quantized = _quantized(build, moe, total, width * (not is_fused), gates)
    if not build.stack.time.grouped_gemm:
        act = replace(act, num_kernels=local_experts)
        quantized = [replace(one, num_kernels=local_experts) for one in quantized]
    return [
        *quantized,
        _grouped_gemm(build, "expert_fc1", (rows, gates * width, hidden), local_experts),
        *([] if is_fused else [act]),
        _grouped_gemm(build, "expert_fc2", (rows, hidden, width), local_experts),
        *([bias] if moe.mlp_bias else []),
        *_stash(build, total, gates, width),
    ]


def _quantized(build: LayerBuilder, moe: Moe, rows: float, width: float, gates: int) -> list[Op]:
    """Operands of the experts' GEMMs: rows, and the activation of ``width`` (0: its own kernels write it quantized).

    What comes from other ranks and goes there is quantized apart. Where copies are quantized as they are made, tokens
    are read (twice where one scale covers them all) and both layouts of each copy written.
    """
    shape, hidden = build.shape, build.model.expert_hidden_size
    rest = 0.0 if build.copies_quantize else hidden
    elements = (rows * (rest + width), rows * (rest + gates * width))
    ops = build.quantize("expert.quantize", elements, "permute", "expert", "moe")
    if build.copies_quantize:
        reads = shape.own_tokens * shape.element_bytes * (1 if shape.format.scale_frac else 2)
        moved = (reads + rows * 2 * (shape.format.quantized_bytes or 0.0)) * hidden
        ops.append(
            Op(
                name="expert.copies",
                kind="gather",
                family="permute",
                hbm_bytes=moved,
                backward_hbm_bytes=moved,
                segment="expert",
                scope="moe",
                num_kernels=3,
            )
        )
    return ops


def _stash(build: LayerBuilder, rows: float, gates: int, width: float) -> list[Op]:
    """Kept rows copied into pages; backward copies them out."""
    shape = build.shape
    if not shape.paged_stash:
        return []
    kept = build.model.expert_hidden_size + (gates + ("moe_act" not in shape.recompute)) * width
    moved = 2 * rows * kept * shape.element_bytes
    return [
        Op(
            name="stash",
            kind="gather",
            family="permute",
            segment="expert",
            scope="moe",
            hbm_bytes=moved,
            backward_hbm_bytes=moved,
            num_kernels=3,
        )
    ]


def _load(build: LayerBuilder) -> float:
    """Tokens of the busiest rank over the mean: its experts and its exchange govern everybody's step."""
    if build.model.moe is None:
        return 1.0
    spread = build.stack.time.choice_spread_frac.value
    load = routed_load(build.model.moe, build.shape.routing, spread, build.shape.ep)
    return levelled_load(load, build.shape.echo_slots)


def _grouped_gemm(build: LayerBuilder, name: str, sizes: tuple[float, float, float], num_groups: int) -> Op:
    """One linear of the local experts, grouped or one after another: ``sizes`` are those of one expert."""
    rows, cols, inner = sizes
    low, time, dtype = build.shape.format.quantized_bytes, build.stack.time, build.shape.format.gemm_dtype
    in_bytes = build.shape.element_bytes if low is None else low
    is_device_driven = build.shape.fused_grouped_mlp or build.shape.is_device_driven
    launches = (time.grouped_launches_per_expert if low is None else time.quantized_launches_per_expert).value
    if build.shape.precision == "nvfp4" and launches:
        launches += NVFP4_LAUNCHES
    moved = (rows + cols) * inner * in_bytes + rows * cols * build.shape.element_bytes
    grouped = Op(
        name=name,
        kind="grouped_gemm",
        family="expert_gemm",
        dtype=dtype,
        rows=rows,
        cols=cols,
        inner=inner,
        num_groups=num_groups,
        flops=2 * rows * cols * inner * num_groups,
        hbm_bytes=num_groups * moved,
        segment="expert",
        scope="moe",
        backend=build.shape.grouped_gemm_backend,
        rate_frac=(time.device_grouped_gemm_frac if is_device_driven else time.grouped_gemm_frac).value
        * build.gemm_frac(dtype),
        num_kernels=1 + launches * num_groups,
        modules=frozenset(("moe",)),
    )
    if time.grouped_gemm:
        return grouped
    rate_frac = time.grouped_gemm_frac.value * build.gemm_frac(grouped.dtype)
    return replace(grouped, kind="gemm", rate_frac=rate_frac, num_kernels=max(1.0, launches) * num_groups)
