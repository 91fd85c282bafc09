"""Weights read from a folder: the parts each rank asks for, at any folding, and what is wrong with a folder."""

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from moeplan.errors import InvalidInputError
from moeplan.executor.check import check_init_from
from moeplan.executor.export_hf import export_hf, write_part
from moeplan.executor.first_weights import first_weights
from moeplan.executor.import_hf import HfWeights, read_part
from moeplan.executor.mesh import build_mesh
from moeplan.executor.model import Transformer
from moeplan.hf_export import hf_config_of
from moeplan.hf_folder import open_folder
from moeplan.hf_layout import checkpoint_places
from moeplan.mixers import GqaAttention
from moeplan.model_spec import ModelSpec
from moeplan.plan import Plan
from moeplan.run_config import RunConfig
from moeplan.weights import weight_shapes
from tests.executor.cases import build_trainer, tiny_plan, whole_weights
from tests.executor.gloo_pool import GlooPool, gloo_pool
from tests.executor.hf_models import MODELS, model, of_family

DEEPSEEK, GPT_OSS, QWEN_NEXT = of_family("deepseek_v3"), of_family("gpt_oss"), of_family("qwen3_next")
WITH_MTP = DEEPSEEK.model_copy(update={"num_mtp_layers": 1})
NEXT_WITH_MTP = QWEN_NEXT.model_copy(update={"num_mtp_layers": 1})
NEMOTRON = of_family("nemotron_h").model_copy(update={"num_mtp_layers": 2})
SHARED = NEMOTRON.model_copy(update={"name": "shared-depths", "mtp_shared": True})


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GlooPool]:
    with gloo_pool(4, tmp_path_factory.mktemp("gloo")) as pool:
        yield pool


def save(spec: ModelSpec, folder: Path, **changes: Any) -> Transformer:
    """A model with weights of its own, exported."""
    plan = tiny_plan(spec, 1, **{"precision": "fp32"} | changes)
    mesh = build_mesh(plan.folding, 0)
    made = Transformer(plan, mesh, 11, torch.device("cpu"))
    with torch.no_grad():
        for number, router in enumerate(made.routers(), 1):
            if router.bias_E is not None:
                router.bias_E.copy_(torch.arange(router.bias_E.numel()) * number)
    export_hf(plan, mesh, made, folder, max_file_bytes=20_000)
    return made


@pytest.mark.parametrize("spec", [*MODELS, WITH_MTP, NEXT_WITH_MTP, NEMOTRON], ids=lambda spec: str(spec.name))
def test_every_weight_has_a_name_and_a_shape(spec: ModelSpec) -> None:
    plan = tiny_plan(spec, 1)
    made = Transformer(plan, build_mesh(plan.folding, 0), 7, torch.device("cpu"))
    shapes = {piece.name: piece.shape for entry in made.table.entries for piece in entry.pieces}
    shapes |= {f"{one.name}.expert_bias": tuple(one.bias_E.shape) for one in made.routers() if one.bias_E is not None}
    assert shapes == weight_shapes(spec)


class Slices:
    """Reads like safetensors, which takes no steps, and counts."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor, self.num_read = tensor, 0

    def __getitem__(self, ranges: tuple[slice, ...]) -> Tensor:
        assert all(one.step in (None, 1) for one in ranges)
        part = self.tensor[ranges]
        self.num_read += part.numel()
        return part


@settings(max_examples=60)
@given(st.data())
def test_what_is_written_is_read(data: st.DataObject) -> None:
    spec = data.draw(st.sampled_from([DEEPSEEK, GPT_OSS, QWEN_NEXT, NEMOTRON, of_family("mixtral")]))
    name, shape = data.draw(st.sampled_from(sorted(weight_shapes(spec).items())))
    place = checkpoint_places(spec, spec.name)[name][0]
    whole, stored = torch.randn(shape), torch.zeros(place.shape)
    write_part(stored, place, (0,) * len(shape), whole)
    box = []
    for size in shape:
        start = data.draw(st.integers(0, size - 1))
        box.append(slice(start, data.draw(st.integers(start + 1, size))))
    slices = Slices(stored)
    part = whole[tuple(box)]
    # One is taken from a norm's weight and added again: a rounding of fp32.
    torch.testing.assert_close(read_part(slices, place, tuple(box)), part, rtol=0, atol=1e-6 * bool(place.plus))
    if place.rows is None:
        assert slices.num_read <= 2 * part.numel()  # gate and up of GPT-OSS lie column by column


Parts = list[tuple[str, tuple[slice, ...], Tensor]]


def parts_of(made: Transformer) -> Parts:
    """This rank's weights by the part of a whole one that they are, selection biases among them."""
    parts: Parts = []
    for entry in made.table.entries:
        for piece in entry.pieces:
            sizes = [one.stop - one.start for one in piece.source]
            parts.append((piece.name, piece.source, entry.parameter.detach()[piece.target].reshape(sizes).clone()))
    biases = {f"{one.name}.expert_bias": one.bias_E for one in made.routers() if one.bias_E is not None}
    return parts + [(name, (slice(0, len(bias_E)),), bias_E) for name, bias_E in biases.items()]


def import_parts(rank: int, plan: Plan, run: RunConfig) -> Parts:
    """What one rank begins with."""
    mesh = build_mesh(plan.folding, rank)
    return parts_of(Transformer(plan, mesh, 7, torch.device("cpu"), first_weights(plan, run)))


@pytest.mark.parametrize("spec", [WITH_MTP, GPT_OSS, NEXT_WITH_MTP, NEMOTRON], ids=lambda spec: str(spec.name))
@pytest.mark.parametrize("folding", [{"tp": 2, "ep": 4}, {"pp": 2, "etp": 2}, {"tp": 2, "etp": 2, "ep": 2}], ids=str)
def test_every_folding_reads_its_parts(
    spec: ModelSpec, folding: dict[str, int], pool: GlooPool, tmp_path: Path
) -> None:
    whole = {name: values for name, _, values in parts_of(save(spec, tmp_path))}
    plan = tiny_plan(spec, 4, precision="fp32", **folding)
    seen = set()
    for parts in pool.run(import_parts, plan, RunConfig(init_from=str(tmp_path))):
        for name, source, values in parts:
            torch.testing.assert_close(values, whole[name][source], rtol=0, atol=0, msg=name)
            seen.add(name)
    assert seen == whole.keys()


def import_sharded(rank: int, plan: Plan, run: RunConfig) -> Parts:
    """The same of a rank that keeps parts of its parameters alone."""
    trainer = build_trainer(rank, plan, run)
    with whole_weights(trainer.optimizer):
        return parts_of(trainer.model)


def test_fully_sharded_parameters_are_read_when_they_are_given_room(pool: GlooPool, tmp_path: Path) -> None:
    whole = {name: values for name, _, values in parts_of(save(WITH_MTP, tmp_path))}
    plan = tiny_plan(WITH_MTP, 4, precision="fp32", ep=2, sharding="full")
    for parts in pool.run(import_sharded, plan, RunConfig(init_from=str(tmp_path))):
        for name, source, values in parts:
            torch.testing.assert_close(values, whole[name][source], rtol=0, atol=0, msg=name)


def test_depths_of_nemotron_lie_two_layers_each_under_mtp() -> None:
    places = checkpoint_places(NEMOTRON, "nemotron_h")
    expected = {
        "layers.6.embedding_norm.weight": "mtp.layers.0.enorm.weight",
        "layers.6.projection.weight": "mtp.layers.0.eh_proj.weight",
        "layers.6.attention_norm.weight": "mtp.layers.0.norm.weight",
        "layers.6.attention.query.weight": "mtp.layers.0.mixer.q_proj.weight",
        "layers.6.mlp_norm.weight": "mtp.layers.1.norm.weight",
        "layers.6.router.expert_bias": "mtp.layers.1.mixer.gate.e_score_correction_bias",
        "layers.6.experts.3.down.weight": "mtp.layers.1.mixer.experts.3.down_proj.weight",
        "layers.6.latent_up.weight": "mtp.layers.1.mixer.fc2_latent_proj.weight",
        "layers.6.final_norm.weight": "mtp.layers.1.final_layernorm.weight",
        "layers.7.hidden_norm.weight": "mtp.layers.2.hnorm.weight",
        "layers.7.shared_expert.up.weight": "mtp.layers.3.mixer.shared_experts.up_proj.weight",
    }
    assert {ours: places[ours][0].name for ours in expected} == expected


def test_a_checkpoint_of_one_depth_begins_a_run_of_several_that_share_it(tmp_path: Path) -> None:
    one = NEMOTRON.model_copy(update={"num_mtp_layers": 1})
    saved = parts_of(save(one, tmp_path))
    plan = tiny_plan(SHARED, 1, precision="fp32")
    check_init_from(plan, RunConfig(init_from=str(tmp_path)))
    again = Transformer(plan, build_mesh(plan.folding, 0), 7, torch.device("cpu"), HfWeights(open_folder(tmp_path)))
    for (name, _, values), (other, _, read) in zip(saved, parts_of(again), strict=True):
        assert name == other
        torch.testing.assert_close(values, read, rtol=0, atol=0, msg=name)
    with pytest.raises(InvalidInputError, match="num_mtp_layers is 1 there and 2 in the plan"):
        check_init_from(tiny_plan(NEMOTRON, 1), RunConfig(init_from=str(tmp_path)))


def test_mtp_depths_may_be_left_out(tmp_path: Path) -> None:
    one = save(WITH_MTP, tmp_path)
    plan = tiny_plan(DEEPSEEK, 1, precision="fp32")
    check_init_from(plan, RunConfig(init_from=str(tmp_path)))
    again = Transformer(plan, build_mesh(plan.folding, 0), 7, torch.device("cpu"), HfWeights(open_folder(tmp_path)))
    assert again.head is not None
    assert one.head is not None
    torch.testing.assert_close(again.head, one.head)


def test_published_folders_of_qwen3_next_have_a_depth_that_their_config_does_not_name(tmp_path: Path) -> None:
    save(NEXT_WITH_MTP, tmp_path)
    names = set(open_folder(tmp_path).tensors)
    assert {"mtp.fc.weight", "mtp.norm.weight", "mtp.pre_fc_norm_hidden.weight"} <= names
    assert "mtp.layers.0.self_attn.q_proj.weight" in names
    assert "mtp.layers.0.mlp.experts.0.up_proj.weight" in names
    _edit(tmp_path / "config.json", lambda config: {key: config[key] for key in config if "nextn" not in key})
    for spec in (NEXT_WITH_MTP, QWEN_NEXT):
        check_init_from(tiny_plan(spec, 1, precision="fp32"), RunConfig(init_from=str(tmp_path)))


def test_experts_in_one_tensor_inside_a_model_of_images_are_read(tmp_path: Path) -> None:
    """As Qwen3.5 is published: stacked experts in decoder layers, single ones in the depth of MTP."""
    from safetensors.torch import load_file, save_file

    spec = of_family("qwen3_5_moe_text").model_copy(update={"num_mtp_layers": 1})
    whole = {name: values for name, _, values in parts_of(save(spec, tmp_path / "ours"))}
    tensors = {
        name: tensor for file in (tmp_path / "ours").glob("*.safetensors") for name, tensor in load_file(file).items()
    }
    for layer in range(spec.num_layers):
        prefix = f"model.language_model.layers.{layer}.mlp.experts"
        single = [
            [tensors.pop(f"{prefix}.{expert}.{part}_proj.weight") for part in ("gate", "up", "down")]
            for expert in range(8)
        ]
        tensors[f"{prefix}.gate_up_proj"] = torch.stack([torch.cat([gate, up]) for gate, up, _ in single])
        tensors[f"{prefix}.down_proj"] = torch.stack([down for _, _, down in single])
    (tmp_path / "theirs").mkdir()
    save_file(tensors | {"model.visual.patch_embed.weight": torch.ones(2)}, tmp_path / "theirs" / "model.safetensors")
    config = {"model_type": "qwen3_5_moe", "text_config": hf_config_of(spec)}
    (tmp_path / "theirs" / "config.json").write_text(json.dumps(config))
    run, plan = RunConfig(init_from=str(tmp_path / "theirs")), tiny_plan(spec, 1, precision="fp32")
    check_init_from(plan, run)
    for name, source, values in import_parts(0, plan, run):
        torch.testing.assert_close(values, whole[name][source], rtol=0, atol=0, msg=name)


def _edit(path: Path, change: Callable[[Any], Any]) -> None:
    path.write_text(json.dumps(change(json.loads(path.read_text()))))


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-8])


def _first_file(folder: Path) -> Path:
    return min(folder.glob("*.safetensors"))


def _without_tensor(folder: Path) -> None:
    from safetensors.torch import load_file, save_file

    file = _first_file(folder)
    tensors = load_file(file)
    tensors.popitem()
    save_file(tensors, file)


def _other_shape(folder: Path) -> None:
    _edit(folder / "config.json", lambda config: config | {"vocab_size": 250})


QUANTIZED = {"quant_method": "fp8"}  # without blocks
BROKEN: list[tuple[Callable[[Path], object], str]] = [
    (lambda folder: (folder / "config.json").unlink(), "file not found: .*config.json"),
    (lambda folder: _first_file(folder).unlink(), "model-00001-of-.* is missing, which model.safetensors.index"),
    (lambda folder: _cut(_first_file(folder)), "is corrupt: .* bytes, where its header says"),
    (lambda folder: _first_file(folder).write_bytes(b"\xff" * 64), "is not a safetensors file, or is corrupt"),
    (lambda folder: _first_file(folder).write_bytes(b""), "is not a safetensors file, or is corrupt"),
    (_without_tensor, "no file holds the tensor"),
    (_other_shape, "holds another model: vocab_size is 250 there and 256 in the plan"),
    (
        lambda folder: _edit(folder / "config.json", lambda one: one | {"quantization_config": QUANTIZED}),
        r"weights are quantized \(fp8\)",
    ),
    (lambda folder: (folder / "model.safetensors.index.json").write_text("{}"), "weight_map is missing or empty"),
    (lambda folder: (folder / "model.safetensors.index.json").write_text("[]"), "weight_map is missing or empty"),
    (lambda folder: (folder / "model.safetensors.index.json").unlink(), "has neither model.safetensors.index.json nor"),
    (shutil.rmtree, "is not a folder of Hugging Face weights"),
]  # fmt: skip


@pytest.mark.parametrize("break_it, message", BROKEN, ids=[message[:30] for _, message in BROKEN])
def test_what_is_wrong_with_a_folder_is_said_before_the_run(
    break_it: Callable[[Path], object], message: str, tmp_path: Path
) -> None:
    folder, run = tmp_path / "weights", RunConfig(init_from=str(tmp_path / "weights"))
    save(GPT_OSS, folder)
    plan = tiny_plan(GPT_OSS, 1)
    check_init_from(plan, run)
    break_it(folder)
    with pytest.raises(InvalidInputError, match=message) as caught:
        check_init_from(plan, run)
    assert caught.value.hint


def test_weights_of_other_shapes_than_their_config(tmp_path: Path) -> None:
    save(GPT_OSS, tmp_path)
    other = GPT_OSS.model_copy(update={"vocab_size": 250})
    _other_shape(tmp_path)
    with pytest.raises(
        InvalidInputError, match=r"embed_tokens.weight has shape \[256, 32\], the model has \[250, 32\]"
    ):
        check_init_from(tiny_plan(other, 1), RunConfig(init_from=str(tmp_path)))
    assert hf_config_of(other)["vocab_size"] == 250


def test_another_model_names_what_differs(tmp_path: Path) -> None:
    save(GPT_OSS, tmp_path)
    attention = GPT_OSS.attention
    assert isinstance(attention, GqaAttention)
    other = GPT_OSS.model_copy(
        update={"attention": attention.model_copy(update={"sliding_window": 6}), "rope_theta": 5.0}
    )
    with pytest.raises(InvalidInputError, match=r"attention.sliding_window is 5 there and 6 in the plan \(1 more"):
        check_init_from(tiny_plan(other, 1), RunConfig(init_from=str(tmp_path)))
    unscaled = model("gpt_oss", **GPT_OSS.model_dump(exclude={"name", "rope_scaling"}))
    with pytest.raises(InvalidInputError, match="rope_scaling"):
        check_init_from(tiny_plan(unscaled, 1), RunConfig(init_from=str(tmp_path)))
