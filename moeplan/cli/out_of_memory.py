"""A run that ran out of memory: what was predicted beside what it needed, and the nearest plan that fits."""

from pathlib import Path

from moeplan.errors import OutOfMemoryError, RunFailedError
from moeplan.files import toml_text, write_text_atomically
from moeplan.hwprofiles.schema import HardwareProfile
from moeplan.plan import Plan
from moeplan.planner.nearest import NearestFit, nearest_fit
from moeplan.results import Figures
from moeplan.simulator.predict import predict
from moeplan.simulator.stack import SoftwareStack
from moeplan.units import format_bytes, format_seconds


def explained(
    error: OutOfMemoryError, plan: Plan, profile: HardwareProfile, stack: SoftwareStack, out: Path
) -> RunFailedError:
    """The error with the prediction; the nearest plan that fits is written beside ``out``."""
    predicted = predict(plan, profile, stack)
    used_bytes = sum(error.memory_bytes.values())
    message = (
        f"{error.message}; predicted {format_bytes(predicted.peak_memory_bytes)} ({_categories(predicted)}) of the "
        f"{format_bytes(profile.memory_bytes.value)} of {profile.name}"
    )
    nearest = nearest_fit(plan, profile, stack, used_bytes=used_bytes)
    if nearest is None:
        return RunFailedError(message, "no plan of these ranks fits: search again with more GPUs, or another folding")
    path = out.with_name(f"{out.stem}-fits.toml")
    write_text_atomically(path, toml_text(nearest.plan))
    return RunFailedError(message, f"the nearest plan that fits is in {path}: {_what(nearest, predicted)}")


def _what(nearest: NearestFit, before: Figures) -> str:
    found = nearest.predicted
    slower = found.step_s / before.step_s - 1
    return (
        f"{', '.join(nearest.changes)}; predicted {format_bytes(found.peak_memory_bytes)} and "
        f"{format_seconds(found.step_s)} a step ({slower:+.1%})"
    )


def _categories(figures: Figures) -> str:
    """Categories of the pipeline rank that needs most."""
    sizes = {category: by_rank[figures.peak_rank] for category, by_rank in figures.memory_bytes.items()}
    return ", ".join(f"{category} {format_bytes(size)}" for category, size in sizes.items() if size)
