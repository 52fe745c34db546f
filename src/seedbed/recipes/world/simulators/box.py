"""Record the box world: scripted trajectories that cover all controls, rendered in batches.

Shape suffixes: N trajectories, T frames, A control axes.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from seedbed.cache import cache_folder
from seedbed.data.progress import Progress
from seedbed.data.store import digest
from seedbed.recipes.world.recording.recording import FORMAT, Recording, find_recording, write_recording

if TYPE_CHECKING:
    from seedbed.recipes.world.simulators.boxworld import BoxWorld

PIECE = 256  # frames rendered before they are written


def record_box(
    num_frames: int, height: int, width: int, seed: int, *, out: Path | None = None, cache: str = "", device: str = "cpu"
) -> Recording:
    """A recording of `num_frames` frames in the world of this seed: the existing one, or a new one."""
    from seedbed.recipes.world.simulators.boxworld import BoxWorld
    from seedbed.recipes.world.simulators.scripted_trajectories import num_trajectories_for, trajectories

    world = BoxWorld(seed, height, width, device)
    num_trajectories = num_trajectories_for(num_frames)
    # Rounding differs between devices, and with it an occasional edge pixel.
    key = digest([FORMAT, world.facts, num_frames, num_trajectories, world.device.type])
    path = (out or cache_folder(cache) / f"box-{height}x{width}-{num_frames}-{key[:12]}").absolute()
    found = find_recording(path, key)
    if found:
        return found
    length = -(-num_frames // num_trajectories)
    scripted = trajectories(world, length, num_trajectories, seed)
    pose_T44, applied_TA, requested_TA = (a.reshape(-1, *a.shape[2:])[:num_frames] for a in scripted)
    frame_T = np.arange(num_frames)
    return write_recording(
        path,
        _render(world, pose_T44),
        applied_TA,
        frame_T % length * world.FRAME_SECONDS,
        frame_T // length,
        world.AXES,
        pose=pose_T44,
        command=requested_TA,
        source={"name": f"box:{seed}"},
        simulator=world.facts,
        key=key,
    )


def _render(world: "BoxWorld", pose_T44: np.ndarray) -> Iterator[np.ndarray]:
    import torch

    progress = Progress("rendering", "frames")
    for low in range(0, len(pose_T44), PIECE):
        yield world.render(torch.from_numpy(pose_T44[low : low + PIECE])).cpu().numpy()
        progress(min(low + PIECE, len(pose_T44)), len(pose_T44))
    progress.close()
