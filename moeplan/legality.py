"""Which plans exist at all: the constraints of report section 4.2, one list for planner, Plan and executor."""

from collections.abc import Iterator

from moeplan.model_spec import MlaAttention, ModelSpec
from moeplan.pipeline_order import schedule_problem
from moeplan.point import Point


def violations(model: ModelSpec, point: Point) -> Iterator[tuple[str, str]]:
    """Each broken rule as (key, what was got and what is allowed), for degrees that multiply out."""
    yield from _expert_violations(model, point)
    yield from _tensor_violations(model, point)
    dp, batch = point.dp, point.global_batch_size
    if batch % (point.mbs * dp):
        yield "mbs", f"global batch size {batch} is not a multiple of mbs {point.mbs} x dp {dp}"
        return
    group = point.pp if point.micro_batch_group_size is None else point.micro_batch_group_size
    problem = schedule_problem(point.pp, point.vp, point.num_micro_batches, group)
    if problem:
        yield "vp", problem
    if point.pp * point.vp > model.num_layers + 1:
        yield "pp", f"pp {point.pp} x vp {point.vp} = {point.pp * point.vp} stages for {model.num_layers} layers"


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
