"""Which plans exist at all: the constraints of report section 4.2, one list for planner, Plan and executor."""

from collections.abc import Iterator
from dataclasses import dataclass

from moeplan.folding import Folding
from moeplan.model_spec import MlaAttention, ModelSpec
from moeplan.pipeline_order import schedule_problem


@dataclass(frozen=True, slots=True)
class Shape:
    """What legality depends on beside the model and the folding."""

    seq_len: int
    global_batch_size: int
    mbs: int
    vp: int
    group_size: int | None = None

    def num_micro_batches(self, dp: int) -> int:
        """Micro-batches a data-parallel rank runs per step."""
        return self.global_batch_size // (self.mbs * dp)


def violations(model: ModelSpec, folding: Folding, shape: Shape) -> Iterator[tuple[str, str]]:
    """Each broken rule as (key, what was got and what is allowed)."""
    yield from _expert_violations(model, folding)
    yield from _tensor_violations(model, folding, shape)
    dp, batch = folding.dp, shape.global_batch_size
    if batch % (shape.mbs * dp):
        yield "mbs", f"global batch size {batch} is not a multiple of mbs {shape.mbs} x dp {dp}"
        return
    group = folding.pp if shape.group_size is None else shape.group_size
    problem = schedule_problem(folding.pp, shape.vp, shape.num_micro_batches(dp), group)
    if problem:
        yield "vp", problem
    if folding.pp * shape.vp > model.num_layers + 1:
        yield "pp", f"pp {folding.pp} x vp {shape.vp} = {folding.pp * shape.vp} stages for {model.num_layers} layers"


def _expert_violations(model: ModelSpec, folding: Folding) -> Iterator[tuple[str, str]]:
    moe = model.moe
    if moe is None:
        if folding.ep > 1 or folding.etp > 1:
            yield "ep", f"{model.name} has no experts, so ep {folding.ep} and etp {folding.etp} must be 1"
        return
    if moe.num_experts % folding.ep:
        yield "ep", f"ep {folding.ep} does not divide the {moe.num_experts} experts of {model.name}"
    if moe.expert_ffn_size % folding.etp:
        yield "etp", f"etp {folding.etp} does not divide the expert width {moe.expert_ffn_size}"


def _tensor_violations(model: ModelSpec, folding: Folding, shape: Shape) -> Iterator[tuple[str, str]]:
    tp, cp, attention = folding.tp, folding.cp, model.attention
    if attention.num_heads % tp:
        yield "tp", f"tp {tp} does not divide the {attention.num_heads} attention heads"
    if not isinstance(attention, MlaAttention) and attention.num_kv_heads % tp:
        yield "tp", f"tp {tp} does not divide the {attention.num_kv_heads} key-value heads"
    shared = model.moe.shared_ffn_size if model.moe else 0
    for what, size in (("dense MLP width", model.dense_ffn_size), ("shared expert width", shared)):
        if size % tp:
            yield "tp", f"tp {tp} does not divide the {what} {size}"
    if cp > 1 and shape.seq_len % (2 * cp):
        yield "cp", f"sequence length {shape.seq_len} is not a multiple of 2 x cp {cp}"
    if shape.seq_len % (tp * cp):
        yield "tp", f"sequence length {shape.seq_len} is not a multiple of tp {tp} x cp {cp} (sequence parallel)"
