"""A dense model's MLPs as the experts of an MoE model that computes the same at first (report section 8).

Each MLP is cut into G = dense width / expert width shards, and each shard copied E / G times: expert e is a copy of
shard e // (E / G). Rows of the router repeat G times, so that the experts of one copy score alike and are chosen
together.
"""

from dataclasses import dataclass
from typing import NoReturn

from moeplan.errors import InvalidInputError
from moeplan.hf_folder import HfFolder, check_same_model, check_tensors
from moeplan.model_spec import ModelSpec, Moe


@dataclass(frozen=True, slots=True)
class Upcycling:
    """``granularity`` G and copies of each shard; ``up_factor`` and ``down_factor`` scale the experts' matrices."""

    granularity: int
    num_copies: int
    up_factor: float
    down_factor: float

    def shard(self, expert: int) -> int:
        """Which shard of the dense MLP the expert is."""
        return expert // self.num_copies


def upcycling(model: ModelSpec, dense_width: int) -> Upcycling:
    """How ``model``'s experts come from MLPs of ``dense_width``; InvalidInputError where they cannot.

    Chosen weights that sum to s give s / G of the dense MLP, which factors whose effect is A = G / s make up for. The
    factors stand where they act exactly: on up and down projection where a gate is between them (the report scales
    the gate as well, which SiLU does not pass on), on both matrices of a squared ReLU, else on the second alone.
    """
    moe = model.moe
    assert moe is not None
    granularity = _granularity(moe, dense_width)
    router, weight_sum = moe.router, moe.router.scaling_factor
    if not router.normalize_top_k or moe.top_k == 1:
        # A fresh router scores all experts about alike.
        weight_sum *= moe.top_k * (0.5 if router.score_function == "sigmoid" else 1 / moe.num_experts)
    gain = granularity / weight_sum
    exponent = {"swiglu": 1 / 2, "geglu": 1 / 2, "squared_relu": 1 / 3}.get(model.activation, 0)
    up_factor = gain**exponent
    return Upcycling(granularity, moe.num_experts // granularity, up_factor, up_factor if exponent else gain)


def _granularity(moe: Moe, dense_width: int) -> int:
    granularity, rest = divmod(dense_width, moe.expert_ffn_size)
    if rest or not granularity:
        _refuse("expert_ffn_size", moe.expert_ffn_size, f"divisors of the dense checkpoint's width {dense_width}")
    for key, value in (("num_experts", moe.num_experts), ("top_k", moe.top_k)):
        if value % granularity:
            _refuse(key, value, f"multiples of {granularity}, the shards of width {moe.expert_ffn_size} of a dense MLP")
    if granularity > 1 and moe.router.num_groups > 1:
        _refuse("router.num_groups", moe.router.num_groups, "1 where experts are shards of a dense MLP")
    for key in ("shared_ffn_size", "mlp_bias", "latent_size"):
        if value := getattr(moe, key):
            _refuse(key, value, "none: a dense checkpoint has nothing to fill it with")
    return granularity


def _refuse(key: str, value: object, allowed: str) -> NoReturn:
    raise InvalidInputError(
        f"upcycle: model.moe.{key}: got {value}, allowed: {allowed}",
        "change the plan's model, or begin without upcycle",
    )


def check_upcycling(folder: HfFolder, model: ModelSpec) -> None:
    """Raise InvalidInputError unless the MoE ``model`` can begin as the dense model that the folder holds."""
    dense = folder.model
    if model.moe is None or dense.moe is not None:
        kinds = ["dense" if one.moe is None else "MoE" for one in (dense, model)]
        raise InvalidInputError(
            f"upcycle: got a checkpoint of a {kinds[0]} model for a plan of a {kinds[1]} model",
            "give a dense checkpoint and a plan of an MoE model",
        )
    if model.num_mtp_layers:
        raise InvalidInputError(
            f"upcycle: model.num_mtp_layers: got {model.num_mtp_layers}, allowed: 0",
            "a dense checkpoint has no MTP layer",
        )
    width = {} if model.has_dense_mlp else {"dense_ffn_size": dense.dense_ffn_size}
    pattern = model.layer_pattern.replace("E", "-")
    as_dense = {"moe": None, "num_dense_layers": 0, "moe_layer_period": 1, "layer_pattern": pattern, **width}
    check_same_model(folder, model.model_copy(update=as_dense))
    check_tensors(folder, dense)
    upcycling(model, dense.dense_ffn_size)
