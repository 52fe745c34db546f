"""`seedbed report`: resolves the names of runs and sweeps, and writes the page or prints the facts."""

from collections.abc import Callable, Sequence
from pathlib import Path

from seedbed.errors import UserError
from seedbed.report import html_report, journal, run_report
from seedbed.track import files
from seedbed.track.run import Run
from seedbed.track.text import safe

# Page and text of the sweep of that name, or None; passed in, since sweeps are not known here.
SweepPage = Callable[[Path, str], tuple[str, str] | None]


def report_text(runs: Sequence[Run]) -> str:
    """The facts of runs, as in report.md; later runs are compared with the first."""
    parts = []
    for run in runs:
        parts += [run.name, *(f"  {line}" for line in run_report.fact_lines(run, run.rows(), run.events()))]
    for other in runs[1:]:
        parts.append(f"{other.name} against {runs[0].name}: " + "; ".join(journal.verdict(other, runs[0])))
    return "\n".join(parts)


def report_runs(root: Path, names: Sequence[str], *, as_html: bool, out: Path | None, open_sweep: SweepPage) -> int:
    """Write one HTML file, or print the facts."""
    if out and not as_html:
        raise UserError("--out says where the page goes; add --html")
    sweep = open_sweep(root, Path(names[0]).name) if len(names) == 1 and not (Path(root) / names[0]).is_dir() else None
    if sweep:
        title, (page, content) = Path(names[0]).name, sweep
    else:
        runs = html_report.chosen(root, names)
        title = "..".join(run.name for run in runs)
        page = (html_report.compare_page(runs) if len(runs) > 1 else html_report.run_page(runs[0])) if as_html else ""
        content = "" if as_html else report_text(runs)
    if not as_html:
        print(safe(content))
        return 0
    return _write(page, out or Path(f"{title[:120]}.html"))


def _write(page: str, out: Path) -> int:
    if out.is_dir():
        raise UserError(f"{out} is a folder; name a file with --out")
    try:
        files.write_atomic(out, page)
    except OSError as error:
        raise UserError(f"{out} cannot be written ({error.strerror})") from None
    print(f"{out}  ({len(page) / 1e6:.1f} MB; opens in any browser, offline)")
    return 0
