"""From a command line to a job: locally, under torchrun, on Slurm. Here: how many processes a command must start."""

import os
from collections.abc import Callable

from seedbed import config as configs
from seedbed.config import Config
from seedbed.errors import UserError
from seedbed.recipes import find


def to_train(name: str, assignments: list[str]) -> int:
    """Number of processes that `train` must start; 0 for a single rank, or inside a rank."""

    def config() -> Config:
        recipe, preset = find(name)
        return configs.override(recipe.preset(preset), assignments)

    return num_processes(config)


def num_processes(config: Callable[[], Config]) -> int:
    """Number of processes for a config; 0 for one, or inside a rank."""
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        from seedbed.launch.spawn import end_with_parent

        end_with_parent()
        return 0
    try:
        world = config().dist.world
    except UserError:  # reported by the command itself
        return 0
    return world if world > 1 else 0
