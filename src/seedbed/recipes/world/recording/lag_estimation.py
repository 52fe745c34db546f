"""Lag estimation: are controls and frames aligned, shifted by some frames, or of the opposite sign?

Image motion is measured by phase correlation and regressed on the controls at every lag, with a block bootstrap.
Shape suffixes: P pairs of frames, H W pixels, F image motions, A control axes, L lags, K blocks, R resamplings,
S pixels of a line.
"""

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from seedbed.errors import UserError
from seedbed.recipes.world.recording.recording import Recording
from seedbed.recipes.world.simulators import REGISTRY

LAGS = np.arange(-4, 5)
# Pairs of frames: evenly spaced segments of a long recording.
MAX_PAIRS, STRETCH = 1600, 200
BLOCK = 25  # pairs per bootstrap block: neighbours are correlated
NUM_RESAMPLINGS = 300
MIN_BLOCKS = 8
MAX_SIDE = 96  # frames are downscaled to this
SURE = 0.95  # share of resamplings that must agree before a recording is refused
SURE_SIGN, STRONG = 0.99, 0.15
RELATED = 0.8  # the same for signs: a neighbouring lag has the same sign
CLEAR = 0.05  # share of the image motion that the controls must explain before lags are compared
MIN_MOTION = 0.01  # pixels of motion (standard deviation) below which frames are still
MOTIONS = ("right", "down", "zoom", "spin")
# The image motion that an axis causes, and its sign: x forward, y left, z up, right-handed turns, rows downwards.
EXPECTED = {
    "x": ("zoom", 1),
    "y": ("right", 1),
    "z": ("down", 1),
    "roll": ("spin", -1),
    "pitch": ("down", -1),
    "yaw": ("right", 1),
}


@dataclass(frozen=True)
class Sign:
    """The direction in which an axis moves the image: 1 by the convention, -1 against it."""

    sign: int
    confidence: float
    strength: float


@dataclass(frozen=True)
class LagEstimate:
    """The frames agree best with action[t + lag]; `scores` is the share of motion that each lag explains."""

    lag: int
    confidence: float
    scores: dict[int, float]
    signs: dict[str, Sign]
    num_pairs: int

    @property
    def is_clear(self) -> bool:
        return self.confidence >= SURE and self.scores[self.lag] >= CLEAR

    @property
    def wrong_axes(self) -> list[str]:
        if self.confidence < RELATED or self.scores[self.lag] < CLEAR:
            return []
        reversed_axes = ((name, s) for name, s in self.signs.items() if s.sign < 0)
        return [name for name, s in reversed_axes if s.confidence >= SURE_SIGN and s.strength >= STRONG]

    @property
    def summary(self) -> str:
        if not self.num_pairs:
            return "undetermined: too few consecutive frames"
        explained = f"controls explain {self.scores[self.lag]:.0%} of the image motion"
        turned = f"; against the convention: {', '.join(self.wrong_axes)}" if self.wrong_axes else ""
        if not self.is_clear:
            return f"undetermined: {explained}, lag {self.lag:+d} with confidence {self.confidence:.0%}{turned}"
        return f"lag {self.lag:+d} with confidence {self.confidence:.0%}, {explained} ({self.scores[0]:.0%} at lag 0){turned}"

    def facts(self) -> dict[str, Any]:
        signs = {name: asdict(sign) for name, sign in self.signs.items()}
        scores = {str(lag): round(score, 4) for lag, score in self.scores.items()}
        return {"lag": self.lag, "confidence": self.confidence, "clear": self.is_clear, "scores": scores, "signs": signs}


def require_aligned(recording: Recording) -> LagEstimate:
    """Refuse a recording whose controls are clearly shifted or reversed, with the command that corrects it."""
    estimate = estimate_lag(recording)
    if recording.facts["recording"].get("accepted"):
        return estimate
    # Alignment with a simulator holds by construction.
    simulator = REGISTRY.get((recording.facts.get("simulator") or {}).get("name", ""))
    late_answer = estimate.lag < 0 and simulator is not None and simulator.responds_late
    if estimate.is_clear and estimate.lag and not late_answer:
        count, when = abs(estimate.lag), "late" if estimate.lag > 0 else "early"
        raise UserError(
            f"{recording.path}: the controls are {count} frame{'s' * (count > 1)} too {when}: the frames agree with "
            f"action[t{estimate.lag:+d}] (confidence {estimate.confidence:.0%}; it explains "
            f"{estimate.scores[estimate.lag]:.0%} of their motion, action[t] {estimate.scores[0]:.0%})\n"
            f"{_fix_command(recording, estimate)}"
        )
    if wrong := estimate.wrong_axes:
        raise UserError(
            f"{recording.path}: {' and '.join(wrong)} {'runs' if len(wrong) == 1 else 'run'} against the convention "
            f"(x forward, y left, z up, right-handed turns; confidence {min(estimate.signs[n].confidence for n in wrong):.0%})\n"
            f"{_fix_command(recording, estimate)}"
        )
    return estimate


def _fix_command(recording: Recording, estimate: LagEstimate) -> str:
    """The command that corrects it, applied to the original files; earlier corrections are included."""
    source = recording.facts["source"]
    shift = source.get("shift", 0) + estimate.lag
    flip = sorted(set(source.get("flip", ())) ^ set(estimate.wrong_axes))
    flags = ([f"--shift-actions {shift}"] if shift else []) + [f"--flip {name}" for name in flip]
    command = " ".join(["seedbed data prepare", str(source.get("path") or recording.path), *flags, "--out DIR"])
    return f"correct it: {command}   (or keep it as it is: --accept-lag)"


def estimate_lag(recording: Recording) -> LagEstimate:
    """Lag and signs of a recording; deterministic."""
    live = [n for n, axis in enumerate(recording.axes) if not axis.dead and not axis.is_time]
    first_P = _choose(recording)
    num_blocks = len(first_P) // BLOCK
    if num_blocks < MIN_BLOCKS or not live:
        return LagEstimate(0, 0.0, dict.fromkeys(LAGS.tolist(), 0.0), {}, 0)
    first_P = first_P[: num_blocks * BLOCK]
    motion_PF = picture_motion(recording.frames_THWC, first_P)
    action_TA = recording.scaled()[:, live].astype(np.float64)
    action_LPA = np.stack([action_TA[first_P + lag] for lag in LAGS])
    inner, outer, squares = _block_sums(action_LPA, motion_PF, num_blocks)
    rng = np.random.Generator(np.random.PCG64(0))
    drawn_RK = rng.multinomial(num_blocks, np.full(num_blocks, 1 / num_blocks), NUM_RESAMPLINGS).astype(np.float64)
    drawn_RK = np.concatenate((np.ones((1, num_blocks)), drawn_RK))
    fits = [_fit(drawn_RK, inner[n], outer[n], squares) for n in range(len(LAGS))]
    score_LR = np.stack([score_R for score_R, _ in fits])
    best = int(score_LR[:, 0].argmax())
    signs = _signs([recording.axes[n].name for n in live], fits[best][1], action_LPA[best], motion_PF)
    scores = {int(lag): float(score) for lag, score in zip(LAGS, score_LR[:, 0], strict=True)}
    return LagEstimate(int(LAGS[best]), float((score_LR[:, 1:].argmax(0) == best).mean()), scores, signs, len(first_P))


def _choose(recording: Recording) -> np.ndarray:
    """First frames of the pairs for which every control from lag -4 to 4 exists, without a pause."""
    reach = int(LAGS[-1])
    start_P = recording.windows(0, recording.num_frames, reach + 1, reach + 1)
    if len(start_P) <= MAX_PAIRS:
        return start_P
    low = np.linspace(0, len(start_P) - STRETCH, MAX_PAIRS // STRETCH).astype(int)
    return start_P[(low[:, None] + np.arange(STRETCH)).ravel()]


def picture_motion(frames_THWC: np.ndarray, first_P: np.ndarray) -> np.ndarray:
    """Image motion from each of these frames to the next: right and down in pixels, zoom and rotation."""
    motion_PF = np.concatenate([_motion(frames_THWC, part) for part in np.array_split(first_P, -(-len(first_P) // STRETCH))])
    # A few pairs match nothing (a flat wall, a jump): their outliers are clipped.
    low_F, high_F = np.quantile(motion_PF, (0.02, 0.98), axis=0)
    return motion_PF.clip(1.5 * np.minimum(low_F, 0), 1.5 * np.maximum(high_F, 0))


def _motion(frames_THWC: np.ndarray, first_P: np.ndarray) -> np.ndarray:
    needed, place_P = np.unique(np.concatenate((first_P, first_P + 1)), return_inverse=True)
    grey_NHW = _reduce(frames_THWC[needed])
    before_P, after_P = place_P[: len(first_P)], place_P[len(first_P) :]
    whole_P2 = shift(grey_NHW, before_P, after_P)
    height, width = grey_NHW.shape[1] // 2, grey_NHW.shape[2] // 2
    quarters = [grey_NHW[:, y : y + height, x : x + width] for y in (0, height) for x in (0, width)]
    (tl, tr), (bl, br) = ((shift(quarters[n], before_P, after_P), shift(quarters[n + 1], before_P, after_P)) for n in (0, 2))
    across_P2, down_P2 = tr + br - tl - bl, bl + br - tl - tr
    spin_P = across_P2[:, 1] - down_P2[:, 0]  # clockwise is positive
    return np.column_stack((whole_P2, across_P2[:, 0] + down_P2[:, 1], spin_P))


def _reduce(frames_NHWC: np.ndarray) -> np.ndarray:
    """Grey images of at most MAX_SIDE pixels a side, by area averaging."""
    grey_NHW = frames_NHWC.astype(np.float32).mean(-1)
    factor = -(-max(grey_NHW.shape[1:]) // MAX_SIDE)
    height, width = grey_NHW.shape[1] // factor, grey_NHW.shape[2] // factor
    cut_NHW = grey_NHW[:, : height * factor, : width * factor]
    return cut_NHW.reshape(-1, height, factor, width, factor).mean((2, 4))


def shift(grey_NHW: np.ndarray, before_P: np.ndarray, after_P: np.ndarray) -> np.ndarray:
    """(P, 2): by how many pixels the content moves to the right and down, from phase correlation with a sub-pixel peak."""
    _, height, width = grey_NHW.shape
    window_HW = np.outer(np.hanning(height + 2)[1:-1], np.hanning(width + 2)[1:-1])
    centred_NHW = grey_NHW - grey_NHW.mean((1, 2), keepdims=True)
    spectrum = np.fft.rfft2(centred_NHW * window_HW)
    cross = spectrum[after_P] * spectrum[before_P].conj()
    size = np.abs(cross)
    # Partly whitened and low-passed: a sharp peak that is still wide enough for sub-pixel interpolation.
    low_pass = np.exp(-((np.hypot(np.fft.fftfreq(height)[:, None], np.fft.rfftfreq(width)) / 0.25) ** 2))
    cross *= low_pass / (np.sqrt(size) + 1e-3 * np.sqrt(size.max((1, 2), keepdims=True)) + 1e-12)
    surface_PHW = np.fft.irfft2(cross, s=(height, width))
    y_P, x_P = np.unravel_index(surface_PHW.reshape(len(cross), -1).argmax(1), (height, width))
    pairs = np.arange(len(cross))
    return np.column_stack((_sub_pixel(surface_PHW[pairs, y_P], x_P), _sub_pixel(surface_PHW[pairs, :, x_P], y_P)))


def _sub_pixel(line_PS: np.ndarray, peak_P: np.ndarray) -> np.ndarray:
    """The peak of every line of S pixels to a part of a pixel, by a parabola; beyond half the line it is negative."""
    size, pairs = line_PS.shape[1], np.arange(len(peak_P))
    left, middle, right = (line_PS[pairs, (peak_P + step) % size] for step in (-1, 0, 1))
    bend = left - 2 * middle + right
    fraction = np.where(np.abs(bend) > 1e-12, 0.5 * (left - right) / np.where(bend == 0, 1, bend), 0.0)
    place = peak_P + fraction.clip(-0.5, 0.5)
    return np.where(place > size / 2, place - size, place)


def _block_sums(action_LPA: np.ndarray, motion_PF: np.ndarray, num_blocks: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Sums for least squares per block, so that a resampling is a weighted sum of blocks."""
    ones = np.ones((*action_LPA.shape[:2], 1))
    given = np.concatenate((action_LPA, ones), -1).reshape(len(LAGS), num_blocks, BLOCK, -1)
    moved = motion_PF.reshape(num_blocks, BLOCK, -1)
    inner = np.einsum("lkpa,lkpb->lkab", given, given)
    outer = np.einsum("lkpa,kpf->lkaf", given, moved)
    squares = np.stack((moved.sum(1), (moved**2).sum(1)), 1)
    return inner, outer, squares


def _fit(drawn_RK: np.ndarray, inner: np.ndarray, outer: np.ndarray, squares: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Per resampling the share of explained motion, averaged over motions, and the coefficients (R, A, F)."""
    count_R1 = drawn_RK.sum(1, keepdims=True) * BLOCK
    inner_R, outer_R = np.tensordot(drawn_RK, inner, 1), np.tensordot(drawn_RK, outer, 1)
    sum_RF, square_RF = np.moveaxis(np.tensordot(drawn_RK, squares, 1), 1, 0)
    slope = np.linalg.solve(inner_R + 1e-6 * count_R1[..., None] * np.eye(inner.shape[-1]), outer_R)
    total_RF = square_RF - sum_RF**2 / count_R1
    left_RF = square_RF - 2 * (slope * outer_R).sum(1) + (slope * (inner_R @ slope)).sum(1)
    # Still frames have no motion to explain.
    share_RF = np.where(total_RF > MIN_MOTION**2 * count_R1, 1 - left_RF / np.maximum(total_RF, 1e-9), 0.0)
    return share_RF.clip(0, 1).mean(1), slope[:, :-1]


def _signs(names: list[str], slope_RAF: np.ndarray, action_PA: np.ndarray, motion_PF: np.ndarray) -> dict[str, Sign]:
    """For every axis of the convention: the direction in which it moves the image, other axes held constant."""
    found = {}
    for n, name in enumerate(names):
        if name not in EXPECTED:
            continue
        motion, wanted = EXPECTED[name]
        f = MOTIONS.index(motion)
        slope_R = slope_RAF[:, n, f] * wanted
        sign = 1 if slope_R[0] >= 0 else -1
        strength = abs(slope_R[0]) * action_PA[:, n].std() / max(motion_PF[:, f].std(), 1e-9)
        found[name] = Sign(sign, float((np.sign(slope_R[1:]) == sign).mean()), float(strength))
    return found
