"""Presets against published figures, and the ways to name a model."""

import shutil
from pathlib import Path

import pytest

from moeplan.errors import InvalidInputError
from moeplan.files import toml_text
from moeplan.flops import training_flops_per_token
from moeplan.parameters import active_parameters, total_parameters
from moeplan.presets import PRESET_FOLDER, load_model, model_names

# Total and active parameters in 1e9, rounded to 0.01, and training GFLOP per token at 4096.
FIGURES = {
    "llama3-8b": (8.03, 8.03, 48.249),
    "llama3-70b": (70.55, 70.55, 433.116),
    "llama3.1-405b": (405.85, 405.85, 2473.222),
    "llama2-7b": (6.74, 6.74, 42.864),
    "llama2-13b": (13.02, 13.02, 82.143),
    "llama2-70b": (68.98, 68.98, 428.385),
    "qwen2.5-7b": (7.62, 7.62, 44.888),
    "qwen2.5-32b": (32.76, 32.76, 199.958),
    "qwen3-8b": (8.19, 8.19, 49.032),
    "qwen3-14b": (14.77, 14.77, 88.973),
    "qwen3-32b": (32.76, 32.76, 204.786),
    "gpt3-5b": (5.04, 5.04, 32.665),
    "gpt3-20b": (20.25, 20.25, 128.119),
    "gpt3-175b": (174.58, 174.58, 1076.443),
    "nemotron4-8b": (8.54, 8.54, 48.167),
    "nemotron4-15b": (15.63, 15.63, 89.163),
    "nemotron4-22b": (21.27, 21.27, 124.193),
    "nemotron4-340b": (341.02, 341.02, 2061.307),
    "mixtral-8x7b": (46.7, 12.88, 79.706),
    "mixtral-8x22b": (140.62, 39.15, 242.168),
    "mixtral-8x22b-g8t8": (140.64, 22.26, 140.699),
    "llama3-8x70b": (465.16, 126.93, 771.345),
    "qwen2-57b-a14b": (57.41, 14.25, 84.654),
    "qwen3-30b-a3b": (30.53, 3.35, 23.006),
    "qwen3-235b-a22b": (235.09, 22.19, 148.035),
    "gpt-oss-20b": (20.91, 4.19, 22.912),
    "gpt-oss-120b": (116.79, 5.71, 32.631),
    "llama4-scout": (107.77, 17.17, 102.844),
    "grok1-314b": (316.49, 84.56, 512.175),
    "deepseek-v3": (671.03, 37.55, 259.993),
    "deepseek-v3-l4": (36.96, 4.19, 21.577),
    "deepseek-v3-proxy14": (37.16, 10.03, 71.799),
    "deepseek-v2": (235.74, 21.38, 155.014),
    "deepseek-v2-l4": (13.3, 2.4, 13.27),
    "deepseek-v2-lite": (15.71, 2.66, 16.386),
    "kimi-k2": (1026.41, 32.86, 204.477),
    "moonlight-16b-a3b": (15.96, 2.91, 17.153),
    "llama4-maverick": (400.71, 17.18, 102.844),
    "qwen3-vl-235b-a22b": (235.09, 22.19, 148.035),
    "qwen3-next-80b-a3b": (79.67, 3.87, 24.476),
    "h200-fine": (3.87, 0.48, 3.045),
    "h200-coarse": (4.62, 1.45, 8.204),
}
# Total and active parameters in 1e9 of models whose FLOPs Megatron counts with an inner width of twice the hidden size,
# and what their shared MTP block adds, whatever the depths: attention, experts, norms and projection by hand.
HYBRIDS = {
    "nemotron3-nano-30b-a3b": (31.58, 3.58, 0),
    "nemotron3-super-120b-a12b": (120.67, 12.77, 2_942_324_736),
    "nemotron3-ultra-550b-a55b": (549.31, 56.06, 11_215_609_856),
    "nemotron3.5-lightning-30b-a3b": (31.58, 3.58, 1_335_325_824),
}
HALF_A_ROUNDING = 0.005 * (1 + 1e-9)


@pytest.mark.parametrize("name", sorted(FIGURES))
def test_presets_have_the_published_parameters_and_flops(name: str) -> None:
    model = load_model(name)
    total_b, active_b, gflop = FIGURES[name]
    # Biases and sinks, which the table leaves out, are within 0.1 %.
    assert total_parameters(model) / 1e9 == pytest.approx(total_b, rel=1e-3, abs=HALF_A_ROUNDING)
    assert active_parameters(model) / 1e9 == pytest.approx(active_b, rel=1e-3, abs=HALF_A_ROUNDING)
    assert training_flops_per_token(model, 4096) / 1e9 == pytest.approx(gflop, rel=1e-4)


@pytest.mark.parametrize("name", sorted(HYBRIDS))
def test_hybrids_have_the_published_parameters(name: str) -> None:
    model = load_model(name)
    total_b, active_b, depth = HYBRIDS[name]
    assert total_parameters(model) / 1e9 == pytest.approx(total_b, rel=1e-3, abs=HALF_A_ROUNDING)
    assert active_parameters(model) / 1e9 == pytest.approx(active_b, rel=1e-3, abs=HALF_A_ROUNDING)
    assert total_parameters(model, with_mtp=True) - total_parameters(model) == depth


# Parameters in billions of the benchmark models, by hand: layers x (attention + experts x 3 x hidden x width) + heads.
BENCHMARKS = {"h200-fine": 3.87, "h200-coarse": 4.62, "h200-deepseek": 4.02}


@pytest.mark.parametrize("name", sorted(BENCHMARKS))
def test_benchmark_models_have_the_size_they_are_for(name: str) -> None:
    assert total_parameters(load_model(name)) / 1e9 == pytest.approx(BENCHMARKS[name], abs=0.01)


def test_every_preset_is_checked_and_named_after_its_file() -> None:
    assert set(model_names()) == set(FIGURES) | set(HYBRIDS) | {"tiny-moe"} | set(BENCHMARKS)
    for name in model_names():
        model = load_model(name)
        assert model.name == name
        assert model.source


def test_deepseek_v3_anchors() -> None:
    model = load_model("deepseek-v3")
    without_mtp = model.model_copy(update={"num_mtp_layers": 0})
    assert total_parameters(model) == 671_026_404_352
    assert total_parameters(model, with_mtp=True) / 1e9 == pytest.approx(671.03 + 11.6, abs=0.02)
    assert training_flops_per_token(model, 4096) == pytest.approx(260.0e9, rel=1e-4)
    assert training_flops_per_token(without_mtp, 4096) == pytest.approx(249.8e9, rel=1e-3)


@pytest.mark.parametrize(
    "name, total, published_active, embeddings_left_out",
    [
        ("gpt-oss-20b", 20.91e9, 3.61e9, 1),  # the model card counts the head, not the embedding
        ("gpt-oss-120b", 116.83e9, 5.13e9, 1),
        ("moonlight-16b-a3b", 15.96e9, 2.24e9, 2),  # "non-embedding": neither
    ],
)
def test_active_parameters_as_model_cards_count_them(
    name: str, total: float, published_active: float, embeddings_left_out: int
) -> None:
    model = load_model(name)
    left_out = embeddings_left_out * model.vocab_size * model.hidden_size
    assert total_parameters(model) == pytest.approx(total, rel=5e-4)
    assert active_parameters(model) - left_out == pytest.approx(published_active, rel=2e-3)


def test_tiny_moe_trains_on_two_cores_in_four_processes() -> None:
    model = load_model("tiny-moe")
    assert model.moe is not None
    assert [kind.mlp for kind in model.layer_kinds] == ["dense", "moe", "moe", "moe"]
    assert 5e6 < total_parameters(model) < 20e6
    assert 1e11 < 16 * 256 * training_flops_per_token(model, 256) < 3e11
    sizes = (model.attention.num_heads, model.attention.num_kv_heads, model.moe.num_experts, model.moe.expert_ffn_size)
    assert all(size % 4 == 0 for size in (*sizes, model.dense_ffn_size, model.moe.shared_ffn_size, model.vocab_size))


def test_names_ignore_case() -> None:
    assert load_model("DeepSeek-V3") == load_model("deepseek-v3")


@pytest.mark.parametrize("name", ["deepseek-v3", "gpt-oss-20b", "llama4-maverick", "gpt3-5b"])
def test_a_toml_file_of_ones_own_gives_the_model_back(name: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(toml_text(load_model(name)), encoding="utf-8")
    assert load_model(str(path)) == load_model(name)


def test_a_folder_with_config_json_names_the_model(tmp_path: Path) -> None:
    folder = tmp_path / "my-deepseek"
    folder.mkdir()
    shutil.copy(PRESET_FOLDER / "hf" / "deepseek-v3-config.json", folder / "config.json")
    model = load_model(str(folder))
    assert model.name == "my-deepseek"
    assert load_model(str(folder / "config.json")) == model
    own = {"name": model.name, "source": model.source, "rope_scaling": model.rope_scaling}
    assert model == load_model("deepseek-v3").model_copy(update=own)


@pytest.mark.parametrize(
    "file, text, message, hint",
    [
        (None, "", "unknown model 'deepsek-v3': neither a preset nor a file", "did you mean deepseek-v3"),
        ("", "", "no config.json in the folder", "folder of a Hugging Face checkpoint"),
        ("absent.toml", None, "file not found", "check the path"),
        ("model.yaml", "a: 1", "its name ends in '.yaml'", "give a preset name"),
        ("model.toml", "name = ", "is not valid TOML", "write it again"),
        ("model.toml", 'name = "a"\nnum_layers = "two"', "num_layers", "correct that key"),
        ("model.json", "{", "is not valid JSON", "write it again"),
    ],
)
def test_a_wrong_name_or_file_is_one_clear_error(
    file: str | None, text: str | None, message: str, hint: str, tmp_path: Path
) -> None:
    target = "deepsek-v3" if file is None else str(tmp_path / file)
    if file and text is not None:
        (tmp_path / file).write_text(text, encoding="utf-8")
    with pytest.raises(InvalidInputError) as caught:
        load_model(target)
    assert message in caught.value.message
    assert target in caught.value.message
    assert hint in caught.value.hint
    assert "\n" not in caught.value.message
