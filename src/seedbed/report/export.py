"""`seedbed runs export`: rows of chosen runs, or a table of all runs, as CSV or Parquet for pandas and spreadsheets."""

import csv
import io
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from seedbed.config import flat
from seedbed.errors import UserError
from seedbed.report import facts, summaries
from seedbed.track import files, jsonl
from seedbed.track.run import Run
from seedbed.track.run_names import run_names

Table = list[dict[str, Any]]


def export(root: Path, names: Sequence[str], *, kind: str, what: str, out: Path | None) -> int:
    """Write the table to a file, or CSV to standard output."""
    runs = [Run.open(root, name) for name in (names or run_names(root))]
    if not runs:
        raise UserError(f"{root} holds no runs yet; start one with: seedbed train RECIPE/PRESET")
    found = [row for run in runs for row in _TABLES[what](run)]
    if not found:
        raise UserError(f"{', '.join(run.name for run in runs[:3])}: no {what} have been written yet")
    data = as_csv(found).encode() if kind == "csv" else as_parquet(found)
    if out is None:
        if kind != "csv":
            raise UserError("a Parquet file is no text for a screen; name a file with --out")
        sys.stdout.write(data.decode())
        return 0
    write_file(out, data)
    print(f"{out}: {len(found)} lines, {len(_columns(found))} columns")
    return 0


def write_file(out: Path, data: bytes | str) -> None:
    try:
        files.write_atomic(out, data)
    except OSError as error:
        raise UserError(f"{out} cannot be written ({error.strerror})") from None


def row_of(run: Run) -> dict[str, Any]:
    """One row per run with its settings (config.KEY) and results."""
    short = summaries.summary(run)
    short.pop("path", None)
    config = run.config_json() if short["status"] != "damaged" else {"config": {}}
    saved = run.status()
    clock = saved["clock"] if isinstance(saved.get("clock"), dict) else {}
    metric, points = facts.evaluations(run.events())
    about = {"hash": config.get("hash"), "metric": metric, "last": points[-1][1] if points else None}
    seconds, settings = flat({"seconds": clock}), flat({"config": config["config"]})
    return {**short, **about, **seconds, "verdict": saved.get("verdict"), **settings}


# Log points and events have the run's name in front, and nested numbers under dotted names.
_TABLES = {
    "rows": lambda run: [{"run": run.name, **flat(row)} for row in run.rows()],
    "events": lambda run: [{"run": run.name, **flat(event)} for event in run.events()],
    "runs": lambda run: [row_of(run)],
}


def _columns(found: Table) -> list[str]:
    return list(dict.fromkeys(key for row in found for key in row))


def _plain(value: Any) -> Any:
    return jsonl.encode({"": value}).decode()[4:-2] if isinstance(value, list | dict) else value


def as_csv(found: Table) -> str:
    """CSV text with full precision; missing values are empty."""
    out = io.StringIO()
    writer = csv.DictWriter(out, _columns(found), restval="", lineterminator="\n")
    writer.writeheader()
    for row in found:
        writer.writerow({key: "" if value is None else _plain(value) for key, value in row.items()})
    return out.getvalue()


def as_parquet(found: Table) -> bytes:
    """Parquet bytes; a column of mixed types becomes text."""
    try:
        import pyarrow as arrow
        import pyarrow.parquet as parquet
    except ImportError:
        raise UserError('Parquet needs a package that is not installed: pip install "seedbed[parquet]"') from None
    columns = {name: _uniform([_plain(row.get(name)) for row in found]) for name in _columns(found)}
    out = io.BytesIO()
    parquet.write_table(arrow.table(columns), out)
    return out.getvalue()


def _uniform(values: list[Any]) -> list[Any]:
    kinds = {type(value) for value in values if value is not None}
    if len(kinds) <= 1:
        return values
    convert = float if kinds <= {int, float} else str
    return [None if value is None else convert(value) for value in values]
