"""What each pipeline rank holds: parameters by component and class, and layers by virtual stage."""

from collections import Counter
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from moeplan.layout import PipelineLayout, Stage
from moeplan.mixers import MlaAttention
from moeplan.model_spec import LayerKind, ModelSpec
from moeplan.parameters import layer_parameters, mtp_extra_parameters
from moeplan.simulator.tensor_tables import Component


@dataclass(frozen=True, slots=True)
class ParameterGroup:
    """Elements that one rank holds of one component. ``is_quantized``: a linear that low precision quantizes."""

    component: Component
    num_elements: float
    is_expert: bool = False
    is_quantized: bool = False


class Chunk(NamedTuple):
    """What one virtual stage runs: counts of layers by kind, MTP depths, and whether it computes the loss."""

    layers: tuple[tuple[LayerKind, int], ...]
    num_mtp: int
    has_loss: bool

    @property
    def num_layers(self) -> int:
        """Layers, those of MTP depths included."""
        return sum(count for _, count in self.layers) + self.num_mtp


@lru_cache(maxsize=4096)
def rank_chunks(
    model: ModelSpec, layout: str, pp: int, bf16_ends: tuple[int, int] = (0, 0)
) -> tuple[tuple[Chunk, ...], ...]:
    """Chunks of every pipeline rank, by virtual stage; so many layers at either end stay in bf16."""
    kinds, pipeline = model.kinds_with_bf16(*bf16_ends), PipelineLayout.from_string(layout)

    def chunk(stage: Stage) -> Chunk:
        counts = Counter(kinds[layer] for layer in stage.layers)
        return Chunk(tuple(sorted(counts.items())), stage.num_mtp, stage.has_loss)

    return tuple(tuple(chunk(stage) for stage in pipeline.stages_of_rank(pp, rank)) for rank in range(pp))


@lru_cache(maxsize=4096)
def rank_parameters(
    model: ModelSpec, layout: str, pp: int, *, tp: int, etp: int, ep: int, splits_mtp_projection: bool = True
) -> tuple[tuple[ParameterGroup, ...], ...]:
    """Parameters of every pipeline rank (report section 1.3 for the scope of its table 3).

    tp splits the linears outside experts, embedding and head; etp and ep split experts; norms, router, gates and the
    down projections of latent attention are whole on each rank. A rank away from the embedding that needs it (MTP, or
    a tied head) holds a copy. Engines differ in the projection of MTP depths: tp ``splits_mtp_projection`` or not.
    """
    pipeline = PipelineLayout.from_string(layout)
    mtp = tuple(_mtp_groups(model, tp, etp, ep, tp if splits_mtp_projection else 1) if model.num_mtp_layers else [])
    return tuple(_of_rank(model, pipeline.stages_of_rank(pp, rank), tp, etp, ep, mtp) for rank in range(pp))


class ElementSums(NamedTuple):
    """Elements of one rank by class, as far as bytes per parameter differ. Experts are linears."""

    plain: float
    linears: float
    experts: float


@lru_cache(maxsize=4096)
def rank_elements(
    model: ModelSpec, layout: str, pp: int, *, tp: int, etp: int, ep: int, splits_mtp_projection: bool = True
) -> tuple[ElementSums, ...]:
    """Sums of :func:`rank_parameters` over components."""
    return tuple(
        ElementSums(
            plain=sum(group.num_elements for group in groups if not group.is_quantized),
            linears=sum(group.num_elements for group in groups if group.is_quantized and not group.is_expert),
            experts=sum(group.num_elements for group in groups if group.is_expert),
        )
        for groups in rank_parameters(
            model, layout, pp, tp=tp, etp=etp, ep=ep, splits_mtp_projection=splits_mtp_projection
        )
    )


def _of_rank(  # noqa: PLR0917 - the three degrees, and two things to place
    model: ModelSpec, stages: tuple[Stage, ...], tp: int, etp: int, ep: int, mtp: tuple[ParameterGroup, ...]
) -> tuple[ParameterGroup, ...]:
    """Parameters of one rank; ``mtp`` are those of one MTP depth."""
    kinds = [model.layer_kinds[layer] for stage in stages for layer in stage.layers]
    of_kind = {kind: layer_groups(model, kind, tp, etp, ep) for kind in set(kinds)}
    groups = [group for kind in kinds for group in of_kind[kind]]
    vocabulary = -(-model.vocab_size // tp) * model.hidden_size
    has_embedding = any(stage.has_embedding for stage in stages)
    if has_embedding:
        groups.append(ParameterGroup("embedding", vocabulary))
    if any(stage.has_loss for stage in stages):
        groups.append(ParameterGroup("norms", model.hidden_size))
        if not (model.tied_embeddings and has_embedding):
            groups.append(ParameterGroup("head", vocabulary))
    num_mtp = sum(stage.num_mtp for stage in stages)
    if num_mtp:
        groups += mtp * (1 if model.mtp_shared else num_mtp)
        if not has_embedding:
            groups.append(ParameterGroup("mtp", vocabulary))
    return _merged(groups)


def layer_groups(model: ModelSpec, kind: LayerKind, tp: int, etp: int, ep: int) -> list[ParameterGroup]:
    """Parameters that one rank holds of one layer."""
    whole, hidden, moe = layer_parameters(model, kind), model.hidden_size, model.moe
    unsplit = _unsplit_attention(model) if whole.attention else 0
    groups = [
        ParameterGroup("attention", (whole.attention - unsplit) / tp + unsplit, is_quantized=True),
        ParameterGroup("linear_mixer", whole.linear_mixer / tp, is_quantized=True),
        ParameterGroup("norms", whole.norms),
    ]
    if kind.mlp != "moe" or moe is None:
        return [*groups, ParameterGroup("dense_mlp", whole.dense_mlp / tp, is_quantized=True)]
    gate = hidden * moe.shared_gate
    bias = model.expert_hidden_size * moe.mlp_bias  # of the second matrix, whose output etp sums
    expert = (whole.expert - bias) / etp + bias
    return [
        *groups,
        ParameterGroup("router", whole.router + gate),
        ParameterGroup("latent", whole.latent, is_quantized=True),
        ParameterGroup("shared_experts", (whole.shared_expert - gate) / tp, is_quantized=True),
        ParameterGroup("experts", expert * moe.num_experts / ep, is_expert=True, is_quantized=True),
    ]


def _unsplit_attention(model: ModelSpec) -> int:
    """Attention parameters that tp does not split: latent down projections, and the bias of a summed output."""
    attention, hidden = model.attention, model.hidden_size
    if isinstance(attention, MlaAttention):
        return hidden * (attention.q_lora_rank + attention.kv_lora_rank + attention.qk_rope_head_dim)
    return hidden * attention.out_bias


def _mtp_groups(model: ModelSpec, tp: int, etp: int, ep: int, num_parts: int) -> list[ParameterGroup]:
    """Parameters of one MTP depth, its projection in ``num_parts``."""
    norms = 3 * model.hidden_size
    projection = (mtp_extra_parameters(model) - norms) / num_parts
    return [
        ParameterGroup("mtp", norms),
        ParameterGroup("mtp", projection, is_quantized=True),
        *(
            ParameterGroup("mtp", group.num_elements, group.is_expert, group.is_quantized)
            for group in layer_groups(model, model.mtp_kind, tp, etp, ep)
        ),
    ]


def _merged(groups: list[ParameterGroup]) -> tuple[ParameterGroup, ...]:
    """One group for each component and class, without empty ones."""
    sums: dict[tuple[Component, bool, bool], float] = {}
    for group in groups:
        key = (group.component, group.is_expert, group.is_quantized)
        sums[key] = sums.get(key, 0.0) + group.num_elements
    return tuple(ParameterGroup(key[0], total, key[1], key[2]) for key, total in sums.items() if total)
