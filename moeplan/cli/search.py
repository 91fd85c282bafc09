"""``moeplan search``."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from moeplan.cli.inputs import load_stack_for
from moeplan.cli.quantities import parse_sizes
from moeplan.cli.sizing import (
    JobOptions,
    bill_json,
    cluster_json,
    cluster_of,
    raise_unless_one_will_do,
    ranked,
    read_job,
    why_nothing_fits,
)
from moeplan.errors import InfeasibleError, InvalidInputError
from moeplan.files import check_writable, toml_text, write_text_atomically
from moeplan.hwprofiles.load import load_profile
from moeplan.planner.request import MEMORY_MARGIN_FRAC, SearchRequest, parse_forbidden, parse_pins
from moeplan.planner.search import RankedPlan, SearchOutcome, search
from moeplan.planner.sizing import Cluster, Job, mfu_frac
from moeplan.presets import load_model
from moeplan.report.output import err_console, out_console, print_json
from moeplan.report.search import print_outcome
from moeplan.report.sizing import print_bill, print_clusters


@dataclass(frozen=True, slots=True)
class SearchOptions:
    """Options of the command, as typed."""

    model: str
    hardware: str
    gpus: str
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
    job: JobOptions = field(default_factory=JobOptions)


def run_search(options: SearchOptions) -> None:
    """Search, print, write the best plan. Raises InfeasibleError where nothing fits, or no cluster keeps the limits."""
    names = tuple(dict.fromkeys(name.strip() for name in options.hardware.split(",")))
    sizes = parse_sizes(options.gpus, "--gpus")
    job = read_job(options.job, names)
    if options.out is not None:
        check_writable(options.out)
    requests = [_request(options, name, size) for name in names for size in sizes]
    if len(requests) > 1:
        _search_clusters(requests, job, options)
        return
    (request,) = requests
    outcome = _search_with_progress(request)
    cluster = cluster_of(request, outcome, job)
    if outcome.plans:
        _write(options.out, outcome.plans[0])
    if options.as_json:
        print_json(outcome_json(outcome, request) | ({"bill": bill_json(cluster.bill)} if job is not None else {}))
    else:
        print_outcome(request, outcome, options.out)
        if job is not None and cluster.bill is not None:
            error_bar_frac = outcome.plans[0].predicted.error_bar_frac
            print_bill(request.hardware, cluster.bill, job, error_bar_frac, cluster.problem)
    if not outcome.plans:
        raise InfeasibleError(*why_nothing_fits(outcome))
    raise_unless_one_will_do([cluster])


def _search_clusters(requests: Sequence[SearchRequest], job: Job | None, options: SearchOptions) -> None:
    """The fastest plan of every kind and number of GPUs, compared."""
    found = []
    for request in requests:
        try:
            found.append(cluster_of(request, _search_with_progress(replace(request, top_k=1)), job))
        except InvalidInputError as error:  # nothing legal there; other sizes may do
            found.append(Cluster(request.hardware, request.num_gpus, request.profile, None, problem=error.message))
    clusters = ranked(found)
    best = clusters[0].outcome.plans[0] if not clusters[0].problem and clusters[0].outcome else None
    if best is not None:
        _write(options.out, best)
    if options.as_json:
        print_json({"clusters": [cluster_json(one) for one in clusters]})
    else:
        print_clusters(clusters, job)
        if best is not None and options.out is not None:
            out_console().print(f"plan of the first cluster written to {options.out}")
    raise_unless_one_will_do(clusters)


def _write(path: Path | None, best: RankedPlan) -> None:
    if path is not None:
        header = f"# plan {best.plan.plan_id}, predicted step {best.predicted.step_s:.4g} s\n"
        write_text_atomically(path, header + toml_text(best.plan))


def _request(options: SearchOptions, hardware: str, num_gpus: int) -> SearchRequest:
    profile = load_profile(hardware)
    return SearchRequest(
        model=load_model(options.model),
        hardware=hardware,
        profile=profile,
        stack=load_stack_for(profile, options.stack),
        num_gpus=num_gpus,
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
    console = err_console()
    where = f"{request.num_gpus} x {request.profile.name}"
    # Where nobody watches, a bar would only leave an empty line.
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(f"searching {where}")

        def show(done: str) -> None:
            progress.update(task, description=f"searching {where}: {done}")

        return search(request, show)


def outcome_json(outcome: SearchOutcome, request: SearchRequest) -> dict[str, Any]:
    """The JSON that callers may rely on: plans best first, rejections, space."""
    return {
        "plans": [
            {
                "plan_id": ranked.plan.plan_id,
                "plan": ranked.plan.model_dump(mode="json"),
                "predicted": ranked.predicted.model_dump(mode="json"),
                "mfu_frac": mfu_frac(ranked.predicted, ranked.plan.precision, request.profile),
            }
            for ranked in outcome.plans
        ],
        "rejections": [rejection.model_dump(mode="json") for rejection in outcome.rejections],
        "reliefs": [{"fix": one.pins, "needed_bytes": one.needed_bytes} for one in outcome.reliefs],
        "space": {
            "points": outcome.num_points,
            "costed": outcome.num_costed,
            "seconds": outcome.seconds,
            "proven": outcome.is_complete,
        },
    }
