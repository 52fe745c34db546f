"""The mirror to Weights & Biases, online or (WANDB_MODE=offline) into the run's folder, to be sent later by `wandb sync`."""

import contextlib
import html
import importlib
import netrc
import os
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from seedbed.errors import UserError
from seedbed.report.mirrors.base import FILMS, IMAGES, SECONDS, SECONDS_WITH_CHECKPOINTS, Sink
from seedbed.track.run import full_name


class Wandb(Sink):
    """Rows carry their own step metric, since W&B drops rows with an earlier step, as after a roll-back."""

    @classmethod
    def require(cls) -> None:
        if os.environ.get("WANDB_MODE", "online") not in ("online", "shared") or _has_key():
            return
        raise UserError("W&B has no API key here: run `wandb login` once, or set WANDB_MODE=offline")

    def open(self, config: dict[str, Any]) -> None:
        # No console messages, which would break the progress line, and no usage reports.
        os.environ.setdefault("WANDB_SILENT", "true")
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        self._wandb = importlib.import_module("wandb")
        if "id" not in self.memory:
            self.remember(id=secrets.token_hex(4), project=os.environ.get("WANDB_PROJECT", "seedbed"))
        title = full_name(config["recipe"], config["preset"])
        # No console capture, no code saving, and a bounded wait at the end.
        patience = SECONDS_WITH_CHECKPOINTS if self.checkpoints else SECONDS
        quiet = {"console": "off", "silent": True, "save_code": False, "disable_git": True}
        self._run = self._wandb.init(
            id=self.memory["id"],
            project=self.memory["project"],
            name=self.run.name,
            group=config.get("sweep"),
            notes=str(config.get("why") or ""),
            tags=[title[:64]],
            config={**config["config"], "recipe": title, "parent": config.get("parent"), "hash": config.get("hash")},
            resume="allow",
            dir=os.environ.get("WANDB_DIR") or str(self.run.path),
            settings=self._wandb.Settings(**quiet, init_timeout=15, finish_timeout=patience),
        )
        self.remember(url=self._run.url)
        self._run.define_metric("step", hidden=True)
        self._run.define_metric("*", step_metric="step")

    def numbers(self, step: int, values: dict[str, float], when: float) -> None:
        self._run.log({"step": step, **values})

    def text(self, step: int, title: str, text: str) -> None:
        self._run.log({"step": step, title: self._wandb.Html(f"<pre>{html.escape(text)}</pre>", inject=False)})

    def media(self, step: int, paths: Sequence[Path]) -> None:
        found: dict[str, Any] = {}
        for path in paths:
            kind = path.suffix.lower()
            if kind in IMAGES:
                found[f"sample/{path.stem}"] = self._wandb.Image(str(path))
            elif kind in FILMS:
                found[f"sample/{path.stem}"] = self._wandb.Video(str(path), format=kind[1:])
        if found:
            self._run.log({"step": step, **found})

    def checkpoint(self, path: Path, best: bool) -> None:
        artifact = self._wandb.Artifact(f"{self.run.name}-checkpoint", type="checkpoint", metadata={"step": path.name})
        artifact.add_dir(str(path))
        self._run.log_artifact(artifact, aliases=[path.name, "latest", *(["best"] if best else [])])

    def place(self) -> str:
        return self.memory.get("url") or f"offline; wandb sync {self.run.path / 'wandb'}/offline-run-*"

    def close(self, status: dict[str, Any]) -> None:
        known = {key: status[key] for key in ("status", "step", "loss", "best", "best_step", "verdict") if key in status}
        self._run.summary.update(known)
        self._run.finish(exit_code=0 if status.get("status") in ("done", "interrupted") else 1)


def _has_key() -> bool:
    """Whether W&B is logged in."""
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    host = urlsplit(os.environ.get("WANDB_BASE_URL") or "https://api.wandb.ai").hostname or ""
    for path in (os.environ.get("NETRC"), Path.home() / ".netrc", Path.home() / "_netrc"):
        with contextlib.suppress(OSError, netrc.NetrcParseError):
            if path and netrc.netrc(str(path)).authenticators(host):
                return True
    return False
