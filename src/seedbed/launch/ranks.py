"""Ranks of one run: joining the process group, and training on non-primary ranks."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from seedbed import config as configs
from seedbed.config import Config
from seedbed.config.saved import from_json
from seedbed.dist import Ranks
from seedbed.dist.join import join, require_settings
from seedbed.errors import UserError
from seedbed.launch import local
from seedbed.recipes import Recipe
from seedbed.track import code
from seedbed.track.console import Console
from seedbed.track.run import Run
from seedbed.train.loop import fit


@contextlib.contextmanager
def join_ranks(config: Config) -> Iterator[Ranks]:
    """Join the process group of the run; a single rank unless the config asks for more."""
    require_settings(config)
    ranks = join(config.dist, config.device)
    require_equal(ranks, code=code.source_digest(), settings=configs.digest(config), torch=torch.__version__)
    yield ranks
    ranks.close()  # not after an error: the other ranks may not respond


def require_equal(ranks: Ranks, **facts: Any) -> None:
    """Refuse ranks whose facts are not those of rank 0: they would train another model, or wait for ever."""
    found = ranks.all_gather_object(facts)
    for name, wanted in found[0].items():
        if others := [str(rank) for rank, theirs in enumerate(found) if theirs[name] != wanted]:
            ranks.close()  # all have answered; a process that leaves the group open may be aborted by its threads
            where = f"rank{'s' * (len(others) > 1)} {', '.join(others[:8])}"
            raise UserError(f"the {name} of {where} differs from that of rank 0; give all machines the same files and versions")


class NonPrimaryRun(Run):
    """The run folder on non-primary ranks: read-only except for checkpoints."""

    def row(self, values: dict[str, Any]) -> None: ...

    def event(self, step: int, kind: str, **facts: Any) -> None: ...

    def set_status(self, status: str, **facts: Any) -> None: ...


def train_non_primary(ranks: Ranks, root: Path, recipe: Recipe, anomaly: bool) -> int:
    """Training on non-primary ranks: the same steps without output. Waits until the primary rank has opened the data."""
    facts = ranks.broadcast_object(None)
    run = NonPrimaryRun(root / facts["run"])
    config = from_json(recipe.preset(facts["preset"]), facts["config"])
    with open(os.devnull, "w") as nothing:  # only the primary rank prints
        how = {"resumed": facts["resumed"], "until": facts["until"], "ranks": ranks}
        job = local.open_job(local.Launch(run, recipe, config, Console(stream=nothing), **how), recipe.open_data(config))
        with local.anomaly_mode(job, anomaly):
            return local.exit_code(job, fit(job))
