"""Device memory that libraries take beside PyTorch's allocator: the exchange buffers of the flex dispatcher."""

from functools import lru_cache

from moeplan.hwprofiles.schema import HardwareProfile
from moeplan.model_spec import ModelSpec
from moeplan.point import Point

_TOKEN_BYTES = 2.0  # dispatch and combine travel in BF16 (report section 0: no FP8 dispatch in published runs)
_PROBABILITY_BYTES = 4.0  # fp32
_NODE_GPUS = 8  # DeepEP's NVLink peers, whatever the domain
# DeepEP, csrc/config.hpp and the tuned table of deep_ep/buffer.py: a channel for every two SMs (20 by default); each
# keeps 256 tokens received over NVLink for every peer and 128 sent and received over RDMA for every node.
_DEEPEP_SMS = 20
_NVLINK_TOKENS = 256
_RDMA_TOKENS = 128


def dispatcher_buffer_bytes(model: ModelSpec, point: Point, profile: HardwareProfile) -> float:
    """Bytes the flex dispatcher's library allocates once and keeps; 0 for dispatchers on collectives.

    HybridEP (csrc/hybrid_ep/buffer): room for every token of every rank of the group, in and out, since routing may
    send all of them here; between NVLink domains further rows for each other domain: one to dispatch, two to combine.
    DeepEP: rings of fixed length, a channel for every two SMs.
    """
    moe = model.moe
    num_ranks = point.ep * point.etp
    if moe is None or point.dispatcher != "flex" or point.flex_backend == "torch" or num_ranks == 1:
        return 0.0
    if point.flex_backend == "deepep":
        num_channels = (point.dispatch_sms or _DEEPEP_SMS) / 2
        return _deepep_bytes(model.expert_hidden_size, num_ranks, num_channels)
    domain = int(min(num_ranks, profile.scale_up_domain_gpus.value))
    return _hybridep_bytes(
        model.expert_hidden_size, moe.num_experts * point.etp, point.tokens_per_rank, num_ranks, domain
    )


@lru_cache(maxsize=4096)
def _hybridep_bytes(hidden: int, num_experts: int, tokens: int, num_ranks: int, domain: int) -> float:
    num_domains = -(-num_ranks // domain)
    row_bytes = _TOKEN_BYTES * hidden + _PROBABILITY_BYTES * num_experts / num_domains
    return tokens * row_bytes * (2 * num_ranks + 3 * (num_domains - 1))


@lru_cache(maxsize=4096)
def _deepep_bytes(hidden: int, num_ranks: int, num_channels: float) -> float:
    num_nodes = -(-num_ranks // _NODE_GPUS)
    row_bytes = _TOKEN_BYTES * hidden
    nvlink = min(num_ranks, _NODE_GPUS) * _NVLINK_TOKENS * row_bytes
    network = 2 * num_nodes * _RDMA_TOKENS * row_bytes if num_nodes > 1 else 0.0
    return num_channels * (nvlink + network)
