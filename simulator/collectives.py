"""Seconds of collectives: measured curves where there are any, placed over scale-up domains and the network.

A group of n = k x d ranks (k in each of d domains) runs its ring over both tiers at once: inside a domain over k
ranks, between domains over d with k NICs in parallel, so each NIC carries 1/k of the message. The slower tier decides.

Scaling rule from the measured number of ranks nearest to k (in ratio): a ring moves (n-1)/n of the message past each
rank, so the time is read off the curve at the message that moves as many bytes, and the latency of the curve (its
smallest time) grows with log2(n). Where a profile has no curve: 20 us + bytes over 0.75 of the link's peak, assumed.
"""

import math
from collections.abc import Sequence

from moeplan.hwprofiles.schema import CollectiveCurve, CollectiveKind, HardwareProfile, Tier
from moeplan.simulator.op import Bound, Cost, Placement

# No curve: NVLink collectives reach 0.66 to 0.86 of peak at 512 MiB, NICs 0.93 (hardware facts, sections 6 and 7).
UNMEASURED_LINK_FRAC = 0.75
UNMEASURED_LATENCY_S = 20e-6
NO_COST = Cost(0.0, "latency", "measured", 0.0)


def ring_factor(kind: CollectiveKind, num_ranks: float) -> float:
    """Bytes that pass one rank over message bytes."""
    if kind == "send_recv":
        return 1.0
    share = (num_ranks - 1) / num_ranks
    return 2 * share if kind == "all_reduce" else share


def collective_cost(kind: CollectiveKind, message_bytes: float, group: Placement, profile: HardwareProfile) -> Cost:
    """Cost of one collective of ``group``; ``message_bytes`` in the convention of CollectiveCurve."""
    if group.num_ranks == 1 or message_bytes <= 0:
        return NO_COST
    if kind == "send_recv":
        return tier_cost(kind, "network" if group.num_domains > 1 else "scale_up", message_bytes, 2, profile)
    inside, domains = group.ranks_per_domain, group.num_domains
    costs = []
    if inside > 1:
        costs.append(tier_cost(kind, "scale_up", message_bytes, inside, profile))
    if domains > 1:
        # In an all-to-all every rank has data of its own for each other domain.
        crossing = message_bytes if kind == "all_to_all" else message_bytes / inside
        costs.append(tier_cost(kind, "network", crossing, domains, profile))
    return max(costs, key=lambda cost: cost.seconds)


def tier_cost(
    kind: CollectiveKind, tier: Tier, message_bytes: float, num_ranks: float, profile: HardwareProfile
) -> Cost:
    """Cost of a collective of ``num_ranks`` on one tier."""
    moved = message_bytes * ring_factor(kind, num_ranks)
    curve = nearest_curve(profile.collectives, kind, tier, num_ranks)
    if curve is None:
        is_inside = tier == "scale_up"
        link = (
            profile.scale_up_bytes_per_s_per_dir_per_gpu if is_inside else profile.network_bytes_per_s_per_dir_per_gpu
        )
        seconds = UNMEASURED_LATENCY_S + moved / (link.value * UNMEASURED_LINK_FRAC)
        note = f"{kind} on {tier}: no curve, {UNMEASURED_LINK_FRAC:g} of the link's peak"
        return Cost(seconds, "network", "assumed", 0.3, note)
    floor_s = curve.curve.times[0]
    seconds = curve.curve.time_at(moved / ring_factor(kind, curve.num_ranks))
    if num_ranks > curve.num_ranks and kind != "send_recv":
        seconds += floor_s * (math.log2(num_ranks) / math.log2(curve.num_ranks) - 1)
    bound: Bound = "latency" if seconds < 2 * floor_s else "network"
    note = f"collectives[{kind} {tier} x{curve.num_ranks}]" if curve.source == "assumed" else ""
    return Cost(seconds, bound, curve.source, curve.error_bar_frac, note)


def nearest_curve(
    curves: Sequence[CollectiveCurve], kind: CollectiveKind, tier: Tier, num_ranks: float
) -> CollectiveCurve | None:
    """The curve of that collective and tier whose number of ranks is nearest in ratio; None where there is none."""
    fitting = [curve for curve in curves if curve.collective == kind and curve.tier == tier]
    return min(fitting, key=lambda curve: abs(math.log(curve.num_ranks / num_ranks)), default=None)
