"""A sweep as one HTML file: heat-map, ranked settings, curves of the best, every trial."""

import tempfile
from pathlib import Path

from seedbed.report import html_page, html_report
from seedbed.report.html_page import card, embedded, folded, pairs, section, table
from seedbed.report.svg_charts import text
from seedbed.track.run import Run
from seedbed.track.text import format_value, number, one_line
from seedbed.tune.sweep.folder import Sweep
from seedbed.tune.sweep.grid import words
from seedbed.tune.sweep.report import Report, cell_rows, draw_map, read_report, trial_rank, trial_rows

_NUM_CURVES = 6


def sweep_page(sweep: Sweep) -> str:
    """The current state of a sweep."""
    report = read_report(sweep)
    best = report.best
    numbers = {
        f"best {report.metric}": number(best.mean) if best else "",
        "trials": str(len(report.statuses)),
        **{state: str(count) for state, count in report.counts.items()},
    }
    notes = [f"best: {' '.join(words(best.settings))}"] if best else []
    notes += [*report.notes(), f"{report.metric}: lower is better; a trial counts with its best evaluation"]
    repeat = [sweep.command(), *([report.command()] if report.command() else [])]
    parts = [
        _head(sweep),
        html_page.tiles(numbers),
        section("what it says", card(*(f"<p>{text(note)}</p>" for note in notes))),
        section("map", _map(report)),
        section("settings, best first", card(table(*cell_rows(report, 40), keys=()))),
        section("curves of the best trials", *_curves(report)),
        section("trials", card(_trials(report))),
        section("repeat it", card(*(f"<pre>{text(command)}</pre>" for command in repeat))),
    ]
    return html_page.page(sweep.name, parts, html_report.footer(sweep.root))


def _head(sweep: Sweep) -> str:
    why = sweep.facts.get("why")
    reason = f'<p class="why">{text(one_line(str(why)))}</p>' if why else ""
    axes = ", ".join(f"{axis.key} = {', '.join(map(format_value, axis.values))}" for axis in sweep.grid.axes)
    about = " · ".join(filter(None, [sweep.title(), str(sweep.facts.get("created"))[:16].replace("T", " "), axes]))
    return f'<header><h1>{text(sweep.name)}</h1><p class="lead">{text(about)}</p>{reason}</header>'


def _map(report: Report) -> str:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "heatmap.png"
        return card(embedded(Path(folder), path.name, f"{report.metric}, lower is better")) if draw_map(report, path) else ""


def _curves(report: Report) -> list[str]:
    order = sorted(report.statuses, key=trial_rank)[:_NUM_CURVES]
    runs = [run for s in order if (run := Run(report.sweep.root / s.run)).path.is_dir()]
    if not runs:
        return []
    last = [html_report.last_sample(run) for run in runs[:2]]
    return [*html_report.overlays(runs), pairs(last)]


def _trials(report: Report) -> str:
    header, rows, numbers = trial_rows(report)
    shown = table(header, rows, numbers)
    return shown if len(rows) <= 12 else folded(f"all {len(rows)} trials", shown)
