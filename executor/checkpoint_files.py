"""The folder of a run's checkpoints: which one is the latest, what it holds, and whether it is whole. No torch.

``<folder>/step-00000010/`` has the shards, torch's ``.metadata`` and ``manifest.json``; ``<folder>/LATEST`` is the name
of the newest. A checkpoint is written under a name that begins with a dot and renamed once it is whole.
"""

import json
import os
import shutil
import zlib
from pathlib import Path
from typing import Literal

from pydantic import Field

from moeplan.errors import InvalidInputError
from moeplan.files import read_json, read_text, short, validate, write_text_atomically
from moeplan.model_spec import ModelSpec
from moeplan.record import Record

LATEST, MANIFEST = "LATEST", "manifest.json"
_SAVING = ".saving-"
_BLOCK_BYTES = 2**22


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
    return (folder / LATEST).is_file()


def latest_checkpoint(folder: Path) -> Path:
    """The newest whole checkpoint of a run's folder. InvalidInputError where there is none."""
    pointer = folder / LATEST
    if not pointer.is_file():
        raise InvalidInputError(
            f"save_folder {folder}: no checkpoint to resume from", "leave resume out to start a new run there"
        )
    checkpoint = folder / read_text(pointer).strip()
    if not (checkpoint / MANIFEST).is_file():
        raise InvalidInputError(
            f"{pointer} names {checkpoint.name}, which is not there or not whole",
            f"write the name of another folder in {folder} into {LATEST}",
        )
    return checkpoint


def read_manifest(checkpoint: Path, model: ModelSpec) -> Manifest:
    """The manifest of a checkpoint, which must be of ``model``. InvalidInputError names the first key that differs."""
    path = checkpoint / MANIFEST
    manifest = validate(Manifest, read_json(path), str(path))
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
