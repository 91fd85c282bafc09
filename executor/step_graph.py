"""All kernels of a micro-batch, forward and backward, launched by one CUDA graph: the ``full_iteration`` scope.

On one GPU no shape depends on routing: the number of rows is that of tokens times experts a token, and their offsets
stay on the device. Two graphs are captured, the first micro-batch of a step, which writes main gradients, and the
others, which add to them. The optimizer stays outside: it waits for the norm in any case.

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
    """

    def __init__(self, run: RunMicroBatch, main_grads: Sequence[MainGrad], losses_P: Tensor) -> None:
        if not losses_P.is_cuda:
            raise InvalidInputError(
                "cuda_graph: got full_iteration on a CPU, allowed: on a GPU", "leave cuda_graph out of the plan"
            )
        self._run, self._main_grads = run, tuple(main_grads)
        self._losses_P = torch.zeros_like(losses_P)
        self._stream = torch.cuda.Stream(losses_P.device)
        self._num_steps = 0
        self._batch: MicroBatch | None = None
        self._graphs: dict[bool, _Captured] = {}

    def step(self, micro_batch: Callable[[int], MicroBatch], num_micro_batches: int) -> Tensor:
        """Losses [P] summed over all micro-batches; ``micro_batch`` gives the ids of each."""
        device = self._losses_P.device
        self._stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(self._stream):
            self._losses_P.zero_()
            for index in range(num_micro_batches):
                self._one(micro_batch(index), is_first=index == 0)
            losses_P = self._losses_P.clone()
        torch.cuda.current_stream(device).wait_stream(self._stream)
        self._num_steps += 1
        return losses_P

    def _one(self, batch: MicroBatch, *, is_first: bool) -> None:
        if is_traced():
            self._graphs.clear()  # what runs without them needs their memory
        if self._num_steps < _EAGER_STEPS or is_traced():
            self._losses_P += self._run(batch)
            return
        if is_first not in self._graphs:
            self._graphs[is_first] = self._capture(batch)
        self._take(batch)
        self._graphs[is_first].replay()

    def _capture(self, batch: MicroBatch) -> _Captured:
        """The kernels of a micro-batch, without running them."""
        if self._batch is None:
            tokens, targets = (tuple(ids.clone() for ids in part) for part in (batch.tokens, batch.targets))
            self._batch = MicroBatch(tokens, targets)
            torch.cuda.synchronize()
            torch.cuda.empty_cache()  # graphs have memory of their own: what eager steps took must not stay beside it
        before = {id(main) for main in self._main_grads if main.is_clear}
        graph = torch.cuda.CUDAGraph()
        pool = next((other.graph.pool() for other in self._graphs.values()), None)
        with torch.cuda.graph(graph, pool=pool, stream=self._stream):
            self._losses_P += self._run(self._batch)
        written = tuple(main for main in self._main_grads if id(main) in before and not main.is_clear)
        return _Captured(graph, written)

    def _take(self, batch: MicroBatch) -> None:
        """Bring the ids to where the graphs read them."""
        assert self._batch is not None
        for kept, new in ((self._batch.tokens, batch.tokens), (self._batch.targets, batch.targets)):
            for target, source in zip(kept, new, strict=True):
                target.copy_(source, non_blocking=True)
