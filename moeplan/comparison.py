"""Predicted beside measured."""

from collections.abc import Iterator, Mapping

from moeplan.results import ComparedFigure, Comparison, Figures
from moeplan.vocabulary import MEMORY_CATEGORIES, OP_FAMILIES, OpFamily

HEADLINES = (
    ("step_s", "s"),
    ("tokens_per_s_per_gpu", "tokens/s"),
    ("model_tflops_per_gpu", "TFLOP/s"),
    ("peak_memory_bytes", "bytes"),
)


def compare(predicted: Figures, measured: Figures, tolerances: Mapping[str, float | None]) -> Comparison:
    """Headline figures, memory by category (worst pipeline rank) and time by op family.

    ``tolerances`` maps a figure's name to the largest allowed |predicted / measured - 1|; figures without are reported.
    """
    rows: list[tuple[str, str, float, float]] = [
        (name, unit, getattr(predicted, name), getattr(measured, name)) for name, unit in HEADLINES
    ]
    rows += [(name, "bytes", expected, found) for name, expected, found in _memory_rows(predicted, measured)]
    for family in OP_FAMILIES:
        expected_s, found_s = _family_s(predicted, family), _family_s(measured, family)
        if expected_s or found_s:
            rows.append((f"time.{family}", "s", expected_s, found_s))
    figures = tuple(
        ComparedFigure(
            name=name,
            unit=unit,
            predicted=expected,
            measured=found,
            error_frac=expected / found - 1 if found else None,
            tolerance_frac=tolerances.get(name),
        )
        for name, unit, expected, found in rows
    )
    return Comparison(plan_id=measured.plan_id, figures=figures)


def _memory_rows(predicted: Figures, measured: Figures) -> Iterator[tuple[str, float, float]]:
    """Categories on the worst pipeline rank; those not measured apart stand in the measured activations."""
    apart = [category for category in MEMORY_CATEGORIES if category in measured.memory_bytes]
    within = [category for category in MEMORY_CATEGORIES if category not in apart]
    for category in apart:
        merged = [category, *(within if category == "activations" else [])]
        columns = zip(*(predicted.memory_bytes[one] for one in merged if one in predicted.memory_bytes), strict=True)
        yield f"memory.{'+'.join(merged)}", max(map(sum, columns), default=0.0), max(measured.memory_bytes[category])


def _family_s(figures: Figures, family: OpFamily) -> float:
    return figures.time_s[family].total_s if family in figures.time_s else 0.0
