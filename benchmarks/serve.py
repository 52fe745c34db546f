"""How quickly the workbench answers over 500 runs of 10,000 rows: list and run page under 1 s, ten runs compared under 2 s.

The first look counts (nothing in the server's memory), the later ones are printed beside it; with a browser also the time until
a person sees rows or curves. Run `python benchmarks/serve.py`; `--browser /usr/bin/chromium` adds the last column.
"""

import argparse
import http.client
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from _report import write_result
from _runs import make_runs

LIMITS = {"list": 1.0, "run page": 1.0, "compare 10": 2.0}
MAX_MEMORY = 500e6
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update", "--no-first-run"]


@contextmanager
def serving(root: Path) -> Iterator[tuple[int, int]]:
    """A server over these runs, as a person starts it: its port and its process id."""
    code = "import sys; from seedbed.cli import main; sys.exit(main())"
    words = [sys.executable, "-c", code, "serve", "--port", "0", "--runs", str(root)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            address = process.stdout.readline().split()[-1]
            yield int(address.rstrip("/").rpartition(":")[2]), process.pid
        finally:
            process.terminate()


def seconds_for(port: int, paths: list[str]) -> float:
    """The time until all of these are answered, as a page asks for them: one after the other on one connection."""
    began = time.perf_counter()
    with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=60)) as asked:
        for path in paths:
            asked.request("GET", path)
            answer = asked.getresponse()
            answer.read()
            assert answer.status == 200, (path, answer.status)
    return time.perf_counter() - began


def questions(names: list[str]) -> dict[str, tuple[str, list[str]]]:
    """What each page asks the server, and the address that a person opens."""
    keys = "&".join(f"key={key}" for key in ("loss", "eval/loss", "lr", "grad_norm", "items_per_s", "wait", "mfu", "memory"))
    one, ten = names[3], names[5:15]
    asked = "&".join(f"run={name}" for name in ten)
    run = [f"/api/runs/{one}{part}" for part in ("", f"/series?x=step&smooth=0.6&points=700&{keys}", "/samples", "/console")]
    compared = [f"/api/compare?{asked}", f"/api/series?{asked}&{keys}&x=step&smooth=0.8&points=480"]
    return {"list": ("/", ["/api/runs"]), "run page": (f"/run/{one}", run), "compare 10": (f"/compare?{asked}", compared)}


def cpu(pid: int) -> float:
    """Seconds of processor time that the server has used: what a busy machine does not change."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def memory(pid: int) -> float:
    """The most that the server has held, in bytes."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(1024.0 * int(line.split()[1]) for line in lines if line.startswith("VmHWM"))


def seen(chromium: str, port: int, addresses: dict[str, str]) -> dict[str, float]:
    """Seconds until rows or curves are on the screen of a real browser, the second time a page is opened."""
    from playwright.sync_api import sync_playwright

    signs = {"list": "tr[data-path]", "run page": ".chart .scatterlayer path", "compare 10": ".chart .scatterlayer path"}
    out = {}
    with sync_playwright() as play:
        browser = play.chromium.launch(executable_path=chromium, args=FLAGS)
        page = browser.new_page(viewport={"width": 1440, "height": 900})
        for name, address in addresses.items():
            for _ in range(2):
                began = time.perf_counter()
                page.goto(f"http://127.0.0.1:{port}{address}")
                page.wait_for_selector(signs[name], state="attached")
                out[name] = time.perf_counter() - began
        browser.close()
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--num-runs", type=int, default=500)
    parser.add_argument("--num-rows", type=int, default=10_000)
    parser.add_argument("--runs", type=Path, help="a folder to make the runs in, or that holds them already")
    parser.add_argument("--browser", help="a Chromium to measure what a person sees")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        root = given.runs or Path(scratch) / "runs"
        if not root.is_dir():
            make_runs(root, given.num_runs, given.num_rows)
        figures = measure(root, given.browser)
    print(json.dumps(figures, indent=1))
    write_result("serve", figures)


def measure(root: Path, chromium: str | None) -> dict[str, Any]:
    asked = questions(sorted(name for name in os.listdir(root) if name.startswith("run-")))
    figures: dict[str, Any] = {"num_runs": len(os.listdir(root)), "num_rows": num_rows(root)}
    with serving(root) as (port, pid):
        for name, (_, paths) in asked.items():
            used = cpu(pid)
            first = {"first_s": round(seconds_for(port, paths), 3), "first_cpu_s": round(cpu(pid) - used, 2)}
            later = sorted(seconds_for(port, paths) for _ in range(5))[2]
            figures[name] = {**first, "later_s": round(later, 3), "limit_s": LIMITS[name]}
        if chromium:
            for name, value in seen(chromium, port, {name: address for name, (address, _) in asked.items()}).items():
                figures[name]["on_screen_s"] = round(value, 3)
        figures["peak_memory_MB"] = round(memory(pid) / 1e6)
    figures["holds"] = figures["peak_memory_MB"] < MAX_MEMORY / 1e6 and all(
        figures[name]["first_s"] < limit for name, limit in LIMITS.items()
    )
    return figures


def num_rows(root: Path) -> int:
    with open(next(root.glob("run-*/rows.jsonl")), "rb") as file:
        return sum(1 for _ in file)


if __name__ == "__main__":
    main()
