"""Where a step's time goes on one GPU, kernel by kernel, beside what the hardware allows.

``python benchmarks/roofline.py plan.toml --hardware h200.toml --out table.json``. For each group of kernels: seconds a
step, FLOPs and bytes that the algorithm cannot do without, their time at the rates that ``moeplan calibrate`` measured
under load (dense GEMM, attention by pass, HBM), and the ratio. A group's bytes count each operand once.
"""

import argparse
import json
import re
import statistics
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile, record_function

from moeplan.executor.data import open_tokens
from moeplan.executor.kernel_tuning import tune
from moeplan.executor.mesh import build_mesh
from moeplan.executor.scopes import tracing
from moeplan.executor.trace import STEP_LABEL, kernel_times_of
from moeplan.executor.train import Trainer
from moeplan.files import read_toml, validate
from moeplan.hwprofiles.load import load_profile
from moeplan.hwprofiles.schema import HardwareProfile
from moeplan.kernels.back_end_choice import choices
from moeplan.kernels.grouped_gemm_quack import TILES
from moeplan.mixers import GqaAttention
from moeplan.plan import Plan
from moeplan.run_config import RunConfig
from moeplan.simulator.training_state import adam_bytes
from moeplan.vocabulary import PRECISIONS, OpFamily

BF16, FP32 = 2, 4
Kernels = dict[tuple[OpFamily, str], tuple[float, int]]  # seconds and launches of a step


@dataclass(frozen=True)
class Ceilings:
    """Rates under load: FLOP/s of dense GEMMs in bf16, of the plan's linears, of attention's passes; bytes/s of HBM."""

    gemm_flops_per_s: float
    linear_flops_per_s: float
    attention_flops_per_s: tuple[float, float]
    hbm_bytes_per_s: float


@dataclass(frozen=True)
class Group:
    """Kernels of one family whose names match, and the work of a step that they do."""

    name: str
    family: str
    pattern: str
    flops: float
    bytes: float
    flops_per_s: float

    def roofline_s(self, ceilings: Ceilings) -> float:
        """The longer of products at their rate and bytes at HBM's."""
        return max(self.flops / self.flops_per_s, self.bytes / ceilings.hbm_bytes_per_s)


def ceilings_of(profile_: HardwareProfile, plan: Plan) -> Ceilings:
    """The profile's rates: of the best dense shape, of attention in bf16 at the plan's sequence length."""
    dtypes = ("bf16", PRECISIONS[plan.precision].gemm_dtype)
    dense, linear = (max(max(one.flops_per_s) for one in profile_.gemm if one.dtype == dtype) for dtype in dtypes)
    head_dim = plan.model.attention.qk_head_dim
    curves = [one for one in profile_.attention if one.dtype == "bf16" and one.qk_head_dim == head_dim]
    passes = []
    for phase in ("fwd", "bwd"):
        curve = next(one for one in curves if one.phase == phase)
        nearest = min(range(len(curve.seq_len)), key=lambda index: abs(curve.seq_len[index] - plan.seq_len))
        passes.append(curve.flops_per_s[nearest])
    hbm = profile_.hbm_bytes_per_s.value * profile_.hbm_efficiency_frac.value
    return Ceilings(dense, linear, (passes[0], passes[1]), hbm)


def groups_of(plan: Plan, ceilings: Ceilings, num_parameters: int) -> list[Group]:
    """What a step of a model of MoE layers with grouped-query attention does, in the order of the table."""
    model, moe, attention = plan.model, plan.model.moe, plan.model.attention
    assert moe is not None
    assert isinstance(attention, GqaAttention)
    T, H, L = plan.tokens_per_step, model.hidden_size, model.num_layers
    width, heads, kv = attention.head_dim, attention.num_heads, attention.num_kv_heads
    rows, F, E, V = T * moe.top_k, moe.expert_ffn_size, moe.num_experts, model.vocab_size
    dense = L * H * width * (2 * heads + 2 * kv)
    experts = L * E * 3 * H * F
    added = FP32 * (2 * plan.num_micro_batches - 1)  # bytes a weight: written once, then read and written
    gemm, linear, (fwd, bwd) = ceilings.gemm_flops_per_s, ceilings.linear_flops_per_s, ceilings.attention_flops_per_s
    scores = L * T * plan.seq_len * width * heads  # of one causal product
    expert_flops = L * rows * 2 * 3 * H * F
    # Passes: forward of the first norm 2, of the second with the sum before it 4; backward with the stream's gradient 4
    # each; the last norm 2 and 3.
    norms = (14 * L + 5) * T * H * BF16
    # Logits and their gradients go through HBM in fp32 and in BF16; the input's gradient is added to.
    router = L * T * (4 * H * BF16 + E * (4 * FP32 + 3 * BF16))
    read = 2 * plan.num_micro_batches * experts * BF16
    by_pass = [
        Group("experts: weight gradient, added to fp32", "expert_gemm", "_add_products|nvjet_sm90_tss|_gradient",
              expert_flops, experts * added, linear),
        Group("experts: forward and input gradient", "expert_gemm", ".*", 2 * expert_flops, read, linear),
    ]  # fmt: skip
    # Operands of quantized dense layers, read in bf16 and written in both layouts; weights from fp32, once a step.
    inputs = H + width * heads + width * (heads + 2 * kv) + H
    weights = FP32 + 2
    quantized = [
        Group("dense operands quantized", "elementwise", "(_quantize_rows|amax_of_parts)", 0, L * T * inputs * 4, gemm),
        Group("weights quantized", "optimizer", "(_quantize_weights|amax_of_parts|.*copy)", 0,
              (dense + experts) * weights, gemm),
    ] if linear != gemm else []  # fmt: skip
    # The names of quack's kernels do not tell the passes apart.
    together = [Group("experts: all products", "expert_gemm", ".*", 3 * expert_flops, read + experts * added, gemm)]
    return [
        *(together if any(name in TILES for name in choices().values()) else by_pass),
        Group("attention: forward", "attention", ".*(fprop|FlashAttentionForward).*", 2 * scores, 0, fwd),
        Group("attention: backward", "attention", ".*", 5 * scores, 0, bwd),
        Group("dense layers", "dense_gemm", ".*", 6 * T * dense, dense * added, linear),
        Group("head", "loss", "(nvjet|.*gemm).*", 6 * T * H * V, V * H * added, gemm),
        Group("cross entropy", "loss", ".*", 0, 3 * T * V * BF16, gemm),
        Group("router", "router", ".*", L * 6 * T * H * E, router, gemm),
        # Copies that are quantized as they are made come to the same bytes: two layouts of one byte.
        Group("rows copied", "permute", "(_spread|_copy|_quantize_rows)", 0, L * 2 * (T + rows) * H * BF16, gemm),
        Group("rows summed", "permute", "_sum", 0, L * 2 * (T + rows) * H * BF16, gemm),
        Group("rows sorted", "permute", ".*", 0, L * rows * 32, gemm),
        Group("activation: forward", "elementwise", "_forward", 0, L * rows * 3 * F * BF16, gemm),
        Group("activation: backward", "elementwise", "_backward", 0, L * rows * 5 * F * BF16, gemm),
        Group("heads split and rotated", "elementwise", "(_rotate|_copy_heads)", 0,
              L * 4 * T * width * (heads + 2 * kv) * BF16, gemm),
        Group("norms and sums before them", "elementwise", "_norm", 0, norms, gemm),
        *quantized,
        Group("residual sums and the rest", "elementwise", ".*", 0, (3 * L + 4) * T * H * BF16, gemm),
        Group("Adam", "optimizer", "_step", 0, adam_bytes(plan.point) * num_parameters, gemm),
        Group("gradient norm", "optimizer", ".*", 0, FP32 * num_parameters, gemm),
    ]  # fmt: skip


def measure(plan: Plan, run: RunConfig, num_steps: int) -> tuple[float, Kernels, int]:
    """Median seconds of a step, seconds and launches by family and kernel of one more, and parameters."""
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", init_method="tcp://127.0.0.1:29512", rank=0, world_size=1, device_id=device)
    mesh = build_mesh(plan.folding, 0)
    tune(plan, mesh, device)
    trainer = Trainer(plan, run, mesh, open_tokens(plan, run), device)
    times_s = []
    for number in range(3 + num_steps):
        torch.cuda.synchronize()
        start_s = time.perf_counter()
        trainer.step(number)
        torch.cuda.synchronize()
        times_s.append(time.perf_counter() - start_s)
    with tracing(), profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], acc_events=True) as trace:
        with record_function(STEP_LABEL):
            trainer.step(3 + num_steps)
        torch.cuda.synchronize()
    num_parameters = sum(entry.parameter.numel() for entry in trainer.model.table.entries)
    dist.destroy_process_group()
    return statistics.median(times_s[3:]), kernel_times_of(trace.events() or (), 1), num_parameters


def table(groups: list[Group], kernels: Kernels, ceilings: Ceilings) -> list[dict[str, object]]:
    """A row a group: what its kernels took and what they could take. Each kernel belongs to the first that matches."""
    rows: list[dict[str, object]] = []
    left = dict(kernels)
    for group in groups:
        own = {key: left.pop(key) for key in list(left) if key[0] == group.family and re.match(group.pattern, key[1])}
        seconds, roofline_s = sum(one[0] for one in own.values()), group.roofline_s(ceilings)
        longest = sorted(own.items(), key=lambda item: -item[1][0])[:3]
        rows.append(
            {
                "kernels": group.name,
                "time_s": seconds,
                "launches": sum(one[1] for one in own.values()),
                "flops": group.flops,
                "bytes": group.bytes,
                "roofline_s": roofline_s,
                "ratio": roofline_s / seconds if seconds else None,
                "longest": {name[:300]: time_s for (_, name), (time_s, _) in longest},
            }
        )
    rest = sum(one[0] for one in left.values())
    rows.append({"kernels": "others", "time_s": rest, "launches": len(left), "roofline_s": 0.0})
    return rows


def main() -> None:
    """Measure, print the table as Markdown, write it as JSON."""
    parser = argparse.ArgumentParser()
    parser.add_argument("plan", type=Path)
    parser.add_argument("--hardware", required=True)
    parser.add_argument("--data", default="")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    plan = validate(Plan, read_toml(options.plan), str(options.plan))
    ceilings = ceilings_of(load_profile(options.hardware), plan)
    step_s, kernels, num_parameters = measure(plan, RunConfig(data=options.data, lr=3e-4), options.steps)
    rows = table(groups_of(plan, ceilings, num_parameters), kernels, ceilings)
    ideal_s = sum(float(str(row["roofline_s"])) for row in rows)
    result = {
        "model": plan.model.name,
        "step_s": step_s,
        "roofline_s": ideal_s,
        "ratio": ideal_s / step_s,
        "rows": rows,
    }
    options.out.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    print("| kernels | launches | ms | TFLOP | GB | roofline ms | ratio |\n|---|---|---|---|---|---|---|")
    for row in rows:
        print(_line(row))
    print(f"step {step_s * 1e3:.1f} ms, sum of rooflines {ideal_s * 1e3:.1f} ms: {ideal_s / step_s:.1%}")


def _line(row: dict[str, object]) -> str:
    def number(key: str, scale: float, digits: int) -> str:
        value = row.get(key)
        return f"{value * scale:.{digits}f}" if isinstance(value, float | int) and value else "-"

    cells = (
        number("time_s", 1e3, 1),
        number("flops", 1e-12, 1),
        number("bytes", 1e-9, 0),
        number("roofline_s", 1e3, 1),
    )
    return f"| {row['kernels']} | {row['launches']} | {' | '.join(cells)} | {number('ratio', 1, 2)} |"


if __name__ == "__main__":
    main()
