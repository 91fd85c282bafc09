"""The package as it is installed: what the wheel holds, what the links point at, and how fast the command starts."""

import os
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("executor", "hwprofiles", "kernels", "planner", "simulator")
DATA_SUFFIXES = (".toml", ".json")
HELP_LIMIT_S = 0.4


@pytest.fixture(scope="module")
def project() -> dict[str, Any]:
    """The tables of pyproject.toml."""
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def _package_folders() -> dict[str, Path]:
    """Package name to folder, for every folder of ours with Python or data files, links not followed."""
    tops = {"moeplan": ROOT / "moeplan"} | {f"moeplan.{folder}": ROOT / folder for folder in FOLDERS}
    found = {}
    for name, top in tops.items():
        for path in top.glob("**/*"):
            if path.suffix in (".py", *DATA_SUFFIXES) and "__pycache__" not in path.parts:
                found[".".join((name, *path.parent.relative_to(top).parts))] = path.parent
    return found


def _run(*args: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    environment = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "PYTHONSTARTUP")}
    return subprocess.run(
        [sys.executable, *args], cwd=cwd, env=environment, capture_output=True, text=True, check=False, timeout=120
    )


def test_listed_packages_are_the_folders_that_hold_code_or_data(project: dict[str, Any]) -> None:
    assert sorted(_package_folders()) == project["tool"]["setuptools"]["packages"]


def test_package_dir_names_the_real_folders(project: dict[str, Any]) -> None:
    expected = {"moeplan": "moeplan"} | {f"moeplan.{folder}": folder for folder in FOLDERS}
    assert project["tool"]["setuptools"]["package-dir"] == expected


def test_each_base_dependency_is_imported(project: dict[str, Any]) -> None:
    distributions = {line.split(">=")[0].replace("-", "_") for line in project["project"]["dependencies"]}
    sources = [
        path.read_text(encoding="utf-8") for folder in _package_folders().values() for path in folder.glob("*.py")
    ]
    unused = {
        name
        for name in distributions
        if not any(f"import {name}" in text or f"from {name}" in text for text in sources)
    }
    assert not unused


@pytest.mark.parametrize("folder", FOLDERS)
def test_links_are_relative_and_reach_their_folder(folder: str) -> None:
    link = ROOT / "moeplan" / folder
    assert link.is_symlink(), f"moeplan/{folder} must be a link: git config core.symlinks true, then check out again"
    assert link.readlink() == Path("..") / folder
    assert link.resolve() == ROOT / folder


@pytest.mark.parametrize("folder", [folder for folder in FOLDERS if folder != "kernels"])
def test_a_folder_cannot_be_imported_by_its_own_name(folder: str) -> None:
    done = _run("-c", f"import {folder}")
    assert done.returncode == 1
    assert f"ImportError: import moeplan.{folder} instead of {folder}" in done.stderr


def test_kernels_leaves_the_name_of_another_distribution_free() -> None:
    # A regular package would win over the Hugging Face distribution `kernels` whenever the checkout is on sys.path.
    assert not (ROOT / "kernels" / "__init__.py").exists()


def test_a_checkout_runs_uninstalled() -> None:
    # -S leaves site-packages out, and with it any installed moeplan.
    code = "import moeplan.planner, moeplan.simulator, moeplan.kernels, moeplan.executor; print(moeplan.__file__)"
    done = _run("-S", "-c", code)
    assert done.returncode == 0, done.stderr
    assert Path(done.stdout.strip()) == ROOT / "moeplan" / "__init__.py"


def test_help_starts_fast() -> None:
    seconds = []
    for _ in range(3):
        before = os.times()
        done = _run("-m", "moeplan", "--help")
        after = os.times()
        # Of the CPU: other tests share the cores. Alone, a start takes as long on the clock.
        used_s = after.children_user + after.children_system - before.children_user - before.children_system
        seconds.append(used_s)
        assert done.returncode == 0, done.stderr
    assert 0 < min(seconds) <= HELP_LIMIT_S, seconds


def _loaded_by(*arguments: str) -> set[str]:
    """Top-level modules that ``moeplan ARGUMENTS`` loads."""
    code = (
        "import atexit, sys\n"
        "atexit.register(lambda: print(*{name.split('.')[0] for name in sys.modules}, file=sys.stderr))\n"
        f"sys.argv = {['moeplan', *arguments]!r}\n"
        "from moeplan.cli.app import main\n"
        "main()\n"
    )
    done = _run("-c", code)
    assert done.returncode == 0, done.stderr
    return set(done.stderr.splitlines()[-1].split())


def test_help_loads_nothing_heavy() -> None:
    assert _loaded_by("--help") & {"torch", "scipy", "numpy", "pydantic", "networkx", "simpy"} == set()


def test_search_loads_no_torch() -> None:
    arguments = "search --model deepseek-v3 --hardware gb300 --gpus 256 --seq-len 4096 --global-batch-size 8192 --json"
    loaded = _loaded_by(*arguments.split())
    assert "numpy" in loaded
    assert loaded & {"torch", "triton", "transformer_engine"} == set()


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """The wheel, built offline by the installed setuptools from a copy, so that no build/ folder joins in."""
    setuptools = pytest.importorskip("setuptools", minversion="77")
    assert setuptools
    copy = tmp_path_factory.mktemp("source")
    done = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip("not a git checkout")
    for name in done.stdout.split("\0"):
        source, target = ROOT / name, copy / name
        if name and os.path.lexists(source):
            target.parent.mkdir(parents=True, exist_ok=True)
            if source.is_symlink():
                target.symlink_to(source.readlink())
            else:
                target.write_bytes(source.read_bytes())
    out = tmp_path_factory.mktemp("wheel")
    code = f"from setuptools import build_meta; build_meta.build_wheel({str(out)!r})"
    built = _run("-c", code, cwd=copy)
    assert built.returncode == 0, built.stdout + built.stderr
    return zipfile.ZipFile(next(out.glob("*.whl")))


def _tracked(*suffixes: str) -> set[str]:
    """Tracked files of our packages under the path a wheel gives them."""
    names = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.splitlines()
    inside = {name for name in names if name.endswith(suffixes) and (ROOT / name).is_file()}
    return {name for name in inside if name.startswith("moeplan/")} | {
        f"moeplan/{name}" for name in inside if name.split("/")[0] in FOLDERS
    }


def test_wheel_holds_every_source_and_data_file_once(wheel: zipfile.ZipFile) -> None:
    names = [name for name in wheel.namelist() if ".dist-info/" not in name]
    assert len(names) == len(set(names))
    assert set(names) == _tracked(".py", "py.typed", *DATA_SUFFIXES)


def test_wheel_metadata_keeps_torch_optional(wheel: zipfile.ZipFile) -> None:
    metadata = wheel.read(next(name for name in wheel.namelist() if name.endswith("/METADATA"))).decode()
    required = [line for line in metadata.splitlines() if line.startswith("Requires-Dist: ")]
    heavy = [line for line in required if any(name in line for name in ("torch", "triton", "transformer"))]
    assert heavy
    assert all("extra ==" in line for line in heavy)
    assert "License-Expression: Apache-2.0" in metadata
    assert any(name.endswith("/licenses/LICENSE") for name in wheel.namelist())


def test_wheel_installs_the_command(wheel: zipfile.ZipFile) -> None:
    entry_points = wheel.read(next(name for name in wheel.namelist() if name.endswith("/entry_points.txt"))).decode()
    assert "moeplan = moeplan.cli.app:main" in entry_points
