"""What happens around a layer: its weights are there when it runs, and its gradients leave when it is done.

Work on the links runs beside that of layers: weights of the next layer travel during this one, and so do gradients of
the one before. Backward passes a mark at the end and one at the start of each layer; where the latter is reached, all
weight gradients of the layer are made, because autograd adds gradients to parameters before it goes on.
"""

from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd import Function

from moeplan.executor.flat_buffer import FlatBuffer
from moeplan.executor.fsdp import ShardedBuffer
from moeplan.executor.model import ModelStage, Transformer
from moeplan.executor.units import Unit, stage_layers
from moeplan.kernels.weight_grad_queue import now_or_later
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
    """The tensors, those with gradients marked."""
    marked = iter(_AtBackward.apply(act, *(tensor for tensor in tensors if tensor.requires_grad)))
    return tuple(next(marked) if tensor.requires_grad else tensor for tensor in tensors)


def _is_backward() -> bool:
    return torch._C._current_graph_task_id() >= 0  # noqa: SLF001 - torch has no public question for it


class StepEndHooks:
    """Weights gathered after the last step arrive, and gradients leave with the last backward of a step.

    ``num_backwards``: of the module in a step, after which its gradients are whole; 0: they wait for the step's end.
    """

    def __init__(self, buffers: Sequence[FlatBuffer], num_backwards: int = 0) -> None:
        self.buffers, self.num_backwards, self.num_done = buffers, num_backwards, 0

    def attach(self, module: nn.Module) -> None:
        """Act around every call of ``module``, whose parameters the buffers hold."""
        module.register_forward_pre_hook(self._before)

    def _before(self, _module: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...] | None:
        for buffer in self.buffers:
            buffer.finish_gather()
        return _marked(self._done, inputs) if self.num_backwards and torch.is_grad_enabled() else None

    def _done(self) -> None:
        self.num_done += 1
        if self.num_done == self.num_backwards:
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
        """Act around every call of ``module``, a layer or the head."""
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
        now_or_later(partial(self.queue.start, self.buffers))  # after weight gradients of the layer that are delayed


class AtEndHooks:
    """As :class:`FullShardingHooks`, for what forward may use without an input that has a gradient.

    Gradients leave when the backward of the micro-batch ends. ``in_backward``: it needs the weights as well.
    """

    def __init__(self, buffers: Sequence[ShardedBuffer], queue: ReductionQueue, *, in_backward: bool) -> None:
        self.buffers, self.queue, self.in_backward = buffers, queue, in_backward

    def attach(self, module: nn.Module) -> None:
        """Act around every call of ``module``."""
        module.register_forward_pre_hook(self._before)
        module.register_forward_hook(self._after)

    def _before(self, _module: nn.Module, _inputs: tuple[Any, ...]) -> None:
        for buffer in self.buffers:
            buffer.gather()

    def _after(self, _module: nn.Module, _inputs: tuple[Any, ...], output: Tensor) -> Tensor | None:
        for buffer in self.buffers:
            buffer.release()
        return _marked(self._begin_backward, (output,))[0] if torch.is_grad_enabled() else None

    def _begin_backward(self) -> None:
        for buffer in self.buffers:
            if self.in_backward:
                buffer.gather()
            buffer.open_grads()
        torch.autograd.Variable._execution_engine.queue_callback(self._done)  # noqa: SLF001 - as torch's own FSDP

    def _done(self) -> None:
        if self.in_backward:
            for buffer in self.buffers:
                buffer.release()
        now_or_later(partial(self.queue.start, self.buffers))


def attach_hooks(model: Transformer, units: Sequence[tuple[Unit, FlatBuffer]], plan: Plan) -> None:
    """Let every layer, embedding, head and last norm act on the buffers of the units that it uses."""
    used: dict[int, list[FlatBuffer]] = defaultdict(list)
    shared: set[int] = set()
    for unit, buffer in units:
        for module in unit.modules:
            used[id(module)].append(buffer)
            if len(unit.modules) > 1:
                shared.add(id(module))
    queue = ReductionQueue(is_beside=plan.overlap_grad_reduce)
    for stage in map(_as_stage, model.stages):
        if plan.sharding == "full":
            _attach_full(stage, used, queue, prefetches=plan.overlap_param_gather)
        else:
            _attach_step_end(stage, used, shared, plan)


def _attach_step_end(stage: ModelStage, used: Mapping[int, list[FlatBuffer]], shared: set[int], plan: Plan) -> None:
    # Delayed weight gradients are not there yet when backward leaves their layer. How many backwards a step has that
    # packs documents anew is not known here.
    is_early = plan.overlap_grad_reduce and not plan.delay_wgrad and not plan.dynamic_cp
    num = plan.num_micro_batches if is_early else 0
    uses = stage.stage.num_mtp // max(1, len(stage.mtp))  # of a module that all MTP depths run
    num_backwards = [*((layer, num) for layer in stage.layers), *((layer, num * uses) for layer in stage.mtp)]
    if stage.head_loss is not None:
        num_depths = 1 + plan.model.num_mtp_layers
        num_backwards.append((stage.head_loss, 0 if id(stage.head_loss) in shared else num * num_depths))
    for module, number in num_backwards:
        StepEndHooks(used[id(module)], number).attach(module)
    for early in (stage, stage.embed):  # in backward, no input's gradient says that they are done
        if early is not None:
            StepEndHooks(used[id(early)]).attach(early)


def _attach_full(
    stage: ModelStage, used: Mapping[int, list[FlatBuffer]], queue: ReductionQueue, *, prefetches: bool
) -> None:
    AtEndHooks(_sharded(used[id(stage)]), queue, in_backward=True).attach(stage)
    if stage.embed is not None:
        AtEndHooks(_sharded(used[id(stage.embed)]), queue, in_backward=False).attach(stage.embed)
    modules = stage_layers(stage) + ([] if stage.head_loss is None else [stage.head_loss])
    sharded = [_sharded(used[id(module)]) for module in modules]
    around = [[], *sharded, []] if prefetches else [[]] * (len(modules) + 2)
    for index, module in enumerate(modules):
        FullShardingHooks(sharded[index], queue, around[index], around[index + 2]).attach(module)


def _as_stage(module: nn.Module) -> ModelStage:
    return cast("ModelStage", module)


def _sharded(buffers: Sequence[FlatBuffer]) -> list[ShardedBuffer]:
    return [buffer for buffer in buffers if isinstance(buffer, ShardedBuffer)]
