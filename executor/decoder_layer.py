"""One layer of the decoder on one rank of a folding.

Shapes: L tokens of this rank, H hidden. Between blocks each rank holds its own L tokens (sequence parallel), because
everything there works by token.
"""

from collections.abc import Callable
from functools import partial

from torch import Tensor, nn

from moeplan.executor.attention import build_attention
from moeplan.executor.gated_delta_net import GatedDeltaNetMixer
from moeplan.executor.linear_mixer import LinearMixerBase
from moeplan.executor.mamba import Mamba
from moeplan.executor.mesh import Mesh
from moeplan.executor.mlp import Mlp
from moeplan.executor.moe import MoeBlock
from moeplan.executor.offload import offloading
from moeplan.executor.pack_layout import PackLayout
from moeplan.executor.parameters import ParameterTable
from moeplan.executor.recompute import checkpointed, dropping
from moeplan.executor.scopes import scope
from moeplan.kernels.norm import residual_rms_norm, rms_norm
from moeplan.mixers import GatedDeltaNet
from moeplan.plan import Plan


def build_linear_mixer(plan: Plan, layer: int, mesh: Mesh, table: ParameterTable) -> LinearMixerBase:
    """The linear mixer of decoder layer ``layer``: forward(x_LH, layout) as attention's."""
    mixer = plan.model.linear_mixer
    if isinstance(mixer, GatedDeltaNet):
        return GatedDeltaNetMixer(plan, layer, mesh, table, mixer)
    assert mixer is not None
    return Mamba(plan, layer, mesh, table, mixer)


class DecoderLayer(nn.Module):
    """A mixer (attention or linear) and an MLP or experts, each after a norm and added to the residual stream.

    Layers of hybrid models may have one of the two alone. Layers from ``num_layers`` on are those of MTP.
    """

    def __init__(self, plan: Plan, layer: int, mesh: Mesh, table: ParameterTable) -> None:
        super().__init__()
        model, recompute = plan.model, plan.recompute
        kind = model.layer_kinds[layer] if layer < model.num_layers else model.mtp_kind
        self.layer, self.eps, self.drop_norms = layer, model.norm_eps, "layernorm" in recompute
        self.offloads_mlp_norm = "mlp_norm" in plan.offload_modules
        self.mixer: nn.Module | None = None
        self.mlp: nn.Module | None = None
        if kind.mixer != "none":
            name = "attention" if kind.mixer == "attention" else "mixer"
            self.mixer_norm = table.add_norm(f"layers.{layer}.{name}_norm.weight", model.hidden_size)
            build = build_attention if kind.mixer == "attention" else build_linear_mixer
            self.mixer = build(plan, layer, mesh, table)
        if kind.mlp == "none":
            return
        self.mlp_norm = table.add_norm(f"layers.{layer}.mlp_norm.weight", model.hidden_size)
        if kind.mlp == "moe" and model.moe is not None:
            self.mlp = MoeBlock(plan, model.moe, layer, mesh, table)
            self.recompute_mlp = "moe" in recompute
        else:
            self.mlp = Mlp(model, f"layers.{layer}.mlp", model.dense_ffn_size, mesh.tp, table)
            self.recompute_mlp = "mlp" in recompute

    def forward(self, x_LH: Tensor, layout: PackLayout | None = None) -> Tensor:
        """This rank's tokens through the layer; ``layout`` says where they lie, unless the plan does."""
        update_LH = None
        if self.mixer is not None:
            mix = partial(self.mixer, layout=layout)
            with offloading("attn_norm", x_LH):
                x_LH, update_LH = self._normed(x_LH, None, self.mixer_norm, mix, recompute=False)
        if self.mlp is not None:
            pack = layout if layout is not None and layout.is_pack else None
            update = partial(self.mlp, layout=pack) if isinstance(self.mlp, MoeBlock) else self.mlp
            if self.offloads_mlp_norm:  # which must know the sum before the norm keeps it
                x_LH, update_LH = self._add(x_LH, update_LH), None
            with offloading("mlp_norm", x_LH):
                x_LH, update_LH = self._normed(x_LH, update_LH, self.mlp_norm, update, recompute=self.recompute_mlp)
        return self._add(x_LH, update_LH)

    def _normed(
        self,
        x_LH: Tensor,
        update_LH: Tensor | None,
        weight_H: nn.Parameter,
        block: Callable[..., Tensor],
        *,
        recompute: bool,
    ) -> tuple[Tensor, Tensor]:
        """The stream with its update, and ``block`` of its norm, keeping as much as the plan's recompute leaves."""

        def norm(x_LH: Tensor) -> tuple[Tensor]:
            with scope("elementwise"):
                return (rms_norm(x_LH, weight_H, self.eps),)

        def run(normed_LH: Tensor) -> Tensor:
            return checkpointed(block, normed_LH) if recompute else block(normed_LH)

        with scope("elementwise"):
            x_LH, normed_LH = residual_rms_norm(x_LH, update_LH, weight_H, self.eps)
        return x_LH, dropping((normed_LH,), norm, (x_LH,), run) if self.drop_norms else run(normed_LH)

    def _add(self, x_LH: Tensor, update_LH: Tensor | None) -> Tensor:
        if update_LH is None:
            return x_LH
        with scope("elementwise"):
            return x_LH + update_LH
