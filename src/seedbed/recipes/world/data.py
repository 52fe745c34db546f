"""Windows of a recording, and counter-based noise.

Shape suffixes: B windows, T frames of a window, N frames of the recording, A control axes, H W pixels, J drawn numbers.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from seedbed.config import Config
from seedbed.data.feed import Data, Source
from seedbed.data.limiting import limited
from seedbed.data.store import is_store
from seedbed.errors import UserError
from seedbed.nn import rng
from seedbed.recipes.world import simulators
from seedbed.recipes.world.memory import POSE
from seedbed.recipes.world.model import layout_of
from seedbed.recipes.world.presets import SMALL_SIDE
from seedbed.recipes.world.radiance_field import flat_poses
from seedbed.recipes.world.recording.lag_estimation import require_aligned
from seedbed.recipes.world.recording.recording import Recording, open_recording, spread

T = TypeVar("T")
Turn = int | Tensor  # distinguishes several draws of one sample
# Streams of random numbers.
LEVEL, CONTEXT, OWN, BLANK, DENOISE, SIGMA, LOST = range(401, 408)
TABLE = 1 << 20
_TABLE_SEED = 20
MEAN_FRAMES, NUM_FITTED = 4096, 512
# Samples choose among so many windows, of the most following frames that there are of these: those are kept with a run.
NUM_SHOWN, SHOWN_STEPS = 6, (64, 16, 4, 1)
# Windows of held-out splits in the checks, and their horizon.
WATCHED, AHEAD = 12, 16


class WindowSource(Source):
    """Windows of `before` remembered and `after` following frames, with the controls between them, from one split."""

    def __init__(self, recording: Recording, part: str, before: int, after: int, poses: bool = False) -> None:
        self.recording, self.part, self.before, self.after = recording, part, before, after
        start_N, span = recording.need_starts(part, before, after) - (before - 1), before + after
        # Only rows of this split go to the device.
        self.low, high = int(start_N[0]), int(start_N[-1]) + span
        self.start_N = start_N - self.low
        self.num_items = len(start_N)
        self.scaled_NA = recording.scaled()
        # An excerpt has too few frames for batches.
        frames = {"frames": recording.frames_THWC[self.low : high]} if isinstance(recording.frames_THWC, np.ndarray) else {}
        self.arrays = {**frames, "action": self.scaled_NA[self.low : high]}
        if poses:
            self.arrays[POSE] = flat_poses(recording)[self.low : high]
        self.spans = dict.fromkeys(self.arrays, span)
        self.ends_N = recording.last_T[self.low : high]  # where an episode ends, for the checks: no window goes on there

    def locate(self, epoch_B: np.ndarray, index_B: np.ndarray) -> np.ndarray:
        return self.start_N[index_B]

    def first(self, num: int) -> Source:
        part: Any = super().first(num)
        part.start_N = self.start_N[: part.num_items]
        return part

    def windows(self, num: int, before: int, after: int) -> np.ndarray:
        """First rows of `num` evenly spaced windows, always the same ones; none where none is so long."""
        start_N = self.recording.starts(self.part, before, after) - (before - 1)
        return spread(start_N[(start_N >= self.low) & (start_N <= self.low + self.start_N[-1])], num)

    def shown_windows(self, num: int, steps: int) -> np.ndarray:
        """First rows of the windows of a sample; `NUM_SHOWN` or fewer are always some of the same ones."""
        return spread(self.windows(max(num, NUM_SHOWN), self.before, max(steps, self.shown_steps)), num)

    @property
    def shown_steps(self) -> int:
        return next((steps for steps in SHOWN_STEPS if len(self.windows(1, self.before, steps))), 1)

    def available_horizon(self, before: int, horizon: int) -> int:
        """`horizon`, halved until there are windows with so many following frames."""
        while horizon > 1 and not len(self.windows(1, before, horizon)):
            horizon //= 2
        return horizon

    def read(self, start_B: np.ndarray, span: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Frames (B, T, H, W, 3) as bytes and scaled controls (B, T, A) of these windows, by rows in the recording."""
        rows_BT = start_B[:, None] + np.arange(span)
        frames = torch.from_numpy(np.ascontiguousarray(self.recording.frames_THWC[rows_BT]))
        return frames.to(device), torch.from_numpy(self.scaled_NA[rows_BT]).to(device)


@dataclass
class WorldData(Data):
    """The windows of a recording, and the recording itself.

    `is_rendered`: made here from the config alone. Another processor rounds otherwise, and pixels at edges differ.
    """

    train: WindowSource
    valid: WindowSource
    recording: Recording = field(kw_only=True)
    is_rendered: bool = field(default=False, kw_only=True)
    derived: dict[str, Any] = field(default_factory=dict, kw_only=True)  # computed from the whole recording, by name

    def once(self, name: str, make: Callable[[], T]) -> T:
        if name not in self.derived:
            self.derived[name] = make()
        return self.derived[name]

    @property
    def mean_frame(self) -> np.ndarray:
        """The mean of the training part, float32 in [0, 255]."""
        return self.once("mean_frame", self._mean_frame)

    def _mean_frame(self) -> np.ndarray:
        low, high = self.recording.span("train")
        rows = np.unique(np.linspace(low, high - 1, min(MEAN_FRAMES, high - low)).astype(np.int64))
        return self.recording.frames_THWC[rows].mean(0, dtype=np.float64).astype(np.float32)

    def fade(self, horizon: int) -> float:
        """Fade baseline: the weight of the last frame, against the mean frame, with the highest PSNR on training windows."""
        return self.once(f"fade_{horizon}", lambda: self._fade(horizon))

    def _fade(self, horizon: int) -> float:
        start_N = self.train.windows(NUM_FITTED, 1, horizon)
        if not len(start_N):
            return 0.0
        last, after = (self.recording.frames_THWC[start_N + d].astype(np.float32) - self.mean_frame for d in (0, horizon))
        # Squared errors of any mixture follow from three sums per window.
        ll, la, aa = (np.einsum("nhwc,nhwc->n", a, b) for a, b in ((last, last), (last, after), (after, after)))
        weights = np.linspace(0.0, 1.0, 41)[:, None]
        errors = np.maximum(weights**2 * ll - 2 * weights * la + aa, 1.0)
        return float(weights[np.log(errors).mean(1).argmin(), 0])


class CounterNoise(nn.Module):
    """Counter-based normal noise: slices of a table, at offsets drawn from each sample's counter.

    Fresh normal numbers for every remembered pixel would cost more than the network on a CPU.
    """

    table_J: Tensor

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.seed = seed
        made = rng.normal(rng.keys(_TABLE_SEED, torch.arange(64), CONTEXT), TABLE // 64).flatten()
        self.register_buffer("table_J", made, persistent=False)

    def forward(self, index_B: Tensor, stream: int, turn: Turn, shape: tuple[int, ...]) -> Tensor:
        """(B, *shape) for the samples with these counters; `turn` distinguishes several draws of one sample."""
        num = int(np.prod(shape))
        reps = -(-num // (TABLE // 2))
        size = -(-num // reps)
        first_BR = rng.integers(rng.keys(self.seed, index_B, stream + 64 * turn), 2 * reps, TABLE - size)
        sign_BR1 = ((first_BR[:, reps:] & 1) * 2 - 1).to(self.table_J.dtype)[..., None]
        rows_BRJ = self.table_J.unfold(0, size, 1)[first_BR[:, :reps]]
        return (rows_BRJ * sign_BR1).flatten(1)[:, :num].unflatten(1, shape)

    def level(self, index_B: Tensor, highest: float) -> Tensor:
        return rng.uniform(rng.keys(self.seed, index_B, LEVEL), 1)[:, 0] * highest


def open_data(config: Config) -> WorldData:
    """The recording that `config.data` names; a simulator is recorded first, a misaligned recording is refused."""
    wanted = config.data
    if config.model.pose_tracking and wanted.actions == "command":
        raise UserError("model.pose_tracking integrates the applied motion, not the requested one; use it with data.actions=pose")
    if _simulator(wanted.recording):
        size = (wanted.frames, wanted.height, wanted.width, wanted.scene)
        found = simulators.record(wanted.recording, *size, cache=wanted.cache, device=_render_device(config))
        found = open_recording(found.path, "command") if wanted.actions == "command" else found
    else:
        found = _open_folder(Path(wanted.recording), wanted.actions)
    return _cut(found, config)


def save_inference_data(data: WorldData, folder: Path) -> None:
    """Some frames of the recording, and what follows from all of them."""
    from seedbed.recipes.world import kept

    kept.save(data, folder)


def open_inference_data(config: Config, folder: Path) -> Data:
    from seedbed.recipes.world import kept

    recording, derived, facts = kept.open_recording(folder)
    return limited(replace(_cut(recording, config), derived=derived, facts=facts), config.limit)


def evaluation_source(config: Config, data: WorldData, given: Any) -> Any:
    """The validation part of a recording in a folder, with the controls scaled as in training."""
    if not isinstance(given, str | Path):
        return given
    found, own = _open_folder(Path(given), config.data.actions), data.recording
    made = [(*one.frames_THWC.shape[1:3], ", ".join(axis.name for axis in one.axes)) for one in (found, own)]
    if made[0] != made[1]:
        words = ["{}x{} pixels and the controls {}".format(*one) for one in made]
        raise UserError(f"{given} has {words[0]}, the run was trained on {words[1]}")
    return WindowSource(replace(found, axes=own.axes), "valid", data.valid.before, 1, config.model.pose_tracking)


def check_data(config: Config, data: WorldData) -> WorldData:
    """A small excerpt for the checks: the beginning of each split, in small images."""
    before = layout_of(config.model, SMALL_SIDE, SMALL_SIDE).num_frames
    num_rows = {"train": 2000}
    for part in ("valid", "test"):
        start_N = data.recording.starts(part, before, AHEAD)[:WATCHED]
        num_rows[part] = int(start_N[-1]) + AHEAD + 1 - data.recording.span(part)[0] if len(start_N) else 700
    return _cut(data.recording.excerpt(num_rows, SMALL_SIDE), config)


def _cut(recording: Recording, config: Config) -> WorldData:
    height, width = recording.frames_THWC.shape[1:3]
    before, after = layout_of(config.model, height, width).num_frames, config.model.rollout
    # Only training needs the frames of a whole rollout; evaluations read as many as their horizons need.
    reach = {"train": after, "valid": 1, "test": 1}
    parts = {part: WindowSource(recording, part, before, num, config.model.pose_tracking) for part, num in reach.items()}
    facts = {
        "name": config.data.recording,
        "fingerprint": recording.fingerprint,
        "frames": f"{recording.num_frames:,} of {width}x{height} pixels, {parts['train'].num_items:,} windows to train on",
        "controls": ", ".join(f"{axis.name} [{axis.unit}]" for axis in recording.axes if not axis.dead),
        "convention": recording.facts["recording"]["convention"],
    }
    own = {"test": parts["test"], "recording": recording, "is_rendered": is_rendered(config.data.recording)}
    return WorldData(parts["train"], parts["valid"], facts, **own)


def is_rendered(name: str) -> bool:
    simulator = _simulator(name)
    return simulator is not None and simulator.records_itself


def _simulator(name: str) -> simulators.Entry | None:
    """The simulator of that name, unless a recording has it too."""
    return None if is_store(Path(name)) else simulators.REGISTRY.get(name.partition(":")[0])


def _open_folder(path: Path, actions: str) -> Recording:
    """A recording in a folder. It must be aligned: the loss would not show that it is not."""
    path = path.expanduser()
    if not path.exists():
        raise UserError(f"there is no recording at {path}; data.recording= names {simulators.HELP}, or a recording's folder")
    found = open_recording(path)
    require_aligned(found)
    return open_recording(path, "command") if actions == "command" else found


def _render_device(config: Config) -> str:
    """The box world is rendered on the device that trains."""
    return "cuda" if config.device in ("auto", "cuda") and torch.cuda.is_available() else "cpu"
