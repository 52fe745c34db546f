"""find-lr against the best of a sweep: shortened runs of presets of all recipes, judged by the recipe's own evaluation.

find-lr sees trials of half the run, with the settings it is shipped with. The sweep trains whole runs at powers of two of the
configured rate, twice each on different items, until both neighbours of the best are worse by more than their noise. A hit is
- a rate within a factor of 1.6 of the sweep's optimum, the lowest point of the parabola through its best three;
- a range that is declared as one and holds that optimum;
- a rate, or a range, all of which the sweep itself cannot tell from its best.
The penalty is how far whole runs at the answer (of a range, where its trials were lowest) lie above the best of the sweep, in
standard deviations of one run, and in per cent; `unchanged` is the same of the configured rate.
Rows are kept as they come in `find-lr-rows-DEVICE.jsonl` beside the result, and a second start goes on from there.
"""

import argparse
import collections
import functools
import json
import math
import os
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from _report import ROOT, write_result

from seedbed.tune import lr
from seedbed.tune.lr import Study, Trial
from seedbed.tune.workload import Workload, preserved, rigged

TARGET = 1.6
REPEATS = 2  # whole runs at each rate of the sweep, on different items: one alone decides by chance
SHARE = 2  # how much shorter than the run a trial of find-lr is
SMALL = ("model.size=5xs", "data.block=32", "precision=fp32", "compile=off", "batch=16")


NOTE = (
    "find-lr with its shipped settings but for the length of its trials, half the run. The power of the extrapolation, 0.21, was "
    "chosen on these same presets: not a held-out test."
)


@dataclass(frozen=True)
class Case:
    """A preset, the length of its run, and settings."""

    name: str
    steps: int
    settings: tuple[str, ...] = ()


CPU = (
    Case("thinker/demo", 600),
    Case("ebt/demo", 320, ("limit.valid=128",)),
    Case("ebt/plain", 400, (*SMALL, "limit.valid=256")),
    Case("gpt/demo", 160, ("limit.valid=512",)),
    Case("flow/demo", 200),
    Case("world/demo", 144),
)
CUDA = (
    Case("gpt/shakespeare", 2000, ("budget=none",)),
    Case("gpt/baby", 1000),
    Case("thinker/copy", 2000),
    Case("flow/shapes-64", 1000),
    Case("ebt/s1", 600),
    Case("ebt/regress-shapes", 1000),
    Case("world/box64", 800),
)


class Rows:
    """What was trained so far, one line each, so that nothing is trained twice."""

    def __init__(self, path: Path) -> None:
        self.path = path
        lines = path.read_text().splitlines() if path.exists() else []
        self.done = {self._key(row): row for row in map(json.loads, lines)}

    @staticmethod
    def _key(row: dict[str, Any]) -> str:
        return json.dumps([row[k] for k in ("kind", "name", "device", "steps", "settings", "factor", "num_steps", "repeat")])

    def get(self, key: dict[str, Any], make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """The row of `key`, made and kept where it is not there yet."""
        name = self._key(key)
        if name not in self.done:
            start = time.perf_counter()
            row = self.done[name] = key | make() | {"seconds": round(time.perf_counter() - start, 1)}
            with self.path.open("a") as file:
                file.write(json.dumps(row) + "\n")
            print(f"  {key['kind']} of {key['num_steps']} steps x {key['factor']:g}: {row['seconds']} s", flush=True)
        return self.done[name]


@dataclass
class KeptStudy(Study):
    """A study whose trials are kept among the rows."""

    rows: Rows = field(kw_only=True)
    case: dict[str, Any] = field(kw_only=True)

    def _make(self, factor: float, num_steps: int, repeat: int, evaluated: bool) -> Trial:
        def make() -> dict[str, Any]:
            found = super(KeptStudy, self)._make(factor, num_steps, repeat, evaluated)
            return {
                k: v if v is not None and math.isfinite(v) else None for k, v in (("loss", found.loss), ("score", found.score))
            }

        kind = "judged trial" if evaluated else "trial"
        row = self.rows.get({"kind": kind, **self.case, "factor": factor, "num_steps": num_steps, "repeat": repeat}, make)
        loss, score = (math.inf if row.get(k) is None else row[k] for k in ("loss", "score"))
        return Trial(factor, num_steps, repeat, loss, score if evaluated else None)

    def run(self, workload: Workload, factor: float, repeat: int) -> dict[str, Any]:
        """A whole run at `factor` times the configured rates, and its evaluation."""

        def make() -> dict[str, Any]:
            engine = self.rig.engine
            with preserved(engine):
                if not self._train(factor, self.run_steps, repeat):
                    return {"numbers": {}}
                with engine.evaluating():
                    return {"numbers": engine.system.evaluate(workload.data.valid, engine)}

        return self.rows.get({"kind": "run", **self.case, "factor": factor, "num_steps": self.run_steps, "repeat": repeat}, make)


def swept(workload: Workload, study: KeptStudy, answer: float) -> tuple[lr.LrCurve, dict[str, float]]:
    """Whole runs at powers of two of the configured rate around the best, and what the answer and the configured rate cost."""

    def value(factor: float, repeat: int) -> float:
        found = next(iter(study.run(workload, factor, repeat)["numbers"].values()), math.inf)
        return found if math.isfinite(found) else math.inf

    curve = lr.search(lambda k, repeat: value(2.0**k, repeat), REPEATS, 0, (-10, 10))
    lowest, (deviation, _) = curve.mean[curve.best], curve.deviation()
    costs = {}
    for name, factor in (("answer", answer), ("configured", 1.0)):
        above = statistics.fmean(value(factor, r) for r in range(REPEATS)) - lowest
        costs |= {f"above_{name}": above, f"penalty_{name}": above / deviation}
    return curve, costs | {"lowest": lowest, "deviation": deviation}


def verdict(found: float | None, low: float, high: float, best: float, flat_range: tuple[float, float]) -> str:
    """Which kind of hit it is, in a word; empty for a miss. All are rates."""
    if found is not None and max(found / best, best / found) <= TARGET:
        return "point"
    if found is None and low <= best <= high:
        return "range"
    first, last = (low, high) if found is None else (found, found)
    return "level" if flat_range[0] <= first and last <= flat_range[1] else ""


def compare(case: Case, device: str, extra: list[str], rows: Rows) -> dict[str, Any]:
    """One row of the table."""
    workload = Workload.open(case.name, [*case.settings, *extra, f"steps={case.steps}", f"device={device}"])
    key = {"name": case.name, "device": workload.device.type, "steps": case.steps, "settings": list(case.settings)}
    kept = functools.partial(KeptStudy, rows=rows, case=key)
    finding = lr.find(workload, num_steps=max(case.steps // SHARE, lr.FEWEST_STEPS), make_study=kept)
    low, high = finding.low / finding.configured, finding.high / finding.configured
    answer = finding.lowest / finding.configured
    with rigged(workload.build(), workload.data, lambda words: None) as rig:
        curve, costs = swept(workload, kept(rig, case.steps), round(answer, 3))
    best, flat_range = 2.0 ** lr.vertex(curve.mean, curve.best), tuple(2.0**end for end in curve.flat_range())
    facts = {"name": case.name, "steps": case.steps, "trial_steps": finding.trial_steps, "configured": finding.configured}
    found = {"found": finding.ratio, "low": low, "high": high, "judged_by": finding.metric, "advice": finding.advice}
    kind = verdict(finding.ratio, low, high, best, flat_range)
    truth = {"best": best, "level": [x if math.isfinite(x) else None for x in flat_range]}
    raw = {"swept": {str(2.0**k): v for k, v in curve.scores.items()}, "trials": finding.to_json()["trials"]}
    return {
        **facts,
        **found,
        **truth,
        "answer": answer,
        "ratio": answer / best,
        **costs,
        "hit": kind,
        "notes": finding.notes,
        **raw,
    }


def _percent(row: dict[str, Any], name: str) -> str:
    return f"{row[f'above_{name}'] / row['lowest']:.1%}" if row["lowest"] > 0.01 else "-"


def table(results: list[dict[str, Any]]) -> Iterator[str]:
    yield "rates in units of the configured one; penalties in standard deviations of one run, and of the best number"
    names = f"{'preset':<14}{'steps':>6}{'trial':>6}{'find-lr':>9}{'range':>14}{'sweep':>8}{'level':>14}{'ratio':>7}"
    yield names + f"{'penalty':>17}{'unchanged':>17}  hit"
    for r in results:
        found = f"{r['found']:.2f}" if r["found"] else "abstains" if r["advice"].startswith("no answer") else "range"
        edges = [f"{x:.2f}" if x else "?" for x in r["level"]]
        rates = f"{found:>9}{r['low']:>7.2f}..{r['high']:<5.2f}{r['best']:>8.2f}{'..'.join(edges):>14}{r['ratio']:>7.2f}"
        costs = "".join(f"{r[f'penalty_{x}']:>8.2f} {_percent(r, x):>8}" for x in ("answer", "configured"))
        yield f"{r['name']:<14}{r['steps']:>6}{r['trial_steps']:>6}{rates}{costs}  {r['hit'] or 'missed'}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=("cpu", "cuda"))
    parser.add_argument("--only", action="append", default=[], metavar="RECIPE/PRESET")
    parser.add_argument("--set", action="append", default=[], metavar="key=value", help="for every case, such as data.text=FILE")
    options = parser.parse_args()
    cases = [c for c in (CPU if options.device == "cpu" else CUDA) if not options.only or c.name in options.only]
    folder = Path(os.environ.get("SEEDBED_RESULTS", ROOT / "benchmarks" / "results"))
    folder.mkdir(parents=True, exist_ok=True)
    rows, results = Rows(folder / f"find-lr-rows-{options.device}.jsonl"), []
    for case in cases:
        try:
            extra = [text for text in options.set if not text.startswith("data.text=") or case.name.startswith("gpt/shakespeare")]
            results.append(compare(case, options.device, extra, rows))
        except Exception as error:  # a preset whose data is not here must not cost the others
            print(f"{case.name}: {type(error).__name__}: {error}", flush=True)
            continue
        print(list(table(results))[-1], flush=True)
        write_result(f"find-lr-{options.device}", {"target": TARGET, "rows": results}, NOTE)
    print("\n".join(table(results)))
    kinds = collections.Counter(r["hit"] or "missed" for r in results)
    print(", ".join(f"{num} {kind}" for kind, num in kinds.items()))


if __name__ == "__main__":
    main()
