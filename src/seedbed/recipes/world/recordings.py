"""From a name in the config to a recording: simulators are recorded once into the cache, folders are opened and looked over."""

from __future__ import annotations

from pathlib import Path

from seedbed.config import Config
from seedbed.data.lag import require_aligned
from seedbed.data.recording import Recording, open_recording
from seedbed.data.recordings import simulators
from seedbed.data.store import is_store
from seedbed.errors import UserError

SIMULATORS = ("box", "doom", "atari", "gym")


def find_recording(config: Config) -> Recording:
    """The recording that `config.data` names. One that was brought along must be aligned: the loss would not tell."""
    wanted = config.data
    if wanted.recording.partition(":")[0] in SIMULATORS and not is_store(Path(wanted.recording)):
        size = (wanted.frames, wanted.height, wanted.width, wanted.scene)
        found = simulators.record(wanted.recording, *size, cache=wanted.cache, device=_drawn_on(config))
    else:
        path = Path(wanted.recording).expanduser()
        if not path.exists():
            raise UserError(f"there is no recording at {path}; data.recording= names {simulators.HELP}, or a recording's folder")
        found = open_recording(path)
        require_aligned(found)
    return open_recording(found.path, "command") if wanted.actions == "command" else found


def _drawn_on(config: Config) -> str:
    """Where the box world is drawn: beside the training."""
    import torch

    return "cuda" if config.device in ("auto", "cuda") and torch.cuda.is_available() else "cpu"
