"""The world system as a whole: stages in one run, resuming across them, judging by an oracle, pictures, and the denoiser."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers import NoHost, assert_same_end, kinds, newest, resume, rows, start, stop_at
from world_samples import TINY, Oracle, config_of, made, valid

from seedbed.errors import UserError
from seedbed.launch import local
from seedbed.recipes import find
from seedbed.recipes.world import controls, edm
from seedbed.recipes.world.critic import Critic, adversarial_weight, critic_loss
from seedbed.recipes.world.curriculum import OPEN, Stage
from seedbed.recipes.world.data import WorldData
from seedbed.recipes.world.emulator import Emulator
from seedbed.recipes.world.evaluate import baselines, free_run, teacher_forced
from seedbed.recipes.world.examine import action_sensitivity, examine, rollout_frames, table, trajectory_batch
from seedbed.recipes.world.memory import Memory, to_float
from seedbed.recipes.world.system import World
from seedbed.train.system import Request

QUIET = ["every.log=1", "every.eval=3", "every.sample=0", "every.save=3"]
ALL_STAGES = ["model.closed=0.1", "model.rollout=3", "model.adversarial=0.3", "model.critic_warmup=2", "steps=18"]


@pytest.fixture(autouse=True)
def no_report(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local.journal, "finish", lambda run, warn: None)
    # A network of six steps listens to nothing; the gates are tested on their own.
    monkeypatch.setattr("seedbed.recipes.world.curriculum.BLIND", -100.0)
    monkeypatch.setattr("seedbed.recipes.world.curriculum.FLAT", 100.0)
    monkeypatch.setattr("seedbed.recipes.world.curriculum.HARM", 100.0)
    monkeypatch.setattr("seedbed.recipes.world.evaluate.NUM_QUICK", {"cpu": 4})


def begin(root: Path, name: str, *settings: str) -> int:
    return start(root, name, *TINY, *QUIET, "device=cpu", *settings, recipe="world/demo")


# ---- training ----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_run_through_all_stages_resumes_exactly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert begin(tmp_path, "whole", *ALL_STAGES) == 0
    messages = rows(tmp_path, "whole")
    lengths, critics = [r["own_frames"] for r in messages], [r["loss_critic"] for r in messages]
    assert lengths[0] == 1 and max(lengths) > 1
    assert critics[0] == 0 and critics[-1] != 0 and np.isfinite(critics).all()
    assert {r.keys() == messages[0].keys() for r in messages} == {True}, "every stage measures the same things"
    assert newest(tmp_path, "whole").state["system"]["ladder"]["critic_since"] > 0
    stop_at(10, monkeypatch)
    begin(tmp_path, "parts", *ALL_STAGES)
    assert "end" in kinds(tmp_path, "parts")
    assert resume(tmp_path, "parts") == 0
    assert_same_end(tmp_path, "whole", "parts")


@pytest.mark.parametrize(
    "stage", [Stage("open", 1), Stage("closed", 3), Stage("critic", 2), Stage("adversarial", 2, 0.5)], ids=str
)
def test_stages_have_no_host_sync(stage: Stage) -> None:
    system, engine, feed = made("model.adversarial=0.9")
    engine.variant = stage
    engine.begin(0, 0.5)
    engine._kind = "none"  # on a CPU the guard looks at the loss, since that costs nothing there
    engine._halt_unless_finite = lambda loss, norm: None  # type: ignore[method-assign]
    with NoHost():
        system.update(feed.part(0), engine)


def test_generator_and_critic_learn_separately() -> None:
    system, engine, feed = made("model.adversarial=0.9", "model.critic_warmup=0")
    assert isinstance(system, World) and system.critic is not None
    for stage, moved, still in ((Stage("critic", 2), system.critic, None), (Stage("open", 1), system.net, system.critic)):
        before = {name: p.detach().clone() for name, p in system.named_parameters()}
        engine.variant = stage
        engine.begin(0, 0.5)
        engine.step(feed.part)
        changed = {name for name, p in system.named_parameters() if not torch.equal(p, before[name])}
        assert {name.partition(".")[0] for name in changed} >= {"net" if moved is system.net else "critic"}
        assert still is None or not any(name.startswith("critic") for name in changed)


def test_adversarys_pull_is_held_at_its_ratio() -> None:
    system, engine, feed = made("model.adversarial=0.9", "model.ratio=0.1")
    engine.variant = Stage("adversarial", 2)
    engine.begin(0, 0.5)
    measured = engine.step(feed.part)
    assert isinstance(system, World)
    assert (system.weight[0] * measured["gradient_ratio"]).item() == pytest.approx(0.1, rel=1e-3)
    for length, num in ((1, 8), (2, 4)):  # rows that may be judged; the error is the mean over all
        _, frames, _, _ = system._errors(feed.part(0), Stage("adversarial", length))
        assert len(frames.frame_B3HW) == num and frames.num_predicted == 8


@pytest.mark.parametrize("gamma", [0.0, 0.5, 50.0])
def test_critics_penalty_has_the_gradient_of_twice_backward(gamma: float) -> None:
    """R1 and R2 by their definition, in float64; the recipe carries the slope forward instead."""
    generator = torch.Generator().manual_seed(3)
    critic = Critic(5, 3, 1.0).double()
    critic.init_weights(generator)
    with torch.no_grad():
        for param in critic.parameters():  # no weight is zero, as some are at birth
            param += 0.1 * torch.randn(param.shape, generator=generator, dtype=torch.float64)
    shapes = ((4, 3, 16, 16), (4, 3, 16, 16), (4, 12, 16, 16), (4, 5))
    real, fake, memory, action = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)
    found = critic_loss(critic, real, fake, memory, action, gamma)
    scores, squares = [], []
    for frame in (real.requires_grad_(), fake.requires_grad_()):
        scores.append(critic(frame, memory, action))
        (slope,) = torch.autograd.grad(scores[-1].sum(), frame, create_graph=True)
        squares.append(slope.square().sum((1, 2, 3)).mean())
    asked = F.softplus(scores[1] - scores[0]).mean() + 0.5 * gamma * (squares[0] + squares[1])
    torch.testing.assert_close(found["loss_critic"], asked)
    torch.testing.assert_close((found["r1"], found["r2"]), tuple(squares))
    params = list(critic.parameters())
    mine, theirs = (torch.autograd.grad(loss, params) for loss in (found["loss_critic"], asked))
    torch.testing.assert_close(mine, theirs)


@pytest.mark.parametrize("num", [2, 8, 16])
def test_critic_gradient_does_not_depend_on_the_number_of_scored_frames(num: int) -> None:
    """Both pull at every pixel alike here: at a ratio of 0.3 the mean over those that are judged counts for 0.3 of the error."""
    frame = torch.randn(16, 3, 4, 4, generator=torch.Generator().manual_seed(1)).requires_grad_()
    judged = slice(0, num)
    means = frame.mean(), frame[judged].mean()
    weight, against, slope = adversarial_weight(*means, frame, judged, num / 16, 0.3, lambda total: total)
    torch.testing.assert_close(slope, torch.autograd.grad(frame[judged].mean(), frame)[0])
    assert against.item() == pytest.approx(1.0, rel=1e-5)
    assert weight.item() == pytest.approx(0.3, rel=1e-5)


def test_rollouts_are_rank_local_and_not_model_weights() -> None:
    system, engine, feed = made("model.rollout=4")
    files, names = engine.tensors(), system.rank_local_buffers()
    assert names and names <= files["optim"].keys() and not names & files["model"].keys()
    engine.variant = Stage("closed", 4)
    before = {name: tensor.clone() for name, tensor in files["optim"].items() if name in names}
    engine.begin(0, 0.5)
    with engine.dry_run():
        engine.step(feed.part)
    assert all(torch.equal(files["optim"][name], tensor) for name, tensor in before.items()), "a rehearsal changes nothing"
    engine.step(feed.part)
    assert not any(torch.equal(files["optim"][name], tensor) for name, tensor in before.items() if name != "rollouts.index_P")


@pytest.mark.slow
def test_micro_batches_give_the_open_loop_of_the_whole(tmp_path: Path) -> None:
    for name, accum in (("one", 1), ("two", 2)):
        assert begin(tmp_path, name, f"accum={accum}", "every.eval=0", "model.closed=1", "steps=3") == 0
    one, two = ([r["loss"] for r in rows(tmp_path, name)] for name in ("one", "two"))
    np.testing.assert_allclose(one, two, rtol=1e-5)


def test_ranks_and_restarts_see_the_same_windows(tmp_path: Path) -> None:
    system, _, feed = made()
    again, _, other = made("batch=4")
    other.load(4)
    assert torch.equal(feed.part(0)["frames"][4:], other.part(0)["frames"])
    (mine, _), (theirs, _) = system.training_windows(feed.part(0), OPEN), again.training_windows(other.part(0), OPEN)
    assert torch.equal(system.training_noise.own(mine)[4:], again.training_noise.own(theirs))


# ---- data --------------------------------------------------------------------------------------------------------------


def test_windows_never_reach_into_another_part() -> None:
    system, _, _ = made()
    recording = system.data.recording
    seen = {}
    for part in (system.data.train, system.data.valid, system.data.test):
        low, high = recording.span(part.part)
        first, last = part.low + part.start_N[0], part.low + part.start_N[-1] + part.before + part.after - 1
        assert low <= first and last < high
        seen[part.part] = (first, last)
    assert seen["train"][1] < seen["valid"][0] and seen["valid"][1] < seen["test"][0]


def test_windows_hold_the_recordings_own_frames_and_controls() -> None:
    system, _, _ = made()
    source = valid(system)
    start_B = source.windows(3, 4, 8)
    frames, actions = source.read(start_B, 12, torch.device("cpu"))
    recording = system.data.recording
    np.testing.assert_array_equal(frames[1].numpy(), recording.frames_THWC[start_B[1] : start_B[1] + 12])
    np.testing.assert_array_equal(actions[1].numpy(), recording.scaled()[start_B[1] : start_B[1] + 12])


@pytest.mark.parametrize(
    ("setting", "says"),
    [
        ("data.recording=nowhere", "no recording at nowhere"),
        ("data.recording=doom2", "doom2"),
        ("data.recording=", "empty"),
        ("data.recording=gym:", "no simulator"),
        ("data.frames=10", "at least 200"),
        ("model.memory=32", "no window of 32 \\+ 1 frames fits into its valid part"),
    ],
)
def test_recording_errors_are_one_line(setting: str, says: str) -> None:
    with pytest.raises(UserError, match=says):
        find("world")[0].open_data(config_of(setting, "data.frames=400" if "memory" in setting else "seed=1"))


# ---- judging -----------------------------------------------------------------------------------------------------------


def oracle(share: float = 1.0) -> Oracle:
    config = config_of()
    data = find("world")[0].open_data(config)
    assert isinstance(data, WorldData)
    return Oracle(config, data, share)


@torch.no_grad()
def test_oracle_is_right_about_every_control() -> None:
    system = oracle()
    found = controls.responses(system, trajectory_batch(system, valid(system), 12, 8))
    assert set(found) == {"x", "y", "z", "roll", "pitch", "yaw"}
    for name, row in found.items():
        assert row["accuracy_1"] == row["accuracy_8"] == 1.0, name
        assert row["slope_1"] == pytest.approx(1.0, abs=0.02) and row["slope_8"] == pytest.approx(1.0, abs=0.02), name
    assert controls.worst_accuracy(found) == 1.0


@pytest.mark.slow
@torch.no_grad()
def test_deaf_or_reversed_emulator_is_found_out() -> None:
    for share, low, high in ((0.0, 0.3, 0.7), (-1.0, 0.0, 0.2)):
        system = oracle(share)
        found = controls.responses(system, trajectory_batch(system, valid(system), 12, 8))
        assert low <= found["yaw"]["accuracy_1"] <= high, share
        assert found["yaw"]["slope_1"] < 0.1


@torch.no_grad()
def test_oracle_stands_still_turns_around_and_needs_its_controls() -> None:
    system = oracle()
    traj = trajectory_batch(system, valid(system), 3, 2)
    still = controls.idle_drift(system, traj, 12)
    assert not still["alarm"] and still["psnr_to_first"] > 40
    around = controls.full_turns(system, traj, circles=1)
    assert around["psnr_after"][0] > 40 > around["psnr_of_half_a_circle"]
    traj = trajectory_batch(system, valid(system), 4, 16)
    for step, frame in free_run(system, traj, 16):
        assert (controls.psnr(frame, traj.target(step)) > 40).all(), "true controls lead to the true frames"
    assert action_sensitivity(system, traj, rollout_frames(system, traj, 4), [4])[4] > 3


@torch.no_grad()
def test_fade_baseline_is_at_least_as_good_as_its_parts() -> None:
    system, _, _ = made()
    source = system.data.train
    for horizon in (1, 4, 16):
        traj = trajectory_batch(system, source, 64, horizon)
        found = {n: controls.psnr(p, traj.target(horizon)).mean() for n, p in baselines(system.data, traj, horizon).items()}
        assert found["fade"] > max(found["copy"], found["mean"]) - 0.35, horizon
    assert system.data.fade(1) > system.data.fade(16)


@torch.no_grad()
def test_evaluation_repeats_to_the_bit_and_changes_nothing() -> None:
    system, engine, _ = made()
    one, two = (system.evaluate(valid(system), engine) for _ in range(2))
    assert one == two and next(iter(one)) == "free_l1"
    traj = trajectory_batch(system, valid(system), 4, 16)
    far = [(frame - traj.target(step)).abs().mean().item() for step, frame in free_run(system, traj, 16) if step > 8]
    assert one["free_l1"] == pytest.approx(sum(far) / 8, rel=1e-4), "what is best is decided by frames 9 to 16"
    assert system.evaluate(system.data.test, engine) != one
    assert system.curriculum.latest is not None and system.curriculum.latest["error"] == one["free_l1"], "tests decide nothing"


@torch.no_grad()
def test_teacher_forced_frame_equals_first_of_free_run() -> None:
    system, _, _ = made()
    traj = trajectory_batch(system, valid(system), 4, 4)
    assert torch.equal(next(iter(free_run(system, traj, 1)))[1], teacher_forced(system, traj, 1))


def test_examination_is_whole_and_can_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(controls, "STILL_STEPS", 8)
    monkeypatch.setattr("seedbed.recipes.world.controls.idle_drift.__defaults__", (8,))
    monkeypatch.setattr("seedbed.recipes.world.controls.full_turns.__defaults__", (1,))
    monkeypatch.setattr("seedbed.recipes.world.examine.NUM_LONG", {"cpu": 2})
    system, engine, _ = made()
    found = examine(system, valid(system), tmp_path, 4)
    assert json.loads((tmp_path / "examination.json").read_text()) == json.loads(json.dumps(found))
    assert set(found["horizons"]) >= {"1", "4", "16"} and len(found["memory_gap"]["true"]) == 8
    shown = table(found)
    for word in ("fade", "yaw", "Without controls", "frames/s", "Corrupted"):
        assert word in shown
    sample = system.sample(Request(tmp_path / "shown", {"num": 2, "steps": 8}), engine)
    names = {path.name for path in sample.files}
    assert {"rollouts.png", "rollout.gif"} <= names and all(path.stat().st_size for path in sample.files)
    with pytest.raises(UserError, match="--num"):
        system.sample(Request(tmp_path, {"prompt": "x"}), engine)


def test_blind_and_drifting_runs_raise_alarms() -> None:
    system, _, _ = made()
    system.evaluated = {"listens": 0.0, "copy_1": 20.0, "free_1": 19.0, "sharp_16": 0.1}
    assert {a.kind for a in system.alarms({}, 0.9)} == {"blind", "below_copy", "drift"}
    assert system.alarms({}, 0.1) == []
    system.evaluated = {}
    sick = {"loss_critic": 1.0, "critic_won": 1.0, "critic_margin": 9.0, "r1": 1e5}
    assert {a.kind for a in system.alarms(sick, 0.9)} == {"critic_balance", "critic_steep"}
    assert system.alarms({**sick, "loss_critic": 0.0}, 0.9) == []


# ---- the denoiser ------------------------------------------------------------------------------------------------------


def test_preconditioning_keeps_everything_of_unit_size() -> None:
    sigma = torch.logspace(-2, 1, 9)
    by = edm.factors(sigma)
    square = sigma.square() + edm.OFFSET**2
    enter, skip, out = (f.flatten() for f in (by.input, by.skip, by.out))
    torch.testing.assert_close(enter.square() * (square + edm.DATA_VARIANCE), torch.ones(9))
    # The target (x - skip * noisy) / out of unit-variance directions has variance one.
    variance = ((1 - skip).square() * edm.DATA_VARIANCE + skip.square() * square) / out.square()
    torch.testing.assert_close(variance, torch.ones(9))


def test_edm_noise_levels_fall_to_zero() -> None:
    path = edm.sigmas(3)
    assert path[0] == pytest.approx(edm.SIGMA_MAX) and path[2] == pytest.approx(edm.SIGMA_MIN) and path[3] == 0
    assert path == sorted(path, reverse=True)


@pytest.mark.slow
def test_denoiser_trains_and_samples(tmp_path: Path) -> None:
    settings = ["model.kind=edm", "model.adversarial=1", "model.closed=0.1", "model.rollout=2", "steps=9"]
    assert begin(tmp_path, "edm", *settings) == 0
    messages = rows(tmp_path, "edm")
    assert np.isfinite([r["loss"] for r in messages]).all() and messages[-1]["own_frames"] == 2
    for feedback in ("denoised", "drawn"):
        system, engine, feed = made(*settings, f"model.feedback={feedback}")
        engine.variant = Stage("closed", 2)
        assert torch.isfinite(system.loss(feed.part(0), engine)[0])


@torch.no_grad()
def test_perfect_denoiser_draws_the_true_frame(monkeypatch: pytest.MonkeyPatch) -> None:
    system, _, feed = made("model.kind=edm", "model.static=false")
    assert isinstance(system, edm.Denoiser)
    frames = to_float(feed.part(0)["frames"])
    memory, true = Memory.start(frames[:, :4], system.layout), frames[:, 4]
    monkeypatch.setattr(system, "denoise", lambda *given: (true, true))
    drawn = system.predict_frame(memory, feed.part(0)["action"][:, 3], feed.part(0)["index"], 1)
    torch.testing.assert_close(drawn, true)


def test_describe_of_every_model_kind() -> None:
    for kind in ("direct", "edm"):
        system, _, _ = made(f"model.kind={kind}")
        assert isinstance(system, Emulator)
        assert system.flops_per_item() > 0 and "memory" in system.describe()
