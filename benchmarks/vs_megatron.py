"""moeplan and Megatron-Core one after the other on the same GPU, model, batch and data.

``python benchmarks/vs_megatron.py --hardware h200.toml --out results/h200-vs-megatron`` writes .json and .md. Each
engine and setting is a process of its own; figures are medians of the timed steps. Megatron's settings are the
fastest tried for each model; ``--settings`` tries others: multi-stream cuBLAS or CUTLASS grouped GEMM, fused
accumulation or not, FP8 recipes. Data are random token ids, so that routing is natural.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__).parent
# Fastest of the settings of Megatron tried for each model.
BEST = {
    "h200-fine": ("fused,cutlass",),
    "h200-deepseek": ("fused,cutlass",),
    "h200-coarse": ("fused",),
}
VOCABULARY, TOKENS_A_STEP = 32_768, 32 * 4096


def main() -> None:
    """Run every pair, write both files."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--models", default=",".join(BEST))
    parser.add_argument("--settings", action="append", help="of Megatron; instead of each model's fastest")
    parser.add_argument("--hardware", required=True)
    parser.add_argument("--steps", type=int, default=15, help="of which 3 are not timed and moeplan traces 2 more")
    parser.add_argument("--precision", default="bf16")
    parser.add_argument("--fix", action="append", help="pins of moeplan's plan, as search takes them; a row each")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "tokens.bin"
        ids = np.random.default_rng(0).integers(0, VOCABULARY, (options.steps + 3) * TOKENS_A_STEP + 1, dtype=np.uint16)
        ids.tofile(data)
        for model in options.models.split(","):
            runs = [partial(_moeplan, model, options, fix, data, Path(folder)) for fix in options.fix or [""]]
            settings = options.settings or BEST[model]
            runs += [partial(_megatron, model, one, options.steps, data, Path(folder)) for one in settings]
            for run in runs:
                rows.append(run())
                options.out.with_suffix(".json").write_text(json.dumps(rows, indent=2) + "\n", encoding="utf-8")
                print(markdown(rows[-1:]).splitlines()[-1], flush=True)
    options.out.with_suffix(".md").write_text(markdown(rows), encoding="utf-8")


def _moeplan(model: str, options: argparse.Namespace, fix: str, data: Path, folder: Path) -> dict[str, Any]:
    settings = [options.precision, *filter(None, fix.split(","))]
    plan, out = folder / f"{model}.toml", folder / f"{model}.json"
    moeplan = [sys.executable, "-m", "moeplan"]
    search = f"search --model {model} --hardware {options.hardware} --gpus 1 --seq-len 4096 --global-batch-size 32"
    pinned = f"--stack native --fix mbs=4,precision={options.precision}" + (f",{fix}" if fix else "")
    run = f"run {plan} --steps {options.steps + 2} --lr 3e-4 --data {data} --out {out}"
    for command in (f"{search} {pinned} --out {plan}", run):
        done = _run([*moeplan, *command.split()])
        if done.returncode not in {0, 4}:  # 4: measured, but not as predicted
            return _failed("moeplan", model, settings, done)
    got = json.loads(out.read_text(encoding="utf-8"))
    keys = ("step_s", "tokens_per_s_per_gpu", "model_tflops_per_gpu", "error_bar_frac", "step_times_s", "provenance")
    return {"engine": "moeplan", "model": model, "settings": settings, **{key: got[key] for key in keys}}


def _megatron(model: str, settings: str, steps: int, data: Path, folder: Path) -> dict[str, Any]:
    out = folder / "megatron.json"
    program = [sys.executable, str(HERE / "megatron_step.py"), model, "--data", str(data)]
    done = _run([*program, "--settings", settings, "--steps", str(steps), "--out", str(out)])
    if done.returncode:
        return _failed("megatron-core", model, settings.split(","), done)
    row: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
    return row


def _run(command: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, check=False)


def _failed(engine: str, model: str, settings: list[str], done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    return {"engine": engine, "model": model, "settings": settings, "error": done.stderr[-2000:]}


def markdown(rows: list[dict[str, Any]]) -> str:
    """A row a run; the ratio is to the fastest Megatron row of the same model."""
    lines = ["| model | engine | settings | ms a step | k tokens/s | TFLOP/s | peak allocated | of Megatron's best |"]
    lines.append("|---|---|---|---|---|---|---|---|")
    for row in rows:
        head = f"| {row['model']} | {row['engine']} | {', '.join(row['settings'])} |"
        if "error" in row:
            lines.append(f"{head} failed | | | | |")
            continue
        same = [one for one in rows if one["model"] == row["model"] and one["engine"] != "moeplan" and "step_s" in one]
        best = max((float(one["tokens_per_s_per_gpu"]) for one in same), default=0.0)
        ratio = f"{row['tokens_per_s_per_gpu'] / best:.3f}x" if best else "-"
        lines.append(
            f"{head} {row['step_s'] * 1e3:.1f} | {row['tokens_per_s_per_gpu'] / 1e3:.1f} | "
            f"{row['model_tflops_per_gpu']:.1f} | {_peak(row)} | {ratio} |"
        )
    return "\n".join(lines) + "\n"


def _peak(row: dict[str, Any]) -> str:
    if "peak_allocated_bytes" in row:
        return f"{row['peak_allocated_bytes'] / 2**30:.1f} GiB"
    return str(row["provenance"].get("peak_allocated", "-"))


if __name__ == "__main__":
    main()
