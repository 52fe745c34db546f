"""Pages to share: one file that loads nothing and runs nothing, whatever strangers wrote into the run; exports that read back."""

import csv
import html.parser
import io
import json
from pathlib import Path
from typing import Any

import pytest
import sweep_samples
from PIL import Image

from seedbed.cli import main
from seedbed.errors import UserError
from seedbed.report import export, html_page, html_report
from seedbed.track.run import Run

EVIL = "<script>alert(1)</script><img src=x onerror=alert(2)>\"'&\x1b[31m"


def a_run(root: Path, name: str, rows: int = 40, shift: float = 0.0, **config: Any) -> Run:
    """A run folder as a finished run leaves it, made by hand."""
    path = root / name
    (path / "samples" / "step-000020").mkdir(parents=True)
    Image.new("RGB", (8, 8), (200, 30, 30)).save(path / "samples" / "step-000020" / "grid.png")
    settings = {"steps": rows, "optim": {"lr": 0.01, "kind": "adamw"}, "shape": [1, 2]}
    facts = {"recipe": "toy", "preset": "toy", "config": settings, "changes": {"steps": rows}, "why": "to see", "hash": "abc"}
    (path / "config.json").write_text(json.dumps({**facts, "created": "2026-03-01T10:00:00+00:00", **config}))
    lines = [
        {"step": i, "loss": 3.0 / i + shift, "lr": 0.01, "lrs": {"all": 0.01}, "items_per_s": 100.0} for i in range(1, rows + 1)
    ]
    (path / "rows.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"step": 41, "lo')
    events = [
        {"step": 0, "kind": "start", "device": "cpu"},
        {"step": 20, "kind": "eval", "error": 0.5 + shift, "weights": "live", "time": 1772359200.0},
        {"step": 20, "kind": "sample", "text": "once upon a time", "files": ["samples/step-000020/grid.png"]},
        {"step": 30, "kind": "spike", "what": "loss left its band", "answer": "warn"},
    ]
    (path / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    status = {"status": "done", "step": rows, "last_step": rows, "clock": {"train": 10.0, "eval": 2.0}, "verdict": "bound by joy"}
    (path / "status.json").write_text(json.dumps(status))
    return Run(path)


def with_seeds(root: Path, name: str) -> Run:
    """A run, and two more of it with other seeds."""
    settings = {"steps": 40, "optim": {"lr": 0.01, "kind": "adamw"}, "shape": [1, 2]}
    for seed in (1, 2):
        a_run(root, f"{name}-seed-{seed}", shift=0.01 * seed, config={**settings, "seed": seed})
    return a_run(root, name)


class Reader(html.parser.HTMLParser):
    """Every tag and attribute of a page, and the text between them."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str]] = []
        self.text = ""
        self.open: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]
        if tag not in ("meta", "img", "i"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]

    def handle_endtag(self, tag: str) -> None:
        if tag != "i":
            assert self.open.pop() == tag, f"</{tag}> closes nothing"

    def handle_data(self, data: str) -> None:
        self.text += data


ALLOWED = {
    "html", "head", "meta", "title", "style", "body", "main", "header", "footer", "section", "h1", "h2", "h3", "p", "b", "i",
    "span", "div", "ul", "li", "table", "tr", "th", "td", "pre", "details", "summary", "figure", "figcaption", "img", "video",
    "svg", "path", "text", "circle", "rect",
}  # fmt: skip


def assert_harmless(page: str) -> Reader:
    """Only the tags we write, balanced; no event handlers; nothing that would be fetched."""
    read = Reader(page)
    assert set(read.tags) <= ALLOWED, set(read.tags) - ALLOWED
    assert not read.open
    assert not [name for name, _ in read.attributes if name.startswith("on")]
    for name, value in read.attributes:
        assert name not in ("href", "action", "srcset", "data", "style", "formaction")
        assert name != "src" or value.startswith(("data:image/", "data:video/"))
    assert "\x1b" not in page
    assert "default-src 'none'" in page
    return read


def test_run_page_shows_the_content_of_the_folder(tmp_path: Path):
    read = assert_harmless(html_report.run_page(a_run(tmp_path, "one")))
    for words in (
        "one",
        "to see",
        "bound by joy",
        "once upon a time",
        "loss left its band",
        "optim",
        "seedbed train toy/toy steps=40",
    ):
        assert words in read.text, words
    assert next(value for name, value in read.attributes if name == "src").startswith("data:image/png;base64,")
    assert "svg" in read.tags


def test_comparison_page_shows_differences(tmp_path: Path):
    one = with_seeds(tmp_path, "one")
    other = a_run(tmp_path, "other", shift=0.7, config={"steps": 40, "optim": {"lr": 0.03, "kind": "adamw"}, "shape": [1, 2]})
    read = assert_harmless(html_report.compare_page([one, other]))
    for words in ("negative result: worse than one", "outside the noise band", "optim.lr", "0.03"):
        assert words in read.text, words
    assert "optim.kind" not in read.text, "what is equal is not listed"


@pytest.mark.parametrize("make", [lambda run: html_report.run_page(run), lambda run: html_report.compare_page([run, run])])
def test_markup_in_run_files_is_escaped(tmp_path: Path, make):
    run = a_run(tmp_path, "one", why=EVIL, parent=EVIL, config={EVIL: EVIL, "steps": 3}, changes={EVIL: EVIL}, created=EVIL)
    for name in ("rows.jsonl", "events.jsonl"):
        with open(run.path / name, "a") as file:
            file.write("\n" + json.dumps({"step": 50, "kind": EVIL, "loss": 1.0, EVIL: 2.0, "what": EVIL, "text": EVIL}) + "\n")
            sample = {"step": 51, "kind": "sample", "text": EVIL, "files": [EVIL], "loss": EVIL}
            file.write(json.dumps(sample) + "\n" + json.dumps({"step": 52, "kind": "eval", EVIL: 1.0}) + "\n")
    (run.path / "status.json").write_text(json.dumps({"status": EVIL, "verdict": EVIL, "error": EVIL, "clock": {EVIL: 3.0}}))
    read = assert_harmless(make(run))
    assert "alert(1)" in read.text, "the words are shown as they are"


@pytest.mark.parametrize(
    "file", ["../../secret.png", "/etc/hostname", "samples/link.png", "config.json", "samples", "samples/x.svg"]
)
def test_images_outside_the_run_are_not_embedded(tmp_path: Path, file: str):
    run = a_run(tmp_path / "runs", "one")
    Image.new("RGB", (4, 4)).save(tmp_path / "secret.png")
    (run.path / "samples" / "link.png").symlink_to(tmp_path / "secret.png")
    (run.path / "samples" / "x.svg").write_text("<svg onload='alert(1)'/>")
    shown = html_page.embedded(run.path, file, "caption")
    assert "data:" not in shown and Path(file).name in shown


def test_image_that_is_too_large_is_only_named(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(html_page, "_MAX_FILE", 10)
    assert "too large" in html_page.embedded(a_run(tmp_path, "one").path, "samples/step-000020/grid.png", "x")


@pytest.mark.parametrize("damage", ["rows.jsonl", "events.jsonl", "status.json", "samples"])
def test_damaged_run_has_a_page(tmp_path: Path, damage: str):
    run = a_run(tmp_path, "one")
    path = run.path / damage
    path.rename(run.path / "gone")
    assert_harmless(html_report.run_page(run))


def test_comparison_names_are_resolved(tmp_path: Path):
    for name in ("a", "b", "v1.", "a..b"):
        a_run(tmp_path, name, rows=2)
    chosen = [[run.name for run in html_report.chosen(tmp_path, words)] for words in (["a..b"], ["v1...b"], ["a", "b"], ["b..a"])]
    assert chosen == [["a..b"], ["v1.", "b"], ["a", "b"], ["b", "a"]]
    with pytest.raises(UserError, match="no run 'c'"):
        html_report.chosen(tmp_path, ["a..c"])
    with pytest.raises(UserError, match="8 runs at most"):
        html_report.chosen(tmp_path, ["a"] * 9)


# ---- curves ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num", [0, 1, 2, 3, 1200, 1201, 50_000])
def test_downsampled_curve_keeps_extremes_and_order(num: int):
    points = [(float(i), float((i * 7919) % 1009)) for i in range(num)]
    if num > 10:
        points[num // 3] = (float(num // 3), 1e9)
    thin = html_page.bucketed(points)
    assert len(thin) <= 1200
    assert sorted(thin) == thin and set(thin) <= set(points)
    if points:
        assert max(y for _, y in thin) == max(y for _, y in points)
        assert min(y for _, y in thin) == min(y for _, y in points)


@pytest.mark.parametrize("values", [[1.0], [2.0, 2.0], [0.0, 0.0], [-3.0, 5.0], [1e-9, 1e9], [1e-12, 2e-12], [5e300, 1e300]])
def test_chart_points_are_inside_the_frame(values: list[float]):
    drawn = html_page.svg(html_page.Chart("t", [html_page.Line(list(enumerate(values)), dots=True)]))
    read = Reader(drawn)
    at = [float(v) for n, v in read.attributes if n == "cy"]
    assert len(at) == len(values) and all(0 <= y <= html_page.HEIGHT for y in at)
    assert "nan" not in drawn and "inf" not in drawn


@pytest.mark.parametrize(("low", "high"), [(0, 1), (0.1, 0.9), (-5, 5), (0, 1600), (1e-6, 3e-6), (99.5, 100.5), (3, 3)])
def test_axis_ticks_are_round_and_inside(low: float, high: float):
    found = html_page.ticks(low, high, 5)
    assert found and all(low - 1e-9 <= value <= high + 1e-9 for value in found) and len(found) <= 12


def test_empty_chart_draws_nothing():
    assert html_page.svg(html_page.Chart("t", [])) == html_page.chart(html_page.Chart("t", [html_page.Line([])])) == ""


# ---- exports ---------------------------------------------------------------------------------------------------------


def command(capsys, *words: str) -> tuple[int, str, str]:
    capsys.readouterr()
    return main(words), *capsys.readouterr()


def test_csv_export_round_trips(tmp_path: Path, capsys):
    run = a_run(tmp_path, "one")
    a_run(tmp_path, "two")
    status, out, _ = command(capsys, "--runs", str(tmp_path), "runs", "export", "one", "two", "--csv")
    found = list(csv.DictReader(io.StringIO(out)))
    assert status == 0 and len(found) == 80
    mine = [row for row in found if row["run"] == "one"]
    assert [(int(r["step"]), float(r["loss"]), float(r["lrs.all"])) for r in mine] == [
        (row["step"], row["loss"], row["lrs"]["all"]) for row in run.rows()
    ]


def test_table_of_runs_has_settings_and_results(tmp_path: Path, capsys):
    a_run(tmp_path, "one")
    (tmp_path / "broken").mkdir()
    out = tmp_path / "table.csv"
    assert command(capsys, "--runs", str(tmp_path), "runs", "export", "--csv", "--out", str(out))[0] == 0
    found = {row["name"]: row for row in csv.DictReader(io.StringIO(out.read_text()))}
    assert found["one"]["config.optim.lr"] == "0.01" and found["one"]["config.shape"] == "[1,2]"
    assert (found["one"]["status"], found["one"]["metric"], found["one"]["seconds.train"]) == ("done", "error", "10.0")
    assert found["broken"]["status"] == "damaged"


def test_parquet_export_equals_csv(tmp_path: Path, capsys):
    parquet = pytest.importorskip("pyarrow.parquet")
    run = a_run(tmp_path, "one")
    out = tmp_path / "rows.parquet"
    assert command(capsys, "--runs", str(tmp_path), "runs", "export", "one", "--parquet", "--out", str(out))[0] == 0
    table = parquet.read_table(out)
    assert table["loss"].to_pylist() == [row["loss"] for row in run.rows()]
    assert str(table.schema.field("step").type) == "int64"


def test_parquet_column_of_mixed_types_is_text():
    assert export._uniform([1, 2.5, None]) == [1.0, 2.5, None]
    assert export._uniform([1, "a", None]) == ["1", "a", None]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("runs", "export", "one"), "choose one of --csv and --parquet"),
        (("runs", "export", "one", "--csv", "--parquet"), "choose one"),
        (("runs", "export", "one", "--csv", "--events", "--table"), "choose one of --events"),
        (("runs", "export", "one", "--parquet"), "--out"),
        (("runs", "export", "nobody", "--csv"), "no run 'nobody'"),
        (("runs", "export", "empty", "--csv"), "no rows have been written yet"),
        (("runs", "export", "one", "--csv", "--out", "nowhere/x.csv"), "cannot be written"),
        (("report", "nobody", "--html"), "no run 'nobody'"),
        (("report", "one", "--out", "x.html"), "add --html"),
        (("report", "one", "--html", "--out", "."), "is a folder"),
        (("report", "broken", "--html"), "config.json"),
    ],
)
def test_mistakes_are_told_in_a_line(tmp_path: Path, capsys, monkeypatch, words: tuple[str, ...], says: str):
    root = tmp_path / "runs"
    a_run(root, "one")
    (a_run(root, "empty").path / "rows.jsonl").unlink()
    (root / "broken").mkdir()
    monkeypatch.chdir(tmp_path)
    status, _, reported = command(capsys, *words)
    assert status == 2 and says in reported and "Traceback" not in reported


def test_report_writes_a_page_and_prints_facts(tmp_path: Path, capsys, monkeypatch):
    with_seeds(tmp_path / "runs", "one")
    settings = {"steps": 40, "optim": {"lr": 0.03, "kind": "adamw"}, "shape": [1, 2]}
    a_run(tmp_path / "runs", "two", shift=1.0, config=settings)
    monkeypatch.chdir(tmp_path)
    assert command(capsys, "report", "one", "--html")[0] == 0
    assert_harmless((tmp_path / "one.html").read_text())
    assert command(capsys, "report", "one..two", "--html", "--out", "both.html")[0] == 0
    assert_harmless((tmp_path / "both.html").read_text())
    status, out, _ = command(capsys, "report", "one..two")
    assert status == 0 and "two against one: negative result" in out


# ---- sweeps ----------------------------------------------------------------------------------------------------------


def test_sweep_page_has_map_ranks_and_curves(tmp_path: Path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    sweep = sweep_samples.make(Path("runs"), "optim.lr=1e-3,1e-2", "batch=8,16", name="some")
    for trial, best in zip(sweep.trials(), (0.4, 0.3, 0.9, None), strict=True):
        sweep_samples.end(sweep, trial, best, "done" if best else "failed", "" if best else EVIL)
        a_run(Path("runs"), sweep.run_name(trial), shift=best or 0.0, sweep="some")
    assert command(capsys, "report", "some", "--html")[0] == 0
    read = assert_harmless((tmp_path / "some.html").read_text())
    for words in ("to see", "best: optim.lr=0.001 batch=16", "0.3000", "some-0002", "seedbed sweep gpt/demo", "alert(1)"):
        assert words in read.text, words
    assert any(value.startswith("data:image/png") for name, value in read.attributes if name == "src"), "no heat-map"
    status, out, _ = command(capsys, "report", "some")
    assert status == 0 and "4 trials: 3 done, 1 failed" in out


def test_sweep_page_of_a_new_sweep(tmp_path: Path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    sweep_samples.make(Path("runs"), "optim.lr=1e-3,1e-2", name="some")
    assert command(capsys, "report", "some", "--html")[0] == 0
    assert "waiting" in assert_harmless((tmp_path / "some.html").read_text()).text
