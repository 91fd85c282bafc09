"""What a release switches on where nobody says otherwise: the recipes its users run, as rules."""

from dataclasses import dataclass
from typing import Any, Literal

from pydantic import Field

from moeplan.hwprofiles.schema import DispatchBackend
from moeplan.record import Record
from moeplan.vocabulary import Bf16Module, CudaGraphScope, OffloadModule, PrecisionName, RecomputeModule, Sharding


@dataclass(frozen=True, slots=True)
class Setting:
    """What defaults depend on. ``backend`` is the dispatcher's, None where it is not chosen yet."""

    model: str
    is_moe: bool
    hardware: str
    scale_up_domain_gpus: int
    precision: PrecisionName
    sharding: Sharding = "optimizer"
    backend: DispatchBackend | None = None


class Features(Record):
    """Plan fields a default may set; None: this rule does not say."""

    backend: DispatchBackend | None = None
    ep_overlap: bool | None = None
    delay_wgrad: bool | None = None
    cuda_graph: tuple[CudaGraphScope, ...] | None = None
    fused_grouped_mlp: bool | None = None
    permute_fusion: bool | None = None
    router_fusion: bool | None = None
    recompute: tuple[RecomputeModule, ...] | None = None
    offload_layers: int | None = None
    offload_modules: tuple[OffloadModule, ...] | None = None
    tp_comm_overlap: bool | None = None
    fp8_primary_weights: bool | None = None
    moment_dtype: Literal["fp32", "bf16"] | None = None
    bf16_last_layers: int | None = None
    bf16_modules: tuple[Bf16Module, ...] | None = None

    def kept_wide(self, *, is_low: bool) -> dict[str, Any]:
        """Plan fields of what stays in bf16 where the plan's precision ``is_low``."""
        if not is_low:
            return {"bf16_last_layers": 0, "bf16_modules": ()}
        return {"bf16_last_layers": self.bf16_last_layers or 0, "bf16_modules": self.bf16_modules or ()}


class DefaultRule(Record):
    """Features of the plans that meet every condition given."""

    moe: bool | None = None
    scale_up: Literal["node", "rack"] | None = Field(default=None, description="rack: more than 8 GPUs on NVLink")
    hardware: tuple[str, ...] = ()
    models: tuple[str, ...] = ()
    precisions: tuple[PrecisionName, ...] = ()
    backends: tuple[DispatchBackend, ...] = ()
    sharding: Sharding | None = None
    set: Features

    def meets(self, setting: Setting) -> bool:
        """Whether the rule speaks of ``setting``."""
        domain = "rack" if setting.scale_up_domain_gpus > 8 else "node"
        return (
            self.moe in (None, setting.is_moe)
            and self.scale_up in (None, domain)
            and self.sharding in (None, setting.sharding)
            and (not self.hardware or setting.hardware in self.hardware)
            and (not self.models or setting.model in self.models)
            and (not self.precisions or setting.precision in self.precisions)
            and (not self.backends or setting.backend in self.backends)
        )


def features(rules: tuple[DefaultRule, ...], setting: Setting) -> Features:
    """Every feature as the first rule that meets the setting and states it has it."""
    found: dict[str, object] = {}
    for rule in rules:
        if rule.meets(setting):
            for name in type(rule.set).model_fields:
                value = getattr(rule.set, name)
                if value is not None:
                    found.setdefault(name, value)
    return Features.model_validate(found)
