"""Checkpoints as DeepSeek-V3 and GPT-OSS are published, in FP8 and MXFP4, read as the values they stand for."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor

from moeplan.errors import InvalidInputError
from moeplan.executor.check import check_init_from
from moeplan.executor.dequantize_hf import BlockFp8Slices, Mxfp4Slices
from moeplan.executor.first_weights import first_weights
from moeplan.executor.mesh import build_mesh
from moeplan.executor.model import Transformer
from moeplan.run_config import RunConfig
from tests.executor.cases import tiny_plan
from tests.executor.hf_models import of_family
from tests.executor.test_import_hf import parts_of, save

DEEPSEEK, GPT_OSS = of_family("deepseek_v3"), of_family("gpt_oss")


def quantize(folder: Path, config: dict[str, Any], change: Callable[[str, Tensor], dict[str, Tensor]]) -> None:
    """Put what ``change`` makes of each tensor in its place."""
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": config}))
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    for file in folder.glob("*.safetensors"):
        made = [change(name, tensor) for name, tensor in load_file(file).items()]
        tensors = {name: tensor.contiguous() for one in made for name, tensor in one.items()}
        save_file(tensors, file)
        index["weight_map"] |= dict.fromkeys(tensors, file.name)
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def fp8(name: str, tensor: Tensor) -> dict[str, Tensor]:
    """Projections in blocks of 16 x 8, as DeepSeek does it in blocks of 128 x 128."""
    if "proj" not in name:
        return {name: tensor}
    rows, columns = (-(-size // block) for size, block in zip(tensor.shape, (16, 8), strict=True))
    factors = torch.rand(rows, columns, generator=torch.Generator().manual_seed(0)) + 0.5
    whole = factors.repeat_interleave(16, 0)[: tensor.shape[0]].repeat_interleave(8, 1)[:, : tensor.shape[1]]
    return {name: (tensor / whole).to(torch.float8_e4m3fn), f"{name}_scale_inv": factors}


def mxfp4(name: str, tensor: Tensor) -> dict[str, Tensor]:
    """Random 4-bit values for the experts' matrices."""
    if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
        return {name: tensor}
    experts, inputs, outputs = tensor.shape
    shape = (experts, outputs, inputs // 32)
    generator = torch.Generator().manual_seed(len(name))
    return {
        f"{name}_blocks": torch.randint(0, 256, (*shape, 16), generator=generator, dtype=torch.uint8),
        f"{name}_scales": torch.randint(115, 122, shape, generator=generator, dtype=torch.uint8),
    }


FP8 = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [16, 8]}
# Both widths of GPT-OSS are multiples of 32, the elements that share an exponent.
WIDE = GPT_OSS.model_copy(update={"moe": GPT_OSS.moe and GPT_OSS.moe.model_copy(update={"expert_ffn_size": 64})})


def test_fp8_blocks_give_their_weights_to_three_bits(tmp_path: Path) -> None:
    made = save(DEEPSEEK, tmp_path)
    quantize(tmp_path, FP8, fp8)
    plan, run = tiny_plan(DEEPSEEK, 1, precision="fp32"), RunConfig(init_from=str(tmp_path))
    check_init_from(plan, run)
    mesh = build_mesh(plan.folding, 0)
    again = Transformer(plan, mesh, 7, torch.device("cpu"), first_weights(plan, run))
    num_rounded = 0
    for (name, _, values), (_, _, expected) in zip(parts_of(again), parts_of(made), strict=True):
        # Three bits of mantissa: a sixteenth at most, but for what falls below 2**-6.
        torch.testing.assert_close(values, expected, rtol=2**-4, atol=2**-9, msg=name)
        num_rounded += int(not torch.equal(values, expected))
    assert num_rounded > 20


def test_mxfp4_is_what_transformers_makes_of_it(tmp_path: Path) -> None:
    mxfp4_of_transformers = pytest.importorskip("transformers.integrations.mxfp4")
    save(WIDE, tmp_path)
    quantize(tmp_path, {"quant_method": "mxfp4"}, mxfp4)
    plan, run = tiny_plan(WIDE, 1, precision="fp32"), RunConfig(init_from=str(tmp_path))
    check_init_from(plan, run)
    again = Transformer(plan, build_mesh(plan.folding, 0), 7, torch.device("cpu"), first_weights(plan, run))
    got = {name: values for name, _, values in parts_of(again)}
    stored = {name: tensor for file in tmp_path.glob("*.safetensors") for name, tensor in load_file(file).items()}
    for layer in range(WIDE.num_layers):
        name = f"model.layers.{layer}.mlp.experts"
        matrices = [
            mxfp4_of_transformers.convert_moe_packed_tensors(
                stored[f"{name}.{matrix}_blocks"], stored[f"{name}.{matrix}_scales"], dtype=torch.float32
            )
            for matrix in ("gate_up_proj", "down_proj")
        ]
        for expert in range(8):
            ours = f"layers.{layer}.experts.{expert}"
            torch.testing.assert_close(got[f"{ours}.gate.weight"], matrices[0][expert, :, 0::2], rtol=0, atol=0)
            torch.testing.assert_close(got[f"{ours}.up.weight"], matrices[0][expert, :, 1::2], rtol=0, atol=0)
            torch.testing.assert_close(got[f"{ours}.down.weight"], matrices[1][expert], rtol=0, atol=0)


@settings(max_examples=30)
@given(st.data())
def test_a_part_is_the_part_of_the_whole(data: st.DataObject) -> None:
    def part(size: int) -> slice:
        start = data.draw(st.integers(0, size - 1))
        return slice(start, data.draw(st.integers(start + 1, size)))

    stored = mxfp4("experts.down_proj", torch.empty(2, 96, 5))
    experts = Mxfp4Slices(stored["experts.down_proj_blocks"], stored["experts.down_proj_scales"])
    box = (part(2), part(96), part(5))
    whole = experts[slice(0, 2), slice(0, 96), slice(0, 5)]
    torch.testing.assert_close(experts[box], whole[box], rtol=0, atol=0)

    blocks = fp8("proj", torch.randn(37, 21, generator=torch.Generator().manual_seed(1)))
    matrix = BlockFp8Slices(blocks["proj"], blocks["proj_scale_inv"], (16, 8))
    box_OI = (part(37), part(21))
    torch.testing.assert_close(matrix[box_OI], matrix[slice(0, 37), slice(0, 21)][box_OI], rtol=0, atol=0)


def test_a_missing_factor_is_said_before_the_run(tmp_path: Path) -> None:
    save(DEEPSEEK, tmp_path)
    quantize(tmp_path, FP8, lambda name, tensor: {name: fp8(name, tensor)[name]})
    with pytest.raises(InvalidInputError, match=r"no file holds the tensor .*weight_scale_inv"):
        check_init_from(tiny_plan(DEEPSEEK, 1), RunConfig(init_from=str(tmp_path)))
