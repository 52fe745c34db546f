"""Lag estimation finds shifted and reversed controls, refuses only clear cases, and names the correction."""

from pathlib import Path

import numpy as np
import pytest

from seedbed.errors import UserError
from seedbed.recipes.world.recording import lag_estimation
from seedbed.recipes.world.recording.recording import Recording, write_recording
from seedbed.recipes.world.simulators import record
from seedbed.recipes.world.simulators.box import record_box

OFFSETS = (-2, -1, 0, 1, 2, 3)


def texture(height: int, width: int) -> np.ndarray:
    """A picture with detail of all sizes that goes on at its borders."""
    rng = np.random.default_rng(0)
    fine = np.hypot(np.fft.fftfreq(height)[:, None], np.fft.fftfreq(width)[None])
    noise = np.fft.fft2(rng.standard_normal((height, width))) / (fine + 0.02)
    plain = np.fft.ifft2(noise).real
    return ((plain - plain.min()) / np.ptp(plain) * 255).astype(np.float32)


@pytest.mark.parametrize("move", [(0, 0), (3, 0), (0, -2), (-5, 4), (1.5, 0.25), (-0.5, -2.75)])
@pytest.mark.parametrize("size", [(64, 64), (48, 80)], ids=str)
def test_phase_correlation_finds_a_shift(move: tuple[float, float], size: tuple[int, int]):
    """The content moves right and down by `move`, shifted in the spectrum so that fractions are exact."""
    picture = texture(*size)
    phase = np.fft.fftfreq(size[1])[None] * move[0] + np.fft.fftfreq(size[0])[:, None] * move[1]
    moved = np.fft.ifft2(np.fft.fft2(picture) * np.exp(-2j * np.pi * phase)).real.astype(np.float32)
    found = lag_estimation.shift(np.stack([picture, moved]), np.array([0]), np.array([1]))
    np.testing.assert_allclose(found, [move], atol=0.2)


def altered(given: Recording, path: Path, offset: int = 0, flip: tuple[str, ...] = (), **changes) -> Recording:
    """The recording with controls that stand `offset` frames late, or turned round."""
    actions_TA = np.zeros_like(given.actions_TA)
    for episode in np.unique(given.episode_T):
        rows = np.flatnonzero(given.episode_T == episode)
        actions_TA[rows] = np.roll(given.actions_TA[rows], offset, axis=0)
    names = [axis.name for axis in given.axes]
    actions_TA[:, [names.index(name) for name in flip]] *= -1
    axes = [(axis.name, axis.unit) for axis in given.axes]
    tables = (actions_TA, given.time_T, given.episode_T, axes)
    facts = {"source": {"name": "altered"}, "simulator": given.facts["simulator"]} | changes
    return write_recording(path, [given.frames_THWC], *tables, **facts)


@pytest.fixture(scope="module")
def box(tmp_path_factory: pytest.TempPathFactory) -> Recording:
    return record_box(500, 32, 32, 1, out=tmp_path_factory.mktemp("box") / "rec")


def must_find(given: Recording, folder: Path, offset: int, flip: tuple[str, ...]) -> None:
    recording = altered(given, folder / f"{offset}{''.join(flip)}", offset, flip)
    estimate = lag_estimation.estimate_lag(recording)
    assert (estimate.lag, estimate.is_clear, tuple(estimate.wrong_axes)) == (offset, True, flip), estimate
    assert estimate.scores[estimate.lag] > max(score for lag, score in estimate.scores.items() if lag != estimate.lag)
    if not offset and not flip:
        assert lag_estimation.require_aligned(recording) == estimate
        return
    flag = f"--shift-actions {offset} " if offset else f"--flip {flip[0]}"
    with pytest.raises(UserError, match=rf"(?s)confidence.*\ncorrect it: seedbed data prepare .*{flag}") as caught:
        lag_estimation.require_aligned(recording)
    assert len(str(caught.value).splitlines()) == 2


@pytest.mark.parametrize("offset", OFFSETS)
def test_lag_offsets_on_the_box_world(box: Recording, offset: int, tmp_path: Path):
    must_find(box, tmp_path, offset, ())


@pytest.mark.parametrize("axis", ["roll", "pitch", "yaw"])
def test_lag_signs_on_the_box_world(box: Recording, axis: str, tmp_path: Path):
    must_find(box, tmp_path, 0, (axis,))


def test_person_may_know_better(box: Recording, tmp_path: Path):
    kept = altered(box, tmp_path / "kept", 2, accepted=True)
    assert lag_estimation.require_aligned(kept).lag == 2


def test_lag_check_allows_inertia_of_a_simulator(box: Recording, tmp_path: Path):
    """A car answers later than it is steered; it never answers before."""
    late, early = (altered(box, tmp_path / f"{n}", n, simulator={"name": "gym"}) for n in (-2, 2))
    assert lag_estimation.require_aligned(late).lag == -2
    with pytest.raises(UserError, match="2 frames too late"):
        lag_estimation.require_aligned(early)


def test_lag_of_unrelated_controls_is_undetermined(box: Recording, tmp_path: Path):
    """Nothing in the pictures agrees with them: no lag is claimed."""
    other = np.random.default_rng(0).standard_normal(box.actions_TA.shape)
    facts = {"source": {"name": "noise"}, "simulator": None}
    axes = [(axis.name, axis.unit) for axis in box.axes]
    recording = write_recording(tmp_path / "rec", [box.frames_THWC], other, box.time_T, box.episode_T, axes, **facts)
    estimate = lag_estimation.require_aligned(recording)
    assert not estimate.is_clear and estimate.summary.startswith("undetermined")


def test_lag_of_short_and_still_recordings_is_undetermined(tmp_path: Path):
    black = np.zeros((300, 16, 16, 3), np.uint8)
    axes, facts = [("yaw", "rad")], {"source": {"name": "black"}}
    wave = np.sin(np.arange(300))[:, None]
    still = write_recording(tmp_path / "still", [black], wave, np.arange(300.0), np.zeros(300, int), axes, **facts)
    assert not lag_estimation.require_aligned(still).is_clear
    short = write_recording(tmp_path / "short", [black[:60]], wave[:60], np.arange(60.0), np.zeros(60, int), axes, **facts)
    assert lag_estimation.estimate_lag(short).summary == "undetermined: too few consecutive frames"


@pytest.mark.slow
def test_lag_offsets_and_signs_on_doom(tmp_path: Path):
    pytest.importorskip("vizdoom", reason="Doom needs vizdoom")
    doom = record("doom", 1200, 64, 64, 1, out=tmp_path / "doom")
    for offset in OFFSETS:
        must_find(doom, tmp_path, offset, ())
    for axis in ("x", "pitch", "yaw"):
        must_find(doom, tmp_path, 0, (axis,))


@pytest.mark.slow
@pytest.mark.parametrize("smooth", [0.6, 0.9])
def test_lag_offsets_on_smooth_trajectories(smooth: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Velocities that change slowly look alike at neighbouring lags; the margin is thin and still right. (Of shorter recordings,
    800 frames, one in six is left undecided, by single rays as by fine ones.)"""

    monkeypatch.setattr("seedbed.recipes.world.simulators.box.SMOOTH", smooth)
    for seed in (1, 2):
        given = record_box(1200, 40, 40, seed, out=tmp_path / f"box{seed}")
        for offset in (-2, 0, 1, 3):
            must_find(given, tmp_path / f"{seed}", offset, ())
