"""Time of what waits on the host: activations, optimizer states, and the part of the optimizer that runs there.

Activations leave during forward and come back during backward, beside the compute of the same stage (report section
1.6): what the link takes beyond that is waited for, and the copies take their bytes of device memory bandwidth from
the kernels beside them (the report's 1.6 to 2 % of throughput). Optimizer states leave beside the next forward and are
waited for when they come back (report section 1.2: 0.1 to 0.2 s a step on GB200). Adam on the host takes gradients over
the link, as many passes over host memory as PyTorch's kernels make, and sends the weights back.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from moeplan.hwprofiles.schema import HardwareProfile
from moeplan.model_spec import ModelSpec
from moeplan.point import Point
from moeplan.simulator.activations import kept_bytes
from moeplan.simulator.graph import Array
from moeplan.simulator.op_shapes import Part
from moeplan.simulator.stack import SoftwareStack

# fp32 elements that torch.optim.AdamW reads and writes of host memory for one parameter, kernel by kernel: decay 2,
# first moment 3, second moment 2 + 3, root 2, correction 2, epsilon 2, update 4.
HOST_ADAM_BYTES = 4 * 20
# Part of its peak that host memory reaches (STREAM on two-socket servers).
HOST_MEMORY_EFFICIENCY_FRAC = 0.8
# Gradients go to the host, and weights come back, in fp32.
HOST_ADAM_LINK_BYTES = 4 + 4


def stage_offloaded_bytes(
    model: ModelSpec, point: Point, stack: SoftwareStack, stages: Sequence[Mapping[Part, int]]
) -> Array:
    """Bytes of one micro-batch that each virtual stage sends to the host, (stages,)."""
    sent = np.zeros(len(stages))
    if not point.offload_modules and not point.offload_layers:
        return sent
    for rank in range(point.pp):
        mine = range(rank, len(stages), point.pp)
        num_layers = sum(count for at in mine for part, count in stages[at].items() if part.layer_kind is not None)
        whole_frac = min(point.offload_layers, max(num_layers - 1, 0)) / max(num_layers, 1)
        for at in mine:
            for part, count in stages[at].items():
                if part.layer_kind is not None:
                    kept = kept_bytes(model, part.layer_kind, point, stack)
                    sent[at] += count * (kept.offloaded_bytes + whole_frac * kept.kept_bytes)
    return sent


def transfer_seconds(sent_bytes: Array, compute_s: Array, profile: HardwareProfile) -> Array:
    """What one direction adds to each stage: the link's time beyond the compute beside it, and the memory it takes."""
    link = profile.host_link_bytes_per_s_per_dir_per_gpu.value
    memory = profile.hbm_bytes_per_s.value * profile.hbm_efficiency_frac.value
    added: Array = np.maximum(0.0, sent_bytes / link - compute_s) + sent_bytes / memory
    return added


def states_back_s(num_bytes: float, profile: HardwareProfile) -> float:
    """Wait for optimizer states to come back; they left beside the forward before."""
    return num_bytes / profile.host_link_bytes_per_s_per_dir_per_gpu.value


def host_adam_s(num_parameters: float, profile: HardwareProfile) -> float:
    """Adam of so many parameters on the host, transfers included; nothing overlaps (PyTorch's default).

    Qwen3-30B on H100 with 1.9 billion parameters a rank read 3.19 s (published measurement); this gives 2.8 s.
    """
    link = profile.host_link_bytes_per_s_per_dir_per_gpu.value
    memory = link if profile.host_memory_bytes_per_s_per_gpu is None else profile.host_memory_bytes_per_s_per_gpu.value
    each_s = HOST_ADAM_LINK_BYTES / link + HOST_ADAM_BYTES / (memory * HOST_MEMORY_EFFICIENCY_FRAC)
    return num_parameters * each_s
