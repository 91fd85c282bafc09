"""Names in tables of measured runs: stack, machine, precision, dispatcher, and other spellings of them.

Another spelling of a name is that name; a name that nobody knows is an error, never the nearest one.
"""

import re
from typing import get_args

from moeplan.files import short
from moeplan.hwprofiles.load import profile_names
from moeplan.hwprofiles.schema import DispatchBackend
from moeplan.planner.published_rows import CellError, PublishedRow
from moeplan.simulator.stack import stack_names
from moeplan.vocabulary import PRECISIONS, PrecisionName

# What vendors add to a machine's name without making it another one: NVIDIA H100 SXM5 80GB HBM3 is the h100.
MACHINE_WORDS = frozenset(["nvidia", "gpu", "hgx", "dgx", "sxm", "sxm5", "nvl72", "hbm3", "hbm3e"])
MEMORY_WORDS = {"h100": ("80gb",), "h200": ("141gb",), "b200": ("180gb", "192gb"), "b300": ("288gb",)}
# Names of Megatron-Bridge's recipes and of Transformer Engine.
PRECISION_WORDS: dict[str, PrecisionName] = {
    "bfloat16": "bf16",
    "bf16_mixed": "bf16",
    "fp8_cs": "fp8_current",
    "fp8_tensorwise": "fp8_current",
    "fp8_current_scaling": "fp8_current",
    "fp8_sc": "fp8_blockwise",
    "fp8_subchannel": "fp8_blockwise",
    "fp8_block": "fp8_blockwise",
    "fp8_ds": "fp8_delayed",
    "fp8_delayed_scaling": "fp8_delayed",
    "fp8_mx": "mxfp8",
    "fp8_mxfp8": "mxfp8",
    "fp4_nv": "nvfp4",
}
ROUTINGS = {"": "balanced", "forced-balance": "balanced", "balanced": "balanced", "natural": "natural"} | {
    "token-drop": "drop"
}
# Stacks of one year alone: attention was unfused then.
OF_THEIR_YEAR = frozenset({"megatron-lm-2022"})


def find_stack(written: str) -> str:
    """The stack of a table's name: itself, its release without the point release, or the last earlier release.

    A release before the first one runs as that. Raises CellError for an engine that moeplan has no stack of.
    """
    names, name = stack_names(), re.sub(r"[\s_]+v?", "-", written.lower())
    if name in names:
        return name
    match = re.fullmatch(r"(.+?)-v?(\d+(?:\.\d+)*)", name)
    engine, release = (match[1], _release(match[2])) if match else (name, ())
    releases = sorted(
        (_release(known.removeprefix(f"{engine}-")), known)
        for known in names
        if re.fullmatch(rf"{re.escape(engine)}-\d+(\.\d+)*", known)
    )
    fitting = [(known, at) for known, at in releases if at not in OF_THEIR_YEAR or known[:1] == release[:1]]
    if not fitting or not match:
        raise CellError("stack", f"no stack of {short(written)}, allowed: {', '.join(names)}")
    return ([at for known, at in fitting if known <= release] or [fitting[0][1]])[-1]


def stack_name(row: PublishedRow) -> str:
    """The stack of a row.

    A run noted as eager takes its engine's stack without compilation, one of adapters that of frozen weights, where
    there is one.
    """
    found = find_stack(row.text("stack"))
    engine, _, release = found.rpartition("-")
    kind = "lora" if row.text("task") == "lora" else "eager" if re.match(r"eager\b", row.text("notes")) else ""
    variant = f"{engine}-{kind}-{release}"
    return variant if variant in stack_names() else found


def _release(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split("."))


def hardware_name(row: PublishedRow) -> str:
    """The profile's name of the row's GPU. Raises CellError."""
    written = row.text("gpu")
    names, name = profile_names(), written.lower()
    if name in names:
        return name
    words = [word for word in re.findall(r"[a-z0-9]+", name) if word not in MACHINE_WORDS]
    for known in names:
        if words and words[0] == known and set(words[1:]) <= set(MEMORY_WORDS.get(known, ())):
            return known
    raise CellError("gpu", f"no hardware profile of {short(written)}, allowed: {', '.join(names)}")


def precision_name(row: PublishedRow) -> PrecisionName:
    """The precision of a row. Raises CellError."""
    written = row.text("precision")
    name = re.sub(r"[\s-]+", "_", written.lower())
    found = next((known for known in PRECISIONS if known == name), PRECISION_WORDS.get(name))
    if found is None:
        raise CellError("precision", f"got {short(written)}, allowed: {', '.join(PRECISIONS)}")
    return found


def backend_name(written: str) -> DispatchBackend | None:
    """The back end of a dispatcher, flex or not; None for an empty cell. Raises CellError."""
    if not written:
        return None
    name = re.sub(r"[\s_:-]+", "", written.lower()).removeprefix("flex")
    backends: tuple[DispatchBackend, ...] = get_args(DispatchBackend)
    for backend in backends:
        if name == backend:
            return backend
    raise CellError("dispatcher", f"got {short(written)}, allowed: {', '.join(backends)}")


def routing_name(written: str) -> str:
    """How tokens find experts. Raises CellError."""
    name = re.sub(r"[\s_-]+", "-", written.lower())
    for known, routing in ROUTINGS.items():
        if name == known or (known and name.startswith(known)):
            return routing
    raise CellError("routing", f"got {short(written)}, allowed: {', '.join(filter(None, ROUTINGS))}")


def parts_of(written: str) -> tuple[str, ...]:
    """The modules of a list written with ``+``, commas or spaces between them."""
    return tuple(re.findall(r"[^\s,+]+", written))
