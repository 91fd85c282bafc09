"""Bytes that autograd keeps on the device for one layer, counted storage by storage."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from moeplan.executor.mesh import Mesh, build_mesh, plan_mesh
from moeplan.executor.model import ModelStage, Transformer
from moeplan.executor.offload import tensors_of
from moeplan.executor.saved_tensors import keeping, storage_key
from moeplan.plan import Plan


@contextmanager
def rank_zero(plan: Plan) -> Iterator[Mesh]:
    """The mesh of rank 0 in a world whose other ranks only seem to answer: sizes are right, values are not."""
    if plan.num_gpus == 1:
        yield plan_mesh(plan, 0)
        return
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=plan.num_gpus)
    try:
        yield plan_mesh(plan, 0)
    finally:
        dist.destroy_process_group()


def layer_kept_bytes(plan: Plan) -> int:
    """What the first layer of rank 0 keeps for one micro-batch, weights and tables left out."""
    with rank_zero(plan) as mesh:
        return layer_kept_bytes_on(plan, mesh)


def layer_kept_bytes_on(plan: Plan, mesh: Mesh) -> int:
    """The same of the rank of ``mesh``."""
    model = Transformer(plan, mesh, seed=1, device=torch.device("cpu"))
    stage = cast("ModelStage", model.stages[0])
    x_LH = torch.randn(plan.tokens_per_rank, plan.model.hidden_size).to(model.table.dtype).requires_grad_()
    with stage.offloader.chunk() if stage.offloader is not None else nullcontext():
        return _kept(model, lambda: stage.run_layer(0, partial(stage.decoder_layer, stage.layers[0]), x_LH))


def model_kept_bytes(plan: Plan) -> int:
    """What a model on one rank keeps for one micro-batch, its logits left out, which no hook sees."""
    model = Transformer(plan, build_mesh(plan.folding, 0), seed=1, device=torch.device("cpu"))
    ids = torch.arange(plan.mbs * plan.seq_len) % plan.model.vocab_size
    return _kept(model, lambda: model(ids, ids))


def _kept(model: Transformer, run: Callable[[], Tensor]) -> int:
    """Bytes of distinct storages kept by ``run``."""
    persistent = set(map(storage_key, tensors_of(model)))
    found: dict[int, int] = {}

    def count(tensor: Tensor) -> None:
        if storage_key(tensor) not in persistent:
            found[storage_key(tensor)] = tensor.untyped_storage().nbytes()

    with keeping(count):
        result = run()
    num_bytes = sum(found.values())  # while the result holds what was counted
    assert result.requires_grad
    return num_bytes
