"""Expert-parallel exchange: how many copies of a token travel, and over which links (report section 2.2)."""

from dataclasses import dataclass
from functools import lru_cache
from math import comb, sqrt
from statistics import NormalDist

from moeplan.hwprofiles.schema import DispatchBackend
from moeplan.model_spec import Moe
from moeplan.simulator.op import Placement
from moeplan.vocabulary import Routing

PROBABILITY_BYTES = 4.0  # of a copy, in fp32
INDEX_BYTES = 4.0
# Back ends of flex whose kernels copy, sum and exchange counts by themselves.
LIBRARIES: frozenset[DispatchBackend] = frozenset({"deepep", "hybridep"})


@dataclass(frozen=True, slots=True)
class ExchangeBytes:
    """Bytes one rank sends to others inside its scale-up domain, and to other domains; one direction."""

    scale_up: float
    network: float


def _miss_probability(num_experts: int, in_bin: int, top_k: int) -> float:
    """Probability that none of ``top_k`` distinct experts of ``num_experts`` lies in a bin of ``in_bin``."""
    return comb(num_experts - in_bin, top_k) / comb(num_experts, top_k)


@lru_cache(maxsize=4096)
def expected_distinct_bins(num_experts: int, top_k: int, num_bins: int, num_groups: int, top_groups: int) -> float:
    """Expected number of bins (ranks, domains) holding at least one of a token's experts, under balanced routing.

    Uniform: D(R) = R (1 - C(E - E/R, K) / C(E, K)). Group-limited routing first chooses ``top_groups`` of
    ``num_groups`` groups of experts: bins inside a group are reached only through it; a bin of several whole groups
    holds j chosen ones with hypergeometric probability. Bins that cut groups otherwise fall back to uniform, an upper
    bound. DeepSeek-V3 on 8 nodes: 5.29 uniform, 3.63 with 4 of 8 groups (report section 2.2).
    """
    bin_size = num_experts // num_bins
    limited = top_groups * (num_experts // num_groups)
    if top_groups == num_groups:
        return num_bins * (1 - _miss_probability(num_experts, bin_size, top_k))
    if num_bins % num_groups == 0:
        return num_bins * top_groups / num_groups * (1 - _miss_probability(limited, bin_size, top_k))
    if num_groups % num_bins == 0:
        inside, total = num_groups // num_bins, 0.0
        for chosen in range(min(inside, top_groups) + 1):
            ways = comb(inside, chosen) * comb(num_groups - inside, top_groups - chosen) / comb(num_groups, top_groups)
            total += ways * (1 - _miss_probability(limited, chosen * (num_experts // num_groups), top_k))
        return num_bins * total
    return num_bins * (1 - _miss_probability(num_experts, bin_size, top_k))


def exchange_bytes(
    moe: Moe, num_tokens: float, token_bytes: float, backend: DispatchBackend, group: Placement, *, etp: int = 1
) -> ExchangeBytes:
    """Bytes one rank sends in a dispatch of its ``num_tokens`` (a combine is the mirror image).

    alltoall: K copies a token, each to its expert's rank, with an fp32 probability. deepep, hybridep: one copy a
    distinct domain over the network; inside the domain one copy a distinct rank (those a domain receives are
    forwarded there, so every rank sends as many as its own tokens need), for each of ``etp``: each shard of an expert
    needs the token. (alltoall gathers over the expert tensor-parallel group in a collective of its own.) torch: the
    same, and each copy has all K probabilities. allgather: every token with those to every rank.
    """
    ranks, domains = group.num_ranks, group.num_domains
    if ranks == 1 and (etp == 1 or backend == "alltoall"):
        return ExchangeBytes(0.0, 0.0)
    if backend == "alltoall":
        copies = num_tokens * moe.top_k * (token_bytes + PROBABILITY_BYTES)
        outside = copies * (domains - 1) / domains
        return ExchangeBytes(copies * (ranks - 1) / ranks - outside, outside)
    if backend in {"allgather", "torch"}:
        token_bytes += PROBABILITY_BYTES * moe.top_k
    if backend == "allgather":
        everywhere = num_tokens * token_bytes * ranks * etp
        outside = everywhere * (domains - 1) / domains
        return ExchangeBytes(everywhere - outside - num_tokens * token_bytes, outside)
    router = moe.router

    def distinct(bins: int) -> float:
        return expected_distinct_bins(moe.num_experts, moe.top_k, bins, router.num_groups, router.top_groups)

    inside = num_tokens * token_bytes * distinct(ranks) * (etp - domains / ranks)  # one of them is where it is already
    outside = num_tokens * token_bytes * distinct(domains) * (domains - 1) / domains if domains > 1 else 0.0
    return ExchangeBytes(inside, outside)


def routing_map_bytes(moe: Moe, num_tokens: float, backend: DispatchBackend, group: Placement) -> ExchangeBytes:
    """Bytes one rank sends so that every rank knows where all tokens go, before a dispatch and not before a combine.

    HybridEP gathers a map of tokens x experts, one byte each, over all ranks (DeepEP, branch hybrid-ep, allgather.cu):
    to the peer in each other domain, and from there to all of the domain. Others exchange counts, which are small.
    """
    if backend != "hybridep" or group.num_ranks == 1:
        return ExchangeBytes(0.0, 0.0)
    each, domains = num_tokens * moe.num_experts, group.num_domains
    return ExchangeBytes(each * domains * (group.ranks_per_domain - 1), each * (domains - 1))


def metadata_bytes(moe: Moe, num_tokens: float, backend: DispatchBackend, num_ranks: int) -> float:
    """Message of the all-gather, over all ranks of etp x ep, by which ranks learn where tokens go; int32.

    alltoall: the copies for each expert. allgather, torch: the experts of each token. Libraries do it in their kernels.
    """
    if num_ranks == 1 or backend in LIBRARIES:
        return 0.0
    return INDEX_BYTES * num_ranks * (moe.num_experts if backend == "alltoall" else num_tokens * moe.top_k)


def busiest_rank(moe: Moe, choice_spread_frac: float, ep: int) -> float:
    """Rows of the busiest of ``ep`` ranks over the mean where routers choose freely; 1 where they are kept level.

    The probability that a token chooses an expert differs between experts by ``choice_spread_frac`` about its mean
    K / E, so that loads of experts differ by E / K times as much of their own mean, and those of ranks by that over
    sqrt(experts of a rank). The largest of ``ep`` lies some way out (Blom's approximation for normal ones). No rank has
    more rows than its experts can take: of each token one each. A rank that holds every expert has every row, however
    the routers choose; a bias on the experts' scores keeps natural routing level (report section 7), which an auxiliary
    loss takes long to.
    """
    if ep == 1 or moe.router.expert_bias:
        return 1.0
    local_experts = moe.num_experts // ep
    spread = choice_spread_frac * moe.num_experts / moe.top_k / sqrt(local_experts)
    largest = NormalDist().inv_cdf((ep - 0.375) / (ep + 0.25))
    most = ep * min(local_experts, moe.top_k) / moe.top_k
    return min(1 + spread * largest, most)


def routed_load(moe: Moe, routing: Routing, choice_spread_frac: float, ep: int) -> float:
    """Rows of the busiest rank over the balanced mean.

    Padding to a capacity gives every rank as many, dropping alone at most that many (report section 7).
    """
    if routing == "balanced":
        return 1.0
    router, natural = moe.router, busiest_rank(moe, choice_spread_frac, ep)
    if routing == "natural":
        return natural
    return router.capacity_factor if router.pad_to_capacity else min(natural, router.capacity_factor)
