"""The workbench: routes of pages and JSON endpoints. Everything but notes is read-only."""

import contextlib
import functools
import importlib.util
import json
import math
import os
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import anyio
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import FileResponse, Response
from starlette.routing import BaseRoute, Route, WebSocketRoute

from seedbed.errors import UserError
from seedbed.report import notes
from seedbed.report.html_page import KINDS
from seedbed.serve import views
from seedbed.serve.live import Live
from seedbed.serve.messages import Json
from seedbed.serve.play import play_routes
from seedbed.serve.playground import Playground
from seedbed.serve.run_index import RunIndex, is_name

STATIC = Path(__file__).parent / "static"
MAX_COMPARED, MAX_KEYS = 24, 40
_KINDS = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}


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
        *(Route(path, _page) for path in ("/", "/journal", "/compare")),
        *(Route(f"/{kind}/{{name}}", functools.partial(_named_page, index, kind)) for kind in ("run", "sweep", "playground")),
        Route("/api/runs", _reading(lambda request: views.run_list(index))),
        Route("/api/runs/{name}", _of_run(index, views.run_page)),
        Route("/api/runs/{name}/samples", _of_run(index, views.samples)),
        Route("/api/runs/{name}/console", _of_run(index, views.console)),
        Route("/api/runs/{name}/series", _reading(lambda request: _series(index, request))),
        Route("/api/runs/{name}/note", functools.partial(_note, index), methods=["POST"]),
        Route("/api/compare", _reading(lambda request: views.compare(index, _names(index, request)))),
        Route("/api/sweeps/{name}", _reading(lambda request: _sweep(index, request))),
        Route("/api/journal", _reading(lambda request: views.journal_page(index))),
        Route("/files/{kind}/{name}/{path:path}", functools.partial(_file, index)),
        Route("/static/plotly.js", _plotly),
        Route("/static/{path:path}", _static),
        WebSocketRoute("/api/live", live.page),
        WebSocketRoute("/api/runs/{name}/playground", playground.page),
        *play_routes(root),
    ]
    return Starlette(routes=routes, lifespan=lifespan, exception_handlers={HTTPException: _missing, UserError: _explained})


# ---- pages -----------------------------------------------------------------------------------------------------------


async def _page(request: Request, status: int = 200) -> Response:
    return FileResponse(STATIC / "index.html", status, media_type="text/html")


async def _named_page(index: RunIndex, kind: str, request: Request) -> Response:
    """The page of a run or a sweep, with status 404 when it does not exist."""
    name = request.path_params["name"]
    top = index.root.parent / "sweeps" if kind == "sweep" else index.root
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


# ---- JSON -----------------------------------------------------------------------------------------------------------


def _reading(make: Callable[[Request], Any]) -> Callable[[Request], Any]:
    """A JSON endpoint whose values are computed on a thread; a UserError becomes a 404."""

    async def answer(request: Request) -> Response:
        return Json(await run_in_threadpool(make, request))

    return answer


def _of_run(index: RunIndex, view: Callable[[RunIndex, str], Any]) -> Callable[[Request], Any]:
    return _reading(lambda request: view(index, request.path_params["name"]))


def _series(index: RunIndex, request: Request) -> dict[str, Any]:
    given = request.query_params
    axis = given.get("x", "step")
    if axis not in views.AXES:
        raise UserError(f"x is one of {', '.join(views.AXES)}")
    num, weight = int(_number(given, "points", 800, 10, views.MAX_POINTS)), _number(given, "smooth", 0.0, 0.0, 0.9999)
    span = _number(given, "low", -math.inf, -math.inf, math.inf), _number(given, "high", math.inf, -math.inf, math.inf)
    keys = given.getlist("key")[:MAX_KEYS]
    return views.series(index, request.path_params["name"], keys, axis, num, weight, span)


def _number(given: Any, key: str, default: float, low: float, high: float) -> float:
    try:
        value = float(given.get(key, default))
    except ValueError:
        raise UserError(f"{key} is a number") from None
    if not low <= value <= high:
        raise UserError(f"{key} is between {low:g} and {high:g}")
    return value


def _names(index: RunIndex, request: Request) -> list[str]:
    names = list(dict.fromkeys(request.query_params.getlist("run")))
    if not names:
        raise UserError("name the runs to compare")
    if len(names) > MAX_COMPARED:
        raise UserError(f"at most {MAX_COMPARED} runs are compared at once")
    return names


def _sweep(index: RunIndex, request: Request) -> dict[str, Any]:
    name = request.path_params["name"]
    if not is_name(name):
        raise HTTPException(404)
    return views.sweep_page(index, name)


async def _note(index: RunIndex, request: Request) -> Response:
    """Add a conclusion on a run or sweep to the journal, or replace one."""
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


# ---- errors ----------------------------------------------------------------------------------------------------------


async def _missing(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return Json({"error": error.detail}, error.status_code)


async def _explained(request: Request, error: Exception) -> Response:
    return Json({"error": str(error)}, 404 if request.method == "GET" else 409)


# Other types are not served: an HTML or script file in a run folder must not run with our origin.
KINDS = {
    **KINDS,
    ".wav": "audio/wav",
    **dict.fromkeys((".txt", ".md", ".log", ".json", ".jsonl", ".csv", ".patch"), "text/plain; charset=utf-8"),
}


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
    hidden = any(part.startswith(".") for part in Path(path).parts)
    if hidden or not found.is_relative_to(base) or not found.is_file() or found.suffix.lower() not in KINDS:
        raise HTTPException(404)
    if not os.access(found, os.R_OK):
        raise HTTPException(404)
    return found
