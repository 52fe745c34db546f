"""Run every fault against the checks and publish what was seen: `python tests/faults/write_matrix.py` rewrites two pages.

docs/detection-matrix.md is written whole; in docs/preflight.md the list of checks, each with a message it gave.
"""

import json
import os
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).parent))
from catalogue import FAULTS
from catalogue_training import FAULTS as TRAINING
from patching import ROOT, TOY, Fault, check

from seedbed.checks import runner
from seedbed.checks.registry import Check, all_checks
from seedbed.checks.subject import Subject
from seedbed.recipes import find
from seedbed.report.findings import Finding

# All of these on every fault; the slower groups only where they are expected to speak.
ALWAYS = "ADMLCOV"
# The groups of checks that speak of a place.
PLACES = {
    "data": "D", "model": "AMC", "objective": "LCMG", "optimizer": "OH", "loop": "TOEH", "evaluation": "VTI", "inference": "IVT",
}  # fmt: skip
# Humbatova et al., "Taxonomy of Real Faults in Deep Learning Systems", ICSE 2020.
TAXONOMY = (
    "training data", "hyper-parameters", "preprocessing", "model type and properties", "layer properties", "training process",
    "tensor shape", "API", "loss function", "wrong input", "validation and testing", "optimiser", "GPU usage",
    "activation function", "missing or wrong layer",
)  # fmt: skip
# Mistakes that lie in a file and not in running code: edits of the small recipe, saved as a file of one's own.
_BROKEN = "def broken() -> Config:\n    return Config(model=ModelConfig(widht=3), data=DataConfig())\n\n\n"
IN_FILES = {
    "A1": ("class Sums(Source):", f"{_BROKEN}class Sums(Source):"),
    "A3": ("self.num_calls += 1", "self.num_calls += batch['x'].mean().item()"),
    "A4": ("Seconds on one core;", "Seconds on one core, 10 M parameters;"),
}
START, END = "<!-- checks -->", "<!-- end of checks -->"


def run(fault: Fault) -> dict:
    """What the checks say about one fault."""
    began = time.perf_counter()
    with fault.apply():
        report = check(fault.recipe, *fault.settings, only=[*ALWAYS, *(i for i in fault.expected if i[0] not in ALWAYS)])
    found = [f for f in report.findings if f.alarm]
    facts = {"id": fault.id, "recipe": fault.recipe, "place": fault.place, "expected": sorted(fault.expected), "file": fault.file}
    told = {f.id: {"where": f.where, "lines": f.lines(fault.recipe)} for f in found}
    return {**facts, "seconds": time.perf_counter() - began, "found": told}


def in_files(folder: Path) -> list[dict]:
    """What the checks say of mistakes in a file."""
    results = []
    for id, (old, new) in IN_FILES.items():
        path = folder / "mine.py"
        path.write_text((ROOT / TOY).read_text().replace(old, new))
        recipe, _ = find(f"{path}:toy")
        subject = Subject(recipe, "toy", recipe.preset("toy"), folder)
        (finding,) = runner.run(subject, runner.select([id])).findings
        assert finding.alarm, f"{id} does not mind: {new}"
        told = {"where": finding.where, "lines": finding.lines("mine.py:toy")}
        results.append({"id": f"in a file: {id}", "recipe": TOY, "expected": [id], "found": {id: told}})
    return results


def clean(recipe: str) -> list[Finding]:
    return [f for f in check(recipe, only=list(ALWAYS)).findings if f.alarm]


def matrix(results: list[dict], alarms: dict[str, int]) -> str:
    """The page with one line per fault and one per check."""
    caught = [r for r in results if r["found"]]
    meant = [r for r in results if set(r["found"]) & set(r["expected"])]
    right = [r for r in caught if any(i[0] in PLACES[r["place"]] or i in r["expected"] for i in r["found"])]
    filed = [r for r in caught if r["file"]]
    shares = Counter(r["recipe"] for r in results)
    named = [r for r in filed if any(Path(r["file"]).name in told["where"] for told in r["found"].values())]
    lines = [
        "# What the checks catch",
        "",
        "Written by `tests/faults/write_matrix.py`: every fault of the catalogues is an edit or a patch of the real code,",
        f"applied while the checks {', '.join(ALWAYS)} and those expected for it run. An alarm is an error or a warning.",
        "",
        f"- faults: {len(results)} ({', '.join(f'{n} on {Path(r).stem}' for r, n in shares.items())})",
        f"- caught: {len(caught)} ({len(caught) / len(results):.1%})",
        f"- caught by a check that was expected to: {len(meant)} ({len(meant) / len(results):.1%})",
        f"- caught by a check of the right place: {len(right) / len(results):.1%}",
        f"- a finding names the edited file: {len(named)} of {len(filed)} ({len(named) / max(len(filed), 1):.1%})",
        f"- alarms on the clean recipes: {', '.join(f'{Path(r).stem} {n}' for r, n in alarms.items())}",
        "",
        "## Faults",
        "",
        "| fault | recipe | place | caught by (expected in bold) | seconds |",
        "|---|---|---|---|---|",
    ]
    for r in sorted(results, key=lambda r: (r["recipe"] != "gpt/demo", r["recipe"], r["place"], r["id"])):
        ids = " ".join(f"**{i}**" if i in r["expected"] else i for i in r["found"]) or "missed"
        lines.append(f"| {r['id']} | {Path(r['recipe']).stem} | {r['place']} | {ids} | {r['seconds']:.1f} |")
    lines += [
        "",
        "## Checks",
        "",
        "A1, A3 and A4 read files and are tested on files; T1, G1 and G4 need a GPU; L3 needs a recipe with a mask.",
        "",
        "| check | faults caught | of those expected |",
        "|---|---|---|",
    ]
    for one in all_checks():
        hits = [r for r in results if one.id in r["found"]]
        lines.append(f"| {one.id} {one.title} | {len(hits)} | {sum(one.id in r['expected'] for r in hits)} |")
    return "\n".join([*lines, ""])


def catalogue_page(results: list[dict], checks: Sequence[Check]) -> str:
    """Every check with what it tests and a message it gave, and the taxonomy that they answer."""
    example: dict[str, tuple[str, list[str]]] = {}
    for r in sorted(results, key=lambda r: r["recipe"] != "gpt/demo"):
        for id, told in r["found"].items():
            if "could not run" not in told["lines"][1] and (id not in example or (id in r["expected"] and not example[id][0])):
                example[id] = (r["id"], told["lines"])
    parts = [START, ""]
    for one in checks:
        told = " ".join((one.run.__doc__ or "").split())
        facts = [
            one.severity,
            *(["in the quick set"] if one.quick else []),
            *([f"needs {', '.join(one.needs)}"] if one.needs else []),
        ]
        parts += [f"### {one.id} {one.title}", "", f"{told} ({'; '.join(facts)})".strip(), ""]
        if one.id in example:
            fault, lines = example[one.id]
            parts += [f'With the fault "{fault}":', "", "```", *lines, "```", ""]
    return "\n".join([*parts, taxonomy(checks), END])


def taxonomy(checks: Sequence[Check]) -> str:
    """The table of categories and the checks that answer them."""
    by = defaultdict(list)
    for one in checks:
        for category in one.humbatova:
            by[category].append(one.id)
    rows = [f"| {n} | {name} | {' '.join(by[n]) or '-'} |" for n, name in enumerate(TAXONOMY, 1)]
    return "\n".join(["| # | category | checks |", "|---|---|---|", *rows, ""])


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        os.environ["SEEDBED_CACHE"] = folder
        alarms = {recipe: len(clean(recipe)) for recipe in dict.fromkeys(f.recipe for f in FAULTS)}
        results = []
        for fault in [*FAULTS, *TRAINING]:
            results.append(run(fault))
            print(json.dumps({k: results[-1][k] for k in ("id", "expected")}), *results[-1]["found"], flush=True)
        os.chdir(folder)  # places are named relative to it
        shown = [*results, *in_files(Path(folder).resolve())]
        os.chdir(ROOT)
    (ROOT / "docs" / "detection-matrix.md").write_text(matrix(results, alarms))
    page = ROOT / "docs" / "preflight.md"
    text = page.read_text()
    page.write_text(text[: text.index(START)] + catalogue_page(shown, all_checks()) + text[text.index(END) + len(END) :])


if __name__ == "__main__":
    main()
