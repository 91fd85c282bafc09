"""Logits of every family are those of transformers itself, with weights going either way."""

from pathlib import Path
from typing import Any

import pytest
import torch

from moeplan.executor.export_hf import export_hf
from moeplan.executor.import_hf import HfWeights
from moeplan.executor.mesh import build_mesh
from moeplan.executor.model import Transformer
from moeplan.hf_export import hf_config_of
from moeplan.hf_folder import check_model, open_folder
from moeplan.model_spec import ModelSpec
from tests.executor.cases import tiny_plan
from tests.executor.hf_models import MODELS, spread

transformers = pytest.importorskip("transformers")


def same_logits(ours: Transformer, theirs: Any) -> None:
    ids = torch.randint(0, 256, (2, ours.plan.seq_len), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        expected = theirs(ids).logits
        got = ours.logits(ids.flatten()).view_as(expected)
    assert float(expected.std()) > 0.1
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("spec", MODELS, ids=[f"{number}-{one.name}" for number, one in enumerate(MODELS)])
def test_logits_are_those_of_transformers(spec: ModelSpec, tmp_path: Path) -> None:
    plan = tiny_plan(spec, 1, precision="fp32")
    mesh, cpu = build_mesh(plan.folding, 0), torch.device("cpu")
    ours = Transformer(plan, mesh, 7, cpu)
    biases = [router.bias_E for router in ours.routers() if router.bias_E is not None]
    spread([*ours.parameters(), *biases])
    export_hf(plan, mesh, ours, tmp_path / "ours")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours", dtype=torch.float32)
    same_logits(ours, theirs)

    config = hf_config_of(spec)
    assert config["model_type"] == spec.name
    torch.manual_seed(3)
    fresh = transformers.AutoModelForCausalLM.from_config(theirs.config, dtype=torch.float32)
    spread(
        [*fresh.parameters(), *(buffer for name, buffer in fresh.named_buffers() if name.endswith("correction_bias"))]
    )
    fresh.save_pretrained(tmp_path / "theirs", max_shard_size="100KB")
    folder = open_folder(tmp_path / "theirs")
    check_model(folder, spec)
    same_logits(Transformer(plan, mesh, 7, cpu, HfWeights(folder)), fresh.eval())
