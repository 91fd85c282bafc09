"""Which plans exist at all: the constraints of report sections 2.5, 2.6 and 4.2, for planner, Plan and executor."""

from collections.abc import Iterator

from moeplan.mixers import GatedDeltaNet, Mamba2, MlaAttention
from moeplan.model_spec import ModelSpec
from moeplan.pipeline_order import schedule_problem
from moeplan.point import Point
from moeplan.vocabulary import PRECISIONS, RecomputeModule

FP8_BLOCK = 128
# deepseek-ai/DeepEP: the tuned table of deep_ep/buffer.py (issues 464, 90) and the row caps of its kernels (issue 722).
DEEPEP_RANKS = (2, 4, 8, 16, 24, 32, 64, 128, 144, 160)
DEEPEP_NODE_RANKS, DEEPEP_HIDDEN_INSIDE, DEEPEP_HIDDEN_ACROSS = 8, 8184, 8144


def violations(model: ModelSpec, point: Point) -> Iterator[tuple[str, str]]:
    """Each broken rule as (key, what was got and what is allowed), for degrees that multiply out."""
    yield from _expert_violations(model, point)
    yield from _tensor_violations(model, point)
    yield from _linear_violations(model, point)
    yield from _context_violations(model, point)
    yield from _packing_violations(point)
    dp, batch = point.dp, point.global_batch_size
    if batch % (point.mbs * dp):
        yield "mbs", f"global batch size {batch} is not a multiple of mbs {point.mbs} x dp {dp}"
        return
    group = point.pp if point.micro_batch_group_size is None else point.micro_batch_group_size
    problem = schedule_problem(point.pp, point.vp, point.num_micro_batches, group)
    if problem:
        yield "vp", problem
    if point.pp * point.vp > model.num_layers + 2:  # one stage may hold the embedding alone, one the loss
        yield "pp", f"pp {point.pp} x vp {point.vp} = {point.pp * point.vp} stages for {model.num_layers} layers"
    yield from _overlap_violations(model, point)
    yield from _graph_violations(model, point)
    yield from _precision_violations(point)
    yield from recompute_violations(model, point, point.recompute)
    yield from _block_violations(model, point)
    yield from _deepep_violations(model, point)
    yield from _offload_violations(point)
    yield from _echo_violations(model, point)
    yield from _stash_violations(model, point)
    yield from _replica_violations(model, point)
    yield from _pair_violations(model, point)


def _overlap_violations(model: ModelSpec, point: Point) -> Iterator[tuple[str, str]]:
    """Batch-level overlap (report section 2.5) and shared-expert overlap (2.6)."""
    if point.delay_wgrad and not point.ep_overlap:
        yield "delay_wgrad", "delayed weight gradients need ep_overlap"
    if point.shared_expert_overlap and (model.moe is None or not model.moe.shared_ffn_size):
        yield "shared_expert_overlap", f"{model.name} has no shared expert"
    if not point.ep_overlap:
        return
    if point.ep == 1:
        yield "ep_overlap", "needs ep > 1"
    if point.dispatcher == "allgather":
        yield "ep_overlap", "needs dispatcher alltoall or flex, got allgather"
    if point.pp > 1 and point.vp == 1:
        yield "ep_overlap", f"needs virtual stages under pp {point.pp}: vp > 1"
    if point.sharding == "full" and point.vp > 1:
        yield "ep_overlap", "with full sharding it needs vp 1"
    barred = {"full", "moe"} & set(point.recompute)
    if barred:
        yield "ep_overlap", f"excludes recompute of {', '.join(sorted(barred))}"
    if point.shared_expert_overlap:
        yield "ep_overlap", "excludes shared_expert_overlap"
    if model.num_mtp_layers > 1:
        yield "ep_overlap", f"allows one MTP layer, {model.name} has {model.num_mtp_layers}"
    captured = {"moe", "mlp"} & set(point.cuda_graph)
    if captured:
        yield "ep_overlap", f"excludes graphs of {', '.join(sorted(captured))}"


def _graph_violations(model: ModelSpec, point: Point) -> Iterator[tuple[str, str]]:
    """What a CUDA graph may hold: static shapes only (report section 3.4)."""
    scopes = set(point.cuda_graph)
    if "full_iteration" in scopes and len(scopes) > 1:
        yield "cuda_graph", "full_iteration stands alone"
    if "moe_preprocess" in scopes and "moe_router" not in scopes:
        yield "cuda_graph", "moe_preprocess needs moe_router"
    if "mamba" in scopes and not isinstance(model.linear_mixer, Mamba2):
        yield "cuda_graph", f"mamba holds Mamba-2 layers, {model.name} has none"
    is_padded = model.moe is not None and model.moe.router.pad_to_capacity
    is_hybrid = point.dispatcher == "flex" and point.flex_backend == "hybridep"
    # On one GPU the experts' rows are the tokens' copies, however they are routed, unless some are dropped.
    is_static = is_hybrid or (is_padded if point.routing == "drop" else point.num_gpus == 1)
    if model.moe is not None and scopes & {"full_iteration", "moe"} and not is_static:
        yield "cuda_graph", "graphs of whole MoE layers need routing drop or the hybridep dispatcher"


def _precision_violations(point: Point) -> Iterator[tuple[str, str]]:
    is_quantized = PRECISIONS[point.precision].quantized_bytes is not None
    for key in ("fp8_primary_weights", "fp8_attention", "bf16_first_layers", "bf16_last_layers", "bf16_modules"):
        if getattr(point, key) and not is_quantized:
            yield key, f"needs a low precision, got {point.precision}"
    if point.main_weight_remainders and (not PRECISIONS[point.precision].has_main_weights or point.fp8_primary_weights):
        what = "fp8_primary_weights" if point.fp8_primary_weights else point.precision
        yield "main_weight_remainders", f"needs bf16 weights beside main ones, got {what}"
    if point.fp8_primary_weights and point.optimizer_cpu_frac:
        yield "optimizer_cpu_frac", "excludes fp8_primary_weights"


def recompute_violations(
    model: ModelSpec, point: Point, recompute: tuple[RecomputeModule, ...]
) -> Iterator[tuple[str, str]]:
    """What excludes recomputing these modules, whatever ``point.recompute`` says; EP overlap has its own rule."""
    modules = set(recompute)
    if "full" in modules and len(modules) > 1:
        yield "recompute", f"got {list(recompute)}, allowed: full alone, or modules"
    if "mla_up_proj" in modules and not isinstance(model.attention, MlaAttention):
        yield "recompute", f"mla_up_proj needs MLA attention, {model.name} has {model.attention.kind}"
    barred = {"moe_act", "layernorm"} & modules
    if point.precision == "fp8_delayed" and barred:
        yield "recompute", f"delayed scaling excludes {', '.join(sorted(barred))}"
    if point.shared_expert_overlap and "shared_experts" in modules:
        yield "shared_expert_overlap", "excludes recompute of shared_experts"
    stashed = {"full", "moe"} & modules
    if point.paged_stash_factor and stashed:
        yield "paged_stash_factor", f"excludes recompute of {', '.join(sorted(stashed))}"


def _block_violations(model: ModelSpec, point: Point) -> Iterator[tuple[str, str]]:
    """Blockwise FP8 scales blocks of 128 x 128 of a weight, whole on each rank."""
    if point.precision != "fp8_blockwise":
        return
    if model.hidden_size % FP8_BLOCK:
        yield "precision", f"fp8_blockwise needs a hidden size in blocks of {FP8_BLOCK}, got {model.hidden_size}"
    if model.hidden_size != model.expert_hidden_size and model.expert_hidden_size % FP8_BLOCK:
        yield "precision", f"fp8_blockwise needs a latent in blocks of {FP8_BLOCK}, got {model.expert_hidden_size}"
    if model.moe is not None and (model.moe.expert_ffn_size // point.etp) % FP8_BLOCK:
        width = model.moe.expert_ffn_size
        cut = f"expert width {width} over etp {point.etp} is {width / point.etp:g}"
        yield "etp", f"fp8_blockwise needs blocks of {FP8_BLOCK}: {cut}"


def _deepep_violations(model: ModelSpec, point: Point) -> Iterator[tuple[str, str]]:
    """Limits of DeepEP's training kernels: groups of its tuned table, and rows that fit its shared memory."""
    if model.moe is None or point.dispatcher != "flex" or point.flex_backend != "deepep":
        return
    num_ranks = point.ep * point.etp
    if num_ranks == 1:
        return
    if num_ranks not in DEEPEP_RANKS:
        allowed = ", ".join(map(str, DEEPEP_RANKS))
        yield "ep", f"DeepEP has kernels for ep x etp of {allowed}, got {num_ranks}: take hybridep or alltoall"
    inside = num_ranks <= DEEPEP_NODE_RANKS
    limit = DEEPEP_HIDDEN_INSIDE if inside else DEEPEP_HIDDEN_ACROSS
    if model.expert_hidden_size > limit:
        where = "inside a node" if inside else "across nodes"
        yield "dispatcher", f"DeepEP takes a hidden size of at most {limit} {where}, got {model.expert_hidden_size}"


def _replica_violations(model: ModelSpec, point: Point) -> Iterator[tuple[str, str]]:
    """Hybrid sharding cuts dense and expert groups into as many blocks (report section 1.7)."""
    number = point.dp_replicate
    if number == 1:
        return
    if point.sharding == "none":
        yield "dp_replicate", f"got {number} with sharding none, which replicates everything: allowed: 1"
    if point.dp * point.cp % number:
        yield "dp_replicate", f"{number} does not divide dp {point.dp} x cp {point.cp}"
    if model.moe is not None and point.edp % number:
        yield "dp_replicate", f"{number} does not divide edp {point.edp}: experts are cut into as many blocks"


def _offload_violations(point: Point) -> Iterator[tuple[str, str]]:
    """Fine-grained activation offload (report section 1.6)."""
    modules = set(point.offload_modules)
    if "attn_proj" in modules and "core_attn" not in modules:
        yield "offload_modules", "attn_proj needs core_attn"
    norms = modules & {"attn_norm", "mlp_norm"}
    if norms and point.cuda_graph:
        yield "offload_modules", f"graphs exclude {', '.join(sorted(norms))}"
    if point.optimizer_cpu_frac and point.offload_optimizer_states:
        yield "optimizer_cpu_frac", "excludes offload_optimizer_states"


def _stash_violations(model: ModelSpec, point: Point) -> Iterator[tuple[str, str]]:
    """Paged stash (report section 3.5): of rows that nothing else drops or sends away."""
    if not point.paged_stash_factor:
        return
    if model.moe is None:
        yield "paged_stash_factor", f"{model.name} has no experts"
    sent = {"expert_fc1", "moe_act", "fused_group_mlp"} & set(point.offload_modules)
    if sent:
        yield "paged_stash_factor", f"excludes offload of {', '.join(sorted(sent))}"


def _pair_violations(model: ModelSpec, point: Point) -> Iterator[tuple[str, str]]:
    """Weight gradients of two micro-batches added at once: of experts whose gradients stay on their rank."""
    if not point.paired_wgrad:
        return
    key = "paired_wgrad"
    if model.moe is None:
        yield key, f"{model.name} has no experts"
    if point.num_micro_batches < 2:
        yield key, f"needs two micro-batches a step and rank, got {point.num_micro_batches}"
    if point.sharding == "full":
        yield key, "excludes sharding full, whose gradients leave with every micro-batch"
    if point.echo_slots:
        yield key, "excludes echo_slots"
    if "full_iteration" in point.cuda_graph and point.num_micro_batches % 2:
        yield key, f"in a graph of two micro-batches needs an even number of them, got {point.num_micro_batches}"


def _echo_violations(model: ModelSpec, point: Point) -> Iterator[tuple[str, str]]:
    """Clones of hot experts (report section 3.5): between ranks that share experts, whose copies none drops."""
    if not point.echo_slots:
        return
    if model.moe is None or point.ep == 1:
        yield "echo_slots", "needs experts and ep > 1"
    if model.moe is not None and model.moe.mlp_bias:
        yield "echo_slots", f"clones experts without biases, {model.name} has them"
    if point.routing == "drop":
        yield "echo_slots", "excludes routing drop"
    for key in ("ep_overlap", "shared_expert_overlap"):
        if getattr(point, key):
            yield "echo_slots", f"excludes {key}"


def _expert_violations(model: ModelSpec, point: Point) -> Iterator[tuple[str, str]]:
    moe = model.moe
    if moe is None:
        if point.ep > 1 or point.etp > 1:
            yield "ep", f"{model.name} has no experts, so ep {point.ep} and etp {point.etp} must be 1"
        return
    if moe.num_experts % point.ep:
        yield "ep", f"ep {point.ep} does not divide the {moe.num_experts} experts of {model.name}"
    if moe.expert_ffn_size % point.etp:
        yield "etp", f"etp {point.etp} does not divide the expert width {moe.expert_ffn_size}"


def _tensor_violations(model: ModelSpec, point: Point) -> Iterator[tuple[str, str]]:
    tp, cp, attention = point.tp, point.cp, model.attention
    if attention.num_heads % tp:
        yield "tp", f"tp {tp} does not divide the {attention.num_heads} attention heads"
    if not isinstance(attention, MlaAttention) and attention.num_kv_heads % tp:
        yield "tp", f"tp {tp} does not divide the {attention.num_kv_heads} key-value heads"
    shared = model.moe.shared_ffn_size if model.moe else 0
    for what, size in (("dense MLP width", model.dense_ffn_size), ("shared expert width", shared)):
        if size % tp:
            yield "tp", f"tp {tp} does not divide the {what} {size}"
    if cp > 1 and point.seq_len % (2 * cp):
        yield "cp", f"sequence length {point.seq_len} is not a multiple of 2 x cp {cp}"
    if point.seq_len % (tp * cp):
        yield "tp", f"sequence length {point.seq_len} is not a multiple of tp {tp} x cp {cp} (sequence parallel)"


def _linear_violations(model: ModelSpec, point: Point) -> Iterator[tuple[str, str]]:
    """Heads of linear mixers: split over tp, and over all of cp where a state runs through the sequence."""
    mixer, tp, cp = model.linear_mixer, point.tp, point.cp
    if isinstance(mixer, GatedDeltaNet):
        for key, degree, what in (("tp", tp, f"tp {tp}"), ("cp", tp * cp, f"tp {tp} x cp {cp}")):
            if mixer.num_k_heads % degree:
                yield key, f"{what} does not divide the {mixer.num_k_heads} key heads of linear_mixer"
                return
    if isinstance(mixer, Mamba2):
        of_both = f"the {mixer.num_heads} heads and {mixer.num_groups} groups of linear_mixer"
        if not mixer.splits_over(tp, 1):
            yield "tp", f"tp {tp} does not divide {of_both}"
        elif not mixer.splits_over(tp, cp):
            yield "cp", f"cp {cp} beside tp {tp} cuts {of_both} unevenly"


def _context_violations(model: ModelSpec, point: Point) -> Iterator[tuple[str, str]]:
    """Kinds of context parallelism (report sections 4.2 and 6): the two sizes of a2a+p2p multiply out to cp."""
    size, cp, tp, heads = point.cp_a2a_size, point.cp, point.tp, point.cp_head_ranks
    if point.cp_comm != "a2a+p2p":
        if size != 1:
            yield "cp_a2a_size", f"got {size} with cp_comm {point.cp_comm}, allowed: 1, or cp_comm a2a+p2p"
    elif cp % size or not 1 < size < cp:
        yield "cp_a2a_size", f"got {size}, allowed under a2a+p2p: a divisor of cp {cp} above 1 and below it"
    if heads == 1:
        return
    attention = model.attention
    for what, number in (("attention heads", attention.num_heads), ("key-value heads", attention.num_kv_heads)):
        if number % (tp * heads):
            yield "cp_comm", f"{point.cp_comm} splits heads: tp {tp} x {heads} does not divide the {number} {what}"


def _packing_violations(point: Point) -> Iterator[tuple[str, str]]:
    """Packed documents fill the sequence, and every cp rank holds two equal chunks of each."""
    total, pieces = sum(point.packed_lengths), 2 * point.cp if point.cp > 1 else 1
    if not point.packed_lengths:
        return
    if total != point.seq_len:
        yield "packed_lengths", f"documents of {total} tokens in all, allowed: the sequence length {point.seq_len}"
    odd = next((length for length in point.packed_lengths if length % pieces), None)
    if odd is not None:
        yield "packed_lengths", f"document of {odd} tokens is not a multiple of 2 x cp {point.cp}: pad each to one"
