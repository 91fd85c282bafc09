"""What ``moeplan search`` prints."""

from pathlib import Path

from rich.table import Table

from moeplan.planner.request import SearchRequest
from moeplan.planner.search import RankedPlan, SearchOutcome
from moeplan.report.output import out_console
from moeplan.report.prediction import mfu_text
from moeplan.report.tables import memory_table, table, time_table, with_text_last
from moeplan.results import Rejection
from moeplan.units import format_bytes, format_count, format_seconds

DEGREES = ("tp", "cp", "dp", "pp", "vp", "etp", "ep", "edp")


def print_outcome(request: SearchRequest, outcome: SearchOutcome, out: Path | None) -> None:
    """Ranked plans, the best one in detail, and why the rest was turned down."""
    console = out_console()
    tokens = request.global_batch_size * request.seq_len
    console.print(
        f"{request.model.name} on {request.num_gpus} x {request.profile.name}, stack {request.stack.name}: "
        f"{request.global_batch_size} sequences of {request.seq_len} = {format_count(tokens)} tokens a step"
    )
    profile_bytes, margin = format_bytes(request.profile.memory_bytes.value), 100 * request.memory_margin_frac
    console.print(f"memory wall: {profile_bytes} less a margin of {margin:g} %, {format_bytes(request.usable_bytes)}")
    if outcome.plans:
        console.print(_ranking(request, outcome))
        best = outcome.plans[0]
        plan = best.plan
        degrees = " x ".join(f"{name} {getattr(plan, name)}" for name in DEGREES if getattr(plan, name) > 1)
        console.print(f"Best plan {plan.plan_id}: {degrees or 'one GPU'}")
        console.print(
            f"layout {plan.layout}, {plan.num_micro_batches} micro-batches of {plan.mbs} on each of dp {plan.dp}"
        )
        console.print(mfu_text(best.predicted, plan.precision, request.profile))
        console.print(memory_table(best.predicted))
        console.print(time_table(best.predicted))
        for note in best.predicted.notes:
            console.print(f"note: {note}")
    if outcome.rejections:
        console.print(_rejections(outcome))
    counts = f"{outcome.num_points} candidates, {outcome.num_costed} costed, {outcome.seconds:.1f} s"
    console.print(f"{counts}, {'the whole space' if outcome.is_complete else 'cut by the time limit'}")
    if out is not None and outcome.plans:
        console.print(f"best plan written to {out}")


def _ranking(request: SearchRequest, outcome: SearchOutcome) -> Table:
    shown = [name for name in DEGREES if any(getattr(one.plan, name) > 1 for one in outcome.plans)] or ["tp"]
    columns = ["#", "plan", *shown, "mbs", "how", "step", "tok/s/GPU", "TFLOP/s/GPU", "+-", "memory", "used"]
    rows = []
    for index, ranked in enumerate(outcome.plans, start=1):
        degrees = [str(getattr(ranked.plan, name)) for name in shown]
        figures = _ranking_row(ranked, request.profile.memory_bytes.value)
        rows.append([str(index), ranked.plan.plan_id, *degrees, *figures])
    made = table("Plans, fastest first", columns, rows, left=0)
    made.columns[columns.index("how")].justify = "left"
    made.columns[columns.index("how")].no_wrap = False
    return made


def _ranking_row(ranked: RankedPlan, usable_bytes: float) -> list[str]:
    plan, predicted = ranked.plan, ranked.predicted
    dispatcher = plan.flex_backend if plan.dispatcher == "flex" else plan.dispatcher
    how = [
        plan.precision,
        *([dispatcher] if plan.model.moe else []),
        *(["recompute " + " ".join(plan.recompute)] if plan.recompute else []),
    ]
    if plan.cp_comm != "p2p":
        how.append(f"cp by {plan.cp_comm}" + (f" ({plan.cp_a2a_size} inside)" if plan.cp_a2a_size > 1 else ""))
    return [
        str(plan.mbs),
        ", ".join(how),
        format_seconds(predicted.step_s),
        f"{predicted.tokens_per_s_per_gpu:.0f}",
        f"{predicted.model_tflops_per_gpu:.4g}",
        f"{100 * predicted.error_bar_frac:.0f} %",
        format_bytes(predicted.peak_memory_bytes),
        f"{100 * predicted.peak_memory_bytes / usable_bytes:.0f} %",
    ]


def _rejections(outcome: SearchOutcome) -> Table:
    rows = [[rejection.wall, str(rejection.count), _nearest(rejection)] for rejection in outcome.rejections]
    return with_text_last(table("Turned down", ["wall", "plans", "nearest miss, or the rule"], rows))


def _nearest(rejection: Rejection) -> str:
    if rejection.needed is None or rejection.available is None:
        return rejection.nearest_miss
    needed, available = format_bytes(rejection.needed), format_bytes(rejection.available)
    return f"{rejection.nearest_miss}: needs {needed} of {available}"
