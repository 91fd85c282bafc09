"""Blocks of the model on one process against the formulas they stand for."""

import math

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from moeplan.executor.attention import LatentAttention, core_attention, window_mask
from moeplan.executor.loss import head_loss
from moeplan.executor.mesh import Mesh, build_mesh
from moeplan.executor.model import Transformer
from moeplan.executor.moe import MoeBlock
from moeplan.folding import Folding
from moeplan.kernels.norm import rms_norm_reference
from moeplan.kernels.rotary import apply_rotary
from moeplan.mixers import MlaAttention
from moeplan.model_spec import ModelSpec
from moeplan.parameters import total_parameters
from moeplan.plan import Plan
from moeplan.presets import load_model
from tests.executor.cases import GQA_MODEL, MLA_MODEL, tiny_plan
from tests.executor.folding_cases import MLA as FOLDED_MLA

CPU = torch.device("cpu")


@pytest.fixture
def mesh() -> Mesh:
    return build_mesh(Folding(1), 0)


def build(plan: Plan, mesh: Mesh) -> Transformer:
    return Transformer(plan, mesh, seed=7, device=CPU)


def normal(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(3)).requires_grad_()


@pytest.mark.parametrize("model", [GQA_MODEL, MLA_MODEL, FOLDED_MLA, load_model("tiny-moe")])
def test_parameters_are_as_many_as_the_model_has(model: ModelSpec, mesh: Mesh) -> None:
    transformer = build(tiny_plan(model, 1, precision="fp32"), mesh)
    assert sum(parameter.numel() for parameter in transformer.parameters()) == total_parameters(model, with_mtp=True)
    pieces = [piece for entry in transformer.table.entries for piece in entry.pieces]
    assert len({piece.name for piece in pieces}) == len(pieces)
    assert sum(math.prod(piece.shape) for piece in pieces) == total_parameters(model, with_mtp=True)


def test_a_weight_depends_on_its_name_and_the_seed_alone(mesh: Mesh) -> None:
    plan = tiny_plan(GQA_MODEL, 1)
    first, again = build(plan, mesh), build(plan.replace(seq_len=8), mesh)
    other = Transformer(plan, mesh, seed=8, device=CPU)
    assert first.head is not None
    assert first.embedding is not None
    assert other.head is not None
    torch.testing.assert_close(first.head, again.head, rtol=0, atol=0)
    assert not torch.equal(first.head, first.embedding)
    assert not torch.equal(first.head, other.head)
    assert float(first.head.detach().std()) == pytest.approx(0.02, rel=0.05)


@pytest.mark.parametrize("window", [None, 3, 100])
def test_core_attention_sees_the_past_of_its_group(window: int | None) -> None:
    seq_len, width = 7, 4
    q_BSND, k_BSMD, v_BSMD = normal(2, seq_len, 4, width), normal(2, seq_len, 2, width), normal(2, seq_len, 2, width)
    mask_SS = window_mask(seq_len, window, CPU) if window else None
    got = core_attention(q_BSND, k_BSMD, v_BSMD, mask_SS)
    for head in range(4):
        scores_BSS = q_BSND[:, :, head] @ k_BSMD[:, :, head // 2].transpose(1, 2) / math.sqrt(width)
        for query in range(seq_len):
            first = max(0, query - window + 1) if window else 0
            weights_BS = torch.softmax(scores_BSS[:, query, first : query + 1], -1)
            expected = torch.einsum("bs,bsd->bd", weights_BS, v_BSMD[:, first : query + 1, head // 2])
            torch.testing.assert_close(got[:, query, head], expected)


def test_latent_attention_is_its_formula(mesh: Mesh) -> None:
    spec = MLA_MODEL.attention
    assert isinstance(spec, MlaAttention)
    block = build(tiny_plan(MLA_MODEL, 1), mesh).layers[0].mixer
    assert isinstance(block, LatentAttention)
    assert block.q_down is not None
    assert block.q_norm is not None
    x_LH = normal(2 * 16, 32)
    nope, eps = spec.qk_nope_head_dim, MLA_MODEL.norm_eps
    q = rms_norm_reference(x_LH @ block.q_down.t(), block.q_norm, eps) @ block.q_up.t()
    q = q.view(2, 16, 4, nope + spec.qk_rope_head_dim)
    down = x_LH @ block.kv_down.t()
    latent = rms_norm_reference(down[:, : spec.kv_lora_rank], block.kv_norm, eps)
    kv = (latent @ block.kv_up.t()).view(2, 16, 4, nope + spec.v_head_dim)
    k_rope = apply_rotary(down[:, spec.kv_lora_rank :].reshape(2, 16, 1, -1), *block.place(None).rotary)
    k = torch.cat([kv[..., :nope], k_rope.expand(2, 16, 4, -1)], -1)
    q = torch.cat([q[..., :nope], apply_rotary(q[..., nope:], *block.place(None).rotary)], -1)
    scores = torch.einsum("bqnd,bknd->bnqk", q, k) / math.sqrt(q.shape[-1])
    weights = scores.masked_fill(torch.ones(16, 16).triu(1).bool(), -math.inf).softmax(-1)
    out = torch.einsum("bnqk,bknd->bqnd", weights, kv[..., nope:])
    torch.testing.assert_close(block(x_LH), out.reshape(32, -1) @ block.out_weight.t())


@pytest.mark.parametrize("model", [GQA_MODEL, MLA_MODEL])
def test_packed_documents_are_read_as_if_each_were_alone(model: ModelSpec, mesh: Mesh) -> None:
    documents = (3, 9, 4)
    ids_BS = torch.randint(0, 256, (2, 16), generator=torch.Generator().manual_seed(2))
    packed = build(tiny_plan(model, 1, packed_lengths=documents), mesh).logits(ids_BS.flatten()).view(2, 16, -1)
    parts = zip(ids_BS.split(documents, 1), packed.split(documents, 1), strict=True)
    for ids, logits in parts:
        alone = build(tiny_plan(model, 1, seq_len=ids.shape[1]), mesh).logits(ids.flatten())
        torch.testing.assert_close(logits, alone.view_as(logits), rtol=0, atol=1e-12)
    whole = build(tiny_plan(model, 1), mesh).logits(ids_BS.flatten()).view(2, 16, -1)
    assert float((packed - whole).detach()[:, 3:].abs().max()) > 1e-6


def test_head_loss_is_cross_entropy_with_its_gradients(mesh: Mesh) -> None:
    hidden, weight = normal(12, 8), normal(20, 8)
    targets = torch.arange(12) % 20
    loss = head_loss(hidden, weight, targets, 0, mesh.tp)
    (loss * torch.arange(12)).sum().backward()
    got = hidden.grad, weight.grad
    hidden.grad = weight.grad = None
    expected = F.cross_entropy(hidden @ weight.t(), targets, reduction="none")
    (expected * torch.arange(12)).sum().backward()
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(got, (hidden.grad, weight.grad))


@pytest.mark.parametrize("model", [GQA_MODEL, MLA_MODEL])
@pytest.mark.parametrize("memory_efficient", [True, False])
def test_moe_block_is_the_weighted_sum_of_its_experts(model: ModelSpec, memory_efficient: bool, mesh: Mesh) -> None:
    block = build(tiny_plan(model, 1, memory_efficient_permutation=memory_efficient), mesh).layers[1].mlp
    assert isinstance(block, MoeBlock)
    experts = block.experts
    x_LH = normal(16, 32)
    _, routing = block.router(x_LH)

    def expert(index: int, x: Tensor) -> Tensor:
        gate, up = (x @ experts.in_weight_EHF[index]).chunk(2, -1)
        act = F.silu(gate) if model.activation == "swiglu" else F.gelu(gate)
        return (act * up) @ experts.out_weight_EFH[index]

    rows = []
    for token in range(16):
        chosen = zip(routing.probs_TK[token], routing.expert_index_TK[token].tolist(), strict=True)
        rows.append(sum(prob * expert(index, x_LH[token]) for prob, index in chosen))
    expected = torch.stack(rows)
    if block.shared is not None:
        assert block.shared_gate is not None
        expected = expected + block.shared(x_LH) * torch.sigmoid(x_LH @ block.shared_gate.t())
    got = block(x_LH)
    torch.testing.assert_close(got, expected)
    parameters = [experts.in_weight_EHF, experts.out_weight_EFH, block.router.weight, x_LH]
    direction = torch.linspace(-1, 1, 32, dtype=torch.float64)
    got_grads = torch.autograd.grad((got * direction).sum(), parameters)
    torch.testing.assert_close(got_grads, torch.autograd.grad((expected * direction).sum(), parameters))
