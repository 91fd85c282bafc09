"""Multi-token prediction: a further layer a depth, each predicting one token further on (DeepSeek-V3).

Shapes: L tokens of this rank, H hidden.
"""

from functools import partial

import torch
from torch import Tensor, nn

from moeplan.executor.decoder_layer import DecoderLayer
from moeplan.executor.linear import local_linear
from moeplan.executor.mesh import Mesh
from moeplan.executor.offload import offloading
from moeplan.executor.pack_layout import PackLayout
from moeplan.executor.parameters import ParameterTable
from moeplan.executor.recompute import checkpointed
from moeplan.executor.scopes import scope
from moeplan.kernels.norm import rms_norm
from moeplan.plan import Plan


class MtpLayer(nn.Module):
    """Normed embedding and hidden state of the depth before, side by side, through a projection, a layer and a norm.

    Its parameters are named as decoder layer ``layer`` (num_layers and up), as DeepSeek's checkpoints have it; depths
    that share them run one such module, the first.
    """

    def __init__(self, plan: Plan, layer: int, mesh: Mesh, table: ParameterTable) -> None:
        super().__init__()
        hidden, name = plan.model.hidden_size, f"layers.{layer}"
        self.eps, self.recompute_layer = plan.model.norm_eps, "full" in plan.recompute
        self.embedding_norm = table.add_norm(f"{name}.embedding_norm.weight", hidden)
        self.hidden_norm = table.add_norm(f"{name}.hidden_norm.weight", hidden)
        self.projection = table.add_whole(f"{name}.projection.weight", (hidden, 2 * hidden))
        self.layer = DecoderLayer(plan, layer, mesh, table)
        self.final_norm = table.add_norm(f"{name}.final_norm.weight", hidden)

    def forward(self, embedding_LH: Tensor, hidden_LH: Tensor, layout: PackLayout | None = None) -> Tensor:
        """Normed hidden state of this depth, for the shared head and the depth after it."""
        both = (self._norm(embedding_LH, self.embedding_norm), self._norm(hidden_LH, self.hidden_norm))
        x_LH = local_linear(torch.cat(both, 1), self.projection)
        if self.recompute_layer:
            with offloading("attn_norm", x_LH):
                x_LH = checkpointed(partial(self.layer, layout=layout), x_LH)
        else:
            x_LH = self.layer(x_LH, layout=layout)
        return self._norm(x_LH, self.final_norm)

    def _norm(self, x_LH: Tensor, weight_H: Tensor) -> Tensor:
        with scope("elementwise"):
            return rms_norm(x_LH, weight_H, self.eps)
