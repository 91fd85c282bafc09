"""What a process holds beyond live tensors: the executor's own training step on a small model, in every process.

On a CPU, glibc keeps freed blocks of the forward and the backward pass in its heaps, so resident memory grows to more
than what lives at once: to about twice the saved tensors of a small model. With every block mapped on its own it would
not, at 1.4 times the step time.
"""

import torch

from moeplan.executor.data import HeldTokens, StreamSource
from moeplan.executor.measure import peak_resident_bytes, reset_peak_resident, resident_bytes
from moeplan.executor.mesh import build_mesh
from moeplan.executor.microbench_window import Reading, Window
from moeplan.executor.train import Trainer
from moeplan.mixers import GqaAttention
from moeplan.model_spec import ModelSpec, Moe
from moeplan.plan import Plan
from moeplan.run_config import RunConfig

NUM_STEPS = 5  # resident memory grows over the first three
SEQ_LEN, MICRO_BATCH_SIZE, VOCAB_SIZE = 256, 4, 256


def allocator(window: Window) -> list[Reading]:
    """Bytes that the first training step loads, and growth of later ones over their saved tensors, minus 1.

    Each process trains alone: exchange between processes is counted as buffers where it happens.
    """
    small = _trainer(seq_len=16, mbs=1)
    built_bytes = resident_bytes()
    small.step(0)
    first_step_bytes = resident_bytes() - built_bytes
    trainer = _trainer(SEQ_LEN, MICRO_BATCH_SIZE)
    before_bytes, saved_bytes = resident_bytes(), _saved_bytes(trainer)
    reset_peak_resident()
    for step in range(NUM_STEPS):
        trainer.step(step)
    excess_frac = (peak_resident_bytes() - before_bytes) / saved_bytes - 1
    return [
        Reading("first_step", 0.0, (float(max(0, first_step_bytes)),)),
        Reading("allocator_reserve", float(saved_bytes), (max(0.0, excess_frac),)),
    ]


def _trainer(seq_len: int, mbs: int) -> Trainer:
    model = ModelSpec(
        name="allocator",
        num_layers=4,
        hidden_size=256,
        vocab_size=VOCAB_SIZE,
        attention=GqaAttention(num_heads=8, num_kv_heads=4, head_dim=32),
        dense_ffn_size=768,
        num_dense_layers=1,
        moe=Moe(num_experts=8, top_k=2, expert_ffn_size=256),
    )
    plan = Plan(
        model=model,
        hardware="cpu-host",
        num_gpus=1,
        seq_len=seq_len,
        global_batch_size=mbs,
        mbs=mbs,
        precision="fp32",
    )
    tokens = StreamSource(seq_len, 0, "random", HeldTokens(torch.randint(VOCAB_SIZE, (2**16,))), VOCAB_SIZE)
    return Trainer(plan, RunConfig(), build_mesh(plan.folding, 0), tokens, torch.device("cpu"))


def _saved_bytes(trainer: Trainer) -> int:
    """Storage that one forward pass keeps for backward, weights left out."""
    storages: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        storages[storage.data_ptr()] = storage.nbytes()
        return tensor

    inputs, targets = trainer.tokens.batch(0, 0, MICRO_BATCH_SIZE)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = trainer.model(inputs, targets)
    weights = {weight.untyped_storage().data_ptr() for weight in trainer.model.parameters()}
    saved = sum(num_bytes for pointer, num_bytes in storages.items() if pointer not in weights)
    del loss
    return saved
