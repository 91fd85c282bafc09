"""Expert-parallel overlap: a forward and an older backward run together, so that exchanges hide behind compute.

The five steps of one layer pair (report section 2.5), exchange beside compute, f forward and b backward:
1 combine of b | f before the dispatch; 2 dispatch of f | data gradients of b's experts; 3 dispatch of b | weight
gradients of b's experts, then f's experts; 4 combine of f | data gradients of b before the dispatch; 5 - | the rest.
"""

from moeplan.hwprofiles.schema import HardwareProfile
from moeplan.simulator.costs import dispatch_rate
from moeplan.simulator.graph import FAMILY_INDEX, PhaseTime
from moeplan.simulator.op import Phase, Segment


def hidden_seconds(forward: PhaseTime, backward: PhaseTime, sm_frac: float, *, delay_wgrad: bool = True) -> float:
    """Seconds a layer pair saves over running forward and backward one after the other; at least 0.

    While an exchange of ``m`` seconds runs on ``sm_frac`` of the SMs, ``c`` seconds of compute advance slower by that
    part: the step takes max(m, c + m x sm_frac). Without ``delay_wgrad`` the experts' weight gradients run in step 2.
    """

    def compute(phase: PhaseTime, segments: tuple[Segment, ...], kinds: tuple[Phase, ...]) -> float:
        return sum(
            run.cost.seconds
            for run in phase.runs
            if run.op.stream == "compute" and run.op.segment in segments and run.op.phase in kinds
        )

    def exchange(phase: PhaseTime, segment: Segment) -> float:
        return sum(run.cost.seconds for run in phase.runs if run.op.stream == "dispatch" and run.op.segment == segment)

    wgrad_s = compute(backward, ("expert",), ("wgrad",))
    early_s, late_s = (0.0, wgrad_s) if delay_wgrad else (wgrad_s, 0.0)
    steps = (
        (exchange(backward, "combine"), compute(forward, ("before",), ("fwd",))),
        (exchange(forward, "dispatch"), early_s + compute(backward, ("expert",), ("dgrad",))),
        (exchange(backward, "dispatch"), late_s + compute(forward, ("expert",), ("fwd",))),
        (exchange(forward, "combine"), compute(backward, ("before",), ("dgrad",))),
    )
    return sum(sent + done - max(sent, done + sent * sm_frac) for sent, done in steps)


def paired_saving(
    forward: PhaseTime, backward: PhaseTime, sm_frac: float, *, delay_wgrad: bool, overlap_frac: float
) -> tuple[float, float]:
    """Seconds that a pair exposes less than its two halves alone: of dispatch, and of the host.

    What the device waits for the host stays: one thread issues both halves, and a stop of one stops the other. Where
    the host's whole work exceeds what is left of the device's, what hides is waited for all the same, and the second
    number is negative.
    """
    host = FAMILY_INDEX["host"]
    waiting = float(forward.exposed_s[host] + backward.exposed_s[host])
    device = forward.seconds + backward.seconds - waiting
    hidden = overlap_frac * hidden_seconds(forward, backward, sm_frac, delay_wgrad=delay_wgrad)
    return hidden, waiting - max(waiting, forward.issued_s + backward.issued_s - (device - hidden))


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
