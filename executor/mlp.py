"""The dense MLP, also used as shared expert: width split over tensor-parallel ranks.

Shapes: L tokens of this rank, T tokens of the tp group, H hidden, F width (of this rank).
"""

from torch import Tensor, nn

from moeplan.executor.linear import column_linear, row_linear
from moeplan.executor.mesh import Group
from moeplan.executor.parameters import ParameterTable, residual_std, split_piece
from moeplan.executor.scopes import scope
from moeplan.kernels.activation import activation
from moeplan.model_spec import ModelSpec


class Mlp(nn.Module):
    """Gate and up projection fused into one matrix (or one alone), activation, down projection."""

    def __init__(self, model: ModelSpec, name: str, ffn_size: int, group: Group, table: ParameterTable) -> None:
        super().__init__()
        self.group, self.kind = group, model.activation
        hidden, width = model.hidden_size, ffn_size // group.size
        parts = ("gate", "up") if model.is_gated else ("up",)
        pieces = [
            split_piece(f"{name}.{part}.weight", (ffn_size, hidden), 0, group, start=index * width)
            for index, part in enumerate(parts)
        ]
        self.in_weight = table.add(*pieces, shape=(len(parts) * width, hidden))
        down = split_piece(f"{name}.down.weight", (hidden, ffn_size), 1, group, std=residual_std(model.num_layers))
        self.out_weight = table.add(down, shape=(hidden, width))

    def forward(self, x_LH: Tensor) -> Tensor:
        """This rank's tokens through the whole MLP."""
        return self.project(self.expand(x_LH))

    def expand(self, x_LH: Tensor) -> Tensor:
        """Activations hidden_TF of the tp group's tokens at this rank's width."""
        hidden_TF = column_linear(x_LH, self.in_weight, None, self.group)
        with scope("elementwise"):
            return activation(hidden_TF, self.kind)

    def project(self, hidden_TF: Tensor) -> Tensor:
        """Back to this rank's tokens."""
        return row_linear(hidden_TF, self.out_weight, None, self.group)
