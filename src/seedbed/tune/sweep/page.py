"""A sweep as one HTML file: heat-map, ranked settings, curves of the best, every trial."""

import tempfile
from pathlib import Path

from seedbed.report import html_page, html_report
from seedbed.report.html_page import card, embedded, folded, pairs, section, table
from seedbed.report.svg_charts import text
from seedbed.track.run import Run
from seedbed.track.text import clip, format_value, number, one_line
from seedbed.tune.sweep.folder import Sweep
from seedbed.tune.sweep.report import Report, cell_words, draw_map, read_report, trial_cells, trial_rank

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
    repeat = [sweep.command(), *([report.command()] if report.command() else [])]
    parts = [
        _head(sweep),
        html_page.tiles(numbers),
        section("what it says", card(*(f"<p>{text(note)}</p>" for note in _notes(report)))),
        section("map", _map(report)),
        section("settings, best first", card(_cells(report))),
        section("curves of the best trials", *_curves(report)),
        section("trials", card(_trials(report))),
        section("repeat it", card(*(f"<pre>{text(words)}</pre>" for words in repeat))),
    ]
    return html_page.page(sweep.name, parts, html_report.footer(sweep.root))


def _head(sweep: Sweep) -> str:
    why = sweep.facts.get("why")
    reason = f'<p class="why">{text(one_line(str(why)))}</p>' if why else ""
    axes = ", ".join(f"{axis.key} = {', '.join(map(format_value, axis.values))}" for axis in sweep.grid.axes)
    about = " · ".join(filter(None, [sweep.title(), str(sweep.facts.get("created"))[:16].replace("T", " "), axes]))
    return f'<header><h1>{text(sweep.name)}</h1><p class="lead">{text(about)}</p>{reason}</header>'


def _notes(report: Report) -> list[str]:
    best = [f"best: {' '.join(f'{k}={format_value(v)}' for k, v in report.best.settings.items())}"] if report.best else []
    return [*best, *report.notes(), f"{report.metric}: lower is better; a trial counts with its best evaluation"]


def _map(report: Report) -> str:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "heatmap.png"
        return card(embedded(Path(folder), path.name, f"{report.metric}, lower is better")) if draw_map(report, path) else ""


def _cells(report: Report) -> str:
    keys = list(dict.fromkeys(key for cell in report.cells for key in cell.settings))
    header = [*keys, f"{report.metric}, mean", "sd", "min .. max", "seeds", ""]
    rows = [[*(clip(format_value(cell.settings.get(key)), 40) for key in keys), *cell_words(cell)] for cell in report.cells]
    return table(header, rows, numbers=range(len(keys), len(keys) + 4), keys=())


def _curves(report: Report) -> list[str]:
    order = sorted(report.statuses, key=trial_rank)[:_NUM_CURVES]
    runs = [run for s in order if (run := Run(report.sweep.root / s.run)).path.is_dir()]
    if not runs:
        return []
    last = [html_report.last_sample(run) for run in runs[:2]]
    return [*html_report.overlays(runs), pairs(last)]


def _trials(report: Report) -> str:
    order = sorted(report.statuses, key=trial_rank)
    keys = list(dict.fromkeys(key for s in order for key in s.trial.settings))
    header = ["trial", *keys, "state", "step", "loss", report.metric, ""]
    rows = [trial_cells(s, keys) for s in order]
    shown = table(header, rows, numbers=range(len(keys) + 2, len(keys) + 5))
    return shown if len(rows) <= 12 else folded(f"all {len(rows)} trials", shown)
