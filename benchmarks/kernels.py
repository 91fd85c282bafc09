"""Every back end of every operation at the shapes of the models of the single-GPU benchmark, beside its roofline.

``python -m benchmarks.kernels --hardware results/2026-11-29-h200-profile.toml --out kernels.json`` from the root of the
repository, some three minutes on one GPU. Back ends of one operation are compared in rounds under load, as the
executor's tuner does it; ceilings are those that ``moeplan calibrate`` measured.
"""

import argparse
import json
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from benchmarks.kernel_cases import Case, cases
from benchmarks.roofline import Ceilings, ceilings_of
from moeplan.executor.candidate_timing import Timer, under_load
from moeplan.hwprofiles.load import load_profile
from moeplan.plan import Plan
from moeplan.presets import load_model

MODELS = "h200-fine,h200-deepseek,h200-coarse"


@dataclass(frozen=True)
class Row:
    """One back end: seconds of a call, the longer of its products and bytes at the ceilings, and their ratio."""

    model: str
    operation: str
    shape: str
    backend: str
    time_s: float
    tflop: float
    gigabytes: float
    roofline_s: float
    is_fastest: bool

    @property
    def ratio(self) -> float:
        return self.roofline_s / self.time_s


def plan_of(model: str, hardware: str) -> Plan:
    """4 x 4096 tokens a micro-batch, 8 of them a step."""
    return Plan(model=load_model(model), hardware=hardware, num_gpus=1, seq_len=4096, global_batch_size=32, mbs=4)


def rows_of(model: str, case: Case, ceilings: Ceilings, timed: Timer | None = None) -> list[Row]:
    """A row a back end, fastest first. ``timed``: as :func:`moeplan.executor.candidate_timing.under_load` takes it."""
    times_s = under_load(case.runs, timed)
    roofline_s = max(case.num_flops / ceilings.gemm_flops_per_s, case.num_bytes / ceilings.hbm_bytes_per_s)
    best = min(times_s, key=lambda name: times_s[name])
    return [
        Row(
            model, case.operation, case.shape, name, times_s[name], case.num_flops / 1e12, case.num_bytes / 1e9,
            roofline_s, name == best,
        )
        for name in sorted(times_s, key=lambda name: times_s[name])
    ]  # fmt: skip


def markdown(rows: list[Row]) -> str:
    """A table with the fastest of each operation in bold."""
    lines = ["| model | operation | shape | back end | ms | TFLOP | GB | roofline ms | ratio |"]
    lines.append("|---|---|---|---|---|---|---|---|---|")
    for row in rows:
        name = f"**{row.backend}**" if row.is_fastest else row.backend
        lines.append(
            f"| {row.model} | {row.operation} | {row.shape} | {name} | {row.time_s * 1e3:.3f} | {row.tflop:.2f} | "
            f"{row.gigabytes:.2f} | {row.roofline_s * 1e3:.3f} | {row.ratio:.2f} |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measure, print the table, and write it as JSON after each operation."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--models", default=MODELS)
    parser.add_argument("--hardware", required=True)
    parser.add_argument("--only", default="", help="operations whose name holds this")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    device, rows = torch.device("cuda", 0), list[Row]()
    torch.cuda.set_device(device)
    profile = load_profile(options.hardware)
    for model in options.models.split(","):
        plan = plan_of(model, options.hardware)
        for case in cases(plan, device):
            if options.only in case.operation:
                rows += rows_of(model, case, ceilings_of(profile, plan))
                options.out.write_text(json.dumps([asdict(row) for row in rows], indent=2) + "\n", encoding="utf-8")
            del case
            torch.cuda.empty_cache()
    print(torch.cuda.get_device_name(device), "torch", torch.__version__)
    print(markdown(rows), end="")


if __name__ == "__main__":
    main()
