"""Step of a plan under dynamic context parallelism: the packs that a run makes, each costed in closed form.

A micro-batch takes what its slowest pack takes, on every pipeline rank; what comes once a step is that of as many
micro-batches of full ranks without context parallelism (report section 6).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from moeplan.cp_schedule import MicroBatch, RankPack, padded_length, step_cost, tokens_by_size
from moeplan.hwprofiles.schema import HardwareProfile
from moeplan.plan import Plan
from moeplan.point import Point
from moeplan.simulator.graph import FAMILY_INDEX
from moeplan.simulator.pack_costs import PackCosts
from moeplan.simulator.stack import SoftwareStack
from moeplan.simulator.step_model import BUBBLE, StepTime, step_model
from moeplan.step_packs import step_schedule, tokens_per_rank

ATTENTION, CP_COMM = FAMILY_INDEX["attention"], FAMILY_INDEX["cp_comm"]
# What comes once a step, however many micro-batches it has.
_ONCE = [FAMILY_INDEX[family] for family in ("dp_comm", "pp_comm", "optimizer")]


@dataclass(frozen=True, slots=True)
class _Shares:
    """Seconds of the packs of a step, means over data x context-parallel ranks, of which some are idle at times."""

    linear_s: float
    attention_s: float
    comm_s: float
    exposed_comm_s: float


def full_ranks_point(plan: Plan) -> Point:
    """As many micro-batches as the plan's documents make, each rank full of tokens of its own."""
    num = len(step_schedule(plan, plan.document_lengths))
    size, num_ranks = tokens_per_rank(plan), plan.dp * plan.cp
    return replace(plan.point, cp=1, mbs=1, seq_len=size, global_batch_size=num * num_ranks)


def memory_point(plan: Plan) -> Point:
    """As :func:`full_ranks_point` where ranks share packs, in the largest groups that there are."""
    point, batches = full_ranks_point(plan), step_schedule(plan, plan.document_lengths)
    size = max(size for size in tokens_by_size(batches) if plan.dp * plan.cp % size == 0)
    return replace(point, cp=size, seq_len=point.seq_len * size, global_batch_size=point.global_batch_size // size)


def dynamic_step_time(plan: Plan, profile: HardwareProfile, stack: SoftwareStack) -> StepTime:
    """Step time of a plan with dynamic_cp; ranks that wait for the slowest pack count as ``bubble``."""
    costs = PackCosts(plan, profile, stack)
    batches = [_costed(plan, batch, costs) for batch in step_schedule(plan, plan.document_lengths)]
    point = full_ranks_point(plan)
    full = step_model(plan.model, stack, profile).step_times([point])[0]
    alone_s = float((full.forward_s + full.backward_s).reshape(plan.vp, plan.pp).sum(axis=0).max())
    once_s = full.step_s - (len(batches) + plan.pp - 1) * alone_s
    step_s = step_cost(batches, plan.pp) + once_s
    shares = _shares(plan, batches, costs)
    full_linear_s = len(batches) * costs.linear(point.seq_len)
    full_attention_s = len(batches) * costs.attention(point.seq_len, 1)
    linear = shares.linear_s / full_linear_s
    attention = shares.attention_s / full_attention_s if full_attention_s else linear
    # The family of attention holds recurrences as well, whose time follows the tokens.
    of_cores = 1.0
    if plan.model.linear_mixer is not None:
        of_cores = min(1.0, full_attention_s / float(full.total_s[ATTENTION]))
    total, exposed = full.total_s * linear, full.exposed_s * linear
    for seconds, of_full in ((total, full.total_s), (exposed, full.exposed_s)):
        seconds[_ONCE] = of_full[_ONCE]
        seconds[ATTENTION] = of_full[ATTENTION] * (of_cores * attention + (1 - of_cores) * linear)
        seconds[BUBBLE] = 0.0
    total[CP_COMM], exposed[CP_COMM] = shares.comm_s, shares.exposed_comm_s
    total[BUBBLE] = exposed[BUBBLE] = step_s - float(np.sum(exposed))
    return StepTime(step_s, total, exposed, full.forward_s, full.backward_s, full.send_s)


def _costed(plan: Plan, batch: MicroBatch, costs: PackCosts) -> MicroBatch:
    """The micro-batch in seconds: it was made by FLOPs."""
    return MicroBatch(
        tuple(
            replace(pack, cost=costs.pack(_tokens(plan, pack), _attention_s(pack, costs), pack.num_ranks))
            for pack in batch.packs
        )
    )


def _shares(plan: Plan, batches: Sequence[MicroBatch], costs: PackCosts) -> _Shares:
    num_ranks, found = plan.dp * plan.cp, np.zeros(4)
    for batch in batches:
        num_idle = num_ranks - sum(pack.num_ranks for pack in batch.packs)
        found += np.array([num_idle * costs.linear(0), 0, 0, 0])
        for pack in batch.packs:
            tokens, attention_s = _tokens(plan, pack), _attention_s(pack, costs)
            linear_s = costs.linear(tokens / pack.num_ranks)
            comm_s = costs.comm_s(tokens, pack.num_ranks)
            found += pack.num_ranks * np.array([linear_s, attention_s, comm_s, pack.cost - linear_s - attention_s])
    return _Shares(*(found / num_ranks).tolist())


def _tokens(plan: Plan, pack: RankPack) -> int:
    return sum(padded_length(length, pack.num_ranks, plan.tp) for length in pack.lengths)


def _attention_s(pack: RankPack, costs: PackCosts) -> float:
    return sum(costs.attention(length, pack.num_ranks) for length in pack.lengths)
