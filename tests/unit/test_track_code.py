"""The state of the code: commit, changes of every kind as a patch that applies, and no secrets."""

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from seedbed.errors import UserError
from seedbed.track import code

CLEAN = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
IDENTITY = {f"GIT_{who}_{what}": "t@example.org" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}
ENV = {**CLEAN, **IDENTITY, "GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1"}


def git(folder: Path, *words: str) -> str:
    return subprocess.run(["git", *words], cwd=folder, env=ENV, check=True, capture_output=True, text=True).stdout


@pytest.fixture(autouse=True)
def no_git_settings(monkeypatch):
    for name in set(os.environ) - set(CLEAN):
        monkeypatch.delenv(name)
    for name, value in ENV.items():
        monkeypatch.setenv(name, value)


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A work tree with one commit."""
    folder = tmp_path / "tree"
    (folder / "sub").mkdir(parents=True)
    (folder / "model.py").write_text("one\ntwo\n")
    (folder / "sub" / "data.py").write_text("data\n")
    (folder / ".gitignore").write_text("*.log\n")
    git(folder, "init", "-q", "-b", "main")
    git(folder, "add", ".")
    git(folder, "commit", "-qm", "first")
    return folder


def fresh_copy(tree: Path, facts: dict[str, Any]) -> Path:
    """The commit alone, with the recorded patch applied."""
    copy = tree.parent / "copy"
    git(tree.parent, "clone", "-q", str(tree), str(copy))
    patch = tree.parent / "code.patch"
    patch.write_bytes(facts["patch"].encode(errors="surrogateescape"))
    git(copy, "apply", "--binary", str(patch))
    return copy


def contents(folder: Path) -> dict[str, bytes]:
    paths = [p for p in folder.rglob("*") if p.is_file() and ".git" not in p.relative_to(folder).parts and p.suffix != ".log"]
    return {str(p.relative_to(folder)): p.read_bytes() for p in paths}


def test_a_clean_tree_is_its_commit(tree: Path):
    facts = code.state(tree / "sub")
    assert facts["commit"] == git(tree, "rev-parse", "HEAD").strip()
    assert (facts["branch"], facts["dirty"], facts["changed"], facts["untracked"], facts["patch"]) == ("main", False, [], [], "")
    code.require_clean(facts, dirty=False)
    assert code.describe(facts) == f"commit {facts['commit'][:10]} (main)"


def change_everything(tree: Path) -> None:
    (tree / "model.py").write_text("one\n2\nthree")
    (tree / "sub" / "data.py").unlink()
    (tree / "staged.py").write_text("staged\n")
    git(tree, "add", "staged.py")
    (tree / "staged.py").write_text("staged, then changed\n")
    (tree / "new file.py").write_text("new\n")
    (tree / "sub" / "deep").mkdir()
    (tree / "sub" / "deep" / "ünï.py").write_text("non-ascii name\n")
    (tree / "picture.bin").write_bytes(bytes(range(256)))
    (tree / ":(odd)*.py").write_text("pathspec magic\n")
    (tree / "empty.py").touch()
    (tree / "noise.log").write_text("ignored")


def test_the_patch_turns_the_commit_into_the_work_tree(tree: Path):
    change_everything(tree)
    facts = code.state(tree)
    assert facts["dirty"] and facts["patch_left_out"] == []
    assert sorted(facts["changed"]) == ["model.py", "staged.py", "sub/data.py"]
    assert sorted(facts["untracked"]) == sorted([":(odd)*.py", "empty.py", "new file.py", "picture.bin", "sub/deep/ünï.py"])
    assert contents(fresh_copy(tree, facts)) == contents(tree)
    assert code.describe(facts).endswith("(main) + code.patch")


def test_looking_changes_nothing(tree: Path):
    change_everything(tree)
    before = git(tree, "status", "--porcelain"), (tree / ".git" / "index").read_bytes()
    code.state(tree)
    assert (git(tree, "status", "--porcelain"), (tree / ".git" / "index").read_bytes()) == before


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda t: (t / "model.py").write_text("x"), "model.py"),
        (lambda t: ((t / "model.py").write_text("x"), git(t, "add", ".")), "model.py"),
        (lambda t: (t / "new.py").write_text("x"), "new.py"),
        (lambda t: (t / "model.py").unlink(), "model.py"),
        (lambda t: (t / "model.py").chmod(0o755), "model.py"),
    ],
)
def test_every_kind_of_change_needs_dirty(tree: Path, change: Any, named: str):
    change(tree)
    facts = code.state(tree)
    with pytest.raises(UserError, match=rf"uncommitted changes: {named}\ncommit them, or add --dirty"):
        code.require_clean(facts, dirty=False)
    code.require_clean(facts, dirty=True)
    assert facts["patch"]


def test_many_changes_are_counted(tree: Path):
    for number in range(10):
        (tree / f"{number}.py").touch()
    with pytest.raises(UserError, match=r"0\.py, 1\.py, 2\.py and 7 more"):
        code.require_clean(code.state(tree), dirty=False)


def test_runs_and_journal_are_no_changes(tree: Path):
    (tree / "JOURNAL.md").write_text("first entry\n")
    git(tree, "add", "JOURNAL.md")
    git(tree, "commit", "-qm", "journal")
    (tree / "JOURNAL.md").write_text("second entry\n")
    (tree / "runs" / "first").mkdir(parents=True)
    (tree / "runs" / "first" / "rows.jsonl").touch()
    facts = code.state(tree, tree / "runs")
    assert not facts["dirty"] and facts["patch"] == ""
    assert code.state(tree, tree / "elsewhere")["dirty"]


def test_a_tree_without_a_commit_is_all_patch(tmp_path: Path):
    git(tmp_path, "init", "-q")
    (tmp_path / "a.py").write_text("a\n")
    (tmp_path / "b.py").write_text("b\n")
    git(tmp_path, "add", "b.py")
    facts = code.state(tmp_path)
    assert facts["commit"] is None and facts["dirty"]
    assert "+a\n" in facts["patch"] and "+b\n" in facts["patch"]
    assert "no commit yet" in code.describe(facts)


def test_a_detached_head_has_no_branch(tree: Path):
    git(tree, "checkout", "-q", "--detach")
    facts = code.state(tree)
    assert facts["branch"] is None and code.describe(facts) == f"commit {facts['commit'][:10]}"


@pytest.mark.parametrize(
    "name", [".env", ".env.local", "server.pem", "my.key", "id_rsa", "aws-credentials.json", "sub/secrets.yaml"]
)
def test_what_may_hold_secrets_is_named_but_not_copied(tree: Path, name: str):
    (tree / name).write_text("hunter2\n")
    facts = code.state(tree)
    assert facts["dirty"] and name in facts["untracked"]
    assert "hunter2" not in str(facts)
    assert facts["patch_left_out"] == [f"{name} (may hold secrets)"]


def test_a_source_file_about_secrets_is_code(tree: Path):
    (tree / "secret_sharing.py").write_text("shamir\n")
    assert "+shamir" in code.state(tree)["patch"]


def test_large_files_are_named_but_not_copied(tree: Path, monkeypatch):
    monkeypatch.setattr(code, "MAX_FILE", 1000)
    (tree / "weights.bin").write_bytes(b"x" * 1001)
    (tree / "small.py").write_text("small\n")
    facts = code.state(tree)
    assert facts["patch_left_out"] == ["weights.bin (1,001 bytes)"]
    assert "+small" in facts["patch"] and len(facts["patch"]) < 500


def test_a_patch_has_a_limit_and_says_where_it_was_cut(tree: Path, monkeypatch):
    monkeypatch.setattr(code, "MAX_PATCH", 1000)
    (tree / "model.py").write_text("\n".join(map(str, range(10_000))))
    facts = code.state(tree)
    assert len(facts["patch"]) == 1000
    assert facts["patch_left_out"] == ["the end (over 1,000 bytes)"]


def test_a_repository_inside_is_named(tree: Path):
    inner = tree / "inner"
    inner.mkdir()
    git(inner, "init", "-q")
    (inner / "x.py").touch()
    assert code.state(tree)["patch_left_out"] == ["inner/ (a repository of its own)"]


def test_outside_git_there_is_no_state_and_no_guard(tmp_path: Path):
    facts = code.state(tmp_path)
    assert facts["commit"] is None and "dirty" not in facts and "patch" not in facts
    code.require_clean(facts, dirty=False)
    assert code.describe(facts) == "not in a git work tree"


@pytest.mark.parametrize("kind", ["missing", "broken"])
def test_without_a_working_git_a_run_can_start(tree: Path, monkeypatch, tmp_path: Path, kind: str):
    tools = tmp_path / "tools"
    tools.mkdir()
    if kind == "broken":
        (tools / "git").write_text("#!/bin/sh\nexit 128\n")
        (tools / "git").chmod(0o755)
    monkeypatch.setenv("PATH", str(tools))
    facts = code.state(tree)
    assert facts["commit"] is None
    code.require_clean(facts, dirty=False)


def test_the_surroundings_are_recorded_and_the_environment_is_not(tmp_path: Path, monkeypatch):
    monkeypatch.setenv("API_TOKEN", "hunter2")
    facts = code.state(tmp_path)
    assert facts["python"].startswith("3.") and facts["packages"]["torch"].startswith("2.")
    assert facts["hostname"] == os.uname().nodename
    assert "hunter2" not in str(facts)
    assert facts["version"] == code.version()
