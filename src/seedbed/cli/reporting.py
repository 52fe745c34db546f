"""The verbs `top`, `watch`, `report`, `runs export`, `runs mirror` and `serve`."""

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path

from seedbed.cli.parser import Act, Parser, argument, declares, number, verb
from seedbed.errors import UserError

_once = argument("--once", action="store_true", help="print once and exit")


@verb("top", "[--once]", "running runs: speed and time left")
@_once
def _top(given: argparse.Namespace) -> int:
    from seedbed.report import top

    return top.top(given.runs, given.once, given.json)


@verb("watch", "RUN [KEY] [--log] [--once]", "live curve of a run in the terminal")
@argument("name", metavar="RUN")
@argument("key", nargs="?", default="loss", metavar="KEY", help="a metric of its rows or evaluations")
@argument("--log", action="store_true", help="a logarithmic scale")
@_once
def _watch(given: argparse.Namespace) -> int:
    from seedbed.report import top

    return top.watch(given.runs, given.name, given.key, log=given.log, once=given.once)


@verb("report", "RUN|SWEEP|A..B --html [--out FILE]", "a run, a sweep or a comparison as one HTML file")
@argument("names", nargs="+", metavar="RUN|SWEEP|A..B")
@argument("--html", action="store_true", help="write one self-contained HTML file")
@argument("--out", type=Path, metavar="FILE", help="the HTML file; default: NAME.html")
@argument("--metric", metavar="NAME", help="compare and rank by this metric; default: the one that decides `best`")
def _report(given: argparse.Namespace) -> int:
    from seedbed.report import html_report

    how = {"as_html": given.html, "out": given.out, "metric": given.metric}
    return html_report.report_runs(given.runs, given.names, **how, open_sweep=_sweep_page)


def _sweep_page(root: Path, name: str, metric: str | None) -> tuple[str, str] | None:
    """Page and text of the sweep of that name, if there is one."""
    from seedbed.tune.sweep import folder
    from seedbed.tune.sweep import report as reports

    if not (folder.folder_of(root) / name / "sweep.json").is_file():
        return None
    sweep = folder.Sweep(root, name)
    found = reports.read_report(sweep, metric)
    return reports.sweep_page(found), "\n".join(reports.lines_of(found))


@verb("runs export", "[RUN ...] --csv|--parquet [--out FILE]", "rows of runs, or a table of all runs")
@argument("names", nargs="*", metavar="RUN")
@argument("--csv", action="store_true", help="CSV; printed unless --out names a file")
@argument("--parquet", action="store_true", help="Parquet, for pandas, polars, duckdb")
@argument("--events", action="store_true", help="the events of the runs instead of their rows")
@argument("--table", action="store_true", help="one row per run: settings and results")
@argument("--out", type=Path, metavar="FILE")
def _runs_export(given: argparse.Namespace) -> int:
    from seedbed.report import export

    if given.csv == given.parquet:
        raise UserError("choose one of --csv and --parquet")
    if given.events and given.table:
        raise UserError("choose one of --events and --table")
    what = "events" if given.events else "runs" if given.table or not given.names else "rows"
    return export.export(given.runs, given.names, kind="csv" if given.csv else "parquet", what=what, out=given.out)


@verb("runs mirror", "RUN ... --to NAME", "copy runs to W&B, TensorBoard, trackio or MLflow after the fact")
@argument("names", nargs="+", metavar="RUN")
@argument("--to", required=True, metavar="NAME,...", help="wandb, tensorboard, trackio, mlflow; +checkpoints")
def _runs_mirror(given: argparse.Namespace) -> int:
    from seedbed.report.mirrors import choose
    from seedbed.track.run import Run

    choices = choose.read(given.to)
    for run in [Run.open(given.runs, name) for name in given.names]:
        choose.send(run, choices, print)
    return 0


def server_arguments(port: int) -> Callable[[Act], Act]:
    def add(parser: Parser) -> None:
        parser.add_argument(
            "--port", type=number(int, 0, 65535), default=port, metavar="N", help=f"default {port}; 0: any free port"
        )
        host_help = "address to listen on, for other machines; needs --token"
        parser.add_argument("--host", default="127.0.0.1", metavar="H", help=host_help)
        parser.add_argument("--token", action="store_true", help="require the token in the address for every request")
        parser.add_argument("--open", action="store_true", help="open the page in a browser")

    return declares(add)


def open_if_asked(given: argparse.Namespace, address: str) -> None:
    if given.open:
        import webbrowser

        webbrowser.open(address)


@verb("serve", "[--port N] [--open]", "the workbench: live web pages of all runs")
@server_arguments(8765)
def _serve(given: argparse.Namespace) -> int:
    from seedbed.serve.server import needs, serve_app

    needs()
    from seedbed.serve.app import workbench

    then = partial(open_if_asked, given)
    return serve_app(workbench(given.runs), given.host, given.port, locked=given.token, then=then)
