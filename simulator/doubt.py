"""How far a prediction can be trusted, from the sources of the costs it is made of."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from moeplan.point import Point
from moeplan.simulator.op import Cost
from moeplan.simulator.step_model import StepModel


@dataclass(frozen=True, slots=True)
class Doubt:
    """Error bar, shares of busy time by kind of source, and the assumed entries used, largest share first."""

    error_bar_frac: float
    source_shares: dict[str, str]
    notes: tuple[str, ...]


def doubt(model: StepModel, point: Point) -> Doubt:
    """Doubt of one plan's step: errors weighted by seconds, because one source errs the same way everywhere."""
    weighted: list[tuple[float, Cost]] = []
    for stage in model.stage_parts(point):
        for part, count in stage.items():
            times = count * point.num_micro_batches / point.pp
            runs = (*model.phase(point, part, "F").runs, *model.phase(point, part, "B").runs)
            weighted += [(run.cost.seconds * times, run.cost) for run in runs]
    for end in model.step_ends(point):
        weighted += [(one.seconds / point.pp, one) for one in end.costs]
    return _weigh(weighted)


def _weigh(weighted: Sequence[tuple[float, Cost]]) -> Doubt:
    seconds = sum(weight for weight, _ in weighted)
    shares: dict[str, float] = defaultdict(float)
    notes: dict[str, float] = defaultdict(float)
    for weight, one in weighted:
        shares[one.source] += weight / seconds
        if one.note:
            notes[one.note] += weight / seconds
    error = sum(weight * one.error_frac for weight, one in weighted) / seconds
    text = {f"{source} costs": f"{share:.1%} of busy time" for source, share in sorted(shares.items())}
    ordered = sorted(notes.items(), key=lambda item: -item[1])
    return Doubt(error, text, tuple(f"assumed: {note} ({share:.1%} of busy time)" for note, share in ordered))
