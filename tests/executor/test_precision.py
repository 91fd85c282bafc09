"""Low precision in training: which matrices, and that the loss follows bf16's under any folding."""

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from moeplan.executor.export_hf import export_trained
from moeplan.executor.mesh import plan_mesh
from moeplan.executor.model import Transformer
from moeplan.executor.primary_weights import PrimaryBuffer
from moeplan.executor.quantized import QuantizedWeight, quantized_linear, quantized_of, set_quantized
from moeplan.executor.train import Trainer
from moeplan.kernels import quantized_gemm_reference as reference
from moeplan.kernels.main_grad import MainGrad, set_main_grad
from moeplan.kernels.quantized_gemm import Pair
from moeplan.kernels.recipes import RECIPES, Recipe
from moeplan.mixers import Mamba2
from moeplan.model_spec import ModelSpec, Router
from moeplan.plan import Plan
from moeplan.run_config import RunConfig
from tests.executor.cases import Part, build_trainer, run_steps, weights_of
from tests.executor.gloo_pool import GlooPool, gloo_pool
from tests.executor.precision_cases import GQA, MLA, MOE, low_plan

NUM_STEPS = 20
RUN = RunConfig(steps=NUM_STEPS, lr=1e-3, lr_warmup_steps=2)
# Largest distance of a step's loss from bf16's, about twice what was seen (0.25, 0.07, 0.06, 0.13 and 0.47 %).
BAND = {"fp8_delayed": 0.005, "fp8_current": 0.002, "fp8_blockwise": 0.002, "mxfp8": 0.003, "nvfp4": 0.01}


@cache
def _losses(model_name: str, precision: str) -> list[float]:
    model = {one.name: one for one in (GQA, MLA)}[model_name]
    return run_steps(0, low_plan(model, 1, precision=precision), RUN, NUM_STEPS).losses


@pytest.mark.parametrize("precision", RECIPES)
def test_the_loss_follows_bf16(precision: str) -> None:
    expected = _losses(GQA.name, "bf16")
    got = _losses(GQA.name, precision)
    assert expected[-1] < 0.75 * expected[0]
    assert got != expected  # something was quantized
    assert max(abs(one / other - 1) for one, other in zip(got, expected, strict=True)) < BAND[precision]


@pytest.mark.slow
@pytest.mark.parametrize("precision", RECIPES)
def test_the_loss_of_latent_attention_and_mtp_follows_bf16(precision: str) -> None:
    pairs = zip(_losses(MLA.name, precision), _losses(MLA.name, "bf16"), strict=True)
    assert max(abs(one / other - 1) for one, other in pairs) < BAND[precision]


def _names(model: ModelSpec, plan: Plan) -> tuple[set[str], set[str]]:
    """Parameters that are quantized, and the others, without their layers' and experts' numbers."""
    transformer = Transformer(plan, plan_mesh(plan, 0), 0, torch.device("cpu"))
    names: tuple[set[str], set[str]] = (set(), set())
    for entry in transformer.table.entries:
        parts = [part for part in entry.pieces[0].name.split(".") if not part.isdigit()]
        names[quantized_of(entry.parameter) is None].add(".".join(parts))
    return names


def test_projections_and_experts_are_quantized_and_nothing_else() -> None:
    quantized, others = _names(MLA, low_plan(MLA, 1))
    assert quantized == {
        "layers.attention.query_down.weight", "layers.attention.query_up.weight",
        "layers.attention.key_value_up.weight", "layers.attention.key_value_down.weight",
        "layers.attention.output.weight", "layers.mlp.gate.weight",
        "layers.mlp.down.weight", "layers.shared_expert.gate.weight", "layers.shared_expert.down.weight",
        "layers.experts.gate.weight", "layers.experts.down.weight", "layers.projection.weight",
    }  # fmt: skip
    assert {"embedding.weight", "head.weight", "layers.router.weight"} <= others
    assert all("norm" in name for name in others - {"embedding.weight", "head.weight", "layers.router.weight"})


HYBRID = MLA.model_copy(
    update={
        "name": "low-hybrid",
        "num_layers": 4,
        "num_dense_layers": 0,
        "dense_ffn_size": 0,
        "layer_pattern": "M*EM",
        "activation": "squared_relu",
        "attention": GQA.attention,
        "linear_mixer": Mamba2(num_heads=32, head_dim=8, state_size=64, num_groups=2),
        "moe": MOE.model_copy(update={"latent_size": 128}),
    }
)


def _recipes(**changes: Any) -> dict[str, str]:
    """Recipe of every quantized parameter of the hybrid, by the first of its names."""
    plan = low_plan(HYBRID, 1, **changes)
    table = Transformer(plan, plan_mesh(plan, 0), 0, torch.device("cpu")).table
    found = {entry.pieces[0].name: quantized_of(entry.parameter) for entry in table.entries}
    return {name: one.recipe_name for name, one in found.items() if one is not None}


def test_layers_and_parts_stay_in_bf16_where_the_plan_says_so() -> None:
    everything = _recipes(precision="nvfp4")
    assert set(everything.values()) == {"nvfp4"}
    ends = _recipes(precision="nvfp4", bf16_first_layers=1, bf16_last_layers=2)
    assert ends == {name: one for name, one in everything.items() if name.split(".")[1] in ("1", "4")}
    parts = _recipes(precision="nvfp4", bf16_modules=("attention", "latent", "linear_out", "mtp"))
    left_out = {name for name in everything if ".attention." in name or "latent" in name or ".4." in name}
    assert set(parts) == set(everything) - left_out
    assert {name for name, one in parts.items() if one == "mxfp8"} == {
        f"layers.{n}.mixer.output.weight" for n in (0, 3)
    }
    assert "layers.0.mixer.output.weight" not in _recipes(precision="mxfp8", bf16_modules=("linear_out",))


def test_nvfp4_with_parts_in_bf16_follows_bf16() -> None:
    parts = ("attention", "latent", "linear_out", "mtp")
    mixed = {"precision": "nvfp4", "bf16_last_layers": 1, "bf16_modules": parts}
    losses, expected = (
        run_steps(0, low_plan(HYBRID, 1, **changes), RUN, 4).losses for changes in (mixed, {"precision": "bf16"})
    )
    assert losses != expected
    assert losses[-1] < 0.9 * losses[0]
    assert max(abs(one / other - 1) for one, other in zip(losses, expected, strict=True)) < BAND["nvfp4"]


def test_no_matrix_is_quantized_in_bf16() -> None:
    assert _names(GQA, low_plan(GQA, 1, precision="bf16"))[0] == set()


def test_copies_live_until_the_weights_change() -> None:
    trainer = build_trainer(0, low_plan(GQA, 1), RUN)
    weights = [one for entry in trainer.model.table.entries if (one := quantized_of(entry.parameter)) is not None]
    parameter = next(e.parameter for e in trainer.model.table.entries if quantized_of(e.parameter) is not None)
    before = weights[0].copies(parameter)
    assert weights[0].copies(parameter) is before
    trainer.step(0)
    after = weights[0].copies(parameter)
    assert after is not before
    assert not torch.equal(after.as_is[0].view(torch.uint8), before.as_is[0].view(torch.uint8))


def test_delayed_scaling_takes_the_magnitude_of_the_step_before() -> None:
    weight = torch.nn.Parameter(torch.eye(16).bfloat16())
    quantized = QuantizedWeight("fp8_delayed")
    set_quantized(weight, quantized)
    x_LI = torch.full((4, 16), 2.0).bfloat16()
    assert quantized_linear(x_LI, weight, None).tolist() == x_LI.tolist()  # nothing before: its own
    quantized.end_step()
    assert quantized_linear(4 * x_LI, weight, None).max() == 2.0  # cut at the last step's
    quantized.end_step()
    assert quantized_linear(4 * x_LI, weight, None).max() == 8.0


def test_validation_does_not_scale_what_comes_after() -> None:
    """Under delayed scaling magnitudes of held-out data do not count."""
    plan, run = low_plan(GQA, 1, precision="fp8_delayed"), RUN.model_copy(update={"eval_every": 1})
    plain, validated = (build_trainer(0, plan, run) for _ in range(2))
    for number in range(3):
        assert validated.step(number) == plain.step(number)
        validated.evaluate()


def test_weight_gradients_are_added_where_the_weight_has_a_main_gradient() -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.nn.Parameter(torch.randn(32, 16, generator=generator).bfloat16())
    set_quantized(weight, QuantizedWeight("fp8_current"))
    x_LI, grad_LO = (torch.randn(8, width, generator=generator).bfloat16() for width in (16, 32))
    (plain,) = torch.autograd.grad(quantized_linear(x_LI, weight, None), weight, grad_LO)
    main = MainGrad(torch.full((32, 16), 7.0))
    set_main_grad(weight, main)
    for times in (1, 2):
        quantized_linear(x_LI, weight, None).backward(grad_LO)
        assert weight.grad is None
        torch.testing.assert_close(main.total, times * plain.float(), rtol=2**-8, atol=1e-6)


@pytest.mark.parametrize("recompute", ["moe_act", "layernorm"])
def test_an_input_that_is_made_again_gives_the_same_training(recompute: str) -> None:
    plain, remade = (
        run_steps(0, low_plan(GQA, 1, precision="fp8_current", recompute=modules), RUN, 2)
        for modules in ((), (recompute,))
    )
    assert remade.losses == plain.losses
    assert remade.grad_norms == plain.grad_norms


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GlooPool]:
    with gloo_pool(2, tmp_path_factory.mktemp("precision")) as pool:
        yield pool


@pytest.mark.parametrize(
    "folding",
    [{"ep": 2}, {"tp": 2, "etp": 2}, {"pp": 2}, {"cp": 2}, {"ep": 2, "sharding": "full"}],
    ids=lambda folding: "-".join(f"{key}{value}" for key, value in folding.items()),
)
def test_foldings_follow_one_process(pool: GlooPool, folding: dict[str, object]) -> None:
    """Scales are those of a rank's own tensors, so losses are near and not equal."""
    changes = {"precision": "fp8_current", **folding}
    plan = low_plan(GQA, 2, **changes)
    got = pool.run(run_steps, plan, RUN, 4)[0].losses
    assert got == pytest.approx(_losses(GQA.name, "fp8_current")[:4], rel=2e-3)


# The norm is summed buffer by buffer, and primary weights have buffers of their own: clips would differ in a last bit.
UNCLIPPED = RUN.model_copy(update={"clip_grad_norm": 0.0})


@pytest.mark.parametrize("precision", ["fp8_current", "fp8_blockwise"])
def test_primary_weights_train_to_the_bit_as_a_bf16_copy(precision: str) -> None:
    copied, primary = (
        run_steps(0, low_plan(GQA, 1, precision=precision, fp8_primary_weights=is_primary), UNCLIPPED, 3)
        for is_primary in (False, True)
    )
    assert primary.losses == copied.losses
    assert primary.grad_norms == pytest.approx(copied.grad_norms, rel=1e-4)
    for one, other in zip(_sorted(primary.parts), _sorted(copied.parts), strict=True):
        assert torch.equal(one.values, other.values), one.name


def test_primary_weights_are_quantized_where_they_lie(monkeypatch: pytest.MonkeyPatch) -> None:
    quantized: list[torch.Tensor] = []

    def quantize(weight_EAB: torch.Tensor, recipe: Recipe, amax: torch.Tensor | None = None) -> Pair:
        quantized.append(weight_EAB)
        return original(weight_EAB, recipe, amax)

    original = reference.quantize_weights
    monkeypatch.setattr(reference, "quantize_weights", quantize)
    trainer = build_trainer(0, low_plan(GQA, 1, precision="fp8_current", fp8_primary_weights=True), RUN)
    buffers = [one.buffer for one in trainer.optimizer.classes if isinstance(one.buffer, PrimaryBuffer)]
    assert quantized
    assert {weight.untyped_storage().data_ptr() for weight in quantized} == {
        buffer.main.untyped_storage().data_ptr() for buffer in buffers
    }


def _sorted(parts: list[Part]) -> list[Part]:
    return sorted(parts, key=lambda part: (part.name, str(part.source)))


def test_primary_weights_take_a_byte_and_keep_no_bf16() -> None:
    trainer = build_trainer(0, low_plan(GQA, 1, precision="fp8_current", fp8_primary_weights=True), RUN)
    buffers = [one.buffer for one in trainer.optimizer.classes if one.buffer.holds_main]
    num_quantized = sum(buffer.num_elements for buffer in buffers)
    others = sum(one.buffer.num_elements for one in trainer.optimizer.classes if not one.buffer.holds_main)
    assert num_quantized > 0
    assert sum(buffer.weights.untyped_storage().nbytes() for buffer in buffers) == 0
    # A byte each way of every quantized weight and one scale an expert, two bytes of the others.
    assert 0 <= trainer.optimizer.weight_bytes - (2 * num_quantized + 2 * others) < 400
    assert trainer.optimizer.state_bytes == 12 * (num_quantized + others)


@pytest.mark.parametrize("precision", ["fp8_current", "fp8_blockwise"])
@pytest.mark.parametrize("sharding", ["optimizer", "none"])
def test_ranks_quantize_their_parts_of_primary_weights_as_a_whole(
    pool: GlooPool, precision: str, sharding: str
) -> None:
    """Parts are cut anywhere, through experts and blocks."""
    plan = low_plan(GQA, 2, precision=precision, sharding=sharding)
    copied = pool.run(run_steps, plan, UNCLIPPED, 2)
    primary = pool.run(run_steps, plan.model_copy(update={"fp8_primary_weights": True}), UNCLIPPED, 2)
    assert [one.losses for one in primary] == [one.losses for one in copied]


@pytest.mark.parametrize("moment_dtype", ["fp32", "fp8"])
def test_main_weights_of_primary_ones_wait_on_the_host(tmp_path: Path, moment_dtype: str) -> None:
    plan = low_plan(GQA, 1, precision="fp8_current", fp8_primary_weights=True, moment_dtype=moment_dtype)
    expected = run_steps(0, plan, UNCLIPPED, 3)
    run = UNCLIPPED.model_copy(update={"save_folder": str(tmp_path)})
    away = plan.replace(offload_optimizer_states=True)
    trainer = build_trainer(0, away, run)
    losses = [trainer.step(number).loss for number in range(2)]
    assert trainer.optimizer.state_bytes == 0
    buffers = [one.buffer for one in trainer.optimizer.classes if isinstance(one.buffer, PrimaryBuffer)]
    assert buffers
    assert all(buffer.main.untyped_storage().nbytes() == 0 for buffer in buffers)
    assert trainer.checkpoints is not None
    trainer.checkpoints.save(2)
    trainer.checkpoints.wait()
    assert [*losses, trainer.step(2).loss] == expected.losses
    for one, other in zip(_sorted(weights_of(trainer)), _sorted(expected.parts), strict=True):
        assert torch.equal(one.values, other.values), one.name
    again = build_trainer(0, away, run.model_copy(update={"resume": True}))
    again.resume()
    assert again.optimizer.state_bytes == 0
    assert all(values.isfinite().all() for _, values in again.optimizer.named_weights())
    assert again.step(2).loss == pytest.approx(expected.losses[2], rel=1e-6)


def test_primary_weights_train_beside_fp8_moments(tmp_path: Path) -> None:
    plans = [
        low_plan(GQA, 1, precision="fp8_current", moment_dtype="fp8", fp8_primary_weights=is_primary)
        for is_primary in (False, True)
    ]
    copied, primary = (run_steps(0, plan, UNCLIPPED, 3).losses for plan in plans)
    assert primary == pytest.approx(copied, rel=1e-3)  # blocks of moments begin elsewhere
    run = UNCLIPPED.model_copy(update={"save_folder": str(tmp_path)})
    trainer = build_trainer(0, plans[1], run)
    num_elements = sum(one.buffer.num_elements for one in trainer.optimizer.classes)
    scales = 4 * 2 * (num_elements / 128 + len(trainer.optimizer.classes))
    assert 6 * num_elements <= trainer.optimizer.state_bytes <= 6 * num_elements + scales
    losses = [trainer.step(0).loss, trainer.step(1).loss]
    assert trainer.checkpoints is not None
    trainer.checkpoints.save(2)
    trainer.checkpoints.wait()
    again = build_trainer(0, plans[1], run.model_copy(update={"resume": True}))
    again.resume()
    assert [*losses, again.step(2).loss] == pytest.approx(primary, rel=1e-5)


@pytest.mark.parametrize("before,after", [(False, True), (True, False)])
def test_a_run_goes_on_with_or_without_primary_weights(tmp_path: Path, before: bool, after: bool) -> None:
    def trainer(run: RunConfig, *, is_primary: bool) -> Trainer:
        plan = low_plan(GQA, 1, precision="fp8_current", fp8_primary_weights=is_primary)
        return build_trainer(0, plan, run)

    whole = trainer(UNCLIPPED, is_primary=before)
    expected = [whole.step(number).loss for number in range(4)]
    saving = UNCLIPPED.model_copy(update={"save_folder": str(tmp_path)})
    first = trainer(saving, is_primary=before)
    losses = [first.step(number).loss for number in range(2)]
    assert first.checkpoints is not None
    first.checkpoints.save(2)
    first.checkpoints.wait()
    second = trainer(saving.model_copy(update={"resume": True}), is_primary=after)
    second.resume()
    assert losses + [second.step(number).loss for number in (2, 3)] == expected


def test_primary_weights_are_exported_in_bf16(tmp_path: Path) -> None:
    moe = GQA.moe
    assert moe is not None
    plain = moe.model_copy(update={"router": Router(), "shared_ffn_size": 0})
    model = GQA.model_copy(update={"moe": plain, "num_dense_layers": 0})  # Mixtral, a family that can be exported
    folders = []
    for is_primary in (False, True):
        plan = low_plan(model, 1, precision="fp8_current", fp8_primary_weights=is_primary)
        trainer = build_trainer(0, plan, UNCLIPPED)
        trainer.step(0)
        export_trained(plan, trainer.mesh, trainer.model, trainer.optimizer, tmp_path / str(is_primary))
        folders.append(_tensors(tmp_path / str(is_primary)))
    copied, primary = folders
    assert primary.keys() == copied.keys()
    assert all(torch.equal(primary[name], copied[name]) for name in copied)


def _tensors(folder: Path) -> dict[str, torch.Tensor]:
    safetensors = pytest.importorskip("safetensors.torch")
    found: dict[str, torch.Tensor] = {}
    for file in folder.glob("*.safetensors"):
        found |= safetensors.load_file(file)
    assert found
    return found
