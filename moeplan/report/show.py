"""What ``moeplan models show``, ``moeplan hardware show`` and ``moeplan calibrate`` print."""

from collections import Counter
from typing import Any

from moeplan.hwprofiles.entries import all_entries, assumed_entries
from moeplan.hwprofiles.schema import HardwareProfile
from moeplan.model_spec import ModelSpec
from moeplan.parameters import layer_parameters, mtp_extra_parameters
from moeplan.report.output import out_console
from moeplan.report.tables import table, with_text_last
from moeplan.units import format_count

COMPONENTS = ("attention", "linear_mixer", "norms", "dense_mlp", "router", "latent", "shared_expert", "experts")


def print_model(model: ModelSpec, summary: dict[str, Any]) -> None:
    """Sizes of a model, its parameters by component, and its totals."""
    console = out_console()
    kinds = Counter(model.layer_kinds)
    counts = ", ".join(f"{count} {kind.label}" for kind, count in sorted(kinds.items()))
    console.print(f"{model.name}: {model.num_layers} layers ({counts}), hidden {model.hidden_size}")
    rows = []
    for kind in sorted(kinds):
        layer = layer_parameters(model, kind)
        sizes = {part: getattr(layer, part) for part in COMPONENTS}
        rows += [[f"{kind.label} layer", part, format_count(size)] for part, size in sizes.items() if size]
    if model.num_mtp_layers:
        rows.append(["MTP", "projection and norms", format_count(mtp_extra_parameters(model))])
    console.print(table("Parameters of one layer", ["layer", "component", "parameters"], rows, left=2))
    for key, value in summary.items():
        console.print(f"{key}: {value if isinstance(value, str) else format_count(value)}")


def print_profile(profile: HardwareProfile, *, scalars_only: bool = False) -> None:
    """Every number of a profile with its unit, source kind, error bar and reference; then the assumed ones."""
    console = out_console()
    console.print(f"{profile.name}: {profile.description}")
    entries = [entry for entry in all_entries(profile) if entry.value is not None or not scalars_only]
    rows = [
        [entry.key_path, entry.summary, entry.unit, entry.source, f"{100 * entry.error_bar_frac:.0f} %", entry.ref]
        for entry in entries
    ]
    made = table("Figures", ["key", "value", "unit", "source", "+-", "reference"], rows, left=1)
    for index in (2, 3):
        made.columns[index].justify = "left"
    console.print(with_text_last(made))
    num_figures, num_assumed = len(all_entries(profile)), len(assumed_entries(profile))
    console.print(f"{num_figures} figures, {num_assumed} of them assumed by the rule their reference states")
