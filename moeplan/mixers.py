"""What mixes the tokens of a sequence in a layer: attention, or a recurrence whose state has a fixed size."""

from typing import Annotated, Literal, Self

from pydantic import Field, PositiveInt, model_validator

from moeplan.record import Record


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
    rotary: bool = Field(default=True, description="false: no position is told to attention (Nemotron-H)")
    output_gate: bool = Field(default=False, description="sigmoid gate, of queries' size, on the output (Qwen3-Next)")

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


class Mamba2(Record):
    """Mamba-2 (arXiv 2405.21060): a state of head_dim x state_size a head, decayed by a scalar each token."""

    kind: Literal["mamba2"] = "mamba2"
    num_heads: PositiveInt
    head_dim: PositiveInt
    state_size: PositiveInt
    num_groups: PositiveInt = Field(default=1, description="sets of input and output vectors B, C that heads share")
    conv_kernel: PositiveInt = 4
    chunk_size: PositiveInt = Field(default=128, description="tokens computed as one block of matrix products")

    @model_validator(mode="after")
    def _heads_divide(self) -> Self:
        if self.num_heads % self.num_groups:
            raise ValueError(f"num_heads {self.num_heads} is not a multiple of num_groups {self.num_groups}")
        return self

    def splits_over(self, tp: int, ranks: int) -> bool:
        """Whether heads split over tp and over ``ranks`` more, each with whole groups or a part of one."""
        groups = self.num_groups // tp
        is_even = self.num_groups % tp == 0 and self.num_heads % (tp * ranks) == 0
        return is_even and (groups % ranks == 0 or ranks % groups == 0)

    @property
    def inner_size(self) -> int:
        """Channels of the recurrence's input and output."""
        return self.num_heads * self.head_dim

    @property
    def conv_size(self) -> int:
        """Channels of the causal convolution: the input with all B and C."""
        return self.inner_size + 2 * self.num_groups * self.state_size


class GatedDeltaNet(Record):
    """Gated delta rule (arXiv 2412.06464): a state of k_head_dim x v_head_dim a value head, corrected each token."""

    kind: Literal["gated_delta_net"] = "gated_delta_net"
    num_k_heads: PositiveInt
    num_v_heads: PositiveInt
    k_head_dim: PositiveInt
    v_head_dim: PositiveInt
    conv_kernel: PositiveInt = 4
    chunk_size: PositiveInt = Field(default=64, description="tokens computed as one block of matrix products")

    @model_validator(mode="after")
    def _heads_divide(self) -> Self:
        if self.num_v_heads % self.num_k_heads:
            raise ValueError(f"num_v_heads {self.num_v_heads} is not a multiple of num_k_heads {self.num_k_heads}")
        return self

    def splits_over(self, tp: int, ranks: int) -> bool:
        """Whether heads split over tp and over ``ranks`` more."""
        return self.num_k_heads % (tp * ranks) == 0

    @property
    def inner_size(self) -> int:
        """Channels of the values and of the output."""
        return self.num_v_heads * self.v_head_dim

    @property
    def conv_size(self) -> int:
        """Channels of the causal convolution: queries, keys and values."""
        return 2 * self.num_k_heads * self.k_head_dim + self.inner_size


LinearMixer = Annotated[Mamba2 | GatedDeltaNet, Field(discriminator="kind")]
