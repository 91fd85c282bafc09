"""Power and clock of a GPU beside the timed steps, through torch's door to the driver's management library."""

import statistics
from dataclasses import dataclass, field

import torch

_MILLIWATT_W = 1e-3


@dataclass
class PowerSamples:
    """Readings taken between steps; the driver reports power as a mean over about the last second.

    ``problem`` says why there are none: nvidia-ml-py is missing, or the driver refuses.
    """

    watts: list[float] = field(default_factory=list)
    clocks_mhz: list[float] = field(default_factory=list)
    problem: str = ""

    def sample(self, device: torch.device) -> None:
        """Add one reading of a CUDA device; a CPU has none."""
        if device.type != "cuda" or self.problem:
            return
        try:
            self.watts.append(torch.cuda.power_draw(device) * _MILLIWATT_W)
            self.clocks_mhz.append(float(torch.cuda.clock_rate(device)))
        except Exception as error:  # noqa: BLE001 - pynvml's own error is a plain Exception
            self.problem = f"not measured: {type(error).__name__}: {error}"

    def provenance(self) -> dict[str, str]:
        """Means, ready to be shown; nothing on a CPU."""
        if self.problem or not self.watts:
            return {"mean_power": self.problem} if self.problem else {}
        return {
            "mean_power": f"{statistics.mean(self.watts):.0f} W over {len(self.watts)} readings",
            "sm_clock": f"{statistics.mean(self.clocks_mhz):.0f} MHz",
        }
