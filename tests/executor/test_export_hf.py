"""Exported folders: what is in them at any folding, and that it computes what the executor computes."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from moeplan.errors import InvalidInputError
from moeplan.executor.check import check_export
from moeplan.executor.export_hf import copy_tokenizer, export_hf, export_trained, write_part
from moeplan.executor.launch import launch
from moeplan.executor.mesh import build_mesh
from moeplan.executor.model import Transformer
from moeplan.hf_layout import checkpoint_places
from moeplan.kernels.rotary import apply_rotary, rotary_tables
from moeplan.mixers import GqaAttention, MlaAttention
from moeplan.model_spec import ModelSpec, Moe, Router
from moeplan.plan import Plan
from moeplan.presets import load_model
from moeplan.run_config import RunConfig
from tests.executor.cases import MLA_MODEL, build_trainer, tiny_plan
from tests.executor.gloo_pool import GlooPool, gloo_pool
from tests.executor.run_files import files

QWEN = ModelSpec(
    name="tiny-qwen",
    num_layers=2,
    hidden_size=32,
    vocab_size=256,
    dense_ffn_size=48,
    num_dense_layers=1,
    attention=GqaAttention(num_heads=4, num_kv_heads=2, head_dim=8, qk_norm=True),
    moe=Moe(num_experts=4, top_k=2, expert_ffn_size=16),
)
DEEPSEEK = MLA_MODEL.model_copy(
    update={
        "activation": "swiglu",
        "moe": Moe(
            num_experts=8,
            top_k=2,
            expert_ffn_size=16,
            shared_ffn_size=16,
            router=Router(score_function="sigmoid", aux_loss="none", aux_loss_coeff=0, expert_bias=True),
        ),
    }
)
FOLDINGS = [{"tp": 2}, {"ep": 2}, {"tp": 2, "etp": 2}, {"pp": 2}]


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GlooPool]:
    with gloo_pool(2, tmp_path_factory.mktemp("gloo")) as pool:
        yield pool


def export(rank: int, plan: Plan, folder: str) -> None:
    mesh = build_mesh(plan.folding, rank)
    model = Transformer(plan, mesh, 7, torch.device("cpu"))
    export_hf(plan, mesh, model, Path(folder), max_file_bytes=20_000)


def export_sharded(rank: int, plan: Plan, folder: str) -> None:
    trainer = build_trainer(rank, plan, RunConfig(seed=7))
    export_trained(plan, trainer.mesh, trainer.model, trainer.optimizer, Path(folder))


def read(folder: Path) -> dict[str, Tensor]:
    """Weights by the folder's own index."""
    from safetensors.torch import load_file

    index = json.loads((folder / "model.safetensors.index.json").read_text())
    files = {name: load_file(folder / name) for name in set(index["weight_map"].values())}
    weights = {name: files[file][name] for name, file in index["weight_map"].items()}
    assert sum(len(file) for file in files.values()) == len(weights)
    assert index["metadata"]["total_size"] == sum(weight.nbytes for weight in weights.values())
    return weights


@pytest.mark.parametrize("model", [QWEN, DEEPSEEK], ids=["qwen", "deepseek"])
def test_every_folding_exports_the_same_files(model: ModelSpec, pool: GlooPool, tmp_path: Path) -> None:
    export(0, tiny_plan(model, 1, precision="fp32"), str(tmp_path / "one"))
    expected = read(tmp_path / "one")
    assert load_model(str(tmp_path / "one")).attention == model.attention
    for number, folding in enumerate(FOLDINGS):
        folder = tmp_path / str(number)
        pool.run(export, tiny_plan(model, 2, precision="fp32", **folding), str(folder))
        got = read(folder)
        assert got.keys() == expected.keys()
        for name, weight in got.items():
            torch.testing.assert_close(weight, expected[name], rtol=0, atol=0, msg=name)
        assert (folder / "config.json").read_text() == (tmp_path / "one" / "config.json").read_text()


@pytest.mark.parametrize("model", [QWEN, DEEPSEEK], ids=["qwen", "deepseek"])
def test_fully_sharded_weights_are_exported_from_where_they_lie(
    model: ModelSpec, pool: GlooPool, tmp_path: Path
) -> None:
    export(0, tiny_plan(model, 1, precision="fp32"), str(tmp_path / "one"))
    pool.run(export_sharded, tiny_plan(model, 2, precision="fp32", sharding="full"), str(tmp_path / "two"))
    got = read(tmp_path / "two")
    for name, weight in read(tmp_path / "one").items():
        torch.testing.assert_close(got[name], weight, rtol=0, atol=0, msg=name)


WIDE = QWEN.model_copy(
    update={
        "hidden_size": 128,
        "dense_ffn_size": 128,
        "moe": Moe(num_experts=4, top_k=2, expert_ffn_size=128),
    }
)


@pytest.mark.parametrize("sharding", ["none", "optimizer"])
def test_weights_that_live_in_fp8_are_exported_as_they_are_trained(
    sharding: str, pool: GlooPool, tmp_path: Path
) -> None:
    changes = {"precision": "fp8_current", "sharding": sharding}
    export(0, tiny_plan(WIDE, 1, **changes), str(tmp_path / "one"))
    pool.run(export_sharded, tiny_plan(WIDE, 2, fp8_primary_weights=True, **changes), str(tmp_path / "two"))
    got, expected = read(tmp_path / "two"), read(tmp_path / "one")
    assert got.keys() == expected.keys()
    for name, weight in expected.items():
        torch.testing.assert_close(got[name], weight, rtol=0, atol=0, msg=name)


def test_the_tokenizer_goes_along_and_no_weight_of_the_old_folder(tmp_path: Path) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    for folder, names in (
        (old, ("tokenizer.json", "merges.txt", "config.json", "model.safetensors.index.json", "model.safetensors")),
        (new, ("config.json",)),
    ):
        folder.mkdir()
        for name in names:
            (folder / name).write_text(folder.name, encoding="utf-8")
    (old / "deeper").mkdir()
    copy_tokenizer(old, new)
    texts = {path.name: path.read_text(encoding="utf-8") for path in new.iterdir()}
    assert texts == {"config.json": "new", "tokenizer.json": "old", "merges.txt": "old"}


@pytest.mark.slow
def test_a_run_exports_what_it_trained(tmp_path: Path) -> None:
    plan = tiny_plan(WIDE, 2, precision="fp8_current", fp8_primary_weights=True, ep=2)
    plan_path, run_path, out = files(tmp_path, plan, steps=5, profile_steps=1, export_hf=str(tmp_path / "exported"))
    assert launch(plan_path, run_path, out, 2, lambda _: None)
    assert {weight.dtype for weight in read(tmp_path / "exported").values()} == {torch.bfloat16}


def export_counting(rank: int, plan: Plan, folder: str) -> list[int]:
    """Bytes of each file that this rank writes."""
    import safetensors.torch

    plain, sizes = safetensors.torch.save, []

    def save(tensors: dict[str, Tensor], metadata: dict[str, str] | None = None) -> bytes:
        sizes.append(sum(tensor.nbytes for tensor in tensors.values()))
        return plain(tensors, metadata)

    safetensors.torch.save = save
    try:
        export(rank, plan, folder)
    finally:
        safetensors.torch.save = plain
    return sizes


@pytest.mark.parametrize("folding", FOLDINGS[:3], ids=str)  # with pp, a rank holds what its stages hold
def test_every_rank_writes_its_share_file_by_file(folding: dict[str, int], pool: GlooPool, tmp_path: Path) -> None:
    plan = tiny_plan(DEEPSEEK, 2, precision="fp32", **folding)
    ranks = pool.run(export_counting, plan, str(tmp_path))
    total_bytes = sum(map(sum, ranks))
    for sizes in ranks:
        assert sum(sizes) < 0.7 * total_bytes
        assert max(sizes) <= max(20_000, 256 * 32 * 4)  # the embedding alone is larger than a file should be


def test_experts_are_transposed_and_files_are_small(tmp_path: Path) -> None:
    export(0, tiny_plan(QWEN, 1, precision="fp32"), str(tmp_path))
    weights = read(tmp_path)
    assert weights["model.layers.1.mlp.experts.3.gate_proj.weight"].shape == (16, 32)
    assert weights["model.layers.1.mlp.experts.3.down_proj.weight"].shape == (32, 16)
    files = sorted(path.name for path in tmp_path.glob("*.safetensors"))
    assert len(files) > 2
    assert files[0] == f"model-00001-of-{len(files):05d}.safetensors"


def test_rotary_channels_of_deepseek_are_paired() -> None:
    spec = DEEPSEEK.attention
    assert isinstance(spec, MlaAttention)
    rope, rank = spec.qk_rope_head_dim, spec.kv_lora_rank
    generator = torch.Generator().manual_seed(0)
    down, x = torch.randn(rank + rope, 32, generator=generator), torch.randn(1, 3, 32, generator=generator)
    cos, sin = rotary_tables(torch.arange(3), rope, 1e4)
    ours = apply_rotary((x @ down.t())[:, :, None, rank:], cos, sin)
    place = checkpoint_places(DEEPSEEK, "deepseek_v3")["layers.0.attention.key_value_down.weight"][0]
    exported = torch.empty(place.shape)
    write_part(exported, place, (0, 0), down)
    theirs = (x @ exported.t())[:, :, None, rank:].unflatten(-1, (-1, 2))  # pairs, turned as complex numbers
    turned = torch.view_as_complex(theirs) * torch.complex(cos, sin)[None, :, None]
    torch.testing.assert_close(ours, torch.cat([turned.real, turned.imag], -1))
    torch.testing.assert_close(exported[:rank], down[:rank])


def test_what_cannot_be_exported_is_refused_before_the_run(tmp_path: Path) -> None:
    run = RunConfig(export_hf=str(tmp_path / "out"))
    check_export(tiny_plan(QWEN, 1), run)
    check_export(tiny_plan(MLA_MODEL.model_copy(update={"activation": "gelu"}), 1), RunConfig())
    with pytest.raises(InvalidInputError, match="no Hugging Face family holds"):
        check_export(tiny_plan(MLA_MODEL.model_copy(update={"activation": "gelu"}), 1), run)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "old").touch()
    with pytest.raises(InvalidInputError, match="exists and is not an empty folder"):
        check_export(tiny_plan(QWEN, 1), run)
