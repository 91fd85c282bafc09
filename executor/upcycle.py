"""First weights of an MoE model from a dense checkpoint: MLPs, cut and copied, become experts (report section 8)."""

import re
from dataclasses import replace

import torch
from torch import Tensor

from moeplan.executor.import_hf import HfWeights
from moeplan.executor.parameters import Piece, drawn
from moeplan.hf_folder import HfFolder
from moeplan.model_spec import ModelSpec
from moeplan.upcycling import upcycling

_CPU = torch.device("cpu")


class UpcycledWeights:
    """Gives the parts of whole weights of ``model`` from the dense ``folder``; routers are drawn by ``seed``."""

    def __init__(self, folder: HfFolder, model: ModelSpec, seed: int) -> None:
        self._dense, self._seed = HfWeights(folder), seed
        self._width, self._hidden = folder.model.dense_ffn_size, model.hidden_size
        self._plan = upcycling(model, self._width)

    def __call__(self, piece: Piece) -> Tensor:
        if piece.name.endswith("router.weight"):
            return self._router(piece)
        if piece.name.endswith("router.expert_bias"):
            return torch.zeros(piece.shape)
        expert = re.fullmatch(r"(layers\.\d+)\.experts\.(\d+)\.(gate|up|down)\.weight", piece.name)
        if expert is None:
            return self._dense(piece)
        layer, number, part = expert.groups()
        return self._expert(piece, f"{layer}.mlp.{part}.weight", self._plan.shard(int(number)), part)

    def _router(self, piece: Piece) -> Tensor:
        """The rows of one of G parts, for all of them."""
        shape = (self._plan.num_copies, piece.shape[1])
        whole = tuple(slice(0, size) for size in shape)
        rows = drawn(replace(piece, shape=shape, source=whole, target=whole), self._seed, _CPU)
        return rows.repeat(self._plan.granularity, 1)[piece.source]

    def _expert(self, piece: Piece, name: str, shard: int, part: str) -> Tensor:
        """A shard of the dense matrix ``name``, which is [out, in] where an expert's is [in, out]."""
        is_down = part == "down"
        wide, narrow = piece.source if is_down else piece.source[::-1]
        first = shard * (self._width // self._plan.granularity)
        wide = slice(first + wide.start, first + wide.stop)
        shape = (self._hidden, self._width) if is_down else (self._width, self._hidden)
        source = (narrow, wide) if is_down else (wide, narrow)
        values = self._dense(Piece(name, shape, source, source)).t()
        if part == "gate":
            return values
        return values * (self._plan.down_factor if is_down else self._plan.up_factor)
