"""``moeplan models``, ``moeplan hardware`` and ``moeplan stacks``: list and show."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from moeplan.cli.stacks import list_stacks, show_stack
from moeplan.flops import training_flops_per_token
from moeplan.hwprofiles.load import load_profile, profile_names
from moeplan.model_spec import ModelSpec
from moeplan.parameters import active_parameters, total_parameters
from moeplan.presets import load_model, model_names
from moeplan.report.output import out_console, print_json
from moeplan.report.show import print_model, print_profile
from moeplan.report.tables import table, with_text_last
from moeplan.units import GFLOP, GIB, TFLOP, format_count

SHOWN_SEQ_LEN = 4096


def model_summary(model: ModelSpec) -> dict[str, Any]:
    """Figures of a model that lists and tables show."""
    return {
        "name": model.name,
        "total_parameters": total_parameters(model),
        "active_parameters": active_parameters(model),
        f"training_flops_per_token_at_{SHOWN_SEQ_LEN}": training_flops_per_token(model, SHOWN_SEQ_LEN),
        "source": model.source,
    }


def list_models(as_json: bool) -> None:
    """All presets."""
    summaries = [model_summary(load_model(name)) for name in model_names()]
    if as_json:
        print_json(summaries)
        return
    rows = [
        [
            summary["name"],
            format_count(summary["total_parameters"]),
            format_count(summary["active_parameters"]),
            f"{summary[f'training_flops_per_token_at_{SHOWN_SEQ_LEN}'] / GFLOP:.1f}",
        ]
        for summary in summaries
    ]
    out_console().print(table("Model presets", ["name", "parameters", "active", "GFLOP/token at 4096"], rows))


def show_model(name: str, as_json: bool) -> None:
    """One model."""
    model = load_model(name)
    if as_json:
        print_json(model_summary(model) | {"model": model.model_dump(mode="json")})
    else:
        print_model(model, model_summary(model))


def list_hardware(as_json: bool) -> None:
    """All profiles."""
    profiles = [load_profile(name) for name in profile_names()]
    if as_json:
        print_json([profile.model_dump(mode="json", exclude_none=True) for profile in profiles])
        return
    rows = [
        [
            profile.name,
            f"{profile.peak_flops_per_s['bf16'].value / TFLOP:.0f}" if "bf16" in profile.peak_flops_per_s else "-",
            f"{profile.memory_bytes.value / GIB:.1f}",
            f"{profile.scale_up_domain_gpus.value:.0f}",
            profile.description,
        ]
        for profile in profiles
    ]
    columns = ["name", "bf16 TFLOP/s", "usable GiB", "scale-up GPUs", "description"]
    out_console().print(with_text_last(table("Hardware profiles", columns, rows)))


def show_hardware(name: str, as_json: bool) -> None:
    """One profile, every number with its source."""
    profile = load_profile(name)
    if as_json:
        print_json(profile.model_dump(mode="json", exclude_none=True))
    else:
        print_profile(profile)


@dataclass(frozen=True, slots=True)
class Catalogue:
    """How one kind is listed, and one of it shown; the last argument asks for JSON."""

    list_all: Callable[[bool], None]
    show_one: Callable[[str, bool], None]


CATALOGUES = {
    "models": Catalogue(list_models, show_model),
    "hardware": Catalogue(list_hardware, show_hardware),
    "stacks": Catalogue(list_stacks, show_stack),
}
