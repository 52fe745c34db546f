"""Replay names what was planted: the place, the direction, the rows, and whether data, weights, code or precision did it."""

import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import ROOT
from helpers import TOY, kinds, newest, start
from torch import Tensor

from seedbed.checks.replay import ReplayReport, investigate, replay
from seedbed.cli import main
from seedbed.launch import local
from seedbed.recipes import Recipe, find
from seedbed.train import checkpoint, checkpoint_loading, loop, rollback
from seedbed.train.system import System

EXAMPLE = str(ROOT / "examples" / "my_recipe.py")
SMALL = {
    TOY: ["model.dropout=0.2"],
    EXAMPLE: ["batch=16", "steps=12", "model.width=8", "every.log=1", "every.eval=4", "every.save=4"],
    "gpt/demo": [
        "batch=4", "steps=12", "model.depth=2", "model.width=32", "model.heads=2", "data.block=16",
        "every.log=1", "every.eval=6", "every.save=4", "limit.valid=8",
    ],
}  # fmt: skip
BATCH = {TOY: 8, EXAMPLE: 16, "gpt/demo": 4}


@pytest.fixture(autouse=True)
def no_report(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local.journal, "finish", lambda run, warn: None)
    monkeypatch.setattr(loop, "sample", lambda job: None)


class Spoil(torch.autograd.Function):
    """Passes its input on, and spoils the gradient of some rows."""

    @staticmethod
    def forward(ctx, x: Tensor, mask: Tensor) -> Tensor:  # type: ignore[override]
        ctx.mask = mask
        return x.clone()

    @staticmethod
    def backward(ctx, grad: Tensor):  # type: ignore[override]
        return grad.masked_fill(shaped(ctx.mask, grad), float("nan")), None


def shaped(mask: Tensor, like: Tensor) -> Tensor:
    """A mask over rows, ready to be broadcast; what has no rows is spoiled as a whole."""
    if not like.ndim or len(like) != len(mask):
        return mask.any()
    return mask.view(-1, *[1] * (like.ndim - 1))


def fill(out: Tensor, mask: Tensor) -> Tensor:
    return out.masked_fill(shaped(mask, out), float("nan"))


def divide(out: Tensor, mask: Tensor) -> Tensor:
    return out / (~shaped(mask, out)).to(out.dtype)


def function(out: Tensor, mask: Tensor) -> Tensor:
    return Spoil.apply(out, mask)


def hook(out: Tensor, mask: Tensor) -> Tensor:
    out = out * 1.0
    out.register_hook(lambda grad: grad.masked_fill(shaped(mask, grad), float("nan")))
    return out


def root(out: Tensor, mask: Tensor) -> Tensor:
    length = torch.where(shaped(mask, out), out - out.detach(), 1.0).abs().sqrt()
    return out + length - length.detach()


FORWARD, BACKWARD = (fill, divide), (function, hook, root)


def planted(monkeypatch: pytest.MonkeyPatch, name: str, spoil: Callable[[Tensor, Tensor], Tensor], samples: set[int]) -> None:
    """Every system built from now on spoils what module `name` gives for these samples."""
    real = Recipe.build

    def build(self: Recipe, config, data) -> System:
        system = real(self, config, data)
        mask: list[Tensor] = []
        batch, loss = data.train.batch, system.loss

        def marked(raw):
            return {**batch(raw), "index": raw["index"]}

        def watched(given, engine):
            mask[:] = [torch.isin(given["index"], torch.tensor(sorted(samples)))] if "index" in given else []
            return loss({k: v for k, v in given.items() if k != "index" or "keep" in given}, engine)

        if not hasattr(data.train, "planted"):
            data.train.batch, data.train.planted = marked, True
        system.loss = watched
        system.get_submodule(name).register_forward_hook(
            lambda module, given, out: spoil(out, mask[0]) if system.training and mask else out
        )
        return system

    monkeypatch.setattr(Recipe, "build", build)


def modules(recipe: str) -> list[str]:
    """The modules of a recipe that take part in training and give a tensor."""
    found = {
        TOY: ["net.0", "net.1", "net.2", "net"],
        EXAMPLE: [f"net.{i}" for i in range(1, 7)],
        "gpt/demo": [f"model.blocks.{i}{tail}" for i in (0, 1) for tail in ("", ".attention", ".mlp", ".norm1", ".norm2")]
        + ["model.embed", "model.head.norm"],
    }
    return found[recipe]


def ten() -> Iterator[tuple[str, str, Callable]]:
    rng = random.Random(8)
    for number in range(10):
        recipe = [EXAMPLE, "gpt/demo", "gpt/demo", TOY, "gpt/demo"][number % 5]
        yield recipe, rng.choice(modules(recipe)), rng.choice(FORWARD if number < 5 else BACKWARD)


@pytest.mark.parametrize(
    ("recipe", "name", "spoil"), list(ten()), ids=lambda v: getattr(v, "__name__", str(v).rpartition("/")[2])
)
def test_injected_fault_is_named_by_replay(tmp_path: Path, monkeypatch, recipe: str, name: str, spoil: Callable) -> None:
    row = 2
    sample = 6 * BATCH[recipe] + row
    planted(monkeypatch, name, spoil, {sample})
    assert start(tmp_path, "one", *SMALL[recipe], recipe=recipe) == 0
    found = investigate(tmp_path, "one", None)
    assert found.step == 7 and found.reproduced, found.notes
    assert found.kind == ("forward" if spoil in FORWARD else "backward"), found.sentence()
    assert found.origin is not None and found.origin.module == name, found.sentence()
    assert [(r.row, r.sample) for r in found.rows] == [(row, sample)]
    assert found.finding.what and found.finding.where and found.finding.why and found.finding.fix


def poison_weight(job: loop.Job) -> None:
    with torch.no_grad():
        next(job.system.parameters()).view(-1)[0] = float("nan")


def at_step(step: int, monkeypatch: pytest.MonkeyPatch, act: Callable[[loop.Job], None]) -> None:
    real, left = loop.take_step, [1]

    def take(job: loop.Job) -> None:
        if job.step + 1 == step and left[0]:
            left[0] = 0
            act(job)
        real(job)

    monkeypatch.setattr(loop, "take_step", take)


def inject(what: str, recipe: str, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Put one of the four faults into step 7 of every run from now on."""
    sample = {6 * BATCH[recipe] + 1}
    middle = {TOY: "net.1", EXAMPLE: "net.3", "gpt/demo": "model.blocks.1.mlp"}[recipe]
    if what == "gradient":
        planted(monkeypatch, middle, function, sample)
    elif what == "division":
        planted(monkeypatch, middle, divide, sample)
    elif what == "weight":
        at_step(7, monkeypatch, poison_weight)
    elif recipe == TOY:
        return ["data.poison=7"]
    else:
        real = Recipe.open_data

        def open_data(self, config):
            data = real(self, config)
            batch = data.train.batch
            data.train.batch = lambda raw: {
                k: torch.where((raw["index"] == next(iter(sample)))[:, None], torch.nan, v) for k, v in batch(raw).items()
            }
            return data

        monkeypatch.setattr(Recipe, "open_data", open_data)
    return []


KINDS = {"batch": "data", "gradient": "backward", "weight": "weight", "division": "forward"}


# Tokens are whole numbers, so gpt has no batch that is not finite. The policy is the loop's business: one recipe shows it.
CASES = [(recipe, what, "rollback") for recipe in (EXAMPLE, "gpt/demo") for what in KINDS]
CASES = [subject for subject in CASES if subject[:2] != ("gpt/demo", "batch")]
CASES += [(TOY, what, policy) for what in KINDS for policy in ("skip", "rollback", "stop")]


@pytest.mark.parametrize(("recipe", "what", "policy"), CASES, ids=lambda v: v.rpartition("/")[2])
def test_four_faults_stop_or_roll_back_and_are_named(tmp_path: Path, monkeypatch, recipe: str, what: str, policy: str) -> None:
    settings = [*SMALL[recipe], *inject(what, recipe, monkeypatch), f"guard.policy={policy}", "guard.max_skips=0"]
    status = start(tmp_path, "one", *settings, recipe=recipe)
    assert status == (0 if policy == "rollback" else 1)
    folder = tmp_path / "one" / "checkpoints"
    whole = [checkpoint_loading.load(path) for path in checkpoint.steps_in(folder)]
    assert whole and all(torch.isfinite(t).all() for c in whole for t in c.tensors["model"].values())
    bad = min(int(p.name[-6:]) for p in checkpoint.steps_in(tmp_path / "one" / "incidents"))
    if policy == "rollback":
        assert "rollback" in kinds(tmp_path, "one") and newest(tmp_path, "one").step == 12
    found = investigate(tmp_path, "one", bad)
    assert found.reproduced and found.kind == KINDS[what], found.sentence()
    _check_place(found, what, recipe)


def _check_place(found: ReplayReport, what: str, recipe: str) -> None:
    assert found.origin is not None
    if what == "weight":
        assert found.origin.op in found.finding.what and "it was finite in step-0000" in found.finding.why
    elif what == "batch":
        assert found.rows[0].item == (7 if recipe == TOY else found.rows[0].item) and found.origin.op == "x"
    elif what == "division":
        assert found.origin.op.startswith("div") and "test_replay.py" in found.origin.line
        assert "float64 either" in found.finding.why and "denominator" in found.finding.fix
    else:
        assert found.origin.op == "SpoilBackward" and "its gradient is not" in found.finding.what


HOOKS = {
    "parameter": lambda m, bad: m.up.weight.register_hook(lambda grad: bad(grad)),
    "accumulated": lambda m, bad: m.up.weight.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", bad(p.grad))),
    "module": lambda m, bad: m.register_full_backward_hook(lambda _, given, out: tuple(bad(g) for g in given)),
    "module, before": lambda m, bad: m.register_full_backward_pre_hook(lambda _, out: tuple(bad(g) for g in out)),
}


@pytest.mark.parametrize("kind", HOOKS)
def test_gradient_hooks_with_faults_are_named(tmp_path: Path, monkeypatch, kind: str) -> None:
    real = Recipe.build

    def build(self: Recipe, config, data) -> System:
        system = real(self, config, data)
        update, due = system.update, [False]

        def watched(batch, engine):
            due[0] = abs(float(engine.progress) - 7 / 12) < 1e-6
            return update(batch, engine)

        system.update = watched
        HOOKS[kind](system.get_submodule("model.blocks.1.mlp"), lambda grad: grad * float("nan") if due[0] else grad * 1.0)
        return system

    monkeypatch.setattr(Recipe, "build", build)
    start(tmp_path, "one", *SMALL["gpt/demo"], "accum=2", recipe="gpt/demo")
    found = investigate(tmp_path, "one", None)
    assert found.reproduced and found.step == 7 and found.all_rows
    assert found.origin and found.origin.module == "model.blocks.1.mlp" + (".up" if "modul" not in kind else "")
    assert found.kind in ("backward", "gradient")


def test_overflow_is_distinguished_from_undefined_mathematics(tmp_path: Path, monkeypatch) -> None:
    """What half precision cannot hold is finite in float64, and the verdict says so."""

    def blow(out: Tensor, mask: Tensor) -> Tensor:
        return torch.where(shaped(mask, out), out * 1e30 * 1e30, out) if out.dtype != torch.float64 else out * 1.0

    planted(monkeypatch, "net.1", lambda out, mask: out + (blow(out, mask) - out), {49})
    start(tmp_path, "one", *SMALL[TOY])
    found = investigate(tmp_path, "one", None)
    assert found.kind == "forward" and found.origin and found.origin.module == "net.1"
    assert "finite in float64" in found.finding.why and [r.finite for r in found.precisions] == [False, True]


def test_noise_is_equal_in_every_precision(tmp_path: Path) -> None:
    """Flow matching draws noise in the loss: only with the same draws can the losses agree to float32's digits."""
    start(tmp_path, "one", *SMALL[EXAMPLE], recipe=EXAMPLE)
    from seedbed.checks.replay_context import examine, open_replay, precision_ladder

    ctx = open_replay(tmp_path, "one", 7)
    run, wide = precision_ladder(ctx, examine(ctx))
    assert wide.loss == pytest.approx(run.loss, rel=1e-6) and wide.loss != run.loss
    assert wide.norm == pytest.approx(run.norm, rel=1e-5)


@pytest.mark.parametrize("settings", [["accum=4", "model.dropout=0.3"], ["precision=bf16"], ["ema=0.9", "optim.kind=muon"]])
def test_replay_of_any_step_is_bitwise(tmp_path: Path, settings: list[str]) -> None:
    start(tmp_path, "one", *settings)
    before = {p: p.read_bytes() for p in (tmp_path / "one").rglob("*") if p.is_file()}
    for step in (3, 6, 11):
        found = investigate(tmp_path, "one", step)
        assert found.reproduced and found.kind == "clean"
    assert before == {p: p.read_bytes() for p in (tmp_path / "one").rglob("*") if p.is_file()}, "replay only reads"


def test_replay_follows_roll_backs(tmp_path: Path, monkeypatch) -> None:
    at_step(10, monkeypatch, poison_weight)
    start(tmp_path, "one", "guard.max_skips=0", "steps=20", "every.save=0", "keep=9")
    assert "rollback" in kinds(tmp_path, "one")
    assert investigate(tmp_path, "one", 11).reproduced, "the steps after the roll-back saw other data"


def test_replay_that_differs_is_reported(tmp_path: Path, capsys) -> None:
    start(tmp_path, "one")
    rows = tmp_path / "one" / "rows.jsonl"
    lines = [json.loads(line) for line in rows.read_text().splitlines()]
    lines[5]["loss"] += 1e-7
    rows.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert replay(tmp_path, "one", 7) == 0, "the step history holds what the rows lost"
    (tmp_path / "one" / "step_history.json").unlink()
    capsys.readouterr()
    assert replay(tmp_path, "one", 7) == 1
    printed = capsys.readouterr().out
    assert "NOT reproduced" in printed and "step 6" in printed


def test_spike_is_traced_to_its_rows(tmp_path: Path) -> None:
    settings = ["data.outlier=398", "data.num=400", "guard.window=16", "steps=50", "guard.policy=skip"]
    start(tmp_path, "one", *settings)
    spikes = [e["step"] for e in local.Run.open(tmp_path, "one").events() if e["kind"] == "spike"]
    found = investigate(tmp_path, "one", spikes[0])
    assert found.reproduced and found.kind == "spike" and found.rows[0].item is not None
    assert found.rows[0].item >= 398 and found.rows[0].loss >= found.rows[-1].loss
    assert "beyond the batches before" in found.finding.why


def test_step_beside_a_spike_is_not_called_clean(tmp_path: Path) -> None:
    """Nothing is wrong with the step itself, but a neighbour left its band and is named."""
    start(tmp_path, "one", "data.outlier=398", "data.num=400", "guard.window=16", "steps=50", "guard.policy=skip")
    spike = next(e["step"] for e in local.Run.open(tmp_path, "one").events() if e["kind"] == "spike")
    found = investigate(tmp_path, "one", spike - 2)
    assert found.kind == "neighbour" and found.finding.fix == f"seedbed replay one {spike}", found.sentence()


def test_degenerate_batch_is_named(tmp_path: Path, monkeypatch) -> None:
    """Every row of one batch is the same item: the step is finite and inside its band, and the batch is to blame."""
    monkeypatch.setattr(toy(), "batch", repeating(toy().batch, range(160, 168)))
    start(tmp_path, "one", "data.num=400", "steps=30", "guard.policy=skip")
    found = investigate(tmp_path, "one", 21)
    assert found.kind == "data" and "7 of 8 rows of `x` are repeated" in found.finding.what, found.sentence()
    assert investigate(tmp_path, "one", 5).kind != "data"


def toy() -> Any:
    return find(TOY)[0].function("data", "Sums")


def repeating(real: Callable, samples: range) -> Callable:
    """`batch` of a source with one item in all rows of these samples."""

    def batch(self: Any, raw: dict[str, Tensor]) -> dict[str, Tensor]:
        given = real(self, raw)
        first = int(raw["index"][0])
        return {k: v[:1].expand_as(v) if k != "index" and first in samples else v for k, v in given.items()}

    return batch


def test_replay_prints_text_and_json(tmp_path: Path, capsys) -> None:
    start(tmp_path, "one", "data.poison=7")
    capsys.readouterr()
    assert main(["replay", "one", "--runs", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert "the batch itself is bad" in printed and "item 7 of the data set" in printed and "fix" in printed
    assert main(["replay", "one", "--runs", str(tmp_path), "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["kind"] == "data" and shown["rows"][0]["item"] == 7 and shown["calls"]


@pytest.mark.parametrize(("words", "says"), [(["one"], "nothing went wrong"), (["two"], "no run"), (["one", "0"], "at least 1")])
def test_replay_errors_are_one_line(tmp_path: Path, capsys, words: list[str], says: str) -> None:
    start(tmp_path, "one", "steps=2")
    assert main(["replay", *words, "--runs", str(tmp_path)]) == 2
    assert says in capsys.readouterr().err


def test_damaged_incident_falls_back_to_a_checkpoint(tmp_path: Path) -> None:
    start(tmp_path, "one", "data.poison=7")
    (kept,) = checkpoint.steps_in(tmp_path / "one" / "incidents")
    (kept / "state.json").write_text("{")
    found = investigate(tmp_path, "one", int(kept.name[-6:]))
    assert found.kind == "data" and found.reproduced and "incidents" not in found.start


def test_incident_states_are_limited_in_number(tmp_path: Path) -> None:
    start(tmp_path, "one", "data.poison=7", "steps=100", "guard.policy=skip", "guard.max_skips=9")
    assert len(checkpoint.steps_in(tmp_path / "one" / "incidents")) == rollback.MAX_INCIDENTS
    assert kinds(tmp_path, "one").count("nonfinite") > rollback.MAX_INCIDENTS
