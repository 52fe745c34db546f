"""Debugging aids of every recipe: model summary, dry runs, list of checkpoints, limits; the tables of the docs stay true."""

import ast
import json
import re
from pathlib import Path

import pytest
import torch
from conftest import ROOT
from helpers import TOY, kinds, newest, start

from seedbed import config as configs
from seedbed.cli import VERBS, main
from seedbed.config import Limit, flat
from seedbed.data.feed import Data, Source
from seedbed.data.limiting import limited
from seedbed.errors import UserError
from seedbed.launch import local
from seedbed.recipes import find
from seedbed.report.tables import model_text
from seedbed.track.run import Run
from seedbed.train import summary
from seedbed.train.engine import Engine

CPU = torch.device("cpu")
SMALL = ("model.depth=1", "model.width=32", "limit.valid=16")


@pytest.fixture(autouse=True)
def _quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local.journal, "finish", lambda run, warn: None)


def edited(tmp_path: Path, *edits: tuple[str, str]) -> str:
    """The toy recipe with edits, as a file of its own."""
    text = Path(TOY).read_text()
    for old, new in edits:
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    (tmp_path / "edited.py").write_text(text)
    return str(tmp_path / "edited.py")


def opened(name: str, *assignments: str) -> tuple[Engine, Data]:
    recipe, preset = find(name)
    config = configs.override(recipe.preset(preset), ["device=cpu", *assignments])
    data = recipe.open_data(config)
    torch.manual_seed(1)
    return Engine(recipe.build(config, data), config, CPU), data


# ---- the model's table -----------------------------------------------------------------------------------------------


def test_model_table_is_written_by_every_run(tmp_path: Path, capsys) -> None:
    start(tmp_path, "one")
    (event,) = [e for e in Run.open(tmp_path, "one").events() if e["kind"] == "model"]
    rows = {row["path"]: row for row in event["layers"]}
    assert (event["step"], event["parameters"], event["trained"]) == (0, 97, 97)
    assert rows["net.0"]["shape"] == [1, 16] and rows["net.3"]["shape"] == [1, 1]
    assert [rows[p]["parameters"] for p in ("net", "net.0", "net.3")] == [97, 4 * 16 + 16, 16 + 1]
    assert [rows[p]["flops"] for p in ("net", "net.0", "net.3")] == [160, 2 * 4 * 16, 2 * 16]
    text = (tmp_path / "one" / "model.txt").read_text()
    capsys.readouterr()
    assert main(["runs", "show", "one", "--model", "--runs", str(tmp_path)]) == 0
    assert capsys.readouterr().out == text and "Linear" in text
    assert main(["runs", "show", "one", "--model", "--json", "--runs", str(tmp_path)]) == 0
    assert json.loads(capsys.readouterr().out)["layers"] == event["layers"]


def test_model_table_missing_is_reported(tmp_path: Path, capsys) -> None:
    start(tmp_path, "one")
    (tmp_path / "one" / "events.jsonl").write_text("")
    assert main(["runs", "show", "one", "--model", "--runs", str(tmp_path)]) == 2
    assert "has no model table" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["gpt/demo", "thinker/demo", "flow/demo"])
def test_model_table_changes_nothing_and_agrees_with_the_formula(name: str) -> None:
    engine, data = opened(name)
    before = {n: t.clone() for group in engine.tensors().values() for n, t in group.items()}
    rng = torch.get_rng_state()
    found = summary.summarise(engine, data)
    after = {n: t for group in engine.tensors().values() for n, t in group.items()}
    assert all(torch.equal(before[n], after[n]) for n in before) and torch.equal(rng, torch.get_rng_state())
    assert all(p.grad is None for p in engine.system.parameters())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in engine.system.modules())
    assert "unseen" not in found and found["unreached"] == []
    forward = sum(row["flops"] for row in found["layers"] if "." not in row["path"] and row["flops"])
    # Backward is twice forward, less the products that nobody needs: those for the gradient of inputs.
    assert 0.97 < found["flops_per_item"] / (3 * forward) <= 1.01


@pytest.mark.parametrize("case", ["linear", "matmul", "bmm", "addmm", "conv", "attention"])
def test_model_table_flops_equal_torch_counts(case: str) -> None:
    from torch.nn import functional as F
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.utils.flop_counter import FlopCounterMode

    x, heads = torch.ones(3, 5, 8), torch.ones(2, 3, 5, 8)
    run = {
        "linear": lambda: F.linear(x, torch.ones(6, 8)),
        "matmul": lambda: heads @ torch.ones(8, 7),
        "bmm": lambda: torch.bmm(x, torch.ones(3, 8, 4)),
        "addmm": lambda: torch.addmm(torch.ones(4), x[0], torch.ones(8, 4)),
        "conv": lambda: F.conv2d(torch.ones(2, 4, 9, 9), torch.ones(6, 2, 3, 3), groups=2),
        "attention": lambda: F.scaled_dot_product_attention(heads, torch.ones(2, 3, 7, 8), torch.ones(2, 3, 7, 4)),
    }[case]
    with summary._Products() as ours:
        run()
    with FlopCounterMode(display=False) as theirs, sdpa_kernel(SDPBackend.MATH):
        run()
    assert ours.flops == theirs.get_total_flops() > 0


def test_model_table_without_shapes_lists_parameters(tmp_path: Path) -> None:
    path = edited(tmp_path, ("self.num_calls += 1\n", 'self.num_calls += 1\n        assert len(batch["x"]) > 1\n'))
    assert start(tmp_path, "one", recipe=path) == 0
    (event,) = [e for e in Run.open(tmp_path, "one").events() if e["kind"] == "model"]
    assert event["unseen"].startswith("AssertionError") and event["layers"][0]["parameters"] == 97
    assert "no shapes" in (tmp_path / "one" / "model.txt").read_text()
    assert newest(tmp_path, "one").tensors["model"]["num_calls"] == 12, "the call that failed is not counted"


def test_model_table_folds_equal_layers() -> None:
    def layer(path: str, num: int) -> dict:
        return {"path": path, "kind": "X", "parameters": num, "shape": [1], "flops": 4.0}

    sizes = {"a.0": 3, "a.0.w": 2, "a.1": 3, "a.1.w": 2, "a.2": 3, "a.2.w": 1, "a.3": 3, "a.3.w": 1, "b": 1}
    rows = [layer("a", 12), *(layer(path, num) for path, num in sizes.items())]
    text = model_text({"parameters": 13, "trained": 13, "layers": rows})
    shown = [line.split("  X")[0].rstrip() for line in text.splitlines()[4:]]
    assert shown == ["a", "  0 to 1: 2 alike", "    w", "  2 to 3: 2 alike", "    w", "b"]


def test_parameters_without_gradient_are_named(tmp_path: Path, capsys) -> None:
    spare = ("        super().__init__()\n", "        super().__init__()\n        self.spare = nn.Linear(2, 2)\n")
    start(tmp_path, "one", recipe=edited(tmp_path, spare))
    (event,) = [e for e in Run.open(tmp_path, "one").events() if e["kind"] == "model"]
    assert event["unreached"] == ["spare.weight", "spare.bias"]
    assert "the loss does not reach spare.weight, spare.bias: 2 parameters" in capsys.readouterr().out
    assert "unused" in kinds(tmp_path, "one"), "and later the watcher, by their gradients"


# ---- dry run ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("words", [[TOY, "model.dropout=0.2", "ema=0.9"], ["gpt/demo", *SMALL, "budget=9s"]], ids=["toy", "gpt"])
def test_dry_run_does_everything_once_and_keeps_nothing(tmp_path: Path, monkeypatch, capsys, words: list[str]) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["train", *words, "--dry"]) == 0
    printed = capsys.readouterr().out
    assert (
        "eval 2" in printed
        and "sample at step 2" in printed
        and "resumed at step 1 of 2" in printed
        and "bitwise equal" in printed
    )
    assert list(tmp_path.iterdir()) == []


def test_dry_run_finds_what_a_checkpoint_forgets(tmp_path: Path, monkeypatch, capsys) -> None:
    forgotten = [
        ('torch.zeros(()))', 'torch.zeros(()), persistent=False)'),
        ("(1), {}", "(1) * (1 + self.num_calls), {}"),
    ]  # fmt: skip
    monkeypatch.chdir(tmp_path)
    path = edited(tmp_path, *forgotten)
    assert main(["train", path, "--dry"]) == 1
    assert "NOT equal: " in capsys.readouterr().out


@pytest.mark.parametrize("option", [("--name", "x"), ("--run", "x"), ("--parent", "x"), ("-m", "x")], ids=" ".join)
def test_dry_run_refuses_options_of_kept_runs(option: tuple[str, str], capsys) -> None:
    assert main(["train", TOY, "--dry", *option]) == 2
    assert "--dry keeps nothing" in capsys.readouterr().err


# ---- checkpoints -----------------------------------------------------------------------------------------------------


def test_checkpoints_are_listed_with_losses(tmp_path: Path, capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    start(tmp_path, "one", "keep=2")
    run = Run.open(tmp_path, "one")
    capsys.readouterr()
    assert main(["runs", "checkpoints", "one", "--json", "--runs", str(tmp_path)]) == 0
    found = json.loads(capsys.readouterr().out)
    losses = {row["step"]: row["loss"] for row in run.rows()}
    values = {e["step"]: e["error"] for e in run.events() if e["kind"] == "eval"}
    names, best = run.checkpoints()
    assert [one["name"] for one in found] == names and [one["name"] for one in found if one["best"]] == [best]
    for one in found:
        assert (one["loss"], one["evaluation"]) == (losses[one["step"]], values[one["step"]])
        assert one["bytes"] == sum(f.stat().st_size for f in (run.path / "checkpoints" / one["name"]).iterdir())
        assert one["missing"] == []
    (run.path / "checkpoints" / names[0] / "optim.safetensors").unlink()
    assert main(["runs", "checkpoints", "one", "--runs", str(tmp_path)]) == 0
    first, *others = capsys.readouterr().out.splitlines()[1:]
    assert "damaged: no optim.safetensors" in first and others[-2].endswith("best") == (best == names[-1])


def test_run_without_checkpoints(tmp_path: Path, capsys) -> None:
    start(tmp_path, "one")
    for path in (tmp_path / "one" / "checkpoints").iterdir():
        path.rename(tmp_path / path.name)
    capsys.readouterr()
    assert main(["runs", "checkpoints", "one", "--runs", str(tmp_path)]) == 0
    assert "no checkpoint yet" in capsys.readouterr().out


# ---- folder and limits -----------------------------------------------------------------------------------------------


def test_settings_are_all_in_the_run_folder(tmp_path: Path) -> None:
    start(tmp_path, "one", "optim.lr=3e-3", "batch=4")
    saved = json.loads((tmp_path / "one" / "config.json").read_text())
    recipe, preset = find(TOY)
    config = configs.override(recipe.preset(preset), ["optim.lr=3e-3", "batch=4"])
    assert flat(saved["config"]) == configs.flatten(config)
    assert saved["changes"] == {"optim.lr": 3e-3, "batch": 4} and saved["hash"] == configs.digest(config)


def test_console_output_is_kept(tmp_path: Path, capsys, monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")  # on a narrow terminal lines are shorter than in the file
    start(tmp_path, "one")
    logged, shown = (tmp_path / "one" / "console.log").read_text().splitlines(), capsys.readouterr().out.splitlines()
    assert [line for line in logged if line in shown] == shown
    assert any(line.startswith("step: ") for line in logged), "with the details"


WITH_TEST = (
    'Sums(x[:16] * 0.5), {"name": "sums", "fingerprint": f"sums-{config.data.num}"})',
    'Sums(x[:16] * 0.5), {"name": "sums", "fingerprint": f"sums-{config.data.num}"}, test=Sums(x[16:48] * 2))',
)
COUNTED = ('        return {"error": ', '        return {"num": -float(len(x)), "error": ')


def test_limits_count_items_of_each_part(tmp_path: Path) -> None:
    path = edited(tmp_path, WITH_TEST, COUNTED)
    start(tmp_path, "all", recipe=path)
    start(tmp_path, "few", "limit.train=8", "limit.valid=4", "limit.test=5", recipe=path)
    for name, valid, test in (("all", 16, 32), ("few", 4, 5)):
        events = Run.open(tmp_path, name).events()
        assert {-e["num"] for e in events if e["kind"] == "eval"} == {valid}
        assert [(e["step"], -e["num"]) for e in events if e["kind"] == "test"] == [(12, test)], "once, at the end"
        assert Run.open(tmp_path, name).status()["best"] == -valid, "the test part decides nothing"
    assert Run.open(tmp_path, "few").rows()[-1]["epoch"] == 12.0


def test_limit_on_a_missing_part_is_refused() -> None:
    with pytest.raises(UserError, match=r"limit.test=3: this recipe's data has no test split"):
        limited(Data(Source(), Source(), {}), Limit(test=3))


# ---- the pages -------------------------------------------------------------------------------------------------------

PAGE = (ROOT / "docs" / "debugging.md").read_text()


@pytest.mark.parametrize("name", sorted(set(re.findall(r"`(tests/[\w/]+\.py::\w+)`", PAGE))))
def test_debugging_page_names_existing_tests(name: str) -> None:
    file, _, function = name.partition("::")
    tree = ast.parse((ROOT / file).read_text())
    assert function in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


def test_debugging_page_names_existing_commands() -> None:
    named = re.findall(r"`seedbed ([^`]+)`", PAGE)
    assert len(named) > 8
    for words in named:
        verb = next((v for v in sorted(VERBS, key=len, reverse=True) if words == v or words.startswith(f"{v} ")), None)
        assert verb, f"there is no verb in {words!r}"


GLOSSARY = (ROOT / "docs" / "glossary.md").read_text()
SUFFIX = re.compile(r"_?[a-z][a-z0-9_]*_([A-Z0-9]*[A-Z][A-Z0-9]*)")


def letters(path: Path) -> set[str]:
    """The letters of shapes in the names of a file."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        found = getattr(node, "id", None) or getattr(node, "arg", None) or getattr(node, "attr", None)
        if isinstance(found, str) and (match := SUFFIX.fullmatch(found)):
            names |= set(match[1])
    return {letter for letter in names if letter.isalpha()}


def test_glossary_has_every_shape_letter_of_the_code() -> None:
    known = set(re.findall(r"^\| ([A-Z]) \|", GLOSSARY, re.MULTILINE))
    used = {str(path.relative_to(ROOT)): letters(path) for path in (ROOT / "src").rglob("*.py")}
    assert sum(map(bool, used.values())) > 30
    assert {name: found - known for name, found in used.items() if found - known} == {}


def test_glossary_is_sorted_short_and_without_repetitions() -> None:
    words = re.findall(r"^\| ([^|]+) \| [^|]+ \|$", GLOSSARY.partition("## Words")[2], re.MULTILINE)[1:]
    assert words == sorted(words, key=str.lower) and len({w.lower() for w in words}) == len(words)
    assert 10 < len(words) <= 40
