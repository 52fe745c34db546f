"""seedbed: train generative models from scratch. The public names; each is loaded when it is first used."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from seedbed.api import load, runs, sweep, train
    from seedbed.checks.foreign import check
    from seedbed.config import Config, Every, Guard, Optim, Schedule, number
    from seedbed.data.feed import Data, Source
    from seedbed.errors import UserError
    from seedbed.train.engine import Engine
    from seedbed.train.probe import Probe
    from seedbed.train.system import Request, Sample, System, option

_HOMES = {
    "seedbed.api": ("load", "runs", "sweep", "train"),
    "seedbed.checks.foreign": ("check",),
    "seedbed.config": ("Config", "Every", "Guard", "Optim", "Schedule", "number"),
    "seedbed.data.feed": ("Data", "Source"),
    "seedbed.errors": ("UserError",),
    "seedbed.train.engine": ("Engine",),
    "seedbed.train.probe": ("Probe",),
    "seedbed.train.system": ("Request", "Sample", "System", "option"),
}

__all__ = ["Config", "Data", "Engine", "Every", "Guard", "Optim", "Probe", "Request"]
__all__ += ["Sample", "Schedule", "Source", "System", "UserError", "check", "load", "number", "option", "runs", "sweep", "train"]


def __getattr__(name: str) -> Any:
    for home, names in _HOMES.items():
        if name in names:
            return getattr(importlib.import_module(home), name)
    raise AttributeError(f"module 'seedbed' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
