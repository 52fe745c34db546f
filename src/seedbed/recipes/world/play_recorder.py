"""Records a play session: frames go to a temporary file, controls to lists, until the recording is saved.

Shape suffixes: A control axes, T frames, H W pixels, C colours.
"""

import shutil
import tempfile
from pathlib import Path

import numpy as np

from seedbed.errors import UserError
from seedbed.recipes.world.recording.recording import MIN_FRAMES, write_recording
from seedbed.train.player import Player, Rollout

MAX_FRAMES = 20_000
MIN_FREE = 1 << 30  # bytes that a recording leaves on the disk


class Recorder:
    """One frame per step. The control of a step belongs to the frame before it."""

    def __init__(self, path: Path, player: Player, of: str, run: str) -> None:
        self.path, self.player, self.of, self.run = path, player, of, run
        self.num_frames, self.num_episodes = 0, 0
        self._actions: list[np.ndarray] = []
        self._commands: list[np.ndarray] = []
        self._poses: list[np.ndarray] = []
        self._episodes: list[int] = []
        self._file = tempfile.TemporaryFile()  # noqa: SIM115

    @property
    def full(self) -> bool:
        return self.num_frames >= MAX_FRAMES

    def begin(self, rollout: Rollout) -> None:
        """A first frame, from which an episode starts."""
        self.num_episodes += 1
        self._take(rollout)

    def add(self, rollout: Rollout) -> None:
        self._actions[-1] = rollout.applied_A if self.of == "simulator" else rollout.action_A
        self._commands[-1] = rollout.action_A
        self._take(rollout)

    def _take(self, rollout: Rollout) -> None:
        frame_HWC = rollout.frame_HWC if self.of == "rollout" else rollout.reference_HWC
        assert frame_HWC is not None, "the reference cannot change while the simulator is recorded"
        self._file.write(frame_HWC.tobytes())
        if self.of == "simulator":
            assert rollout.pose_44 is not None
            self._poses.append(rollout.pose_44)
        # The control that follows this frame is set by the next step; it stays zero where an episode ends.
        for rows in (self._actions, self._commands):
            rows.append(np.zeros(len(self.player.axes), np.float32))
        self._episodes.append(self.num_episodes - 1)
        self.num_frames += 1

    def save(self) -> tuple[Path, int]:
        """The recording's folder and its number of frames; an error says why there is none."""
        if self.num_frames < MIN_FRAMES:
            raise UserError(f"{self.num_frames} frames are too few for a recording; record at least {MIN_FRAMES}")
        shape = (self.num_frames, self.player.height, self.player.width, 3)
        self._file.flush()
        self.path.parent.mkdir(exist_ok=True)
        if shutil.disk_usage(self.path.parent).free < np.prod(shape) + MIN_FREE:
            raise UserError(f"the disk of {self.path.parent} is too full for this recording")
        simulated = self.of == "simulator"
        write_recording(
            self.path,
            iter(np.memmap(self._file, np.uint8, "r", shape=shape)),
            np.stack(self._actions),
            np.arange(self.num_frames) * float(self.player.facts()["seconds"]),
            np.array(self._episodes),
            [(axis.name, axis.unit) for axis in self.player.axes],
            pose=np.stack(self._poses) if simulated else None,
            command=np.stack(self._commands) if simulated else None,
            source={"name": "played", "of": self.of, "run": self.run},
            simulator=self.player.simulator() if simulated else None,
        )
        self._file.close()
        return self.path, self.num_frames

    def discard(self) -> None:
        self._file.close()
