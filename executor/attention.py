"""Attention with heads split over tensor-parallel ranks: grouped-query and multi-head latent.

Shapes: L tokens of this rank, T = B * S tokens of the tp group (S of each of B sequences, one after the other; under
context parallelism a part of each), H hidden, N heads of this rank, D width of a head.
"""

from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from moeplan.executor.attention_sink import with_sink_key
from moeplan.executor.collectives import gather_rows
from moeplan.executor.context import Core, Documents, context_attention, document_positions, pack_attention
from moeplan.executor.linear import column_linear, local_linear, row_linear
from moeplan.executor.mesh import Group, Mesh
from moeplan.executor.offload import offloading
from moeplan.executor.pack_layout import PackLayout
from moeplan.executor.parameters import ParameterTable, residual_std, split_piece
from moeplan.executor.recompute import checkpointed, dropping_output
from moeplan.executor.ring import RingAttention
from moeplan.executor.rope import model_rotary_tables
from moeplan.executor.scopes import scope
from moeplan.kernels import flash_attention
from moeplan.kernels.back_end_choice import chosen
from moeplan.kernels.norm import rms_norm
from moeplan.kernels.rotary import apply_rotary
from moeplan.kernels.sigmoid_gate import sigmoid_gate
from moeplan.kernels.split_qkv import split_qkv
from moeplan.mixers import GqaAttention, MlaAttention
from moeplan.model_spec import YarnScaling
from moeplan.plan import Plan

# One H200, 4 x 4096, 32 heads of 128: cuDNN 548 TFLOP/s forward and 453 backward, torch's flash attention 321 and 250.
# Flash takes what cuDNN refuses (masks of a window among them), and the last two take anything.
BACKENDS = (
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
)
SDPA = "sdpa"  # the name of these as one back end
# Of the norms of latents, whatever the model's own norms have: DeepSeek's code and its successors leave it at that.
LATENT_NORM_EPS = 1e-6
_ALONE = Group((0,), 0, None)


def attention_backends(device: torch.device) -> AbstractContextManager[object]:
    """Back ends of the attention core in order of preference; a CPU has its own rule."""
    return sdpa_kernel(list(BACKENDS), set_priority=True) if device.type == "cuda" else nullcontext()


def core_attention(
    q_BSND: Tensor, k_BSMD: Tensor, v_BSMD: Tensor, mask_SS: Tensor | None, sinks_N: Tensor | None = None
) -> Tensor:
    """Causal attention out_BSND over M key-value heads; ``mask_SS`` (true: seen) narrows it to a window.

    ``sinks_N``: a score of each head that takes part in its softmax and brings no value.
    """
    # Where torch's kernels for CPUs would keep all scores or the mask, and for sinks, which its kernels do not know.
    is_odd = q_BSND.device.type == "cpu" and (mask_SS is not None or q_BSND.shape[3] != v_BSMD.shape[3])
    if is_odd or (sinks_N is not None and mask_SS is None):
        return RingAttention(_ALONE, mask_SS)(q_BSND, k_BSMD, v_BSMD, sinks_N)
    if mask_SS is None:
        return causal_attention(q_BSND, k_BSMD, v_BSMD)
    scale = q_BSND.shape[3] ** -0.5
    if sinks_N is not None:
        q_BSND, k_BSMD, v_BSMD = with_sink_key(q_BSND, k_BSMD, v_BSMD, sinks_N, scale)
        mask_SS = F.pad(mask_SS, (1, 0), value=True)
    with scope("attention"):
        return _sdpa(q_BSND, k_BSMD, v_BSMD, mask_SS, scale)


def causal_attention(q_BSND: Tensor, k_BSMD: Tensor, v_BSMD: Tensor, *, backend: str | None = None) -> Tensor:
    """Attention of whole sequences; without ``backend`` by the one chosen for these heads, else torch's."""
    shape = flash_attention.shape_of(q_BSND, k_BSMD, v_BSMD)
    name = backend or chosen(flash_attention.OPERATION, shape)
    with scope("attention"):
        if name == flash_attention.NAME:
            return flash_attention.attend(q_BSND, k_BSMD, v_BSMD)
        return _sdpa(q_BSND, k_BSMD, v_BSMD, None, q_BSND.shape[3] ** -0.5)


def _sdpa(q_BSND: Tensor, k_BSMD: Tensor, v_BSMD: Tensor, mask_SS: Tensor | None, scale: float) -> Tensor:
    with attention_backends(q_BSND.device):
        out_BNSD = F.scaled_dot_product_attention(
            q_BSND.transpose(1, 2),
            k_BSMD.transpose(1, 2),
            v_BSMD.transpose(1, 2),
            attn_mask=mask_SS,
            is_causal=mask_SS is None,
            scale=scale,
            enable_gqa=q_BSND.shape[2] != k_BSMD.shape[2],
        )
    return out_BNSD.transpose(1, 2)


def window_mask(seq_len: int, window: int, device: torch.device) -> Tensor | None:
    """Keys each query sees: itself and the ``window`` - 1 before it. None where the window holds the sequence."""
    if window >= seq_len:
        return None
    distance_SS = torch.arange(seq_len, device=device)[:, None] - torch.arange(seq_len, device=device)
    return (distance_SS >= 0) & (distance_SS < window)


def whole_attention(documents: Documents, window: int | None, device: torch.device) -> Core:
    """Attention inside each document of a sequence that is here from end to end."""
    mask_LL = window_mask(max(documents), window, device) if window else None
    if len(documents) == 1:
        return partial(core_attention, mask_SS=mask_LL)
    masks = tuple(
        mask_LL[:length, :length] if mask_LL is not None and window is not None and window < length else None
        for length in documents
    )
    return partial(packed_attention, documents=documents, masks=masks)


def packed_attention(
    q_BSND: Tensor,
    k_BSMD: Tensor,
    v_BSMD: Tensor,
    sinks_N: Tensor | None = None,
    *,
    documents: Documents,
    masks: tuple[Tensor | None, ...],
) -> Tensor:
    """Causal attention of each document by itself, one call each: no mask is as long as the sequence.

    ``masks``: for each document as in :func:`core_attention`.
    """
    parts = zip(*(x.split(documents, 1) for x in (q_BSND, k_BSMD, v_BSMD)), strict=True)
    outs = [core_attention(q, k, v, mask, sinks_N) for (q, k, v), mask in zip(parts, masks, strict=True)]
    return torch.cat(outs, 1)


class _Place(NamedTuple):
    """What attention knows of its tokens: how many of each sequence, rotary tables, and who sees whom."""

    seq_len: int
    rotary: tuple[Tensor, Tensor]
    attend: Core


def _gated(attend: Core, gate_BSND: Tensor | None, q_BSND: Tensor, k_BSMD: Tensor, v_BSMD: Tensor) -> Tensor:
    out_BSND = attend(q_BSND, k_BSMD, v_BSMD)
    if gate_BSND is None:
        return out_BSND
    with scope("elementwise"):
        return sigmoid_gate(out_BSND, gate_BSND)


class _AttentionBase(nn.Module):
    """Rotary tables, the core, and the output projection: what both kinds share."""

    def __init__(self, plan: Plan, layer: int, mesh: Mesh, table: ParameterTable, rotary_width: int) -> None:
        super().__init__()
        model, group = plan.model, mesh.tp
        attention = model.attention
        self.model, self.group, self.eps = model, group, model.norm_eps
        self.rotary_width = rotary_width
        self.num_heads = attention.num_heads // group.size
        self.recompute_core = "core_attn" in plan.recompute
        self.rotary_dtype = torch.promote_types(table.dtype, torch.float32)
        self.window = attention.sliding_window if model.is_windowed(layer) else None
        self.sinks: nn.Parameter | None = None
        if isinstance(attention, GqaAttention) and attention.sinks:
            sinks = split_piece(f"layers.{layer}.attention.sinks", (attention.num_heads,), 0, group)
            self.sinks = table.add(sinks, shape=(self.num_heads,), is_decayed=False)
        # Sequences as long as the plan's are nowhere under dynamic cp: their mask of a window is not made.
        self.plan_place = None if plan.dynamic_cp else self._plan_place(plan, mesh, table.device)
        in_width = attention.num_heads * attention.v_head_dim
        shape = (model.hidden_size, in_width)
        name, std = f"layers.{layer}.attention.output", residual_std(model.num_layers)
        self.out_weight = table.add(
            split_piece(f"{name}.weight", shape, 1, group, std=std), shape=(shape[0], in_width // group.size)
        )
        self.out_bias: nn.Parameter | None = None
        if isinstance(attention, GqaAttention) and attention.out_bias:
            self.out_bias = table.add_whole(f"{name}.bias", (model.hidden_size,), std=0.0, is_decayed=False)

    def place(self, layout: PackLayout | None) -> _Place:
        """That of the plan's sequences, or of a pack."""
        if layout is None:
            assert self.plan_place is not None
            return self.plan_place
        return layout.keep((self.rotary_width, self.window), partial(self._pack_place, layout))

    def _plan_place(self, plan: Plan, mesh: Mesh, device: torch.device) -> _Place:
        whole = partial(whole_attention, plan.documents, self.window, device)
        attend = context_attention(plan, self.window, whole, mesh, device)
        return self._placed(plan.documents, mesh.cp, attend, device)

    def _pack_place(self, layout: PackLayout) -> _Place:
        documents, group, device = layout.documents, layout.group, layout.device
        whole = partial(whole_attention, documents, self.window, device)
        return self._placed(documents, group, pack_attention(documents, self.window, whole, group, device), device)

    def _placed(self, documents: Documents, group: Group, attend: Core, device: torch.device) -> _Place:
        """Of documents that ``group`` shares."""
        positions = document_positions(documents, group, device)
        rotary = model_rotary_tables(self.model, positions, self.rotary_width, self.rotary_dtype)
        return _Place(sum(documents) // group.size, rotary, attend)

    def rotate(self, x_BSND: Tensor, place: _Place) -> Tensor:
        """The first ``rotary_width`` channels turned by their positions."""
        if not self.rotary_width:
            return x_BSND
        with scope("elementwise"):
            if self.rotary_width == x_BSND.shape[3]:
                return apply_rotary(x_BSND, *place.rotary)
            turned, kept = x_BSND.split([self.rotary_width, x_BSND.shape[3] - self.rotary_width], 3)
            return torch.cat([apply_rotary(turned, *place.rotary), kept], 3)

    def core(
        self, q_BSND: Tensor, k_BSMD: Tensor, v_BSMD: Tensor, place: _Place, gate_BSND: Tensor | None = None
    ) -> Tensor:
        """What the heads attend to, behind their gate where they have one."""
        attend = place.attend if self.sinks is None else partial(place.attend, sinks_N=self.sinks)
        if self.recompute_core:
            with offloading("core_attn", q_BSND, k_BSMD, v_BSMD):
                return checkpointed(partial(_gated, attend), gate_BSND, q_BSND, k_BSMD, v_BSMD)
        with offloading("core_attn", q_BSND, k_BSMD, v_BSMD, rest="attn_proj"):
            out_BSND = attend(q_BSND, k_BSMD, v_BSMD)
        if gate_BSND is None:
            return out_BSND
        with scope("elementwise"), offloading("attn_proj", out_BSND):
            return sigmoid_gate(out_BSND, gate_BSND)

    def project_out(self, out_BSND: Tensor) -> Tensor:
        out_TI = out_BSND.flatten(2).flatten(0, 1)
        with offloading("attn_proj", out_TI):
            return row_linear(out_TI, self.out_weight, self.out_bias, self.group)


class GroupedQueryAttention(_AttentionBase):
    """Queries, keys and values by one fused matrix; keys and values shared by groups of heads."""

    def __init__(self, plan: Plan, layer: int, mesh: Mesh, table: ParameterTable, attention: GqaAttention) -> None:
        super().__init__(plan, layer, mesh, table, (attention.rotary_dim or attention.head_dim) * attention.rotary)
        group = mesh.tp
        self.head_dim, self.num_kv_heads = attention.head_dim, attention.num_kv_heads // group.size
        hidden, name = plan.model.hidden_size, f"layers.{layer}.attention"
        heads = {"query": attention.num_heads, "key": attention.num_kv_heads, "value": attention.num_kv_heads}
        self.has_gate = attention.output_gate
        if self.has_gate:
            heads["gate"] = attention.num_heads
        pieces, biases, start = [], [], 0
        for part, num in heads.items():
            rows = num * attention.head_dim
            pieces.append(split_piece(f"{name}.{part}.weight", (rows, hidden), 0, group, start=start))
            biases.append(split_piece(f"{name}.{part}.bias", (rows,), 0, group, start=start, std=0.0))
            start += rows // group.size
        self.qkv_weight = table.add(*pieces, shape=(start, hidden))
        self.qkv_bias = table.add(*biases, shape=(start,), is_decayed=False) if attention.qkv_bias else None
        self.q_norm = table.add_norm(f"{name}.query_norm.weight", attention.head_dim) if attention.qk_norm else None
        self.k_norm = table.add_norm(f"{name}.key_norm.weight", attention.head_dim) if attention.qk_norm else None

    def forward(self, x_LH: Tensor, layout: PackLayout | None = None) -> Tensor:
        """Attention's addition to the residual stream of this rank's tokens."""
        place = self.place(layout)
        with offloading("qkv_linear", x_LH):
            qkv_TO = column_linear(x_LH, self.qkv_weight, self.qkv_bias, self.group)
        heads_BSOD = qkv_TO.view(-1, place.seq_len, qkv_TO.shape[1] // self.head_dim, self.head_dim)
        if self.rotary_width == self.head_dim and not self.has_gate:
            norms = None if self.q_norm is None or self.k_norm is None else (self.q_norm, self.k_norm)
            with scope("elementwise"):
                heads = split_qkv(heads_BSOD, self.num_kv_heads, place.rotary, norms, self.eps)
            return self.project_out(self.core(*heads, place))
        kinds = [self.num_heads, self.num_kv_heads, self.num_kv_heads, self.num_heads * self.has_gate]
        q_BSND, k_BSMD, v_BSMD, gate = heads_BSOD.split(kinds, 2)
        gate_BSND = gate if self.has_gate else None
        with scope("elementwise"):
            if self.q_norm is not None and self.k_norm is not None:
                q_BSND, k_BSMD = rms_norm(q_BSND, self.q_norm, self.eps), rms_norm(k_BSMD, self.k_norm, self.eps)
            else:
                # The rotated q and k are new tensors, so views of the rest would keep the whole of qkv for backward.
                v_BSMD = v_BSMD.contiguous()
                gate_BSND = None if gate_BSND is None else gate_BSND.contiguous()
                if not self.rotary_width:
                    q_BSND, k_BSMD = q_BSND.contiguous(), k_BSMD.contiguous()
        turned = self.rotate(q_BSND, place), self.rotate(k_BSMD, place)
        return self.project_out(self.core(*turned, v_BSMD, place, gate_BSND))


class LatentAttention(_AttentionBase):
    """Low-rank queries and keys-values; each rank expands the latents to its own heads (DeepSeek-V2).

    The projections down are replicated and work on the rank's own tokens, so only latents are gathered.
    """

    def __init__(self, plan: Plan, layer: int, mesh: Mesh, table: ParameterTable, attention: MlaAttention) -> None:
        super().__init__(plan, layer, mesh, table, attention.qk_rope_head_dim)
        self.spec, self.recompute_up = attention, "mla_up_proj" in plan.recompute
        scaling = plan.model.rope_scaling
        self.query_factor = scaling.softmax_factor if isinstance(scaling, YarnScaling) else 1.0
        hidden, name = plan.model.hidden_size, f"layers.{layer}.attention"
        q_rank, kv_rank = attention.q_lora_rank, attention.kv_lora_rank
        q_rows = attention.num_heads * attention.qk_head_dim
        kv_rows = attention.num_heads * (attention.qk_nope_head_dim + attention.v_head_dim)
        down_width = kv_rank + attention.qk_rope_head_dim
        self.q_down = table.add_whole(f"{name}.query_down.weight", (q_rank, hidden)) if q_rank else None
        self.q_norm = table.add_norm(f"{name}.query_norm.weight", q_rank) if q_rank else None
        self.q_up = self._split_rows(table, f"{name}.query_up.weight", q_rows, q_rank or hidden)
        self.kv_down = table.add_whole(f"{name}.key_value_down.weight", (down_width, hidden))
        self.kv_norm = table.add_norm(f"{name}.key_value_norm.weight", kv_rank)
        self.kv_up = self._split_rows(table, f"{name}.key_value_up.weight", kv_rows, kv_rank)

    def _split_rows(self, table: ParameterTable, name: str, rows: int, width: int) -> nn.Parameter:
        piece = split_piece(name, (rows, width), 0, self.group)
        return table.add(piece, shape=(rows // self.group.size, width))

    def forward(self, x_LH: Tensor, layout: PackLayout | None = None) -> Tensor:
        """Attention's addition to the residual stream of this rank's tokens."""
        place = self.place(layout)
        expand, finish = partial(self._expand, place), partial(self._finish, place)
        with offloading("qkv_linear", x_LH):
            q_latent_LI = x_LH
            if self.q_down is not None and self.q_norm is not None:
                q_latent_LI = self._norm(local_linear(x_LH, self.q_down), self.q_norm)
            down_LI = local_linear(x_LH, self.kv_down)
            kv_latent_LI, k_rope_LD = down_LI.split([self.spec.kv_lora_rank, self.spec.qk_rope_head_dim], 1)
            kv_latent_LI = self._norm(kv_latent_LI, self.kv_norm)
            latents = (q_latent_LI, kv_latent_LI, k_rope_LD)
            if self.recompute_up:
                return dropping_output(expand, latents, finish)
            return finish(*expand(*latents))

    def _norm(self, x_LI: Tensor, weight_I: Tensor) -> Tensor:
        with scope("elementwise"):
            return rms_norm(x_LI, weight_I, LATENT_NORM_EPS)

    def _expand(
        self, place: _Place, q_latent_LI: Tensor, kv_latent_LI: Tensor, k_rope_LD: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values of this rank's heads from the latents of this rank's tokens."""
        spec, shape = self.spec, (-1, place.seq_len, self.num_heads)
        nope, rope = spec.qk_nope_head_dim, spec.qk_rope_head_dim
        q_BSND = column_linear(q_latent_LI, self.q_up, None, self.group).view(*shape, nope + rope)
        kv_BSND = column_linear(kv_latent_LI, self.kv_up, None, self.group).view(*shape, nope + spec.v_head_dim)
        k_rope_BS1D = self.rotate(gather_rows(k_rope_LD, self.group).reshape(-1, place.seq_len, 1, rope), place)
        q_nope_BSND, q_rope_BSND = q_BSND.split([nope, rope], 3)
        k_nope_BSND, v_BSND = kv_BSND.split([nope, spec.v_head_dim], 3)
        with scope("elementwise"):
            q_BSND = torch.cat([q_nope_BSND, self.rotate(q_rope_BSND, place)], 3)
            if self.query_factor != 1:
                q_BSND = q_BSND * self.query_factor
            k_BSND = torch.cat([k_nope_BSND, k_rope_BS1D.expand(-1, -1, self.num_heads, -1)], 3)
            v_BSND = v_BSND.contiguous()  # a view would keep the keys beside it for backward
        return q_BSND, k_BSND, v_BSND

    def _finish(self, place: _Place, q_BSND: Tensor, k_BSND: Tensor, v_BSND: Tensor) -> Tensor:
        return self.project_out(self.core(q_BSND, k_BSND, v_BSND, place))


def build_attention(
    plan: Plan, layer: int, mesh: Mesh, table: ParameterTable
) -> GroupedQueryAttention | LatentAttention:
    """The attention block of decoder layer ``layer``."""
    attention = plan.model.attention
    if isinstance(attention, MlaAttention):
        return LatentAttention(plan, layer, mesh, table, attention)
    return GroupedQueryAttention(plan, layer, mesh, table, attention)
