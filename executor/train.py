"""The training loop: micro-batches, gradient reduction, one update a step."""

import math
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial

import torch

from moeplan.errors import RunFailedError
from moeplan.executor.checkpoint import Checkpointer
from moeplan.executor.collectives import all_gather_raw
from moeplan.executor.data import TokenSource
from moeplan.executor.document_batches import DocumentBatches, Ends
from moeplan.executor.failure import STOPPED
from moeplan.executor.first_weights import first_weights
from moeplan.executor.guard import SpikeGuard, check_finite, largest_tensor
from moeplan.executor.learning_rate import learning_rate
from moeplan.executor.measure import PeakBytes, StepTimer, StepTrace, peak_device_bytes
from moeplan.executor.mesh import Mesh
from moeplan.executor.micro_batch import MicroBatch, cut_micro_batch, plan_shape
from moeplan.executor.model import Transformer
from moeplan.executor.optimizer import ChainedOptimizer, gather_scalars
from moeplan.executor.pack_batches import PackBatches, moved
from moeplan.executor.paired_weight_grad import pair_weight_grads
from moeplan.executor.pipeline import Pipeline, embedding_group
from moeplan.executor.power import PowerSamples
from moeplan.executor.routing import RoutingControl
from moeplan.executor.start_check import check_resumed, shortened
from moeplan.executor.step_log import BUSIEST_LOAD, StepLog
from moeplan.flops import training_flops_per_token
from moeplan.plan import Plan
from moeplan.results import FamilyTime
from moeplan.run_config import RunConfig
from moeplan.units import TFLOP
from moeplan.vocabulary import OpFamily

Progress = Callable[[str], None]
RESUME_HINT = "go on from there with resume"


@dataclass(frozen=True)
class StepResult:
    """Cross entropy a token over the global batch, and the norm of its gradient before clipping.

    ``stop``: some rank was asked to stop, which all of them learn in the same step. ``spike``: how many times its
    recent median the norm was, where that left the update out. ``busiest_load``: of the busiest expert of all layers,
    over the mean of its layer, where the run logs it.
    """

    loss: float
    grad_norm: float
    stop: bool = False
    spike: float = 0.0
    busiest_load: float = 0.0


@dataclass
class TrainingRecord:
    """What a run leaves behind on one rank. ``step_times_s`` are of every step; the peak is of those not traced.

    ``power`` has a sample after each timed step, ``kernels`` the longest-running kernel of some families; both are
    empty on a CPU.
    """

    losses: list[float] = field(default_factory=list)
    step_times_s: list[float] = field(default_factory=list)
    peak_bytes: PeakBytes = field(default_factory=lambda: PeakBytes(0, 0))
    family_times: dict[OpFamily, FamilyTime] = field(default_factory=dict)
    kernels: dict[OpFamily, str] = field(default_factory=dict)
    power: PowerSamples = field(default_factory=PowerSamples)
    validation_losses: list[tuple[int, float]] = field(default_factory=list)


class Trainer:
    """Model and optimizer of one rank. Collective: all ranks build and step it together."""

    def __init__(self, plan: Plan, run: RunConfig, mesh: Mesh, tokens: TokenSource, device: torch.device) -> None:
        self.plan, self.run, self.mesh, self.tokens, self.device = plan, run, mesh, tokens, device
        self.model = Transformer(plan, mesh, run.seed, device, first_weights(plan, run))
        self.packs = PackBatches(plan, mesh, device) if plan.dynamic_cp else None
        self.documents = DocumentBatches(plan, mesh, device) if run.separate_documents else None
        self.pipeline = Pipeline(plan, mesh, self.model, self.packs.shape() if self.packs else plan_shape(plan))
        self.routing = RoutingControl(plan, run, mesh)
        for router in self.model.routers():
            router.control = self.routing
            router.counts_load |= run.log_balance
        self.optimizer = ChainedOptimizer(plan, run, mesh, self.model, embedding_group(plan, mesh))
        pair_weight_grads(self.model, plan)
        self.model.table.weights = None  # lets go of the files of first weights
        self.checkpoints = Checkpointer(plan, run, mesh, self.model, self.optimizer) if run.save_folder else None
        self.spikes = SpikeGuard(run.spike_factor)
        self.current_step, self.progress = 0, 0  # what the watchdog looks at: 0 between steps, and micro-batches begun
        self.first_step = 0
        self.stop_requested = False  # set by a signal, at any time
        self.is_stopping = False  # all ranks know of it and save their state

    def resume(self) -> None:
        """Take the latest checkpoint of the run's folder, whatever folding wrote it."""
        assert self.checkpoints is not None
        self.first_step = self.checkpoints.load()
        check_resumed(self.run, self.first_step)
        self.tokens = self.tokens.resumed(self.first_step, self.checkpoints.tokens_at(self.first_step))
        self.run = shortened(self.run, self.first_step)

    def step(self, number: int) -> StepResult:
        """One step over the global batch. RunFailedError names step and rank where loss or gradient is not finite."""
        self.routing.begin(number + 1)
        num_targets = self._begin_batch(partial(self.tokens.ends, number))
        loss_sum = self.pipeline.run(lambda index: self._micro_batch(number, index))[0] / num_targets
        # Ranks without the loss bring zero; those of a tp group all have the same one.
        losses, stops = self._gathered(loss_sum * (self.mesh.tp.index == 0), float(self.stop_requested))
        check_finite("loss", losses, number + 1, self.optimizer.named_weights(), self.mesh.world)
        squares = self.optimizer.reduce_grads()
        check_finite("gradient norm", squares, number + 1, self.optimizer.named_grads(), self.mesh.world)
        norm = math.sqrt(sum(squares))
        spike = self._judge_spike(norm, number)
        if spike:
            self.optimizer.drop_grads()
        else:
            self.optimizer.update(learning_rate(self.run, number), norm)
        loads = [load for load in (router.end_step() for router in self.model.routers()) if load is not None]
        self.routing.end()
        busiest_load = self._largest(loads) if self.run.log_balance else 0.0
        return StepResult(sum(losses), norm, any(stops), spike, busiest_load)

    def _largest(self, values: list[torch.Tensor]) -> float:
        """Of the numbers of all ranks; 0 where there is none."""
        own = torch.stack(values).max() if values else torch.zeros((), device=self.device)
        return max(gather_scalars(own, self.mesh.world))

    def tokens_at(self, step: int) -> int:
        """Tokens trained on in ``step`` steps."""
        return self.checkpoints.tokens_at(step) if self.checkpoints else step * self.plan.tokens_per_step

    def _judge_spike(self, norm: float, number: int) -> float:
        """How many times the median a spike is whose update is left out; RunFailedError where it ends the run."""
        excess = self.spikes.excess(norm)
        if excess and not self.run.skip_spikes:
            name, rank = largest_tensor(self.optimizer.named_grads(), self.mesh.world)
            raise RunFailedError(
                f"gradient norm {norm:.4g} at step {number + 1} is {excess:.3g} times its recent median, above "
                f"spike_factor {self.run.spike_factor:g}; most of it in {name} on rank {rank}",
                "look at the data of that step, lower lr, or go on from the last checkpoint with skip_spikes",
            )
        return excess

    def evaluate(self) -> float:
        """Loss a token on the run's held-out batches, the same ones each time. Changes nothing. Collective."""
        plan, num_batches = self.plan, self.run.eval_batches
        total = plan.global_batch_size * num_batches

        def ends_of(index: int) -> Ends:
            return self.tokens.validation_ends(index, total)

        def loss_of(batch: int) -> float:
            start = batch * plan.global_batch_size

            def micro_batch(index: int) -> MicroBatch:
                if self.packs is not None:
                    return self.packs.validation_micro_batch(self.tokens, index, batch, num_batches)
                first = (self.mesh.dp.index * plan.num_micro_batches + index) * plan.mbs
                return self._cut(*self.tokens.validation_batch(start + first, plan.mbs, total), start + first, ends_of)

            num_targets = self._begin_batch(lambda index: ends_of(start + index))
            loss_sum = self.pipeline.evaluate(micro_batch)[0] / num_targets
            return sum(self._gathered(loss_sum * (self.mesh.tp.index == 0), 0.0)[0])

        return sum(map(loss_of, range(num_batches))) / num_batches

    def _gathered(self, first: torch.Tensor, second: float) -> tuple[list[float], list[float]]:
        """Two numbers of every rank of the world in one collective."""
        both = torch.stack([first.to(torch.float64), first.new_tensor(second, dtype=torch.float64)])
        firsts, seconds = all_gather_raw(both[None], self.mesh.world).t().tolist()
        return firsts, seconds

    def _micro_batch(self, number: int, index: int) -> MicroBatch:
        """Ids of micro-batch ``index`` of this rank's dp index."""
        plan, self.progress = self.plan, self.progress + 1
        if self.packs is not None:
            return self.packs.micro_batch(self.tokens, number, index)
        first = (self.mesh.dp.index * plan.num_micro_batches + index) * plan.mbs
        return self._cut(*self.tokens.batch(number, first, plan.mbs), first, partial(self.tokens.ends, number))

    def _cut(
        self, tokens: torch.Tensor, targets: torch.Tensor, first: int, ends_of: Callable[[int], Ends]
    ) -> MicroBatch:
        """Of sequences from ``first`` on, whose documents end at ``ends_of`` each."""
        tokens, targets = moved(tokens, self.device), moved(targets, self.device)
        if self.documents is not None:
            return self.documents.cut(tokens, targets, [ends_of(first + index) for index in range(self.plan.mbs)])
        return cut_micro_batch(tokens, targets, self.plan, self.mesh.cp)

    def _begin_batch(self, ends_of: Callable[[int], Ends]) -> int:
        """Over how many targets losses of the global batch are means; ``ends_of`` each of its sequences."""
        if self.documents is None:
            return self.plan.tokens_per_step
        num_targets, weights = self.documents.loss_weights(map(ends_of, range(self.plan.global_batch_size)))
        self.pipeline.weigh(weights)
        return num_targets


def train(trainer: Trainer, report: Progress, log: StepLog | None = None) -> TrainingRecord:
    """Run every step of the trainer's run; ``report`` gets one line for each step to be reported, ``log`` each step.

    The last ``profile_steps`` steps are traced for the time by op family. Checkpoints are written between steps. Where
    a rank was asked to stop, all save the state and raise RunFailedError.
    """
    run, record = trainer.run, TrainingRecord()
    timer = StepTimer(0, trainer.device)
    first_traced = run.steps - run.profile_steps
    trace = StepTrace(trainer.device) if run.profile_steps else None
    for number in range(trainer.first_step, first_traced):
        _timed_step(trainer, number, timer, record, report, log)
        if number - trainer.first_step >= run.warmup_steps_untimed:
            record.power.sample(trainer.device)
        if run.eval_every and (number + 1) % run.eval_every == 0:
            _validate(trainer, number + 1, record, report, log)
    record.peak_bytes = peak_device_bytes(trainer.device)  # a trace of a step takes memory of its own
    with trace or nullcontext():
        for number in range(first_traced, run.steps):
            _timed_step(trainer, number, timer, record, report, log)
    if trace is not None:
        record.family_times = trace.family_times(run.profile_steps)
        record.kernels = trace.kernels()
    record.step_times_s = timer.all_times_s
    if run.eval_every and [steps for steps, _ in record.validation_losses[-1:]] != [run.steps]:
        _validate(trainer, run.steps, record, report, log)
    if trainer.checkpoints is not None:
        trainer.checkpoints.wait()
    trainer.optimizer.finish_gathers()
    return record


def _timed_step(  # noqa: PLR0917 - what a run writes to
    trainer: Trainer, number: int, timer: StepTimer, record: TrainingRecord, report: Progress, log: StepLog | None
) -> None:
    trainer.current_step = number + 1
    with timer.step():
        result = trainer.step(number)
    trainer.current_step = 0
    record.losses.append(result.loss)
    if log is not None:
        log.step(_logged(trainer, number, result, timer.all_times_s[-1]))
    if (number + 1) % trainer.run.log_every == 0 or number + 1 == trainer.run.steps:
        step_s = timer.all_times_s[-1]
        load = f"  busiest expert {result.busiest_load:.2f} x the mean" if result.busiest_load else ""
        skipped = f"  update left out: {result.spike:.3g} times the median norm" if result.spike else ""
        report(
            f"step {number + 1}/{trainer.run.steps}  loss {result.loss:.4f}  grad norm {result.grad_norm:.3f}  "
            f"{trainer.plan.tokens_per_step / step_s:.0f} tokens/s  {step_s * 1000:.0f} ms{load}{skipped}"
        )
    checkpoints, trainer.is_stopping = trainer.checkpoints, result.stop
    if checkpoints is not None and (result.stop or checkpoints.is_due(number + 1)):
        checkpoints.save(number + 1)
    if result.stop:
        _stop(trainer, number + 1)


def _logged(trainer: Trainer, number: int, result: StepResult, step_s: float) -> dict[str, float]:
    plan = trainer.plan
    tokens_per_s = plan.tokens_per_step / step_s / plan.num_gpus
    return {
        "step": number + 1,
        "loss": result.loss,
        "grad_norm": result.grad_norm,
        "lr": learning_rate(trainer.run, number),
        "step_s": step_s,
        "tokens_per_s_per_gpu": tokens_per_s,
        "model_tflops_per_gpu": tokens_per_s
        * training_flops_per_token(plan.model, plan.seq_len, plan.flop_lengths)
        / TFLOP,
        "tokens": trainer.tokens_at(number + 1),
        BUSIEST_LOAD: result.busiest_load,
    }


def _validate(trainer: Trainer, steps: int, record: TrainingRecord, report: Progress, log: StepLog | None) -> None:
    loss = trainer.evaluate()
    if log is not None:
        log.validation(steps, loss)
    record.validation_losses.append((steps, loss))
    report(f"step {steps}/{trainer.run.steps}  validation loss {loss:.4f}")


def _stop(trainer: Trainer, steps: int) -> None:
    checkpoints = trainer.checkpoints
    saved = ""
    if checkpoints is not None:
        checkpoints.wait()
        saved = f"; its state is in {checkpoints.folder}"
    raise RunFailedError(f"the run {STOPPED} after step {steps}/{trainer.run.steps}{saved}", RESUME_HINT)
