"""States in fewer bits: what is kept exactly, what is rounded, and that training does not depend on stretches."""

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moeplan.executor import packed_states
from moeplan.executor.flat_buffer import Span
from moeplan.executor.packed_on_host import OffloadedPackedPart
from moeplan.executor.packed_states import BLOCK, E4M3_LEAST, E4M3_MAX, Fp8Blocks, PackedPart, Remainders
from moeplan.executor.train import Trainer
from moeplan.kernels import adam
from moeplan.kernels.adam import AdamState
from moeplan.run_config import RunConfig
from tests.executor.cases import GQA_MODEL, build_trainer, tiny_plan

RUN = RunConfig(steps=5, lr=3e-3, lr_warmup_steps=2, clip_grad_norm=0.5)
CPU = torch.device("cpu")


@given(st.lists(st.floats(width=32, allow_nan=False), min_size=1, max_size=20))
def test_weights_and_remainders_are_the_main_weights(values: list[float]) -> None:
    main = torch.tensor(values, dtype=torch.float32)
    weights = torch.zeros(len(values), dtype=torch.bfloat16)
    packed = Remainders(weights)
    packed.pack(Span(0, len(values)), main)
    assert torch.equal(packed.unpack(Span(0, len(values))).view(torch.int32), main.view(torch.int32))
    # Where two bf16 values are as near, either may be taken.
    distance = (weights.double() - main.double()).abs()
    nearest = (main.bfloat16().double() - main.double()).abs()
    finite = main.bfloat16().isfinite() & weights.isfinite()
    assert torch.equal(distance[finite], nearest[finite])
    assert sum(one.nbytes for one in packed.tensors) == 2 * len(values)


@pytest.mark.parametrize("is_square", [False, True])
def test_moments_of_what_gets_no_gradient_fade_away(*, is_square: bool) -> None:
    packed, everything = Fp8Blocks(BLOCK, CPU, is_square=is_square), Span(0, BLOCK)
    packed.pack(everything, torch.arange(float(BLOCK)) * 1e-20)  # element 0 never had one
    for _ in range(600):
        packed.pack(everything, packed.unpack(everything) * 0.9)
    found = packed.unpack(everything)
    assert found[0] == 0
    assert (found < 1e-35).all()  # and so no NaN


@pytest.mark.parametrize("num_elements", [1, BLOCK, 3 * BLOCK + 5])
@pytest.mark.parametrize("is_square", [False, True])
def test_fp8_values_are_near(num_elements: int, *, is_square: bool) -> None:
    generator = torch.Generator().manual_seed(num_elements)
    values = torch.randn(num_elements, generator=generator) * torch.logspace(-6, 3, num_elements)
    values = values.square() if is_square else values
    packed = Fp8Blocks(num_elements, CPU, is_square=is_square)
    everything = Span(0, num_elements)
    packed.pack(everything, values)
    found = packed.unpack(everything)
    roots, found_roots = (x.sqrt() if is_square else x for x in (values, found))
    least = packed.scales.repeat_interleave(BLOCK)[:num_elements] * E4M3_LEAST
    # 3 bits of mantissa, and half the least step where there are fewer; a square may be rounded up to that step.
    bound = torch.maximum(roots.abs() * 2**-4, least * (1 if is_square else 0.5)) * (1 + 1e-6)
    assert ((roots - found_roots).abs() <= bound).all()
    if is_square:
        assert (found > 0).all()
    again = Fp8Blocks(num_elements, CPU, is_square=is_square)
    again.pack(everything, found)
    torch.testing.assert_close(again.unpack(everything), found, rtol=1e-6, atol=0)
    assert sum(one.nbytes for one in packed.tensors) == num_elements + 4 * -(-num_elements // BLOCK)
    assert float(packed.scales.max()) == pytest.approx(float(roots.abs().max()) / E4M3_MAX)


def test_nothing_stays_nothing() -> None:
    packed = Fp8Blocks(200, CPU, is_square=True)
    packed.pack(Span(128, 200), torch.zeros(72))
    assert not packed.unpack(Span(0, 200)).any()


def trained(num_steps: int = RUN.steps, /, **changes: Any) -> Trainer:
    trainer = build_trainer(0, tiny_plan(GQA_MODEL, 1, **({"precision": "bf16"} | changes)), RUN)
    for number in range(num_steps):
        trainer.step(number)
    return trainer


def num_elements(trainer: Trainer) -> int:
    return sum(one.buffer.num_elements for one in trainer.optimizer.classes)


def test_remainders_train_as_whole_main_weights() -> None:
    """To the bit, until a weight half way between two of bf16 is rounded up where others are to even."""
    plain, packed = trained(1), trained(1, main_weight_remainders=True)
    for first, second in zip(plain.optimizer.classes, packed.optimizer.classes, strict=True):
        (one,), (two,) = first.parts, second.parts
        assert isinstance(two, PackedPart)
        for name, flat in one.flats.items():
            torch.testing.assert_close(two.flats[name], flat, rtol=0, atol=0)
    plain, packed = trained(), trained(main_weight_remainders=True)
    for first, second in zip(plain.optimizer.classes, packed.optimizer.classes, strict=True):
        main, joined = first.parts[0].flats["weight"], second.parts[0].flats["weight"]
        torch.testing.assert_close(joined, main, rtol=0, atol=0.01 * RUN.steps * RUN.lr)
        torch.testing.assert_close(second.buffer.weights, joined.bfloat16(), rtol=2**-7, atol=0)
    assert packed.optimizer.state_bytes == 10 * num_elements(packed)


@pytest.mark.parametrize("remainders", [False, True])
def test_fp8_moments_train_alike(*, remainders: bool) -> None:
    plain, packed = trained(), trained(moment_dtype="fp8", main_weight_remainders=remainders)
    # Updates are at most lr an element and step; 3 bits of the moments move them by some per cent.
    for first, second in zip(plain.optimizer.classes, packed.optimizer.classes, strict=True):
        moved = (first.buffer.weights - second.buffer.weights).float().abs()
        assert float(moved.max()) <= RUN.steps * RUN.lr
        assert float(moved.mean()) <= 0.15 * RUN.steps * RUN.lr
    exact = (4 if remainders else 6) * num_elements(packed)
    scales = packed.optimizer.state_bytes - exact
    assert 0 < scales <= 2 * 4 * (num_elements(packed) / BLOCK + len(packed.optimizer.classes))


@pytest.mark.parametrize(
    "changes",
    [
        {"moment_dtype": "fp8"},
        {"main_weight_remainders": True},
        {"moment_dtype": "fp8", "main_weight_remainders": True},
    ],
)
def test_stretches_change_nothing(monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any]) -> None:
    whole = trained(**changes)
    monkeypatch.setattr(packed_states, "CHUNK", 3 * BLOCK)
    monkeypatch.setattr(adam, "STRETCH", 2 * BLOCK)
    cut = trained(**changes)
    for first, second in zip(whole.optimizer.classes, cut.optimizer.classes, strict=True):
        torch.testing.assert_close(second.buffer.weights, first.buffer.weights, rtol=2**-7, atol=1e-6)
        for name, flat in first.parts[0].flats.items():
            torch.testing.assert_close(second.parts[0].flats[name], flat, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("moment", ["fp32", "bf16"])
@pytest.mark.parametrize("place", [{}, {"offload_optimizer_states": True}], ids=str)
def test_remainders_beside_plain_moments_take_one_update_a_decay(
    monkeypatch: pytest.MonkeyPatch, moment: str, place: dict[str, Any]
) -> None:
    plan = tiny_plan(GQA_MODEL, 1, precision="bf16", main_weight_remainders=True, moment_dtype=moment, **place)
    trainer, states = build_trainer(0, plan, RUN), list[AdamState]()
    monkeypatch.setattr(packed_states, "CHUNK", 3 * BLOCK)
    monkeypatch.setattr(packed_states, "adam_", lambda state, _options: states.append(state))
    trainer.step(0)
    spans = [decay.span.size for one in trainer.optimizer.classes for decay in one.decays if decay.span.size]
    assert [state.grad_N.numel() for state in states] == spans
    assert all(state.remainder_N is not None and state.main_N.dtype == torch.bfloat16 for state in states)


@pytest.mark.parametrize(
    "changes, tolerance",
    [({"main_weight_remainders": True}, 0.0), ({"moment_dtype": "fp8", "main_weight_remainders": True}, 1e-2)],
)
def test_packed_states_go_on_from_a_checkpoint(tmp_path: Path, changes: dict[str, Any], tolerance: float) -> None:
    plan, run = (
        tiny_plan(GQA_MODEL, 1, precision="bf16", **changes),
        RUN.model_copy(update={"save_folder": str(tmp_path)}),
    )
    trainer = build_trainer(0, plan, run)
    assert trainer.checkpoints is not None
    for number in range(3):
        trainer.step(number)
    trainer.checkpoints.save(3)
    expected = [trainer.step(number).loss for number in range(3, 5)]
    again = build_trainer(0, plan, run.model_copy(update={"seed": 1}))
    again.tokens = trainer.tokens
    assert again.checkpoints is not None
    assert again.checkpoints.load() == 3
    found = [again.step(number).loss for number in range(3, 5)]
    torch.testing.assert_close(found, expected, rtol=0, atol=tolerance)


PACKED: list[dict[str, Any]] = [
    {"moment_dtype": "fp8"},
    {"main_weight_remainders": True},
    {"moment_dtype": "fp8", "main_weight_remainders": True},
]
PLACES: list[dict[str, Any]] = [
    {"offload_optimizer_states": True},
    {"optimizer_cpu_frac": 0.3},
    {"optimizer_cpu_frac": 1.0},
]


@pytest.mark.parametrize("packed", PACKED, ids=str)
@pytest.mark.parametrize("place", PLACES, ids=str)
def test_places_of_packed_states_change_nothing(packed: dict[str, Any], place: dict[str, Any]) -> None:
    expected, found = trained(**packed), trained(**packed, **place)
    for first, second in zip(expected.optimizer.classes, found.optimizer.classes, strict=True):
        one, two = first.buffer.updated_weights.float(), second.buffer.updated_weights.float()
        if place.get("optimizer_cpu_frac") == 0.3:  # blocks of FP8 begin elsewhere: moments are off by 2**-4
            assert float((one - two).abs().max()) <= RUN.steps * RUN.lr
            assert float((one - two).abs().mean()) <= 0.02 * RUN.steps * RUN.lr
        else:
            torch.testing.assert_close(two, one, rtol=2**-7, atol=1e-6)


@pytest.mark.parametrize("packed", PACKED, ids=str)
def test_packed_states_take_no_memory_of_the_device_where_they_wait(packed: dict[str, Any]) -> None:
    away = trained(**packed, offload_optimizer_states=True)
    assert away.optimizer.state_bytes == 0
    for one in away.optimizer.classes:
        (part,) = one.parts
        assert isinstance(part, OffloadedPackedPart)
        assert all(tensor.untyped_storage().nbytes() == 0 for tensor in part.own)
        assert all(flat.numel() == part.span.size for flat in part.flats.values())
        assert all(tensor.untyped_storage().nbytes() == 0 for tensor in part.own)
    on_host = trained(**packed, optimizer_cpu_frac=1.0)
    each = 2 if "main_weight_remainders" in packed else 4
    assert on_host.optimizer.state_bytes == each * num_elements(on_host)


@pytest.mark.parametrize("place", PLACES[:2], ids=str)
def test_packed_states_go_on_from_a_checkpoint_wherever_they_are(tmp_path: Path, place: dict[str, Any]) -> None:
    packed: dict[str, Any] = {"main_weight_remainders": True}
    run = RUN.model_copy(update={"save_folder": str(tmp_path)})
    trainer = build_trainer(0, tiny_plan(GQA_MODEL, 1, precision="bf16", **packed, **place), run)
    assert trainer.checkpoints is not None
    for number in range(3):
        trainer.step(number)
    trainer.checkpoints.save(3)
    expected = [trainer.step(number).loss for number in range(3, 5)]
    for other in ({}, *PLACES):
        again = build_trainer(0, tiny_plan(GQA_MODEL, 1, precision="bf16", **packed, **other), run)
        assert again.checkpoints is not None
        assert again.checkpoints.load() == 3
        assert [again.step(number).loss for number in range(3, 5)] == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("changes", [{"precision": "fp32"}, {"precision": "fp8_current", "fp8_primary_weights": True}])
def test_remainders_need_bf16_weights(changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="main_weight_remainders"):
        tiny_plan(GQA_MODEL, 1, main_weight_remainders=True, **changes)
