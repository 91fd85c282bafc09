"""The import table: what each folder may import, read from the source without running it."""

import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("executor", "hwprofiles", "kernels", "planner", "simulator")
BUILDS_ON_TORCH = frozenset({"torch", "triton", "transformer_engine", "transformer_engine_torch", "megatron"})


@dataclass(frozen=True)
class Rule:
    """``ours`` are the parts of moeplan a folder may import, ``others`` the distributions beside the stdlib."""

    ours: frozenset[str]
    others: frozenset[str]
    # Allowed, but only inside a function body.
    inside_functions: frozenset[str] = field(default=frozenset())


def _rule(ours: str, others: str = "", inside_functions: str = "") -> Rule:
    return Rule(frozenset(ours.split()), frozenset(others.split()), frozenset(inside_functions.split()))


_FRONT = Rule(
    ours=frozenset({"vocabulary", "cli", "report", "hwprofiles", "simulator", "planner"}),
    others=frozenset({"pydantic", "numpy", "scipy", "networkx", "simpy", "typer", "rich", "tomli_w"}),
    inside_functions=frozenset({"executor", "kernels", "tokenizers"}) | BUILDS_ON_TORCH,
)
# Pydantic and the TOML writer go with the vocabulary: whoever shares its types may define and write more of them.
RULES = {
    "vocabulary": _rule("vocabulary", "pydantic tomli_w"),
    "cli": _FRONT,
    "report": _FRONT,
    "hwprofiles": _rule("vocabulary hwprofiles", "pydantic tomli_w"),
    "simulator": _rule("vocabulary hwprofiles simulator", "pydantic numpy scipy networkx simpy"),
    "planner": _rule("vocabulary hwprofiles simulator planner", "pydantic numpy scipy tomli_w"),
    "kernels": _rule(
        "units kernels", "torch triton transformer_engine transformer_engine_torch", "fla flash_attn mamba_ssm quack"
    ),
    "executor": _rule(
        "vocabulary hwprofiles kernels executor",
        "pydantic numpy torch safetensors transformer_engine transformer_engine_torch megatron deep_ep",
    ),
}


def _files() -> dict[str, list[Path]]:
    """Source files by part; ``python -m moeplan`` belongs to the command line."""
    vocabulary = [path for path in (ROOT / "moeplan").glob("*.py") if path.name != "__main__.py"]
    front = {part: sorted((ROOT / "moeplan" / part).rglob("*.py")) for part in ("cli", "report")}
    front["cli"].append(ROOT / "moeplan" / "__main__.py")
    return {
        "vocabulary": sorted(vocabulary),
        **front,
        **{part: sorted((ROOT / part).rglob("*.py")) for part in FOLDERS},
    }


def _names(node: ast.AST) -> list[str]:
    """Full names that one import statement, or importlib.import_module("..."), names."""
    match node:
        case ast.Import(names=aliases):
            return [alias.name for alias in aliases]
        case ast.ImportFrom(module=module, names=aliases, level=level):
            if level:
                return [f"{'.' * level}{module or ''}"]
            return [f"{module}.{alias.name}" for alias in aliases]
        case ast.Call(
            func=ast.Attribute(attr="import_module") | ast.Name(id="import_module" | "__import__"),
            args=[ast.Constant(value=str(name)), *_],
        ):
            return [name]
    return []


def _imports(node: ast.AST, *, inside: bool = False) -> Iterator[tuple[int, str, bool]]:
    """Line, full name and whether a function body holds it, for each import below ``node``."""
    for child in ast.iter_child_nodes(node):
        for name in _names(child):
            yield getattr(child, "lineno", 0), name, inside
        yield from _imports(
            child, inside=inside or isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        )


def _part(name: str) -> str:
    """Which row of the table a name of ours belongs to: its folder, ``units``, or the vocabulary."""
    second = name.split(".")[1] if "." in name else ""
    return second if second in (*FOLDERS, "cli", "report", "units") else "vocabulary"


def violations(source: str, rule: Rule) -> list[str]:
    """What ``source`` imports against ``rule``: one line each, with the line number."""
    found = []
    for line, name, inside in _imports(ast.parse(source)):
        top = name.split(".")[0]
        if name.startswith("."):
            found.append(f"{line}: relative import {name}; write moeplan.x in full")
        elif top in FOLDERS:
            found.append(f"{line}: import moeplan.{top} instead of {top}")
        elif top in sys.stdlib_module_names:
            continue
        else:
            part = _part(name) if top == "moeplan" else top
            allowed = rule.ours if top == "moeplan" else rule.others
            if part == "units" and "vocabulary" in allowed:
                continue
            if part not in allowed and not (inside and part in rule.inside_functions):
                found.append(f"{line}: may not import {name} {'here' if inside else 'at module level'}")
    return found


@pytest.mark.parametrize("part", RULES)
def test_every_file_keeps_to_its_row(part: str) -> None:
    found = [
        f"{path.relative_to(ROOT)}:{violation}"
        for path in _files()[part]
        for violation in violations(path.read_text(encoding="utf-8"), RULES[part])
    ]
    assert not found, "\n".join(found)


def test_every_source_file_has_a_row() -> None:
    covered = {path for paths in _files().values() for path in paths}
    tops = [ROOT / "moeplan", *(ROOT / folder for folder in FOLDERS)]
    # A glob pattern with ** does not follow the links, so each file is seen under its real name only.
    assert {path for top in tops for path in top.glob("**/*.py")} == covered


@pytest.mark.parametrize(
    "part,source",
    [
        ("vocabulary", "import numpy"),
        ("vocabulary", "def f():\n    import torch"),
        ("vocabulary", "from moeplan import planner"),
        ("hwprofiles", "from moeplan.simulator.costs import cost"),
        ("simulator", "if TYPE_CHECKING:\n    from moeplan.executor.mesh import Mesh"),
        ("planner", "import torch.nn"),
        ("planner", "from importlib import import_module\nimport_module('moeplan.executor.mesh')"),
        ("kernels", "from moeplan.errors import InvalidInputError"),
        ("executor", "import moeplan.simulator.costs"),
        ("executor", "from . import mesh"),
        ("executor", "from executor import mesh"),
        ("cli", "import torch"),
        ("cli", "class A:\n    from moeplan.executor import mesh"),
        ("report", "import pandas"),
    ],
)
def test_what_the_table_forbids_is_found(part: str, source: str) -> None:
    assert len(violations(source, RULES[part])) == 1


@pytest.mark.parametrize(
    "part,source",
    [
        ("vocabulary", "import json\nfrom pydantic import BaseModel\nfrom moeplan.units import GIB"),
        ("kernels", "import torch\nfrom moeplan.units import GIB\nfrom moeplan.kernels.permute import permute"),
        ("cli", "def run():\n    import torch\n    from moeplan.executor.mesh import Mesh"),
        ("executor", "from moeplan import errors, kernels"),
    ],
)
def test_what_the_table_allows_passes(part: str, source: str) -> None:
    assert violations(source, RULES[part]) == []
