"""Runs in a pack are the same runs alone: to rounding in float64, whatever happens to their neighbours."""

import io
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import TOY, kinds, newest, resume, rows, start

from seedbed import config as configs
from seedbed import inference, trust
from seedbed.checks.replay import investigate
from seedbed.errors import UserError
from seedbed.launch import local, trials
from seedbed.recipes import find
from seedbed.track import files
from seedbed.track.console import Console
from seedbed.track.run import Run
from seedbed.train import checkpoint_loading, loop, progress
from seedbed.train.engine import Engine, mix
from seedbed.train.job import Job
from seedbed.train.system import System
from seedbed.tune.packing.pack import Pack, fit_pack, why_not_packed

RECIPE = str(Path(__file__).parent / "packable_recipe.py")
CPU = torch.device("cpu")
# Different in everything that trials may differ in: rates, moments, decay, clip, schedule, seed, shape, dial and length.
GRID = [
    ["seed=1", "optim.clip=0.05"],
    ["seed=2", "optim.lr=3e-2", "model.prototypes=5", "steps=30", "every.log=2"],
    ["seed=3", "optim.beta1=0.8", "optim.beta2=0.99", "optim.clip=0", "model.noise=0.3", "ema=0.99"],
    ["seed=4", "optim.weight_decay=0", "optim.eps=1e-3", "model.prototypes=1", "schedule.kind=linear", "every.eval=4"],
]


@pytest.fixture(autouse=True)
def no_report(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local.journal, "finish", lambda run, warn: None)
    monkeypatch.setattr(files, "fsync", lambda fd: None)


@pytest.fixture(scope="module")
def lone(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Job]]:
    """Every run of the grid on its own."""
    root = tmp_path_factory.mktemp("alone")
    return root, [train_alone(root, f"a{k}", *settings) for k, settings in enumerate(GRID)]


@pytest.fixture(scope="module")
def stable(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Job]]:
    """The grid and one more run, packed and undisturbed."""
    root = tmp_path_factory.mktemp("calm")
    return root, train_pack(root, "c", [*GRID, ["seed=9"]])


def make_config(settings: list[str]) -> Any:
    return configs.override(find(RECIPE)[0].preset("packable"), settings)


def make_system(config: Any, dtype: torch.dtype = torch.float64) -> System:
    torch.manual_seed(mix(config.seed))
    recipe, _ = find(RECIPE)
    return recipe.build(config, recipe.open_data(config)).to(dtype)


def make_job(root: Path, name: str, *settings: str, dtype: torch.dtype = torch.float64) -> Job:
    recipe, config = find(RECIPE)[0], make_config(list(settings))
    run = Run.create(root, recipe.name, "packable", config, name=name, code={}, base=config)
    system = make_system(config, dtype)
    engine, console = Engine(system, config, CPU), Console(stream=io.StringIO())
    return Job(run=run, config=config, system=system, data=recipe.open_data(config), engine=engine, console=console)


def make_pack(jobs: list[Job]) -> Pack:
    padded_config = jobs[0].system.padded_config([job.config for job in jobs])
    return Pack(jobs, make_system(padded_config, next(jobs[0].system.parameters()).dtype))


def train_pack(root: Path, name: str, grid: list[list[str]], **options: Any) -> list[Job]:
    jobs = [make_job(root, f"{name}{k}", *settings) for k, settings in enumerate(grid)]
    fit_pack(make_pack(jobs), **options)
    return jobs


def train_alone(root: Path, name: str, *settings: str) -> Job:
    job = make_job(root, name, *settings)
    loop.fit(job)
    return job


def distance(one: Job, other: Job) -> float:
    """The largest difference between all tensors of two jobs: weights, moments, counts, averages and buffers."""
    a, b = one.engine.tensors(), other.engine.tensors()
    assert {f: g.keys() for f, g in a.items()} == {f: g.keys() for f, g in b.items()}
    return max((tensor - b[file][name]).abs().max().item() for file, group in a.items() for name, tensor in group.items())


def at_step(step: int, act: Callable[[Pack], None], monkeypatch: pytest.MonkeyPatch) -> None:
    """Do something to a pack once its first run has taken `step` steps."""
    real = Pack.take_step

    def take(self: Pack) -> None:
        real(self)
        if self.jobs[0].step == step:
            act(self)

    monkeypatch.setattr(Pack, "take_step", take)


# ---- equality -----------------------------------------------------------------------------------------------------------


def test_packed_equals_single_runs(tmp_path: Path, lone: tuple[Path, list[Job]]) -> None:
    together = train_pack(tmp_path, "p", GRID)
    for k, alone in enumerate(lone[1]):
        assert together[k].status == alone.status == "done"
        assert together[k].step == alone.step >= 24
        assert float(together[k].engine.progress) == float(alone.engine.progress) == 1.0
        assert distance(together[k], alone) < 1e-9
        mine, theirs = rows(tmp_path, f"p{k}"), rows(lone[0], f"a{k}")
        assert [r.keys() for r in mine] == [r.keys() for r in theirs]
        for a, b in zip(mine, theirs, strict=True):
            assert {n: v for n, v in a.items() if n != "lrs"} == pytest.approx({n: v for n, v in b.items() if n != "lrs"})
        evals = [
            [(e["step"], e["error"], e["best"]) for e in job.run.events() if e["kind"] == "eval"] for job in (alone, together[k])
        ]
        assert [k for k in kinds(tmp_path, f"p{k}") if k != "pack"] == kinds(lone[0], f"a{k}")
        assert evals[1] == [pytest.approx(e, rel=1e-9) for e in evals[0]]
    assert any(r["grad_norm"] > 0.05 for r in rows(tmp_path, "p0")), "the clip never bit"
    assert together[0].engine.tensors()["model"]["level"].abs().min() > 0, "the buffer never moved"


def test_packed_equals_torch(tmp_path: Path) -> None:
    """Against torch's own AdamW. Rates are powers of two: the engine rounds rates to float32."""
    settings = ["schedule.kind=constant", "schedule.warmup=0", "ema=0", "optim.clip=0.1"]
    grid = [
        ["optim.lr=0.015625", "seed=5"],
        ["optim.lr=0.0078125", "optim.beta1=0.7", "optim.weight_decay=0.5", "model.prototypes=6"],
    ]
    jobs = train_pack(tmp_path, "p", [settings + extra for extra in grid])
    for job in jobs:
        system, optim = make_system(job.config), job.config.optim
        params = {n: p for n, p in system.named_parameters() if p.requires_grad}
        groups = [
            {
                "params": [p],
                "lr": optim.lr * (0.7 if n == "choose_DK" else 1.0),
                "weight_decay": optim.weight_decay * (p.ndim > 1),
            }
            for n, p in params.items()
        ]
        # 0.7 times a power of two is no float32: give torch what the engine can hold.
        for group in groups:
            group["lr"] = float(torch.tensor(group["lr"]))
        twin = torch.optim.AdamW(groups, betas=(optim.beta1, optim.beta2), eps=optim.eps)
        for step in range(24):
            index_B = torch.arange(8) + 8 * step
            loss = system.packed_loss(index_B, system.settings_tensors())[0]
            twin.zero_grad()
            loss.backward()
            norm = torch.nn.utils.get_total_norm([p.grad for p in params.values() if p.grad is not None])
            for p in params.values():
                assert p.grad is not None
                p.grad /= (norm / optim.clip).clamp_min(1.0).float()
            twin.step()
        for name, param in params.items():
            assert (param - dict(job.system.named_parameters())[name]).abs().max() < 1e-9, name


def test_padding_stays_untouched(tmp_path: Path) -> None:
    jobs = [make_job(tmp_path, f"p{k}", f"model.prototypes={n}", "steps=5") for k, n in enumerate((2, 6))]
    pack = make_pack(jobs)
    seen = []

    def look(job: Job) -> None:
        slot = pack.stack.layout.slots["choose_DK"]
        whole_DK = slot.of(pack.stack.weights[0], slot.shape)
        seen.append((whole_DK[:, :2].abs().sum().item(), whole_DK[:, 2:].abs().sum().item()))

    fit_pack(pack, on_status=look)
    assert seen and all(own > 0 and beyond == 0 for own, beyond in seen)


# ---- neighbours ---------------------------------------------------------------------------------------------------------


def bits_of(job: Job) -> list[bytes]:
    return [t.detach().contiguous().numpy().tobytes() for group in job.engine.tensors().values() for t in group.values()]


WILD = [
    ["data.poison=70", "guard.max_skips=0"],
    ["data.poison=70", "guard.policy=skip", "guard.max_skips=9"],
    ["optim.lr=10", "optim.clip=0", "optim.weight_decay=100"],
]


@pytest.mark.parametrize("wild", WILD, ids=" ".join)
def test_diverging_trial_changes_no_other(tmp_path: Path, wild: list[str], stable: tuple[Path, list[Job]]) -> None:
    root, others = stable
    perturbed = train_pack(tmp_path, "s", [*GRID, ["seed=9", *wild]])
    for k in range(len(GRID)):
        assert bits_of(others[k]) == bits_of(perturbed[k])
        assert rows(root, f"c{k}") == rows(tmp_path, f"s{k}")
    assert bits_of(others[4]) != bits_of(perturbed[4])


@pytest.mark.slow
@pytest.mark.parametrize("wild", [*WILD[:2], ["data.poison=70", "every.eval=3"]], ids=" ".join)
def test_nonfinite_trial_ends_as_a_single_run(tmp_path: Path, wild: list[str]) -> None:
    """Frozen before the bad step, with the event; or skipping one batch, as its guard says."""
    settings = ["seed=9", "every.save=0", "every.eval=0", *wild]
    job = train_pack(tmp_path, "p", [*GRID, settings])[4]
    alone = train_alone(tmp_path, "a", *settings)
    assert job.status == alone.status == ("nan" if "guard.max_skips=0" in wild else "done")
    assert job.step == alone.step
    assert distance(job, alone) < 1e-9
    assert torch.isfinite(torch.cat([t.flatten() for t in job.engine.tensors()["model"].values()])).all()
    mine, theirs = ([e for e in j.run.events() if e["kind"] in ("nonfinite", "eval", "end")] for j in (job, alone))
    assert [(e["kind"], e["step"]) for e in mine] == [(e["kind"], e["step"]) for e in theirs] != []
    assert [r["step"] for r in rows(tmp_path, "p4")] == [r["step"] for r in rows(tmp_path, "a")]


def test_bad_step_of_a_trial_is_replayed(tmp_path: Path) -> None:
    wild = ["seed=9", "data.poison=70", "guard.policy=stop"]
    assert trials.train_packed(folders(tmp_path, "p", [GRID[0], wild]))["p1"] == "nan"
    found = investigate(tmp_path, "p1", None)
    assert found.reproduced and found.step == 9


def test_trial_rolls_back_as_a_single_run(tmp_path: Path) -> None:
    """A poisoned item that no skip gets over: back to the best checkpoint, and on behind it."""
    settings = ["seed=9", "data.poison=78", "guard.max_skips=0", "every.eval=4", "every.save=4"]
    job = train_pack(tmp_path, "p", [GRID[0], settings])[1]
    alone = train_alone(tmp_path, "a", *settings)
    assert job.status == alone.status == "done"
    assert "rollback" in kinds(tmp_path, "p1")
    assert [k for k in kinds(tmp_path, "p1") if k != "pack"] == kinds(tmp_path, "a")
    assert distance(job, alone) < 1e-9


def test_trial_with_a_failing_evaluation_ends_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stable: tuple[Path, list[Job]]
) -> None:
    recipe_class = type(make_system(make_config([])))
    real = recipe_class.evaluate

    def evaluate(self: Any, source: Any, engine: Any) -> dict[str, float]:
        if self.config.seed == 2:
            raise RuntimeError("no such file")
        return real(self, source, engine)

    monkeypatch.setattr(recipe_class, "evaluate", evaluate)
    broken = train_pack(tmp_path, "b", [*GRID, ["seed=9"]])
    assert [job.status for job in broken] == ["done", "failed", "done", "done", "done"]
    assert Run.open(tmp_path, "b1").status()["error"] == "no such file"
    for k in (0, 2, 3, 4):
        assert bits_of(broken[k]) == bits_of(stable[1][k])


# ---- ends ---------------------------------------------------------------------------------------------------------------


def test_shrinking_a_pack_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    grid = [["seed=1", "steps=7"], ["seed=2", "steps=9", "model.prototypes=5"], ["seed=3"], ["seed=4", "steps=26"]]
    monkeypatch.setattr(Pack, "_pays", lambda self, left: True)
    again = train_pack(tmp_path, "r", grid)
    monkeypatch.setattr(Pack, "_pays", lambda self, left: False)
    never = train_pack(tmp_path, "n", grid)
    sizes = [[(e["step"], e["replicas"]) for e in job.run.events() if e["kind"] == "pack"] for job in (again[3], never[3])]
    assert sizes == [[(0, 4), (9, 2), (24, 1)], [(0, 4)]]
    for one, other in zip(again, never, strict=True):
        assert distance(one, other) < 1e-12
        assert one.step == one.config.steps


def test_tensors_of_ended_runs_are_their_own(tmp_path: Path) -> None:
    jobs = train_pack(tmp_path, "p", [["steps=3"], ["steps=6"]])
    places = [p.untyped_storage().data_ptr() for job in jobs for p in job.system.parameters()]
    assert len(set(places)) == len(places)
    for job in jobs:
        assert {p.data_ptr() for p in job.watch.layers.params} <= {p.data_ptr() for p in job.system.parameters()}


def test_shrinking_a_pack_must_save_time(tmp_path: Path) -> None:
    pack = make_pack([make_job(tmp_path, f"p{k}") for k in range(2)])
    for trial in pack.trials:
        trial.job.step, trial.joined = 4, (0, -1.0)  # four steps took a second
    pack._prepare_seconds = 2.4
    assert pack._pays(pack.training[:1])  # half of 20 steps at 0.25 s
    pack._prepare_seconds = 2.6
    assert not pack._pays(pack.training[:1])


def test_patience_ends_a_trial_early(tmp_path: Path) -> None:
    grid = [["seed=1", "every.eval=2"], ["seed=2", "every.eval=2", "optim.lr=0"]]
    seen = []
    jobs = train_pack(tmp_path, "p", grid, patience=2, on_status=lambda job: seen.append((job.run.name, job.step, job.status)))
    assert jobs[1].step == 6 and jobs[1].best_step == 2 and jobs[1].status == "done"
    assert "early_stop" in kinds(tmp_path, "p1")
    assert jobs[0].step == 24 and "early_stop" not in kinds(tmp_path, "p0")
    assert newest(tmp_path, "p1").step == 6
    assert ("p1", 6, "done") in seen and ("p0", 24, "done") in seen
    assert sum(name == "p0" for name, *_ in seen) > 24, "not told at every log point"


def test_clocks_count_training_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While one trial is evaluated, none of them is training."""
    recipe_class = type(make_system(make_config([])))
    real = recipe_class.evaluate

    def slow(self: Any, source: Any, engine: Any) -> dict[str, float]:
        time.sleep(0.05)
        return real(self, source, engine)

    monkeypatch.setattr(recipe_class, "evaluate", slow)
    jobs = train_pack(tmp_path, "p", [[f"seed={k}", "steps=4", "every.eval=1"] for k in range(4)])
    for job in jobs:
        assert job.clock["eval"] >= 4 * 0.05
        assert job.clock["train"] < 4 * 4 * 0.05


# ---- interrupted, resumed, used as ordinary runs ---------------------------------------------------------------------------


def stop(pack: Pack) -> None:
    signal.raise_signal(signal.SIGTERM)


def test_interrupted_trial_resumes_as_a_single_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lone: tuple[Path, list[Job]]
) -> None:
    with monkeypatch.context() as patch:
        at_step(11, stop, patch)
        jobs = train_pack(tmp_path, "p", GRID)
    for k, settings in enumerate(GRID):
        assert jobs[k].status == "interrupted" and jobs[k].step == 11
        job = make_job(tmp_path, f"q{k}", *settings)
        progress.restore(job, replace(newest(tmp_path, f"p{k}"), origin=job.run.origin(job.config)))
        assert loop.fit(job) == "done"
        assert distance(job, lone[1][k]) < 1e-9


def folders(root: Path, name: str, grid: list[list[str]]) -> list[Run]:
    recipe, found = find(RECIPE)[0], []
    assert recipe.code is not None
    trust.record(recipe.code, "trained")  # as a sweep does that names it
    for k, settings in enumerate(grid):
        config = make_config(settings)
        found.append(Run.create(root, recipe.name, "packable", config, name=f"{name}{k}", code={}, base=config))
    return found


@pytest.mark.slow
def test_interrupted_pack_resumes_as_a_pack(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In float32, from the command's side: run folders in, statuses out, and not one bit differs."""
    whole = trials.train_packed(folders(tmp_path, "w", GRID))
    runs = folders(tmp_path, "p", GRID)
    with monkeypatch.context() as patch:
        at_step(11, stop, patch)
        assert set(trials.train_packed(runs).values()) == {"interrupted"}
    assert set(trials.train_packed(runs).values()) == set(whole.values()) == {"done"}
    for k in range(len(GRID)):
        a, b = newest(tmp_path, f"w{k}"), newest(tmp_path, f"p{k}")
        for file, group in a.tensors.items():
            assert all(torch.equal(tensor, b.tensors[file][name]) for name, tensor in group.items())
        assert rows(tmp_path, f"w{k}") == rows(tmp_path, f"p{k}")
        assert Run.open(tmp_path, f"p{k}").status()["status"] == "done"


def test_trial_is_an_ordinary_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    with monkeypatch.context() as patch:
        at_step(11, stop, patch)
        trials.train_packed(folders(tmp_path, "p", GRID))
    assert resume(tmp_path, "p1") == 0
    assert start(tmp_path, "a1", *GRID[1], recipe=RECIPE) == 0
    a, b = newest(tmp_path, "a1"), newest(tmp_path, "p1")
    assert a.step == b.step == 30
    for file, group in a.tensors.items():
        torch.testing.assert_close(b.tensors[file], group, rtol=1e-3, atol=1e-4)
    assert inference.sample(tmp_path, "p1", {}) == 0
    trained = inference.load(tmp_path, "p1")
    assert float(capsys.readouterr().out.split()[-1]) == pytest.approx(trained.system.value_K.sum().item(), abs=0.02)


def test_pack_that_breaks_leaves_every_run_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(pack: Pack) -> None:
        raise RuntimeError("the device is gone")

    at_step(3, fail, monkeypatch)
    runs = folders(tmp_path, "p", GRID[:2])
    with pytest.raises(RuntimeError, match="the device is gone"):
        trials.train_packed(runs)
    assert [run.status()["status"] for run in runs] == ["failed", "failed"]
    assert checkpoint_loading.load_newest(runs[0].path / "checkpoints") is None


# ---- what cannot be packed -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        (["optim.kind=muon"], "optim.kind=muon"),
        (["precision=bf16"], "precision=bf16"),
        (["accum=2"], "accum=2"),
        (["ema2=0.99"], "ema2=0.99"),
        (["budget=60"], "budget=60"),
        (["limit.train=8"], "limit.train=8"),
        (["model.width=9"], "model.width differs"),
        (["batch=4"], "batch differs"),
        (["ema=0"], "ema is off in some"),
        (["capture=off"], "capture differs"),
        (["model.prototypes=9", "seed=3", "steps=99", "optim.lr=1", "schedule.floor=0", "every.log=3", "keep=1", "ema=0.5"], ""),
    ],
)
def test_pack_refusal_reasons(settings: list[str], reason: str) -> None:
    config = make_config([])
    assert why_not_packed(make_system(config), [config, make_config(settings)]) == reason


def test_device_without_packs_is_known_also_where_it_was_not_named(monkeypatch: pytest.MonkeyPatch) -> None:
    config = make_config(["device=auto"])
    assert not why_not_packed(make_system(config), [config])
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    assert why_not_packed(make_system(config), [config]) == "device=mps"


def test_recipe_without_a_packed_loss_is_refused(tmp_path: Path) -> None:
    recipe, preset = find(TOY)
    config = recipe.preset(preset)
    system = recipe.build(config, recipe.open_data(config))
    assert why_not_packed(system, [config]) == "the recipe does not offer a packed objective"
    job = make_job(tmp_path, "p")
    with pytest.raises(UserError, match="cannot be packed: the recipe does not offer"):
        Pack([job], system)


# ---- compiled -------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_packed_traced_equals_eager(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything but the last stage of the compiler, which takes minutes of C++ and is the GPU tests' to judge."""
    grid, real = [[*settings, "steps=8"] for settings in GRID], torch.nn.Module.compile
    eager = train_pack(tmp_path, "e", grid)
    monkeypatch.setattr(torch.nn.Module, "compile", lambda self, **options: real(self, backend="aot_eager", **options))
    traced = train_pack(tmp_path, "t", [[*settings, "compile=whole"] for settings in grid])
    assert "compiled (whole)" in next(e["step_runs"] for e in traced[0].run.events() if e["kind"] == "pack")
    for one, other in zip(eager, traced, strict=True):
        assert distance(one, other) < 1e-9


def test_pack_without_a_compiler_runs_eager(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: Any, **options: Any) -> None:
        def call(*values: Any) -> Any:
            raise RuntimeError("no compiler here")

        self._compiled_call_impl = call

    monkeypatch.setattr(torch.nn.Module, "compile", broken)
    jobs = [make_job(tmp_path, f"p{k}", *settings, "compile=whole", "steps=3") for k, settings in enumerate(GRID[:2])]
    assert set(fit_pack(make_pack(jobs)).values()) == {"done"}
    assert "compile failed and the run goes on eager: RuntimeError: no compiler here" in jobs[0].console._rich.file.getvalue()
    assert "eager" in next(e["step_runs"] for e in jobs[0].run.events() if e["kind"] == "pack")
