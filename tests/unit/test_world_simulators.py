"""Simulators that are recorded: the frame before a step owns its control, and nothing foreign stands between episodes."""

from pathlib import Path

import numpy as np
import pytest

from seedbed.errors import UserError
from seedbed.recipes.world.recording import poses
from seedbed.recipes.world.recording.recording import Recording, open_recording
from seedbed.recipes.world.simulators import record

gymnasium = pytest.importorskip("gymnasium", reason="environments need gymnasium")
LENGTH = 30


class Counter(gymnasium.Env):
    """The picture's brightness is a count; a control changes it. Episodes have LENGTH steps, the first count is the seed's."""

    metadata = {"render_modes": ["rgb_array"], "render_fps": 20}  # noqa: RUF012
    spaces = {  # noqa: RUF012
        "discrete": gymnasium.spaces.Discrete(3, start=5),
        "binary": gymnasium.spaces.MultiBinary(2),
        "box": gymnasium.spaces.Box(-2.0, 2.0, (2,)),
        "text": gymnasium.spaces.Text(4),
    }

    def __init__(self, space: str = "discrete", render_mode: str | None = None, draws: bool = True):
        self.space, self.render_mode, self.draws = space, render_mode, draws
        self.action_space, self.observation_space = self.spaces[space], gymnasium.spaces.Discrete(2)
        self.count, self.step_count = 0.0, 0

    def reset(self, *, seed: int | None = None, options: dict | None = None):
        super().reset(seed=seed)
        self.count, self.step_count = float(self.np_random.integers(100, 140)), 0
        return 0, {}

    def step(self, action):
        assert self.action_space.contains(action), action
        change = action - 6 if self.space == "discrete" else action[0] - action[1] if self.space == "binary" else action.sum()
        self.count += float(change) if self.space != "binary" else int(action[0]) - int(action[1])
        self.step_count += 1
        return 0, 0.0, self.step_count >= LENGTH, False, {}

    def render(self):
        return np.full((24, 32, 3), round(self.count), np.uint8) if self.draws else None


for space in Counter.spaces:
    gymnasium.register(f"seedbed/Counter-{space}-v0", entry_point=Counter, kwargs={"space": space})
gymnasium.register("seedbed/Blind-v0", entry_point=Counter, kwargs={"draws": False})


def change_of(recording: Recording, kind: str) -> np.ndarray:
    """By how much each control changes the count."""
    actions_TA = recording.actions_TA[:, :-1]
    if kind == "discrete":
        return actions_TA.argmax(1) - 1.0
    return actions_TA[:, 0] - actions_TA[:, 1] if kind == "binary" else actions_TA.sum(1)


@pytest.mark.parametrize("kind", ["discrete", "binary", "box"])
def test_control_takes_its_frame_to_the_next(kind: str, tmp_path: Path):
    recording = record(f"gym:seedbed/Counter-{kind}-v0", 200, 16, 16, 1, out=tmp_path / "rec")
    level_T = recording.frames_THWC[:, 0, 0, 0].astype(float)
    leads_T = ~recording.last_T
    difference_T = np.diff(level_T, append=0)
    np.testing.assert_allclose(difference_T[leads_T], change_of(recording, kind)[leads_T], atol=0.5 if kind != "box" else 1.01)
    lengths = np.bincount(recording.episode_T)
    assert (lengths[:-1] == LENGTH + 1).all(), "an episode has its last frame, and no frame of the next"
    assert recording.facts["recording"]["median_dt"] == pytest.approx(0.05)
    again = record(f"gym:seedbed/Counter-{kind}-v0", 200, 16, 16, 1, out=tmp_path / "again")
    assert again.fingerprint == recording.fingerprint, "the same seed records the same"
    assert not any(axis.dead for axis in recording.axes if not axis.is_time)


def test_buttons_are_pressed_equally_often(tmp_path: Path):
    recording = record("gym:seedbed/Counter-discrete-v0", 1500, 16, 16, 2, out=tmp_path / "rec")
    share = recording.actions_TA[~recording.last_T, :3].mean(0)
    assert share.min() > 0.2 and share.sum() == pytest.approx(1)
    assert [axis.name for axis in recording.axes] == ["button0", "button1", "button2", "dt"]


WRONG = [
    ("box:3", "there is no simulator box:3; choose one of box, doom"),
    ("atari:", "there is no simulator atari:"),
    ("minecraft", "there is no simulator minecraft"),
    ("gym:Nonesuch-v0", "gymnasium cannot make Nonesuch-v0"),
    ("gym:seedbed/Counter-text-v0", "is steered by Text"),
    ("gym:seedbed/Blind-v0", "draws no RGB pictures"),
]


@pytest.mark.parametrize(("source", "says"), WRONG)
def test_simulator_that_cannot_be_recorded_is_refused(source: str, says: str, tmp_path: Path):
    with pytest.raises(UserError, match=says) as caught:
        record(source, 100, 16, 16, 1, out=tmp_path / "rec")
    assert len(str(caught.value).splitlines()) == 1
    assert not (tmp_path / "rec").exists()


@pytest.mark.parametrize(("package", "source"), [("gymnasium", "gym:X-v0"), ("vizdoom", "doom"), ("ale_py", "atari:Pong")])
def test_missing_package_is_named(package: str, source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    import sys

    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(UserError, match=r"pip install \"seedbed\[\w+\]\""):
        record(source, 100, 16, 16, 1, out=tmp_path / "rec")


@pytest.mark.slow
def test_doom_rotates_by_the_control(tmp_path: Path):
    pytest.importorskip("vizdoom", reason="Doom needs vizdoom")
    recording = record("doom", 700, 48, 64, 3, out=tmp_path / "doom")
    assert recording.pose_T44 is not None
    leads_T, names = ~recording.last_T, [axis.name for axis in recording.axes]
    motion_P6 = poses.relative(recording.pose_T44)[leads_T[:-1]]
    np.testing.assert_allclose(recording.actions_TA[:-1, :6][leads_T[:-1]], motion_P6, atol=1e-6)
    # What was asked for: turns are obeyed to the letter.
    actions_PA = open_recording(recording.path, "command").actions_TA[:-1][leads_T[:-1]]
    yaw_P = actions_PA[:, names.index("yaw")]
    level_P = np.abs(recording.pose_T44[:-1, 2, 0][leads_T[:-1]]) < 0.02
    np.testing.assert_allclose(motion_P6[level_P, 5], yaw_P[level_P], atol=2e-3)
    # Legs have inertia, so the first frames of a stride are short; the direction is right all the same.
    for name, column in (("x", 0), ("y", 1)):
        pushed_P = np.abs(actions_PA[:, names.index(name)]) > 0.3
        agree = np.sign(motion_P6[pushed_P, column]) == np.sign(actions_PA[pushed_P, names.index(name)])
        assert agree.mean() > 0.75, name
    again = record("doom", 700, 48, 64, 3, out=tmp_path / "again")
    np.testing.assert_array_equal(again.actions_TA, recording.actions_TA)


@pytest.mark.slow
def test_atari_recording_is_deterministic(tmp_path: Path):
    pytest.importorskip("ale_py", reason="Atari needs ale-py")
    recording = record("atari:Breakout", 150, 32, 32, 1, out=tmp_path / "a")
    assert [axis.name for axis in recording.axes] == ["noop", "fire", "right", "left", "dt"]
    again = record("atari:Breakout", 150, 32, 32, 1, out=tmp_path / "b")
    assert again.fingerprint == recording.fingerprint


def test_simulator_registry_takes_one_line_per_simulator(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    from seedbed.recipes.world import simulators

    class Ramp:
        name, axes, seconds, has_pose = "ramp", (("push", ""), ("dt", "s")), 0.1, False

        def __init__(self, name: str, height: int, width: int):
            self.shape, self.level = (height, width, 3), 0

        def reset(self, seed: int) -> None:
            self.level = seed % 100

        def frame(self) -> np.ndarray:
            return np.full(self.shape, self.level, np.uint8)

        def choose(self, rng: np.random.Generator) -> np.ndarray:
            return np.array([1.0, 0.1])

        def step(self, action_A: np.ndarray) -> bool:
            self.level = min(255, self.level + int(action_A[0]))
            return True

        def pose(self) -> np.ndarray:
            raise AssertionError

        def close(self) -> None: ...

    monkeypatch.setattr("seedbed.recipes.world.simulators.doom.Ramp", Ramp, raising=False)
    monkeypatch.setitem(simulators.REGISTRY, "ramp", simulators.Entry("doom:Ramp"))
    recording = simulators.record("ramp", 40, 16, 16, 1, out=tmp_path / "ramp")
    assert recording.num_frames == 40 and recording.frames_THWC[1, 0, 0, 0] == recording.frames_THWC[0, 0, 0, 0] + 1


def test_file_with_a_class_of_its_name_is_a_simulator(tmp_path):
    for name in ("ramp.py", "__init__.py", "notes.txt"):
        (tmp_path / name).touch()
    from seedbed.recipes.world import simulators

    assert simulators._of_files(tmp_path) == {"ramp": simulators.Entry("ramp:Ramp")}
