"""Signatures of the commands that plan: search, predict, explain, compare, export.

Bodies import what they need, so that ``--help`` stays fast.
"""

from pathlib import Path
from typing import Annotated

import typer

from moeplan.cli.options import BatchSize, Fix, Json, ModelName, PlanFile, SeqLen, Stack


def search(  # noqa: PLR0917 - typer: one parameter per option
    model: ModelName,
    hardware: Annotated[
        str, typer.Option("--hardware", help="Profile or .toml file; several with commas: h100,gb300.")
    ],
    gpus: Annotated[
        str, typer.Option("--gpus", help="GPUs (processes for a CPU profile); several with commas: 64,128,256.")
    ],
    seq_len: SeqLen,
    global_batch_size: BatchSize,
    stack: Stack = "",
    fix: Fix = "",
    forbid: Annotated[str, typer.Option("--forbid", help="Values not to use: tp=8,precision=mxfp8.")] = "",
    top: Annotated[int, typer.Option("--top", min=1, help="Plans to print.")] = 10,
    time_limit: Annotated[float | None, typer.Option("--time-limit", help="Seconds after which to stop.")] = None,
    memory_margin: Annotated[
        float | None, typer.Option("--memory-margin", min=0, max=0.9, help="Fraction of memory to leave free: 0.03.")
    ] = None,
    tokens: Annotated[str, typer.Option("--tokens", help="To train on: 14.8T. Adds days, GPU-hours, cost.")] = "",
    deadline: Annotated[str, typer.Option("--deadline", help="Most time for those tokens: 60d, 36h.")] = "",
    max_cost: Annotated[str, typer.Option("--max-cost", help="Most USD for them: 5M.")] = "",
    price: Annotated[
        str, typer.Option("--price", help="USD a GPU-hour instead of the profile's: 2.5, or h100=2.5,gb300=6.")
    ] = "",
    energy_price: Annotated[float | None, typer.Option("--energy-price", min=0, help="USD a kWh: 0.08.")] = None,
    goodput: Annotated[
        float, typer.Option("--goodput", min=0.01, max=1, help="Part of the time spent in steps: 0.9.")
    ] = 1.0,
    out: Annotated[Path | None, typer.Option("--out", help="Write the best plan to this TOML file.")] = None,
    as_json: Json = False,
) -> None:
    """Rank the plans that fit: memory is a hard wall, then step time decides. Several sizes: compare clusters."""
    from moeplan.cli.search import SearchOptions, run_search
    from moeplan.cli.sizing import JobOptions

    sizes = (model, hardware, gpus, seq_len, global_batch_size)
    job = JobOptions(tokens, deadline, max_cost, price, energy_price, goodput)
    run_search(SearchOptions(*sizes, stack, fix, forbid, top, time_limit, memory_margin, out, as_json, job))


def predict(  # noqa: PLR0917 - typer: one parameter per option
    plan: Annotated[Path | None, typer.Argument(help="Plan TOML; or give the options from --model on.")] = None,
    model: Annotated[str, typer.Option("--model", help="Preset, .toml file, or Hugging Face config.json.")] = "",
    hardware: Annotated[str, typer.Option("--hardware", help="Profile; with a plan file, instead of its own.")] = "",
    gpus: Annotated[int, typer.Option("--gpus", min=1, help="Number of GPUs.")] = 1,
    seq_len: Annotated[int, typer.Option("--seq-len", min=1, help="Tokens of one sequence.")] = 4096,
    global_batch_size: Annotated[int, typer.Option("--global-batch-size", min=1, help="Sequences of a step.")] = 1,
    stack: Stack = "",
    fix: Fix = "",
    trace: Annotated[Path | None, typer.Option("--trace", help="Write a Perfetto trace of the pipeline.")] = None,
    lock: Annotated[Path | None, typer.Option("--lock", help="Record the figures in this lock for check.")] = None,
    rank: Annotated[
        int | None, typer.Option("--rank", min=0, help="Also list the memory of this pipeline rank, tensor by tensor.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Predict one plan: memory by category and pipeline rank, step time by op family."""
    from moeplan.cli.predict import PredictOptions, run_predict

    typed = (model, gpus, seq_len, global_batch_size, stack, fix)
    run_predict(PredictOptions(plan, hardware, *typed, trace, lock, rank, as_json))


def explain(  # noqa: PLR0917 - typer: one parameter per option
    plan: PlanFile,
    ablate: Annotated[bool, typer.Option("--ablate", help="Leave out one technique at a time.")] = False,
    hardware: Annotated[str, typer.Option("--hardware", help="Use this profile instead of the plan's.")] = "",
    dynamic_cp: Annotated[
        Path | None,
        typer.Option("--dynamic-cp", help="Compare a cp for each pack of these documents, a length a line."),
    ] = None,
    max_tokens_per_rank: Annotated[
        int | None, typer.Option("--max-tokens-per-rank", min=1, help="With --dynamic-cp: what memory holds.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Show why a plan is as it is: what each changed axis would do to step time and memory."""
    if dynamic_cp is not None:
        from moeplan.cli.dynamic_cp import run_dynamic_cp

        run_dynamic_cp(plan, dynamic_cp, hardware, max_tokens_per_rank, as_json=as_json)
        return
    from moeplan.cli.explain import run_explain

    run_explain(plan, hardware, ablate=ablate, as_json=as_json)


def compare(
    first: Annotated[Path, typer.Argument(help="Plan TOML, prediction or measurement JSON, or lock.")],
    second: Annotated[Path, typer.Argument(help="The same kind of thing, later or otherwise.")],
    as_json: Json = False,
) -> None:
    """Show two plans, results or locks side by side: every figure, what changed, what moved."""
    from moeplan.cli.compare import run_compare

    run_compare(first, second, as_json)


def export(
    plan: PlanFile,
    to: Annotated[str, typer.Option("--to", help="Formats: slurm, megatron-lm; several with commas.")],
    out: Annotated[Path, typer.Option("--out", help="Folder for the files.")],
    run_config: Annotated[
        Path | None, typer.Option("--run-config", help="Settings of the run, as TOML: steps, data, save_folder.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Write a plan as other programs take it: a Slurm job that trains it, or a launch script for Megatron-LM."""
    from moeplan.cli.export import run_export

    run_export(plan, to, run_config, out, as_json=as_json)
