"""Architecture of a transformer, dense or Mixture-of-Experts. Sizes are numbers of elements."""

import math
from functools import cached_property
from typing import Annotated, Literal, NamedTuple, Self

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from moeplan.mixers import Attention, GqaAttention, LinearMixer
from moeplan.record import Record

MAX_LAYERS = 1024  # several times the deepest model there is; far more is a slip of the pen that no plan survives


class LayerKind(NamedTuple):
    """The blocks of a layer, each after a norm and added to the residual stream; a hybrid's layer may have one.

    ``is_bf16``: a plan keeps its linears out of low precision.
    """

    mixer: Literal["attention", "linear", "none"] = "attention"
    mlp: Literal["dense", "moe", "none"] = "dense"
    is_bf16: bool = False

    @property
    def label(self) -> str:
        """The name in reports: of what tells the layer from those of a plain transformer."""
        if self.mixer == "attention":
            name: str = "attention" if self.mlp == "none" else self.mlp
        else:
            name = self.mlp if self.mixer == "none" else f"{self.mixer}_{self.mlp}".removesuffix("_none")
        return f"{name}_bf16" if self.is_bf16 else name


DENSE_LAYER, MOE_LAYER = LayerKind("attention", "dense"), LayerKind("attention", "moe")
# One symbol a layer, as Megatron's hybrid patterns write them.
PATTERN_SYMBOLS = {
    "M": LayerKind("linear", "none"),
    "*": LayerKind("attention", "none"),
    "-": LayerKind("none", "dense"),
    "E": LayerKind("none", "moe"),
}


class YarnScaling(Record):
    """YaRN (arXiv 2309.00071): slow rotary channels interpolated by ``factor``, fast ones left, a ramp between them."""

    kind: Literal["yarn"] = "yarn"
    factor: float = Field(ge=1)
    original_max_positions: PositiveInt
    beta_fast: PositiveFloat = Field(default=32.0, description="turns over the original length that end interpolation")
    beta_slow: PositiveFloat = Field(default=1.0, description="turns over the original length that begin the ramp")
    truncate: bool = Field(default=True, description="the ramp begins and ends at whole channels")
    attention_factor: PositiveFloat | None = Field(default=None, description="of cos and sin; left out: by mscale")
    mscale: float = Field(default=0.0, ge=0)
    mscale_all_dim: float = Field(default=0.0, ge=0)

    def _magnitude(self, mscale: float) -> float:
        return 0.1 * mscale * math.log(self.factor) + 1

    @property
    def table_factor(self) -> float:
        """What cos and sin are multiplied by."""
        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale and self.mscale_all_dim:
            return self._magnitude(self.mscale) / self._magnitude(self.mscale_all_dim)
        return self._magnitude(1)

    @property
    def softmax_factor(self) -> float:
        """What latent attention multiplies its scores by."""
        return self._magnitude(self.mscale_all_dim) ** 2


class Llama3Scaling(Record):
    """Llama 3.1: channels of wavelengths beyond the original length slowed by ``factor``, short ones left."""

    kind: Literal["llama3"] = "llama3"
    factor: float = Field(ge=1)
    original_max_positions: PositiveInt
    low_freq_factor: PositiveFloat = 1.0
    high_freq_factor: PositiveFloat = 4.0

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.low_freq_factor >= self.high_freq_factor:
            raise ValueError(
                f"low_freq_factor {self.low_freq_factor} is not below high_freq_factor {self.high_freq_factor}"
            )
        return self


RopeScaling = Annotated[YarnScaling | Llama3Scaling, Field(discriminator="kind")]


class Router(Record):
    """How tokens choose experts (report section 7)."""

    score_function: Literal["softmax", "sigmoid"] = "softmax"
    num_groups: PositiveInt = 1
    top_groups: PositiveInt = 1
    group_score_experts: PositiveInt | None = Field(
        default=None, description="best scores of a group that are summed to rank it; left out: top_k / top_groups"
    )
    scaling_factor: float = Field(default=1.0, gt=0)
    normalize_top_k: bool = Field(default=True, description="weights of the chosen experts sum to the scaling factor")
    aux_loss: Literal["none", "aux_loss", "seq_aux_loss", "global_aux_loss"] = "aux_loss"
    aux_loss_coeff: float = Field(default=1e-3, ge=0)
    z_loss_coeff: float = Field(default=0.0, ge=0)
    expert_bias: bool = False
    bias_update_rate: float = Field(default=1e-3, ge=0)
    capacity_factor: PositiveFloat = Field(
        default=1.0, description="copies an expert takes over its balanced share, under routing drop"
    )
    pad_to_capacity: bool = Field(default=True, description="each expert gets exactly its capacity: static shapes")
    drop_policy: Literal["probs", "position"] = Field(default="probs", description="which copies are kept")


class Moe(Record):
    """The Mixture-of-Experts block."""

    num_experts: PositiveInt
    top_k: PositiveInt
    expert_ffn_size: PositiveInt
    shared_ffn_size: int = Field(default=0, ge=0, description="total width of the shared experts, 0 for none")
    shared_gate: bool = Field(default=False, description="sigmoid gate on the shared expert's output (Qwen2-MoE)")
    mlp_bias: bool = False
    latent_size: int = Field(
        default=0, ge=0, description="width that routed experts work in, between two projections; 0: hidden_size"
    )
    router: Router = Router()

    @model_validator(mode="after")
    def _routing_possible(self) -> Self:
        groups, chosen = self.router.num_groups, self.router.top_groups
        if self.top_k > self.num_experts:
            raise ValueError(f"top_k {self.top_k} exceeds num_experts {self.num_experts}")
        if self.num_experts % groups:
            raise ValueError(f"num_experts {self.num_experts} is not a multiple of router.num_groups {groups}")
        if chosen > groups or chosen * (self.num_experts // groups) < self.top_k:
            raise ValueError(f"router.top_groups {chosen} of {groups} groups cannot hold top_k {self.top_k} experts")
        return self


class ModelSpec(Record):
    """A whole model. Layers are numbered from 0; MTP layers follow the decoder."""

    name: str
    num_layers: PositiveInt = Field(le=MAX_LAYERS)
    hidden_size: PositiveInt
    vocab_size: PositiveInt
    attention: Attention
    linear_mixer: LinearMixer | None = None
    attention_period: PositiveInt = Field(
        default=1, description="the last of each such many layers attends, the others run linear_mixer"
    )
    layer_pattern: str = Field(
        default="", description="layers of one block each: M linear_mixer, * attention, - dense MLP, E experts"
    )
    dense_ffn_size: int = Field(default=0, ge=0)
    moe: Moe | None = None
    num_dense_layers: int = Field(default=0, ge=0, description="dense layers before the first MoE layer")
    moe_layer_period: PositiveInt = Field(
        default=1, description="after the dense layers, the last of each such many is MoE"
    )
    num_mtp_layers: int = Field(default=0, ge=0, le=MAX_LAYERS)
    mtp_shared: bool = Field(default=False, description="all MTP depths run the weights of one (Nemotron 3)")
    mtp_loss_scaling_factor: float = 0.1
    tied_embeddings: bool = False
    activation: Literal["swiglu", "clamped_swiglu", "geglu", "gelu", "squared_relu"] = "swiglu"
    rope_theta: float = 10_000.0
    rope_scaling: RopeScaling | None = None
    norm_eps: float = 1e-6
    source: str = ""

    @model_validator(mode="after")
    def _layers_make_sense(self) -> Self:
        if self.num_dense_layers > self.num_layers:
            raise ValueError(f"num_dense_layers {self.num_dense_layers} exceeds num_layers {self.num_layers}")
        self._check_pattern()
        has_dense_depth = self.num_mtp_layers > 0 and self.moe is None
        if (self.has_dense_mlp or has_dense_depth) and self.dense_ffn_size == 0:
            raise ValueError("dense layers, and MTP depths without moe, need dense_ffn_size")
        if any(kind.mlp == "moe" for kind in self.layer_kinds) and self.moe is None:
            raise ValueError("layers of experts (E) need moe")
        if any(kind.mixer == "linear" for kind in self.layer_kinds) != (self.linear_mixer is not None):
            raise ValueError("linear_mixer goes with layers that run it: M in layer_pattern, or attention_period > 1")
        if self.mtp_shared and not self.num_mtp_layers:
            raise ValueError("mtp_shared goes with num_mtp_layers, which is 0")
        return self

    def _check_pattern(self) -> None:
        if not self.layer_pattern:
            return
        if unknown := sorted(set(self.layer_pattern) - set(PATTERN_SYMBOLS)):
            raise ValueError(f"layer_pattern has {unknown[0]!r}; its symbols are {' '.join(PATTERN_SYMBOLS)}")
        if len(self.layer_pattern) != self.num_layers:
            raise ValueError(f"layer_pattern has {len(self.layer_pattern)} symbols for {self.num_layers} layers")
        if self.num_dense_layers or (self.moe_layer_period, self.attention_period) != (1, 1):
            raise ValueError("layer_pattern says of each layer what it is; leave out periods and num_dense_layers")

    @cached_property
    def fields_hash(self) -> int:
        """Hash of the fields, once: costs and sizes are kept by model, and looked up a million times a search."""
        return hash(tuple(getattr(self, name) for name in type(self).model_fields))

    def __hash__(self) -> int:
        return self.fields_hash

    @cached_property
    def layer_kinds(self) -> tuple[LayerKind, ...]:
        """Kind of each decoder layer, MTP layers not included."""
        return tuple(self._kind(layer) for layer in range(self.num_layers))

    def kinds_with_bf16(self, num_first: int, num_last: int) -> tuple[LayerKind, ...]:
        """Kind of each decoder layer where so many at either end stay in bf16."""
        kinds, end = self.layer_kinds, self.num_layers - num_last
        return tuple(
            kind._replace(is_bf16=True) if layer < num_first or layer >= end else kind
            for layer, kind in enumerate(kinds)
        )

    def _kind(self, layer: int) -> LayerKind:
        if self.layer_pattern:
            return PATTERN_SYMBOLS[self.layer_pattern[layer]]
        after_dense = layer - self.num_dense_layers
        is_moe = (
            self.moe is not None
            and after_dense >= 0
            and after_dense % self.moe_layer_period == (self.moe_layer_period - 1)
        )
        attends = layer % self.attention_period == self.attention_period - 1
        return LayerKind("attention" if attends else "linear", "moe" if is_moe else "dense")

    @property
    def mtp_kind(self) -> LayerKind:
        """Kind of an MTP layer: it attends, and has experts where the model has."""
        return DENSE_LAYER if self.moe is None else MOE_LAYER

    @property
    def num_moe_layers(self) -> int:
        """Decoder layers with experts."""
        return sum(kind.mlp == "moe" for kind in self.layer_kinds)

    @property
    def has_dense_mlp(self) -> bool:
        """Whether some decoder layer has a dense MLP."""
        return any(kind.mlp == "dense" for kind in self.layer_kinds)

    @property
    def expert_hidden_size(self) -> int:
        """Width of the rows that experts receive and return."""
        return (self.moe.latent_size if self.moe is not None else 0) or self.hidden_size

    @property
    def is_gated(self) -> bool:
        """Whether the MLP has a gate and an up projection (three matrices) rather than one (two)."""
        return self.activation in ("swiglu", "clamped_swiglu", "geglu")

    @property
    def mlp_matrices(self) -> int:
        return 3 if self.is_gated else 2

    def is_windowed(self, layer: int) -> bool:
        """Whether decoder layer ``layer`` would see only its sliding window."""
        attention = self.attention
        return (
            isinstance(attention, GqaAttention)
            and attention.sliding_window is not None
            and (layer % attention.sliding_period == 0)
        )
