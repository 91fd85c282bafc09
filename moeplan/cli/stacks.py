"""``moeplan stacks``: list and show, every figure with its source."""

from collections.abc import Iterator

from moeplan.hwprofiles.schema import Sourced
from moeplan.record import Record
from moeplan.report.output import out_console, print_json
from moeplan.report.tables import table, with_text_last
from moeplan.simulator.stack import load_stack, stack_names


def list_stacks(as_json: bool) -> None:
    """All stacks."""
    stacks = [load_stack(name) for name in stack_names()]
    if as_json:
        print_json([stack.model_dump(mode="json", exclude_none=True) for stack in stacks])
        return
    rows = [[stack.name, ", ".join(stack.precisions), stack.description] for stack in stacks]
    made = table("Software stacks", ["name", "precisions", "description"], rows, left=2)
    out_console().print(with_text_last(made))


def show_stack(name: str, as_json: bool) -> None:
    """One stack: what it executes, and its figures."""
    stack = load_stack(name)
    if as_json:
        print_json(stack.model_dump(mode="json", exclude_none=True))
        return
    console = out_console()
    console.print(f"{stack.name}: {stack.description}")
    console.print(f"source: {stack.source}")
    for what, values in (
        ("precisions", stack.precisions),
        ("dispatchers", (*stack.dispatchers, *stack.optional_dispatchers)),
        ("recompute", stack.recompute),
        ("further settings", stack.features),
    ):
        console.print(f"{what}: {', '.join(values) or 'none'}")
    rows = [
        [key, f"{figure.value:g}", figure.source, f"{100 * figure.error_bar_frac:.0f} %", f"{meaning} ({figure.ref})"]
        for key, figure, meaning in figures_of(stack)
    ]
    columns = ["key", "value", "source", "+-", "meaning (reference)"]
    console.print(with_text_last(table("Figures", columns, rows)))


def figures_of(record: Record, prefix: str = "") -> Iterator[tuple[str, Sourced, str]]:
    """Key path, figure and meaning of every number of a stack, in the order of the schema."""
    for name, field in type(record).model_fields.items():
        value = getattr(record, name)
        meaning = field.description or ""
        if isinstance(value, Sourced):
            yield f"{prefix}{name}", value, meaning
        elif isinstance(value, dict):
            yield from (
                (f"{prefix}{name}.{key}", one, meaning) for key, one in value.items() if isinstance(one, Sourced)
            )
        elif isinstance(value, Record):
            yield from figures_of(value, f"{prefix}{name}.")
