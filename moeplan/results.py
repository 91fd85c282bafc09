"""Results: predictions and measurements in one schema, their comparison, and why plans were rejected."""

from typing import Literal

from pydantic import Field

from moeplan.record import Record
from moeplan.vocabulary import MemoryCategory, OpFamily


class FamilyTime(Record):
    """Seconds of one op family in a step, mean over ranks; ``exposed_s`` is what lengthens the step."""

    total_s: float
    exposed_s: float


class Figures(Record):
    """What one plan does on one machine, predicted or measured.

    ``memory_bytes`` lists each category by pipeline rank (the worst rank of the stage); ``peak_memory_bytes`` is the
    worst sum. On a CPU, memory is resident memory of one process.
    """

    kind: Literal["prediction", "measurement"]
    plan_id: str
    stack: str
    hardware: str
    step_s: float
    tokens_per_s_per_gpu: float
    model_tflops_per_gpu: float
    peak_memory_bytes: float
    memory_bytes: dict[MemoryCategory, tuple[float, ...]]
    time_s: dict[OpFamily, FamilyTime]
    error_bar_frac: float = Field(
        ge=0, description="half width: of the prediction, or of the spread of the timed steps"
    )
    provenance: dict[str, str] = Field(default={}, description="versions, sources of the costs used, settings")
    notes: tuple[str, ...] = Field(default=(), description="assumed entries used, and other reasons for doubt")
    refusals: tuple[str, ...] = Field(
        default=(), description="why the stack or the machine of a prediction would not run the plan"
    )
    step_times_s: tuple[float, ...] = Field(default=(), description="the timed steps of a measurement")
    losses: tuple[float, ...] = Field(default=(), description="training loss of every step of a measurement")
    validation_losses: tuple[tuple[int, float], ...] = Field(
        default=(), description="steps done and the loss a held-out token then had"
    )

    @property
    def peak_rank(self) -> int:
        """Pipeline rank with the largest sum."""
        sums = [sum(column) for column in zip(*self.memory_bytes.values(), strict=True)]
        return sums.index(max(sums))


class ComparedFigure(Record):
    """One figure predicted and measured; ``error_frac`` = predicted / measured - 1, None where nothing was measured."""

    name: str
    unit: str
    predicted: float
    measured: float
    error_frac: float | None
    tolerance_frac: float | None = Field(default=None, description="None: reported, not judged")

    @property
    def within(self) -> bool:
        """Whether the figure is inside its tolerance; a judged figure that was not measured is not."""
        if self.tolerance_frac is None:
            return True
        return self.error_frac is not None and abs(self.error_frac) <= self.tolerance_frac


class Comparison(Record):
    """A prediction beside a measurement of the same plan."""

    plan_id: str
    figures: tuple[ComparedFigure, ...]

    @property
    def within_tolerance(self) -> bool:
        return all(figure.within for figure in self.figures)


class Rejection(Record):
    """Plans turned down by one wall, with the one that came nearest.

    ``wall`` is ``memory`` (with ``needed`` and ``available`` in ``unit``) or the key of a rule of legality.
    """

    wall: str
    count: int
    nearest_miss: str = Field(description="the plan that came nearest in short form, or the rule with its figures")
    needed: float | None = None
    available: float | None = None
    unit: str = ""
