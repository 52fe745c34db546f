"""A process that samples from a trained run: reads requests as lines of JSON and writes generated text and results.

`python -m seedbed.launch.sample_worker RUNS NAME`, started by the playground. The command for people is `seedbed sample NAME`.
"""

import json
import os
import queue
import sys
import threading
import time
from pathlib import Path
from typing import Any, TextIO

from seedbed import inference
from seedbed.errors import UserError
from seedbed.train.options import options_of
from seedbed.train.system import Request


class Stopped(Exception):
    """The client has stopped the generation."""


def default_options(trained: inference.TrainedModel) -> dict[str, Any]:
    """The sample options that a page can show, with their defaults."""
    found = options_of(trained.system.sample_options)
    return {name: option.default for name, option in found.items() if not option.many and not option.needs_data}


def answer(trained: inference.TrainedModel, options: dict[str, Any], write: Any) -> dict[str, Any]:
    """Make one sample. Its text is streamed to `write`; files and time are returned."""
    began = time.monotonic()
    shown = trained.answer(Request(trained.run.path / "samples" / "asked", options, write))
    files = [str(path.relative_to(trained.run.path)) for path in shown.files]
    return {"files": files, "seconds": round(time.monotonic() - began, 3), "text": "" if write.pieces else shown.text}


class _Writer:
    """Streams generated text, and ends the generation when `stop` is set."""

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


def _problem(error: Exception) -> dict[str, str]:
    return {"error": str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"[:400]}


def _listen(questions: queue.Queue[dict[str, Any]], stop: threading.Event) -> None:
    for line in sys.stdin:
        words = json.loads(line)
        if words.get("stop"):
            stop.set()
        else:
            stop.clear()
            questions.put(words)
    # The parent process has closed the pipe.
    os._exit(0)


def _serve(trained: inference.TrainedModel, out: TextIO) -> None:
    questions: queue.Queue[dict[str, Any]] = queue.Queue()
    stop = threading.Event()
    threading.Thread(target=_listen, args=(questions, stop), daemon=True).start()
    while True:
        words = questions.get()
        try:
            options = words["request"] if isinstance(words.get("request"), dict) else {}
            _say(out, {"end": answer(trained, options, _Writer(out, stop))})
        except Stopped:
            _say(out, {"end": {"files": [], "stopped": True}})
        except Exception as error:
            _say(out, _problem(error))


def main() -> None:
    # Standard output carries messages only: what libraries print goes to standard error.
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    root, name = Path(sys.argv[1]), sys.argv[2]
    try:
        trained = inference.load(root, name)
        ready = {"options": default_options(trained), "device": trained.engine.device.type, "recipe": trained.run.title()}
    except Exception as error:
        return _say(out, _problem(error))
    _say(out, {"ready": ready})
    _serve(trained, out)


if __name__ == "__main__":
    main()
