"""Reading and writing hardware profiles: presets by name, users' files by path, inheritance by ``base``."""

from pathlib import Path
from typing import Any

import tomli_w

from moeplan.errors import InvalidInputError, nearest_names
from moeplan.files import read_toml, validate, write_text_atomically
from moeplan.hwprofiles.links import scale_inherited
from moeplan.hwprofiles.schema import HardwareProfile

_FOLDER = Path(__file__).resolve().parent

# What makes two entries of a list table the same one: a child's entry replaces its base's entry of equal identity.
_IDENTITY: dict[str, tuple[str, ...]] = {
    "gemm": ("dtype",),
    "grouped_gemm": ("dtype", "backend", "phase", "num_experts", "hidden_size", "expert_ffn_size"),
    "attention": ("dtype", "phase", "qk_head_dim", "v_head_dim"),
    "collectives": ("collective", "tier", "num_ranks"),
    "dispatch": ("backend", "tier"),
}


def profile_names() -> tuple[str, ...]:
    """Names of the presets, sorted."""
    return tuple(sorted(path.stem for path in _FOLDER.glob("*.toml")))


def load_profile(name_or_path: str) -> HardwareProfile:
    """The profile of a preset name, or of a TOML file (anything that ends in .toml or holds a slash).

    A file may say ``base = "h100"`` (a preset, or a path seen from the file) and give only what differs. A number is
    replaced whole, with its source; ``peak_flops_per_s`` merges by dtype; an entry of a list table replaces the base's
    entry of the same identity and the others stay, scaled where the child changes the link of their tier.

    Raises InvalidInputError for an unknown name, a missing or malformed file, a circle of bases, and anything the
    schema refuses (a number without a source, above all).
    """
    path = _find(name_or_path, Path())
    return validate(HardwareProfile, _read_merged(path, ()), str(name_or_path))


def dump_profile(profile: HardwareProfile, path: Path) -> None:
    """Write the profile as TOML, whole or not at all; :func:`load_profile` gives an equal one back."""
    table = profile.model_dump(mode="json", exclude_none=True)
    write_text_atomically(path, tomli_w.dumps(table))


def _find(name_or_path: str, folder: Path) -> Path:
    """The file of a preset name or of a path seen from ``folder``."""
    if name_or_path.endswith(".toml") or "/" in name_or_path:
        return folder / Path(name_or_path).expanduser()
    if name_or_path not in profile_names():
        raise InvalidInputError(
            f"unknown hardware {name_or_path!r}: neither a preset nor a path to a .toml file",
            nearest_names(name_or_path, profile_names()),
        )
    return _FOLDER / f"{name_or_path}.toml"


def _read_merged(path: Path, children: tuple[Path, ...]) -> dict[str, Any]:
    """The table of a file laid over those of its bases."""
    if path.resolve() in children:
        raise InvalidInputError(f"{path}: its base leads back to the file itself", "name a preset as base")
    table = read_toml(path)
    _refuse_duplicates(table, path)
    base = table.pop("base", None)
    if base is None:
        return table
    if not isinstance(base, str):
        raise InvalidInputError(f"{path}: base: must be a preset name or a path, got {base!r}", 'write base = "h100"')
    base_table = _read_merged(_find(base, path.parent), (*children, path.resolve()))
    return _merge(base_table, {"name": path.stem, **table})


def _merge(base: dict[str, Any], child: dict[str, Any]) -> dict[str, Any]:
    merged = {**base, **child}
    if _is_table(base.get("peak_flops_per_s")) and _is_table(child.get("peak_flops_per_s")):
        merged["peak_flops_per_s"] = {**base["peak_flops_per_s"], **child["peak_flops_per_s"]}
    for field in _IDENTITY:
        if _is_list_of_tables(base.get(field)) and _is_list_of_tables(child.get(field)):
            entries = {_identity(field, entry): entry for entry in [*base[field], *child[field]]}
            merged[field] = list(entries.values())
    scale_inherited(base, child, merged)
    return merged


def _refuse_duplicates(table: dict[str, Any], path: Path) -> None:
    for field, keys in _IDENTITY.items():
        seen: set[tuple[str, ...]] = set()
        for entry in table[field] if _is_list_of_tables(table.get(field)) else ():
            identity = _identity(field, entry)
            if identity in seen:
                named = ", ".join(f"{key} = {entry[key]!r}" for key in keys if key in entry)
                raise InvalidInputError(f"{path}: {field}: two entries with {named}", "keep one of them")
            seen.add(identity)


def _identity(field: str, entry: dict[str, Any]) -> tuple[str, ...]:
    return tuple(repr(entry.get(key)) for key in _IDENTITY[field])


def _is_table(value: object) -> bool:
    return isinstance(value, dict)


def _is_list_of_tables(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(entry, dict) for entry in value)
