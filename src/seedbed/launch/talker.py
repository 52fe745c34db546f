"""A trained run as a process that answers: questions as lines of JSON come in, pieces of text and facts go out.

`python -m seedbed.launch.talker RUNS NAME`, for programs; people type `seedbed sample NAME`.
"""

import json
import os
import queue
import sys
import threading
import time
from pathlib import Path
from typing import Any, TextIO

from seedbed.errors import UserError
from seedbed.launch import local
from seedbed.train.system import Request


class Stopped(Exception):
    """Nobody wants the rest of the answer."""


class _Told(Exception):
    pass


class _Survey(Request):
    """A request that learns which options a recipe knows, and asks for nothing."""

    def read(self, **defaults: Any) -> dict[str, Any]:
        raise _Told(defaults)


def known_options(trained: local.Trained) -> dict[str, Any]:
    """The options that the recipe's `sample` reads, with their defaults."""
    try:
        with trained.engine.evaluating():
            trained.system.sample(_Survey(_folder(trained)), trained.engine)
    except _Told as told:
        return {k: v for k, v in told.args[0].items() if isinstance(v, str | int | float | None)}
    return {}


def answer(trained: local.Trained, options: dict[str, Any], write: Any) -> dict[str, Any]:
    """One sample; its text goes to `write` as it comes, the files and times are the answer."""
    began = time.monotonic()
    with trained.engine.evaluating():
        shown = trained.system.sample(Request(_folder(trained), options, write), trained.engine)
    files = [str(path.relative_to(trained.run.path)) for path in shown.files]
    return {"files": files, "seconds": round(time.monotonic() - began, 3), "text": "" if write.pieces else shown.text}


def _folder(trained: local.Trained) -> Path:
    return trained.run.path / "samples" / "asked"


class _Writer:
    """Passes pieces on, and breaks the generation off when somebody says stop."""

    def __init__(self, out: TextIO, stop: threading.Event) -> None:
        self.out, self.stop, self.pieces = out, stop, 0

    def __call__(self, piece: str) -> None:
        if self.stop.is_set():
            raise Stopped
        self.pieces += 1
        _say(self.out, {"piece": piece})


def _say(out: TextIO, words: dict[str, Any]) -> None:
    out.write(json.dumps(words) + "\n")
    out.flush()


def _listen(questions: "queue.Queue[dict[str, Any] | None]", stop: threading.Event) -> None:
    for line in sys.stdin:
        words = json.loads(line)
        if words.get("stop"):
            stop.set()
        else:
            stop.clear()
            questions.put(words)
    # Whoever asked is gone: nothing that is left to do here is wanted.
    os._exit(0)


def _serve(trained: local.Trained, out: TextIO) -> None:
    questions: queue.Queue[dict[str, Any] | None] = queue.Queue()
    stop = threading.Event()
    threading.Thread(target=_listen, args=(questions, stop), daemon=True).start()
    while (words := questions.get()) is not None:
        try:
            options = words["ask"] if isinstance(words.get("ask"), dict) else {}
            _say(out, {"end": answer(trained, options, _Writer(out, stop))})
        except Stopped:
            _say(out, {"end": {"files": [], "stopped": True}})
        except UserError as problem:
            _say(out, {"error": str(problem)})
        except Exception as error:
            _say(out, {"error": f"{type(error).__name__}: {error}"[:400]})


def main() -> None:
    # What libraries print must not come between our lines.
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    root, name = Path(sys.argv[1]), sys.argv[2]
    try:
        trained = local.load(root, name)
        ready = {"options": known_options(trained), "device": trained.engine.device.type, "recipe": trained.run.title()}
    except UserError as problem:
        return _say(out, {"error": str(problem)})
    except Exception as error:
        return _say(out, {"error": f"{type(error).__name__}: {error}"[:400]})
    _say(out, {"ready": ready})
    _serve(trained, out)


if __name__ == "__main__":
    main()
