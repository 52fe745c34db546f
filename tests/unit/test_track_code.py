"""The state of the code: commit, changes of every kind as a patch that applies, and no secrets."""

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
from fuzzing import time_limit

from seedbed.errors import UserError
from seedbed.track import code, code_patch

CLEAN = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
IDENTITY = {f"GIT_{who}_{what}": "t@example.org" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}
ENV = {**CLEAN, **IDENTITY, "GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1"}


def git(folder: Path, *words: str) -> str:
    return subprocess.run(["git", *words], cwd=folder, env=ENV, check=True, capture_output=True, text=True).stdout


@pytest.fixture(autouse=True)
def no_git_settings(monkeypatch):
    for name in [name for name in os.environ if name.startswith("GIT_")]:
        monkeypatch.delenv(name)
    for name, value in ENV.items():
        if name.startswith("GIT_"):
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


def test_clean_tree_is_its_commit(tree: Path):
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


def test_patch_turns_the_commit_into_the_work_tree(tree: Path):
    change_everything(tree)
    facts = code.state(tree)
    assert facts["dirty"] and facts["patch_left_out"] == []
    assert sorted(facts["changed"]) == ["model.py", "staged.py", "sub/data.py"]
    assert sorted(facts["untracked"]) == sorted([":(odd)*.py", "empty.py", "new file.py", "picture.bin", "sub/deep/ünï.py"])
    assert contents(fresh_copy(tree, facts)) == contents(tree)
    assert code.describe(facts).endswith("(main) + code.patch")


def test_code_state_leaves_git_unchanged(tree: Path):
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
def test_dirty_is_needed_for_every_kind_of_change(tree: Path, change: Any, named: str):
    change(tree)
    facts = code.state(tree)
    with pytest.raises(UserError, match=rf"uncommitted changes: {named}\ncommit them, or add --dirty"):
        code.require_clean(facts, dirty=False)
    code.require_clean(facts, dirty=True)
    assert facts["patch"]


def test_dirty_error_counts_many_changes(tree: Path):
    for number in range(10):
        (tree / f"{number}.py").touch()
    with pytest.raises(UserError, match=r"0\.py, 1\.py, 2\.py and 7 more"):
        code.require_clean(code.state(tree), dirty=False)


def test_dirty_ignores_runs_and_journal(tree: Path):
    (tree / "JOURNAL.md").write_text("first entry\n")
    git(tree, "add", "JOURNAL.md")
    git(tree, "commit", "-qm", "journal")
    (tree / "JOURNAL.md").write_text("second entry\n")
    (tree / "runs" / "first").mkdir(parents=True)
    (tree / "runs" / "first" / "rows.jsonl").touch()
    facts = code.state(tree, tree / "runs")
    assert not facts["dirty"] and facts["patch"] == ""
    assert code.state(tree, tree / "elsewhere")["dirty"]


def test_tree_without_a_commit_is_all_patch(tmp_path: Path):
    git(tmp_path, "init", "-q")
    (tmp_path / "a.py").write_text("a\n")
    (tmp_path / "b.py").write_text("b\n")
    git(tmp_path, "add", "b.py")
    facts = code.state(tmp_path)
    assert facts["commit"] is None and facts["dirty"]
    assert "+a\n" in facts["patch"] and "+b\n" in facts["patch"]
    assert "no commit yet" in code.describe(facts)


def test_detached_head_has_no_branch(tree: Path):
    git(tree, "checkout", "-q", "--detach")
    facts = code.state(tree)
    assert facts["branch"] is None and code.describe(facts) == f"commit {facts['commit'][:10]}"


@pytest.mark.parametrize(
    "name", [".env", ".env.local", "server.pem", "my.key", "id_rsa", "aws-credentials.json", "sub/secrets.yaml"]
)
def test_secret_files_are_named_but_not_copied(tree: Path, name: str):
    (tree / name).write_text("hunter2\n")
    facts = code.state(tree)
    assert facts["dirty"] and name in facts["untracked"]
    assert "hunter2" not in str(facts)
    assert facts["patch_left_out"] == [f"{name} (may hold secrets)"]


def test_source_file_about_secrets_is_code(tree: Path):
    (tree / "secret_sharing.py").write_text("shamir\n")
    assert "+shamir" in code.state(tree)["patch"]


def test_large_files_are_named_but_not_copied(tree: Path, monkeypatch):
    monkeypatch.setattr(code_patch, "MAX_FILE", 1000)
    (tree / "weights.bin").write_bytes(b"x" * 1001)
    (tree / "small.py").write_text("small\n")
    facts = code.state(tree)
    assert facts["patch_left_out"] == ["weights.bin (1,001 bytes)"]
    assert "+small" in facts["patch"] and len(facts["patch"]) < 500


def test_patch_has_a_limit_and_says_where_it_was_cut(tree: Path, monkeypatch):
    monkeypatch.setattr(code_patch, "MAX_PATCH", 1000)
    (tree / "model.py").write_text("\n".join(map(str, range(10_000))))
    facts = code.state(tree)
    assert len(facts["patch"]) == 1000
    assert facts["patch_left_out"] == ["the end (over 1,000 bytes)"]


def test_repository_inside_is_named(tree: Path):
    inner = tree / "inner"
    inner.mkdir()
    git(inner, "init", "-q")
    (inner / "x.py").touch()
    assert code.state(tree)["patch_left_out"] == ["inner/ (a repository of its own)"]


def test_git_state_is_empty_outside_a_repository(tmp_path: Path):
    facts = code.state(tmp_path)
    assert facts["commit"] is None and "dirty" not in facts and "patch" not in facts
    code.require_clean(facts, dirty=False)
    assert code.describe(facts) == "not in a git work tree"


@pytest.mark.parametrize("kind", ["missing", "broken"])
def test_git_missing_does_not_stop_a_run(tree: Path, monkeypatch, tmp_path: Path, kind: str):
    tools = tmp_path / "tools"
    tools.mkdir()
    if kind == "broken":
        (tools / "git").write_text("#!/bin/sh\nexit 128\n")
        (tools / "git").chmod(0o755)
    monkeypatch.setenv("PATH", str(tools))
    facts = code.state(tree)
    assert facts["commit"] is None
    code.require_clean(facts, dirty=False)


def test_surroundings_are_recorded_and_the_environment_is_not(tmp_path: Path, monkeypatch):
    monkeypatch.setenv("API_TOKEN", "hunter2")
    facts = code.state(tmp_path)
    assert facts["python"].startswith("3.") and facts["packages"]["torch"].startswith("2.")
    assert facts["hostname"] == os.uname().nodename
    assert "hunter2" not in str(facts)
    assert facts["version"] == code.version()


SECRET_NAMES = (
    *("prod.env", ".envrc", "id_ecdsa", "id_dsa.pub", "cert.p12", "store.pfx", "app.jks", "token.json", "kubeconfig", "_netrc"),
    *("kubeconfig.yaml", "prod.tfvars", "terraform.tfstate", "secrets.py", "credentials.py", "Secrets.PY", "sub/api_keys.py"),
    *("hf_token", "hub-token.txt", ".aws/config", ".ssh/known_hosts", "passwords.txt", "auth.json", "service-account-x.json"),
    *(".git-credentials", ".pgpass", "vpn.ovpn", "keys.kdbx", "PROD.ENV", "deploy.KEY"),
)


@pytest.mark.parametrize("name", SECRET_NAMES)
def test_secret_by_name_is_left_out_of_the_patch(tree: Path, name: str):
    (tree / name).parent.mkdir(exist_ok=True)
    (tree / name).write_text("hunter2\n")
    facts = code.state(tree)
    assert "hunter2" not in str(facts) and facts["patch_left_out"] == [f"{name} (may hold secrets)"]


# Written in two parts, so that no scanner takes this file for a leak.
SECRET_TEXTS = {
    "a private key": "-----BEGIN OPENSSH PRIV" + "ATE KEY-----\nb3BlbnNzaC1rZXktdjEA\n",
    "a private key ": "-----BEGIN PRIV" + "ATE KEY-----\n",
    "an AWS key": "key: AK" + "IAIOSFODNN7EXAMPLE",
    "a GitHub token": "x = gh" + "p_" + "aB3" * 12,
    "a GitLab token": "glp" + "at-" + "aB3-" * 5,
    "a Slack token": "xo" + "xb-123456789012-abc",
    "a Hugging Face token": "login('h" + "f_" + "aBcDeFgHiJ" * 3 + "')",
    "an API key": "client = Client('s" + "k-" + "proj-aB3dE6gH9jK2mN5pQ8')",
    "a JSON web token": "ey" + "JhbGciOiJIUzI1NiJ9.ey" + "JzdWIiOiIxMjM0NTY3ODkwIn0.dozjgNryP4J3jVmNHl0w5N",
    "a password in an address": "postgres" + "://admin:hunter2pass@db.example.org/x",
    "a secret in a variable": "export MY_API_TO" + "KEN=correcthorsebattery",
    "a secret in an assignment": "wandb_api_" + "key = '0123456789abcdef0123456789abcdef01234567'",
    "a secret in an assignment ": '{"client_sec' + 'ret": "qW3rT6yU9iOp2aS5dF8gH"}',
}


@pytest.mark.parametrize("what", SECRET_TEXTS)
@pytest.mark.parametrize("where", ["new", "changed", "removed"])
def test_secret_by_content_is_left_out_of_the_patch(tree: Path, what: str, where: str):
    """In a new file, in changed lines of a known one, and in lines that were taken away."""
    text = SECRET_TEXTS[what]
    (tree / "other.py").write_text("fine\n")
    if where == "new":
        (tree / "notes.py").write_text(f"a\n{text}\n")
    elif where == "changed":
        (tree / "model.py").write_text(f"one\n{text}\n")
    else:
        (tree / "model.py").write_text(f"one\n{text}\n")
        git(tree, "commit", "-qam", "leaked")
        (tree / "model.py").write_text("one\n")
    facts = code.state(tree)
    name = "notes.py" if where == "new" else "model.py"
    assert facts["patch_left_out"] == [f"{name} (holds {what.strip()})"]
    assert not any(line in str(facts) for line in text.splitlines() if line) and "+fine" in facts["patch"]
    assert name in [*facts["changed"], *facts["untracked"]], "it is still named"


INNOCENT = (
    "tokenizer = 'meta-llama/Llama-2-7b-chat-hf'\nnum_tokens = 1234567890123\n",
    "PAD_TOKEN = '<|endoftext|>'\ntoken = self.tokenizer.encode(text)[0]\n",
    "def password_strength(password: str) -> float: ...\n",
    "sha256 = '9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08'\n",
    "url = 'https://example.org/a/b?c=d'\nauth = None\n",
    "secret_sharing(threshold=3)\nAUTH_URL=https\n",
    "weights = torch.randn(3)  # token_embedding_weight=transformer_layer_12\n",
    "access_key_help = 'press the key that opens the menu and hold it'\n",
)


@pytest.mark.parametrize("text", INNOCENT, ids=range(len(INNOCENT)))
def test_code_about_tokens_is_code(tree: Path, text: str):
    (tree / "new.py").write_text(text)
    (tree / "tokenizer.json").write_text("{}")
    (tree / "tokens.py").write_text("ids\n")
    facts = code.state(tree)
    assert facts["patch_left_out"] == [] and all(f"+{line}" in facts["patch"] for line in text.splitlines())


def test_patch_without_secrets_still_applies(tree: Path):
    (tree / "model.py").write_text("one\n2\n")
    (tree / "prod.env").write_text("hunter2\n")
    (tree / "notes.py").write_text(SECRET_TEXTS["an AWS key"])
    (tree / "bild ä.bin").write_bytes(bytes(range(256)))
    facts = code.state(tree)
    copy = fresh_copy(tree, facts)
    assert (copy / "model.py").read_text() == "one\n2\n" and (copy / "bild ä.bin").read_bytes() == bytes(range(256))
    assert not (copy / "prod.env").exists() and not (copy / "notes.py").exists()


@pytest.mark.parametrize("text", ["a.", "TOKEN", "TOKEN=", "eyJ", "\n", " ", "secret", "x://", "key = '", "-----BEGIN ", "A1b"])
def test_secret_detection_is_fast(text: str):
    """Patterns that repeat: a search that tries again from every place would take hours."""
    with time_limit(10.0, text):
        code_patch.found((text * 500_000)[:500_000].encode())


def test_patch_omissions_are_reported(tree: Path):
    for n in range(7):
        (tree / f"{n}.env").write_text("hunter2\n")
    messages = code.left_out(code.state(tree))
    assert "0.env (may hold secrets)" in messages and "and 2 more" in messages and "hunter2" not in messages
    assert code.left_out({}) == ""


def test_recipe_with_a_secret_is_not_copied(tmp_path: Path, capsys):
    from helpers import TOY

    from seedbed.launch import local

    recipe = tmp_path / "leaky.py"
    recipe.write_text(Path(TOY).read_text() + f"\n# {SECRET_TEXTS['an AWS key']}\n")
    assert local.train(str(recipe), ["steps=2"], root=tmp_path / "runs", run_name="one", dirty=True) == 0
    assert not (tmp_path / "runs" / "one" / "leaky.py").exists() and "not copied" in capsys.readouterr().err


def test_mirrors_never_see_the_patch():
    """No mirror names it, and W&B, which would send a patch of its own making, is told not to."""
    from seedbed.report import mirrors

    sources = {path.name: path.read_text() for path in Path(mirrors.__file__).parent.glob("*.py")}
    assert {"base.py", "services.py"} < set(sources) and not any(
        "code.patch" in text or "code_json" in text for text in sources.values()
    )
    assert '"save_code": False, "disable_git": True' in sources["services.py"]
