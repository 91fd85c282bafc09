"""Inputs the simulator's tests share."""

import pytest

from moeplan.plan import Plan
from moeplan.presets import load_model


@pytest.fixture(scope="session")
def report_plan() -> Plan:
    """The configuration of the report's table 3: DeepSeek-V3 in BF16 on 256 GPUs, nothing saved by any technique."""
    return Plan(
        model=load_model("deepseek-v3"),
        hardware="gb300",
        num_gpus=256,
        stack="megatron-bridge-26.08",
        seq_len=4096,
        global_batch_size=8192,
        pp=4,
        vp=4,
        ep=64,
        layout="Et*4|(tttt|)*14tmL",
        memory_efficient_permutation=False,
    )
