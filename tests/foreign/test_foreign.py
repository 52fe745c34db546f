"""seedbed.check on models of others: clean ones raise no alarm, planted and public bugs are named, nothing is left changed."""

import copy
import importlib
import importlib.util
import json
import os
import random
import re
import subprocess
import sys
import time
from collections import UserDict, namedtuple
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import ROOT
from planted_faults import FAULTS, LIGHTNING, Fault
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from valid_models import ZOO

import seedbed
from seedbed.checks import runner
from seedbed.checks.foreign import script_subject
from seedbed.checks.foreign.case import Case, make_parts
from seedbed.cli import main
from seedbed.errors import UserError
from seedbed.report.findings import Report

HERE = Path(__file__).parent
SCRIPTS, PUBLIC = HERE / "scripts", HERE / "public"
CLEAN = sorted(path.stem for path in SCRIPTS.glob("*.py") if path.stem != "hf_common")
QUICK = {"mlp_classifier", "regression"}
# By script: the check that names the bug.
BUGS = {
    "attention_over_the_batch": "M4",
    "batch_augmented_in_place": "G3",
    "column_against_row": "M3",
    "detached_encoder": "O2",
    "double_softmax": "L2",
    "dropout_in_evaluation": "V1",
    "end_is_padding": "L3",
    "factor_with_learning_rate": "O5",
    "future_is_visible": "C1",
    "generation_in_training_mode": "I6",
    "head_not_optimised": "O1",
    "layers_in_a_list": "M9",
    "nll_of_logits": "L2",
}
# What libraries say about themselves.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")


def needs_package(script: str) -> None:
    """Skips where the package that a script uses is not installed."""
    name = "transformers" if script.startswith("hf_") else "lightning" if script == LIGHTNING else ""
    if name and importlib.util.find_spec(name) is None:
        pytest.skip(f"{name} is not installed")


@pytest.fixture(autouse=True)
def scripts_on_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(SCRIPTS))


def alarms(report: Report) -> list[str]:
    return ["\n".join(finding.lines(report.name)) for finding in report.findings if finding.alarm]


def checked(path: Path, *only: str) -> Report:
    with script_subject(f"{path}::make") as subject:
        return runner.run(subject, runner.select(only))


# ---- what is valid ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("script", [pytest.param(s, marks=[] if s in QUICK else pytest.mark.slow) for s in CLEAN])
def test_clean_script_raises_no_alarm(script: str, seed: int):
    needs_package(script)
    assert alarms(seedbed.check(**importlib.import_module(script).make(seed))) == []


def test_clean_scripts_are_of_all_kinds():
    assert len(CLEAN) >= 10 and sum(script.startswith("hf_") for script in CLEAN) >= 3 and LIGHTNING in CLEAN


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("name", ZOO)
def test_valid_model_raises_no_alarm(name: str, seed: int):
    torch.manual_seed(seed)
    assert alarms(seedbed.check(**ZOO[name]())) == []


def test_small_model_is_checked_within_twenty_seconds():
    """CPU seconds, since other processes may use the machine; on an idle one they are the time that passes."""
    made = importlib.import_module("mlp_classifier").make()
    start = time.process_time()
    seedbed.check(**made)
    assert time.process_time() - start < 20


# ---- what is wrong ---------------------------------------------------------------------------------------------------


def is_quick(fault: Fault) -> bool:
    return fault.script in QUICK and set(fault.expected.split()).isdisjoint({"H1", "H2", "M6"})


@pytest.mark.parametrize(
    "fault", [pytest.param(f, id=f"{f.script}: {f.name}", marks=[] if is_quick(f) else pytest.mark.slow) for f in FAULTS]
)
def test_planted_fault_is_named_in_the_users_file(fault: Fault, tmp_path: Path):
    needs_package(fault.script)
    text = (SCRIPTS / f"{fault.script}.py").read_text()
    assert text.count(fault.old) == 1
    path = tmp_path / f"{fault.script}.py"
    path.write_text(text.replace(fault.old, fault.new))
    found = [finding for finding in checked(path, *fault.expected.split()).findings if finding.alarm]
    assert found, f"none of {fault.expected} minds"
    assert any(re.match(rf"{re.escape(str(path))}:\d+", finding.where) for finding in found), [f.where for f in found]
    assert all(finding.what and finding.why and finding.fix for finding in found)


def test_planted_faults_are_enough():
    assert len({fault.name for fault in FAULTS}) >= 30, "each is found by the test above, not only four of five"


@pytest.mark.parametrize("script", [pytest.param(s, marks=pytest.mark.slow) for s in BUGS])
def test_public_bug_is_found(script: str):
    (finding,) = checked(PUBLIC / f"{script}.py", BUGS[script]).findings
    assert finding.alarm and f"public/{script}.py:" in finding.where


def test_public_bugs_are_documented_with_their_addresses():
    page = (ROOT / "docs" / "public-bugs.md").read_text()
    assert {path.stem for path in PUBLIC.glob("*.py")} == set(BUGS) and len(BUGS) >= 10
    for script, id in BUGS.items():
        address = re.search(r"https://github\.com/\S+/(?:issues|pull)/\d+", (PUBLIC / f"{script}.py").read_text())
        assert address, script
        assert re.search(rf"\| \[[^]]+\]\({re.escape(address[0])}\) .*`{script}\.py`.* {id} \|", page), script


def test_crash_of_the_loss_is_reported_once_with_its_line():
    def loss(model, batch):
        return F.mse_loss(model(batch[0]), batch[1][:, 3])  # there is no fourth column

    report = seedbed.check(nn.Linear(4, 1), loss, [(torch.randn(8, 4), torch.randn(8, 1))])
    (finding,) = [finding for finding in report.findings if finding.status == "fail"]
    line = loss.__code__.co_firstlineno + 1
    assert finding.id == "M3" and "IndexError" in finding.what and f"test_foreign.py:{line}" in finding.where


# ---- nothing is changed ----------------------------------------------------------------------------------------------


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.enter, self.norm, self.drop, self.head = nn.Linear(4, 16), nn.BatchNorm1d(16), nn.Dropout(0.2), nn.Linear(16, 3)

    def forward(self, x):
        return self.head(self.drop(F.relu(self.norm(self.enter(x)))))


def loss_of(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1])


def rows(num: int = 64) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(num, 4)
    return x, x[:, :3].argmax(1)


def test_model_optimizer_loader_and_random_state_are_left_as_they_were():
    model = Net()
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 10)
    generator = torch.Generator().manual_seed(3)
    data = TensorDataset(*rows())
    loader = DataLoader(data, batch_size=16, shuffle=True, generator=generator)
    loss_of(model, data[:8]).backward()
    optimizer.step()
    model.norm.eval()

    def evaluate(model):
        model.eval()
        return {"loss": float(loss_of(model, data[:16]))}

    def state():
        tensors = [*model.state_dict().values(), *(p.grad for p in model.parameters()), *data.tensors]
        hooks = [len(module._forward_pre_hooks) + len(module._forward_hooks) for module in model.modules()]
        modes = [module.training for module in model.modules()]
        numbers = torch.get_rng_state(), generator.get_state(), np.random.get_state()[1].tolist(), random.getstate()
        flags = torch.get_num_threads(), torch.get_default_dtype(), torch.is_grad_enabled()
        return tensors, copy.deepcopy(optimizer.state_dict()), scheduler.state_dict(), numbers, hooks, modes, flags

    def flat(value):
        if isinstance(value, torch.Tensor):
            return value.detach().clone().numpy().tobytes()
        if isinstance(value, dict):
            return {key: flat(inner) for key, inner in value.items()}
        return [flat(inner) for inner in value] if isinstance(value, list | tuple) else value

    before = flat(state())
    seedbed.check(model, loss_of, loader, optimizer=optimizer, scheduler=scheduler, evaluate=evaluate, sample=evaluate)
    assert flat(state()) == before


def test_two_calls_give_the_same_findings():
    model, data = Net(), TensorDataset(*rows())
    seen = []
    for _ in range(2):
        loader = DataLoader(data, batch_size=16, shuffle=True)
        report = seedbed.check(model, loss_of, loader, optimizer=torch.optim.Adam(model.parameters(), 1e-3))
        seen.append([(f.id, f.status, f.severity, f.what, f.value) for f in report.findings])
        torch.rand(3), random.random(), np.random.rand()
    assert seen[0] == seen[1]


def test_loss_that_uses_the_model_itself_is_refused_and_the_model_is_untouched():
    model, (x, y) = Net(), rows()
    before = copy.deepcopy(model.state_dict())
    report = seedbed.check(model, lambda _, batch: loss_of(model, batch), [(x, y)])
    assert "must use the model that they are given" in next(f.what for f in report.findings if f.id == "M3")
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_iterator_is_read_as_far_as_needed_and_the_report_says_so():
    x, y = rows(4000)
    batches = iter(list(zip(x.split(10), y.split(10), strict=True)))
    report = seedbed.check(Net(), loss_of, batches, only=["D2", "M3"])
    assert "512 rows" not in report.findings[0].what and "520 rows of 52 batches" in report.findings[0].what
    assert "will not give again" in report.findings[0].what
    assert len(list(batches)) == 400 - 52


# ---- forms of batches, models and arguments ----------------------------------------------------------------------------

Pair = namedtuple("Pair", "x y")


class Encoding(UserDict):
    """A mapping with a method, as tokenizers return it."""

    def to(self, device):
        return self


X, Y = torch.randn(12, 4), torch.randint(0, 3, (12,))
FORMS = [
    (X, lambda b: (b, Y[: len(b)])),
    ((X, Y), lambda b: b),
    ([X, Y], lambda b: b),
    (Pair(X, Y), lambda b: (b.x, b.y)),
    ({"x": X, "label": Y}, lambda b: (b["x"], b["label"])),
    (
        {"inputs": {"x": X}, "label": Y, "name": "text", "scale": torch.ones(2)},
        lambda b: (b["inputs"]["x"] * b["scale"][0], b["label"]),
    ),
    (Encoding({"x": X, "label": Y}), lambda b: (b.to("cpu")["x"], b["label"])),
]


@pytest.mark.parametrize(("batch", "read"), FORMS, ids=["tensor", "tuple", "list", "namedtuple", "dict", "nested", "mapping"])
def test_batch_of_any_form_is_split_and_restored(batch, read):
    case = Case(make_parts(Net(), lambda m, b: loss_of(m, read(b)), [batch, batch], None, None, None, None), {})
    assert case.num_rows == 24
    part = case.restore(case.take(torch.arange(5)))
    assert type(part) is type(batch)
    assert torch.equal(read(part)[0], X[:5]) and torch.equal(read(part)[1], Y[:5])
    report = seedbed.check(Net(), lambda m, b: loss_of(m, read(b)), [batch, batch], only=["D", "M3", "M4", "L1", "C3"])
    assert alarms(report) == []


def test_batches_of_other_lengths_are_left_out():
    batches = [torch.zeros(4, 7), torch.zeros(4, 9), torch.ones(4, 7)]
    case = Case(make_parts(Net(), loss_of, batches, None, None, None, None), {})
    assert case.num_rows == 8 and "1 of another shape" in case.taken


WRONG = [
    (("no model", loss_of, [(X, Y)]), {}, "not a torch.nn.Module"),
    ((Net(), None, [(X, Y)]), {}, r"loss\(model, batch\).* needed"),
    ((Net(), loss_of, None), {}, "batches, a list or a loader"),
    ((Net(), loss_of, []), {}, "batches is empty"),
    ((Net(), loss_of, ["text"]), {}, "a str without a tensor"),
    ((Net(), nn.CrossEntropyLoss(), [(X, Y)]), {}, "wrap the CrossEntropyLoss: lambda model, batch"),
    ((Net(), loss_of, [(X, Y)]), {"casual": True}, "no keyword 'casual'; did you mean causal"),
    ((Net(), loss_of, [(X, Y)]), {"only": ["Q1"]}, "there is no check 'Q1'"),
]


@pytest.mark.parametrize(("args", "options", "says"), WRONG)
def test_wrong_argument_is_one_line(args, options, says):
    with pytest.raises(UserError, match=says) as raised:
        seedbed.check(*args, **options)
    assert "\n" not in str(raised.value)


class Uncopyable(Net):
    def __deepcopy__(self, memo):
        raise TypeError("cannot pickle a lock")


def test_model_that_cannot_be_copied_is_refused():
    with pytest.raises(UserError, match=r"cannot be copied.*cannot pickle a lock"):
        seedbed.check(Uncopyable(), loss_of, [(X, Y)])


@pytest.mark.parametrize(
    ("options", "says"),
    [({"targets": "z"}, "no entry 'z'.*there are: 0, 1"), ({"inputs": 7}, "no entry 7"), ({"uses": ["w"]}, "no entry 'w'")],
)
def test_unknown_entry_of_a_batch_is_named(options, says):
    report = seedbed.check(Net(), loss_of, [(X, Y)], only=["C2"], **options)
    assert re.search(says, report.findings[0].what)


def test_loss_that_is_no_tensor_is_explained():
    report = seedbed.check(Net(), lambda m, b: loss_of(m, b).item(), [(X, Y)], only=["M3"])
    assert "returned float; return the scalar tensor itself" in report.findings[0].what


def test_declarations_reach_the_checks():
    class Mixing(Net):
        def forward(self, x):
            return super().forward(x - x.mean(0))

    options = {"only": ["M4"], "batches": [(X, Y)], "loss": loss_of}
    assert alarms(seedbed.check(Mixing(), **options))
    assert not alarms(seedbed.check(Mixing(), **options, mixes_rows=("enter",)))


# ---- frameworks --------------------------------------------------------------------------------------------------------


class Stepping(Net):
    """The interface of a LightningModule without the package."""

    optimizers_as = staticmethod(lambda optimizer, scheduler: optimizer)

    def __init__(self):
        super().__init__()
        x, y = rows(96)
        self.data, self.held = (x[:64], y[:64]), (x[64:], y[64:])

    def log(self, name, value, **options):
        raise AssertionError("a trainer would take it")

    def training_step(self, batch, batch_idx):
        return {"loss": loss_of(self, batch), "other": 1}

    def validation_step(self, batch, batch_idx):
        self.log("valid", loss_of(self, batch), on_epoch=True)

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), 1e-3)
        return self.optimizers_as(optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 5))

    def train_dataloader(self):
        return DataLoader(TensorDataset(*self.data), batch_size=16)

    def val_dataloader(self):
        return [DataLoader(TensorDataset(*self.held), batch_size=16)]


OPTIMIZER_FORMS = {
    "one": (lambda o, s: o, 0),
    "list": (lambda o, s: [o], 0),
    "two lists": (lambda o, s: ([o], [s]), 1),
    "scheduler in a dict": (lambda o, s: ([o], [{"scheduler": s, "interval": "step"}]), 1),
    "dict": (lambda o, s: {"optimizer": o, "lr_scheduler": s}, 1),
    "nested dict": (lambda o, s: {"optimizer": o, "lr_scheduler": {"scheduler": s, "monitor": "x"}}, 1),
    "list of dicts": (lambda o, s: [{"optimizer": o, "lr_scheduler": s}], 1),
}


@pytest.mark.parametrize("form", OPTIMIZER_FORMS)
def test_module_with_a_training_step_needs_no_lightning(form: str):
    make, num = OPTIMIZER_FORMS[form]
    model = type("Model", (Stepping,), {"optimizers_as": staticmethod(make)})()
    parts = make_parts(model, None, None, None, None, None, None)
    assert len(parts.optimizers) == 1 and len(parts.schedulers) == num
    assert {id(p) for p in parts.optimizers[0].param_groups[0]["params"]} == {id(p) for p in parts.model.parameters()}


def test_module_with_a_training_step_is_checked():
    loaded = "lightning" in sys.modules
    report = seedbed.check(Stepping())
    assert alarms(report) == []
    status = {finding.id: finding.status for finding in report.findings}
    assert {status[id] for id in ("D2", "O1", "O2", "T4", "V1", "I6")} == {"pass"}
    assert ("lightning" in sys.modules) is loaded


def test_manual_optimisation_is_refused():
    model = type("Manual", (Stepping,), {"automatic_optimization": False})()
    with pytest.raises(UserError, match=r"automatic_optimization=False.*give a loss"):
        seedbed.check(model)


class Config:
    model_type, is_encoder_decoder = "tiny", False


class TinyForCausalLM(nn.Module):
    """The interface of a model of transformers without the package."""

    config = Config()

    def __init__(self, mixes: bool = False):
        super().__init__()
        self.embed, self.rnn, self.lm_head = nn.Embedding(9, 16), nn.GRU(16, 16, batch_first=True), nn.Linear(16, 9)
        self.mixes = mixes

    def forward(self, input_ids, attention_mask=None, labels=None):
        hidden = self.rnn(self.embed(input_ids))[0]
        logits = self.lm_head(hidden + hidden.mean(1, keepdim=True) if self.mixes else hidden)
        return {"loss": F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()), "logits": logits}


@pytest.mark.parametrize("mixes", [False, True])
def test_model_with_labels_is_causal_by_its_name(mixes: bool):
    ids = torch.randint(1, 9, (48, 8))
    mask = (torch.arange(8) < torch.randint(4, 9, (48, 1))).long()
    batch = {"input_ids": ids * mask, "attention_mask": mask, "labels": torch.where(mask == 1, ids, -100)}
    report = seedbed.check(TinyForCausalLM(mixes), batches=[batch], only=["M1", "L1", "L2", "L3", "C1", "C2"])
    status = {finding.id: finding.status for finding in report.findings}
    assert [id for id in status if status[id] == "fail"] == (["L3", "C1"] if mixes else [])
    assert status["M1"] == status["L2"] == "pass"


# ---- command and plugin --------------------------------------------------------------------------------------------------

SCRIPT = """
import torch
from torch import nn
import torch.nn.functional as F

def loss(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1])

def make():
    x = torch.randn(64, 4)
    model = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 3)LAST)
    return {"model": model, "loss": loss, "batches": [(x, x[:, :3].argmax(1))]MORE}

def nothing():
    return 3
"""


def write(folder: Path, last: str = "", more: str = "", name: str = "mine.py") -> Path:
    path = folder / name
    path.write_text(SCRIPT.replace("LAST", last).replace("MORE", more))
    return path


def test_script_prints_json_and_its_exit_code_is_that_of_recipes(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["check", f"{write(tmp_path)}::make", "--only", "M", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["exit_code"] == 0
    assert main(["check", f"{write(tmp_path, ', nn.Softmax(-1)')}::make", "--only", "L2"]) == 1
    shown = capsys.readouterr().out
    assert "FAIL L2" in shown and re.search(r"where\s+\S*mine\.py:7 loss", shown) and "mine.py::make --only L2" in shown
    scheduler = ', "optimizer": (o := torch.optim.SGD(model.parameters(), 0.1)), "scheduler": constant(o)'
    constant = "\n\ndef constant(optimizer):\n    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 1.0)\n"
    path = write(tmp_path, more=scheduler)
    path.write_text(path.read_text() + constant)
    assert main(["check", f"{path}::make", "--only", "O5"]) == 3


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["mine.py::nothing"], "needs a function 'nothing' that returns a dict"),
        (["mine.py::absent"], "needs a function 'absent'"),
        (["absent.py::make"], "absent.py"),
        (["mine.py::make", "steps=3"], "a script has no settings"),
        (["mine.py::make", "--only", "Q9"], "no check 'Q9'"),
        (["broken.py::make"], r"broken\.py:2: NameError"),
    ],
)
def test_wrong_script_is_one_line(
    words, says, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    write(tmp_path)
    (tmp_path / "broken.py").write_text("import torch\nmodel = undefined\n")
    monkeypatch.chdir(tmp_path)
    assert main(["check", *words]) == 2
    shown = capsys.readouterr().err.strip()
    assert re.search(says, shown) and len(shown.splitlines()) == 1


PLUGIN_TEST = """
from mine import make

def test_model(seedbed_check):
    report = seedbed_check(**make(), only=["M", "L2"])
    assert report.exit_code == 0
"""


@pytest.mark.parametrize(("last", "status"), [("", 0), (", nn.Softmax(-1)", 1)])
def test_pytest_plugin_fails_a_test_with_the_findings(last: str, status: int, tmp_path: Path):
    write(tmp_path, last)
    (tmp_path / "test_mine.py").write_text(PLUGIN_TEST)
    # By its module, since the entry point exists only where the package is installed.
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "seedbed.pytest_plugin",
        "-p",
        "no:seedbed",
        "-p",
        "no:cacheprovider",
        ".",
    ]
    env = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{tmp_path}"}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == status, done.stdout + done.stderr
    assert ("FAIL L2" in done.stdout) is bool(status) and "Traceback" not in done.stdout
    if status:
        assert "mine.py:7 loss" in done.stdout


def test_pytest_plugin_is_registered_and_light():
    assert '[project.entry-points.pytest11]\nseedbed = "seedbed.pytest_plugin"' in (ROOT / "pyproject.toml").read_text()
    code = "import sys, seedbed.pytest_plugin; print('torch' in sys.modules)"
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    assert subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True).stdout == "False\n"


def test_report_prints_all_checks_and_the_findings():
    (x, y), model = rows(), nn.Sequential(nn.Linear(4, 3), nn.Softmax(-1))
    shown = str(seedbed.check(model, loss_of, [(x, y)], only=["L"]))
    assert "ERR  L2" in shown and "FAIL L2" in shown and re.search(r"where\s+\S*test_foreign\.py:\d+ loss_of", shown)
    assert 'seedbed.check(..., only=["L2"])' in shown
