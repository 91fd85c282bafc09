"""``moeplan predict``."""

from dataclasses import asdict, dataclass
from pathlib import Path

from moeplan.cli.check import record
from moeplan.cli.inputs import load_machine, load_plan, load_stack_for
from moeplan.errors import InvalidInputError
from moeplan.files import validate, write_text_atomically
from moeplan.hwprofiles.load import load_profile
from moeplan.hwprofiles.schema import HardwareProfile
from moeplan.plan import Plan
from moeplan.planner.request import parse_pins
from moeplan.presets import load_model
from moeplan.report.output import print_json
from moeplan.report.prediction import print_memory_items, print_prediction
from moeplan.simulator.memory import MemoryItem, memory_items
from moeplan.simulator.predict import predict, timeline
from moeplan.simulator.stack import SoftwareStack
from moeplan.simulator.trace import trace_json
from moeplan.simulator.training_state import num_weight_copies


@dataclass(frozen=True, slots=True)
class PredictOptions:
    """Options of the command, as typed. Without ``plan``, the fields from ``model`` on make one."""

    plan: Path | None
    hardware: str
    model: str
    gpus: int
    seq_len: int
    global_batch_size: int
    stack: str
    fix: str
    trace: Path | None
    lock: Path | None
    rank: int | None
    as_json: bool


def run_predict(options: PredictOptions) -> None:
    """Predict one plan, print it, write a trace, record it."""
    plan = _plan_of(options.plan, options.hardware) if options.plan is not None else _typed_plan(options)
    profile, stack = load_machine(plan, "")
    predicted = predict(plan, profile, stack)
    if options.trace is not None:
        write_text_atomically(options.trace, trace_json(timeline(plan, profile, stack)))
    if options.lock is not None:
        record(plan, predicted, options.lock)
    items = _items(plan, profile, stack, options.rank)
    if options.as_json:
        document = {
            "plan_id": plan.plan_id,
            "plan": plan.model_dump(mode="json"),
            "predicted": predicted.model_dump(mode="json"),
        }
        print_json(document | ({"memory_items": [asdict(item) for item in items]} if items else {}))
        return
    print_prediction(plan, profile, predicted)
    if items:
        print_memory_items(items, options.rank)


def _items(plan: Plan, profile: HardwareProfile, stack: SoftwareStack, rank: int | None) -> list[MemoryItem]:
    """What one pipeline rank holds, tensor by tensor; nothing unless asked."""
    if rank is None:
        return []
    if rank >= plan.pp:
        raise InvalidInputError(f"--rank: got {rank}, allowed: 0 to {plan.pp - 1} (pp {plan.pp})", "ranks count from 0")
    copies = num_weight_copies(plan.point, profile)
    return memory_items(plan.model, plan.point, stack, rank, num_copies=copies)


def _plan_of(path: Path, hardware: str) -> Plan:
    """The plan of a file, on other hardware where asked: a lock must say what its figures are of."""
    plan = load_plan(path)
    return plan.replace(hardware=hardware, layout=plan.layout) if hardware else plan


def _typed_plan(options: PredictOptions) -> Plan:
    if not options.model or not options.hardware:
        raise InvalidInputError(
            "nothing to predict: got neither a plan file nor --model and --hardware",
            "moeplan predict plan.toml, or moeplan predict --model deepseek-v3 --hardware gb300 --gpus 256 --fix pp=4",
        )
    stack = load_stack_for(load_profile(options.hardware), options.stack)
    fields = {
        "model": load_model(options.model),
        "hardware": options.hardware,
        "num_gpus": options.gpus,
        "stack": stack.name,
        "seq_len": options.seq_len,
        "global_batch_size": options.global_batch_size,
    }
    return validate(Plan, fields | parse_pins(options.fix, "--fix"), "command line")
