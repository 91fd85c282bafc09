"""The constants that a fit to measured runs may move: few, each physical, shared by all models and rows."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from moeplan.hwprofiles.schema import HardwareProfile, Sourced
from moeplan.simulator.stack import SoftwareStack


@dataclass(frozen=True, slots=True)
class FitConstant:
    """One constant: a field of some hardware profiles, or of the ``time`` table of some stacks (none: of all).

    ``of_hybrids``: moved by runs of hybrid models, which move no other; so those runs test what all models share.
    """

    field: str
    owner: Literal["profile", "stack"]
    names: tuple[str, ...]
    unit: str
    low: float
    high: float
    meaning: str
    of_hybrids: bool = False

    @property
    def label(self) -> str:
        """Unique name: the field, and whose."""
        return f"{self.field}[{'+'.join(self.names) or 'all'}]"

    def owns(self, name: str) -> bool:
        """Whether profile or stack ``name`` takes it."""
        return not self.names or name in self.names


HOPPER, HGX_BLACKWELL = ("h100", "h200"), ("b200", "b300")
SUSTAINED = "GEMM rate of a training step over a burst reading, under the power limit"
FIT_CONSTANTS: tuple[FitConstant, ...] = (
    FitConstant("sustained_frac", "profile", HOPPER, "fraction", 0.6, 1.0, SUSTAINED),
    FitConstant("sustained_frac", "profile", HGX_BLACKWELL, "fraction", 0.6, 1.0, SUSTAINED),
    FitConstant("sustained_frac", "profile", ("gb200",), "fraction", 0.6, 1.0, SUSTAINED),
    FitConstant("sustained_frac", "profile", ("gb300",), "fraction", 0.6, 1.0, SUSTAINED),
    FitConstant("launch_s", "profile", (*HOPPER, *HGX_BLACKWELL), "s", 4e-6, 4e-5, "host time of an eager kernel"),
    FitConstant("launch_s", "profile", ("gb200", "gb300"), "s", 4e-6, 4e-5, "the same on a Grace host"),
    FitConstant("grouped_gemm_frac", "stack", (), "fraction", 0.4, 1.0, "grouped GEMM an expert at a time over dense"),
    FitConstant("fp8_gemm_frac", "stack", (), "fraction", 0.6, 1.1, "per-tensor FP8 GEMM over the best shapes' ratio"),
    FitConstant("elementwise_factor", "stack", (), "ratio", 0.8, 3.0, "element-wise traffic over ideal fusion"),
    FitConstant("stop_launches", "stack", (), "launches", 0.0, 120.0, "host work at a dispatch before the next kernel"),
    FitConstant("unfused_permute_factor", "stack", (), "ratio", 1.5, 16.0, "the same without the fused kernel"),
    FitConstant("exchange_contention_frac", "stack", (), "fraction", 0.0, 0.5, "compute lost beside an exchange"),
    # A third of an H100's memory bandwidth to all of a B200's (3.35 and 8 TB/s).
    FitConstant(
        "scan_bytes_per_s",
        "stack",
        (),
        "bytes/s",
        1e12,
        8e12,
        "most that kernels of a linear mixer move",
        of_hybrids=True,
    ),
    # Experts under power-law routing took 1.28 to 1.80 times the balanced time, 32 of 256 on each of 8 ranks, top 8
    # (hardware facts, section 4.5): 0.035 to 0.10.
    FitConstant("choice_spread_frac", "stack", (), "fraction", 0.035, 0.1, "spread of what experts are chosen by"),
)


def current_values(
    constants: Sequence[FitConstant], profiles: Mapping[str, HardwareProfile], stacks: Mapping[str, SoftwareStack]
) -> list[float]:
    """The value of each constant now: of the first owner that has it."""
    return [_value(constant, profiles, stacks) for constant in constants]


def _value(
    constant: FitConstant, profiles: Mapping[str, HardwareProfile], stacks: Mapping[str, SoftwareStack]
) -> float:
    if constant.owner == "profile":
        number = next(getattr(one, constant.field) for name, one in profiles.items() if constant.owns(name))
    else:
        number = next(getattr(one.time, constant.field) for name, one in stacks.items() if constant.owns(name))
    return constant.high if number is None else float(number.value)


def with_values(
    constants: Sequence[FitConstant],
    values: Sequence[float],
    profiles: Mapping[str, HardwareProfile],
    stacks: Mapping[str, SoftwareStack],
    ref: str,
) -> tuple[dict[str, HardwareProfile], dict[str, SoftwareStack]]:
    """Profiles and stacks with the constants set, as ``fitted``."""
    made_profiles, made_stacks = dict(profiles), dict(stacks)
    for constant, value in zip(constants, values, strict=True):
        number = Sourced(value=float(f"{value:.4g}"), source="fitted", ref=ref)
        if constant.owner == "profile":
            for name in filter(constant.owns, profiles):
                made_profiles[name] = made_profiles[name].model_copy(update={constant.field: number})
        else:
            for name in filter(constant.owns, stacks):
                time = made_stacks[name].time.model_copy(update={constant.field: number})
                made_stacks[name] = made_stacks[name].model_copy(update={"time": time})
    return made_profiles, made_stacks
