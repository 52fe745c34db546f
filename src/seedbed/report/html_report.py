"""`seedbed report`: one run, or a comparison of several, as one self-contained HTML file."""

import datetime
import functools
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from seedbed.config import diff, flat
from seedbed.errors import UserError
from seedbed.report import facts, html_page, journal, notes, run_report, verbs
from seedbed.report.event_text import event_text
from seedbed.report.export import write_file
from seedbed.report.html_page import Chart, Line, Point, bar, card, chart, embedded, folded, pairs, section, table, text
from seedbed.report.tables import config_lines, model_text
from seedbed.track import code, jsonl
from seedbed.track.events import details, is_at_least
from seedbed.track.run import Run, full_name
from seedbed.track.text import clip, duration, format_value, number, one_line, safe, scaled, size

_NUM_SAMPLES = 6
_MAX_EVENTS = 400
# Keys of every row that are no recipe metrics; they are shown elsewhere on the page, or not at all.
_PLAIN = {"step", "items", "epoch", "seconds", "time", "loss", "lr", "memory", "items_per_s", "wait", "mfu", "mfu_measured"}
_MAX_RUNS, _MAX_SMALL = 8, 16
_SMALL: dict[str, Any] = {"width": 480, "height": 200}

Rows = list[dict[str, Any]]


def run_page(run: Run) -> str:
    """The page of one run: results, curves, samples, settings and how to repeat it."""
    config, status, rows, events = run.config_json(), run.status(), run.rows(), run.events()
    parent = journal.open_optional(run.path.parent, config.get("parent"))
    state, samples = code.describe(run.code_json()), [e for e in events if e.get("kind") == "sample"]
    spread = {round(i * (len(samples) - 1) / max(_NUM_SAMPLES - 1, 1)) for i in range(_NUM_SAMPLES)}
    picked = sorted(spread) if samples else []
    models = [model_text(details(event)) for event in events if event.get("kind") == "model"][:1]
    parts = [
        _head(run, config, status),
        html_page.tiles(_numbers(rows, events, status)),
        section("verdict", _verdict(run, parent, status)),
        section("curves", *_curves(rows, events)),
        section("samples", pairs([sample_card(run, samples[i]) for i in reversed(picked)])),
        section("where the time went", _time_use(status)),
        section("what happened", _events_section(events)),
        section("settings", *_settings(config, parent)),
        section("model", *[card(folded("layers, shapes, parameters", f'<pre class="wide">{text(t)}</pre>')) for t in models]),
        section("repeat it", card(f"<pre>{text(run.command())}</pre>"), f"<p class=lead>{text(state)}</p>"),
    ]
    return html_page.page(run.name, parts, footer(run.path.parent))


def chosen(root: Path, words: Sequence[str]) -> list[Run]:
    """The runs that these words name: each by itself, or two as A..B."""
    found: list[Run] = []
    for word in words:
        names = (word,)
        # A..B; names may contain dots, so a run of exactly that name comes first.
        if ".." in word and "/" not in word and not (Path(root) / word).is_dir():
            splits = [(word[:at], word[at + 2 :]) for at in range(len(word)) if word.startswith("..", at)]
            there = [pair for pair in splits if all(name and (Path(root) / name).is_dir() for name in pair)]
            names = (there or splits)[0]
        found += [Run.open(root, name) for name in names]
    if len(found) > _MAX_RUNS:
        raise UserError(f"a page compares {_MAX_RUNS} runs at most, not {len(found)}; leave some out")
    return found


def footer(root: Path) -> str:
    now = datetime.datetime.now().astimezone().isoformat(timespec="minutes")
    written = f"written by seedbed {code.version()} on {now} from the files in {root.name}/"
    return f"{written}; nothing on this page was loaded from elsewhere"


# ---- one run ---------------------------------------------------------------------------------------------------------


def _head(run: Run, config: dict[str, Any], status: dict[str, Any]) -> str:
    word = facts.current_status(run, status)
    about = [full_name(config["recipe"], config["preset"]), str(config.get("created") or "")[:16].replace("T", " ")]
    about += [f"parent {config['parent']}"] if config.get("parent") else []
    about += [f"sweep {config['sweep']}"] if config.get("sweep") else []
    why = f'<p class="why">{text(one_line(config["why"]))}</p>' if config.get("why") else ""
    chip = f'<span class="chip {text(word.split()[0])}">{text(word)}</span>'
    return f'<header><h1>{text(run.name)}{chip}</h1><p class="lead">{text(" · ".join(filter(None, about)))}</p>{why}</header>'


def _numbers(rows: Rows, events: Rows, status: dict[str, Any]) -> dict[str, str]:
    (metric, _), best = facts.evaluations(events), facts.best(events)
    mean, _ = facts.mean_and_sd(facts.last_losses(rows))
    # Total time of the run; without a status, that of its rows.
    clock = status.get("clock")
    known = [v for v in clock.values() if facts.is_number(v)] if isinstance(clock, dict) else []
    seconds = math.fsum(known or [row["seconds"] for row in rows[-1:] if facts.is_number(row.get("seconds"))])
    model: dict[str, Any] = next((e for e in events if e.get("kind") == "model"), {})
    rate, memory = facts.median(rows, "items_per_s"), [r["memory"] for r in rows if facts.is_number(r.get("memory"))]
    step = rows[-1].get("step") if rows else status.get("step")
    last = status.get("last_step")
    return {
        "loss at the end": number(mean) if math.isfinite(mean) else "",
        f"best {metric}": number(best[1]) if best else "",
        "steps" + (f" of {number(last)}" if last and last != step else ""): number(step),
        "time": duration(seconds) if seconds else "",
        "items per second": scaled(rate) if rate is not None else "",
        "parameters": scaled(model["parameters"]) if facts.is_number(model.get("parameters")) else "",
        "memory": size(max(memory)) if memory else "",
    }


def _verdict(run: Run, parent: Run | None, status: dict[str, Any]) -> str:
    parts = [_verdict_lines(run, parent)]
    parts += [f"<p>{text(status['verdict'])}</p>"] if status.get("verdict") else []
    parts += [f"<p class=bad>{text(status['error'])}</p>"] if status.get("error") else []
    for found in notes.conclusions(run.path.parent, run.name):
        parts.append(f"<p><b>Conclusion, {text(found['date'])}:</b> {text(found['text'])}</p>")
    return card(*parts)


def _verdict_lines(run: Run, base: Run | None, name: str = "", metric: str | None = None) -> str:
    title, numbers = journal.verdict(run, base, metric)
    kind = "bad" if title.startswith("negative") else "good" if title.startswith("better") else ""
    return f'<p class="verdict {kind}">{text(name + title)}</p><p>{text(numbers)}</p>'


def _curves(rows: Rows, events: Rows) -> list[str]:
    series = functools.partial(facts.series, rows)
    losses, incidents = series("loss"), [e for e in events if is_at_least("notice", e) and facts.is_number(e.get("step"))]
    marks = [(e["step"], one_line(f"step {e['step']}, {e.get('kind')}: {e.get('what') or ''}")) for e in incidents[:60]]
    metric, points = facts.evaluations(events)
    together = "loss" in str(metric)
    evaluations = Line(points, 1, f"evaluation: {metric}", dots=True)
    first = [Line(losses, 0, faint=True), Line(_smooth(losses), 0, "training loss"), *([evaluations] if together else [])]
    charts = [Chart("loss", first, marks)]
    if points and not together:
        charts.append(Chart(str(metric), [evaluations], marks))
    names = dict.fromkeys(key for row in rows[-50:] for key, value in row.items() if facts.is_number(value))
    families = _families([name for name in names if name not in _PLAIN])
    small = {title: [Line(series(n), colour, label) for n, colour, label in found] for title, found in families.items()}
    small |= {name: [Line(found, 1, dots=True)] for name, found in _more_evaluations(events, metric)[:8]}
    speed = {"lr": "learning rate", "items_per_s": "items per second"}
    small |= {title: [Line(series(name), 7)] for name, title in speed.items()}
    return [*map(chart, charts), pairs([chart(Chart(title, found, **_SMALL)) for title, found in small.items()])]


def _families(names: Sequence[str]) -> dict[str, list[tuple[str, int, str]]]:
    """Curves by title; those that differ by a number only, such as losses of noise levels, share a chart."""
    stems: dict[str, list[str]] = {}
    for name in names:
        stems.setdefault(name.rstrip("0123456789"), []).append(name)
    out: dict[str, list[tuple[str, int, str]]] = {}
    for stem, members in stems.items():
        if len(members) > 2:
            out[stem.rstrip("_./")] = [(name, i, name.removeprefix(stem)) for i, name in enumerate(members)]
        else:
            out |= {name: [(name, 2 + len(out), "")] for name in members}
    return dict(list(out.items())[:_MAX_SMALL])


def _smooth(points: list[Point]) -> list[Point]:
    thin = points[:: max(1, len(points) // 2000)]
    return list(zip([x for x, _ in thin], run_report.smoothed([y for _, y in thin]), strict=True)) if len(thin) > 2 else thin


def _more_evaluations(events: Rows, metric: str | None) -> list[tuple[str, list[Point]]]:
    found: dict[str, list[Point]] = {}
    for event in events:
        if event.get("kind") == "eval" and facts.is_number(event.get("step")):
            for key, value in event.items():
                if facts.is_number(value) and key not in ("step", "time", "seconds", metric):
                    found.setdefault(key, []).append((event["step"], value))
    return list(found.items())


def sample_card(run: Run, event: dict[str, Any], title: str = "") -> str:
    """The sample of one step: text and images."""
    name = title or f"step {number(event.get('step'))}"
    words = clip(str(event.get("text") or ""), 4000)
    files = [str(file) for file in event.get("files") or []][:6]
    shown = [embedded(run.path, file, f"{name} · {Path(file).name}") for file in files]
    pictures = f'<div class="shots">{"".join(shown)}</div>' if shown else ""
    return card(f"<h3>{text(name)}</h3>", pictures, f"<pre>{text(words)}</pre>" if words else "")


def _time_use(status: dict[str, Any]) -> str:
    clock = status.get("clock")
    parts = [(k, float(v)) for k, v in clock.items() if facts.is_number(v) and v > 0] if isinstance(clock, dict) else []
    if not parts:
        return ""
    total = math.fsum(seconds for _, seconds in parts)
    shares = [(name, seconds, f"{duration(seconds)}, {seconds / total:.1%}") for name, seconds in parts]
    return card(bar(shares), html_page.key([(i, f"{name} {words}") for i, (name, _, words) in enumerate(shares)]))


def _events_section(events: Rows) -> str:
    listed = [e for e in events if e.get("kind") not in ("model", "sample", "eval")]
    incidents = [e for e in listed if is_at_least("notice", e)]
    cells = [[(number(e.get("step")), str(e.get("kind")), event_text(e)) for e in found] for found in (incidents[:40], listed)]
    head, rest = (table(("step", "what", ""), rows[:_MAX_EVENTS], numbers=(0,), keys=(1,)) for rows in cells)
    quiet = "<p class=lead>No spikes, roll-backs or alarms.</p>" if not incidents else ""
    return card(quiet, head, folded(f"all {len(listed)} events", rest))


def _settings(config: dict[str, Any], parent: Run | None) -> list[str]:
    changes, nothing = config.get("changes") or {}, "<p class=lead>nothing</p>"
    changed = table(("key", "value"), [(k, format_value(v)) for k, v in changes.items()])
    parts = [f"<h3>changed against the preset</h3>{changed or nothing}"]
    if parent:
        moved = diff(flat(parent.config_json()["config"]), flat(config["config"]))
        rows = [(key, format_value(old), format_value(new)) for key, (old, new) in moved.items()]
        header = ("key", parent.name, "this run")
        parts.append(f"<h3>changed against {text(parent.name)}</h3>{table(header, rows) or nothing}")
    settings = "\n".join(config_lines(flat(config["config"]), {"*": changes}, 110))
    return [pairs([card(part) for part in parts]), card(folded("all settings", f'<pre class="wide">{text(settings)}</pre>'))]


# ---- several runs ----------------------------------------------------------------------------------------------------


def compare_page(runs: Sequence[Run], metric: str | None = None) -> str:
    """Comparison of runs: settings that differ, results, and whether the difference exceeds the noise."""
    names = [run.name for run in runs]
    configs = [run.config_json() for run in runs]
    title = " against ".join(names) if len(runs) == 2 else f"{len(runs)} runs"
    reasons = [(name, one_line(c["why"])) for name, c in zip(names, configs, strict=True) if c.get("why")]
    why = "".join(f"<p class=lead>{text(name)}: {text(reason)}</p>" for name, reason in reasons)
    shown = [verbs.results_in_words(verbs.results(run)) for run in runs]
    results = [(key, *(found[key] for found in shown)) for key in shown[0]]
    parts = [
        f"<header><h1>{text(title)}</h1>{why}</header>",
        section("verdict", *[card(_verdict_lines(other, runs[0], f"{other.name}: ", metric)) for other in runs[1:]]),
        section("curves", *overlays(runs)),
        section("what came of it", card(table(("", *names), results, keys=()))),
        section("what differs", card(_differences(names, configs))),
        section("last samples", pairs([last_sample(run) for run in runs])),
        section("repeat them", card(*(f"<pre>{text(run.command())}</pre>" for run in runs))),
    ]
    return html_page.page(title, parts, footer(runs[0].path.parent))


def overlays(runs: Sequence[Run]) -> list[str]:
    losses, evaluations, metrics = [], [], []
    for index, run in enumerate(runs):
        raw = facts.series(run.rows(), "loss")
        losses += [*([Line(raw, index, faint=True)] if len(runs) < 4 else []), Line(_smooth(raw), index, run.name)]
        metric, points = facts.evaluations(run.events())
        evaluations.append(Line(points, index, run.name, dots=True))
        metrics += [metric] if metric else []
    name = metrics[0] if len(set(metrics)) == 1 else "evaluation"
    return [chart(Chart("training loss", losses)), chart(Chart(f"{name}, held out", evaluations))]


def _differences(names: Sequence[str], configs: Sequence[dict[str, Any]]) -> str:
    flats = [{"preset": full_name(c["recipe"], c["preset"]), **flat(c["config"])} for c in configs]
    keys = dict.fromkeys(key for found in flats for key in found)
    apart = [key for key in keys if len({jsonl.encode({"v": found.get(key)}) for found in flats}) > 1]
    rows = [(key, *(clip(format_value(found.get(key)), 60) for found in flats)) for key in apart]
    return table(("key", *names), rows) or "<p class=lead>Their settings are all equal.</p>"


def last_sample(run: Run) -> str:
    last = next((e for e in reversed(run.events()) if e.get("kind") == "sample"), None)
    return sample_card(run, last, f"{run.name} at step {number(last.get('step'))}") if last else ""


# Page and text of the sweep of that name by a metric, or None; passed in, since sweeps are not known here.
SweepPage = Callable[[Path, str, str | None], tuple[str, str] | None]


def report_text(runs: Sequence[Run], metric: str | None = None) -> str:
    parts = []
    for run in runs:
        parts += [run.name, *(f"  {line}" for line in run_report.fact_lines(run, run.rows(), run.events()))]
    for other in runs[1:]:
        parts.append(f"{other.name} against {runs[0].name}: " + "; ".join(journal.verdict(other, runs[0], metric)))
    return "\n".join(parts)


def report_runs(
    root: Path, names: Sequence[str], *, as_html: bool, out: Path | None, open_sweep: SweepPage, metric: str | None = None
) -> int:
    """Write one HTML file, or print the facts."""
    if out and not as_html:
        raise UserError("--out says where the page goes; add --html")
    sweep = open_sweep(root, Path(names[0]).name, metric) if len(names) == 1 and not (Path(root) / names[0]).is_dir() else None
    if sweep:
        title, (page, content) = Path(names[0]).name, sweep
    else:
        runs = chosen(root, names)
        title = "..".join(run.name for run in runs)
        page = (compare_page(runs, metric) if len(runs) > 1 else run_page(runs[0])) if as_html else ""
        content = "" if as_html else report_text(runs, metric)
    if not as_html:
        print(safe(content))
        return 0
    out = out or Path(f"{title[:120]}.html")
    if out.is_dir():
        raise UserError(f"{out} is a folder; name a file with --out")
    write_file(out, page)
    print(f"{out}  ({len(page) / 1e6:.1f} MB; opens in any browser, offline)")
    return 0
