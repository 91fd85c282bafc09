"""``moeplan calibrate``."""

from pathlib import Path

from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from moeplan.files import check_writable
from moeplan.hwprofiles.load import dump_profile
from moeplan.report.output import err_console, print_json
from moeplan.report.show import print_profile


def run_calibrate(processes: int, device: str, out: Path | None, as_json: bool) -> None:
    """Measure this machine with ``processes`` running at once and write the profile, by default under its name."""
    from moeplan.executor.microbench import calibrate

    check_writable(out or Path("profile.toml"))
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=err_console(), transient=True) as progress:
        task = progress.add_task("starting processes")
        profile = calibrate(processes, device=device, progress=lambda what: progress.update(task, description=what))
    out = out or Path(f"{profile.name}.toml")
    dump_profile(profile, out)
    if as_json:
        print_json(profile.model_dump(mode="json", exclude_none=True))
    else:
        print_profile(profile, scalars_only=True)
        err_console().print(f"profile written to {out}; use it with --hardware {out}")
