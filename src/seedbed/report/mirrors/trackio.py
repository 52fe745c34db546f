"""The mirror to trackio: a local database in its own cache, shown by `trackio show`, or a Space that TRACKIO_SPACE_ID names."""

import importlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from seedbed.config import flat
from seedbed.report.mirrors.base import FILMS, IMAGES, Sink
from seedbed.track.run import full_name


class Trackio(Sink):
    """trackio identifies a run by project and name; a run that is sent again gets a new name."""

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
