"""The loop and all it needs: engine, optimizers, schedules, checkpoints, guards, capture. Knows no recipe."""

import importlib
import sys
from types import ModuleType
from typing import Any


class _CallableModule(ModuleType):
    """`seedbed.train(...)` is a function of the Python interface, and this package has its name: calling it calls that."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return importlib.import_module("seedbed.api").train(*args, **kwargs)


sys.modules[__name__].__class__ = _CallableModule
