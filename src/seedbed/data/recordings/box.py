"""Record the box world: coverage-balanced walks, rendered in pieces, found again by what was asked for.

Shape suffixes: N walks, T frames, A control axes.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from seedbed.data.meter import Meter
from seedbed.data.prepare import cache_folder
from seedbed.data.recording import FORMAT, Recording, find_recording, write_recording
from seedbed.data.store import digest

if TYPE_CHECKING:
    from seedbed.data.boxworld import BoxWorld

PIECE = 256  # frames rendered before they are written


def record_box(
    num_frames: int, height: int, width: int, seed: int, *, out: Path | None = None, cache: str = "", device: str = "cpu"
) -> Recording:
    """A recording of `num_frames` frames in the world of this seed: the one that exists, or a new one."""
    from seedbed.data.boxworld import BoxWorld
    from seedbed.data.walks import num_walks_for, walk_with_commands

    world = BoxWorld(seed, height, width, device)
    num_walks = num_walks_for(num_frames)
    # The last bits of a ray depend on the kind of device, and with them now and then a pixel on an edge.
    key = digest([FORMAT, world.facts, num_frames, num_walks, world.device.type])
    path = (out or cache_folder(cache) / f"box-{height}x{width}-{num_frames}-{key[:12]}").absolute()
    found = find_recording(path, key)
    if found:
        return found
    length = -(-num_frames // num_walks)
    walks = walk_with_commands(world, length, num_walks, seed)
    pose_T44, done_TA, asked_TA = (a.reshape(-1, *a.shape[2:])[:num_frames] for a in walks)
    frame_T = np.arange(num_frames)
    return write_recording(
        path,
        _render(world, pose_T44),
        done_TA,
        frame_T % length * world.FRAME_SECONDS,
        frame_T // length,
        world.AXES,
        pose=pose_T44,
        command=asked_TA,
        source={"name": f"box:{seed}"},
        simulator=world.facts,
        key=key,
    )


def _render(world: "BoxWorld", pose_T44: np.ndarray) -> Iterator[np.ndarray]:
    import torch

    meter = Meter("rendering", "frames")
    for low in range(0, len(pose_T44), PIECE):
        yield world.render(torch.from_numpy(pose_T44[low : low + PIECE])).cpu().numpy()
        meter(min(low + PIECE, len(pose_T44)), len(pose_T44))
    meter.close()
