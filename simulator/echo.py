"""Clones of hot experts: what their weights take, and the load that is left (report section 3.5)."""

from moeplan.model_spec import LayerKind, ModelSpec
from moeplan.point import Point
from moeplan.simulator.activations import ActivationKind
from moeplan.vocabulary import PRECISIONS


def clone_elements(model: ModelSpec, num_slots: int, etp: int) -> float:
    """Weights in the spare slots of one rank's layer: both matrices of an expert each."""
    if model.moe is None:
        return 0.0
    return num_slots * model.mlp_matrices * model.expert_hidden_size * model.moe.expert_ffn_size / etp


def clone_bytes(model: ModelSpec, kind: ActivationKind, point: Point) -> float:
    """Bytes of clones that one layer keeps for the backward of one micro-batch."""
    layer = model.mtp_kind if kind == "mtp" else kind
    if not isinstance(layer, LayerKind) or layer.mlp != "moe":
        return 0.0
    return clone_elements(model, point.echo_slots, point.etp) * PRECISIONS[point.precision].activation_bytes


def levelled_load(load: float, num_slots: int) -> float:
    """Tokens of the busiest rank over the mean once clones took what exceeds it: enough slots level a load."""
    return min(load, 1.0) if num_slots else load
