"""``moeplan export``: the same plan for other programs."""

from pathlib import Path

from moeplan.cli.inputs import load_plan
from moeplan.files import check_writable, read_toml, validate, write_text_atomically
from moeplan.hwprofiles.load import load_profile
from moeplan.planner.export import ExportJob, export
from moeplan.report.output import err_console, print_json
from moeplan.run_config import RunConfig


def run_export(path: Path, targets: str, run_config: Path | None, folder: Path, *, as_json: bool) -> None:
    """Write the files of every target into ``folder``; nothing is written where one of them cannot say the plan."""
    from moeplan.executor.check import check_supported

    plan = load_plan(path)
    run = validate(RunConfig, read_toml(run_config), str(run_config)) if run_config else RunConfig()
    job = ExportJob(plan, run, load_profile(plan.hardware))
    files: dict[str, str] = {}
    for target in (name.strip() for name in targets.split(",")):
        files |= export(job, target)
        if target == "slurm":
            check_supported(plan)
    for name in files:
        check_writable(folder / name)
    for name, text in files.items():
        write_text_atomically(folder / name, text)
    written = [str(folder / name) for name in files]
    if as_json:
        print_json({"plan_id": plan.plan_id, "files": written})
    else:
        err_console().print(f"wrote {', '.join(written)}")
