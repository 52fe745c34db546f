"""The mirror to MLflow: the server that MLFLOW_TRACKING_URI names, or MLflow's own files here when there is none."""

import importlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from seedbed.config import flat
from seedbed.report.mirrors.base import Sink
from seedbed.track.folders import folder_name
from seedbed.track.run import full_name
from seedbed.track.text import format_value, one_line

# MLflow's own limits on one call and on the length of a parameter.
_MAX_PARAMS, _MAX_LENGTH = 100, 500
_ENDS = {"done": "FINISHED", "interrupted": "KILLED"}


class Mlflow(Sink):
    """Uses a client instead of the global run, which other code may use."""

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
