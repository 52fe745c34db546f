"""Run every fault against the checks and publish what was seen: `python tests/faults/write_matrix.py` rewrites two pages.

docs/detection-matrix.md is written whole; in docs/preflight.md the list of checks, each with a message it gave. With `--blind`
only the faults that were written without knowledge of the checks are run, and their part of the first page is written; with
`--later` only those of the later lists.
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
from catalogue_blind import FAULTS as BLIND
from catalogue_blind import BlindFault
from catalogue_families import FAULTS as FAMILIES
from catalogue_fresh import FAULTS as FRESH
from catalogue_guessed import FAULTS as GUESSED
from catalogue_later import FAULTS as THIRTY
from catalogue_sampled import FAULTS as SAMPLED
from catalogue_training import FAULTS as TRAINING
from catalogue_unseen import FAULTS as FORTY
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
    "runtime": "TGOC",
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
# What the checks said of the blind faults when these were written.
BEFORE = Path(__file__).with_name("blind_before.json")
# The same of the faults of later lists, before the checks of definitions.
UNSEEN_BEFORE = Path(__file__).with_name("unseen_before.json")
# The same of the last list, with the checks of definitions and before any was changed for it.
FRESH_BEFORE = Path(__file__).with_name("fresh_before.json")
# And of the faults at places that were drawn at random, with what was changed for the fresh ones.
SAMPLED_BEFORE = Path(__file__).with_name("sampled_before.json")
DEFINED = ("D9", "M10", "L7", "O8", "T8", "V9", "I9")
LATER = """
## Faults of later lists

`tests/faults/catalogue_unseen.py` and `catalogue_later.py`: 70 faults, written without knowledge of the checks in two separate
lists. Nothing was changed for them until they were counted: the share that was found then is what an unknown fault could expect.
Afterwards the second implementations of formulas, which had been tests, became checks (D9, M10, L7, O8, V9, I9), and gaps that
the missed faults showed were closed: these faults are known now, and their share says nothing about the next ones.
"""
FRESH_ONES = """
## A list written after the checks of definitions

`tests/faults/catalogue_fresh.py`: 30 faults, written before it was known what finds them, when the checks of definitions existed:
4 of a model, 2 of an optimizer, 5 of a loop, 4 of the runtime, 7 of an objective, 4 of data, 4 of inference and evaluation.
`then` is what was found before anything was changed for them: what an unknown fault can expect. Afterwards general gaps were
closed, so `now` says nothing about the next ones.
"""
SAMPLED_ONES = """
## Faults at places drawn at random

`tests/faults/catalogue_sampled.py`: 16 faults in functions that a seeded draw chose, written after the repairs for the list above
and counted before anything was changed for them. Chance finds what nobody would think of: many of them only measure or report.
"""
GUESSED_ONES = """
## Faults guessed beforehand

Faults of `tests/faults/catalogue_guessed.py`, written before the checks of definitions by who made these. The definitions that
existed as tests then found four of 18; other checks were not tried. Those written for whole
"""
# Groups tried on a blind fault that no expected check finds; the learning checks last.
OTHERS = ("ADMLCOTVI", "E")
# Slow, or about files and devices: of no use for an edit of running code.
LEFT_OUT = {"A1", "A3", "A4", "G1", "G2", "G3", "G4", "H1", "H2", "H3", "T1", "T7"}


def run_blind(fault: BlindFault, clean: dict[tuple, bool]) -> dict:
    """What the checks say about a blind fault: those expected first, or those of definitions and those that found it once, then
    others until one group minds. Alarms of the clean recipe with the same settings do not count; `clean` holds what is known."""
    began, found = time.perf_counter(), {}
    known = {check.id for check in all_checks()}
    earlier = (json.loads(path.read_text()) for path in (UNSEEN_BEFORE, FRESH_BEFORE, SAMPLED_BEFORE))
    then = next((one[fault.id]["found"] for one in earlier if fault.id in one), [])
    groups = [sorted(fault.expected & known), [*DEFINED, *then] if not fault.expected else []]
    groups += [[c.id for c in runner.select(list(group))] for group in OTHERS]
    for ids in groups:
        chosen = [id for id in ids if id not in LEFT_OUT]
        if found or not chosen:
            continue
        with fault.apply():
            alarms = [f for f in check(fault.recipe, *fault.settings, only=chosen).findings if f.alarm]
        fresh = [f.id for f in alarms if (fault.recipe, fault.settings, f.id) not in clean]
        for finding in check(fault.recipe, *fault.settings, only=fresh).findings if fresh else ():
            clean[fault.recipe, fault.settings, finding.id] = finding.alarm
        told = {f.id: {"where": f.where, "follows": f.follows} for f in alarms if not clean[fault.recipe, fault.settings, f.id]}
        found.update(told)
    facts = {"id": fault.id, "recipe": fault.recipe, "place": fault.place, "difficulty": fault.difficulty, "file": fault.file}
    return {**facts, "expected": sorted(fault.expected), "seconds": time.perf_counter() - began, "found": found}


def names_file(result: dict) -> bool:
    return any(Path(result["file"]).name in told["where"] for told in result["found"].values())


def blind_section(results: list[dict]) -> list[str]:
    """Shares before and after, and one line per fault."""
    before, num = json.loads(BEFORE.read_text()), len(results)
    then = {name: set(told["found"]) for name, told in before.items()}
    counts = [
        ("found", sum(bool(then[r["id"]]) for r in results), sum(bool(r["found"]) for r in results), num),
        ("found by an id whose definition the fault violates", sum(bool(then[r["id"]] & {*r["expected"]}) for r in results),
         sum(bool({*r["found"]} & {*r["expected"]}) for r in results), num),
    ]  # fmt: skip
    filed = sum(b["names_file"] for b in before.values()), sum(names_file(r) for r in results)
    caught = sum(map(bool, then.values())), sum(bool(r["found"]) for r in results)
    lines = ["", "## Faults written without knowledge of the checks", "", f"{num} faults of `tests/faults/catalogue_blind.py`,"]
    lines += ["each checked with the settings with which it matters: before the checks were extended for them, and now.", ""]
    lines += ["| | before | now |", "|---|---|---|"]
    lines += [f"| {name} | {a} of {n}, {a / n:.0%} | {b} of {n}, {b / n:.0%} |" for name, a, b, n in counts]
    shares = (f"{n} of {m}, {n / max(m, 1):.0%}" for n, m in zip(filed, caught, strict=True))
    lines += [f"| a finding names the edited file, of those found | {' | '.join(shares)} |", ""]
    lines += [
        "| fault | recipe | place | difficulty | before | now (expected in bold) | file named |",
        "|---|---|---|---|---|---|---|",
    ]
    for r in results:
        ids = " ".join(f"**{i}**" if i in r["expected"] else i for i in r["found"]) or "missed"
        recipe = r["recipe"].partition("/")[0]
        place = f"{recipe} | {r['place']} | {r['difficulty']}"
        was = " ".join(sorted(then[r["id"]])) or "missed"
        lines.append(f"| {r['id']} | {place} | {was} | {ids} | {'yes' if names_file(r) else 'no' if r['found'] else ''} |")
    return lines


def is_right(place: str, ids: Sequence[str]) -> bool:
    """Whether a check of the fault's place is among these."""
    return any(id[0] in PLACES[place] for id in ids)


def unseen_section(results: list[dict], known: Path, about: str) -> list[str]:
    """Shares of the faults of a later list, before and after checks were changed for them, and one line per fault."""
    before, caught = json.loads(known.read_text()), [r for r in results if r["found"]]
    then = {name for name, told in before.items() if told["found"]}
    lines = [*about.rstrip("\n").split("\n"), ""]
    ids = [before[r["id"]]["found"] for r in results], [[*r["found"]] for r in results]
    placed = (sum(is_right(r["place"], of) for r, of in zip(results, found, strict=True)) for found in ids)
    filed = sum(told["names_file"] for told in before.values()), sum(map(names_file, caught))
    lines += ["| | then | now |", "|---|---|---|", f"| found | {len(then)} of {len(results)} | {len(caught)} of {len(results)} |"]
    lines += ["| by a check of the fault's place | {} | {} |".format(*placed)]
    lines += [f"| a finding names the edited file | {filed[0]} | {filed[1]} |"]
    for key in ("place", "recipe", "difficulty"):
        for kind, num in Counter(r[key].partition("/")[0] for r in results).items():
            of_kind = [r for r in results if r[key].partition("/")[0] == kind]
            shares = sum(r["id"] in then for r in of_kind), sum(bool(r["found"]) for r in of_kind)
            lines.append(f"| {key}: {kind} | {shares[0]} of {num} | {shares[1]} of {num} |")
    lines += ["", *_table(results, before)]
    return lines


def guessed_section(results: list[dict]) -> list[str]:
    """Those that were written before the checks of definitions, by the same hand."""
    found = sum(bool(r["found"]) for r in results)
    lines = [
        *GUESSED_ONES.rstrip("\n").split("\n"),
        f"parts of a recipe, with these faults in mind, find {found} of {len(results)}.",
    ]
    return [*lines, "", *_table(results, {})]


def _table(results: list[dict], before: dict[str, dict]) -> list[str]:
    lines = ["| fault | recipe | place | difficulty | then | now | file named |", "|---|---|---|---|---|---|---|"]
    for r in results:
        was = before.get(r["id"], {"found": ["-"]})["found"]
        facts = [r["id"], r["recipe"].partition("/")[0], r["place"], r["difficulty"], " ".join(was) or "missed"]
        facts += [" ".join(r["found"]) or "missed", "yes" if names_file(r) else "no" if r["found"] else ""]
        lines.append(f"| {' | '.join(facts)} |")
    return lines


def run(fault: Fault) -> dict:
    """What the checks say about one fault; of the families, which are of slower recipes, those that are expected to speak."""
    began = time.perf_counter()
    with fault.apply():
        always = "" if fault in FAMILIES else ALWAYS
        report = check(fault.recipe, *fault.settings, only=[*always, *(i for i in fault.expected if i[0] not in always)])
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


def matrix(results: list[dict], alarms: dict[str, int], blind: list[str]) -> str:
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
    return "\n".join([*lines, *blind])


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


def run_blind_ones(faults: Sequence[BlindFault]) -> list[dict]:
    clean_alarms: dict[tuple, bool] = {}
    results: list[dict] = []
    for fault in faults:
        results.append(run_blind(fault, clean_alarms))
        print(json.dumps({k: results[-1][k] for k in ("id", "expected")}), *results[-1]["found"], flush=True)
    return results


def later_sections() -> list[str]:
    """The faults of later lists, and those that were guessed before the checks of definitions."""
    lines = unseen_section(run_blind_ones([*FORTY, *THIRTY]), UNSEEN_BEFORE, LATER)
    lines += unseen_section(run_blind_ones(FRESH), FRESH_BEFORE, FRESH_ONES)
    lines += unseen_section(run_blind_ones(SAMPLED), SAMPLED_BEFORE, SAMPLED_ONES)
    return [*lines, *guessed_section(run_blind_ones(GUESSED)), ""]


def main() -> None:
    page, other = (ROOT / "docs" / name for name in ("detection-matrix.md", "preflight.md"))
    with tempfile.TemporaryDirectory() as folder:
        os.environ["SEEDBED_CACHE"] = folder
        blind = [] if "--later" in sys.argv else blind_section(run_blind_ones(BLIND))
        blind += later_sections()
        if {"--blind", "--later"} & {*sys.argv}:
            kept, heading, _ = page.read_text().partition(blind[1])
            assert heading
            page.write_text("\n".join([kept.rstrip("\n"), *blind]))
            return
        alarms = {recipe: len(clean(recipe)) for recipe in dict.fromkeys(f.recipe for f in FAULTS)}
        results = []
        for fault in [*FAULTS, *TRAINING, *FAMILIES]:
            results.append(run(fault))
            print(json.dumps({k: results[-1][k] for k in ("id", "expected")}), *results[-1]["found"], flush=True)
        os.chdir(folder)  # places are named relative to it
        shown = [*results, *in_files(Path(folder).resolve())]
        os.chdir(ROOT)
    page.write_text(matrix(results, alarms, blind))
    text = other.read_text()
    other.write_text(text[: text.index(START)] + catalogue_page(shown, all_checks()) + text[text.index(END) + len(END) :])


if __name__ == "__main__":
    main()
