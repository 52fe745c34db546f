"""Registry, case, runner and findings of the preflight: order, choice, broken checks, verdicts, and no side effects."""

import json
import random
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import ROOT

from seedbed import config as configs
from seedbed.checks import runner
from seedbed.checks.registry import CHECKS, WORDS, Check, all_checks, check, failed, passed
from seedbed.checks.subject import Subject, preserve_global_state, shrink, source_line
from seedbed.errors import EXIT_FAILED, EXIT_OK, EXIT_WARNING, UserError
from seedbed.recipes import find
from seedbed.report.findings import Finding, Report

TOY = str(ROOT / "tests" / "toy_recipe.py")


def toy_case(*settings: str) -> Subject:
    recipe, preset = find(TOY)
    return Subject(recipe, preset, configs.override(recipe.preset(preset), settings), Path("nowhere"))


def made(run, id: str = "A9", severity: str = "err", needs: tuple[str, ...] = ()) -> Check:
    return Check(id, "made", severity, run, (1,), False, needs)  # type: ignore[arg-type]


@pytest.mark.parametrize(("name", "id"), [("initialisation", "M2"), ("EMA", "O7")])
def test_check_title_in_place_of_an_id_names_the_id(name: str, id: str) -> None:
    with pytest.raises(UserError, match=re.escape(f"checks are named by id; {name!r} is {id}")):
        runner.select([name])


def test_every_case_has_words_and_every_words_a_case() -> None:
    source = "".join(path.read_text() for path in (ROOT / "src" / "seedbed" / "checks").glob("*.py"))
    named = {*re.findall(r'"([A-Z]\d+-[a-z-]+)"', source)}
    assert named == {name for name in WORDS if "-" in name}
    assert {name.partition("-")[0] for name in WORDS} <= {c.id for c in all_checks()}
    given = {*re.findall(r'case="([A-Z]\d+-[a-z-]+)", fix=', source)}
    assert all(words["why"] and (words.get("fix") or name in given) for name, words in WORDS.items())


def test_a_case_gives_its_words_and_a_fix_of_its_own_counts() -> None:
    assert failed("x", where="y", case="D8-lost").why == WORDS["D8-lost"]["why"]
    assert failed("x", where="y", case="H3-batch", fix="batch=4").fix == "batch=4"
    with pytest.raises(KeyError):
        failed("x", where="y", case="D8-unknown")


def test_check_titles_are_unique_and_short() -> None:
    titles = {c.id: c.title for c in all_checks()}
    assert len(set(titles.values())) == len(titles) and max(map(len, titles.values())) <= 16


def test_checks_have_ids_titles_and_an_order():
    found = all_checks()
    assert [c.id for c in found] == sorted(CHECKS, key=lambda id: CHECKS[id].rank)
    assert len({c.id for c in found}) == len(found) >= 40
    for one in found:
        assert one.title and one.humbatova, f"{one.id} answers to no category"


def test_check_ids_are_unique():
    with pytest.raises(AssertionError, match="twice"):
        check("D4", "again", "err", humbatova=(1,))(lambda subject: passed())


@pytest.mark.parametrize(
    ("only", "skip", "has", "lacks"),
    [
        ((), (), {"A1", "M4", "L1"}, set()),
        (("M4",), (), {"M4"}, {"A1", "M5"}),
        (("M",), (), {"M1", "M9"}, {"A1", "L1"}),
        ((), ("M",), {"A1", "L1"}, {"M1", "M9"}),
        (("M", "L1"), ("M4",), {"M3", "L1"}, {"M4", "L2"}),
    ],
)
def test_check_selection(only, skip, has, lacks):
    chosen = {c.id for c in runner.select(only, skip)}
    assert has <= chosen and not lacks & chosen


@pytest.mark.parametrize("wrong", ["Q1", "m4", "M44", ""])
def test_unknown_id_is_an_error_that_names_the_known(wrong: str):
    with pytest.raises(UserError, match="M4"):
        runner.select([wrong])
    with pytest.raises(UserError, match="M4"):
        runner.select([], [wrong])


def test_quick_set_is_the_one_that_train_runs():
    assert {c.id for c in runner.select(quick=True)} >= {"A1", "A2", "A3", "A4", "D4", "D5", "D6", "M3", "O1"}


@pytest.mark.parametrize(
    ("severities", "code"), [([], EXIT_OK), (["note"], EXIT_OK), (["warn", "note"], EXIT_WARNING), (["warn", "err"], EXIT_FAILED)]
)
def test_exit_codes(severities: list[str], code: int):
    findings = [Finding("A1", "x", "fail", s, 0.0, "what", "where", "why", "fix") for s in severities]
    passing = [Finding("A2", "x", "pass", "err", 0.0), Finding("A3", "x", "skip", "err", 0.0, "reason")]
    assert Report("r", findings=[*findings, *passing]).exit_code == code


def test_failure_prints_five_lines_and_survives_json():
    subject = toy_case()
    bad = made(lambda subject: failed("seen", where="here.py:1", why="because", fix="do it", value=2.0, limit=1.0))
    report = runner.run(subject, [bad])
    (finding,) = report.findings
    lines = finding.lines(report.name)
    assert [line.split()[0] for line in lines] == ["FAIL", "what", "where", "why", "fix"]
    assert "--only A9" in lines[-1]
    again = Report.from_json(json.loads(json.dumps(report.json())))
    assert again.json() == report.json()
    assert report.exit_code == EXIT_FAILED


def test_severity_can_be_lowered_by_a_result():
    report = runner.run(toy_case(), [made(lambda c: Finding(status="fail", what="w", severity="note"))])
    assert report.findings[0].severity == "note" and not report.findings[0].alarm and report.exit_code == EXIT_OK


class Broken:
    def evaluate(self) -> Finding:
        raise ValueError("no such column")


@pytest.mark.parametrize("explains", [True, False])
def test_error_is_left_to_the_check_that_explains_it(explains: bool):
    """An error inside `evaluate` belongs to V1; where V1 does not meet it, the check that did reports it."""
    later = made(lambda subject: Broken().evaluate() if explains else passed("fine"), "V1")
    early, late = runner.run(toy_case(), [made(lambda subject: Broken().evaluate(), "T4"), later]).findings
    assert (early.status, late.status) == (("skip", "fail") if explains else ("fail", "pass"))
    assert "no such column" in (late if explains else early).what and not early.follows and not late.follows


def test_findings_that_follow_from_another_are_folded_beneath_it():
    def fails(id: str, where: str, severity: str = "err") -> Check:
        return made(lambda subject: failed("seen", where=where, why="why", fix="fix"), id, severity)

    chosen = [
        fails("A9", "a.py:1 f"),
        fails("C1", "b.py:2 g"),
        fails("O9", "b.py:2 g"),
        fails("V4", "c.py:3 h"),
        fails("T9", "d.py:4"),
    ]
    report = runner.run(toy_case(), chosen)
    assert {f.id: f.follows for f in report.findings} == {"A9": "", "C1": "", "O9": "C1", "V4": "C1", "T9": ""}
    assert "follows from C1: O9, V4" in str(report) and [f.id for f in report.of("err")] == ["A9", "C1", "T9"]
    assert Report.from_json(json.loads(json.dumps(report.json()))).json() == report.json()
    # An error is never hidden beneath a warning.
    report = runner.run(toy_case(), [fails("C1", "b.py:2", "warn"), fails("V4", "b.py:2")])
    assert not report.findings[1].follows and report.exit_code == EXIT_FAILED


def test_broken_check_is_a_finding_reported_once():
    def explode(subject: Subject) -> Finding:
        raise ValueError("boom")

    report = runner.run(toy_case(), [made(explode, "A8"), made(explode, "A9")])
    first, second = report.findings
    assert first.status == "fail" and first.severity == "err" and "boom" in first.what
    assert "test_checks_runner.py:" in first.where
    assert second.status == "skip" and "A8" in second.what


def test_error_in_the_recipe_names_the_line_of_the_recipe(tmp_path: Path):
    source = Path(TOY).read_text().replace("self.num_calls += 1", "self.num_calls += 1 / len([])")
    path = tmp_path / "broken.py"
    path.write_text(source)
    recipe, preset = find(str(path))
    report = runner.run(Subject(recipe, preset, recipe.preset(preset), tmp_path), runner.select(["M3"]))
    line = next(i for i, text in enumerate(source.splitlines(), 1) if "len([])" in text)
    assert f"broken.py:{line}" in report.findings[0].where
    assert "ZeroDivisionError" in report.findings[0].what


def test_undeclared_probe_fields_skip_checks_with_a_reason():
    report = runner.run(toy_case(), [made(lambda subject: passed(), needs=("oracle",))])
    assert report.findings[0].status == "skip" and "probe" in report.findings[0].what


def test_checks_restore_global_state():
    subject = toy_case()
    torch.manual_seed(5)
    random.seed(5)
    np.random.seed(5)
    threads, flags = torch.get_num_threads(), torch.get_deterministic_debug_mode()
    dice = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    runner.run(subject, runner.select(["A", "D", "M", "L", "C"]))
    assert torch.equal(torch.get_rng_state(), dice[0])
    assert random.getstate() == dice[1] and np.random.get_state()[1].tolist() == dice[2]
    assert torch.get_num_threads() == threads and torch.get_deterministic_debug_mode() == flags
    assert torch.get_default_dtype() == torch.float32


def test_flags_are_put_back_after_an_error():
    with pytest.raises(ZeroDivisionError), preserve_global_state():
        torch.set_default_dtype(torch.float64)
        _ = 1 / 0
    assert torch.get_default_dtype() == torch.float32


def test_shrinking_keeps_a_config_legal_and_says_what_it_did():
    recipe, _ = find("gpt/demo")
    for name, make in recipe.presets.items():
        small, changes = shrink(make())
        assert small.model.width % small.model.heads == 0, name
        assert small.model.depth <= 2 and small.data.block == 11
        for key, (old, new) in changes.items():
            assert configs.flatten(make())[key] == old and configs.flatten(small)[key] == new


def test_batches_are_copies_and_perturbed_systems_are_float64():
    subject = toy_case()
    batch = subject.batch()
    for value in batch.values():
        value.zero_()
    assert subject.batch()["x"].abs().sum() > 0
    assert subject.dtype == torch.float64 and not subject.perturbed().training
    assert subject.perturbed() is subject.perturbed()
    assert subject.fresh_system() is not subject.fresh_system()


def test_finding_locations_exist():
    assert source_line(runner.run).startswith("seedbed/checks/runner.py:")
    assert source_line(len) == "len"


def test_verdict_key_covers_all_it_depends_on(tmp_path: Path):
    recipe, preset = find(TOY)
    config = recipe.preset(preset)
    report = Report("toy", findings=[Finding("A1", "keys", "pass", "err", 0.1)], key=runner.key_of(recipe, config, "data"))
    runner.save_verdict(tmp_path, report)
    found = runner.load_verdict(tmp_path, report.key)
    assert found is not None and found.json() == report.json()
    assert runner.load_verdict(tmp_path, runner.key_of(recipe, config, "other data")) is None
    assert runner.load_verdict(tmp_path, runner.key_of(recipe, configs.override(config, ["steps=13"]), "data")) is None
    (tmp_path / f"{report.key}.json").write_text('{"half":')
    assert runner.load_verdict(tmp_path, report.key) is None
