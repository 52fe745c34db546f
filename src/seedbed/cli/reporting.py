"""The verbs `top`, `watch`, `report`, `runs export` and `runs mirror`."""

import argparse
from pathlib import Path

from seedbed.cli.parser import Parser, Verb, registrar
from seedbed.errors import UserError

VERBS: dict[str, Verb] = {}
verb = registrar(VERBS)

# ---- in the terminal -------------------------------------------------------------------------------------------------


def _once(parser: Parser) -> None:
    parser.add_argument("--once", action="store_true", help="print once and exit")


@verb("top", "[--once]", "running runs: speed and time left", _once)
def _top(given: argparse.Namespace) -> int:
    from seedbed.report import top

    return top.top(given.runs, given.once, given.json)


def _watch_arguments(parser: Parser) -> None:
    parser.add_argument("name", metavar="RUN")
    parser.add_argument("key", nargs="?", default="loss", metavar="KEY", help="a metric of its rows or evaluations")
    parser.add_argument("--log", action="store_true", help="a logarithmic scale")
    _once(parser)


@verb("watch", "RUN [KEY] [--log] [--once]", "live curve of a run in the terminal", _watch_arguments)
def _watch(given: argparse.Namespace) -> int:
    from seedbed.report import top

    return top.watch(given.runs, given.name, given.key, log=given.log, once=given.once)


# ---- for others ------------------------------------------------------------------------------------------------------


def _report_arguments(parser: Parser) -> None:
    parser.add_argument("names", nargs="+", metavar="RUN|SWEEP|A..B")
    parser.add_argument("--html", action="store_true", help="write one self-contained HTML file")
    parser.add_argument("--out", type=Path, metavar="FILE", help="the HTML file; default: NAME.html")


@verb("report", "RUN|SWEEP|A..B --html [--out FILE]", "a run, a sweep or a comparison as one HTML file", _report_arguments)
def _report(given: argparse.Namespace) -> int:
    from seedbed.report import html_report

    return html_report.report_runs(given.runs, given.names, as_html=given.html, out=given.out, open_sweep=_sweep_page)


def _sweep_page(root: Path, name: str) -> tuple[str, str] | None:
    """Page and text of the sweep of that name, if there is one."""
    from seedbed.tune.sweep import folder, page
    from seedbed.tune.sweep import report as reports

    if not (folder.folder_of(root) / name / "sweep.json").is_file():
        return None
    sweep = folder.Sweep(root, name)
    return page.sweep_page(sweep), "\n".join(reports.lines_of(reports.read_report(sweep)))


def _export_arguments(parser: Parser) -> None:
    parser.add_argument("names", nargs="*", metavar="RUN")
    parser.add_argument("--csv", action="store_true", help="CSV; printed unless --out names a file")
    parser.add_argument("--parquet", action="store_true", help="Parquet, for pandas, polars, duckdb")
    parser.add_argument("--events", action="store_true", help="the events of the runs instead of their rows")
    parser.add_argument("--table", action="store_true", help="one row per run: settings and results")
    parser.add_argument("--out", type=Path, metavar="FILE")


@verb("runs export", "[RUN ...] --csv|--parquet [--out FILE]", "rows of runs, or a table of all runs", _export_arguments)
def _runs_export(given: argparse.Namespace) -> int:
    from seedbed.report import export

    if given.csv == given.parquet:
        raise UserError("choose one of --csv and --parquet")
    if given.events and given.table:
        raise UserError("choose one of --events and --table")
    what = "events" if given.events else "runs" if given.table or not given.names else "rows"
    return export.export(given.runs, given.names, kind="csv" if given.csv else "parquet", what=what, out=given.out)


def _mirror_arguments(parser: Parser) -> None:
    parser.add_argument("names", nargs="+", metavar="RUN")
    parser.add_argument("--to", required=True, metavar="NAME,...", help="wandb, tensorboard, trackio, mlflow; +checkpoints")


@verb("runs mirror", "RUN ... --to NAME", "copy runs to W&B, TensorBoard, trackio or MLflow after the fact", _mirror_arguments)
def _runs_mirror(given: argparse.Namespace) -> int:
    from seedbed.report.mirrors import choose
    from seedbed.track.run import Run

    choices = choose.read(given.to)
    for run in [Run.open(given.runs, name) for name in given.names]:
        choose.send(run, choices, print)
    return 0
