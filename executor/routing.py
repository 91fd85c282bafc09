"""Who chooses experts: the routers, or for benchmarks a balanced draw, or the record of an earlier run.

Records are by sequence and position, so that a run may replay them under any folding: ``FOLDER/step-00000001/`` has
``rank-00000.pt`` of every rank, with the places of its tokens and the indices of each of its routers.

Shapes: L tokens of this rank in a micro-batch, M micro-batches, K experts per token, E experts.
"""

import hashlib
import io
from collections import Counter
from pathlib import Path

import torch
from torch import Tensor

from moeplan.errors import InvalidInputError
from moeplan.executor.context import own_positions
from moeplan.executor.mesh import Mesh
from moeplan.executor.routing_files import step_folder
from moeplan.files import write_bytes_atomically
from moeplan.kernels.router import RouterOptions, choose_experts
from moeplan.plan import Plan
from moeplan.run_config import RunConfig

_PLACES = "places"  # in the batch: sequence times its length plus position
Indices = dict[tuple[str, int], Tensor]  # [L, K] by router and micro-batch


class RoutingControl:
    """Shared by the routers of one rank. The trainer says when a step begins and ends; outside, routers choose.

    A layer's forwards come in the order of micro-batches, and so do their repetitions under recompute: the first ones
    without gradients, the others with.
    """

    def __init__(self, plan: Plan, run: RunConfig, mesh: Mesh) -> None:
        self.plan, self.mesh = plan, mesh
        self.force_balance, self.seed = run.force_balance, run.seed
        self.record_folder = Path(run.record_routing) if run.record_routing else None
        self.replay_folder = Path(run.replay_routing) if run.replay_routing else None
        self._step: int | None = None
        self._calls: Counter[tuple[str, bool]] = Counter()
        self._recorded: Indices = {}
        self._replayed: Indices = {}

    @property
    def is_active(self) -> bool:
        return self._step is not None and bool(self.force_balance or self.record_folder or self.replay_folder)

    def begin(self, step: int) -> None:
        """Step ``step`` (from 1 on) is about to run. InvalidInputError where its record is missing or another's."""
        self._step = step
        self._calls.clear()
        if self.replay_folder:
            self._replayed = self._read(step_folder(self.replay_folder, step))

    def end(self) -> None:
        """The step is over: its record is written."""
        if self.record_folder and self._step is not None:
            self._write(step_folder(self.record_folder, self._step))
        self._recorded, self._step = {}, None

    def next_call(self, router: str) -> int:
        """The micro-batch whose forward a router now begins."""
        key = (router, torch.is_grad_enabled())
        self._calls[key] += 1
        return self._calls[key] - 1

    def forced(self, router: str, micro_batch: int, logits_LE: Tensor, options: RouterOptions) -> Tensor | None:
        """Experts [L, K] that the router has to take; None where it may choose."""
        if self.replay_folder:
            found = self._replayed.get((router, micro_batch))
            if found is None:
                raise InvalidInputError(
                    f"replay_routing {self.replay_folder}: step {self._step} has no {router}",
                    "replay a record of the same model",
                )
            return found.to(logits_LE.device, torch.int64)
        if not self.force_balance:
            return None
        # Uniform scores, as Megatron forces balance with random logits: level in expectation, inside chosen groups.
        name = f"{self.seed}/{router}/{self._step}/{micro_batch}/{self.mesh.rank}"
        seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:7], "big")
        generator = torch.Generator(logits_LE.device).manual_seed(seed)
        return choose_experts(torch.rand(logits_LE.shape, generator=generator, device=logits_LE.device), options)

    def note(self, router: str, micro_batch: int, index_LK: Tensor) -> None:
        """Remember what a router chose, where that is recorded."""
        if self.record_folder:
            self._recorded[router, micro_batch] = index_LK.to("cpu", torch.int16)

    def _places(self) -> Tensor:
        """Places [M, L] of this rank's tokens in the batch."""
        plan, mesh = self.plan, self.mesh
        first = mesh.dp.index * plan.num_micro_batches * plan.mbs
        sequences = first + torch.arange(plan.num_micro_batches * plan.mbs)
        positions = own_positions(plan.documents, mesh.cp, torch.device("cpu"))
        places = (sequences[:, None] * plan.seq_len + positions).view(plan.num_micro_batches, -1)
        return places.view(len(places), mesh.tp.size, -1)[:, mesh.tp.index]

    def _write(self, folder: Path) -> None:
        names = sorted({router for router, _ in self._recorded})
        places = self._places()
        record = {name: torch.stack([self._recorded[name, index] for index in range(len(places))]) for name in names}
        content = io.BytesIO()
        torch.save({_PLACES: places, **record}, content)
        write_bytes_atomically(folder / f"rank-{self.mesh.rank:05d}.pt", content.getvalue())

    def _read(self, folder: Path) -> Indices:
        """Indices of every router that any rank recorded, at this rank's tokens."""
        files = sorted(folder.glob("rank-*.pt"))
        if not files:
            raise InvalidInputError(
                f"replay_routing: {folder} has no record",
                "name the folder of a run with record_routing, of as many steps",
            )
        places = self._places()
        order = places.flatten().argsort()
        own = places.flatten()[order]
        found: dict[str, Tensor] = {}
        seen: dict[str, Tensor] = {}
        for file in files:
            record = torch.load(file, mmap=True, weights_only=True)
            theirs = record.pop(_PLACES).flatten()
            at = torch.searchsorted(own, theirs).clamp(max=len(own) - 1)
            is_own = own[at] == theirs
            to = order[at[is_own]]
            for name, index in record.items():
                rows = index.flatten(0, 1)[is_own]
                found.setdefault(name, rows.new_zeros(len(own), rows.shape[1]))[to] = rows
                seen.setdefault(name, torch.zeros(len(own), dtype=torch.bool))[to] = True
        for name, is_seen in seen.items():
            if not bool(is_seen.all()):
                raise InvalidInputError(
                    f"replay_routing {folder}: {name} has {int(is_seen.sum())} of the {len(own)} tokens of rank "
                    f"{self.mesh.rank}",
                    "replay with the global batch size and sequence length of the record",
                )
        batches = range(len(places))
        return {
            (name, batch): rows.view(len(places), -1, rows.shape[1])[batch]
            for name, rows in found.items()
            for batch in batches
        }
