from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import fork_server
import pytest

from mens_exp.artifacts import atomic
from mens_exp.errors import MensError

WRITER = """
import sys
from pathlib import Path
from mens_exp.artifacts.atomic import write_bytes
path, size = Path(sys.argv[1]), int(sys.argv[2])
print("ready", flush=True)
while True:
    for letter in (b"n", b"o"):
        write_bytes(path, letter * size)
"""
DIRECTORY_WRITER = """
import sys
from pathlib import Path
from mens_exp.artifacts.atomic import directory
print("ready", flush=True)
while True:
    for letter in "no":
        with directory(Path(sys.argv[1])) as new:
            for name in "xyz":
                (new / name).write_text(letter)
"""


def names_in(path):
    return sorted(child.name for child in path.iterdir())


def kill_a_writer(source, *arguments, after_s):
    with subprocess.Popen(
        [sys.executable, "-c", source, *arguments], stdout=subprocess.PIPE
    ) as writer:
        assert writer.stdout is not None
        assert writer.stdout.readline().strip() == b"ready"
        time.sleep(after_s)
        writer.kill()
    return writer.pid


def dead_pid():
    with subprocess.Popen([sys.executable, "-c", ""]) as gone:
        gone.wait()
    return gone.pid


def test_a_killed_writer_leaves_the_file_whole_old_or_whole_new(tmp_path):
    """Twelve kills during a 4 MiB write never leave a partial or mixed file."""
    path, size = tmp_path / "file", 4 << 20
    path.write_bytes(b"o" * size)
    for attempt in range(12):
        kill_a_writer(WRITER, str(path), str(size), after_s=0.003 * attempt)
        assert path.read_bytes() in (b"o" * size, b"n" * size)
    atomic.remove_stale(tmp_path)
    assert names_in(tmp_path) == ["file"]


def test_a_killed_writer_leaves_a_whole_directory_once_the_stale_is_cleared(
    tmp_path,
):
    """A directory left between its two renames is restored; its files are all old or all new."""
    path = tmp_path / "adapter"
    with atomic.directory(path) as new:
        for name in "xyz":
            (new / name).write_text("o")
    for attempt in range(8):
        kill_a_writer(DIRECTORY_WRITER, str(path), after_s=0.004 * attempt)
        atomic.remove_stale(tmp_path)
        assert names_in(tmp_path) == ["adapter"]
        letters = [(path / name).read_text() for name in "xyz"]
        assert letters in (["o"] * 3, ["n"] * 3)


def test_a_write_makes_missing_parents_and_leaves_no_temporary(tmp_path):
    """Nothing but the written file remains."""
    atomic.write_text(tmp_path / "a" / "b.txt", "é\n")
    assert (tmp_path / "a" / "b.txt").read_bytes() == b"\xc3\xa9\n"
    assert names_in(tmp_path / "a") == ["b.txt"]


def test_a_failed_write_keeps_the_old_file(tmp_path, monkeypatch):
    """After a failing fsync, neither new content nor a temporary file remains."""

    def full(_):
        raise OSError(28, "No space left on device")

    atomic.write_bytes(tmp_path / "file", b"old")
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        atomic.write_bytes(tmp_path / "file", b"new")
    assert (tmp_path / "file").read_bytes() == b"old"
    assert names_in(tmp_path) == ["file"]


def test_a_written_file_gets_the_permissions_of_any_new_file(tmp_path):
    """The mode is the default for new files, not the private mode of a temporary file."""
    (tmp_path / "plain").write_bytes(b"")
    atomic.write_bytes(tmp_path / "atomic", b"")
    assert (tmp_path / "atomic").stat().st_mode == (tmp_path / "plain").stat().st_mode


def test_json_is_sorted_indented_and_ends_with_a_newline(tmp_path):
    """The bytes are exactly these, with characters beyond ASCII unescaped."""
    atomic.write_json(tmp_path / "x.json", {"b": [1], "a": "é"})
    assert (tmp_path / "x.json").read_text("utf-8") == ('{\n  "a": "é",\n  "b": [\n    1\n  ]\n}\n')


def test_json_keeps_a_lone_surrogate(tmp_path):
    """An argument that could not be decoded survives the round trip."""
    atomic.write_json(tmp_path / "x.json", ["\udc80"])
    assert json.loads((tmp_path / "x.json").read_bytes()) == ["\udc80"]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), object()])
def test_json_refuses_what_it_cannot_say(tmp_path, value):
    """The target file is never created."""
    with pytest.raises(MensError, match="cannot be written as JSON"):
        atomic.write_json(tmp_path / "x.json", {"a": value})
    assert names_in(tmp_path) == []


def test_a_directory_replaces_the_earlier_one_whole(tmp_path):
    """A file that only the earlier directory had is gone."""
    path = tmp_path / "adapter"
    for name in ("old", "new"):
        with atomic.directory(path) as temporary:
            (temporary / name).write_text(name)
    assert names_in(path) == ["new"]
    assert names_in(tmp_path) == ["adapter"]


def test_a_directory_block_that_raises_changes_nothing(tmp_path):
    """The earlier directory stays, and the temporary one is removed."""
    path = tmp_path / "adapter"
    with atomic.directory(path) as temporary:
        (temporary / "old").write_text("")
    with pytest.raises(ZeroDivisionError), atomic.directory(path) as temporary:
        (temporary / "new").write_text(str(1 // 0))
    assert names_in(path) == ["old"]
    assert names_in(tmp_path) == ["adapter"]


def test_a_directory_that_cannot_be_moved_in_puts_the_earlier_one_back(tmp_path, monkeypatch):
    """When the second of the two renames fails, the first one is undone."""
    path = tmp_path / "adapter"
    path.mkdir()
    (path / "old").write_text("")
    moves = []
    replace = Path.replace

    def second_fails(self, target):
        moves.append(self)
        if len(moves) == 2:
            raise PermissionError
        return replace(self, target)

    monkeypatch.setattr(Path, "replace", second_fails)
    with pytest.raises(PermissionError), atomic.directory(path):
        pass
    assert names_in(tmp_path) == ["adapter"]
    assert names_in(path) == ["old"]


def test_stale_temporaries_of_dead_writers_go_and_those_of_live_ones_stay(tmp_path):
    """The live writer is this process; the dead one has exited."""
    machine = atomic._machine()
    dead = tmp_path / f".m.json.{machine}-{dead_pid()}-00000000.tmp"
    live = tmp_path / f".m.json.{machine}-{os.getpid()}-00000000.tmp"
    other = tmp_path / ".m.json.tmp"
    for path in (dead, live, other):
        path.write_text("")
    assert atomic.remove_stale(tmp_path) == [dead]
    assert sorted(tmp_path.iterdir()) == sorted([live, other])


def test_a_temporary_older_than_the_process_of_its_number_is_stale(tmp_path):
    """A file of 1970 cannot belong to this process: its PID was reused."""
    path = tmp_path / f".m.json.{atomic._machine()}-{os.getpid()}-00000000.tmp"
    path.write_text("")
    os.utime(path, (0, 0))
    assert atomic.remove_stale(tmp_path) == [path]


def test_another_machines_temporary_is_stale_after_a_day(tmp_path):
    """Its processes cannot be checked from here, so the file's age decides."""
    young, old = (tmp_path / f".{name}.00000000-1-00000000.tmp" for name in ("young", "old"))
    young.write_text("")
    old.write_text("")
    os.utime(old, (time.time() - 90_000, time.time() - 90_000))
    assert atomic.remove_stale(tmp_path) == [old]
    assert young.exists()


def test_a_directory_left_between_its_two_moves_is_restored(tmp_path):
    """The writer died after it had moved the earlier directory aside."""
    aside = tmp_path / f".adapter.{atomic._machine()}-{dead_pid()}-00000000.old"
    aside.mkdir()
    (aside / "file").write_text("")
    atomic.remove_stale(tmp_path)
    assert names_in(tmp_path / "adapter") == ["file"]
    assert not aside.exists()


def test_the_next_writer_removes_what_a_write_inside_of_a_write_left(tmp_path):
    """The process died while it replaced the directory that it was about to rename."""
    lines = (
        "import os, sys, pathlib",
        "from mens_exp.artifacts import atomic",
        "with atomic.directory(pathlib.Path(sys.argv[1])) as outer:",
        "    (outer / 'file').write_text('')",
        "    with atomic.directory(outer) as inner:",
        "        atomic.write_text(inner / 'new', '')",
        "        os._exit(9)",
    )
    command = [sys.executable, "-c", "\n".join(lines), str(tmp_path / "out")]
    assert fork_server.run(command, check=False).returncode == 9
    assert len(names_in(tmp_path)) == 2
    with atomic.directory(tmp_path / "out") as again:
        atomic.write_text(again / "whole", "")
    assert names_in(tmp_path) == ["out"]
    assert names_in(tmp_path / "out") == ["whole"]


def test_nothing_is_stale_where_there_is_no_directory(tmp_path):
    """A missing parent directory is no error."""
    assert atomic.remove_stale(tmp_path / "missing") == []


def test_a_file_that_a_library_writes_appears_whole_or_not_at_all(tmp_path):
    """It is written to a temporary path; if the library writes nothing, the earlier file stays."""
    target = tmp_path / "deep" / "x.bin"
    with atomic.file(target) as place:
        place.write_bytes(b"first")
        assert not target.exists()
    with pytest.raises(FileNotFoundError), atomic.file(target) as place:
        place.with_name("elsewhere").write_bytes(b"second")
    (target.parent / "elsewhere").unlink()
    assert target.read_bytes() == b"first"
    assert list(target.parent.iterdir()) == [target]


def leave(parent, name, pid, kind="tmp"):
    """Leave a directory with one file, like a killed writer."""
    place = parent / f".{name}.{atomic._machine()}-{pid}-00000000.{kind}"
    place.mkdir()
    (place / "half").write_text("")
    return place


@pytest.mark.parametrize("way", [atomic.directory, atomic.stream, atomic.file])
def test_the_next_writer_of_a_target_clears_what_a_dead_one_left(tmp_path, way):
    """Files of a live writer, and those of another target, stay."""
    dead = leave(tmp_path, "model", dead_pid())
    alive, other = leave(tmp_path, "model", os.getpid()), leave(tmp_path, "adapter", dead_pid())
    with way(tmp_path / "model") as new:
        assert not dead.exists()
        if way is atomic.file:
            new.write_text("")
    assert alive.exists()
    assert other.exists()


def test_a_scratch_directory_goes_with_its_block_or_with_the_next_one(tmp_path):
    """A killed process leaves its directory behind; two live processes do not share one."""
    dead = leave(tmp_path, "scratch", dead_pid())
    with atomic.scratch(tmp_path) as one, atomic.scratch(tmp_path) as two:
        assert not dead.exists()
        assert one != two
        (one / "x").write_text("")
    assert names_in(tmp_path) == []
    again = leave(tmp_path, "scratch", dead_pid())
    with pytest.raises(ZeroDivisionError), atomic.scratch(tmp_path) as folder:
        (folder / "x").write_text(str(1 // 0))
    assert not again.exists()
    assert names_in(tmp_path) == []
