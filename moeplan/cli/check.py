"""``moeplan check`` and the lock files of ``moeplan predict --lock``."""

from dataclasses import dataclass
from pathlib import Path

from moeplan import __version__
from moeplan.cli.inputs import load_machine
from moeplan.comparison import compare
from moeplan.errors import InvalidInputError, ToleranceError
from moeplan.files import write_text_atomically
from moeplan.lock import DEFAULT_TOLERANCES, Lock, LockEntry, lock_text, read_lock
from moeplan.plan import Plan
from moeplan.report.check import CheckedEntry, junit, markdown, print_check
from moeplan.report.output import err_console, print_json
from moeplan.results import Figures
from moeplan.simulator.predict import predict


@dataclass(frozen=True, slots=True)
class CheckOptions:
    """Options of the command. ``tolerance`` overrides that of every judged figure."""

    tolerance: float | None
    update: bool
    markdown: Path | None
    junit: Path | None
    as_json: bool


def record(plan: Plan, figures: Figures, path: Path) -> None:
    """Add or replace the figures of ``plan`` in the lock at ``path``, which need not exist yet."""
    lock = read_lock(path) if path.exists() else Lock()
    write_text_atomically(path, lock_text(lock.with_entry(LockEntry(plan=plan, recorded=figures))))


def run_check(path: Path, options: CheckOptions) -> None:
    """Recompute every entry. Raises ToleranceError naming the figures that moved too far, unless told to update."""
    lock = read_lock(path)
    if not lock.entries:
        raise InvalidInputError(f"{path}: entries: the lock is empty", "add one: moeplan predict PLAN --lock")
    now = [predict(entry.plan, *load_machine(entry.plan, "")) for entry in lock.entries]
    checked = [
        CheckedEntry(entry, compare(figures, entry.recorded, _tolerances(entry, options.tolerance)))
        for entry, figures in zip(lock.entries, now, strict=True)
    ]
    _write_reports(checked, options)
    if lock.moeplan_version != __version__:
        err_console().print(f"note: moeplan {lock.moeplan_version} recorded this lock, this is {__version__}")
    if options.update:
        for entry, figures in zip(lock.entries, now, strict=True):
            if entry.recorded.kind == "prediction":
                lock = lock.with_entry(entry.model_copy(update={"recorded": figures}))
        write_text_atomically(path, lock_text(lock))
        err_console().print(f"wrote {path}")
        return
    failures = [f"{one.title}: {figure.name}" for one in checked for figure in one.failures]
    if failures:
        raise ToleranceError(
            f"outside tolerance: {'; '.join(failures)}", "if the change is meant, record it: moeplan check --update"
        )


def _tolerances(entry: LockEntry, override: float | None) -> dict[str, float | None]:
    tolerances: dict[str, float | None] = dict(DEFAULT_TOLERANCES | entry.tolerances)
    return tolerances if override is None else dict.fromkeys(tolerances, override)


def _write_reports(checked: list[CheckedEntry], options: CheckOptions) -> None:
    if options.markdown is not None:
        write_text_atomically(options.markdown, markdown(checked))
    if options.junit is not None:
        write_text_atomically(options.junit, junit(checked))
    if options.as_json:
        print_json(
            [
                {"plan_id": one.entry.plan.plan_id, "comparison": one.comparison.model_dump(mode="json")}
                for one in checked
            ]
        )
    else:
        print_check(checked)
