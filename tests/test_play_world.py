"""The world's player: it rollouts what training computes, starts where it should, and its simulator tells the truth."""

import numpy as np
import pytest
import torch

from seedbed import config as configs
from seedbed.errors import UserError
from seedbed.recipes import find
from seedbed.recipes.world.export_web import OnnxNet
from seedbed.recipes.world.memory import reduce, to_bytes, to_float
from seedbed.recipes.world.objective import open_window, rows_of
from seedbed.recipes.world.player import WorldPlayer, control_facts
from seedbed.recipes.world.radiance_field import flat_poses
from seedbed.recipes.world.recording.recording import measure_axes, scale_actions
from seedbed.train.player import RECORDING, SIMULATOR

SMALL = ["data.frames=900", "data.height=16", "data.width=16", "device=cpu", "model.size=0.1m", "model.memory=2"]


def player(*settings: str, runtime: str = "torch", preset: str = "demo", spread: float = 0.03) -> WorldPlayer:
    """An untrained emulator whose weights are not zero anywhere, so that every input counts."""
    recipe, _ = find("world")
    config = configs.override(recipe.preset(preset), [*SMALL, *settings])
    system = recipe.build(config, recipe.open_data(config))
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in system.parameters():
            parameter += spread * torch.randn(parameter.shape, generator=generator)
    return system.play(runtime)


@pytest.fixture(scope="module")
def played() -> WorldPlayer:
    return player()


@pytest.fixture(scope="module")
def pyramid() -> WorldPlayer:
    return player("model.pyramid=true")


@pytest.fixture(scope="module")
def again() -> WorldPlayer:
    return player("model.size=1.3m")


@pytest.fixture(scope="module")
def plain() -> WorldPlayer:
    return player("model.pose_tracking=false")


def training_forward(played: WorldPlayer, row: int, index: int, turn: int) -> torch.Tensor:
    """What the training step computes for the window whose newest frame is `row`: from a batch as the feed makes it."""
    system, recording = played.system, played.recording
    before = system.layout.num_frames
    rows = np.arange(row - before + 1, row + 2)
    batch = {
        "frames": torch.from_numpy(recording.frames_THWC[rows][None].copy()),
        "action": torch.from_numpy(recording.scaled()[rows][None]),
        "index": torch.tensor([index]),
    }
    if system.config.model.pose_tracking:
        batch["pose"] = torch.from_numpy(flat_poses(recording)[rows][None])
    window = open_window(rows_of(batch), system.layout)
    with torch.no_grad():
        return system.net(window.memory.tensors(), window.action_BA, torch.zeros(1), system.own_noise(batch["index"], turn))


@pytest.mark.parametrize("which", ["played", "again", "pyramid", "plain"])
def test_fed_with_recorded_frames_the_player_is_the_training_forward(which: str, request: pytest.FixtureRequest):
    """The memory is woken to the recorded frames after each step: every prediction must equal training's in every bit."""
    played = request.getfixturevalue(which)
    rollout, predicted = played.new_rollout(), []
    real = played.predict
    played.predict = lambda *given: predicted.append(real(*given)) or predicted[-1]
    try:
        rollout.reset(5, RECORDING)
        first = rollout.at
        for turn in range(4):
            assert rollout.step(np.full(len(played.axes), 99.0, np.float32))  # the recording steers, not the visitor
            assert torch.equal(predicted[-1], training_forward(played, first + turn, 5, turn))
            assert np.array_equal(rollout.frame_HWC, to_bytes(predicted[-1])[0].numpy())
            rollout.anchor()
            assert np.array_equal(rollout.frame_HWC, played.recording.frames_THWC[first + turn + 1])
    finally:
        played.predict = real


def test_raw_controls_are_scaled_as_in_training(played: WorldPlayer):
    recording = played.recording
    inside_T = ~recording.last_T
    assert np.array_equal(scale_actions(recording.actions_TA, recording.axes)[inside_T], recording.scaled()[inside_T])


def test_rollout_is_deterministic_and_sessions_are_independent(played: WorldPlayer):
    controls = [np.array(played.recording.actions_TA[row]) for row in range(6)]
    one, other = played.new_rollout(), played.new_rollout()
    one.reset(2)
    for number, action in enumerate(controls):
        one.step(action)
        other.step(controls[-number])
    kept = one.frame_HWC.copy()
    other.reset(2)
    for action in controls:
        other.step(action)
    assert np.array_equal(other.frame_HWC, kept)
    other.locked = True
    other.reset(2)
    for action in controls:
        other.step(action)
    assert not np.array_equal(other.frame_HWC, kept)


def test_controls_and_level_change_the_dream(played: WorldPlayer):
    shown = []
    for scale, level in ((1.0, 0.0), (-1.0, 0.0), (1.0, 0.5)):
        rollout = played.new_rollout()
        rollout.level = level
        rollout.step(np.array([scale * axis.full[1] for axis in played.axes], np.float32))
        shown.append(rollout.frame_HWC)
    assert not np.array_equal(shown[0], shown[1]) and not np.array_equal(shown[0], shown[2])


def test_starts_are_frames_that_were_not_trained_on(played: WorldPlayer):
    low, high = played.recording.span("train")
    assert len(played.starts) == played.num_seeds > 5
    assert ((played.starts < low) | (played.starts >= high)).all()
    rollout = played.new_rollout()
    rollout.reset(3)
    assert np.array_equal(rollout.frame_HWC, played.recording.frames_THWC[played.starts[3]])
    assert rollout.reference_HWC is None and rollout.num_steps == 0


def test_reference_simulator_reproduces_the_recording(played: WorldPlayer):
    """The recorded controls carried out again lead to the recorded pictures: the truth beside the rollout is the truth."""
    rollout = played.new_rollout()
    rollout.reset(4, SIMULATOR)
    first, recording = int(played.starts[4]), played.recording
    for step in range(6):
        rollout.step(np.array(recording.actions_TA[first + step]))
        assert rollout.reference_HWC is not None and rollout.pose_44 is not None
        close = np.abs(rollout.reference_HWC.astype(int) - recording.frames_THWC[first + step + 1]) <= 1
        assert close.mean() > 0.99
    assert np.allclose(rollout.pose_44, recording.pose_T44[first + 6], atol=1e-5)
    assert np.allclose(rollout.applied_A, rollout.action_A, atol=1e-6)


def test_executed_controls_show_a_collision(played: WorldPlayer):
    rollout = played.new_rollout()
    rollout.reset(0, SIMULATOR)
    for _ in range(100):
        rollout.step(np.array([0.5, 0, 0, 0, 0, 0, 1 / 30], np.float32))
    assert np.abs(rollout.applied_A[:3]).max() < 0.4 and rollout.action_A[0] == 0.5


def test_recorded_reference_ends_with_its_split(played: WorldPlayer):
    rollout = played.new_rollout()
    rollout.reset(played.num_seeds - 1, RECORDING)
    num = 0
    while rollout.step(np.zeros(len(played.axes), np.float32)):
        num += 1
        assert num < played.recording.num_frames
    assert rollout.num_steps == num and not rollout.step(np.zeros(len(played.axes), np.float32))
    rollout.anchor()


def test_waking_up_needs_something_real(played: WorldPlayer):
    rollout = played.new_rollout()
    with pytest.raises(UserError, match="no reference"):
        rollout.anchor()


def test_memory_view_equals_the_network_input(pyramid: WorldPlayer):
    rollout = pyramid.new_rollout()
    rollout.step(np.zeros(len(pyramid.axes), np.float32))
    for frames_NHWC, (name, kept) in zip(rollout.memory_images(), rollout.memory.kept.items(), strict=True):
        assert torch.equal(to_float(torch.from_numpy(frames_NHWC)).flatten(0, 1), kept[0]), name
    assert np.array_equal(rollout.memory_images()[0][-1], rollout.frame_HWC)


def test_coarse_memories_are_exact_means_of_bytes():
    bytes_HWC = torch.randint(0, 256, (1, 2, 64, 64, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    frames = to_float(bytes_HWC)[:, 0]
    for by in (4, 16, 64):
        squares = bytes_HWC[0, 0].numpy().reshape(64 // by, by, 64 // by, by, 3).astype(np.int64).sum((1, 3))
        assert np.array_equal(to_bytes(reduce(frames, by))[0].numpy(), np.round(squares / by**2).astype(np.uint8))


def test_facts_stay_inside_what_was_recorded(played: WorldPlayer):
    facts = played.facts()
    assert facts["seconds"] == pytest.approx(1 / 30) and len(facts["ramp"]) == len(played.axes)
    assert all(1 <= steps <= 12 for steps in facts["ramp"])
    assert not any(facts["buttons"]) and not facts["one_of"]
    joint = facts["joint"]
    low, high = played.recording.span("train")
    actions = played.recording.actions_TA[low:high][~played.recording.last_T[low:high]].astype(np.float64) - joint["mean"]
    beyond = np.einsum("ti,ij,tj->t", actions, np.array(joint["inverse"]), actions) > joint["limit"]
    assert 0.005 < beyond.mean() < 0.015


def test_buttons_are_told_from_axes():
    rng = np.random.default_rng(0)
    names = [("noop", ""), ("fire", ""), ("up", ""), ("dt", "s")]
    one_hot = np.concatenate((np.eye(3)[rng.integers(0, 3, 400)], np.full((400, 1), 0.1)), axis=1)
    facts = control_facts(one_hot, tuple(measure_axes(one_hot, names)))
    assert facts["buttons"] == [True, True, True, False] and facts["one_of"] and facts["joint"] is None
    free = one_hot.copy()
    free[:, :3] = rng.integers(0, 2, (400, 3))
    facts = control_facts(free, tuple(measure_axes(free, names)))
    assert facts["buttons"] == [True, True, True, False] and not facts["one_of"] and facts["joint"] is not None
    free[:, 0] = rng.normal(size=400)
    assert control_facts(free, tuple(measure_axes(free, names)))["buttons"] == [False, True, True, False]


def test_player_has_its_own_weights(played: WorldPlayer):
    copied = WorldPlayer(played.system, "torch")
    assert copied.recording is played.recording
    pairs = zip(copied.system.parameters(), played.system.parameters(), strict=True)
    assert all(a.data_ptr() != b.data_ptr() for a, b in pairs)


def test_denoiser_is_played_by_torch_only():
    played = player(preset="edm")
    rollout = played.new_rollout()
    before = rollout.frame_HWC
    assert rollout.step(np.zeros(len(played.axes), np.float32)) and not np.array_equal(rollout.frame_HWC, before)
    with pytest.raises(UserError, match="--runtime torch"):
        OnnxNet(played.system)


@pytest.mark.slow
@pytest.mark.parametrize("which", ["again", "pyramid", "plain"])
def test_onnx_runtime_dreams_the_same(which: str, request: pytest.FixtureRequest):
    pytest.importorskip("onnxruntime")
    pyramid = request.getfixturevalue(which)
    net = OnnxNet(pyramid.system)
    memory, index = pyramid.new_rollout().memory, torch.tensor([3])
    for turn in range(3):
        action = torch.from_numpy(pyramid.recording.scaled()[turn : turn + 1])
        with torch.inference_mode():
            want = pyramid.system.predict_frame(memory, action, index, turn, 0.1)
            got = net.predict_frame(memory, action, index, turn, 0.1)
            memory = pyramid.system.advance(memory, action, want)
        assert (want - got).abs().max() < 1e-4
