"""Checkpoints: what is saved comes back, what is damaged is noticed, and a crash at any byte loses nothing."""

import errno
import json
import os
import random
import signal
from pathlib import Path

import pytest
import torch

from seedbed.errors import UserError
from seedbed.track import files
from seedbed.train import checkpoint, checkpoint_loading

TENSORS = {"model": {"w": torch.arange(2000.0).reshape(40, 50), "b": torch.ones(3)}, "optim": {"main.mean.w": torch.rand(7)}}


def tensors(shift: float = 0.0) -> dict:
    return {file: {n: t + shift for n, t in group.items()} for file, group in TENSORS.items()}


def same(a: dict, b: dict) -> bool:
    return all(torch.equal(a[f][n], b[f][n]) for f in b for n in b[f]) and a.keys() == b.keys()


def test_checkpoint_round_trip_is_bitwise(tmp_path: Path) -> None:
    state = {"items": 640, "best": 1.25, "nested": {"losses": [0.1, 2.0e-300, 1 / 3]}}
    path = checkpoint.save(tmp_path, 20, tensors(), state)
    assert path.name == "step-000020"
    saved = checkpoint_loading.load(path)
    assert same(saved.tensors, tensors()) and saved.step == 20
    assert {k: saved.state[k] for k in state} == state
    assert sorted(p.name for p in path.iterdir()) == ["manifest.json", "model.safetensors", "optim.safetensors", "state.json"]


def flip(path: Path, where: float = 0.7) -> None:
    data = bytearray(path.read_bytes())
    data[int(len(data) * where)] ^= 4
    path.write_bytes(data)


DAMAGE = {
    "one bit of the weights": lambda p: flip(p / "model.safetensors"),
    "one bit of the optimizer": lambda p: flip(p / "optim.safetensors", 0.99),
    "one bit of the state": lambda p: flip(p / "state.json"),
    "truncated": lambda p: os.truncate(p / "model.safetensors", 100),
    "zero-filled half": lambda p: (p / "model.safetensors").write_bytes(
        (d := (p / "model.safetensors").read_bytes())[: len(d) // 2] + bytes(len(d) - len(d) // 2)
    ),
    "a file gone": lambda p: (p / "optim.safetensors").unlink(),
    "no manifest": lambda p: (p / "manifest.json").unlink(),
    "half a manifest": lambda p: os.truncate(p / "manifest.json", 40),
    "a manifest of another kind": lambda p: (p / "manifest.json").write_text("[1, 2]"),
    "another format": lambda p: (p / "manifest.json").write_text(json.dumps({"format": 99, "sha256": {}})),
    "an empty file": lambda p: (p / "state.json").write_bytes(b""),
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_checkpoint_damage_falls_back_to_the_previous_one(tmp_path: Path, damage) -> None:
    checkpoint.save(tmp_path, 10, tensors(), {})
    damage(checkpoint.save(tmp_path, 20, tensors(1.0), {}))
    printed: list[str] = []
    saved = checkpoint_loading.load_newest(tmp_path, printed.append)
    assert saved is not None and saved.step == 10 and same(saved.tensors, tensors())
    assert len(printed) == 1 and "step-000020" in printed[0] and "falling back" in printed[0]


def test_checkpoint_with_flipped_bits_never_loads(tmp_path: Path) -> None:
    path = checkpoint.save(tmp_path, 1, tensors(), {"items": 3})
    rng = random.Random(0)
    for _ in range(60):
        target = path / rng.choice(["model.safetensors", "optim.safetensors", "state.json"])
        good = target.read_bytes()
        flip(target, rng.random())
        with pytest.raises(checkpoint_loading.Damaged, match=target.name):
            checkpoint_loading.load(path)
        target.write_bytes(good)
    assert checkpoint_loading.load(path).step == 1


def test_checkpoints_all_damaged_are_an_error(tmp_path: Path) -> None:
    assert checkpoint_loading.load_newest(tmp_path) is None
    (checkpoint.save(tmp_path, 10, tensors(), {}) / "manifest.json").unlink()
    with pytest.raises(UserError, match="every checkpoint"):
        checkpoint_loading.load_newest(tmp_path, lambda _: None)


def in_a_child(work) -> int:
    pid = os.fork()
    if pid == 0:
        try:
            work()
        finally:
            os._exit(0)
    return os.waitpid(pid, 0)[1]


@pytest.mark.parametrize("fault", ["kill", "full"])
def test_save_fault_at_any_byte_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    """100 saves cut off at a random byte, by SIGKILL or by a full disk: what was there before is still there, whole."""
    checkpoint.save(tmp_path, 10, tensors(), {"items": 10})
    size = sum(p.stat().st_size for p in (tmp_path / "step-000010").iterdir())
    rng = random.Random(1)
    real = files.write
    survived = 0
    for trial in range(100):
        left = rng.randrange(size + 200)

        def broken(fd: int, data: bytes) -> None:
            nonlocal left
            real(fd, data[:left])
            left -= len(data)
            if left < 0:
                if fault == "kill":
                    os.kill(os.getpid(), signal.SIGKILL)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        def work() -> None:
            monkeypatch.setattr(files, "write", broken)
            try:
                checkpoint.save(tmp_path, 20, tensors(1.0), {"items": 20})
            except OSError:
                assert not list(tmp_path.glob(".aside*"))
                os._exit(7)

        status = in_a_child(work)
        saved = checkpoint_loading.load_newest(tmp_path, pytest.fail)
        assert saved is not None
        if saved.step == 20:
            survived += 1
            assert same(saved.tensors, tensors(1.0)) and status == 0, trial
            checkpoint.remove(saved.path)
        else:
            assert saved.step == 10 and same(saved.tensors, tensors()), trial
            assert os.WIFSIGNALED(status) if fault == "kill" else os.waitstatus_to_exitcode(status) == 7
    assert survived < 50, "the faults must really have been injected"


def test_power_loss_before_the_rename_leaves_no_half_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything inside a checkpoint is synced before its name appears: replay the order of calls."""
    calls: list[tuple[str, str]] = []
    synced: set[int] = set()
    real_sync, real_replace = files.fsync, files.replace

    def note_sync(fd: int) -> None:
        synced.add(os.fstat(fd).st_ino)
        real_sync(fd)

    def note_replace(source: Path, target: Path) -> None:
        inside = [p.stat().st_ino for p in source.iterdir()] + [source.stat().st_ino]
        assert set(inside) <= synced, "renamed before its bytes were on the disk"
        calls.append((source.name, target.name))
        real_replace(source, target)

    monkeypatch.setattr(files, "fsync", note_sync)
    monkeypatch.setattr(files, "replace", note_replace)
    checkpoint.save(tmp_path, 5, tensors(), {})
    assert calls == [(".aside-step-000005", "step-000005")]
    assert tmp_path.stat().st_ino in synced


def test_prune_keeps_the_last_and_the_best(tmp_path: Path) -> None:
    for step in range(10, 60, 10):
        path = checkpoint.save(tmp_path, step, tensors(), {})
        if step == 20:
            checkpoint.mark_best(tmp_path, path)
        checkpoint.prune(tmp_path, keep=2)
    assert [p.name for p in checkpoint.steps_in(tmp_path)] == ["step-000020", "step-000040", "step-000050"]
    assert checkpoint.best(tmp_path) == (tmp_path / "step-000020").resolve()
    checkpoint.mark_best(tmp_path, tmp_path / "step-000050")
    checkpoint.prune(tmp_path, keep=1)
    assert [p.name for p in checkpoint.steps_in(tmp_path)] == ["step-000050"]
    checkpoint.forget_after(tmp_path, 49)
    assert checkpoint.steps_in(tmp_path) == [] and checkpoint.best(tmp_path) is None


WRONG = {
    "a missing tensor": ({"model": {"w": torch.zeros(2)}}, "lacks model tensors: b"),
    "an unknown tensor": (
        {"model": {"w": torch.zeros(2), "b": torch.zeros(1), "c": torch.zeros(1)}},
        "has unknown model tensors: c",
    ),
    "another shape": ({"model": {"w": torch.zeros(3), "b": torch.zeros(1)}}, r"w is \(3,\), this model wants \(2,\)"),
    "a missing file": ({"other": {}}, "has no model tensors"),
}


@pytest.mark.parametrize(("saved", "message"), WRONG.values(), ids=WRONG)
def test_restore_refuses_tensors_that_do_not_fit(saved: dict, message: str) -> None:
    live = {"model": {"w": torch.ones(2), "b": torch.ones(1)}}
    with pytest.raises(UserError, match=message):
        checkpoint_loading.restore(live, saved, "checkpoint step-000001")


def test_restore_keeps_addresses() -> None:
    weight = torch.nn.Parameter(torch.ones(2))
    address = weight.data_ptr()
    checkpoint_loading.restore({"model": {"w": weight}}, {"model": {"w": torch.tensor([3.0, 4.0])}}, "here")
    assert weight.tolist() == [3.0, 4.0] and weight.data_ptr() == address


def test_checkpoint_loading_never_unpickles(tmp_path: Path) -> None:
    """A planted pickle under a tensor file's name is refused before anything could run."""
    path = checkpoint.save(tmp_path, 1, tensors(), {})
    planted = b"cos\nsystem\n(S'touch " + bytes(tmp_path / "owned") + b"'\ntR."
    (path / "model.safetensors").write_bytes(planted)
    with pytest.raises(checkpoint_loading.Damaged):
        checkpoint_loading.load(path)
    assert not (tmp_path / "owned").exists()
