"""Signatures of the commands that train and measure: run, tokenize, calibrate.

Bodies import what they need, so that ``--help`` stays fast.
"""

from pathlib import Path
from typing import Annotated

import typer

from moeplan.cli.options import Json, PlanFile


def run(  # noqa: PLR0917 - typer: one parameter per option
    plan: PlanFile,
    run_config: Annotated[
        Path | None,
        typer.Option("--run-config", help="TOML with these settings and more (docs/training.md); options go before."),
    ] = None,
    steps: Annotated[int | None, typer.Option("--steps", min=1, help="Optimizer steps; default 50.")] = None,
    data: Annotated[
        str, typer.Option("--data", help="Flat token file, or Megatron's pair; default the standard library as bytes.")
    ] = "",
    data_dtype: Annotated[str, typer.Option("--data-dtype", help="uint8, uint16 or uint32; default uint16.")] = "",
    seed: Annotated[int | None, typer.Option("--seed", help="Of weights and data order.")] = None,
    lr: Annotated[float | None, typer.Option("--lr", help="Peak learning rate.")] = None,
    processes: Annotated[
        int | None, typer.Option("--processes", min=1, help="Processes to start; default the plan's number of GPUs.")
    ] = None,
    save_folder: Annotated[str, typer.Option("--save-folder", help="For checkpoints; the last step is saved.")] = "",
    save_every: Annotated[int | None, typer.Option("--save-every", min=1, help="Steps between checkpoints.")] = None,
    save_async: Annotated[bool, typer.Option("--save-async", help="Write checkpoints beside training.")] = False,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on from the latest checkpoint of --save-folder, at any folding.")
    ] = False,
    auto_resume: Annotated[
        bool, typer.Option("--auto-resume", help="Resume where --save-folder has a checkpoint, else begin.")
    ] = False,
    eval_every: Annotated[
        int | None, typer.Option("--eval-every", min=1, help="Steps between validations on held-out data.")
    ] = None,
    init_from: Annotated[str, typer.Option("--init-from", help="Folder of Hugging Face weights to begin with.")] = "",
    upcycle: Annotated[
        bool, typer.Option("--upcycle", help="--init-from is dense: its MLPs become the plan's experts.")
    ] = False,
    record_routing: Annotated[
        str, typer.Option("--record-routing", help="Folder for the experts that every token of every step takes.")
    ] = "",
    replay_routing: Annotated[
        str,
        typer.Option("--replay-routing", help="Folder of such a record: tokens take those experts, at any folding."),
    ] = "",
    force_balance: Annotated[
        bool, typer.Option("--force-balance", help="Random experts, level in expectation: for benchmarks.")
    ] = False,
    export_hf: Annotated[
        str, typer.Option("--export-hf", help="Folder for the trained weights as Hugging Face reads them.")
    ] = "",
    log_folder: Annotated[
        str, typer.Option("--log-folder", help="For a line a step as CSV and JSON, and TensorBoard if installed.")
    ] = "",
    spike_factor: Annotated[
        float | None, typer.Option("--spike-factor", min=0, help="Stop where a gradient norm is this times its median.")
    ] = None,
    skip_spikes: Annotated[bool, typer.Option("--skip-spikes", help="Leave such updates out and go on.")] = False,
    hang_timeout: Annotated[
        float | None, typer.Option("--hang-timeout", min=1, help="Seconds without progress before the run ends: 600.")
    ] = None,
    deterministic: Annotated[
        bool, typer.Option("--deterministic", help="Kernels that give the same bits each time; slower attention.")
    ] = False,
    nnodes: Annotated[int, typer.Option("--nnodes", min=1, help="Hosts; start the same command on each.")] = 1,
    rdzv_endpoint: Annotated[
        str, typer.Option("--rdzv-endpoint", help="host:port of one of the hosts, the same on each.")
    ] = "",
    rdzv_id: Annotated[str, typer.Option("--rdzv-id", help="Name of the run, the same on each host.")] = "moeplan",
    hardware: Annotated[str, typer.Option("--hardware", help="Predict with this profile instead of the plan's.")] = "",
    out: Annotated[Path, typer.Option("--out", help="Measurement JSON.")] = Path("measurement.json"),
    max_step_error: Annotated[
        float | None, typer.Option("--max-step-error", help="Exit 4 if step time is off by more than this fraction.")
    ] = None,
    max_memory_error: Annotated[
        float | None,
        typer.Option("--max-memory-error", help="Exit 4 if peak memory is off by more than this fraction."),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check and predict, start nothing.")] = False,
    as_json: Json = False,
) -> None:
    """Train the plan for real, then print predicted beside measured."""
    from moeplan.cli.run import RunOptions, run_plan

    settings = {"steps": steps, "data": data, "data_dtype": data_dtype, "seed": seed, "lr": lr}
    settings |= {"save_folder": save_folder, "save_every": save_every, "save_async": save_async, "resume": resume}
    settings |= {"auto_resume": auto_resume}
    settings |= {"eval_every": eval_every, "export_hf": export_hf, "log_folder": log_folder}
    settings |= {"init_from": init_from, "upcycle": upcycle, "force_balance": force_balance}
    settings |= {"record_routing": record_routing, "replay_routing": replay_routing, "deterministic": deterministic}
    settings |= {"spike_factor": spike_factor, "skip_spikes": skip_spikes, "hang_timeout_s": hang_timeout}
    hosts = (nnodes, rdzv_endpoint, rdzv_id)
    tolerances = {"step_s": max_step_error, "peak_memory_bytes": max_memory_error}
    run_plan(plan, RunOptions(settings, run_config, tolerances, processes, hosts, hardware, out, dry_run, as_json))


def tokenize(  # noqa: PLR0917 - typer: one parameter per option
    files: Annotated[list[Path], typer.Argument(help="Text files, one document each, or .jsonl with one a line.")],
    tokenizer: Annotated[
        str,
        typer.Option("--tokenizer", help="Hugging Face folder or tokenizer.json, or the word bytes."),
    ],
    out: Annotated[Path, typer.Option("--out", help="Prefix of the .bin and .idx to write.")],
    json_key: Annotated[str, typer.Option("--json-key", help="Where a line of JSON has its text.")] = "text",
    end: Annotated[str, typer.Option("--end", help="Token after each document, such as <|endoftext|>.")] = "",
    as_json: Json = False,
) -> None:
    """Turn text into the token file that run --data reads, as Megatron's preprocessing does."""
    from moeplan.cli.tokenize import run_tokenize

    run_tokenize(files, tokenizer, out, json_key, end, as_json=as_json)


def calibrate(
    processes: Annotated[
        int, typer.Option("--processes", min=1, help="Measure with this many running at once; on CUDA one a GPU.")
    ] = 1,
    device: Annotated[str, typer.Option("--device", help="auto (a GPU where there is one), cpu or cuda.")] = "auto",
    out: Annotated[
        Path | None, typer.Option("--out", help="Profile TOML to write; default its name: cpu-host.toml, h200.toml.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Measure this machine and write its hardware profile."""
    from moeplan.cli.calibrate import run_calibrate

    run_calibrate(processes, device, out, as_json)
