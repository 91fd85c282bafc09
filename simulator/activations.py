"""Tensors kept for backward by one layer for one micro-batch on one rank, tensor by tensor (report section 1.4)."""

from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, NamedTuple

from moeplan.errors import InvalidInputError
from moeplan.model_spec import LayerKind, ModelSpec
from moeplan.point import Point
from moeplan.simulator.stack import SoftwareStack
from moeplan.simulator.tensor_sizes import sizes_of
from moeplan.simulator.tensor_tables import TABLES, Component, Row, Section, Storage, TableName
from moeplan.vocabulary import (
    PRECISIONS,
    Bf16Module,
    OffloadModule,
    Precision,
    PrecisionName,
    RecomputeModule,
    wide_precision,
)

# An MTP depth is its layer and what joins its inputs; loss is the final norm and the head's input, on the last stage.
ActivationKind = LayerKind | Literal["mtp", "loss"]


@dataclass(frozen=True, slots=True)
class SavedTensor:
    """One kept tensor. ``size_bytes``: of one micro-batch on one rank, if no recompute module drops it.

    ``dropped_by``: the modules that drop it whole (it is made again in backward); ``kept_by_full``: full recompute
    starts from it. ``scales_bytes``: of the blocks of one that is stored in a low-precision type, on top.
    ``offloaded_by``: the module whose offload takes it to the host.
    """

    name: str
    component: Component
    size_bytes: float
    dropped_by: tuple[RecomputeModule, ...]
    kept_by_full: bool
    scales_bytes: float
    offloaded_by: OffloadModule | None = None

    def is_kept(self, recompute: tuple[RecomputeModule, ...]) -> bool:
        """Whether it stays in memory until backward under these recompute modules."""
        if "full" in recompute:
            return self.kept_by_full
        return not any(module in recompute for module in self.dropped_by)

    def is_offloaded(self, modules: tuple[OffloadModule, ...]) -> bool:
        """Whether it waits for backward on the host. fused_group_mlp takes what expert_fc1 and moe_act would."""
        if self.offloaded_by in {"expert_fc1", "moe_act"} and "fused_group_mlp" in modules:
            return True
        return self.offloaded_by in modules


@dataclass(frozen=True, slots=True)
class KeptBytes:
    """Sums over one layer: ``kept`` until backward; ``remade`` by recompute; ``scales`` of the kept quantized ones.

    ``offloaded``: kept on the host instead, not part of ``kept``; ``expert_rows``: part of ``kept`` that grows with
    the rows a rank's experts receive.
    """

    kept_bytes: float
    remade_bytes: float
    scales_bytes: float
    offloaded_bytes: float
    expert_rows_bytes: float


class _Setting(NamedTuple):
    """The few fields the bytes depend on, so that points that share them share the answer."""

    model: ModelSpec
    kind: ActivationKind
    table: TableName
    fused_attention: bool
    tokens: int
    seq_len: int
    precision: PrecisionName
    bf16_modules: tuple[Bf16Module, ...]
    etp: int
    memory_efficient_permutation: bool
    joins_output: bool
    sums_at_experts: bool
    exchanges_heads: bool


def saved_tensors(
    model: ModelSpec, kind: ActivationKind, point: Point, stack: SoftwareStack
) -> tuple[SavedTensor, ...]:
    """All tensors of one layer (or depth, or loss) of that kind, those that recompute drops included.

    Bytes = elements per token x tokens per rank x bytes of the storage type (report section 1.4). Routing is taken as
    balanced: a rank's experts receive top_k rows for each of its tokens. Raises InvalidInputError where the stack has
    no such layer.
    """
    return _saved_tensors(_setting(model, kind, point, stack))


def activation_bytes(model: ModelSpec, kind: ActivationKind, point: Point, stack: SoftwareStack) -> float:
    """Bytes one layer keeps for backward of one micro-batch on one rank, under the point's recompute modules."""
    return kept_bytes(model, kind, point, stack).kept_bytes


def kept_bytes(model: ModelSpec, kind: ActivationKind, point: Point, stack: SoftwareStack) -> KeptBytes:
    """What one layer keeps, what recompute makes again, and the block scales that quantized tensors bring."""
    return _kept_bytes(_setting(model, kind, point, stack), point.recompute, point.offload_modules)


def _setting(model: ModelSpec, kind: ActivationKind, point: Point, stack: SoftwareStack) -> _Setting:
    return _Setting(
        model=model,
        kind=kind,
        table=stack.saved_tensors,
        fused_attention=stack.fused_attention,
        tokens=point.tokens_per_rank,
        seq_len=point.seq_len,
        precision="bf16" if is_bf16(kind, point) else point.precision,
        bf16_modules=point.bf16_modules,
        etp=point.etp,
        memory_efficient_permutation=point.memory_efficient_permutation,
        joins_output=point.cp_comm != "p2p" if point.cp > 1 else len(point.packed_lengths) > 1,
        sums_at_experts=point.dispatcher != "alltoall",
        exchanges_heads=point.cp > 1,
    )


def is_bf16(kind: ActivationKind, point: Point) -> bool:
    """Whether the plan keeps a layer out of its low precision."""
    return "mtp" in point.bf16_modules if kind == "mtp" else isinstance(kind, LayerKind) and kind.is_bf16


@lru_cache(maxsize=16384)
def _kept_bytes(
    setting: _Setting, recompute: tuple[RecomputeModule, ...], offload: tuple[OffloadModule, ...]
) -> KeptBytes:
    tensors = _saved_tensors(setting)
    kept = [tensor for tensor in tensors if tensor.is_kept(recompute)]
    here = [tensor for tensor in kept if not tensor.is_offloaded(offload)]
    total = sum(tensor.size_bytes for tensor in kept)
    stays = sum(tensor.size_bytes for tensor in here)
    return KeptBytes(
        kept_bytes=stays,
        remade_bytes=sum(tensor.size_bytes for tensor in tensors) - total,
        scales_bytes=sum(tensor.scales_bytes for tensor in here),
        offloaded_bytes=total - stays,
        expert_rows_bytes=sum(tensor.size_bytes for tensor in here if tensor.component == "experts"),
    )


_QUANTIZED: frozenset[Storage] = frozenset({"quantized", "quantized_copy"})


@lru_cache(maxsize=16384)
def _saved_tensors(setting: _Setting) -> tuple[SavedTensor, ...]:
    sizes = sizes_of(
        setting.model,
        seq_len=setting.seq_len,
        etp=setting.etp,
        memory_efficient_permutation=setting.memory_efficient_permutation,
        fused_attention=setting.fused_attention,
        joins_output=setting.joins_output,
        sums_at_experts=setting.sums_at_experts,
        exchanges_heads=setting.exchanges_heads,
    )
    tensors = []
    sections = _sections(setting)
    first_input = next(
        (row for section in sections for row in TABLES[setting.table][section] if row.is_block_input), None
    )
    for section in sections:
        for row in TABLES[setting.table][section]:
            name = _precision_of(row, setting)
            size_bytes = row.elements(sizes) * setting.tokens * _element_bytes(row.storage, name)
            if size_bytes:
                scale_frac = PRECISIONS[name].scale_frac if row.storage in _QUANTIZED else 0.0
                tensors.append(
                    SavedTensor(
                        name=row.name,
                        component=row.component,
                        size_bytes=size_bytes,
                        dropped_by=row.dropped_by,
                        kept_by_full=row.kept_by_full or row is first_input,
                        scales_bytes=size_bytes * scale_frac,
                        offloaded_by=row.offloaded_by,
                    )
                )
    return tuple(tensors)


def _precision_of(row: Row, setting: _Setting) -> PrecisionName:
    """Of the linears that store a tensor, which the plan may keep out of its low precision."""
    if row.input_of is None or row.input_of not in setting.bf16_modules:
        return setting.precision
    return wide_precision(row.input_of, setting.precision)


def _sections(setting: _Setting) -> tuple[Section, ...]:
    """Sections of the table that make up a kind. An MTP depth holds a layer of the last decoder layer's kind."""
    if setting.kind == "loss":
        return ("loss",)
    layer = setting.model.mtp_kind if setting.kind == "mtp" else setting.kind
    blocks: list[Section] = ["mtp"] if setting.kind == "mtp" else []
    blocks += [] if layer.mixer == "none" else [layer.mixer]
    blocks += [] if layer.mlp == "none" else [layer.mlp]
    for block in blocks:
        if not TABLES[setting.table][block]:
            raise InvalidInputError(
                f"the {setting.table} table has no {block} layer, {setting.model.name} needs one",
                "choose a stack that runs such models, for example megatron-bridge-26.08",
            )
    return tuple(blocks)


def _element_bytes(storage: Storage, name: PrecisionName) -> float:
    """Bytes of one element. Statistics in fp32 follow the recipe up where it is wider (fp64)."""
    precision: Precision = PRECISIONS[name]
    if storage == "quantized":
        return precision.activation_bytes if precision.quantized_bytes is None else precision.quantized_bytes
    widths = {
        "activation": precision.activation_bytes,
        "fp32": max(4.0, precision.activation_bytes),
        "fp32_copy": 4.0 if precision.activation_bytes < 4 else 0.0,
        "int64": 8.0,
        "int32": 4.0,
        "byte": 1.0,
        "delayed_copy": 1.0 if name == "fp8_delayed" else 0.0,
        "quantized_copy": precision.quantized_bytes or 0.0,
    }
    return widths[storage]
