"""The write layer under faults: the old content or the new, whole lines, and nothing left lying about."""

import contextlib
import errno
import os
import random
import signal
from pathlib import Path

import pytest

from seedbed.track import files
from seedbed.track.rows import tail_lines


def no_space(*_: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def half_then_no_space(fd: int, data: bytes) -> None:
    os.write(fd, data[: len(data) // 2])
    no_space()


@pytest.mark.parametrize("old", [None, b"", b"old content"])
@pytest.mark.parametrize("function", ["open_write", "write", "fsync", "replace"])
def test_failing_write_leaves_the_old_content_and_no_litter(monkeypatch, tmp_path: Path, function: str, old: bytes | None):
    path = tmp_path / "config.json"
    if old is not None:
        path.write_bytes(old)
    monkeypatch.setattr(files, function, half_then_no_space if function == "write" else no_space)
    with pytest.raises(OSError, match="No space"):
        files.write_atomic(path, b"new content")
    assert os.listdir(tmp_path) == ([] if old is None else ["config.json"])
    assert old is None or path.read_bytes() == old


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_process_killed_at_any_byte_leaves_the_old_content_or_the_new(tmp_path: Path):
    path, old, new = tmp_path / "file", b"old" * 50, b"new!" * 60
    rng = random.Random(1)
    outcomes = set()
    for limit in [0, 1, len(new) - 1, len(new), *rng.choices(range(len(new)), k=25)]:
        path.write_bytes(old)
        child = os.fork()
        if child == 0:
            _die_after(limit)
            files.write_atomic(path, new)
            os._exit(0)
        os.waitpid(child, 0)
        assert path.read_bytes() in (old, new)
        outcomes.add(path.read_bytes())
    assert outcomes == {old, new}, "the drill must see both ends"


def _die_after(limit: int) -> None:
    def write(fd: int, data: bytes) -> None:
        os.write(fd, data[:limit])
        if limit < len(data):
            os.kill(os.getpid(), signal.SIGKILL)

    files.write = write


def test_write_atomic_syncs_before_the_rename(monkeypatch, tmp_path: Path):
    calls = []
    for name in ("write", "fsync", "replace"):
        real = getattr(files, name)
        monkeypatch.setattr(files, name, lambda *given, name=name, real=real: (calls.append(name), real(*given))[1])
    files.write_atomic(tmp_path / "file", "text")
    assert calls == ["write", "fsync", "replace", "fsync"]


def test_write_accepts_text_that_is_not_utf8(tmp_path: Path):
    files.write_atomic(tmp_path / "file", "grün \udcff")
    assert (tmp_path / "file").read_text() == "grün ?"


@pytest.mark.parametrize("content", [b"", b"whole\n", b"whole\nhalf a li"])
def test_line_is_added_apart_from_a_half_written_one(tmp_path: Path, content: bytes):
    path = tmp_path / "lines"
    path.write_bytes(content)
    with contextlib.closing(files.Appender(path)) as appender:
        appender.write(b"next\n")
    assert path.read_bytes() == content + (b"\n" if content and content[-1:] != b"\n" else b"") + b"next\n"


def test_appender_keeps_lines_while_the_disk_is_full(monkeypatch, tmp_path: Path):
    appender = files.Appender(tmp_path / "lines")
    real = files.write
    for number in range(30):
        full = 7 <= number < 15
        monkeypatch.setattr(files, "write", half_then_no_space if full else real)
        try:
            appender.write(b"%d\n" % number)
        except OSError:
            assert full
        written = (tmp_path / "lines").read_bytes()
        assert written == b"".join(b"%d\n" % n for n in range(7 if full else number + 1))
    appender.close()


def test_appender_pending_lines_are_bounded(monkeypatch, tmp_path: Path):
    monkeypatch.setattr(files, "_MAX_WAITING", 100)
    (tmp_path / "lines").write_bytes(b"half")
    appender = files.Appender(tmp_path / "lines")
    real = files.write
    monkeypatch.setattr(files, "write", no_space)
    for number in range(500):
        with pytest.raises(OSError, match="No space"):
            appender.write(b"%d\n" % number)
    monkeypatch.setattr(files, "write", real)
    appender.write(b"end\n")
    appender.close()
    written = (tmp_path / "lines").read_bytes().split(b"\n")
    assert written[0] == b"half"
    assert written[-3:] == [b"499", b"end", b""]
    assert len(written) < 40


def test_appenders_do_not_overwrite_each_other(tmp_path: Path):
    first, second = files.Appender(tmp_path / "lines"), files.Appender(tmp_path / "lines")
    for number in range(50):
        (first if number % 2 else second).write(b"%d\n" % number)
    first.close()
    second.close()
    assert (tmp_path / "lines").read_bytes().split() == [b"%d" % n for n in range(50)]


@pytest.mark.parametrize("num_bytes", [1, 2, 10, 37, 100, 10_000])
def test_tail_is_a_suffix_of_the_whole_lines(tmp_path: Path, num_bytes: int):
    lines = [b"x" * (n % 13) for n in range(40)]
    (tmp_path / "lines").write_bytes(b"\n".join(lines) + b"\nhalf")
    tail = tail_lines(tmp_path / "lines", num_bytes)
    assert tail == lines[len(lines) - len(tail) :]
    assert num_bytes < 10_000 or tail == lines
    assert sum(map(len, tail)) <= num_bytes


def test_tail_of_nothing_is_nothing(tmp_path: Path):
    assert tail_lines(tmp_path / "missing") == []
    (tmp_path / "empty").touch()
    assert tail_lines(tmp_path / "empty") == []
    assert tail_lines(tmp_path) == []


def test_leftover_folders_are_old_temporary_ones(tmp_path: Path):
    ours = (".new-12-345.tmp", ".removed-my.run-12.tmp")
    for name in (*ours, ".new-1-2.tmp", ".x.tmp", ".old.tmp", "run.tmp", ".hidden", ".new-a-b.tmp", ".new-1-2.tmp.bak"):
        (tmp_path / name).mkdir()
        os.utime(tmp_path / name, (1, 1))
    os.utime(tmp_path / ".new-1-2.tmp")
    (tmp_path / ".new-7-7.tmp").symlink_to(tmp_path / ".hidden")
    assert sorted(p.name for p in files.leftover_folders(tmp_path)) == sorted(ours)


def test_leftover_files_are_those_of_write_atomic(tmp_path: Path):
    for name in (".status.json.12-3.tmp", ".a.b.1-0.tmp", ".x.tmp", ".notes.tmp", "status.json.12-3.tmp"):
        (tmp_path / name).touch()
    (tmp_path / ".status.json.9-9.tmp").mkdir()
    (tmp_path / ".status.json.9-8.tmp").symlink_to(tmp_path / ".x.tmp")
    assert sorted(p.name for p in files.leftover_files(tmp_path)) == [".a.b.1-0.tmp", ".status.json.12-3.tmp"]
