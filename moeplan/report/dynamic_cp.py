"""What ``moeplan explain --dynamic-cp`` prints."""

from collections.abc import Sequence

from moeplan.plan import Plan
from moeplan.planner.dynamic_cp import CpComparison, PackSchedule
from moeplan.report.output import out_console
from moeplan.report.tables import table
from moeplan.units import format_count, format_seconds


def print_cp_comparison(plan: Plan, lengths: Sequence[int], found: CpComparison, padding_waste_frac: float) -> None:
    """The batch, then both schedules side by side: step, throughput, waiting, and how many ranks share the tokens."""
    tokens, console = sum(lengths), out_console()
    console.print(
        f"{len(lengths)} documents of {min(lengths)} to {max(lengths)} tokens, mean {tokens / len(lengths):.0f}: "
        f"{format_count(tokens)} tokens; padding each to the longest would waste {padding_waste_frac:.0%} of the FLOPs"
    )
    console.print(
        f"{found.dynamic.num_ranks} data x context-parallel ranks of tp {plan.tp}, pp {plan.pp}; "
        f"at most {found.max_tokens_per_rank} tokens a rank"
    )
    columns = ["context parallelism", "step", "tok/s/GPU", "micro-batches", "waiting", "tokens by cp"]
    rows = [
        _row(f"static, cp {plan.cp}", found.static, tokens / plan.num_gpus),
        _row("dynamic", found.dynamic, tokens / plan.num_gpus),
    ]
    console.print(table("One batch under static and dynamic context parallelism", columns, rows))
    console.print(
        f"dynamic is {found.speed_up:.2f} x as fast; dynamic_cp = true with document_lengths makes a plan train so"
    )


def _row(name: str, schedule: PackSchedule, tokens_per_gpu: float) -> list[str]:
    sizes = schedule.tokens_by_size
    total = sum(sizes.values())
    return [
        name,
        format_seconds(schedule.step_s),
        f"{tokens_per_gpu / schedule.step_s:.0f}",
        str(len(schedule.micro_batches)),
        f"{100 * schedule.waiting_frac:.0f} %",
        ", ".join(f"{size}: {tokens / total:.0%}" for size, tokens in sizes.items()),
    ]
