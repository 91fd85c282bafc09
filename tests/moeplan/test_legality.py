"""Rules that kernels and scaling blocks impose."""

from typing import Any

import pytest

from moeplan.errors import InvalidInputError
from moeplan.files import validate
from moeplan.plan import Plan
from moeplan.presets import load_model


def plan(model: str, num_gpus: int, **fields: Any) -> Plan:
    values = {"model": load_model(model), "hardware": "h100", "num_gpus": num_gpus, "seq_len": 4096, **fields}
    return validate(Plan, {"global_batch_size": num_gpus, **values}, "plan")


DEEPEP = {"dispatcher": "flex", "flex_backend": "deepep"}


@pytest.mark.parametrize(
    "model, num_gpus, fields, rule",
    [
        ("kimi-k2", 192, {"ep": 192, **DEEPEP}, "DeepEP has kernels for ep x etp of 2, .* got 192"),
        ("kimi-k2", 96, {"ep": 96, **DEEPEP}, "got 96"),
        ("qwen3-30b-a3b", 16, {"ep": 4, "etp": 4, "precision": "fp8_blockwise"}, "over etp 4 is 192"),
        ("qwen3-30b-a3b", 8, {"fp8_primary_weights": True}, "fp8_primary_weights: needs a low precision, got bf16"),
        ("qwen3-30b-a3b", 8, {"fp8_attention": True}, "fp8_attention: needs a low precision, got bf16"),
        ("mixtral-8x7b", 8, {"ep": 4, "tp": 2, "sequence_parallel": False}, "sequence_parallel: MoE layers under tp 2"),
        ("qwen3-next-80b-a3b", 32, {"tp": 2, "cp": 16}, "cp: tp 2 x cp 16 does not divide the 16 key heads of linear"),
        ("llama3-8b", 8, {"tp": 2, "sequence_parallel": False}, "sequence_parallel: predictions under tp 2"),
    ],
)
def test_refused(model: str, num_gpus: int, fields: dict[str, Any], rule: str) -> None:
    with pytest.raises(InvalidInputError, match=rule):
        plan(model, num_gpus, **fields)


@pytest.mark.parametrize(
    "model, num_gpus, fields",
    [
        ("deepseek-v3", 128, {"ep": 128, **DEEPEP}),
        ("kimi-k2", 96, {"ep": 96, "dispatcher": "flex", "flex_backend": "hybridep"}),
        ("qwen3-30b-a3b", 16, {"ep": 8, "etp": 2, "precision": "fp8_blockwise"}),
        ("qwen3-next-80b-a3b", 16, {"tp": 2, "cp": 8, "ep": 16}),
        ("mixtral-8x7b", 8, {"ep": 4, "sequence_parallel": False}),  # nothing to split
        ("qwen3-30b-a3b", 8, {"ep": 8, "precision": "fp8_current", "fp8_primary_weights": True, "fp8_attention": True}),
    ],
)
def test_accepted(model: str, num_gpus: int, fields: dict[str, Any]) -> None:
    assert plan(model, num_gpus, **fields).ep == fields["ep"]


def test_a_latent_is_whole_blocks_of_blockwise_fp8() -> None:
    whole = load_model("nemotron3-super-120b-a12b")
    assert whole.moe is not None
    cut = whole.model_copy(update={"moe": whole.moe.model_copy(update={"latent_size": 1000})})
    with pytest.raises(ValueError, match="fp8_blockwise needs a latent in blocks of 128, got 1000"):
        Plan(model=cut, hardware="h100", num_gpus=8, seq_len=4096, global_batch_size=8, precision="fp8_blockwise")


def test_graphs_of_experts_need_rows_of_a_known_number() -> None:
    model = load_model("mixtral-8x7b")
    assert model.moe is not None
    ragged = model.moe.router.model_copy(update={"pad_to_capacity": False})
    unpadded = model.model_copy(update={"moe": model.moe.model_copy(update={"router": ragged})})
    padded = plan("mixtral-8x7b", 1, routing="drop", cuda_graph=("full_iteration",))
    with pytest.raises(ValueError, match="cuda_graph: graphs of whole MoE layers need"):
        padded.replace(model=unpadded)
    assert padded.replace(model=unpadded, routing="natural").cuda_graph == ("full_iteration",)


def test_sequence_parallelism_is_no_part_of_the_id_unless_off() -> None:
    on, off = plan("llama3-8b", 1), plan("llama3-8b", 1, sequence_parallel=False)
    assert on.plan_id != off.plan_id
    assert "sequence_parallel" not in on.model_dump(exclude_defaults=True)
