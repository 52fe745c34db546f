"""The public surface, frozen: names, verbs, config keys, and the fixed words that other people's scripts rely on.

A test here fails when the surface grows or shrinks. Growing is a decision: change the list and the changelog together.
Shrinking or renaming breaks scripts that are not ours, and needs a better reason.
"""

import importlib
import importlib.util
import json
import pkgutil
import re
import shutil
from pathlib import Path
from types import FunctionType

import pytest
from conftest import ROOT

import seedbed as package
from seedbed.config import Config, flatten

NAMES = {
    "Config", "Data", "Engine", "Every", "Guard", "Optim", "Probe", "Request",
    "Sample", "Schedule", "Source", "System", "UserError", "check", "load", "number", "option", "runs", "sweep", "train",
}  # fmt: skip

VERBS = {
    "demo", "doctor", "check", "train", "keys", "explain", "resume", "cancel", "sample", "export", "publish", "find-lr",
    "find-batch", "profile", "plan", "replay", "overfit", "sweep", "inference-curve", "ablate", "serve", "play", "drill",
    "runs list", "runs show", "runs checkpoints", "runs diff", "runs rm", "note", "journal",
    "runs export", "runs mirror", "report", "top", "watch", "completion",
    "data prepare", "data inspect", "data verify", "data bench", "data show", "data record",
}  # fmt: skip

SYSTEM = {
    "loss", "update", "num_targets", "evaluate", "sample", "variant", "state", "load_state", "compile_units",
}  # fmt: skip

CAPABILITIES = {
    "WebExportable", "OnnxExportable", "LlamaExportable", "Playable", "Completing", "InferenceOptimizable", "Packable", "Probed",
    "Described", "CountsFlops",
    "HasAlarms", "HasBaselines", "HasVariants", "Strided", "HasOptimizers", "Shardable", "SingleRank", "HasRankLocalBuffers",
}  # fmt: skip

KEYS = {
    "steps", "budget", "batch", "accum", "seed", "ema", "ema2", "precision", "device", "keep",
    "compile", "compile_autograd", "compile_optimizer", "capture", "remat", "float8", "attention",
    "optim.kind", "optim.lr", "optim.muon_lr", "optim.beta1", "optim.beta2", "optim.eps", "optim.weight_decay",
    "optim.muon_weight_decay", "optim.momentum", "optim.clip",
    "schedule.kind", "schedule.warmup", "schedule.decay", "schedule.floor", "schedule.div", "schedule.final_div",
    "limit.train", "limit.valid", "limit.test",
    "dist.replicate", "dist.shard", "dist.reduce", "dist.single",
    "every.log", "every.eval", "every.sample", "every.save",
    "guard.policy", "guard.max_skips", "guard.max_rollbacks", "guard.window", "guard.sigmas", "guard.stall",
    "model", "data",
}  # fmt: skip

GPT_PRESETS = {"demo", "shakespeare", "mini-v0", "baby", "gpt3-small", "gpt3-small-char", "gpt2-124m", "code"}


def test_public_names():
    assert set(package.__all__) == NAMES and len(NAMES) <= 20
    for name in NAMES:
        assert getattr(package, name) is not None
    assert set(dir(package)) >= NAMES
    with pytest.raises(AttributeError, match="Trainer"):
        _ = package.Trainer


def test_verbs():
    from seedbed.cli import VERBS as registered

    assert set(registered) == VERBS


def test_config_keys():
    assert set(flatten(Config(model=None, data=None))) == KEYS


def test_system_overridable_methods():
    own = {name for name, value in vars(package.System).items() if isinstance(value, FunctionType) and not name.startswith("_")}
    assert own == SYSTEM and len(own) <= 10


def test_capabilities():
    from typing import Protocol

    from seedbed.train import capabilities, system

    known = vars(system) | vars(capabilities)
    found = {name for name, value in known.items() if isinstance(value, type) and Protocol in value.__bases__}
    assert found == CAPABILITIES
    assert not any(isinstance(package.System(), known[name]) for name in found)


def test_gpt_presets():
    from seedbed.recipes import find

    recipe, preset = find("gpt/demo")
    assert preset == "demo"
    assert set(recipe.presets) >= GPT_PRESETS
    for make in recipe.presets.values():
        assert isinstance(make(), Config)


def test_modules_import():
    own = {"seedbed.nn.kernels", "seedbed.nn.narrow_kernels", "seedbed.nn.gated_kernels"}
    gpu_only = set() if importlib.util.find_spec("triton") else own
    for found in pkgutil.walk_packages(package.__path__, "seedbed."):
        if not found.name.endswith("__main__") and found.name not in gpu_only:
            importlib.import_module(found.name)


def test_folders_are_packages():
    folders = {path.parent for path in (ROOT / "src" / "seedbed").rglob("*.py")}
    assert [f for f in folders if not (f / "__init__.py").is_file()] == []


TINY = ("model.depth=1", "model.width=32", "every.log=2", "every.eval=4", "every.save=4")


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """The command line in this process, in an empty folder: exit status, standard output, standard error."""
    from seedbed.cli import main

    monkeypatch.chdir(tmp_path)

    def call(*words: str) -> tuple[int, str, str]:
        capsys.readouterr()
        status = main(words)
        return status, *capsys.readouterr()

    return call


def test_fixed_words(command, tmp_path: Path):
    """`train ... --run NAME`, the run folder, `runs list --json`, `resume NAME`: what scripts may rely on."""
    status, out, err = command("train", "gpt/demo", "steps=8", *TINY, "--run", "words", "--dirty")
    assert status == 0, out + err
    run = tmp_path / "runs" / "words"
    rows, events = lines(run / "rows.jsonl"), lines(run / "events.jsonl")
    assert [row["step"] for row in rows] == [2, 4, 6, 8]
    assert all(isinstance(row["loss"], float) for row in rows)
    assert all(isinstance(event["step"], int) and isinstance(event["kind"], str) for event in events)
    assert {"start", "eval", "sample", "checkpoint", "end"} <= {event["kind"] for event in events}
    for name in ("step-000004", "step-000008"):
        assert (run / "checkpoints" / name / "model.safetensors").is_file()
    for name in ("config.json", "code.json", "console.log", "report.md", "samples", "plots"):
        assert (run / name).exists(), name
    assert "words" in (tmp_path / "JOURNAL.md").read_text()

    (found,) = json.loads(command("runs", "list", "--json", "--dirty")[1])
    assert (found["name"], found["status"], found["step"]) == ("words", "done", 8)

    status, out, err = command("resume", "words", "steps=12", "--dirty")
    assert status == 0, out + err
    assert lines(run / "rows.jsonl")[-1]["step"] == 12
    assert (run / "checkpoints" / "step-000012").is_dir()


def test_fixed_words_of_a_file_recipe(command, tmp_path: Path):
    shutil.copy(ROOT / "examples" / "my_recipe.py", tmp_path / "mine.py")
    status, out, err = command("train", "mine.py", "steps=4", "batch=64", "every.log=2", "--run", "mine")
    assert status == 0, out + err
    assert [row["step"] for row in lines(tmp_path / "runs" / "mine" / "rows.jsonl")] == [2, 4]
    status, out, err = command("train", "mine.py:seedling", "steps=2", "batch=64", "--run", "named")
    assert status == 0, out + err


WRONG = [
    (("train", "gpt/nonesuch"), r"demo"),
    (("train", "gpt"), r"demo"),
    (("train", "gtp/demo"), r"gpt"),
    (("train", "gpt/demo", "stps=3"), r"steps"),
    (("train", "gpt/demo", "steps=0"), r"steps=0 is out of range"),
    (("train", "gpt/demo", "steps=many"), r"whole number"),
    (("train", "gpt/demo", "steps"), r"key=value"),
    (("train", "gpt/demo", "--run", "../up"), r"cannot name a run"),
    (("train", "nowhere.py"), r"nowhere\.py"),
    (("trian", "gpt/demo"), r"train"),
    (("resume", "nothing"), r"no run"),
    (("runs", "show", "nothing"), r"no run"),
    (("sample", "nothing"), r"no run"),
]


@pytest.mark.parametrize(("arguments", "says"), WRONG, ids=lambda value: " ".join(value) if isinstance(value, tuple) else "")
def test_errors_are_at_most_two_lines_with_an_exit_code(command, tmp_path: Path, arguments: tuple[str, ...], says: str):
    status, _, shown = command(*arguments)
    assert status == 2
    assert re.search(says, shown), shown
    assert 1 <= len(shown.strip().splitlines()) <= 3
    assert "Traceback" not in shown
    assert list(tmp_path.iterdir()) == [], "a mistake left something behind"
