"""Plans for other programs: the script or flags that carry out the same plan there.

Each exporter gives the files of one format, by name; what a format cannot say is refused, never left out silently.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from moeplan.errors import InvalidInputError
from moeplan.hwprofiles.schema import HardwareProfile
from moeplan.plan import Plan
from moeplan.planner.export_megatron import megatron_files
from moeplan.planner.export_slurm import slurm_files
from moeplan.run_config import RunConfig


@dataclass(frozen=True, slots=True)
class ExportJob:
    """A plan, how it is run, and the machine it is for."""

    plan: Plan
    run: RunConfig
    profile: HardwareProfile

    @property
    def gpus_per_host(self) -> int:
        """GPUs that share a host. Racks of one scale-up domain have hosts of four."""
        domain = int(self.profile.scale_up_domain_gpus.value)
        return min(self.plan.num_gpus, domain if domain <= _MAX_GPUS_PER_HOST else _GPUS_PER_RACK_HOST)


# HGX hosts have 8 GPUs; NVL72 racks are built of trays of 4.
_MAX_GPUS_PER_HOST, _GPUS_PER_RACK_HOST = 8, 4

Exporter = Callable[[Plan, RunConfig, int], Mapping[str, str]]
EXPORTERS: dict[str, Exporter] = {"slurm": slurm_files, "megatron-lm": megatron_files}


def export(job: ExportJob, target: str) -> Mapping[str, str]:
    """Contents of the files of one format, by name. Raises InvalidInputError where the format cannot say the plan."""
    if target not in EXPORTERS:
        raise InvalidInputError(f"to: got {target!r}, allowed: {', '.join(EXPORTERS)}", "name one or more, with commas")
    gpus = job.gpus_per_host
    if job.plan.num_gpus % gpus:
        raise InvalidInputError(
            f"num_gpus: {job.plan.num_gpus} GPUs do not fill hosts of {gpus}, allowed: a multiple of {gpus}",
            "search a plan for whole hosts",
        )
    return EXPORTERS[target](job.plan, job.run, gpus)
