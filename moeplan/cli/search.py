"""``moeplan search``."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from moeplan.cli.inputs import load_stack_for
from moeplan.errors import InfeasibleError
from moeplan.files import check_writable, toml_text, write_text_atomically
from moeplan.hwprofiles.load import load_profile
from moeplan.planner.request import MEMORY_MARGIN_FRAC, SearchRequest, parse_forbidden, parse_pins
from moeplan.planner.search import SearchOutcome, search
from moeplan.presets import load_model
from moeplan.report.output import err_console, print_json
from moeplan.report.search import print_outcome
from moeplan.units import format_bytes


@dataclass(frozen=True, slots=True)
class SearchOptions:
    """Options of the command, as typed."""

    model: str
    hardware: str
    gpus: int
    seq_len: int
    global_batch_size: int
    stack: str
    fix: str
    forbid: str
    top: int
    time_limit_s: float | None
    memory_margin_frac: float | None
    out: Path | None
    as_json: bool


def run_search(options: SearchOptions) -> None:
    """Search, print, write the best plan. Raises InfeasibleError where nothing fits."""
    request, out = _request(options), options.out
    if out is not None:
        check_writable(out)
    outcome = _search_with_progress(request)
    if out is not None and outcome.plans:
        best = outcome.plans[0]
        header = f"# plan {best.plan.plan_id}, predicted step {best.predicted.step_s:.4g} s\n"
        write_text_atomically(out, header + toml_text(best.plan))
    if options.as_json:
        print_json(outcome_json(outcome))
    else:
        print_outcome(request, outcome, out)
    if not outcome.plans:
        raise InfeasibleError(*_why_nothing_fits(outcome))


def _request(options: SearchOptions) -> SearchRequest:
    profile = load_profile(options.hardware)
    return SearchRequest(
        model=load_model(options.model),
        hardware=options.hardware,
        profile=profile,
        stack=load_stack_for(profile, options.stack),
        num_gpus=options.gpus,
        seq_len=options.seq_len,
        global_batch_size=options.global_batch_size,
        fixed=parse_pins(options.fix, "--fix"),
        forbidden=parse_forbidden(options.forbid, "--forbid"),
        top_k=options.top,
        time_limit_s=options.time_limit_s,
        memory_margin_frac=MEMORY_MARGIN_FRAC if options.memory_margin_frac is None else options.memory_margin_frac,
    )


def _search_with_progress(request: SearchRequest) -> SearchOutcome:
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=err_console(), transient=True) as progress:
        task = progress.add_task("searching")

        def show(done: str) -> None:
            progress.update(task, description=f"searching: {done}")

        return search(request, show)


def outcome_json(outcome: SearchOutcome) -> dict[str, Any]:
    """The JSON that callers may rely on: plans best first, rejections, space."""
    return {
        "plans": [
            {
                "plan_id": ranked.plan.plan_id,
                "plan": ranked.plan.model_dump(mode="json"),
                "predicted": ranked.predicted.model_dump(mode="json"),
            }
            for ranked in outcome.plans
        ],
        "rejections": [rejection.model_dump(mode="json") for rejection in outcome.rejections],
        "space": {
            "points": outcome.num_points,
            "costed": outcome.num_costed,
            "seconds": outcome.seconds,
            "proven": outcome.is_complete,
        },
    }


def _why_nothing_fits(outcome: SearchOutcome) -> tuple[str, str]:
    memory = next(rejection for rejection in outcome.rejections if rejection.wall == "memory")
    needed, available = format_bytes(memory.needed or 0), format_bytes(memory.available or 0)
    return (
        f"no plan fits: the nearest of {memory.count} ({memory.nearest_miss}) needs {needed} of {available}",
        "use more GPUs, allow recompute or lower precision, or loosen --fix",
    )
