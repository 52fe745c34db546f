"""Recordings: frames and the controls between them, in a store, with one convention and contiguous splits.

Shape suffixes: T frames, A control axes, H W pixels, C colours, N frames of a piece.
"""

import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from seedbed.data.store import Store, Writer, digest, is_store
from seedbed.errors import UserError
from seedbed.train.player import Axis

CONVENTION = "action[t] takes frame t to frame t+1"
# Bump when the same source gives another recording than before.
FORMAT = 2
PARTS = ("train", "valid", "test")
SHARES = (0.8, 0.9)  # where validation and test begin
# Frames between the splits: the longest memory plus the longest evaluation horizon, or a share of a short recording.
GAP, GAP_SHARE = 32 + 256, 0.04
# A split border may move by this share of the recording to fall between two episodes.
REACH = 0.05
MIN_FRAMES = 10
# An axis whose 95th percentile stays below this (metres, radians, or its own unit, per frame) does nothing.
DEAD = 1e-4
CLIP = 4.0
MAX_DT = 2.5  # a pause longer than this many usual frames breaks a window
MAX_SIDE = 4096


@dataclass(frozen=True)
class Recording:
    """An open recording: memory-mapped frames, raw controls, and the manifest."""

    path: Path
    frames_THWC: np.ndarray
    actions_TA: np.ndarray
    time_T: np.ndarray
    episode_T: np.ndarray
    pose_T44: np.ndarray | None
    axes: tuple[Axis, ...]
    facts: dict[str, Any] = field(repr=False)

    @property
    def num_frames(self) -> int:
        return len(self.frames_THWC)

    @property
    def fingerprint(self) -> str:
        return self.facts["fingerprint"]

    @property
    def kept(self) -> dict[str, int]:
        """Of the part of a recording that was kept with a run: rollouts of samples, their frames, starts of play; else empty."""
        return self.facts.get("kept", {})

    def holds(self, row: int) -> bool:
        """Whether the frame is here: a run keeps some of them."""
        return not self.kept or row in self.frames_THWC

    @functools.cached_property
    def last_T(self) -> np.ndarray:
        """True where an episode ends: the action there has no next frame."""
        return ends(self.episode_T)

    @functools.cached_property
    def dt_T(self) -> np.ndarray:
        """Seconds from each frame to the next; 0 where an episode ends."""
        return np.where(self.last_T, 0.0, np.diff(self.time_T, append=self.time_T[-1:]))

    def scaled(self) -> np.ndarray:
        """Network inputs: float32, zero for no control and where an episode ends."""
        scaled_TA = scale_actions(self.actions_TA, self.axes)
        scaled_TA[self.last_T] = 0.0
        return scaled_TA

    def span(self, part: str) -> tuple[int, int]:
        """The contiguous rows [low, high) of "train", "valid" or "test"."""
        low, high = self.facts["splits"][part]
        return low, high

    def excerpt(self, num_rows: Mapping[str, int], side: int) -> "Recording":
        """An in-memory copy of the first rows of every split, subsampled to at most `side` pixels along each side."""
        height, width = (max(1, pixels // side) for pixels in self.frames_THWC.shape[1:3])
        pieces, splits, end = [], {}, 0
        for part in PARTS:
            low, high = self.span(part)
            pieces.append(np.arange(low, min(high, low + num_rows[part])))
            splits[part], end = [end, end + len(pieces[-1])], end + len(pieces[-1])
        rows_T = np.concatenate(pieces)
        # Episodes do not continue across splits: the rows between them are left out.
        part_T = np.repeat(np.arange(len(pieces)), [len(piece) for piece in pieces])
        episode_T = np.cumsum(np.append(False, (np.diff(self.episode_T[rows_T]) != 0) | (np.diff(part_T) != 0)))
        frames_THWC = np.stack([self.frames_THWC[row, ::height, ::width][:side, :side] for row in rows_T])
        pose_T44 = None if self.pose_T44 is None else self.pose_T44[rows_T]
        facts = {**self.facts, "splits": splits}
        rest = (self.actions_TA[rows_T], self.time_T[rows_T], episode_T, pose_T44, self.axes, facts)
        return Recording(self.path, frames_THWC, *rest)

    def starts(self, part: str, before: int, after: int) -> np.ndarray:
        """Every t for which frames t-before+1 .. t+after are in one episode and one split, without a pause.

        A window keeps before + after frames of distance to an earlier split of the same episode.
        """
        assert before >= 1 and after >= 0
        low, high = self.span(part)
        if low and self.episode_T[low] == self.episode_T[low - 1]:
            earlier = max(end for start, end in map(self.span, PARTS) if start < low)
            low = max(low, earlier + before + after)
        return self.windows(low, high, before, after)

    def windows(self, low: int, high: int, before: int, after: int) -> np.ndarray:
        """`starts` in rows [low, high), in any split: for inspection, not for training."""
        first_N = np.arange(low, high - before - after + 1)
        broken_T = self.last_T | (self.dt_T > MAX_DT * self.facts["recording"]["median_dt"])
        until_T = np.concatenate(([0], np.cumsum(broken_T)))
        sound_N = until_T[first_N + before + after - 1] == until_T[first_N]
        return (first_N[sound_N] + before - 1).astype(np.int64)

    def need_starts(self, part: str, before: int, after: int) -> np.ndarray:
        """`starts`, or an error when there are none."""
        found = self.starts(part, before, after)
        if not len(found):
            longest = int(np.bincount(self.episode_T - self.episode_T.min()).max())
            low, high = self.span(part)
            raise UserError(
                f"{self.path}: no window of {before} + {after} frames fits into its {part} part ({high - low:,} frames; the "
                f"longest episode has {longest:,})\nrecord more, or use a shorter memory or horizon"
            )
        return found


def spread(index_N: np.ndarray, num: int) -> np.ndarray:
    """At most `num` of these, evenly spaced."""
    return index_N if len(index_N) <= num else index_N[np.arange(num) * len(index_N) // num]


def ends(episode_T: np.ndarray) -> np.ndarray:
    """True for the last frame of every episode."""
    return np.append(episode_T[1:] != episode_T[:-1], True)


def scale_actions(actions_TA: np.ndarray, axes: Sequence[Axis]) -> np.ndarray:
    scale_A = np.array([axis.scale for axis in axes])
    shift_A = np.array([1.0 if axis.is_time else 0.0 for axis in axes])
    return np.clip(np.asarray(actions_TA, np.float64) / scale_A - shift_A, -CLIP, CLIP).astype(np.float32)


def is_recording(path: Path) -> bool:
    return is_store(path) and "recording" in Store.open(path).manifest


def open_recording(path: str | Path, actions: str = "actions") -> Recording:
    """A recording from its folder; `actions="command"` selects the requested controls instead of the applied ones."""
    store = Store.open(Path(path).expanduser())
    made, held = store.manifest.get("recording"), ", ".join(store.arrays)
    if made is None:
        raise UserError(f"store {store.path} holds {held}, no recording; make one with: seedbed data record box")
    if actions not in store.arrays:
        raise UserError(f"{store.path} holds no {actions}, only {held}")
    return Recording(
        store.path,
        store.arrays["frames"],
        store.arrays[actions],
        store.arrays["time"],
        store.arrays["episode"],
        store.arrays.get("pose"),
        read_axes(store.manifest),
        store.manifest,
    )


def read_axes(manifest: dict[str, Any]) -> tuple[Axis, ...]:
    found = manifest["recording"]["axes"]
    return tuple(Axis(**{**axis, "full": tuple(axis["full"]), "half": tuple(axis["half"])}) for axis in found)


def find_recording(path: Path, key: str) -> Recording | None:
    """The recording at `path` if it has this key; another one there is an error when writing."""
    if not is_store(path) or Store.open(path).manifest.get("recording", {}).get("key") != key:
        return None
    return open_recording(path)


# ---- writing -------------------------------------------------------------------------------------------------------------


def write_recording(
    path: str | Path,
    frames: Iterable[np.ndarray],
    actions: Any,
    time: Any,
    episode: Any,
    axes_names_units: Sequence[tuple[str, str]],
    *,
    pose: Any = None,
    command: Any = None,
    source: dict[str, Any],
    simulator: dict[str, Any] | None = None,
    key: str = "",
    accepted: bool = False,
) -> Recording:
    """Write a recording to a temporary folder, move it into place, open it.

    `frames` yields uint8 images [H, W, 3] or batches [N, H, W, 3]. The other arguments may be lists that the same iterator
    fills: they are read after the last frame. `key` identifies what is recorded: a recording with that key is reused.
    `accepted` disables the lag check.
    """

    def build(writer: Writer) -> Store:
        try:
            num = _write_frames(writer, frames)
            tables = _tables(num, actions, time, episode, axes_names_units, pose, command)
        except BaseException:
            writer.discard()
            raise
        return _commit(writer, tables, axes_names_units, {"source": source, "simulator": simulator}, key, accepted)

    from seedbed.data.prepare import find_or_build

    path = Path(path).expanduser().absolute()
    if not key and path.exists():
        raise UserError(f"{path} exists; choose another folder for the recording")
    key = key or digest([str(path)])
    find_or_build(path, key, build, rebuild=False, say=lambda line: None)
    return open_recording(path)


def _write_frames(writer: Writer, frames: Iterable[np.ndarray]) -> int:
    num, shape = 0, None
    for frame in frames:
        assert frame.dtype == np.uint8, frame.dtype
        piece_NHWC = np.ascontiguousarray(frame if frame.ndim == 4 else frame[None])
        if shape is None:
            shape = piece_NHWC.shape[1:]
            if shape[2] != 3 or not 4 <= min(shape[:2]) <= max(shape[:2]) <= MAX_SIDE:
                raise UserError(f"frames of {shape[1]}x{shape[0]} pixels and {shape[2]} colours cannot be recorded")
            writer.array("frames", np.dtype(np.uint8), shape)
        if piece_NHWC.shape[1:] != shape:
            got, first = piece_NHWC.shape[1:], shape
            raise UserError(f"frame {num:,} has {got[1]}x{got[0]} pixels, the first had {first[1]}x{first[0]}: sizes are mixed")
        writer.append("frames", piece_NHWC)
        num += len(piece_NHWC)
    if num < MIN_FRAMES:
        raise UserError(f"{num} frames are too few; {MIN_FRAMES} are required" if num else "there are no frames to record")
    return num


def _tables(
    num: int, actions: Any, time: Any, episode: Any, axes: Sequence[tuple[str, str]], pose: Any, command: Any
) -> dict[str, np.ndarray]:
    """The arrays beside the frames, checked; the action at the end of an episode is zero."""
    names = [name for name, _ in axes]
    if len(set(names)) != len(names) or not names:
        raise UserError(f"control axes need different names, at least one: {', '.join(names) or 'none given'}")
    given = {"actions": (actions, "<f4", (len(axes),)), "time": (time, "<f8", ()), "episode": (episode, "<i4", ())}
    given |= {"pose": (pose, "<f8", (4, 4))} if pose is not None else {}
    given |= {"command": (command, "<f4", (len(axes),))} if command is not None else {}
    tables = {name: _table(name, value, dtype, row, num) for name, (value, dtype, row) in given.items()}
    check_time(tables["time"], tables["episode"])
    last_T = ends(tables["episode"])
    for name in {"actions", "command"} & set(tables):
        tables[name][last_T] = 0.0
    return tables


def _table(name: str, value: Any, dtype: str, row: tuple[int, ...], num: int) -> np.ndarray:
    table = np.array(value, dtype=dtype)
    if len(table) != num:
        raise UserError(f"{num:,} frames and {len(table):,} rows of {name}: the counts must agree")
    assert table.shape[1:] == row, (name, table.shape)
    if dtype != "<i4" and not np.isfinite(table).all():
        bad = int(np.argwhere(~np.isfinite(table).reshape(num, -1).all(1))[0, 0])
        raise UserError(f"{name} of frame {bad:,} is not a finite number; repair or cut the source there")
    return table


def check_time(time_T: np.ndarray, episode_T: np.ndarray) -> None:
    """Episodes follow one another, and time runs forward inside each."""
    back_T = np.flatnonzero(np.diff(episode_T) < 0)
    if len(back_T):
        raise UserError(f"episode numbers go back at frame {back_T[0] + 1:,}; frames of an episode must be contiguous")
    stuck_T = np.flatnonzero((np.diff(time_T) <= 0) & ~ends(episode_T)[:-1])
    if len(stuck_T):
        t = int(stuck_T[0])
        raise UserError(
            f"time does not run forward: frame {t + 1:,} is at {time_T[t + 1]:.6g} s, the one before at {time_T[t]:.6g} s "
            f"({len(stuck_T):,} such places)\nsort the frames by time, or drop duplicates"
        )


def cut(episode_T: np.ndarray) -> tuple[dict[str, tuple[int, int]], int]:
    """Train | gap | valid | gap | test as row ranges, and the gap; split between whole episodes where possible."""
    num = len(episode_T)
    wanted = [int(num * share) for share in SHARES]
    borders = np.flatnonzero(ends(episode_T)[:-1]) + 1
    if len(borders) >= 2:
        near = [int(borders[np.abs(borders - w).argmin()]) for w in wanted]
        if near[0] < near[1] and all(abs(n - w) <= REACH * num for n, w in zip(near, wanted, strict=True)):
            return {"train": (0, near[0]), "valid": (near[0], near[1]), "test": (near[1], num)}, 0
    gap = min(GAP, int(GAP_SHARE * num))
    valid, test = wanted
    found = {"train": (0, valid - gap), "gap": (valid - gap, valid), "valid": (valid, test - gap), "gap2": (test - gap, test)}
    return {name: bounds for name, bounds in found.items() if bounds[0] < bounds[1]} | {"test": (test, num)}, gap


def measure_axes(actions_TA: np.ndarray, axes: Sequence[tuple[str, str]]) -> list[Axis]:
    """The statistics of each axis over actions that have a next frame."""
    return [_measure(np.asarray(actions_TA[:, n], np.float64), *axis) for n, axis in enumerate(axes)]


def _measure(values_T: np.ndarray, name: str, unit: str) -> Axis:
    if name == "dt":
        median = float(np.median(values_T)) if len(values_T) else 1.0
        limit = _quantile(values_T, 0.99)
        return Axis(name, unit, median, (median, median), (median, median), limit, dead=limit < 1.01 * median)
    size_T = np.abs(values_T)
    moving_T = size_T[size_T > DEAD]
    # A rarely pressed button has a 95th percentile of zero, yet it is not dead.
    typical = _quantile(size_T, 0.95)
    scale = typical if typical > DEAD else _quantile(moving_T, 0.95)
    # Below a tenth of the scale is jitter.
    pressed = max(DEAD, 0.1 * scale)
    sides = [-values_T[values_T < -pressed], values_T[values_T > pressed]]
    full, half = ((0.0 - _quantile(sides[0], q), _quantile(sides[1], q)) for q in (0.9, 0.5))
    dead = len(moving_T) == 0
    return Axis(name, unit, 1.0 if dead else scale, full, half, max(_quantile(size_T, 0.99), 0.0 if dead else scale), dead)


def _quantile(values: np.ndarray, q: float) -> float:
    return float(np.quantile(values, q)) if len(values) else 0.0


def _commit(
    writer: Writer, tables: dict[str, np.ndarray], axes: Sequence[tuple[str, str]], origin: dict, key: str, accepted: bool
) -> Store:
    for name, table in tables.items():
        writer.array(name, table.dtype, table.shape[1:])
        writer.append(name, table)
    last_T = ends(tables["episode"])
    splits, gap = cut(tables["episode"])
    # The frames of the training part that have a next one.
    row_N = np.flatnonzero(~last_T[: splits["train"][1]])
    dt_N = np.diff(tables["time"])[row_N]
    measured = [asdict(axis) for axis in measure_axes(tables["actions"][row_N], axes)]
    facts = {
        "key": key,
        "format": FORMAT,
        "convention": CONVENTION,
        "axes": measured,
        "median_dt": float(np.median(dt_N)) if len(dt_N) else 0.0,
        "gap": gap,
        "accepted": accepted,
        "num_episodes": int(last_T.sum()),
    }
    return writer.commit(splits=splits, limits={}, extra=[], recording=facts, **origin)
