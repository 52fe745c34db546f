"""What a person sees in the terminal: snapshots at 80, 120 and 200 columns, the live line, keys, explain, help.

`WRITE_SNAPSHOTS=1 python -m pytest tests/unit/test_terminal.py -k snapshot` writes the snapshots again; read what changed.
"""

import fcntl
import io
import json
import os
import pty
import re
import shlex
import shutil
import struct
import termios
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import ROOT

from seedbed import cli
from seedbed.cli import failures
from seedbed.cli.explain import checks_and_alarms, explained, registry
from seedbed.cli.keys import key_lines, keys_of
from seedbed.config import Config, Units, flatten, override
from seedbed.dist import SINGLE
from seedbed.errors import UserError
from seedbed.launch import local
from seedbed.recipes import catalogue, find, names
from seedbed.report.tables import evaluation_table
from seedbed.track.console import Console
from seedbed.track.run import Run

WIDTHS = (80, 120, 200)
ESCAPE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
CHARS = Units("tokens", 64, "nats/char", "{name}: {num_tokens:,} characters to train on, {num_valid_tokens:,} held out")
ROW = {"step": 120, "loss": 2.31459, "lr": 6e-4, "items_per_s": 1234.5, "wait": 0.013, "mfu": 0.4512, "memory": 1.2e9}
FACTS = {
    "name": "reference",
    "tokenizer": {"kind": "char", "vocab_size": 103},
    "num_tokens": 418_473,
    "num_valid_tokens": 46_497,
    "limit": {"train": 0, "valid": 256, "test": 0},
}
MANY = {"free_l1": 0.3084, **{f"{name}_{h}": 20.0 + h / 7 for h in (1, 4, 16, 64) for name in ("free", "copy", "mean", "fade")}}


@pytest.fixture(autouse=True)
def plain_surroundings(monkeypatch, tmp_path: Path):
    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE", "COLUMNS", "SEEDBED_RUNS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def ask(capsys) -> Callable[..., tuple[int, str, str]]:
    def call(*words: str) -> tuple[int, str, str]:
        status = cli.main(words)
        return status, *capsys.readouterr()

    return call


def check_snapshot(name: str, text: str, width: int) -> None:
    assert max(map(len, text.splitlines())) <= width, "nothing is wider than the terminal"
    path = ROOT / "tests" / "snapshots" / f"{name}-{width}.txt"
    if os.environ.get("WRITE_SNAPSHOTS"):
        path.write_text(text)
    assert text == path.read_text()


def started(folder: Path, console: Console, settings: list[str], parent: bool = False, verbose: bool = False) -> None:
    """Print what a run of gpt/demo prints before step 0, with facts that are the same on every machine."""
    recipe, _ = find("gpt/demo")
    base, root, console.verbose = recipe.preset("demo"), Path("runs"), verbose
    if parent:
        Run.create(root, "gpt", "demo", override(base, ["optim.lr=0.01"]), name="mother", base=base, code={})
    config = override(base, settings)
    run = Run.create(
        root, "gpt", "demo", config, name="child", why="a try", parent="mother" if parent else None, base=base, code={}
    )
    local.print_config(run, base, console)
    job: Any = SimpleNamespace(
        run=run,
        config=config,
        console=console,
        system=torch.nn.Linear(1000, 999),
        data=SimpleNamespace(facts=FACTS),
        engine=SimpleNamespace(device=torch.device("cpu")),
        ranks=SINGLE,
    )
    local.show_facts(job, local.Launch(run, recipe, config, console))


def lines_before_step_0(settings: list[str], **how: bool) -> str:
    console = Console(stream=(out := io.StringIO()))
    started(Path(), console, settings, **how)
    return out.getvalue()


SETTINGS = ["steps=40", "every.eval=20", "optim.lr=0.001", "batch=32", "guard.window=64", "every.log=5", "model.dropout=0.1"]


# ---- snapshots -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", WIDTHS)
def test_overview_snapshot(ask, monkeypatch, width: int):
    monkeypatch.setenv("COLUMNS", str(width))
    status, out, _ = ask()
    assert status == 0 and "…" not in out, "nothing is cut"
    check_snapshot("overview", out, width)


@pytest.mark.parametrize("width", WIDTHS)
def test_start_of_a_run_snapshot(monkeypatch, width: int):
    monkeypatch.setenv("COLUMNS", str(width))
    check_snapshot("start", lines_before_step_0(SETTINGS, parent=True), width)


@pytest.mark.parametrize("width", WIDTHS)
def test_log_lines_snapshot(monkeypatch, width: int):
    monkeypatch.setenv("COLUMNS", str(width))
    console = Console(stream=(out := io.StringIO()), clock=iter(range(0, 1000, 60)).__next__)
    console.units = CHARS
    for step in (99_980, 99_990, 100_000):
        console.step_row({**ROW, "step": step}, last_step=100_000)
    console.evaluation(100_000, {"loss": 1.2, "perplexity": 3.32, "bits_per_byte": 1.731}, improved=True)
    console.evaluation(100_000, MANY, improved=False, part="test")
    check_snapshot("log", out.getvalue(), width)


@pytest.mark.parametrize("width", WIDTHS)
def test_evaluation_table_snapshot(width: int):
    events = [
        {
            "kind": "eval",
            "step": step,
            **{key: value / (step + 1) for key, value in MANY.items()},
            "best": step < 300,
            "seconds": 1.0,
        }
        for step in (0, 100, 200, 300)
    ]
    check_snapshot("evaluations", evaluation_table(events, width) + "\n", width)


# ---- before step 0 ---------------------------------------------------------------------------------------------------


def test_untouched_preset_prints_at_most_eight_lines():
    text = lines_before_step_0([])
    assert len(text.splitlines()) <= 7, "the line of the checks is the eighth"
    assert "changed" not in text and "time left is shown after the first steps" in text


def test_python_dicts_are_never_printed():
    for how in ({}, {"verbose": True}):
        text = lines_before_step_0(["steps=40"], **how)
        assert "{" not in text and "'" not in text, text
        shutil.rmtree("runs")


def test_verbose_start_has_every_key_with_marks():
    text = lines_before_step_0(SETTINGS, parent=True, verbose=True)
    config = override(find("gpt/demo")[0].preset("demo"), SETTINGS)
    for key in flatten(config):
        assert f" {key.rpartition('.')[2]}=" in text, key
    assert " lr=0.001*~" in text and "kind=char vocab_size=103" in text and "steps=40*~" in text


def test_known_time_is_that_of_a_finished_run_of_the_same_settings():
    base = find("gpt/demo")[0].preset("demo")
    for name, settings, status in (("same", ["seed=7"], "done"), ("other", ["steps=9"], "done"), ("ended", [], "failed")):
        run = Run.create(Path("runs"), "gpt", "demo", override(base, settings), name=name, base=base, code={})
        run.event(0, "start", device="cpu", data={})
        run.row({"step": 1, "loss": 1.0})
        run.set_status(status, clock={"train": 70.0, "eval": 5.0})
        run.close()
    assert "1:15 in the last run of these settings, same" in lines_before_step_0([])
    shutil.rmtree("runs/child")
    assert "time left is shown after the first steps" in lines_before_step_0(["steps=11"]), "no guess by another length"


def test_damaged_run_does_not_stop_the_next_one():
    folder = Path("runs/broken")
    folder.mkdir(parents=True)
    for name in ("status.json", "config.json", "events.jsonl", "rows.jsonl"):
        (folder / name).write_text("[1, {")
    assert "time left is shown after the first steps" in lines_before_step_0([])


def test_details_are_in_the_log_without_verbose(tmp_path: Path):
    console = Console(tmp_path / "console.log", stream=(out := io.StringIO()))
    console.detail("a detail")
    console.close()
    assert out.getvalue() == "" and (tmp_path / "console.log").read_text() == "a detail\n"


# ---- the live line ---------------------------------------------------------------------------------------------------


def on_terminal(act: Callable[[Console], None], columns: int) -> str:
    leader, follower = pty.openpty()
    fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    with os.fdopen(follower, "w", encoding="utf-8") as stream:
        console = Console(stream=stream)
        console.units = CHARS
        act(console)
        console.close()
        stream.flush()
        os.set_blocking(leader, False)
        text = b""
        try:
            while part := os.read(leader, 65536):
                text += part
        except (BlockingIOError, OSError):
            pass
    os.close(leader)
    return text.decode()


def three_rows(console: Console) -> None:
    for step in (60_000, 119_990, 240_000):
        console.step_row({**ROW, "step": step}, last_step=240_000)
    console.evaluation(240_000, MANY, improved=True)


@pytest.mark.parametrize("columns", [20, 40, 80, 120, 200])
def test_live_line_does_not_wrap(columns: int):
    shown = [ESCAPE.sub("", line) for line in re.split(r"\r\x1b\[2K|\n|\r", on_terminal(three_rows, columns))]
    live = [line for line in shown if "%" in line and "step" not in line and "eval" not in line]
    assert live and all(len(line) < columns for line in live)
    if columns >= 80:
        assert all(len(line) <= columns for line in shown), "log lines have the width of the terminal too"
        assert any(re.search(r"━─* +50%  79k tokens/s  loss 2\.3146 nats/char  [\d:]+ left", line) for line in live), live


@pytest.mark.parametrize("forced", [False, True])
def test_no_color_means_no_style_and_stands_above_force_color(monkeypatch, forced: bool):
    monkeypatch.setenv("NO_COLOR", "yes")
    if forced:
        monkeypatch.setenv("FORCE_COLOR", "1")
    assert not re.search(r"\x1b\[[0-9;]*m", on_terminal(three_rows, 80))
    monkeypatch.setenv("NO_COLOR", "")
    assert re.search(r"\x1b\[[0-9;]*m", on_terminal(three_rows, 80)), "empty counts as not set"


def test_console_log_has_all_columns_and_metrics(monkeypatch, tmp_path: Path):
    monkeypatch.setenv("COLUMNS", "80")
    console = Console(tmp_path / "console.log", stream=(out := io.StringIO()))
    three_rows(console)
    console.close()
    text = (tmp_path / "console.log").read_text()
    assert "mfu 45%   1.2 GB" in text and all(name in text for name in MANY) and max(map(len, text.splitlines())) <= 120
    assert "1.2 GB" not in out.getvalue() and " more  best so far" in out.getvalue()


# ---- keys and explain ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", names())
def test_every_key_of_every_preset_has_a_sentence_and_its_value(recipe: str):
    for make in find(recipe)[0].presets.values():
        config = make()
        found = {key.name: key for key in keys_of(config)}
        assert set(flatten(config)) <= set(found)
        for name, key in found.items():
            assert key.about.strip() and key.type, name
            if not name.startswith("slurm."):
                assert override(config, [f"{name}={key.default}"]) == config, f"{name} can be typed as it is shown"


def test_keys_are_found_by_part_and_pattern(ask):
    status, out, _ = ask("keys", "gpt/demo", "*.lr", "--json")
    assert status == 0 and [key["name"] for key in json.loads(out)] == ["optim.lr"]
    assert set(json.loads(out)[0]) == {"name", "type", "default", "range", "about"}
    status, out, _ = ask("keys", "gpt/demo", "schedule")
    assert status == 0 and "cosine" in out and "schedule.kind=linear" in out and "optim.lr" not in out
    status, _, err = ask("keys", "gpt/demo", "optim.lrr")
    assert status == 2 and "optim.lr" in err and len(err.splitlines()) == 1


def test_sentence_of_a_users_own_key_is_its_help():
    from dataclasses import dataclass, field

    @dataclass(frozen=True)
    class Mine:
        knob: int = field(default=3, metadata={"help": "what it turns"})

    key = next(key for key in keys_of(Config(model=Mine(), data=None)) if key.name == "model.knob")
    assert key == ("model.knob", "a whole number", "3", "", "what it turns")
    assert len(list(key_lines([key]))) == 2


@pytest.mark.parametrize(
    "name", ["loss", "perplexity", "wait", "loss_t3", "free_16", "spike", "O7", "75", "better", "optim", "lr"]
)
def test_explain_knows_names_of_every_kind(ask, name: str):
    status, out, err = ask("explain", name)
    if name == "optim":
        assert status == 2 and "nearest" in err and len(err.splitlines()) == 1
    else:
        assert (status, err) == (0, "") and out.splitlines()[0] == name and len(out.splitlines()) > 1


def test_every_exit_code_check_and_event_is_explained():
    from seedbed import errors
    from seedbed.checks.registry import all_checks
    from seedbed.track.events import KINDS

    known = registry() | checks_and_alarms()
    codes = {str(value) for name, value in vars(errors).items() if name.startswith("EXIT_")}
    assert codes == set(known["exit code"]) and set(KINDS) <= set(known["event"])
    assert {check.id for check in all_checks()} == set(known["check"])
    assert all(text.strip() for about in known.values() for text in about.values())


@pytest.mark.slow
@pytest.mark.parametrize("recipe", names())
def test_every_number_of_a_demo_is_explained(recipe: str):
    short = ["steps=2", "every.log=1", "every.eval=0", "device=cpu", "limit.valid=16"]
    short += {"world": ["data.frames=600", "data.examined=0"], "thinker": ["data.test=0"], "ebt": ["batch=4"]}.get(recipe, [])
    assert local.train(f"{recipe}/demo", short, root=Path("runs"), run_name="it", dirty=True) == 0
    run, known = Run.open(Path("runs"), "it"), registry()
    rows = {key for row in run.rows() for key in row}
    evaluated = {key for event in run.events() if event["kind"] in ("eval", "test") for key, value in event.items()}
    common = {"step", "kind", "time", "weights", "best", "higher_is_better", "seconds"}
    assert not [name for name in (rows | evaluated) - common if not explained(name, known)]
    units = find(f"{recipe}/demo")[0].units(find(f"{recipe}/demo")[0].preset("demo"))
    assert units.items != "items" and f"{units.items}/s" in (run.path / "console.log").read_text()


# ---- help ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", list(cli.VERBS))
def test_examples_of_a_verb_are_commands_that_it_takes(ask, name: str):
    status, out, _ = ask(*name.split(), "--help")
    assert status == 0
    examples = [line.strip() for line in out.partition("examples:")[2].splitlines() if line.startswith("  seedbed ")]
    assert examples
    for line in examples:
        words = shlex.split(line)[1:]
        verb, rest = cli._verb_name(words)
        assert verb == name, line
        cli.parser_of(verb).read(rest)


def test_train_help_prints_the_keys_of_the_preset(ask):
    out = ask("train", "gpt/demo", "--help")[1]
    assert "optim.lr=0.003" in out and "base learning rate of AdamW" in out and "examples:" in out
    out = ask("train", "--help")[1]
    assert "seedbed keys RECIPE/PRESET" in out and "optim.lr=" not in out.partition("examples:")[2].replace("optim.lr=1e-3", "")
    assert "did you mean demo" in ask("train", "gpt/demoo", "--help")[1]


@pytest.mark.parametrize("verb", [name for name in cli.VERBS if name.split()[-1] in failures.DESTRUCTIVE])
def test_typo_never_suggests_a_destructive_verb(verb: str):
    for cut in range(len(verb)):
        for typo in {verb[:cut] + verb[cut + 1 :], verb[:cut] + "x" + verb[cut:], verb + "s", verb[: cut + 1]} - set(cli.VERBS):
            with pytest.raises(UserError) as caught:
                failures.refuse_verb(typo)
            assert f"seedbed {verb}" not in str(caught.value) and "rm" not in str(caught.value).split("did you mean")[-1].split()


def test_every_preset_has_its_line_in_the_overview():
    known = catalogue.measured()
    for recipe in names():
        presets = set(find(recipe)[0].presets)
        assert presets == set(known[recipe]) - {"about"}, recipe
        for about in (known[recipe][preset] for preset in presets):
            assert {"what", "machine"} <= set(about) <= {"what", "machine", "time", "result"}
            assert len(about["what"]) <= 19 and len(about.get("result", "")) <= 14 and len(about.get("time", "")) <= 7


def test_docstrings_of_presets_do_not_repeat_the_overview():
    """Command, machine, time and result stand in presets.toml; a docstring begins with one whole sentence for listings."""
    known = catalogue.measured()
    for recipe in names():
        for preset, make in find(recipe)[0].presets.items():
            first, _, more = (make.__doc__ or "").strip().partition("\n")
            assert first.endswith("."), f"{recipe}/{preset}"
            told = {f"seedbed train {recipe}/", "CPU core", "H200", known[recipe][preset].get("result", "H200")}
            assert not [words for words in told if words in more], f"{recipe}/{preset}"


def test_modules_with_data_ship_it():
    """Package data that is not declared would be missing from a wheel."""
    import tomllib

    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]
    for path in [*(ROOT / "src/seedbed").rglob("*.toml"), *(ROOT / "src/seedbed").rglob("*.txt")]:
        parts = path.relative_to(ROOT / "src").parts
        fits = [
            Path(*parts).match(f"{package.replace('.', '/')}/{glob}") for package, globs in declared.items() for glob in globs
        ]
        assert any(fits), path
