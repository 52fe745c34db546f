"""What a run keeps of its recording, to sample, play and export without it: some frames, and numbers that follow from all.

Rows are those of the recording, so that windows, noise and starts are the same. Shape suffixes: T frames of the recording, K kept
frames, A control axes, H W pixels.
"""

from pathlib import Path
from typing import Any

import numpy as np

from seedbed.data import inference_data
from seedbed.errors import UserError
from seedbed.recipes.world.data import NUM_SHOWN, WorldData
from seedbed.recipes.world.evaluate import HORIZONS, QUICK_HORIZON
from seedbed.recipes.world.export_web import NUM_GOLDEN
from seedbed.recipes.world.memory import POSE
from seedbed.recipes.world.player import recorded_controls, start_rows
from seedbed.recipes.world.recording.recording import MAX_DT, Recording, read_axes

# Bytes of frames for samples and for play; at least one window and one start are kept.
MAX_SHOWN_BYTES, MAX_PLAYED_BYTES = 8 << 20, 3 << 20
# Frames after the first starts, to play beside the recording.
FOLLOWING = 64
MANIFEST = ("fingerprint", "splits", "recording", "simulator", "source")


class KeptFrames:
    """Some frames of a recording by their rows in it; others are refused."""

    def __init__(self, frames_KHWC: np.ndarray, rows_K: np.ndarray, num_frames: int, problem: str) -> None:
        self.frames_KHWC, self.rows_K, self.problem = frames_KHWC, rows_K, problem
        self.shape = (num_frames, *frames_KHWC.shape[1:])

    def __len__(self) -> int:
        return self.shape[0]

    def __contains__(self, row: int) -> bool:
        return bool(np.isin(row, self.rows_K))

    def __getitem__(self, rows: Any) -> np.ndarray:
        wanted = np.arange(len(self))[rows]
        if not np.isin(wanted, self.rows_K).all():
            raise UserError(self.problem)
        return self.frames_KHWC[np.searchsorted(self.rows_K, wanted)]


def save(data: WorldData, folder: Path) -> None:
    recording, source = data.recording, data.valid
    size, before = recording.frames_THWC[0].nbytes, source.before
    # The rows of the windows of samples: fewer, then shorter ones where frames are large.
    num, steps = NUM_SHOWN, source.shown_steps
    while num * (source.before + steps) * size > MAX_SHOWN_BYTES and num * steps > 1:
        num, steps = (num // 2, steps) if num > 1 else (1, steps // 2)
    start_N = source.shown_windows(num, steps)
    shown, kept = [np.arange(first, first + source.before + steps) for first in start_N], {"num": num, "steps": steps}
    starts = start_rows(recording, before)[: max(1, MAX_PLAYED_BYTES // (before * size))]
    played, left = [], MAX_PLAYED_BYTES // size - before * len(starts)
    for at in starts:
        after = FOLLOWING if left >= FOLLOWING else NUM_GOLDEN if not played else 0
        played.append(np.arange(at - before + 1, min(at + after + 1, recording.num_frames)))
        left -= after
    rows_K = np.unique(np.concatenate([*shown, *played]))
    arrays = {"rows": rows_K, "frames": np.asarray(recording.frames_THWC[rows_K]), "actions": recording.actions_TA[rows_K]}
    pauses_T = recording.dt_T > MAX_DT * recording.facts["recording"]["median_dt"]
    arrays |= {"ends": np.packbits(recording.last_T), "pauses": np.packbits(pauses_T), "mean_frame": data.mean_frame}
    if recording.pose_T44 is not None:
        arrays["pose"] = recording.pose_T44[rows_K]
        if POSE in source.arrays:  # the radiance field is built around all positions
            arrays["position"] = recording.pose_T44[:, :3, 3].astype(np.float32)
    recorded_controls(data)
    for horizon in (h for h in HORIZONS if h <= QUICK_HORIZON):
        data.fade(horizon)
    about = {
        "facts": data.facts,
        "path": str(recording.path),
        "num_frames": recording.num_frames,
        "manifest": {name: recording.facts[name] for name in MANIFEST if name in recording.facts},
        "kept": {**kept, "seeds": len(starts)},
        "derived": {name: value for name, value in data.derived.items() if name != "mean_frame"},
    }
    inference_data.write(folder, about, {name: np.ascontiguousarray(array) for name, array in arrays.items()})


def open_recording(folder: Path) -> tuple[Recording, dict[str, Any], dict[str, Any]]:
    """The recording with the frames that `save` kept, what was computed from all of them, and the facts of the data."""
    about, arrays = inference_data.read(folder)
    num, rows_K, kept = about["num_frames"], arrays["rows"], about["kept"]
    if len(arrays["ends"]) != -(-num // 8) or len(rows_K) != len(arrays["frames"]):
        raise ValueError("its arrays do not belong together")
    problem = (
        f"{folder} holds {len(rows_K):,} of the {num:,} frames of {about['path']}: enough for samples with --num {kept['num']} "
        f"--steps {kept['steps']}; others need the recording"
    )
    ends_T, pauses_T = (np.unpackbits(arrays[name], count=num).astype(bool) for name in ("ends", "pauses"))
    median = about["manifest"]["recording"]["median_dt"]
    time_T = np.cumsum(np.append(0.0, np.where(pauses_T, 10 * median + 1.0, median)[:-1]))
    episode_T = np.cumsum(np.append(0, ends_T[:-1]))
    frames: Any = KeptFrames(arrays["frames"], rows_K, num, problem)
    actions_TA, pose_T44 = np.zeros((num, arrays["actions"].shape[1]), np.float32), None
    actions_TA[rows_K] = arrays["actions"]
    if "pose" in arrays:
        pose_T44 = np.zeros((num, 4, 4))
        pose_T44[:, :3, 3] = arrays.get("position", 0.0)
        pose_T44[rows_K] = arrays["pose"]
    facts = {**about["manifest"], "kept": kept}
    recording = Recording(Path(about["path"]), frames, actions_TA, time_T, episode_T, pose_T44, read_axes(facts), facts)
    return recording, {**about["derived"], "mean_frame": arrays["mean_frame"]}, about["facts"]
