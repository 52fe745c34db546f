"""Child Python processes that import this same package and nothing from the working directory.

This file is the script that such a process starts with.
"""

import importlib.util
import runpy
import sys
from pathlib import Path


def command(module: str, *words: str) -> list[str]:
    """`python -m MODULE WORDS` for a child process, with PYTHONPATH but without the working directory in sys.path."""
    return [sys.executable, "-P", str(Path(__file__).resolve()), module, *words]


def _become(module: str) -> None:
    spec = importlib.util.spec_from_file_location("seedbed", Path(__file__).parent / "__init__.py")
    assert spec is not None and spec.loader is not None
    sys.modules["seedbed"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules["seedbed"])
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    _become(sys.argv.pop(1))
