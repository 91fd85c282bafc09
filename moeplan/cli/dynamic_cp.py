"""``moeplan explain --dynamic-cp``."""

from pathlib import Path
from typing import Any

from moeplan.cli.inputs import load_machine, load_plan
from moeplan.errors import InvalidInputError
from moeplan.files import read_text, short
from moeplan.packing import padding_waste_frac
from moeplan.planner.dynamic_cp import CpComparison, PackSchedule, compare_cp
from moeplan.report.dynamic_cp import print_cp_comparison
from moeplan.report.output import print_json

MAX_DIGITS = 18  # of a length; what is longer is no number of tokens


def run_dynamic_cp(
    path: Path, lengths_file: Path, hardware: str, max_tokens_per_rank: int | None, *, as_json: bool
) -> None:
    """Print what a context-parallel size for each pack would save on one batch of documents."""
    plan = load_plan(path)
    profile, stack = load_machine(plan, hardware)
    lengths = read_lengths(lengths_file)
    found = compare_cp(plan, lengths, profile, stack, max_tokens_per_rank=max_tokens_per_rank)
    waste_frac = padding_waste_frac(plan.model, lengths)
    if as_json:
        print_json({"plan_id": plan.plan_id, "padding_waste_frac": waste_frac} | _as_json(found))
        return
    print_cp_comparison(plan, lengths, found, waste_frac)


def read_lengths(path: Path) -> list[int]:
    """Token counts of documents, one a line; empty lines do not count. Raises InvalidInputError with the line."""
    found = []
    for number, line in enumerate(read_text(path).splitlines(), start=1):
        written = line.strip()
        if not written:
            continue
        if not written.isdecimal() or len(written) > MAX_DIGITS or int(written) == 0:
            raise InvalidInputError(
                f"{path}, line {number}: got {short(written)}, allowed: a number of tokens, 1 or more",
                "one length a line",
            )
        found.append(int(written))
    if not found:
        raise InvalidInputError(f"{path}: got no document length, allowed: one or more", "one length a line")
    return found


def _as_json(found: CpComparison) -> dict[str, Any]:
    return {
        "speed_up": found.speed_up,
        "max_tokens_per_rank": found.max_tokens_per_rank,
        "static": _schedule(found.static),
        "dynamic": _schedule(found.dynamic),
    }


def _schedule(schedule: PackSchedule) -> dict[str, Any]:
    return {
        "step_s": schedule.step_s,
        "waiting_frac": schedule.waiting_frac,
        "num_micro_batches": len(schedule.micro_batches),
        "tokens_by_cp": {str(size): tokens for size, tokens in schedule.tokens_by_size.items()},
        "micro_batches": [
            [{"cp": pack.num_ranks, "lengths": list(pack.lengths), "seconds": pack.cost} for pack in one.packs]
            for one in schedule.micro_batches
        ],
    }
