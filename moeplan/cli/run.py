"""``moeplan run``: the one place where prediction and measurement meet."""

import math
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moeplan.cli.inputs import load_machine, load_plan
from moeplan.cli.out_of_memory import explained
from moeplan.comparison import compare
from moeplan.errors import InvalidInputError, OutOfMemoryError, ToleranceError
from moeplan.files import read_json, read_toml, toml_text, validate, write_text_atomically
from moeplan.flops import training_flops_per_token
from moeplan.plan import Plan
from moeplan.report.comparison import print_comparison
from moeplan.report.output import err_console, print_json
from moeplan.report.prediction import print_prediction
from moeplan.results import Figures
from moeplan.run_config import RunConfig
from moeplan.simulator.predict import predict
from moeplan.units import format_bytes, format_seconds


@dataclass(frozen=True, slots=True)
class RunOptions:
    """Options of the command. ``settings`` go into RunConfig where given, over those of the file ``run_config``.

    ``hosts``: how many, where they meet (host:port), and the name they meet under.
    """

    settings: dict[str, Any]
    run_config: Path | None
    tolerances: dict[str, float | None]
    processes: int | None
    hosts: tuple[int, str, str]
    hardware: str
    out: Path
    dry_run: bool
    as_json: bool


def run_plan(path: Path, options: RunOptions) -> None:
    """Predict, train, compare. Raises ToleranceError where a judged figure is off by more than allowed."""
    plan = load_plan(path)
    profile, stack = load_machine(plan, options.hardware)
    if stack.name != "native":
        raise InvalidInputError(
            f"{path}: stack: got {stack.name!r}, allowed: native", "search again with --stack native to train here"
        )
    run_config = _run_config(options)
    predicted = predict(plan, profile, stack)
    if options.dry_run:
        _check(plan, run_config, options)
        if options.as_json:
            print_json({"plan_id": plan.plan_id, "predicted": predicted.model_dump(mode="json")})
        else:
            print_prediction(plan, profile, predicted)
        return
    try:
        measured = _train(plan, run_config, options)
    except OutOfMemoryError as error:
        raise explained(error, plan, profile, stack, options.out) from None
    if measured is None:
        return
    comparison = compare(predicted, measured, options.tolerances)
    if options.as_json:
        print_json(
            {
                "plan_id": plan.plan_id,
                "predicted": predicted.model_dump(mode="json"),
                "measured": measured.model_dump(mode="json"),
                "comparison": comparison.model_dump(mode="json"),
            }
        )
    else:
        print_comparison(comparison, measured)
    if not comparison.within_tolerance:
        off = ", ".join(figure.name for figure in comparison.figures if not figure.within)
        raise ToleranceError(
            f"prediction outside tolerance: {off}", "calibrate again on a quiet machine, or see the table"
        )


def _run_config(options: RunOptions) -> RunConfig:
    """Settings of the file, then those of the command line: a flag that is not given is None, False or empty."""
    read = read_toml(options.run_config) if options.run_config else {}
    if options.run_config:
        validate(RunConfig, read, str(options.run_config))
    given = {
        key: value for key, value in options.settings.items() if not (value is None or value is False or value == "")
    }
    return validate(RunConfig, read | given, "command line")


def _check(plan: Plan, run_config: RunConfig, options: RunOptions) -> None:
    """Raise InvalidInputError for what can be known to fail before anything starts."""
    from moeplan.executor.launch import Rendezvous, check_launch

    num_processes = options.processes or plan.num_gpus
    check_launch(plan, run_config, num_processes, options.out, Rendezvous.of(*options.hosts))


def _train(plan: Plan, run_config: RunConfig, options: RunOptions) -> Figures | None:
    """What was measured; None on a host without rank 0."""
    from moeplan.executor.launch import Rendezvous, launch

    _check(plan, run_config, options)
    rendezvous = Rendezvous.of(*options.hosts)
    num_processes = options.processes or plan.num_gpus
    log = err_console()
    log.print(
        f"training {plan.model.name} on {plan.num_gpus} processes: {run_config.steps} steps of {plan.tokens_per_step} "
        f"tokens, {_flops(plan)} a step"
    )
    with tempfile.TemporaryDirectory(prefix="moeplan-") as folder:
        plan_file, run_file = Path(folder) / "plan.toml", Path(folder) / "run.toml"
        write_text_atomically(plan_file, toml_text(plan))
        write_text_atomically(run_file, toml_text(run_config))
        if not launch(plan_file, run_file, options.out, num_processes, rendezvous=rendezvous):
            log.print(
                "the ranks of this host have ended; the host of rank 0 has the measurement, where steps were left"
            )
            return None
    measured = validate(Figures, read_json(options.out), str(options.out))
    first, last = measured.losses[0], measured.losses[-1]
    log.print(
        f"loss {first:.3f} -> {last:.3f} (a uniform guess is {math.log(plan.model.vocab_size):.3f}), "
        f"step {format_seconds(measured.step_s)}, peak memory {format_bytes(measured.peak_memory_bytes)}; "
        f"wrote {options.out}"
    )
    return measured


def _flops(plan: Plan) -> str:
    flops = training_flops_per_token(plan.model, plan.seq_len, plan.flop_lengths) * plan.tokens_per_step
    return f"{flops / 1e9:.3g} model GFLOP"
