"""From a name in the config to a recording: simulators are recorded once into the cache, folders are opened."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from seedbed.data.recording import Recording, open_recording
from seedbed.errors import UserError
from seedbed.recipes.world.presets import DataConfig


def find_recording(config: DataConfig, say: Callable[[str], None]) -> Recording:
    """The recording that the config names."""
    name, _, rest = config.recording.partition(":")
    if name == "box":
        from seedbed.data.recordings.box import record_box

        return record_box(config.frames, config.height, config.width, config.scene, cache=config.cache)
    path = Path(config.recording).expanduser()
    if not path.exists():
        raise UserError(f"there is no recording at {path}; data.recording= names box, doom, atari:GAME, gym:NAME or a folder")
    return open_recording(path)
