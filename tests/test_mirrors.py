"""Mirrors: what arrives is what was written, and a service that sleeps, raises or hangs costs training nothing."""

import json
import os
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import TOY, assert_same_end, resume, start, stop_at

from seedbed.errors import UserError
from seedbed.launch import local
from seedbed.launch import resume as resuming
from seedbed.report.mirrors import base, choose
from seedbed.report.mirrors.base import Item, Mirror, Sink
from seedbed.track.changes import rewind
from seedbed.track.run import Run
from seedbed.train import loop

# ---- sinks that misbehave --------------------------------------------------------------------------------------------


class Recorder(Sink):
    """Writes down every call and the thread that made it."""

    def __init__(self, run: Run, checkpoints: bool = False):
        super().__init__(run, checkpoints)
        self.calls: list[tuple[str, Any]] = []
        self.threads: set[int] = set()

    def heard(self, kind: str, *values: Any) -> None:
        self.threads.add(threading.get_ident())
        self.calls.append((kind, values))

    def open(self, config: dict[str, Any]) -> None:
        self.heard("open", config["recipe"])

    def numbers(self, step: int, values: dict[str, float], when: float) -> None:
        self.heard("numbers", step, values)

    def text(self, step: int, title: str, text: str) -> None:
        self.heard("text", step, title, text)

    def media(self, step: int, paths: Any) -> None:
        self.heard("media", step, [path.name for path in paths])

    def checkpoint(self, path: Path, best: bool) -> None:
        self.heard("checkpoint", path.name, best)

    def rewind(self, step: int) -> None:
        self.heard("rewind", step)

    def close(self, status: dict[str, Any]) -> None:
        self.heard("close", status.get("status"))


class Hanging(Recorder):
    """Never answers until it is let go."""

    def __init__(self, run: Run, checkpoints: bool = False):
        super().__init__(run, checkpoints)
        self.free = threading.Event()

    def heard(self, kind: str, *values: Any) -> None:
        super().heard(kind, *values)
        self.free.wait(60)


class Raising(Recorder):
    def heard(self, kind: str, *values: Any) -> None:
        super().heard(kind, *values)
        if kind != "open":
            raise ConnectionError("the service is\naway")


class Unopened(Recorder):
    def heard(self, kind: str, *values: Any) -> None:
        super().heard(kind, *values)
        raise PermissionError("no such project")


@pytest.fixture(autouse=True)
def no_report(monkeypatch) -> None:
    """Reports have their own tests and take a second each."""
    monkeypatch.setattr(local.journal, "finish", lambda run, warn: None)


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """An empty run folder with a config."""
    path = tmp_path / "runs" / "one"
    path.mkdir(parents=True)
    (path / "config.json").write_text(json.dumps({"recipe": "toy", "preset": "toy", "config": {"steps": 3}}))
    return Run(path)


@pytest.fixture
def opened(run: Run) -> Iterator[Callable[..., tuple[Mirror, Any, list[str]]]]:
    """Start a mirror on a sink; what hangs is let go at the end."""
    sinks: list[Any] = []

    def begin(kind: type[Recorder]) -> tuple[Mirror, Any, list[str]]:
        sink, warnings = kind(run), []
        sinks.append(sink)
        mirror = Mirror(sink, warnings.append)
        run.listeners.append(mirror)
        return mirror, sink, warnings

    yield begin
    for sink in sinks:
        if isinstance(sink, Hanging):
            sink.free.set()


def soon(seconds: float = 5.0) -> float:
    return time.monotonic() + seconds


def test_mirror_gets_items_in_order_on_its_own_thread(run: Run, opened):
    mirror, sink, warnings = opened(Recorder)
    run.row({"step": 1, "loss": 2.5, "lrs": {"all": 0.1}, "note": "text", "bad": float("nan")})
    run.event(1, "eval", error=0.5, weights="live", best=True)
    run.event(1, "spike", what="loss left its band", answer="warn")
    rewind(run, 0)
    run.set_status("done")
    mirror.close(soon())
    assert sink.calls == [
        ("open", ("toy",)),
        ("numbers", (1, {"train/loss": 2.5, "train/lrs/all": 0.1})),
        ("numbers", (1, {"eval/error": 0.5})),
        ("text", (1, "event/spike", "what loss left its band, answer warn")),
        ("rewind", (0,)),
        ("close", ("done",)),
    ]
    assert threading.get_ident() not in sink.threads
    assert warnings == []


def test_mirror_that_never_answers_costs_an_append_and_is_reported(run: Run, opened, monkeypatch):
    monkeypatch.setattr(base, "NUM_WAITING", 100)
    mirror, sink, warnings = opened(Hanging)
    for step in range(1000):
        run.row({"step": step, "loss": 1.0})
        assert len(mirror._waiting) <= 100
    assert {kind for kind, _ in sink.calls} <= {"open"}, "training must not wait for the service"
    mirror.close(soon(0.05))
    (reported,) = warnings
    assert "1000 rows and events were not sent (it does not answer)" in reported
    assert "seedbed runs mirror one --to hanging" in reported
    assert len(run.rows()) == 1000


def test_mirror_queue_keeps_the_newest_rows(run: Run, opened, monkeypatch):
    monkeypatch.setattr(base, "NUM_WAITING", 10)
    mirror, sink, warnings = opened(Hanging)
    for step in range(50):
        run.row({"step": step, "loss": 1.0})
    sink.free.set()
    mirror.close(soon())
    assert [values[0] for kind, values in sink.calls if kind == "numbers"] == list(range(40, 50))
    assert "40 rows and events were not sent (it was too slow)" in warnings[0]


def test_mirror_that_raises_is_disabled_after_a_few_failures(run: Run, opened):
    mirror, sink, warnings = opened(Raising)
    for step in range(200):
        run.row({"step": step, "loss": 1.0})
    mirror.close(soon())
    assert len([kind for kind, _ in sink.calls if kind == "numbers"]) == base.MAX_FAILURES
    assert warnings[0] == "mirror raising: ConnectionError: the service is away; training goes on"
    assert "200 rows and events were not sent (gave up)" in warnings[1]
    assert len(warnings) == 2


def test_mirror_that_fails_sometimes_loses_only_failed_items(run: Run, opened):
    class Flaky(Recorder):
        def numbers(self, step: int, values: dict[str, float], when: float) -> None:
            super().numbers(step, values, when)
            if step % 3 == 0:
                raise TimeoutError("busy")

    mirror, sink, warnings = opened(Flaky)
    for step in range(30):
        run.row({"step": step, "loss": 1.0})
    mirror.close(soon())
    assert len([kind for kind, _ in sink.calls if kind == "numbers"]) == 30
    assert "10 rows and events were not sent" in warnings[1]


def test_mirror_that_hangs_at_the_end_is_reported(run: Run, opened):
    class Endless(Hanging):
        def heard(self, kind: str, *values: Any) -> None:
            if kind == "close":
                super().heard(kind, *values)

    mirror, _, warnings = opened(Endless)
    run.row({"step": 1, "loss": 1.0})
    until = soon(20)
    while (mirror._waiting or mirror._is_sending) and time.monotonic() < until:
        time.sleep(0.01)
    mirror.close(soon(0.2))
    assert warnings == ["mirror endless: all was sent, but it has not confirmed the end of the run"]


def test_mirror_that_calls_exit_does_not_end_the_run(run: Run, opened):
    class Exiting(Recorder):
        def numbers(self, step: int, values: dict[str, float], when: float) -> None:
            raise SystemExit(3)

    mirror, sink, warnings = opened(Exiting)
    run.row({"step": 1, "loss": 1.0})
    mirror.close(soon())
    assert sink.calls[-1][0] == "close" and "SystemExit: 3" in warnings[0]


def test_mirror_that_cannot_be_opened_is_disabled(run: Run, opened):
    mirror, sink, warnings = opened(Unopened)
    mirror._thread.join(5)
    for step in range(5):
        run.row({"step": step, "loss": 1.0})
    mirror.close(soon())
    assert sink.calls == [("open", ("toy",))]
    assert "PermissionError: no such project" in warnings[0]
    assert "5 rows and events were not sent (gave up)" in warnings[1]


def test_checkpoints_are_mirrored_on_request_if_they_still_exist(run: Run):
    (run.path / "checkpoints" / "step-000004").mkdir(parents=True)
    items = [Item("checkpoint", {"step": n, "path": f"step-{n:06d}", "best": True}, 0.0) for n in (2, 4)]
    for asked, heard in ((True, [("checkpoint", ("step-000004", True))]), (False, [])):
        sink = Recorder(run, checkpoints=asked)
        for item in items:
            base.relay(sink, item)
        assert sink.calls == heard


# ---- what a person types ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("wandbb", r"no mirror 'wandbb'; there are: wandb, tensorboard"),
        ("wandb+weights", r"only \+checkpoints"),
        ("tensorboard+checkpoints", r"keeps no checkpoints; these do: wandb, trackio, mlflow"),
        ("tensorboard,tensorboard", r"twice"),
        ("mlflow", r'pip install "seedbed\[mlflow\]"'),
        ("wandb", r"`wandb login` once, or set WANDB_MODE=offline"),
        (",", r"no mirror ''"),
    ],
)
def test_mirror_option_is_validated_before_training(text: str, says: str, monkeypatch, tmp_path: Path):
    found = choose.importlib.util.find_spec
    monkeypatch.setattr(choose.importlib.util, "find_spec", lambda name: None if name == "mlflow" else found(name) or True)
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_IDENTITY_TOKEN_FILE", "NETRC"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(UserError, match=says):
        choose.read(text)


def test_wandb_needs_a_key_or_offline_mode(monkeypatch, tmp_path: Path):
    monkeypatch.setattr(choose.importlib.util, "find_spec", lambda name: True)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    for name, value in (("WANDB_MODE", "offline"), ("WANDB_API_KEY", "k" * 40)):
        with monkeypatch.context() as patch:
            patch.setenv(name, value)
            assert choose.read("wandb+checkpoints") == (choose.Choice("wandb", True),)
    (tmp_path / ".netrc").write_text("machine api.wandb.ai\n  login user\n  password key\n")
    (tmp_path / ".netrc").chmod(0o600)
    monkeypatch.delenv("WANDB_MODE", raising=False)
    assert choose.read("wandb") == (choose.Choice("wandb"),)


# ---- whole runs ------------------------------------------------------------------------------------------------------


def train(root: Path, name: str, mirrors: str, *assignments: str) -> int:
    choices = choose.read(mirrors)
    return local.train(TOY, list(assignments), root=root, run_name=name, dirty=True, mirrors=choices)


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    found.Reload()
    return {tag: [(e.step, e.value) for e in found.Scalars(tag)] for tag in found.Tags()["scalars"]}


def single(value: float) -> float:
    """The number as a four-byte float, which is what an event file holds."""
    return struct.unpack("f", struct.pack("f", value))[0]


def written(run: Run, kind: str) -> dict[str, list[tuple[int, float]]]:
    """The numbers of a run's folder, under the names a mirror gives them."""
    found: dict[str, list[tuple[int, float]]] = {}
    lines = run.rows() if kind == "train" else [e for e in run.events() if e["kind"] == kind]
    for line in lines:
        for name, value in base.named(kind, line).items():
            found.setdefault(name, []).append((line["step"], single(value)))
    return found


def mirrored_to_tensorboard(run: Run) -> dict[str, list[tuple[int, float]]]:
    return {k: v for k, v in scalars(run.path / "tensorboard").items() if not k.startswith("end/")}


def test_tensorboard_files_read_back_equal(tmp_path: Path, monkeypatch):
    pytest.importorskip("tensorboard")
    stop_at(6, monkeypatch)
    assert train(tmp_path, "one", "tensorboard", "every.save=4") == 143
    assert resume(tmp_path, "one") == 0
    run = Run.open(tmp_path, "one")
    want = written(run, "train") | written(run, "eval")
    assert [step for step, _ in want["train/loss"]] == list(range(1, 13))
    assert mirrored_to_tensorboard(run) == want


def test_tensorboard_purges_rolled_back_steps(tmp_path: Path, monkeypatch):
    pytest.importorskip("tensorboard")
    real, spoiled = loop.take_step, []

    def take(job: loop.Job) -> None:
        if job.step == 10 and not spoiled:
            spoiled.append(job.step)
            with torch.no_grad():
                job.system.net[0].weight[0, 0] = float("nan")
        real(job)

    monkeypatch.setattr(loop, "take_step", take)
    assert train(tmp_path, "one", "tensorboard", "guard.max_skips=0") == 0
    run = Run.open(tmp_path, "one")
    assert [event["to"] for event in run.events() if event["kind"] == "rollback"] == [8]
    assert mirrored_to_tensorboard(run)["train/loss"] == written(run, "train")["train/loss"]


def test_mirror_added_later_gets_earlier_rows(tmp_path: Path, monkeypatch):
    pytest.importorskip("tensorboard")
    stop_at(6, monkeypatch)
    start(tmp_path, "one")
    resuming.resume(tmp_path, "one", [], mirrors=choose.read("tensorboard"))
    run = Run.open(tmp_path, "one")
    assert mirrored_to_tensorboard(run)["train/loss"] == written(run, "train")["train/loss"]
    resuming.resume(tmp_path, "one", ["steps=14"], mirrors=())
    assert len(mirrored_to_tensorboard(run)["train/loss"]) == 12


def test_results_do_not_depend_on_mirrors(tmp_path: Path, monkeypatch, capsys):
    monkeypatch.setitem(choose.SINKS, "json", Raising)
    start(tmp_path, "plain")
    assert train(tmp_path, "mirrored", "json") == 0
    assert "mirror raising: ConnectionError" in capsys.readouterr().out
    assert_same_end(tmp_path, "plain", "mirrored")
    facts = [Run.open(tmp_path, name).config_json() for name in ("plain", "mirrored")]
    assert facts[0]["hash"] == facts[1]["hash"]


def test_resumed_run_continues_without_a_missing_mirror_package(tmp_path: Path, monkeypatch, capsys):
    monkeypatch.setitem(choose.SINKS, "json", Recorder)
    stop_at(6, monkeypatch)
    train(tmp_path, "one", "json")
    monkeypatch.delitem(choose.SINKS, "json")
    assert resume(tmp_path, "one") == 0
    assert "no mirror 'json'" in capsys.readouterr().out


def test_mirror_that_hangs_delays_the_end_by_a_bounded_time(tmp_path: Path, monkeypatch, capsys):
    monkeypatch.setitem(choose.SINKS, "json", Hanging)
    monkeypatch.setattr(base, "SECONDS", 0.2)
    before = time.monotonic()
    assert train(tmp_path, "one", "json") == 0
    assert time.monotonic() - before < 20
    assert "were not sent (it does not answer)" in capsys.readouterr().out
    assert len(Run.open(tmp_path, "one").rows()) == 12


# ---- services that are not installed here: fakes of the few calls we make ----------------------------------------------

FAKE_TRACKIO = """
import json, os
def _say(*words):
    with open(os.environ["FAKE_LOG"], "a") as file:
        file.write(json.dumps(words, default=str) + chr(10))
class Markdown(str): pass
class Artifact:
    def __init__(self, name, type, metadata): self.name = name
    def add_dir(self, path): _say("add_dir", os.path.basename(path))
class _Run:
    def log(self, values, step): _say("log", step, values)
    def log_artifact(self, artifact, aliases): _say("artifact", artifact.name, aliases)
    def finish(self): _say("finish")
def Image(path): return "image " + path.name
Video = Image
def init(project, name, group, config, resume, embed):
    _say("init", project, name, resume, config["steps"])
    return _Run()
"""

FAKE_MLFLOW = """
import json, os, types
def _say(*words):
    with open(os.environ["FAKE_LOG"], "a") as file:
        file.write(json.dumps(words, default=str) + chr(10))
class MlflowClient:
    def get_experiment_by_name(self, name): return None
    def create_experiment(self, name): _say("experiment", name); return "7"
    def create_run(self, place, run_name, tags):
        _say("create", place, run_name, tags)
        return types.SimpleNamespace(info=types.SimpleNamespace(run_id="id-1"))
    def update_run(self, run_id, status): _say("update", run_id, status)
    def log_batch(self, run_id, metrics=(), params=(), tags=()): _say("batch", run_id, metrics, params, tags)
    def log_text(self, run_id, text, path): _say("text", run_id, text, path)
    def log_artifact(self, run_id, path, place): _say("artifact", run_id, path, place)
    def log_artifacts(self, run_id, path, place): _say("artifacts", run_id, os.path.basename(path), place)
    def set_terminated(self, run_id, status): _say("end", run_id, status)
"""
FAKE_ENTITIES = """
def Metric(key, value, timestamp, step): return ["metric", key, value, step]
def Param(key, value): return ["param", key, value]
def RunTag(key, value): return ["tag", key, value]
"""


@pytest.fixture
def fakes(tmp_path: Path, monkeypatch) -> Callable[[], list[list[Any]]]:
    """trackio and mlflow as packages that write down what they are asked; calling reads it."""
    for name, text in (("trackio/__init__", FAKE_TRACKIO), ("mlflow/__init__", FAKE_MLFLOW), ("mlflow/entities", FAKE_ENTITIES)):
        path = tmp_path / "fakes" / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    log = tmp_path / "log"
    monkeypatch.setenv("FAKE_LOG", str(log))
    monkeypatch.syspath_prepend(str(tmp_path / "fakes"))
    for name in ("trackio", "mlflow", "mlflow.entities"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return lambda: [json.loads(line) for line in log.read_text().splitlines()]


def test_trackio_gets_the_run_and_resumes_it(tmp_path: Path, monkeypatch, fakes):
    stop_at(6, monkeypatch)
    train(tmp_path, "one", "trackio+checkpoints", "every.sample=4")
    resume(tmp_path, "one")
    calls = fakes()
    assert [call[1:] for call in calls if call[0] == "init"] == [["seedbed", "one", "allow", 12]] * 2
    losses = {step: values["train/loss"] for _, step, values in (c for c in calls if c[0] == "log") if "train/loss" in values}
    assert losses == {row["step"]: row["loss"] for row in Run.open(tmp_path, "one").rows()}
    assert any("sample" in c[2] for c in calls if c[0] == "log")
    assert ["add_dir", "step-000012"] in calls
    assert calls[-1] == ["finish"]


def test_mlflow_gets_the_run_and_resumes_it(tmp_path: Path, monkeypatch, fakes):
    stop_at(6, monkeypatch)
    train(tmp_path, "one", "mlflow+checkpoints")
    resume(tmp_path, "one")
    calls = fakes()
    assert [c[0] for c in calls if c[0] in ("create", "update", "end")] == ["create", "end", "update", "end"]
    assert [c[2] for c in calls if c[0] == "end"] == ["KILLED", "FINISHED"]
    metrics = [m for c in calls if c[0] == "batch" for m in c[2]]
    losses = {step: value for _, key, value, step in metrics if key == "train/loss"}
    assert losses == {row["step"]: row["loss"] for row in Run.open(tmp_path, "one").rows()}
    params = [p for c in calls if c[0] == "batch" for p in c[3]]
    assert ["param", "optim.lr", "0.01"] in params
    assert ["artifacts", "id-1", "step-000012", "checkpoints/step-000012"] in calls


def test_finished_run_is_mirrored_afterwards(tmp_path: Path, fakes):
    start(tmp_path, "one")
    printed: list[str] = []
    run = Run.open(tmp_path, "one")
    for _ in range(2):
        choose.send(run, choose.read("trackio"), printed.append)
    inits = [call for call in fakes() if call[0] == "init"]
    assert [call[2] for call in inits] == ["one", "one-2"], "a second copy does not mix with the first"
    assert printed[0].startswith("one: ")
    steps = [c[1] for c in fakes() if c[0] == "log" and "train/loss" in c[2]]
    assert steps == [*range(1, 13)] * 2


# ---- W&B, offline ----------------------------------------------------------------------------------------------------


def records(path: Path) -> Iterator[Any]:
    """The records of a W&B offline file: a LevelDB log of protocol buffers in blocks of 32 KiB."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, at, parts = path.read_bytes(), 7, b""
    while at + 7 <= len(data):
        left = 32768 - at % 32768
        if left < 7:
            at += left
            continue
        length, kind = struct.unpack("<HB", data[at + 4 : at + 7])
        parts += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last of several
            record = Record()
            record.ParseFromString(parts)
            parts = b""
            yield record


@pytest.mark.slow
def test_wandb_offline_run_is_readable_and_resumed_under_its_id(tmp_path: Path, seedbed, monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_API_KEY", "s3cr3t" * 7)
    common = ("--dirty", "--mirror", "wandb+checkpoints")
    done = seedbed("train", TOY, "--run", "one", "--no-check", "-m", "why <not>", "every.sample=4", *common)
    assert done.returncode == 0, done.stderr
    done = seedbed("resume", "one", "steps=16", "--dirty")
    assert done.returncode == 0, done.stderr
    assert "wandb sync" in done.stdout
    run = Run.open(tmp_path / "runs", "one")
    files = sorted((run.path / "wandb").glob("offline-run-*/*.wandb"))
    assert len(files) == 2
    found = [list(records(path)) for path in files]
    ids = {r.run.run_id for part in found for r in part if r.HasField("run")}
    assert ids == {base.remembered(run)["wandb"]["id"]}
    losses = {}
    for record in (r for part in found for r in part if r.HasField("history")):
        values = {
            item.nested_key[0] if item.nested_key else item.key: json.loads(item.value_json) for item in record.history.item
        }
        if "train/loss" in values:
            losses[values["step"]] = values["train/loss"]
    assert losses == {row["step"]: row["loss"] for row in run.rows()}
    assert any(r.HasField("artifact") or r.request.HasField("log_artifact") for r in found[0]), "no checkpoint was kept"
    kept = b"".join(path.read_bytes() for path in run.path.rglob("*") if path.is_file())
    assert os.environ["WANDB_API_KEY"].encode() not in kept


SLEEPY = """
import time, types
class Settings:
    def __init__(self, **given): pass
class _Run:
    url, summary = None, {}
    def define_metric(self, *names, **given): pass
    def log(self, values): time.sleep(10)
    def finish(self, exit_code): pass
def Html(text, inject): return text
def init(**given): time.sleep(10); return _Run()
"""


@pytest.mark.slow
def test_mirror_that_sleeps_does_not_delay_the_command(tmp_path: Path, seedbed, monkeypatch):
    """The whole command: 300 steps that would take 50 minutes at ten seconds a row."""
    (tmp_path / "wandb.py").write_text(SLEEPY)
    monkeypatch.setenv("WANDB_MODE", "offline")
    done = seedbed("train", TOY, "steps=300", "--run", "one", "--no-check", "--dirty", "--mirror", "wandb", timeout=240)
    assert done.returncode == 0, done.stderr
    assert "rows and events were not sent (it does not answer)" in done.stdout
    assert len(Run.open(tmp_path / "runs", "one").rows()) == 300
