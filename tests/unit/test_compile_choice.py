"""compile=auto: what is weighed, what is kept, and that a resumed run takes steps as it took them before."""

import json

import pytest
from helpers import start

from seedbed.recipes import find
from seedbed.train import capture, checkpoint_loading, compile_choice

SMALL = ("device=cpu", "steps=4", "batch=2", "model.depth=2", "model.width=16", "model.heads=2", "data.block=8", "every.eval=0")


@pytest.fixture
def as_on_cuda(monkeypatch):
    """Let a run on the CPU be undecided as one on CUDA is, and note what would be compiled."""
    compiled: list[str] = []
    built = capture.StepRunner.__init__

    def init(self, engine, feed, say):
        built(self, engine, feed, say)
        self.is_undecided = engine.config.compile == "auto"

    monkeypatch.setattr(capture.StepRunner, "__init__", init)
    monkeypatch.setattr(capture, "compile_system", lambda system, mode, say: compiled.append(mode) or [])
    monkeypatch.setattr(compile_choice, "TIMED", 0.0)
    return compiled


@pytest.mark.parametrize(("cost", "expected"), [(0.0, ["whole"]), (1e9, [])])
def test_compile_auto_compiles_when_it_saves_time(tmp_path, as_on_cuda, monkeypatch, no_report, cost, expected):
    monkeypatch.setattr(compile_choice, "expected_seconds", lambda job: cost)
    assert start(tmp_path, "a", *SMALL, "compile=auto", recipe="gpt/demo") == 0
    assert [mode for mode in as_on_cuda if mode not in ("auto", "off")] == expected
    events = [json.loads(line) for line in (tmp_path / "a" / "events.jsonl").read_text().splitlines()]
    (reported,) = [e for e in events if e["kind"] == "compile"]
    assert reported["mode"] == (expected[0] if expected else "off")
    saved = checkpoint_loading.load_newest(tmp_path / "a" / "checkpoints")
    assert saved is not None and saved.state["compile_mode"] == reported["mode"]


def test_compile_auto_times_eager_steps_once(tmp_path, as_on_cuda, monkeypatch, no_report):
    """A second start knows the time of an eager step; one with a budget does not need it."""
    timed: list[float] = []
    real = compile_choice.budget.time_steps
    monkeypatch.setattr(compile_choice.budget, "time_steps", lambda job, least: timed.append(least) or real(job, least))
    monkeypatch.setattr(compile_choice, "SECONDS_PER_LAYER", 0.0)
    monkeypatch.setenv("SEEDBED_CACHE", str(tmp_path / "cache"))
    compile_choice.compile_cache.folder().mkdir(parents=True)
    for name, num_timed in (("first", 1), ("second", 0)):
        timed.clear()
        assert start(tmp_path, name, *SMALL, "compile=auto", recipe="gpt/demo") == 0
        assert len(timed) == num_timed and as_on_cuda[-1] == "whole"
    timed.clear()
    assert start(tmp_path, "other", *SMALL, "steps=1", "model.depth=1", "budget=0.5", "compile=auto", recipe="gpt/demo") == 0
    assert timed == [compile_choice.budget.TIMED], "only the length of the run is measured"


def test_compile_auto_choice_is_kept_on_resume(tmp_path, as_on_cuda, monkeypatch, no_report):
    from seedbed.launch.resume import resume

    monkeypatch.setattr(compile_choice, "expected_seconds", lambda job: 0.0)
    assert start(tmp_path, "a", *SMALL, "compile=auto", recipe="gpt/demo") == 0
    as_on_cuda.clear()
    monkeypatch.setattr(compile_choice, "expected_seconds", lambda job: 1e9)  # asked now, it would not be compiled
    assert resume(tmp_path, "a", ["steps=6"]) == 0
    assert [mode for mode in as_on_cuda if mode not in ("auto", "off")] == ["whole"]


def test_compile_auto_on_a_cpu_is_eager(tmp_path, no_report):
    assert start(tmp_path, "a", *SMALL, "compile=auto", recipe="gpt/demo") == 0
    assert "step: eager" in (tmp_path / "a" / "console.log").read_text()


def test_losses_of_auto_on_a_cpu_are_those_of_off(tmp_path, no_report):
    rows = []
    for mode in ("auto", "off"):
        assert start(tmp_path, mode, *SMALL, "every.log=1", f"compile={mode}", recipe="gpt/demo") == 0
        rows.append([json.loads(line)["loss"] for line in (tmp_path / mode / "rows.jsonl").read_text().splitlines()])
    assert rows[0] == rows[1] and len(rows[0]) == 4


class FakeJob:
    def __init__(self, depth: int = 2, *settings: str) -> None:
        from seedbed import config as configs

        recipe, preset = find("gpt/demo")
        self.config = configs.override(recipe.preset(preset), [*SMALL, f"model.depth={depth}", *settings])
        self.system = recipe.build(self.config, recipe.open_data(self.config))


def test_compile_time_estimate_grows_with_layers(tmp_path, monkeypatch):
    monkeypatch.setenv("SEEDBED_CACHE", str(tmp_path))
    compile_choice.compile_cache.folder().mkdir(parents=True)
    small, large = FakeJob(1), FakeJob(4)
    assert 0 < compile_choice.expected_seconds(small) < compile_choice.expected_seconds(large)  # type: ignore[arg-type]
    compile_choice.remember(large, 20.0, 0.0)  # type: ignore[arg-type]
    longer = FakeJob(4, "steps=400", "seed=7")  # the same code
    assert compile_choice.expected_seconds(longer) == pytest.approx(20.0 * compile_choice.CACHED)  # type: ignore[arg-type]
    compile_choice.remember(large, 1.0, 0.25)  # type: ignore[arg-type]
    assert compile_choice.expected_seconds(large) == pytest.approx(20.0 * compile_choice.CACHED)  # type: ignore[arg-type]
    compile_choice.remember(large, 1.0, 0.0)  # type: ignore[arg-type]
    assert list(compile_choice._known().values()) == [{"compile": 20.0, "step": 0.25}]
    compile_choice._path().write_text("[]")
    assert compile_choice.expected_seconds(large) > 20.0 * compile_choice.CACHED  # type: ignore[arg-type]


def test_equal_blocks_are_counted_once():
    job = FakeJob(6)
    units = capture.units_to_compile(job.system, "blocks")
    assert len({compile_choice._shape(u) for u in units}) < len(units)


def test_compile_modes_name_their_units():
    system = FakeJob().system
    assert capture.units_to_compile(system, "off") == []
    assert capture.units_to_compile(system, "auto") == capture.units_to_compile(system, "whole") == list(system.children())
