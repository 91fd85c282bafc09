"""What a search is asked for, and the user's ``--fix`` and ``--forbid``."""

from dataclasses import dataclass, field
from typing import Any, get_args

from pydantic import TypeAdapter, ValidationError

from moeplan.errors import InvalidInputError, nearest_names
from moeplan.hwprofiles.schema import HardwareProfile
from moeplan.model_spec import ModelSpec
from moeplan.plan import Plan
from moeplan.simulator.stack import SoftwareStack
from moeplan.vocabulary import FlexBackend

# What --fix and --forbid may name: the axes searched, and further fields that every plan then takes as given.
PINNABLE = (
    "tp", "cp", "cp_comm", "cp_a2a_size", "packed_lengths", "pp", "vp", "etp", "ep", "mbs", "layout", "precision",
    "recompute", "dispatcher", "flex_backend",
    "memory_efficient_permutation", "sharding", "grad_dtype", "moment_dtype", "micro_batch_group_size",
    "overlap_grad_reduce", "overlap_param_gather", "ep_overlap", "delay_wgrad", "shared_expert_overlap",
    "dispatch_sms", "echo_slots", "paged_stash_factor", "routing",
    "cuda_graph", "fused_grouped_mlp", "permute_fusion", "router_fusion",
    "fp8_primary_weights", "fp8_attention", "tp_comm_overlap", "offload_layers", "offload_modules",
    "offload_optimizer_states", "optimizer_cpu_frac", "dp_replicate", "main_weight_remainders", "paired_wgrad",
    "bf16_first_layers", "bf16_last_layers", "bf16_modules",
)  # fmt: skip

# Left free by default: memory predictions of published runs are within 2 % at the median, and allocators need room.
MEMORY_MARGIN_FRAC = 0.03


@dataclass(frozen=True, slots=True)
class SearchRequest:
    """One search. ``hardware`` is the name or path that plans will carry; ``fixed`` pins Plan fields to one value."""

    model: ModelSpec
    hardware: str
    profile: HardwareProfile
    stack: SoftwareStack
    num_gpus: int
    seq_len: int
    global_batch_size: int
    fixed: dict[str, Any] = field(default_factory=dict)
    forbidden: dict[str, tuple[Any, ...]] = field(default_factory=dict)
    top_k: int = 10
    time_limit_s: float | None = None
    memory_margin_frac: float = MEMORY_MARGIN_FRAC

    @property
    def usable_bytes(self) -> float:
        """Device memory that plans may fill: the profile's, less the margin."""
        return self.profile.memory_bytes.value * (1 - self.memory_margin_frac)


def parse_pins(text: str, flag: str) -> dict[str, Any]:
    """``tp=1,pp=8,recompute=layernorm+moe_act`` as Plan fields; a list takes ``+``, ``none`` empties it.

    ``dispatcher=hybridep`` is short for ``dispatcher=flex,flex_backend=hybridep``.

    Raises InvalidInputError for an unknown key or a value of the wrong type.
    """
    pins: dict[str, Any] = {}
    for item in filter(None, (part.strip() for part in text.split(","))):
        key, separator, written = (part.strip() for part in item.partition("="))
        if not separator or not written:
            raise InvalidInputError(f"{flag}: got {item!r}, allowed: key=value", "for example tp=1,pp=8")
        if key not in PINNABLE:
            raise InvalidInputError(f"{flag}: unknown key {key!r}", nearest_names(key, PINNABLE))
        if key in pins:
            raise InvalidInputError(f"{flag}: {key} is given twice, {pins[key]} and {written}", "keep one of them")
        if key == "dispatcher" and written in get_args(FlexBackend):  # as tables of plans name it
            pins |= {"dispatcher": "flex", "flex_backend": written}
        else:
            pins[key] = _parse_value(key, written, flag)
    return pins


def parse_forbidden(text: str, flag: str) -> dict[str, tuple[Any, ...]]:
    """As :func:`parse_pins`, but the same key may come again: ``tp=4,tp=8`` forbids both."""
    forbidden: dict[str, tuple[Any, ...]] = {}
    for item in filter(None, (part.strip() for part in text.split(","))):
        pins = parse_pins(item, flag)
        if "flex_backend" in pins:  # dispatcher=deepep leaves the other back ends of flex
            pins.pop("dispatcher", None)
        for key, value in pins.items():
            forbidden[key] = (*forbidden.get(key, ()), value)
    return forbidden


def _parse_value(key: str, written: str, flag: str) -> Any:
    value: Any = written
    if key in ("recompute", "cuda_graph", "offload_modules", "packed_lengths", "paired_wgrad", "bf16_modules"):
        parts = [part for part in written.split("+") if part != "none"]
        value = tuple(parts if key == "packed_lengths" else sorted(parts))
    info = Plan.model_fields[key]
    try:
        return TypeAdapter(info.rebuild_annotation()).validate_python(value)
    except ValidationError as error:
        problem = error.errors()[0]["msg"]
        raise InvalidInputError(
            f"{flag}: {key}: {problem}, got {written!r}", "see the plan file for the allowed values"
        ) from None
