"""The checks on what is shipped: no alarm on any preset, one and the same data for checks and training, small copies."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch
from faults.patching import edited
from PIL import Image

from seedbed import config as configs
from seedbed.checks import runner, short_runs
from seedbed.checks.subject import Subject
from seedbed.data import shapes
from seedbed.data.text import TextData
from seedbed.launch import local
from seedbed.recipes import Recipe, find, names
from seedbed.recipes.world import simulators
from seedbed.recipes.world.evaluate import Trajectories
from seedbed.recipes.world.recording.recording import PARTS
from seedbed.recipes.world.show import videos

DEMOS = [f"{name}/demo" for name in names()]
# Presets whose data is a file, or long in the making: the same with something small in its place.
TEXT, SHAPES, FEW = ("data.text=reference",), ("data.images=shapes",), ("data.frames=600",)
INSTEAD = {
    "ebt/shakespeare-s1": TEXT, "ebt/shakespeare-s2": TEXT, "ebt/denoise-cifar": SHAPES, "ebt/regress-cifar": SHAPES,
    "ebt/code-s1": ("data.text=reference", "data.vocab=512"), "ebt/replica": ("data.text=random:200_000:4096",),
    "flow/cifar10": SHAPES, "flow/s2-32": ("data.images=random:1_000:1000",),
    "flow/pixels-256": ("data.images=random:200:1000", "batch=32"),
    "gpt/gpt3-small": ("data.text=reference", "data.vocab=2048", "data.block=256"),
    **{f"gpt/{name}": ("data.text=reference", "data.vocab=512") for name in ("code", "llama")},
    "gpt/gpt2-124m": ("data.text=random:200_000:50304",), "gpt/nanogpt-124m": ("data.text=random:200_000:50304",),
    **{f"gpt/{name}": TEXT for name in ("shakespeare", "shakespeare-long", "nanogpt-shakespeare", "mini-v0", "mini-v1", "baby")},
    "gpt/gpt3-small-char": TEXT, **{f"world/{name}": FEW for name in ("demo", "box64", "edm")},
    "world/log5m": ("data.frames=600", "data.height=96", "data.width=128"),
}  # fmt: skip
# Recordings that other programs make, or a person.
ELSEWHERE = {"world/doom", "world/atari", "world/mine"}
SHIPPED = [f"{name}/{preset}" for name in names() for preset in find(name)[0].presets]


def subject_of(name: str, *settings: str) -> Subject:
    recipe, preset = find(name)
    return Subject(recipe, preset, configs.override(recipe.preset(preset), [*INSTEAD.get(name, ()), *settings]), Path("nowhere"))


def alarms(subject: Subject, only: tuple[str, ...] = (), quick: bool = False) -> list[str]:
    return ["\n".join(f.lines(subject.name)) for f in runner.run(subject, runner.select(only, quick=quick)).findings if f.alarm]


@pytest.mark.parametrize("name", DEMOS)
def test_quick_checks_pass_on_every_demo(name: str):
    assert alarms(subject_of(name), quick=True) == []


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(set(SHIPPED) - ELSEWHERE))
def test_presets_raise_no_alarm(name: str):
    assert alarms(subject_of(name)) == []


@pytest.mark.slow
@pytest.mark.parametrize("name", DEMOS)
def test_demos_raise_no_alarm_with_another_seed(name: str):
    assert alarms(subject_of(name, "seed=2")) == []


# ---- false alarms, each with its root --------------------------------------------------------------------------------


def test_loss_term_on_every_fourth_row_is_allowed():
    """The map's own loss is part of what the probe says, and cuts of a batch are made where they change nothing."""
    assert alarms(subject_of("world/demo"), ("M1", "M4", "L0", "L1", "L2", "O4")) == []


def test_fine_sampling_is_kept_in_the_small_copy():
    subject = subject_of("world/box64", "data.frames=300", "data.height=32", "data.width=32")
    system = subject.fresh_system()
    assert system.trunk.field.detail is not None  # type: ignore[union-attr, operator]
    assert sum(p.numel() for p in system.parameters()) < 2e6
    assert alarms(subject, ("M1", "M4", "L0", "L1", "L2")) == []


@pytest.mark.parametrize(
    ("file", "old", "new", "found"),
    [
        ("emulator", "return error + mapped", "return error", "L0"),
        ("emulator", "rows = slice(None, None, FIELD_ROW_STRIDE)", "rows = slice(0, 1)", "L0"),
        ("objective", "return coarse + finer[0] if finer else coarse", "return coarse * len(target_B3HW)", "L1"),
    ],
)
def test_fault_in_the_radiance_field_loss_is_found(file: str, old: str, new: str, found: str):
    with edited(f"seedbed/recipes/world/{file}.py", old, new):
        seen = alarms(subject_of("world/demo"), ("L0", "L1"))
    assert f"FAIL {found}" in "".join(seen)


def test_controls_may_be_smaller_than_their_range():
    """A short recording of calm walks: nothing is near the size at which controls are cut off."""
    subject = subject_of("world/demo", "data.frames=200")
    assert float(subject.batch(size=64)["action"].abs().max()) < 4.0
    assert alarms(subject, ("D5",)) == []


@pytest.mark.slow
def test_critic_of_a_later_stage_is_not_dead_code():
    assert alarms(subject_of("world/demo", "model.adversarial=0.5"), ("M7", "O2")) == []


@pytest.mark.slow
def test_unused_part_of_the_critic_is_found():
    from seedbed.recipes.world import system as worlds

    subject = subject_of("world/demo", "model.adversarial=0.5")
    build = subject.recipe.build

    def with_idle(config, data):
        made = build(config, data)
        assert isinstance(made, worlds.World) and made.critic is not None
        made.critic.idle = torch.nn.Linear(3, 3)
        return made

    object.__setattr__(subject, "recipe", _Wrapped(subject.recipe, with_idle))
    assert "critic.idle.weight" in "".join(alarms(subject, ("M7",)))


class _Wrapped(Recipe):
    """A recipe with another `build`."""

    def __init__(self, recipe: Recipe, build) -> None:
        for field in dataclasses.fields(recipe):
            object.__setattr__(self, field.name, getattr(recipe, field.name))
        object.__setattr__(self, "made", build)

    def build(self, config, data):
        return self.made(config, data)  # type: ignore[attr-defined]


def test_field_that_only_the_end_of_a_run_reads_is_read():
    subject = subject_of("ebt/demo")
    assert subject.config.model.control and alarms(subject, ("A2",)) == []


def test_patches_beside_condition_tokens_have_absolute_positions():
    assert alarms(subject_of("flow/seed-256"), ("M8",)) == []
    assert alarms(subject_of("flow/demo", "model.positions=1d"), ("M8",)) == []
    assert alarms(subject_of("ebt/replica"), ("M8",)) == []


def test_generated_recordings_are_reproducible(tmp_path: Path):
    pytest.importorskip("av")
    rng = np.random.default_rng(0)
    traj = Trajectories(torch.zeros(3, 6, 3, 12, 12), torch.zeros(3, 6, 1), np.zeros(3, np.int64), 4)
    frames = [torch.from_numpy(rng.uniform(-1, 1, (3, 3, 12, 12)).astype(np.float32)) for _ in range(2)]
    made = [{path.read_bytes() for path in videos(traj, frames, _made(tmp_path / str(n)))} for n in range(6)]
    assert all(found == made[0] for found in made) and len(made[0]) == 2


def _made(folder: Path) -> Path:
    folder.mkdir()
    return folder


@pytest.mark.slow
def test_recordings_of_still_frames_and_forward_motion_raise_no_alarm(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """Rays of the radiance field meet the same kinks in many frames."""
    from seedbed.recipes.world.simulators import box

    def plan(rng: np.random.Generator, num_frames: int, number: int) -> np.ndarray:
        kinds = rng.choice([box.STILL, box.STILL, box.STILL, 0, box.CIRCLE], num_frames)
        return np.repeat(kinds, rng.integers(10, 40, num_frames))[:num_frames]

    monkeypatch.setattr(box, "_plan", plan)
    monkeypatch.setattr(box, "JITTER", 0.0)
    subject = subject_of("world/demo", "data.frames=300", f"data.cache={tmp_path}")
    assert float(subject.batch(size=64)["action"].abs().amax(-1).quantile(0.5)) < 0.5, "most frames are still"
    assert alarms(subject, ("D", "M1", "L", "C3", "C6")) == []


def test_step_size_gradient_is_checked_as_trained():
    (finding,) = runner.run(subject_of("ebt/demo"), runner.select(["C6"])).findings
    assert finding.status == "pass" and finding.value is not None and finding.value < 1e-3


def test_replay_buffer_is_exempt_from_the_accumulation_check():
    assert alarms(subject_of("ebt/s2"), ("O4",)) == []
    assert alarms(subject_of("ebt/demo", "model.mcmc.replay_buffer=32"), ("O4",)) == []


def test_rows_of_a_replay_buffer_are_not_gradients_that_add_up():
    assert alarms(subject_of("ebt/demo", "model.mcmc.replay_buffer=32", "seed=2"), ("O3",)) == []


@pytest.mark.slow
def test_probe_of_several_denoising_steps_is_their_loss_and_finds_a_lost_gradient():
    settings = ("model.observe=concat", "model.steps=2", "model.random_alpha=2")
    assert alarms(subject_of("ebt/denoise-shapes", *settings), ("L0", "C6")) == []
    with edited(
        "seedbed/recipes/ebt/denoise/system.py", "moved_BCHW = size * grad_BCHW", "moved_BCHW = size * grad_BCHW.detach()"
    ):
        assert "C6" in "".join(alarms(subject_of("ebt/denoise-shapes", *settings), ("L0", "C6")))


@pytest.mark.parametrize("name", ["ebt/s1", "ebt/s2"])
def test_half_precision_check_tolerates_steep_gradients(name: str):
    assert alarms(subject_of(name), ("G2",)) == []


def test_ema_length_is_not_checked_on_random_data():
    assert alarms(subject_of("flow/s2-32"), ("O7",)) == []
    assert "half-life" in "".join(alarms(subject_of("flow/demo", "ema=0.9999", "steps=400"), ("O7",)))


def test_size_that_somebody_set_is_what_they_want():
    """The README's own example; only what the preset itself promises is held against it."""
    assert alarms(subject_of("gpt/demo", "model.width=256", "batch=64"), ("A4",)) == []


def test_matrix_with_as_many_rows_as_ids_is_no_table():
    subject = subject_of("gpt/demo", "model.mlp=relu2", "model.tied=false")
    rows = {n: len(p) for n, p in subject.fresh_system().named_parameters() if p.ndim == 2}
    assert rows["model.blocks.0.mlp.up.weight"] == rows["model.embed.weight"], "the small copy has no coincidence any more"
    assert alarms(subject, ("O1",)) == []


LARGE_VOCABULARY = ("data.tokenizer=bpe", "data.vocab=1536", "optim.kind=adamw")


@pytest.mark.slow
def test_large_vocabularies_are_reduced_for_short_runs():
    subject = subject_of("gpt/demo", *LARGE_VOCABULARY)
    few = short_runs.learner(subject)
    assert isinstance(subject.data, TextData) and isinstance(few.data, TextData)
    assert subject.data.vocab_size > 1024 and few.data.vocab_size == short_runs.NUM_IDS and few is short_runs.learner(subject)
    tokens, reduced = (np.asarray(data.train.tokens) for data in (subject.data, few.data))
    assert len(tokens) == len(reduced) and reduced.max() == short_runs.NUM_IDS - 1
    shared = reduced == short_runs.NUM_IDS - 1
    pairs = np.unique(np.stack((tokens, reduced))[:, ~shared], axis=1)
    assert len(set(pairs[0])) == len(set(pairs[1])) == pairs.shape[1] and 0 < shared.mean() < 0.7, "common ids stay distinct"
    small = subject_of("gpt/demo")
    assert short_runs.learner(small) is small, "a small one stays as it is"
    assert alarms(subject, ("H1", "E1", "E2", "E3", "V4")) == []
    with edited("seedbed/recipes/gpt/model.py", "x_BTC = self.embed(tokens_BT)", "x_BTC = self.embed(tokens_BT * 0)"):
        assert "FAIL E2" in "".join(alarms(subject_of("gpt/demo", *LARGE_VOCABULARY), ("E2",)))


@pytest.mark.parametrize("steps", ["progressive", "random"])
def test_rows_memorised_by_noise_are_not_a_leak(steps: str):
    assert alarms(subject_of("thinker/demo", f"model.loss.steps={steps}", "seed=1"), ("V4",)) == []


# ---- one and the same data -------------------------------------------------------------------------------------------


def test_checks_make_no_new_recordings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """Simulators are asked for one recording only: the one that the run trains on, on the device that it trains on."""
    asked: set[tuple] = set()
    real = simulators.record

    def record(source: str, *size: int, **how):
        asked.add((source, *size, how["device"]))
        return real(source, *size, **how)

    monkeypatch.setattr(simulators, "record", record)
    subject = subject_of("world/demo", "data.frames=300")
    assert alarms(subject, quick=True) == []
    assert asked == {("room", 300, 32, 32, 1, "cpu")}


def test_checks_reuse_the_open_data(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    from seedbed.recipes.world.simulators import box

    rendered: list[int] = []
    real = box.record_box
    monkeypatch.setattr(box, "record_box", lambda num, *rest, **how: rendered.append(num) or real(num, *rest, **how))
    made: list[Subject] = []
    start = Subject.__init__
    monkeypatch.setattr(Subject, "__init__", lambda self, *given, **how: (start(self, *given, **how), made.append(self))[0])
    settings = ["data.frames=300", "steps=1", "batch=4", "data.examined=0", "model.rollout=4", "every.eval=0", "device=cpu"]
    assert local.train("world/demo", settings, root=tmp_path / "runs", dirty=True, check="quick") == 0
    (subject,) = made
    assert subject._opened is subject.real_data and len(set(rendered)) == 1


def test_excerpt_of_a_recording_is_a_part_of_it():
    subject = subject_of("world/demo")
    whole, part = subject.real_data.recording, subject.data.recording  # type: ignore[attr-defined]
    assert part.frames_THWC.shape[1:3] == (12, 12) and part.axes == whole.axes
    for name in PARTS:
        (low, high), (first, _) = part.span(name), whole.span(name)
        rows = np.arange(high - low) + first
        assert np.array_equal(part.frames_THWC[low:high], whole.frames_THWC[rows, ::2, ::2][:, :12, :12])
        assert np.array_equal(part.actions_TA[low:high], whole.actions_TA[rows])
        assert np.array_equal(part.pose_T44[low:high], whole.pose_T44[rows])
        starts = part.starts(name, 4, 1)
        assert len(starts) and low <= starts.min() - 3 and starts.max() + 1 < high
    edges = [part.span(name)[0] for name in PARTS[1:]]
    assert all(part.last_T[edge - 1] for edge in edges), "an episode goes on from one part to the next"


@pytest.mark.parametrize("name", ["gpt/demo", "ebt/demo", "flow/s2-32"])
def test_small_data_is_a_subset_of_the_open_data(name: str, monkeypatch: pytest.MonkeyPatch):
    subject = subject_of(name)
    whole = subject.real_data
    monkeypatch.setattr(Recipe, "open_data", None)
    small = subject.data
    assert small.facts == whole.facts and type(small.train) is type(whole.train)
    for part in ("train", "valid"):
        for key, array in getattr(small, part).arrays.items():
            full = getattr(whole, part).arrays[key]
            assert array.dtype == full.dtype and len(array) <= len(full)
            assert np.isin(array.reshape(len(array), -1)[:, 0], full.reshape(len(full), -1)[:, 0]).all()


def test_small_shapes_are_drawn_exactly():
    subject = subject_of("flow/shapes-64")
    images, _ = shapes.render_shapes(16)
    assert subject.data.train.arrays["image"].shape[1:] == images.shape[1:]


def test_latents_and_full_copies_keep_their_size():
    recipe, preset = find("flow/shapes-64")
    config = configs.override(recipe.preset(preset), ["data.images=folder", "data.encode=package.module:encode"])
    assert "data.size" not in recipe.check_settings(config)
    assert Subject(recipe, preset, recipe.preset(preset), Path("nowhere"), full=True).shrunk == {}


@pytest.mark.parametrize("name", SHIPPED)
def test_every_preset_has_a_small_copy(name: str):
    """Few numbers, few places: whatever the preset, the checks look at a model of the same size."""
    subject = subject_of(name)
    small = configs.flatten(subject.small)
    assert small.get("model.depth", 2) <= 2 and small.get("data.size", 16) <= 4 * small.get("model.patch", 4)
    assert small.get("model.width", 32) <= 64 and small.get("data.block", 11) <= 11
    assert set(subject.recipe.check_settings(subject.config)) <= set(subject.shrunk), "what the recipe asks for is not legal"
    for key, (full, cut) in subject.shrunk.items():
        assert small[key] == cut and configs.flatten(subject.config)[key] == full


# ---- alarms that were raised where nobody had looked: on a GPU machine, on many documents, on another text ---------------------


def folder_of_sources(folder: Path) -> str:
    for n in range(40):
        text = f'"""Module {n}."""\n\nimport os\n\n\ndef f_{n}(x):\n    return os.sep * {n} + x\n'
        (folder / f"module_{n:02}.py").write_text(9 * text)
    return f"data.text={folder}"


def test_d6_encodes_documents_one_by_one_as_the_store_was_made(tmp_path: Path):
    settings = (folder_of_sources(tmp_path), "data.tokenizer=bpe", "data.vocab=300", "data.block=16")
    assert alarms(subject_of("gpt/demo", *settings), only=("D6",)) == []


def test_d2_allows_for_a_text_that_repeats_itself(tmp_path: Path):
    drawn = np.random.default_rng(0).integers(0, 30, 4000)
    (tmp_path / "repeats.txt").write_text("".join(f"{'-' * 60}\nline {n} of a table that comes again\n" for n in drawn))
    assert alarms(subject_of("gpt/demo", f"data.text={tmp_path / 'repeats.txt'}"), only=("D2",)) == []


def test_v4_needs_no_baseline():
    assert alarms(subject_of("flow/s2-32"), only=("V4",)) == []


def test_devices_are_compared_without_dropout(monkeypatch: pytest.MonkeyPatch):
    """Two devices draw different numbers for it."""
    from seedbed.checks import device_checks

    def dropout(x, p=0.5, training=True, inplace=False):
        assert not (training and p), "dropout is active"
        return x

    monkeypatch.setattr(torch.nn.functional, "dropout", dropout)
    monkeypatch.setattr(device_checks, "_device", lambda: torch.device("cpu"))
    subject = subject_of("gpt/shakespeare")
    assert subject.config.model.dropout > 0
    assert alarms(subject, only=("G1",)) == []


@pytest.mark.parametrize(("wrong", "count"), [((0,), 0), ((0, 1), 0), ((0, 1, 2), 1)])
def test_a_device_is_wrong_when_it_is_on_every_batch(monkeypatch: pytest.MonkeyPatch, wrong: tuple[int, ...], count: int):
    """A rounding that decides a branch sets the gradients of one batch apart, a wrong kernel those of all."""
    from seedbed.checks import device_checks

    step = device_checks._one_step

    def other(subject, device, *assignments: str, index: int = 0, **options):
        loss, grads = step(subject, torch.device("cpu"), *assignments, index=index, **options)
        return loss, {n: g * (1 + 1e-3 * (device.type == "cuda" and index in wrong)) for n, g in grads.items()}

    monkeypatch.setattr(device_checks, "_one_step", other)
    monkeypatch.setattr(device_checks, "_device", lambda: torch.device("cuda"))
    assert len(alarms(subject_of("gpt/demo"), only=("G1",))) == count


def test_batches_of_a_staged_task_are_made_before_its_system_is_moved(monkeypatch: pytest.MonkeyPatch):
    """A curriculum's lengths follow from a buffer of the system, which the data looks at."""
    from seedbed.checks import device_checks

    order: list[str] = []
    subject = subject_of("thinker/prefix")
    made, perturbed = subject.batch, device_checks.perturbed_engine
    monkeypatch.setattr(subject, "batch", lambda *a, **k: order.append("batch") or made(*a, **k))
    monkeypatch.setattr(device_checks, "perturbed_engine", lambda *a, **k: order.append("system") or perturbed(*a, **k))
    device_checks._one_step(subject, torch.device("cpu"))
    assert order == ["batch", "system"]


@pytest.mark.parametrize(
    "settings",
    [
        ("data.curriculum.kind=gated",),  # the first stage has one length; a system built for its size leaves nothing in the data
        ("data.curriculum.kind=mixed",),
        ("model.loss.steps=progressive", "seed=2"),  # gradients stop at a random step
        ("model.loss.backprop_steps=2",),  # gradients never reach the initial state
    ],
    ids=" ".join,
)
def test_thinker_curricula_and_truncated_gradients_raise_no_alarm(settings: tuple[str, ...]):
    assert alarms(subject_of("thinker/demo", *settings), only=("A4", "D2", "D5", "C6", "O2", "M7", "L0")) == []


def test_gradient_check_of_a_truncated_loss_still_finds_a_lost_gradient():
    with edited("seedbed/recipes/thinker/model.py", "context = fixed if memory is None",
                "context = [(k.detach(), v.detach()) for k, v in fixed] if memory is None"):  # fmt: skip
        assert any("C6" in found for found in alarms(subject_of("thinker/demo", "model.loss.backprop_steps=2"), only=("C6",)))


@pytest.mark.slow
@pytest.mark.parametrize(
    "sides", [(), ("data.size=24", "data.width=40", "model.positions=1d"), ("data.size=32", "data.width=16")]
)
def test_images_of_a_single_class_raise_no_alarm(tmp_path: Path, sides: tuple[str, ...]):
    draws = np.random.default_rng(0)
    (tmp_path / "one" / "only").mkdir(parents=True)
    for i in range(240):
        image = np.zeros((32, 32, 3), np.uint8) + draws.integers(0, 255, 3, dtype=np.uint8)
        y, x = draws.integers(2, 22, 2)
        image[y : y + 8, x : x + 8] = draws.integers(0, 255, 3)
        Image.fromarray(image).save(tmp_path / "one" / "only" / f"{i:03d}.png")
    subject = subject_of("flow/demo", f"data.images={tmp_path / 'one'}", f"data.cache={tmp_path / 'cache'}", *sides)
    assert alarms(subject) == []
