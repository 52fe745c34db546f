"""The services that a run can be mirrored to, each behind the calls of `Sink`."""

import contextlib
import html
import importlib
import netrc
import os
import secrets
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from seedbed.config import flat
from seedbed.errors import UserError
from seedbed.report import facts
from seedbed.report.mirrors.base import FILMS, IMAGES, SECONDS, SECONDS_WITH_CHECKPOINTS, Sink
from seedbed.track.folders import folder_name
from seedbed.track.run import full_name
from seedbed.track.text import format_value, one_line

_TENSORBOARD = "tensorboard"  # the folder of its files, in the run's
# MLflow's own limits on one call and on the length of a parameter, and its words for how a run ended.
_MAX_PARAMS, _MAX_LENGTH = 100, 500
_ENDS = {"done": "FINISHED", "interrupted": "KILLED"}


class Wandb(Sink):
    """Weights & Biases, online or (WANDB_MODE=offline) into the run's folder, to be sent later by `wandb sync`.

    Rows carry their own step metric, since W&B drops rows with an earlier step, as after a roll-back.
    """

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
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    host = urlsplit(os.environ.get("WANDB_BASE_URL") or "https://api.wandb.ai").hostname or ""
    for path in (os.environ.get("NETRC"), Path.home() / ".netrc", Path.home() / "_netrc"):
        with contextlib.suppress(OSError, netrc.NetrcParseError):
            if path and netrc.netrc(str(path)).authenticators(host):
                return True
    return False


class Tensorboard(Sink):
    """Event files in the run's folder, so that `tensorboard --logdir runs` shows every run.

    After a roll-back or a resumption the steps taken back are purged.
    """

    takes_checkpoints = False

    def open(self, config: dict[str, Any]) -> None:
        self._writer = self._new_writer()
        self._config = {key: format_value(v) if isinstance(v, list | tuple) else v for key, v in flat(config["config"]).items()}
        self.remember(folder=_TENSORBOARD)
        rows = "\n".join(f"| {key} | {format_value(value)} |" for key, value in self._config.items())
        self._writer.add_text("config", f"| key | value |\n|---|---|\n{rows}", 0)

    def _new_writer(self, purge_step: int | None = None) -> Any:
        tensorboard = importlib.import_module("torch.utils.tensorboard")
        return tensorboard.SummaryWriter(str(self.run.path / _TENSORBOARD), purge_step=purge_step, flush_secs=10)

    def forget(self) -> None:
        super().forget()
        shutil.rmtree(self.run.path / _TENSORBOARD, ignore_errors=True)

    def numbers(self, step: int, values: dict[str, float], when: float) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step, walltime=when)

    def text(self, step: int, title: str, text: str) -> None:
        self._writer.add_text(title, "\n".join(f"    {line}" for line in text.splitlines()), step)

    def media(self, step: int, paths: Sequence[Path]) -> None:
        import numpy as np
        from PIL import Image

        for path in paths:
            if path.suffix.lower() in (*IMAGES, ".gif"):
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


class Trackio(Sink):
    """A local database in its own cache, shown by `trackio show`, or a Space that TRACKIO_SPACE_ID names.

    trackio identifies a run by project and name; a run that is sent again gets a new name.
    """

    def open(self, config: dict[str, Any]) -> None:
        self._trackio = importlib.import_module("trackio")
        if "name" not in self.memory:
            number = self.memory.get("number", 0) + 1
            name = self.run.name if number == 1 else f"{self.run.name}-{number}"
            self.remember(project=os.environ.get("TRACKIO_PROJECT", "seedbed"), name=name, number=number)
        known = self.memory
        self._run = self._trackio.init(
            project=known["project"],
            name=known["name"],
            group=config.get("sweep"),
            config={**flat(config["config"]), "recipe": full_name(config["recipe"], config["preset"]), "why": config.get("why")},
            resume="allow",
            embed=False,
        )

    def forget(self) -> None:
        self._keep({"number": self.memory.get("number", 0)})

    def numbers(self, step: int, values: dict[str, float], when: float) -> None:
        self._run.log(values, step=step)

    def text(self, step: int, title: str, text: str) -> None:
        body = "\n".join(f"    {line}" for line in text.splitlines())
        self._run.log({title: self._trackio.Markdown(body)}, step=step)

    def media(self, step: int, paths: Sequence[Path]) -> None:
        kinds: dict[str, Any] = {**dict.fromkeys(IMAGES, self._trackio.Image), **dict.fromkeys(FILMS, self._trackio.Video)}
        found = {f"sample/{path.stem}": kinds[path.suffix.lower()](path) for path in paths if path.suffix.lower() in kinds}
        if found:
            self._run.log(found, step=step)

    def checkpoint(self, path: Path, best: bool) -> None:
        artifact = self._trackio.Artifact(f"{self.run.name}-checkpoint", type="checkpoint", metadata={"step": path.name})
        artifact.add_dir(str(path))
        self._run.log_artifact(artifact, aliases=[path.name, "latest", *(["best"] if best else [])])

    def place(self) -> str:
        return f"trackio show --project {self.memory.get('project')}"

    def close(self, status: dict[str, Any]) -> None:
        self._run.finish()


class Mlflow(Sink):
    """The server that MLFLOW_TRACKING_URI names, or MLflow's own files here when there is none.

    Uses a client instead of the global run, which other code may use.
    """

    def open(self, config: dict[str, Any]) -> None:
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        mlflow = importlib.import_module("mlflow")
        self._entities = importlib.import_module("mlflow.entities")
        self._client = mlflow.MlflowClient()
        if "run_id" in self.memory:
            self._id = self.memory["run_id"]
            self._client.update_run(self._id, status="RUNNING")
            return
        experiment = os.environ.get("MLFLOW_EXPERIMENT_NAME", "seedbed")
        found = self._client.get_experiment_by_name(experiment)
        place = found.experiment_id if found else self._client.create_experiment(experiment)
        title = full_name(config["recipe"], config["preset"])
        tags = {"recipe": title, "why": config.get("why"), "parent": config.get("parent"), "sweep": config.get("sweep")}
        known = {key: one_line(str(value)) for key, value in tags.items() if value}
        self._id = self._client.create_run(place, run_name=self.run.name, tags=known).info.run_id
        self.remember(run_id=self._id, experiment=experiment)
        params = [self._entities.Param(key, format_value(v)[:_MAX_LENGTH]) for key, v in flat(config["config"]).items()]
        for first in range(0, len(params), _MAX_PARAMS):
            self._client.log_batch(self._id, params=params[first : first + _MAX_PARAMS])

    def numbers(self, step: int, values: dict[str, float], when: float) -> None:
        metrics = [self._entities.Metric(name, value, int(when * 1000), step) for name, value in values.items()]
        self._client.log_batch(self._id, metrics=metrics)

    def text(self, step: int, title: str, text: str) -> None:
        self._client.log_text(self._id, text, f"{title}/{folder_name(step)}.txt")

    def media(self, step: int, paths: Sequence[Path]) -> None:
        for path in paths:
            self._client.log_artifact(self._id, str(path), f"sample/{folder_name(step)}")

    def checkpoint(self, path: Path, best: bool) -> None:
        self._client.log_artifacts(self._id, str(path), f"checkpoints/{path.name}")
        if best:
            self._client.log_batch(self._id, tags=[self._entities.RunTag("best", path.name)])

    def place(self) -> str:
        return f"experiment {self.memory.get('experiment')}, run {self.memory.get('run_id')}"

    def close(self, status: dict[str, Any]) -> None:
        tags = [self._entities.RunTag(key, one_line(str(status[key]))) for key in ("status", "verdict") if key in status]
        self._client.log_batch(self._id, tags=tags)
        self._client.set_terminated(self._id, _ENDS.get(str(status.get("status")), "FAILED"))


# By name, which is that of the required package too.
SINKS: dict[str, type[Sink]] = {"wandb": Wandb, "tensorboard": Tensorboard, "trackio": Trackio, "mlflow": Mlflow}
