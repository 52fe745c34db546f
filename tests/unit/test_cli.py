"""The command line: verbs and their words, exit codes, one-line errors, and answers at once."""

import importlib
import json
import os
import pty
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from conftest import ROOT
from track_samples import make, train

from seedbed import cli
from seedbed.cli import data_and_runs, using
from seedbed.errors import UserError
from seedbed.report import journal
from seedbed.train.options import read_options
from seedbed.train.system import option

Answer = tuple[int, str, str]


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("SEEDBED_RUNS", raising=False)
    monkeypatch.setenv("COLUMNS", "120")
    return tmp_path


@pytest.fixture
def ask(capsys) -> Callable[..., Answer]:
    """Run a command in this process: exit code, stdout, stderr."""

    def call(*words: str) -> Answer:
        status = cli.main(words)
        out, err = capsys.readouterr()
        return status, out, err

    return call


class Calls(list[tuple[str, tuple[Any, ...], dict[str, Any]]]):
    """What the verbs asked of the modules behind them."""

    def stand_in(self, monkeypatch, name: str, functions: tuple[str, ...], result: Any = 0) -> None:
        package, _, last = name.rpartition(".")
        module = ModuleType(name)
        for function in functions:
            setattr(module, function, self._recorder(function, result))
        monkeypatch.setitem(sys.modules, name, module)
        parent = __import__(package, fromlist=[last])
        monkeypatch.setattr(parent, last, module, raising=False)

    def _recorder(self, function: str, result: Any) -> Callable[..., int]:
        def record(*given: Any, **named: Any) -> int:
            self.append((function, given, named))
            if isinstance(result, BaseException):
                raise result
            return result

        return record


TUNE = ("find_lr", "find_batch", "profile", "plan")
DATA = ("prepare", "prepare_image_store", "inspect", "verify", "bench")


@pytest.fixture
def calls(monkeypatch) -> Calls:
    found = Calls()
    found.stand_in(monkeypatch, "seedbed.launch.local", ("train",))
    found.stand_in(monkeypatch, "seedbed.launch.demo", ("demo",))
    found.stand_in(monkeypatch, "seedbed.launch.resume", ("resume",))
    found.stand_in(monkeypatch, "seedbed.inference", ("sample", "export"))
    found.stand_in(monkeypatch, "seedbed.publish", ("publish",))
    found.stand_in(monkeypatch, "seedbed.tune.verbs", TUNE)
    found.stand_in(monkeypatch, "seedbed.report.data_verbs", DATA)
    return found


RUNS = Path("runs")
TRAIN = {"root": RUNS, "run_name": None, "why": "", "dirty": False, "parent": None, "check": "quick", "anomaly": False}
TRAIN |= {"until": 0, "mirrors": (), "verbose": False}
RESUME = {"force": False, "check": "quick", "until": 0, "mirrors": None}
TUNING = {"root": RUNS, "json": False}
WORDS = [
    ("train gpt/demo", "train", ("gpt/demo", []), TRAIN),
    ("train gpt/demo steps=240 --run x", "train", ("gpt/demo", ["steps=240"]), {**TRAIN, "run_name": "x"}),
    ("train --run x gpt/demo a=1 -m why b=-2", "train", ("gpt/demo", ["a=1", "b=-2"]), {**TRAIN, "run_name": "x", "why": "why"}),
    ("train a.py:b --why=w --dirty x=1 --parent p y=2", "train", ("a.py:b", ["x=1", "y=2"]),
     {**TRAIN, "why": "w", "dirty": True, "parent": "p"}),
    ("train gpt/demo --no-check", "train", ("gpt/demo", []), {**TRAIN, "check": "skip"}),
    ("train gpt/demo --force --anomaly", "train", ("gpt/demo", []), {**TRAIN, "check": "force", "anomaly": True}),
    ("--runs other train gpt/demo", "train", ("gpt/demo", []), {**TRAIN, "root": Path("other")}),
    ("train gpt/demo --runs other", "train", ("gpt/demo", []), {**TRAIN, "root": Path("other")}),
    ("--runs=a train gpt/demo --runs b", "train", ("gpt/demo", []), {**TRAIN, "root": Path("b")}),
    ("resume first", "resume", (RUNS, "first", []), RESUME),
    ("resume first --no-check", "resume", (RUNS, "first", []), {**RESUME, "check": "skip"}),
    ("resume first batch=16 --force --dirty", "resume", (RUNS, "first", ["batch=16"]),
     {**RESUME, "force": True, "check": "force"}),
    ("demo", "demo", (RUNS,), {}),
    ("demo --dirty", "demo", (RUNS,), {}),
    ("export first", "export", (RUNS, "first", Path("first-export"), ""), {"to": "files"}),
    ("export runs/first/ --out there --checkpoint best", "export", (RUNS, "runs/first/", Path("there"), "best"), {"to": "files"}),
    ("publish first --to hub:me/tiny", "publish", (RUNS, "first", "hub:me/tiny", "files", ""), {"private": False, "dry": False}),
    ("publish --dry --form hf first --private --to=hub:me/tiny --checkpoint best", "publish",
     (RUNS, "first", "hub:me/tiny", "hf", "best"), {"private": True, "dry": True}),
    ("find-lr gpt/demo a=1 --json", "find_lr", ("gpt/demo", ["a=1"]),
     {**TUNING, "json": True, "steps": None, "repeats": 2, "seconds": None, "low": None, "high": None}),
    ("find-lr --low 1e-6 --high 1 --steps 50 --repeats 4 --seconds 9 gpt/demo", "find_lr", ("gpt/demo", []),
     {**TUNING, "steps": 50, "repeats": 4, "seconds": 9.0, "low": 1e-6, "high": 1.0}),
    ("find-batch gpt/demo --limit 2.5 --max 64", "find_batch", ("gpt/demo", []),
     {**TUNING, "limit": 2.5, "most": 64, "compiled": False}),
    ("find-batch gpt/demo --compiled", "find_batch", ("gpt/demo", []), {**TUNING, "limit": None, "most": None, "compiled": True}),
    ("profile gpt/demo --steps 5", "profile", ("gpt/demo", []), {**TUNING, "steps": 5}),
    ("data prepare a.txt", "prepare", ("a.txt",), {"tokenizer": "char", "vocab": 4096, "out": None, "json": False}),
    ("data prepare zoo --size 32", "prepare_image_store", ("zoo",), {"size": 32, "out": None, "json": False}),
    ("data prepare --tokenizer bpe a.txt --vocab 512 --out there --json", "prepare", ("a.txt",),
     {"tokenizer": "bpe", "vocab": 512, "out": Path("there"), "json": True}),
    ("data inspect store --json", "inspect", ("store",), {"json": True, "open_recipe": data_and_runs._open_data}),
    ("data verify store", "verify", ("store",), {"json": False}),
    ("data bench store --dirty", "bench", ("store",), {"json": False}),
    (
        "plan gpt/demo --run first --prices p.json --world 8", "plan", ("gpt/demo", []),
        {**TUNING, "run": "first", "prices": Path("p.json"), "world": [8]},
    ),
]  # fmt: skip


@dataclass(frozen=True)
class SampleOptions:
    """Options of a recipe."""

    prompt: str | None = option(None, "what the samples begin with")
    num: int = option(1, "number of samples", low=1)
    top_p: float = option(1.0, "share", low=0, high=1)
    class_: str = "all"
    text: tuple[str, ...] = ()


SAMPLES = [
    ("first", {}),
    ("first --prompt To --num 2 --top-p 0.5", {"prompt": "To", "num": 2, "top_p": 0.5}),
    ("--prompt To first --class=cat", {"prompt": "To", "class": "cat"}),
    ("first --text a --text b --checkpoint step-000010", {"text": ["a", "b"]}),
]


@pytest.mark.parametrize(("line", "options"), SAMPLES)
def test_sample_options_are_read_by_the_dataclass_of_the_recipe(ask, calls: Calls, line: str, options: dict):
    assert ask("sample", *line.split())[0] == 0
    ((function, (root, name, read), named),) = calls
    assert (function, root, name) == ("sample", RUNS, "first") and read(SampleOptions) == options
    assert named == {"checkpoint_name": "step-000010" if "--checkpoint" in line else "", "write": using._stream}


def test_sample_option_that_is_a_keyword_of_python_may_have_an_underscore():
    for name in ("class", "class_"):
        assert read_options(SampleOptions, {name: "cat"}).class_ == "cat"
    with pytest.raises(UserError, match="does not know --classes;"):
        read_options(SampleOptions, {"classes": "cat"})


WRONG_SAMPLES = [
    ("first --shift 2", "this recipe does not know --shift; it knows --prompt, --num, --top-p, --class, --text"),
    ("first --num 0", "0 is not at least 1"),
    ("first --num two", "two is not a whole number"),
    ("first --top-p 2", "2 is not between 0 and 1"),
    ("first --prompt", "expected one argument"),
]


@pytest.mark.parametrize(("line", "says"), WRONG_SAMPLES)
def test_sample_options_that_are_wrong_get_one_line(ask, calls: Calls, line: str, says: str):
    assert ask("sample", *line.split())[0] == 0
    with pytest.raises(UserError, match=re.escape(says)):
        calls[0][1][2](SampleOptions)


def test_sample_help_lists_the_options_of_the_recipe(ask, calls: Calls, capsys):
    ask("sample", "first", "--help")
    with pytest.raises(SystemExit) as left:
        calls[0][1][2](SampleOptions)
    assert left.value.code == 0 and "--top-p" in (shown := capsys.readouterr().out) and "what the samples begin with" in shown
    calls.clear()
    assert ask("sample", "--help")[0] == 0 and not calls


@pytest.mark.parametrize(("line", "function", "given", "named"), WORDS, ids=[line for line, *_ in WORDS])
def test_verb_arguments_are_passed_on(ask, calls: Calls, line: str, function: str, given: tuple, named: dict):
    assert ask(*line.split())[0] == 0
    assert calls == [(function, given, named)]


def test_runs_folder_by_variable_and_option(ask, calls: Calls, monkeypatch):
    monkeypatch.setenv("SEEDBED_RUNS", "/elsewhere")
    ask("demo")
    ask("demo", "--runs", "here")
    assert [given for _, given, _ in calls] == [(Path("/elsewhere"),), (Path("here"),)]


WRONG = [
    ("trian gpt/demo", "no verb `trian`; did you mean: seedbed train"),
    ("run list", "did you mean: seedbed runs"),
    ("runs lst", "no verb `runs lst`; did you mean: seedbed runs list"),
    ("find_lr gpt/demo", "did you mean: seedbed find-lr"),
    ("gpt/demo steps=5", "to train that recipe: seedbed train gpt/demo"),
    ("my.py", "to train that recipe: seedbed train my.py"),
    ("think RUN", "`think` is now: seedbed inference-curve"),
    ("sample RUN --think 8", "--think is now --optimize-steps"),
    ("sample RUN --think=8", "--think is now --optimize-steps"),
    ("xyzzy", "no verb `xyzzy`; seedbed --help lists them"),
    ("train", "required: RECIPE/PRESET; see: seedbed train --help"),
    ("train gpt/demo --steps 5", "unknown option --steps; settings are written steps=VALUE"),
    ("train gpt/demo --optim.lr=5", "unknown option --optim.lr; settings are written optim.lr=VALUE"),
    ("train gpt/demo --rum x", "unknown option --rum, did you mean --run?"),
    ("train gpt/demo --run", "expected one argument"),
    ("--bogus", "unknown argument --bogus"),
    ("--run x train", "unknown option --run, did you mean --runs?"),
    ("resume", "required: RUN"),
    ("runs show", "required: RUN"),
    ("runs diff a", "required: RUN"),
    ("runs rm", "required: RUN"),
    ("runs show nothing", "holds no runs yet"),
    ("note", "required: RUN, TEXT"),
    ("data prepare", "required: TEXT"),
    ("data prepare x --vocab 12", "12 is not at least 257"),
    ("data prepair x", "did you mean: seedbed data prepare"),
    ("data verify", "required: STORE"),
    ("journal nothing", "has no entry for 'nothing'"),
    ("runs list extra", "unknown argument extra"),
]


@pytest.mark.parametrize(("line", "printed"), WRONG, ids=[line for line, _ in WRONG])
def test_wrong_command_line_is_an_error_of_one_or_two_lines(ask, calls: Calls, line: str, printed: str):
    status, out, err = ask(*line.split())
    assert (status, out, calls) == (2, "", [])
    assert err.startswith("seedbed: ") and printed in err
    assert len(err.splitlines()) <= 2


# ---- exit codes ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("status", [0, 1, 130, 143])
def test_exit_code_is_that_of_the_verb(ask, calls: Calls, monkeypatch, status: int):
    calls.stand_in(monkeypatch, "seedbed.launch.local", ("train",), result=status)
    calls.stand_in(monkeypatch, "seedbed.launch.resume", ("resume",), result=status)
    assert ask("train", "gpt/demo") == (status, "", "")


RAISED = [
    (UserError("what is wrong\nwhat to do"), 2, "seedbed: what is wrong\n  what to do\n"),
    (KeyboardInterrupt(), 130, "seedbed: interrupted\n"),
    (OSError(28, "No space left on device", "runs/x/file"), 2, "seedbed: No space left on device: runs/x/file\n"),
    (PermissionError(13, "Permission denied", "runs"), 2, "seedbed: Permission denied: runs\n"),
]


@pytest.mark.parametrize(("error", "status", "printed"), RAISED, ids=[type(e).__name__ for e, *_ in RAISED])
def test_user_errors_have_no_traceback(ask, calls: Calls, monkeypatch, error: BaseException, status: int, printed: str):
    calls.stand_in(monkeypatch, "seedbed.launch.local", ("train",), result=error)
    calls.stand_in(monkeypatch, "seedbed.launch.resume", ("resume",), result=error)
    assert ask("train", "gpt/demo") == (status, "", printed)


@pytest.mark.parametrize("error", [ZeroDivisionError("of ours"), OSError(5, "Input/output error"), AssertionError("never")])
def test_bugs_show_a_traceback_and_ask_for_a_report(ask, calls: Calls, monkeypatch, error: Exception):
    calls.stand_in(monkeypatch, "seedbed.launch.local", ("train",), result=error)
    calls.stand_in(monkeypatch, "seedbed.launch.resume", ("resume",), result=error)
    status, _, err = ask("train", "gpt/demo")
    assert status == 1
    assert "Traceback" in err and str(error) in err
    assert err.splitlines()[-1].startswith("seedbed: this is a bug in seedbed ") and "report" in err.splitlines()[-1]


def test_bug_in_a_users_recipe_is_attributed_to_it(ask, calls: Calls, monkeypatch, here: Path):
    from seedbed import recipes

    path = here / "mine.py"
    path.write_text("from seedbed.config import Config\ndef a() -> Config:\n    return 1 / 0\n")
    module = sys.modules["seedbed.launch.local"]
    monkeypatch.setattr(module, "train", lambda name, *_, **__: recipes.find(name)[0].preset("a"))
    status, _, err = ask("train", str(path))
    assert status == 1
    assert err.endswith(f"seedbed: the error above was raised by your recipe, {path}:3, in a\n    return 1 / 0\n")
    assert err.startswith("Traceback") and "cli/__init__.py" not in err, "only lines from the user's file on are shown"


def test_broken_pipe_is_not_an_error(seedbed, here: Path):
    for number in range(60):
        make(here / "runs", f"run-{number:03d}", why="x" * 2000)
    code = "import sys; from seedbed.cli import main; sys.exit(main())"
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    process = subprocess.Popen(
        [sys.executable, "-c", code, "runs", "list", "--json"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=env
    )
    assert process.stdout is not None and process.stderr is not None
    process.stdout.read(10)
    process.stdout.close()
    assert (process.stderr.read(), process.wait(30)) == (b"", 141)
    process.stderr.close()


def test_unencodable_output_is_not_an_error(seedbed, here: Path):
    make(here / "runs", "first", why="grün 🌱")
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "PYTHONIOENCODING": "ascii"}
    code = "import sys; from seedbed.cli import main; sys.exit(main())"
    done = subprocess.run([sys.executable, "-c", code, "runs"], capture_output=True, env=env, check=False)
    assert (done.returncode, done.stderr) == (0, b"") and b"gr?n" in done.stdout


ENDING = """
import atexit, {module}
from seedbed.cli import main
atexit.register(print, "exit function ran")
main()
print("returned")
"""


@pytest.mark.parametrize(("module", "printed"), [("math", ["returned", "exit function ran"]), ("torch", ["exit function ran"])])
def test_interpreter_is_not_finalised_once_torch_is_loaded(module: str, printed: list[str]):
    """It takes up to a second, and gloo's threads abort a process whose interpreter is being finalised."""
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    code = ENDING.format(module=module)
    done = subprocess.run([sys.executable, "-c", code, "--version"], capture_output=True, text=True, env=env, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[1:] == printed


# ---- help and overview -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("module", list(cli._MODULES))
def test_verbs_of_a_module_are_those_of_the_table(module: str):
    name = importlib.import_module(f"seedbed.cli.{module}").__name__
    registered = tuple(verb for verb, found in cli.REGISTERED.items() if found.act.__module__ == name)
    assert registered == cli._MODULES[module]


@pytest.mark.parametrize("name", list(cli.VERBS))
def test_verb_help_is_complete(ask, name: str):
    status, out, err = ask(*name.split(), "--help")
    assert (status, err) == (0, "")
    assert f"usage: seedbed {name}" in out and cli.VERBS[name].about.split()[0] in out
    assert "--runs DIR" in out and "--json" in out and "--dirty" in out


def test_help_lists_every_verb_within_120_columns(ask):
    status, out, _ = ask("--help")
    assert status == 0
    for name, verb in cli.VERBS.items():
        assert f"\n  {name} {verb.usage}".rstrip() in out
    assert max(map(len, out.splitlines())) <= 120


@pytest.mark.parametrize("group", list(cli.GROUPS))
def test_group_help_lists_its_verbs(ask, group: str):
    status, out, _ = ask(group, "--help")
    assert status == 0
    assert all(name in out for name in cli.VERBS if name.startswith(f"{group} "))


def test_version_is_printed(ask):
    status, out, _ = ask("--version")
    assert status == 0 and out.startswith("seedbed ") and len(out.split()) == 2


def test_overview_lists_recipes_presets_and_the_last_runs(ask, here: Path):
    for number in range(8):
        train(make(here / "runs", f"run-{number}", why=f"why {number}"))
    status, out, _ = ask()
    assert status == 0
    assert "or your own file" in out and "8 in runs" in out
    assert sum(f"run-{number}" in out for number in range(8)) == 5
    assert max(map(len, out.splitlines())) <= 120
    values = json.loads(ask("--json")[1])
    assert len(values["runs"]) == 8
    from seedbed import recipes

    assert list(values["recipes"]) == recipes.names()


def test_overview_of_an_empty_folder_suggests_commands(ask):
    status, out, _ = ask()
    assert status == 0 and "last runs" not in out and "seedbed demo" in out


QUICK = [
    (),
    ("--help",),
    ("--version",),
    ("runs",),
    ("runs", "list", "--json"),
    ("train", "--help"),
    ("journal",),
    ("runs", "show", "run-000"),
]


@pytest.fixture(scope="module")
def hundred(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("hundred")
    train(make(folder / "runs", "run-000"))
    for number in range(1, 100):
        make(folder / "runs", f"run-{number:03d}")
    return folder


TIMED = """
import resource, sys
from seedbed.cli import main
status = main()
spent = resource.getrusage(resource.RUSAGE_SELF)
heavy = [name for name in ("torch", "numpy", "rich", "matplotlib") if name in sys.modules]
print(spent.ru_utime + spent.ru_stime, status, heavy, file=sys.stderr)
"""


@pytest.mark.parametrize("words", QUICK, ids=" ".join)
def test_listing_a_hundred_runs_is_fast(words: tuple[str, ...], hundred: Path):
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    # Time of the processor, and the least of a few: the tests share the machine with others.
    for _ in range(3):
        done = subprocess.run(
            [sys.executable, "-c", TIMED, *words], capture_output=True, text=True, env=env, cwd=hundred, check=False
        )
        seconds, _, rest = done.stderr.partition(" ")
        assert rest == "0 []\n", done.stderr
        if float(seconds) < 0.5:
            return
    pytest.fail(f"{seconds} s")


# ---- runs ------------------------------------------------------------------------------------------------------------


def test_runs_are_listed_for_people_and_for_scripts(ask, here: Path):
    train(make(here / "runs", "first", why="does it\nlearn?"))
    hurt = make(here / "runs", "hurt")
    (hurt.path / "config.json").write_text("{")
    status, out, _ = ask("runs", "list")
    lines = out.splitlines()
    assert status == 0 and lines[0].split() == ["name", "recipe", "status", "step", "loss", "best", "age", "why"]
    first = next(line for line in lines if line.startswith("first"))
    assert first.split()[1:4] == ["gpt/demo", "done", "400"] and first.endswith("does it learn?")
    assert "damaged" in out
    values = {run["name"]: run for run in json.loads(ask("runs", "list", "--json")[1])}
    assert values["first"]["step"] == 400 and values["first"]["path"] == "runs/first"
    assert values["hurt"]["status"] == "damaged"
    assert json.loads(ask("--runs", "nowhere", "runs", "list", "--json")[1]) == []
    assert "no runs in nowhere yet" in ask("--runs", "nowhere", "runs")[1]


def test_json_output_has_null_for_infinities(ask, here: Path):
    run = make(here / "runs", "first")
    (run.path / "status.json").write_text('{"status": "nan", "step": 5, "loss": NaN, "best": Infinity}')
    out = ask("runs", "list", "--json")[1]
    assert "NaN" not in out and "Infinity" not in out
    assert json.loads(out)[0]["loss"] is None


def test_show_prints_config_status_rows_and_events(ask, here: Path):
    run = train(make(here / "runs", "first", "steps=400", "optim.lr=0.5", why="to see"))
    (run.path / "checkpoints" / "step-000400").mkdir()
    (run.path / "checkpoints" / "best").symlink_to("step-000400")
    status, out, _ = ask("runs", "show", "runs/first/")
    assert status == 0
    for part in ("first  done at step 400 of 400", "gpt/demo, config ", "to see", "commit 0123456789 (main)", "lr=0.5*",
                 "batch=32 ", "1: step-000400 (best step-000400)", "seedbed train gpt/demo optim.lr=0.5 steps=400", "last rows",
                 "last events", "text a falling leaf"):  # fmt: skip
        assert part in out
    assert max(map(len, out.splitlines())) <= 120
    values = json.loads(ask("runs", "show", "first", "--json")[1])
    assert values["config"]["optim"]["lr"] == 0.5 and values["command"].endswith("steps=400")
    assert len(values["rows"]) == 5 and values["best_checkpoint"] == "step-000400" and values["status"] == "done"


def test_show_works_on_a_run_that_has_just_begun(ask, here: Path):
    make(here / "runs", "first")
    status, out, _ = ask("runs", "show", "first")
    assert status == 0 and "interrupted at step -" in out


def test_show_of_a_damaged_run_is_one_line(ask, here: Path):
    (make(here / "runs", "first").path / "config.json").write_text("{")
    status, _, err = ask("runs", "show", "first")
    assert status == 2 and "config.json is damaged" in err and len(err.splitlines()) == 1


def test_diff_shows_settings_and_results(ask, here: Path):
    train(make(here / "runs", "first", "steps=400"))
    train(make(here / "runs", "second", "steps=400", "optim.lr=0.5", "model.sizes=9", preset="other"), level=1.0)
    status, out, _ = ask("runs", "diff", "first", "second")
    rows = {line.split("  ")[0].strip(): line.split() for line in out.splitlines() if line.strip()}
    assert status == 0
    assert rows["optim.lr"] == ["optim.lr", "0.001", "0.5"] and rows["model.sizes"] == ["model.sizes", "1,2", "9"]
    assert rows["preset"] == ["preset", "gpt/demo", "gpt/other"]
    assert "steps" not in rows and "2.0030 ± 0.0097" in out and "1.0030 ± 0.0097" in out
    values = json.loads(ask("runs", "diff", "first", "second", "--json")[1])
    assert values["config"] == {"model.sizes": [[1, 2], [9]], "optim.lr": [0.001, 0.5]}
    assert [result["status"] for result in values["results"]] == ["done", "done"]
    assert "(all equal)" in ask("runs", "diff", "first", "first")[1]


def test_diff_of_runs_without_rows(ask, here: Path):
    make(here / "runs", "a")
    make(here / "runs", "b")
    assert ask("runs", "diff", "a", "b")[0] == 0
    assert json.loads(ask("runs", "diff", "a", "b", "--json")[1])["results"][0]["loss"] is None


def test_rm_needs_a_yes(ask, here: Path, monkeypatch):
    make(here / "runs", "first")
    with open(os.devnull) as nobody:
        monkeypatch.setattr("sys.stdin", nobody)
        status, _, err = ask("runs", "rm", "first")
    assert status == 2 and "add --yes" in err and (here / "runs" / "first").exists()
    status, out, _ = ask("runs", "rm", "first", "--yes")
    assert (status, out, os.listdir(here / "runs")) == (0, "removed runs/first\n", [])


@pytest.mark.parametrize(("answer", "gone"), [("y\n", True), ("YES\n", True), ("n\n", False), ("\n", False), ("\x04", False)])
def test_rm_asks_on_a_terminal(ask, here: Path, monkeypatch, answer: str, gone: bool):
    make(here / "runs", "first")
    leader, follower = pty.openpty()
    with os.fdopen(follower) as stdin:
        monkeypatch.setattr("sys.stdin", stdin)
        os.write(leader, answer.encode())
        status, out, _ = ask("runs", "rm", "first")
    os.close(leader)
    assert status == 0 and "delete permanently? [y/N]" in out
    assert (here / "runs" / "first").exists() != gone
    assert gone or "nothing was removed" in out


def test_rm_refuses_a_running_run(ask, here: Path):
    run = make(here / "runs", "first")
    with run.lock():
        status, _, err = ask("runs", "rm", "first", "--yes")
    assert status == 2 and f"in use by process {os.getpid()}" in err and run.path.exists()


def test_rm_follows_no_link_out_of_the_run(ask, here: Path):
    precious = here / "precious"
    precious.mkdir()
    (precious / "data").write_text("dear")
    run = make(here / "runs", "first")
    (run.path / "samples" / "link").symlink_to(precious)
    (run.path / "checkpoints" / "file").symlink_to(precious / "data")
    (here / "runs" / "alias").symlink_to(precious)
    assert ask("runs", "rm", "first", "--yes")[0] == 0
    status, _, err = ask("runs", "rm", "alias", "--yes")
    assert status == 2 and "is a link to" in err
    assert (precious / "data").read_text() == "dear" and (here / "runs" / "alias").is_symlink()


@pytest.mark.parametrize("name", ["", ".", "..", "../precious", "/", "first/samples", "runs"])
def test_rm_removes_nothing_but_runs(ask, here: Path, name: str):
    (here / "precious").mkdir()
    make(here / "runs", "first")
    status, _, _ = ask("runs", "rm", name, "--yes")
    assert status == 2
    assert (here / "runs" / "first" / "samples").is_dir() and (here / "precious").is_dir()


@pytest.mark.parametrize("file", ["", "notes.txt", "config.json", "code.json"])
def test_rm_refuses_a_folder_that_is_no_run(ask, here: Path, file: str):
    make(here / "runs", "first")
    mine = here / "runs" / "mine"
    mine.mkdir()
    if file:
        (mine / file).write_text('{"model_type": "somebody\'s"}')
    status, _, err = ask("runs", "rm", "first", "mine", "--yes")
    assert status == 2 and "mine is no run" in err and len(err.splitlines()) == 1
    assert mine.is_dir() and (here / "runs" / "first").is_dir()


def test_rm_checks_all_names_before_it_removes_one(ask, here: Path):
    make(here / "runs", "first")
    assert ask("runs", "rm", "first", "other", "--yes")[0] == 2
    assert (here / "runs" / "first").is_dir()
    (make(here / "runs", "hurt").path / "config.json").unlink()
    assert ask("runs", "rm", "first", "hurt", "first", "--yes")[0] == 0
    assert os.listdir(here / "runs") == []


# ---- journal ---------------------------------------------------------------------------------------------------------


def test_notes_and_journal(ask, here: Path):
    assert "no entries yet" in ask("journal")[1]
    journal.record(train(make(here / "runs", "first", why="to see")))
    journal.record(train(make(here / "runs", "second")))
    status, out, _ = ask("note", "first", "it", "learns", "--dirty")
    assert status == 0 and out.startswith("noted in ") and "JOURNAL.md" in out
    text = ask("journal")[1]
    assert text == (here / "JOURNAL.md").read_text() and "it learns" in text
    one = ask("journal", "first")[1]
    assert "it learns" in one and "second" not in one
    values = json.loads(ask("journal", "--json")[1])
    assert [entry["run"] for entry in values] == ["first", "second"]
    assert [entry["run"] for entry in json.loads(ask("journal", "second", "--json")[1])] == ["second"]


def test_escape_codes_in_the_journal_are_neutralised(ask, here: Path):
    journal.record(train(make(here / "runs", "first")))
    with open(here / "JOURNAL.md", "a") as file:
        file.write("\x1b[2J")
    assert "\x1b" not in ask("journal")[1]


def test_python_dash_m_is_the_command_line(here: Path):
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run([sys.executable, "-m", "seedbed", "--version"], capture_output=True, text=True, env=env, check=False)
    assert done.returncode == 0 and done.stdout.startswith("seedbed ")


def test_escape_codes_in_streamed_samples_are_neutralised(capsys):
    using._stream("a\x1b[2Jb\n")
    assert capsys.readouterr().out == "a\N{REPLACEMENT CHARACTER}[2Jb\n"
