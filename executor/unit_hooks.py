"""What happens around a layer: its weights are there when it runs, and its gradients leave when it is done.

Work on the links runs beside that of layers: weights of the next layer travel during this one, and so do gradients of
the one before. Backward passes a mark at the end and one at the start of each layer; where the latter is reached, all
weight gradients of the layer are made, because autograd adds gradients to parameters before it goes on.
"""

from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd import Function

from moeplan.executor.flat_buffer import FlatBuffer
from moeplan.executor.fsdp import ShardedBuffer
from moeplan.executor.model import ModelStage, Transformer
from moeplan.executor.units import Unit, stage_layers
from moeplan.plan import Plan


class _AtBackward(Function):
    """Its input, with something to do when backward comes here."""

    @staticmethod
    def forward(ctx: Any, act: Callable[[], None], *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.act = act
        return tuple(tensor.view_as(tensor) for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        ctx.act()
        return None, *grads


def _marked(act: Callable[[], None], tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return cast("tuple[Tensor, ...]", _AtBackward.apply(act, *tensors))


def _is_backward() -> bool:
    return torch._C._current_graph_task_id() >= 0  # noqa: SLF001 - torch has no public question for it


class StepEndHooks:
    """Weights gathered after the last step arrive, and gradients leave with the last micro-batch's backward."""

    def __init__(self, buffers: Sequence[FlatBuffer], num_micro_batches: int, *, reduces_early: bool) -> None:
        self.buffers, self.num_micro_batches = buffers, num_micro_batches
        self.reduces_early, self.num_done = reduces_early, 0

    def attach(self, module: nn.Module) -> None:
        """Act around every call of ``module``, whose parameters the buffers hold."""
        module.register_forward_pre_hook(self._before)

    def _before(self, _module: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...] | None:
        for buffer in self.buffers:
            buffer.finish_gather()
        return _marked(self._done, inputs) if self.reduces_early and torch.is_grad_enabled() else None

    def _done(self) -> None:
        self.num_done += 1
        if self.num_done == self.num_micro_batches:
            self.num_done = 0
            for buffer in self.buffers:
                buffer.start_reduce()


class ReductionQueue:
    """Sums of one unit run beside the backward of the next; then they are added up and their room is free."""

    def __init__(self, *, is_beside: bool) -> None:
        self.is_beside = is_beside
        self._running: deque[Sequence[ShardedBuffer]] = deque()

    def start(self, buffers: Sequence[ShardedBuffer]) -> None:
        """Begin to sum the gradients of a micro-batch; ends those begun before."""
        self._finish()
        for buffer in buffers:
            buffer.start_reduce()
        self._running.append(buffers)
        if not self.is_beside:
            self._finish()

    def _finish(self) -> None:
        while self._running:
            for buffer in self._running.popleft():
                buffer.finish_micro_batch()


class FullShardingHooks:
    """Weights are whole around forward and backward of a layer, the next layer's on their way.

    ``before`` and ``after``: buffers of the neighbouring layers of the stage.
    """

    def __init__(
        self,
        buffers: Sequence[ShardedBuffer],
        queue: ReductionQueue,
        before: Sequence[ShardedBuffer],
        after: Sequence[ShardedBuffer],
    ) -> None:
        self.buffers, self.queue, self.before, self.after = buffers, queue, before, after

    def attach(self, module: nn.Module) -> None:
        """Act around every call of ``module``, a layer."""
        module.register_forward_pre_hook(self._before)
        module.register_forward_hook(self._after)

    def _before(self, _module: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...] | None:
        if _is_backward():  # made again: what it is made for holds the weights
            self._prefetch((*self.buffers, *self.before))
            for buffer in self.buffers:
                buffer.finish_gather()
        else:
            self._gather(self.after)
        return _marked(self._done, inputs) if torch.is_grad_enabled() else None

    def _after(self, _module: nn.Module, _inputs: tuple[Tensor, ...], output: Tensor) -> Tensor | None:
        if not _is_backward():  # what a backward made again is used by it at once
            self._release()
        return _marked(self._begin_backward, (output,))[0] if torch.is_grad_enabled() else None

    def _gather(self, next_buffers: Sequence[ShardedBuffer]) -> None:
        for buffer in self.buffers:
            buffer.gather()
        self._prefetch(next_buffers)

    def _prefetch(self, buffers: Sequence[ShardedBuffer]) -> None:
        for buffer in buffers:
            buffer.prefetch()

    def _release(self) -> None:
        for buffer in self.buffers:
            buffer.release()

    def _begin_backward(self) -> None:
        self._gather(self.before)
        for buffer in self.buffers:
            buffer.open_grads()

    def _done(self) -> None:
        self._release()
        self.queue.start(self.buffers)


class StageHooks:
    """As :class:`FullShardingHooks`, for the embedding, head and norm of a stage, whose forward may have no input.

    They are whole while the stage runs; their gradients leave when its backward ends.
    """

    def __init__(self, buffers: Sequence[ShardedBuffer], queue: ReductionQueue) -> None:
        self.buffers, self.queue = buffers, queue

    def attach(self, stage: nn.Module) -> None:
        """Act around every call of ``stage``."""
        stage.register_forward_pre_hook(self._before)
        stage.register_forward_hook(self._after)

    def _before(self, _module: nn.Module, _inputs: tuple[Any, ...]) -> None:
        for buffer in self.buffers:
            buffer.gather()

    def _after(self, _module: nn.Module, _inputs: tuple[Any, ...], output: Tensor) -> Tensor | None:
        for buffer in self.buffers:
            buffer.release()
        return _marked(self._begin_backward, (output,))[0] if torch.is_grad_enabled() else None

    def _begin_backward(self) -> None:
        for buffer in self.buffers:
            buffer.gather()
            buffer.open_grads()
        torch.autograd.Variable._execution_engine.queue_callback(self._done)  # noqa: SLF001 - as torch's own FSDP

    def _done(self) -> None:
        for buffer in self.buffers:
            buffer.release()
        self.queue.start(self.buffers)


def attach_hooks(model: Transformer, buffers: Sequence[tuple[Unit, FlatBuffer]], plan: Plan) -> None:
    """Let every layer and stage act on the buffers of the units that it uses."""
    used: dict[int, list[FlatBuffer]] = defaultdict(list)
    for unit, buffer in buffers:
        for module in unit.modules:
            used[id(module)].append(buffer)
    # Delayed weight gradients are not there yet when backward leaves their layer.
    reduces_early = plan.overlap_grad_reduce and not plan.delay_wgrad
    queue = ReductionQueue(is_beside=plan.overlap_grad_reduce)
    for stage in model.stages:
        layers = stage_layers(cast("ModelStage", stage))
        if plan.sharding == "full":
            _attach_full(stage, layers, used, queue, prefetches=plan.overlap_param_gather)
            continue
        StepEndHooks(used[id(stage)], plan.num_micro_batches, reduces_early=False).attach(stage)
        for layer in layers:
            StepEndHooks(used[id(layer)], plan.num_micro_batches, reduces_early=reduces_early).attach(layer)


def _attach_full(
    stage: nn.Module, layers: Sequence[nn.Module], used: Mapping[int, list[FlatBuffer]], queue: ReductionQueue, *,
    prefetches: bool,
) -> None:  # fmt: skip
    StageHooks(_sharded(used[id(stage)]), queue).attach(stage)
    sharded = [_sharded(used[id(layer)]) for layer in layers]
    around = [[], *sharded, []] if prefetches else [[]] * (len(layers) + 2)
    for index, layer in enumerate(layers):
        FullShardingHooks(sharded[index], queue, around[index], around[index + 2]).attach(layer)


def _sharded(buffers: Sequence[FlatBuffer]) -> list[ShardedBuffer]:
    return [buffer for buffer in buffers if isinstance(buffer, ShardedBuffer)]
