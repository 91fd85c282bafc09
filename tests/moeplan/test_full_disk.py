"""A full disk, a read-only folder and a write that is interrupted leave the old file whole and nothing beside it."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from moeplan.errors import InvalidInputError
from moeplan.files import check_writable, write_bytes_atomically, write_text_atomically

WRITES_UNTIL_KILLED = """
import sys
from pathlib import Path
from moeplan.files import write_text_atomically
path = Path(sys.argv[1])
print("ready", flush=True)
for number in range(10**9):
    write_text_atomically(path, f"{number}\\n" * 20_000)
"""


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 256 KiB."""
    mount = tmp_path / "disk"
    mount.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(mount)]
    if os.geteuid() != 0 or subprocess.run(command, capture_output=True, check=False).returncode != 0:
        pytest.skip("needs the right to mount a tmpfs")
    yield mount
    subprocess.run(["umount", str(mount)], check=True)


def test_a_full_disk_keeps_the_old_file(small_disk: Path) -> None:
    path = small_disk / "plan.toml"
    write_text_atomically(path, "old")
    with pytest.raises(InvalidInputError, match="No space left"):
        write_bytes_atomically(path, b"x" * 2**20)
    assert path.read_text() == "old"
    assert list(small_disk.iterdir()) == [path]


def test_a_read_only_disk_is_known_before_the_work(small_disk: Path) -> None:
    path = small_disk / "measurement.json"
    check_writable(path)
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    with pytest.raises(InvalidInputError, match="Read-only"):
        check_writable(path)
    with pytest.raises(InvalidInputError, match="Read-only"):
        write_text_atomically(path, "new")
    assert list(small_disk.iterdir()) == []


def test_a_folder_in_place_of_the_file_is_refused_before_the_work(tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match="directory"):
        check_writable(tmp_path)


def test_a_killed_writer_leaves_a_whole_file(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    for _ in range(5):
        writer = subprocess.Popen(
            [sys.executable, "-c", WRITES_UNTIL_KILLED, str(path)], stdout=subprocess.PIPE, text=True
        )
        assert writer.stdout is not None
        assert writer.stdout.readline() == "ready\n"
        while not path.exists():
            assert writer.poll() is None
        writer.kill()
        writer.wait()
        writer.stdout.close()
        lines = path.read_text().splitlines()
        assert len(lines) == 20_000
        assert len(set(lines)) == 1
