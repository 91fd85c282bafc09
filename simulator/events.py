"""The pipeline as events: one simpy process a pipeline rank, one event a message. Says when every chunk ran.

Agrees with the recurrence to rounding, and gives the timeline that the recurrence has no use for.
"""

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Literal

import simpy

from moeplan.pipeline_order import ChunkStep, rank_order
from moeplan.simulator.op import Span, Timeline


@dataclass(frozen=True, slots=True)
class ChunkRun:
    """One forward (F) or backward (B) of a virtual stage for one micro-batch, and when it ran."""

    rank: int
    kind: Literal["F", "B"]
    stage: int
    micro_batch: int
    start_s: float
    end_s: float

    @property
    def label(self) -> str:
        return f"{'forward' if self.kind == 'F' else 'backward'} stage {self.stage} micro-batch {self.micro_batch}"


class _Pipeline:
    """Messages by (kind, stage, micro-batch) of the chunk that sends them, and the runs so far."""

    def __init__(self, pp: int, forward_s: Sequence[float], backward_s: Sequence[float], send_s: float) -> None:
        self.env = simpy.Environment()
        self.pp, self.send_s = pp, send_s
        self.durations = {"F": forward_s, "B": backward_s}
        self.num_stages = len(forward_s)
        self.runs: list[ChunkRun] = []
        self._messages: dict[tuple[str, int, int], simpy.Event] = {}

    def message(self, kind: str, stage: int, micro_batch: int) -> simpy.Event:
        """The arrival of what that chunk computed."""
        return self._messages.setdefault((kind, stage, micro_batch), self.env.event())

    def rank(self, rank: int, steps: Sequence[ChunkStep]) -> Generator[simpy.Event, object, None]:
        """Run the steps in order, each once its rank is free and its message has arrived."""
        for step in steps:
            stage = step.chunk * self.pp + rank
            if step.kind == "F" and stage > 0:
                yield self.message("F", stage - 1, step.micro_batch)
            if step.kind == "B":
                is_last = stage == self.num_stages - 1
                yield self.message("F" if is_last else "B", stage if is_last else stage + 1, step.micro_batch)
            start = self.env.now
            yield self.env.timeout(self.durations[step.kind][stage])
            self.runs.append(ChunkRun(rank, step.kind, stage, step.micro_batch, start, self.env.now))
            self.env.process(self._send(step.kind, stage, step.micro_batch))

    def _send(self, kind: str, stage: int, micro_batch: int) -> Generator[simpy.Event, object, None]:
        stays = self.pp == 1 or (kind == "F" and stage == self.num_stages - 1)
        yield self.env.timeout(0.0 if stays else self.send_s)
        self.message(kind, stage, micro_batch).succeed()


def simulate(
    order: tuple[int, int, int, int | None], forward_s: Sequence[float], backward_s: Sequence[float], send_s: float
) -> tuple[ChunkRun, ...]:
    """All chunks of one plan, by start and rank; arguments as one row of recurrence.pipeline_time."""
    pp, vp, num_micro_batches, group = order
    pipeline = _Pipeline(pp, forward_s, backward_s, send_s)
    for rank in range(pp):
        pipeline.env.process(pipeline.rank(rank, rank_order(pp, vp, num_micro_batches, rank, group)))
    pipeline.env.run()
    return tuple(sorted(pipeline.runs, key=lambda run: (run.start_s, run.rank)))


def timeline(runs: Sequence[ChunkRun]) -> Timeline:
    """One span a chunk, on the compute stream of its rank."""
    return Timeline(tuple(Span(run.rank, "compute", run.label, run.start_s, run.end_s) for run in runs))
