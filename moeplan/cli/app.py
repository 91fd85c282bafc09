"""The command line. Only signatures live here; bodies import what they need, so that ``--help`` stays fast."""

import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from moeplan import __version__
from moeplan.errors import MoeplanError

app = typer.Typer(
    name="moeplan",
    help="Plan, run and check Mixture-of-Experts training: memory, communication and compute, jointly.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON on stdout.")]
ModelName = Annotated[str, typer.Option("--model", help="Preset, .toml file, or Hugging Face config.json.")]
Stack = Annotated[
    str,
    typer.Option("--stack", help="Engine and release (moeplan stacks): default native on a CPU profile, else Bridge."),
]
Fix = Annotated[str, typer.Option("--fix", help="Pin axes: tp=1,pp=8,precision=bf16,recompute=layernorm+moe_act.")]
SeqLen = Annotated[int, typer.Option("--seq-len", min=1, help="Tokens of one sequence.")]
BatchSize = Annotated[int, typer.Option("--global-batch-size", min=1, help="Sequences of one optimizer step.")]
PlanFile = Annotated[Path, typer.Argument(help="Plan TOML, as written by search --out.")]


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"moeplan {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Errors go to stderr as `error:` and `hint:`. Exit codes: 0 ok, 2 input, 3 no plan, 4 tolerance, 1 our fault."""


@app.command()
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


@app.command()
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


@app.command()
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


@app.command()
def compare(
    first: Annotated[Path, typer.Argument(help="Plan TOML, prediction or measurement JSON, or lock.")],
    second: Annotated[Path, typer.Argument(help="The same kind of thing, later or otherwise.")],
    as_json: Json = False,
) -> None:
    """Show two plans, results or locks side by side: every figure, what changed, what moved."""
    from moeplan.cli.compare import run_compare

    run_compare(first, second, as_json)


@app.command()
def check(  # noqa: PLR0917 - typer: one parameter per option
    lock: Annotated[Path, typer.Argument(help="Lock JSON, as written by predict --lock.")],
    tolerance: Annotated[
        float | None, typer.Option("--tolerance", min=0, help="Allowed relative change of every judged figure.")
    ] = None,
    update: Annotated[bool, typer.Option("--update", help="Record the present predictions, judge nothing.")] = False,
    markdown: Annotated[Path | None, typer.Option("--markdown", help="Also write a Markdown table.")] = None,
    junit: Annotated[Path | None, typer.Option("--junit", help="Also write JUnit XML.")] = None,
    as_json: Json = False,
) -> None:
    """Recompute the predictions of a lock; exit 4 where one has moved beyond its tolerance."""
    from moeplan.cli.check import CheckOptions, run_check

    run_check(lock, CheckOptions(tolerance, update, markdown, junit, as_json))


@app.command()
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


@app.command()
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


@app.command()
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


@app.command()
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


@app.command()
def validate(  # noqa: PLR0917 - typer: one parameter per option
    runs: Annotated[Path | None, typer.Argument(help="CSV of measured runs, with the columns docs name.")] = None,
    cases: Annotated[
        Path | None, typer.Option("--cases", help="Instead, CSV of reported cases: oom, fits, rejected, throughput.")
    ] = None,
    pairs: Annotated[Path | None, typer.Option("--pairs", help="CSV of A/B pairs of those runs.")] = None,
    eval_set: Annotated[str, typer.Option("--eval-set", help="Only rows of these evaluation sets: moe,dense.")] = "",
    keep: Annotated[str, typer.Option("--filter", help="Only rows with these cells: gpu=H100,model=deepseek-v3.")] = "",
    as_json: Json = False,
) -> None:
    """Predict every row of a table of measured runs and score the errors; bad rows are listed, never fatal."""
    from moeplan.cli.validate import ValidateOptions, run_validate
    from moeplan.cli.validate_cases import run_validate_cases

    if (runs is None) == (cases is None):
        raise typer.BadParameter("give a CSV of measured runs, or --cases with one of reported cases")
    if cases is not None:
        run_validate_cases(cases, as_json)
    elif runs is not None:
        run_validate(ValidateOptions(runs, pairs, eval_set, keep, as_json))


@app.command()
def fit(
    runs: Annotated[Path, typer.Argument(help="CSV of measured runs, as validate takes it.")],
    eval_set: Annotated[str, typer.Option("--eval-set", help="Evaluation sets to fit to.")] = "moe,dense",
    keep: Annotated[str, typer.Option("--filter", help="Only rows with these cells: gpu=H100.")] = "",
    out: Annotated[Path | None, typer.Option("--out", help="Folder for fitted profiles and stacks.")] = None,
    as_json: Json = False,
) -> None:
    """Fit the declared constants to measured runs; errors are of runs the values have not seen."""
    from moeplan.cli.fit import FitOptions, run_fit

    run_fit(FitOptions(runs, eval_set, keep, out, as_json))


def _add_catalogue(kind: str, about: str, shows: str, what: str) -> None:
    """``moeplan KIND`` lists all of a kind, ``moeplan KIND show NAME`` shows one; bodies: moeplan.cli.show."""
    group = typer.Typer(help=about)
    app.add_typer(group, name=kind, invoke_without_command=True)

    @group.callback()
    def list_all(context: typer.Context, as_json: Json = False) -> None:
        if context.invoked_subcommand is None:
            from moeplan.cli.show import CATALOGUES

            CATALOGUES[kind].list_all(as_json)

    @group.command("show", help=shows)
    def show_one(name: Annotated[str, typer.Argument(help=what)], as_json: Json = False) -> None:
        from moeplan.cli.show import CATALOGUES

        CATALOGUES[kind].show_one(name, as_json)


_add_catalogue(
    "models",
    "List model presets, or show one with its parameters, FLOPs and source.",
    "Show one model: sizes, parameters, FLOPs, source.",
    "Preset or file.",
)
_add_catalogue(
    "hardware",
    "List hardware profiles, or show one with the source of every number.",
    "Show every number of a profile with its source.",
    "Profile or file.",
)
_add_catalogue(
    "stacks",
    "List software stacks (engine and release), or show one with the source of its figures.",
    "Show what a stack executes, and every figure with its source.",
    "Stack or file.",
)


def main(arguments: list[str] | None = None) -> None:
    """Entry point: one ``error:`` line and one ``hint:`` line instead of a traceback for what users can cause."""
    usage_error: Any = typer.BadParameter.__mro__[1]  # click's UsageError, wherever this typer keeps click
    try:
        code = app(args=arguments, standalone_mode=False)
    except MoeplanError as error:
        _report(error.message, error.hint)
        code = error.exit_code
    except usage_error as error:
        _report(error.format_message(), "moeplan COMMAND --help lists the options")
        code = 2
    except (KeyboardInterrupt, typer.Abort):
        _report("interrupted", "nothing was left half-written")
        code = 130
    except BrokenPipeError:  # the reader of our output went away, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 0
    except Exception as error:
        if os.environ.get("MOEPLAN_DEBUG"):
            raise
        _report(
            f"internal error: {type(error).__name__}: {error}", "set MOEPLAN_DEBUG=1 for the traceback and report it"
        )
        code = 1
    sys.exit(code if isinstance(code, int) else 0)


def _report(message: str, hint: str) -> None:
    one_line = " ".join(message.split())
    print(f"error: {one_line}", file=sys.stderr)  # noqa: T201 - the command line's own output
    if hint:
        print(f"hint: {hint}", file=sys.stderr)  # noqa: T201
