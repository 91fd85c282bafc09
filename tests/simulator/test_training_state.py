"""Bytes of a parameter under full sharding, FP8 primary weights and a step on the host (report section 1.2)."""

from dataclasses import replace
from typing import Any

import pytest

from moeplan.hwprofiles.load import load_profile
from moeplan.plan import Plan
from moeplan.simulator.stack import load_stack
from moeplan.simulator.training_state import bytes_per_parameter, gathered_bytes, num_weight_copies


@pytest.mark.parametrize(
    "changes, keywords, dense_bytes",
    [
        ({"sharding": "full"}, {}, 18 / 64),
        ({"sharding": "full", "dp_replicate": 4}, {}, 18 / 16),
        ({"dp_replicate": 4, "moment_dtype": "bf16"}, {}, 6 + 8 / 16),
        ({"moment_dtype": "fp8"}, {}, 6 + 6 / 64),
        ({"moment_dtype": "bf16", "main_weight_remainders": True}, {}, 6 + 6 / 64),
        ({"sharding": "full"}, {"state_dtype": "fp32"}, 16 / 64),
        ({"sharding": "full"}, {"state_dtype": "bf16"}, 8 / 64),
        ({"optimizer_cpu_frac": 0.5}, {}, 6 + 8 / 64),
        ({"optimizer_cpu_frac": 1.0}, {}, 6 + 4 / 64),  # main weights stay
        ({"precision": "fp8_current", "moment_dtype": "bf16", "fp8_primary_weights": True}, {}, 6 + 8 / 64),
        ({"precision": "fp8_current", "moment_dtype": "bf16", "fp8_primary_weights": True}, {"num_copies": 1}, 5.125),
        ({"precision": "mxfp8", "moment_dtype": "bf16", "fp8_primary_weights": True}, {}, 2 * (1 + 1 / 32) + 4.125),
        ({"precision": "nvfp4", "moment_dtype": "bf16"}, {}, 7.125),
    ],
)
def test_bytes_of_a_quantized_dense_parameter(
    report_plan: Plan, changes: dict[str, Any], keywords: dict[str, Any], dense_bytes: float
) -> None:
    """With d = dp x cp = 64."""
    point = replace(report_plan.point, **changes)
    assert sum(bytes_per_parameter(point, is_expert=False, is_quantized=True, **keywords)) == dense_bytes


def test_experts_shard_over_edp_alone(report_plan: Plan) -> None:
    """Expert parallelism at a fixed number of GPUs moves no static memory under full sharding, and edp is 1 here."""
    point = replace(report_plan.point, sharding="full")
    assert sum(bytes_per_parameter(point, is_expert=True, is_quantized=True)) == 18


@pytest.mark.parametrize(
    "precision, hardware, copies",
    [("fp8_current", "h100", 2), ("fp8_current", "b200", 1), ("fp8_delayed", "gb300", 1), ("mxfp8", "gb300", 2)],
)
def test_copies_of_a_weight(report_plan: Plan, precision: str, hardware: str, copies: int) -> None:
    point = replace(report_plan.point, precision=precision)  # type: ignore[arg-type]
    assert num_weight_copies(point, load_profile(hardware)) == copies


def test_gathered_layers(report_plan: Plan) -> None:
    """Report section 1.2: 12 bytes for each parameter of one layer; embedding or head once, with its gradient."""
    full = replace(report_plan.point, sharding="full")
    stack = load_stack("megatron-bridge-26.08")
    assert gathered_bytes(full, stack, 1e9, 1e8) == 12e9 + 4e8
    assert gathered_bytes(report_plan.point, stack, 1e9, 1e8) == 0
