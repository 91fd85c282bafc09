"""The folder of a run's checkpoints: which one is the latest, what it holds, and whether it is whole. No torch.

``<folder>/step-00000010/`` has the shards, torch's ``.metadata`` and ``manifest.json``; ``<folder>/LATEST`` is the name
of the newest. A checkpoint is written under a name that begins with a dot and renamed once it is whole.
"""

import json
import os
import re
import shutil
import zlib
from contextlib import suppress
from pathlib import Path
from typing import Literal

from pydantic import Field

from moeplan.errors import InvalidInputError
from moeplan.files import read_json, read_text, short, validate, write_text_atomically
from moeplan.model_spec import ModelSpec
from moeplan.record import Record

LATEST, MANIFEST = "LATEST", "manifest.json"
_SAVING = ".saving-"
_NAME = re.compile(r"step-(\d+)(?:-(\d+))?")  # the second number: of a run that came by this step again
_BLOCK_BYTES = 2**22


class DamagedCheckpointError(InvalidInputError):
    """A checkpoint, or the name in ``LATEST``, is not what was written; an older one may be whole."""


class FileSum(Record):
    """Size and CRC-32 of one file of a checkpoint."""

    num_bytes: int
    crc32: int


class Manifest(Record):
    """What a checkpoint is.

    ``step``: optimizer steps done. ``tokens``: trained on in them, whose batches may have had several sizes; 0: as the
    plan's batch says. ``rng``: the state of torch's CPU generator in hexadecimal.
    """

    schema_version: Literal[1] = 1
    step: int
    tokens: int = 0
    model: ModelSpec
    plan_id: str
    num_gpus: int
    precision: str
    seed: int
    data: str
    rng: str
    files: dict[str, FileSum] = Field(default={}, description="all but this one")


def sum_file(path: Path) -> FileSum:
    """Size and checksum of a file, read in blocks."""
    num_bytes, crc32 = 0, 0
    with path.open("rb") as file:
        while block := file.read(_BLOCK_BYTES):
            num_bytes, crc32 = num_bytes + len(block), zlib.crc32(block, crc32)
    return FileSum(num_bytes=num_bytes, crc32=crc32)


def problem_of(checkpoint: Path, name: str, expected: FileSum) -> str:
    """What is wrong with one file of a checkpoint, or the empty string."""
    path = checkpoint / name
    try:
        found = sum_file(path)
    except OSError as error:
        return f"cannot be read: {error.strerror}"
    if found.num_bytes != expected.num_bytes:
        return f"has {found.num_bytes} bytes, not the {expected.num_bytes} it was written with"
    return "" if found == expected else "is not what was written: its checksum differs"


def has_checkpoint(folder: Path) -> bool:
    """Whether a run has left a checkpoint in its folder."""
    return (folder / LATEST).is_file() or any(folder.glob(f"step-*/{MANIFEST}"))


def checkpoints_to_try(folder: Path) -> list[Path]:
    """The checkpoint that ``LATEST`` names, whole or not, then all others of no more steps, newest first.

    Those of more steps were left behind by whoever wrote an older name into ``LATEST``. Where that file is lost, all of
    them count. InvalidInputError where there is none.
    """
    name = ""
    with suppress(InvalidInputError):  # lost or unreadable
        name = read_text(folder / LATEST).strip()
    others = {path.name: steps for path in folder.glob("step-*") if (steps := _steps_of(path.name)) is not None}
    others.pop(name, None)
    last = _steps_of(name)
    older = [other for other in others if last is None or others[other] <= last]
    names = [name] * bool(name) + sorted(older, key=others.__getitem__, reverse=True)
    return [folder / one for one in names] or [latest_checkpoint(folder)]


def _steps_of(name: str) -> tuple[int, int] | None:
    """The steps of a checkpoint by its name, and how many runs had come by them; None where it is no such name."""
    found = _NAME.fullmatch(name)
    return (int(found[1]), int(found[2] or 1)) if found else None


def latest_checkpoint(folder: Path) -> Path:
    """The newest whole checkpoint of a run's folder. InvalidInputError where there is none."""
    pointer = folder / LATEST
    if not pointer.is_file():
        raise InvalidInputError(
            f"save_folder {folder}: no checkpoint to resume from", "leave resume out to start a new run there"
        )
    checkpoint = folder / read_text(pointer).strip()
    if not (checkpoint / MANIFEST).is_file():
        raise DamagedCheckpointError(
            f"{pointer} names {checkpoint.name}, which is not there or not whole",
            f"write the name of another folder in {folder} into {LATEST}",
        )
    return checkpoint


def read_manifest(checkpoint: Path, model: ModelSpec) -> Manifest:
    """The manifest of a checkpoint, which must be of ``model``.

    DamagedCheckpointError where there is none or it is broken, InvalidInputError names the first key that differs.
    """
    path = checkpoint / MANIFEST
    try:
        manifest = validate(Manifest, read_json(path), str(path))
    except InvalidInputError as error:
        raise DamagedCheckpointError(error.message, error.hint) from None
    saved, wanted = (one.model_dump(exclude={"source", "name"}) for one in (manifest.model, model))
    differing = [key for key in wanted if saved[key] != wanted[key]]
    if differing:
        key = differing[0]
        raise InvalidInputError(
            f"{checkpoint} holds another model: {key} of {manifest.model.name} is {short(saved[key])}, "
            f"that of {model.name} {short(wanted[key])}",
            "resume with a plan of the same model, or start anew in another save_folder",
        )
    return manifest


def first_manifest(folder: Path, model: ModelSpec, *, falls_back: bool) -> Manifest:
    """The manifest of the checkpoint to go on from; with ``falls_back``, of the newest that has one.

    Files are not read: :class:`Checkpointer` finds out later which are damaged. InvalidInputError where there is none.
    """
    if not falls_back:
        return read_manifest(latest_checkpoint(folder), model)
    damage: DamagedCheckpointError | None = None
    for checkpoint in checkpoints_to_try(folder):
        try:
            return read_manifest(checkpoint, model)
        except DamagedCheckpointError as error:
            damage = damage or error
    assert damage is not None
    raise damage


def begin_saving(folder: Path, step: int) -> Path:
    """An empty folder to write a checkpoint in; what broken-off saves left is removed."""
    folder.mkdir(parents=True, exist_ok=True)
    for left in folder.glob(f"{_SAVING}*"):
        shutil.rmtree(left, ignore_errors=True)
    place = saving_place(folder, step)
    place.mkdir()
    return place


def saving_place(folder: Path, step: int) -> Path:
    """Where the checkpoint of a step is written before it has its name."""
    return folder / f"{_SAVING}step-{step:08d}"


def finish_saving(place: Path, manifest: Manifest, num_kept: int = 0) -> Path:
    """Give a checkpoint its manifest and its name, then point ``LATEST`` at it. Returns its folder.

    ``num_kept``: how many of the newest stay, where it is not 0.
    """
    write_text_atomically(place / MANIFEST, json.dumps(manifest.model_dump(mode="json")) + "\n")
    _sync_folder(place)
    folder, name = place.parent, place.name.removeprefix(_SAVING)
    target, again = folder / name, 1
    while target.exists():  # a run that was resumed from before this step comes here a second time
        again += 1
        target = folder / f"{name}-{again}"
    place.rename(target)
    _sync_folder(folder)
    write_text_atomically(folder / LATEST, target.name + "\n")
    if num_kept:
        _remove_old(folder, num_kept)
    return target


def _remove_old(folder: Path, num_kept: int) -> None:
    """Remove all but the last written; each loses its name first, so that none that is half gone looks whole."""
    whole = sorted(folder.glob(f"step-*/{MANIFEST}"), key=lambda path: (path.stat().st_mtime_ns, path))
    for manifest in whole[:-num_kept]:
        gone = manifest.parent.rename(folder / f"{_SAVING}old-{manifest.parent.name}")
        shutil.rmtree(gone, ignore_errors=True)


def _sync_folder(folder: Path) -> None:
    """Let names survive a crash of the host, as the files already do."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
