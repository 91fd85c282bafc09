"""All kernels of a micro-batch, forward and backward, launched by one CUDA graph: the ``full_iteration`` scope.

On one GPU no shape depends on routing: the number of rows is that of tokens times experts a token, and their offsets
stay on the device. Two graphs are captured, the first micro-batch of a step, which writes main gradients, and the
others, which add to them; where two micro-batches add at once, a graph holds both. The optimizer stays outside: it
waits for the norm in any case.

Shapes: P prediction depths.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from moeplan.errors import InvalidInputError
from moeplan.executor.micro_batch import MicroBatch
from moeplan.executor.scopes import is_traced
from moeplan.kernels.main_grad import MainGrad

_EAGER_STEPS = 2  # kernels are compiled and libraries make their handles: neither can be captured
RunMicroBatch = Callable[[MicroBatch], Tensor]


@dataclass(frozen=True)
class _Captured:
    """A graph, and the main gradients that its GEMMs write: those that hold something once it has run."""

    graph: torch.cuda.CUDAGraph
    written: tuple[MainGrad, ...]

    def replay(self) -> None:
        self.graph.replay()
        for main in self.written:
            main.is_clear = False


class StepGraph:
    """Runs the micro-batches of a step, from its third step on by graphs.

    A traced step runs without them, because no op claims a graph's kernels; its time between kernels is not a graph's.

    ``run`` does forward and backward of one micro-batch and returns its losses [P]. All of it happens on a stream of
    its own from the start, because autograd remembers the stream on which it first met a parameter.
    ``num_together``: micro-batches of one graph, which divide those of a step; two where their gradients are added
    at once.
    """

    def __init__(
        self, run: RunMicroBatch, main_grads: Sequence[MainGrad], losses_P: Tensor, num_together: int = 1
    ) -> None:
        if not losses_P.is_cuda:
            raise InvalidInputError(
                "cuda_graph: got full_iteration on a CPU, allowed: on a GPU", "leave cuda_graph out of the plan"
            )
        self._run, self._main_grads = run, tuple(main_grads)
        self._losses_P = torch.zeros_like(losses_P)
        self._stream = torch.cuda.Stream(losses_P.device)
        self._num_steps = 0
        self._num_together = num_together
        self._batches: list[MicroBatch] = []
        self._graphs: dict[bool, _Captured] = {}

    def step(self, micro_batch: Callable[[int], MicroBatch], num_micro_batches: int) -> Tensor:
        """Losses [P] summed over all micro-batches; ``micro_batch`` gives the ids of each."""
        device = self._losses_P.device
        self._stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(self._stream):
            self._losses_P.zero_()
            for start in range(0, num_micro_batches, self._num_together):
                batches = [micro_batch(start + index) for index in range(self._num_together)]
                self._run_together(batches, is_first=start == 0)
            losses_P = self._losses_P.clone()
        torch.cuda.current_stream(device).wait_stream(self._stream)
        self._num_steps += 1
        return losses_P

    def _run_together(self, batches: Sequence[MicroBatch], *, is_first: bool) -> None:
        if is_traced():
            self._graphs.clear()  # what runs without them needs their memory
        if self._num_steps < _EAGER_STEPS or is_traced():
            self._add_losses(batches)
            return
        if is_first not in self._graphs:
            self._graphs[is_first] = self._capture(batches)
        self._take(batches)
        self._graphs[is_first].replay()

    def _add_losses(self, batches: Sequence[MicroBatch]) -> None:
        for batch in batches:
            self._losses_P += self._run(batch)

    def _capture(self, batches: Sequence[MicroBatch]) -> _Captured:
        """The kernels of these micro-batches, without running them."""
        if not self._batches:
            self._batches = [_copy(batch) for batch in batches]
            torch.cuda.synchronize()
            torch.cuda.empty_cache()  # graphs have memory of their own: what eager steps took must not stay beside it
        before = {id(main) for main in self._main_grads if main.is_clear}
        graph = torch.cuda.CUDAGraph()
        pool = next((other.graph.pool() for other in self._graphs.values()), None)
        with torch.cuda.graph(graph, pool=pool, stream=self._stream):
            self._add_losses(self._batches)
        written = tuple(main for main in self._main_grads if id(main) in before and not main.is_clear)
        return _Captured(graph, written)

    def _take(self, batches: Sequence[MicroBatch]) -> None:
        """Bring the ids to where the graphs read them."""
        for kept, new in zip(self._batches, batches, strict=True):
            for targets, sources in ((kept.tokens, new.tokens), (kept.targets, new.targets)):
                for target, source in zip(targets, sources, strict=True):
                    target.copy_(source, non_blocking=True)


def _copy(batch: MicroBatch) -> MicroBatch:
    tokens, targets = (tuple(ids.clone() for ids in part) for part in (batch.tokens, batch.targets))
    return MicroBatch(tokens, targets)
