"""Expert-parallel overlap: a forward and an older backward run together, so that exchanges hide behind compute.

The steps of one layer pair are those of LAYER_PAIR (report section 2.5), which the executor follows as well.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from moeplan.hwprofiles.schema import HardwareProfile
from moeplan.layer_pair import LAYER_PAIR, Work
from moeplan.simulator.costs import dispatch_rate
from moeplan.simulator.graph import FAMILY_INDEX, Array, PhaseTime
from moeplan.simulator.op import OpRun, Phase
from moeplan.vocabulary import OP_FAMILIES

DISPATCH, HOST = FAMILY_INDEX["dispatch"], FAMILY_INDEX["host"]


@dataclass(frozen=True, slots=True)
class PairSaving:
    """What a pair of one part's forward and backward exposes less than its two halves alone, by family.

    Below 0 where a family takes longer: compute beside an exchange is slower. ``seconds`` is the sum, at least 0 but
    for the host's part.
    """

    exposed_s: Array

    @property
    def seconds(self) -> float:
        return float(self.exposed_s.sum())


NO_SAVING = PairSaving(np.zeros(len(OP_FAMILIES)))


def hidden_by_family(forward: PhaseTime, backward: PhaseTime, slowed_frac: float, *, delay_wgrad: bool = True) -> Array:
    """Exposed seconds that a layer pair saves over running forward and backward one after the other, by family.

    Beside an exchange of ``m`` seconds compute loses ``slowed_frac`` of its rate: ``c`` seconds of it take
    c / (1 - slowed_frac) where the exchange is the longer one, which then exposes the rest, and otherwise
    c + m x slowed_frac. Without ``delay_wgrad`` the experts' weight gradients run in step 2.
    """
    saved: Array = np.zeros(len(OP_FAMILIES))
    for sent_s, beside in _steps(forward, backward, delay_wgrad=delay_wgrad):
        done_s = sum(run.cost.seconds for run in beside)
        slowed_s = min(done_s * slowed_frac / (1 - slowed_frac), sent_s * slowed_frac)
        saved[DISPATCH] += min(sent_s, done_s + slowed_s)
        for run in beside:
            saved[FAMILY_INDEX[run.op.family]] -= slowed_s * run.cost.seconds / done_s if done_s else 0.0
    return saved


def _steps(forward: PhaseTime, backward: PhaseTime, *, delay_wgrad: bool) -> Iterable[tuple[float, Sequence[OpRun]]]:
    """Of steps 1 to 4 of LAYER_PAIR: seconds of the exchange, and the compute beside it."""
    phases = {"f": forward, "b": backward}
    for step in LAYER_PAIR:
        if step.exchange is None:
            continue
        sent_s = sum(
            run.cost.seconds
            for run in phases[step.exchange.layer].runs
            if run.op.stream == "dispatch" and run.op.segment == step.exchange.segment
        )
        beside = [
            run
            for work in step.compute
            for run in phases[work.layer].runs
            if run.op.stream == "compute"
            and run.op.segment == work.segment
            and run.op.phase in _kinds(work, delay_wgrad)
        ]
        yield sent_s, beside


def _kinds(work: Work, delay_wgrad: bool) -> tuple[Phase, ...]:  # noqa: FBT001 - a plan's own flag
    """Phases of the ops of one work; weight gradients that are not delayed run with the experts' data gradients."""
    if delay_wgrad or work.segment != "expert" or work.phase == "fwd":
        return (work.phase,)
    return ("wgrad", "dgrad") if work.phase == "dgrad" else ()


def paired_saving(forward: PhaseTime, backward: PhaseTime, slowed_frac: float, *, delay_wgrad: bool) -> PairSaving:
    """What a pair saves, the host's part included.

    What the device waits for the host stays: one thread issues both halves, and a stop of one stops the other. Where
    the host's whole work exceeds what is left of the device's, what hides is waited for all the same, and the host's
    number is negative.
    """
    saved = hidden_by_family(forward, backward, slowed_frac, delay_wgrad=delay_wgrad)
    waiting = float(forward.exposed_s[HOST] + backward.exposed_s[HOST])
    device = forward.seconds + backward.seconds - waiting - float(saved.sum())
    saved[HOST] = waiting - max(waiting, forward.issued_s + backward.issued_s - device)
    return PairSaving(saved)


def slowed_frac(profile: HardwareProfile, backend: str, contention_frac: float, given_sms: int = 0) -> float:
    """Part of its rate that compute loses beside an exchange: its SMs, and what else the two contend for."""
    return min(0.9, dispatch_sm_frac(profile, backend, given_sms) + contention_frac)


def dispatch_sm_frac(profile: HardwareProfile, backend: str, given_sms: int = 0) -> float:
    """Part of the SMs a dispatcher's kernels occupy (``given_sms``, or its default); 0 where nobody says."""
    rates = [dispatch_rate(profile, backend, tier) for tier in ("scale_up", "network")]
    num_sms = given_sms or max((rate.num_sms for rate in rates if rate is not None), default=0)
    return num_sms / profile.num_sms.value if profile.num_sms is not None else 0.0


def paired_frac(pp: int, vp: int, num_micro_batches: int, num_warmup: int) -> float:
    """Part of a rank's forwards that have a backward beside them: all but the warm-up (the first one without pp)."""
    total = num_micro_batches * vp
    alone = 1 if pp == 1 else min(total, num_warmup + 1)
    return (total - alone) / total
