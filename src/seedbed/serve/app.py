"""The workbench: routes of pages and JSON endpoints, and live updates over websockets. Only notes and actions change files.

The files are polled once per period for all open pages.
"""

import asyncio
import contextlib
import functools
import importlib.util
import json
import math
import os
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import anyio
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import FileResponse, Response
from starlette.routing import BaseRoute, Route, WebSocketRoute
from starlette.websockets import WebSocket, WebSocketDisconnect

from seedbed.errors import UserError
from seedbed.report import notes
from seedbed.report.html_page import KINDS as MEDIA
from seedbed.serve import actions, views
from seedbed.serve.messages import Json, read_object, receive_text, to_text
from seedbed.serve.play import play_routes
from seedbed.serve.playground import Playground
from seedbed.serve.run_index import RunIndex, is_name

STATIC = Path(__file__).parent / "static"
MAX_COMPARED = 64
_STUDIES = ("sweep", "ablation")  # their folders, with an s, are beside the runs
_KINDS = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
# Of a run or a sweep. Other types are not served: an HTML or script file in a run folder must not run with our origin.
KINDS = {
    **MEDIA,
    ".wav": "audio/wav",
    **dict.fromkeys((".txt", ".md", ".log", ".json", ".jsonl", ".csv", ".patch"), "text/plain; charset=utf-8"),
}

PERIOD = 0.7
# A page that does not read for so many seconds is disconnected, to bound the memory of its queue.
SEND_SECONDS = 10.0
MAX_WATCHED = 64
PARTS = ("config", "status", "rows", "events", "labels", "lock", "console")


class Live:
    """All open pages. The polling task runs while there is at least one."""

    def __init__(self, index: RunIndex) -> None:
        self.index = index
        self._next_poll = asyncio.Event()
        self._polling: asyncio.Task[None] | None = None
        self._num_pages = 0
        self._watched: Counter[str] = Counter()
        self._stamps: dict[str, Any] = {}

    async def page(self, socket: WebSocket) -> None:
        """Serve one page: it subscribes once and receives changes until it disconnects."""
        await socket.accept()
        try:
            watched, wants_list, version = read_request(await asyncio.wait_for(receive_text(socket), SEND_SECONDS))
        except (ValueError, TimeoutError, WebSocketDisconnect):
            return await _close(socket, 1003)
        with self._subscribed(watched):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(_until_closed, socket, tasks.cancel_scope)
                with contextlib.suppress(WebSocketDisconnect, RuntimeError, TimeoutError):
                    await self._send_changes(socket, watched, wants_list, version)
                tasks.cancel_scope.cancel()
        await _close(socket)

    async def _send_changes(self, socket: WebSocket, watched: list[str], wants_list: bool, version: int) -> None:
        seen = {name: await run_in_threadpool(self.index.stamp, name) for name in watched}
        while True:
            await self._next_poll.wait()
            changes: dict[str, Any] = {}
            if wants_list and self.index.version > version:
                version, changed, gone = await run_in_threadpool(self.index.since, version)
                changes["list"] = {"version": version, "runs": changed, "gone": gone}
            for name in watched:
                stamp = self._stamps.get(name, seen[name])
                parts = [part for part, old, new in zip(PARTS, seen[name], stamp, strict=True) if old != new]
                if parts:
                    seen[name] = stamp
                    changes.setdefault("runs", {})[name] = parts
            if changes:
                await asyncio.wait_for(socket.send_text(to_text(changes)), SEND_SECONDS)

    async def _poll(self) -> None:
        while True:
            await asyncio.sleep(PERIOD)
            with contextlib.suppress(OSError):  # retried in the next period
                self._stamps = await run_in_threadpool(self._read, list(self._watched))
            finished, self._next_poll = self._next_poll, asyncio.Event()
            finished.set()

    def _read(self, names: list[str]) -> dict[str, Any]:
        self.index.refresh()
        return {name: self.index.stamp(name) for name in names}

    @contextlib.contextmanager
    def _subscribed(self, watched: list[str]) -> Iterator[None]:
        self._watched += Counter(watched)
        self._num_pages += 1
        if self._polling is None or self._polling.done():
            self._polling = asyncio.ensure_future(self._poll())
        try:
            yield
        finally:
            self._num_pages -= 1
            self._watched -= Counter(watched)
            if not self._num_pages and self._polling is not None:
                self._polling.cancel()
                self._polling = None


def read_request(text: str) -> tuple[list[str], bool, int]:
    """Parse a subscription: run names, whether the list is wanted, and after which version. ValueError for anything else."""
    asked = read_object(text)
    if asked is None:
        raise ValueError("not a JSON object")
    names, version = asked.get("runs", []), asked.get("version") or 0
    if not isinstance(names, list) or not isinstance(version, int):
        raise ValueError("runs is a list, version a whole number")
    return [name for name in names if isinstance(name, str) and is_name(name)][:MAX_WATCHED], bool(asked.get("list")), version


async def _until_closed(socket: WebSocket, scope: anyio.CancelScope) -> None:
    """A page sends nothing after its subscription; any message, or the end of the connection, ends it."""
    with contextlib.suppress(WebSocketDisconnect):
        await receive_text(socket)
    scope.cancel()


async def _close(socket: WebSocket, code: int = 1000) -> None:
    """Close a socket that may already be closed."""
    with contextlib.suppress(RuntimeError, WebSocketDisconnect, TimeoutError):
        await asyncio.wait_for(socket.close(code), 1.0)


def workbench(root: Path) -> Starlette:
    """The web application of one runs folder, without authentication."""
    index = RunIndex(root)
    live, playground = Live(index), Playground(index)

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(playground.stop_idle)
            yield
            tasks.cancel_scope.cancel()
        await playground.close()

    routes: list[BaseRoute] = [
        *(Route(path, _page) for path in ("/", "/journal", "/compare", "/sweeps")),
        *(Route(f"/{kind}/{{name}}", functools.partial(_named_page, index, kind)) for kind in ("run", "playground", *_STUDIES)),
        Route("/api/runs", _reading(lambda request: views.run_list(index))),
        Route("/api/settings", _reading(lambda request: views.settings(index))),
        Route("/api/actions", functools.partial(_act, index), methods=["POST"]),
        Route("/api/runs/{name}", _of_run(index, views.run_page)),
        Route("/api/runs/{name}/samples", _of_run(index, views.samples)),
        Route("/api/runs/{name}/console", _of_run(index, views.console)),
        Route("/api/runs/{name}/series", _reading(lambda r: views.series(index, r.path_params["name"], *_curves(r)))),
        Route("/api/runs/{name}/note", functools.partial(_note, index), methods=["POST"]),
        Route("/api/series", _reading(lambda request: views.series_of_runs(index, _names(request), *_curves(request)))),
        Route("/api/compare", _reading(lambda r: views.compare(index, _names(r), r.query_params.get("metric")))),
        Route("/api/studies", _reading(lambda request: views.studies(index))),
        Route("/api/sweeps/{name}", _of_run(index, views.sweep_page)),
        Route("/api/ablations/{name}", _of_run(index, views.ablation_page)),
        Route("/api/journal", _reading(lambda request: views.journal_page(index))),
        Route("/files/{kind}/{name}/{path:path}", functools.partial(_file, index)),
        Route("/static/plotly.js", _plotly),
        Route("/static/{path:path}", _static),
        WebSocketRoute("/api/live", live.page),
        WebSocketRoute("/api/runs/{name}/playground", playground.page),
        *play_routes(root),
    ]
    return Starlette(routes=routes, lifespan=lifespan, exception_handlers={HTTPException: _missing, UserError: _explained})


async def _page(request: Request, status: int = 200) -> Response:
    return FileResponse(STATIC / "index.html", status, media_type="text/html")


async def _named_page(index: RunIndex, kind: str, request: Request) -> Response:
    """The page of a run, a sweep or an ablation, with status 404 when it does not exist."""
    name = request.path_params["name"]
    top = index.root.parent / f"{kind}s" if kind in _STUDIES else index.root
    there = is_name(name) and os.path.isdir(top / name)
    return await _page(request, 200 if there else 404)


async def _static(request: Request) -> Response:
    path = (STATIC / request.path_params["path"].replace("\0", "")).resolve()
    if not path.is_relative_to(STATIC.resolve()) or path.suffix not in _KINDS or not path.is_file():
        raise HTTPException(404)
    return FileResponse(path, media_type=_KINDS[path.suffix], headers={"cache-control": "no-cache"})


async def _plotly(request: Request) -> Response:
    """The JavaScript bundle of the installed plotly; the version in its address lets browsers cache it."""
    found = importlib.util.find_spec("plotly")
    path = Path(found.origin).parent / "package_data" / "plotly.min.js" if found and found.origin else None
    if path is None or not path.is_file():
        raise HTTPException(404, 'charts need plotly: pip install "seedbed[serve]"')
    return FileResponse(path, media_type="text/javascript", headers={"cache-control": "private, max-age=86400"})


async def _file(index: RunIndex, request: Request) -> Response:
    found = await run_in_threadpool(resolved, index, **request.path_params)
    # Plots of a running sweep are replaced under the same name, so browsers must revalidate.
    return FileResponse(found, media_type=KINDS[found.suffix.lower()], headers={"cache-control": "no-cache"})


def _reading(make: Callable[[Request], Any]) -> Callable[[Request], Any]:
    """A JSON endpoint whose values are computed on a thread; a UserError becomes a 404."""

    async def answer(request: Request) -> Response:
        return Json(await run_in_threadpool(make, request))

    return answer


def _of_run(index: RunIndex, view: Callable[[RunIndex, str], Any]) -> Callable[[Request], Any]:
    return _reading(lambda request: view(index, request.path_params["name"]))


def _curves(request: Request) -> tuple[list[str], str, int, float, tuple[float, float]]:
    """Keys, axis, number of points, smoothing and range that an address asks for."""
    given = request.query_params
    axis, keys = given.get("x", "step"), given.getlist("key")
    if axis not in (*views.AXES, *views.MORE_AXES):
        raise UserError(f"x is one of {', '.join((*views.AXES, *views.MORE_AXES))}")
    num, weight = int(_number(given, "points", 800, 10, views.MAX_POINTS)), _number(given, "smooth", 0.0, 0.0, 0.9999)
    low, high = _number(given, "low", -math.inf, -math.inf, math.inf), _number(given, "high", math.inf, -math.inf, math.inf)
    return keys, axis, num, weight, (low, high)


def _number(given: Any, key: str, default: float, low: float, high: float) -> float:
    try:
        value = float(given.get(key, default))
    except ValueError:
        raise UserError(f"{key} is a number") from None
    if not low <= value <= high:
        raise UserError(f"{key} is between {low:g} and {high:g}")
    return value


def _names(request: Request) -> list[str]:
    names = list(dict.fromkeys(request.query_params.getlist("run")))
    if not names:
        raise UserError("name the runs to compare")
    if len(names) > MAX_COMPARED:
        raise UserError(f"at most {MAX_COMPARED} runs are compared at once")
    return names


async def _note(index: RunIndex, request: Request) -> Response:
    name = request.path_params["name"]
    try:
        given = json.loads(await request.body())
        text, old = given["text"], given.get("instead_of")
        if not isinstance(text, str) or not isinstance(old, str | None) or not is_name(name):
            raise ValueError
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, ClientDisconnect):
        raise HTTPException(400, "a note is JSON with a text, and at most 64 kB") from None
    if old:
        await run_in_threadpool(notes.amend, index.root, name, old, text)
    else:
        await run_in_threadpool(notes.note, index.root, name, text)
    return Json(await run_in_threadpool(views.notes, index, name))


async def _act(index: RunIndex, request: Request) -> Response:
    try:
        given = json.loads(await request.body())
        action, names, text = given["action"], given["runs"], given.get("text", "")
        if not all(isinstance(one, str) for one in (action, text, *names)) or isinstance(names, str):
            raise ValueError
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, ClientDisconnect):
        raise HTTPException(400, "an action is JSON with its name and a list of runs, and at most 64 kB") from None
    return Json(await run_in_threadpool(actions.act, index, action, names, text))


async def _missing(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return Json({"error": error.detail}, error.status_code)


async def _explained(request: Request, error: Exception) -> Response:
    return Json({"error": str(error)}, 404 if request.method == "GET" else 409)


def resolved(index: RunIndex, kind: str, name: str, path: str) -> Path:
    """The resolved path of a readable file of a run or a sweep; 404 for others and for path traversal, links included."""
    top = {"runs": index.root, "sweeps": index.root.parent / "sweeps"}.get(kind)
    if top is None or not is_name(name) or "\0" in path or "\\" in path:
        raise HTTPException(404)
    try:
        base = (top / name).resolve(strict=True)
        found = (base / path).resolve(strict=True)
    except (OSError, ValueError, RuntimeError):
        raise HTTPException(404) from None
    # The run's folder may be a link; nothing inside may point outside of it.
    hidden = any(part.startswith(".") for part in Path(path).parts) or not found.is_relative_to(base)
    if hidden or not found.is_file() or found.suffix.lower() not in KINDS or not os.access(found, os.R_OK):
        raise HTTPException(404)
    return found
