"""The mirror to TensorBoard: event files in the run's folder, so that `tensorboard --logdir runs` shows every run."""

import importlib
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from seedbed.config import flat
from seedbed.report import facts
from seedbed.report.mirrors.base import Sink
from seedbed.track.text import format_value

FOLDER = "tensorboard"
_IMAGES = (".png", ".jpg", ".jpeg", ".gif")


class Tensorboard(Sink):
    """Scalars, texts, images and hyper-parameters; after a roll-back or a resumption the steps taken back are purged."""

    takes_checkpoints = False

    def open(self, config: dict[str, Any]) -> None:
        self._writer = self._new_writer()
        self._config = {key: format_value(v) if isinstance(v, list | tuple) else v for key, v in flat(config["config"]).items()}
        self.remember(folder=FOLDER)
        rows = "\n".join(f"| {key} | {format_value(value)} |" for key, value in self._config.items())
        self._writer.add_text("config", f"| key | value |\n|---|---|\n{rows}", 0)

    def _new_writer(self, purge_step: int | None = None) -> Any:
        tensorboard = importlib.import_module("torch.utils.tensorboard")
        return tensorboard.SummaryWriter(str(self.run.path / FOLDER), purge_step=purge_step, flush_secs=10)

    def forget(self) -> None:
        super().forget()
        shutil.rmtree(self.run.path / FOLDER, ignore_errors=True)

    def numbers(self, step: int, values: dict[str, float], when: float) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step, walltime=when)

    def text(self, step: int, title: str, text: str) -> None:
        self._writer.add_text(title, "\n".join(f"    {line}" for line in text.splitlines()), step)

    def media(self, step: int, paths: Sequence[Path]) -> None:
        import numpy as np
        from PIL import Image

        for path in paths:
            if path.suffix.lower() in _IMAGES:
                with Image.open(path) as image:
                    pixels = np.asarray(image.convert("RGB"))
                self._writer.add_image(f"sample/{path.stem}", pixels, step, dataformats="HWC")

    def rewind(self, step: int) -> None:
        self._writer.close()
        self._writer = self._new_writer(purge_step=step + 1)

    def place(self) -> str:
        return f"tensorboard --logdir {self.run.path.parent}"

    def close(self, status: dict[str, Any]) -> None:
        ends = {f"end/{key}": float(status[key]) for key in ("loss", "best") if facts.is_number(status.get(key))}
        summary = importlib.import_module("torch.utils.tensorboard.summary")
        settings = {key: value for key, value in self._config.items() if isinstance(value, bool | int | float | str)}
        for part in summary.hparams(settings, ends):
            self._writer.file_writer.add_summary(part)
        self.numbers(int(status.get("step") or 0), ends, time.time())
        self._writer.close()
