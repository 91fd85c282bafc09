"""Architecture of a transformer, dense or Mixture-of-Experts. Sizes are numbers of elements."""

import math
from functools import cached_property
from typing import Annotated, Literal, Self

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from moeplan.record import Record

LayerKind = Literal["dense", "moe"]
MAX_LAYERS = 1024  # several times the deepest model there is; far more is a slip of the pen that no plan survives


class GqaAttention(Record):
    """Grouped-query attention; multi-head where ``num_kv_heads == num_heads``."""

    kind: Literal["gqa"] = "gqa"
    num_heads: PositiveInt
    num_kv_heads: PositiveInt
    head_dim: PositiveInt
    qk_norm: bool = False
    qkv_bias: bool = False
    out_bias: bool = False
    sinks: bool = Field(default=False, description="one learned softmax sink per head (GPT-OSS)")
    sliding_window: PositiveInt | None = Field(default=None, description="keys seen by a windowed layer")
    sliding_period: PositiveInt = Field(
        default=1, description="one layer in this many is windowed, the first included; the rest see all keys"
    )
    rotary_dim: int = Field(default=0, ge=0, description="leading channels of a head that are rotated, 0 for all")

    @model_validator(mode="after")
    def _heads_divide(self) -> Self:
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_heads {self.num_heads} is not a multiple of num_kv_heads {self.num_kv_heads}")
        if self.rotary_dim % 2 or self.rotary_dim > self.head_dim:
            raise ValueError(f"rotary_dim {self.rotary_dim} is not an even number up to head_dim {self.head_dim}")
        return self

    @property
    def qk_head_dim(self) -> int:
        return self.head_dim

    @property
    def v_head_dim(self) -> int:
        return self.head_dim


class MlaAttention(Record):
    """Multi-head latent attention (DeepSeek-V2 and later); ``q_lora_rank == 0`` projects queries directly."""

    kind: Literal["mla"] = "mla"
    num_heads: PositiveInt
    q_lora_rank: int = Field(ge=0)
    kv_lora_rank: PositiveInt
    qk_nope_head_dim: PositiveInt
    qk_rope_head_dim: PositiveInt
    v_head_dim: PositiveInt

    @property
    def num_kv_heads(self) -> int:
        """Keys and values are expanded to every head in training."""
        return self.num_heads

    @property
    def qk_head_dim(self) -> int:
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def sliding_window(self) -> None:
        return None


Attention = Annotated[GqaAttention | MlaAttention, Field(discriminator="kind")]


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
    dense_ffn_size: int = Field(default=0, ge=0)
    moe: Moe | None = None
    num_dense_layers: int = Field(default=0, ge=0, description="dense layers before the first MoE layer")
    moe_layer_period: PositiveInt = Field(
        default=1, description="after the dense layers, the last of each such many is MoE"
    )
    num_mtp_layers: int = Field(default=0, ge=0, le=MAX_LAYERS)
    mtp_loss_scaling_factor: float = 0.1
    tied_embeddings: bool = False
    activation: Literal["swiglu", "clamped_swiglu", "geglu", "gelu", "squared_relu"] = "swiglu"
    rope_theta: float = 10_000.0
    rope_scaling: RopeScaling | None = None
    norm_eps: float = 1e-6
    source: str = ""

    @model_validator(mode="after")
    def _layers_make_sense(self) -> Self:
        if self.moe is None and self.dense_ffn_size == 0:
            raise ValueError("a model without moe needs dense_ffn_size")
        if self.num_dense_layers > self.num_layers:
            raise ValueError(f"num_dense_layers {self.num_dense_layers} exceeds num_layers {self.num_layers}")
        if "dense" in self.layer_kinds and self.dense_ffn_size == 0:
            raise ValueError("dense layers need dense_ffn_size")
        return self

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

    def _kind(self, layer: int) -> LayerKind:
        after_dense = layer - self.num_dense_layers
        is_moe = (
            self.moe is not None
            and after_dense >= 0
            and after_dense % self.moe_layer_period == (self.moe_layer_period - 1)
        )
        return "moe" if is_moe else "dense"

    @property
    def mtp_kind(self) -> LayerKind:
        """Kind of an MTP layer: MoE where the model has experts."""
        return "dense" if self.moe is None else "moe"

    @property
    def is_gated(self) -> bool:
        """Whether the MLP has a gate and an up projection (three matrices) rather than one (two)."""
        return self.activation in ("swiglu", "clamped_swiglu", "geglu")

    @property
    def mlp_matrices(self) -> int:
        return 3 if self.is_gated else 2

    def is_windowed(self, layer: int) -> bool:
        """Whether decoder layer ``layer`` sees only its sliding window."""
        attention = self.attention
        return (
            isinstance(attention, GqaAttention)
            and attention.sliding_window is not None
            and (layer % attention.sliding_period == 0)
        )
