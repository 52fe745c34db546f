"""What a stranger's file must not be able to do: run code, reach other files, fill the memory; and what we must not write."""

import ast
import hashlib
import io
import json
import os
import pickle
import re
import zipfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch
from conftest import ROOT
from helpers import TOY, resume, start
from test_style import SOURCES, short

from seedbed import inference
from seedbed.cli import main
from seedbed.data import image_dataset, image_store, limits, tokenizers
from seedbed.data.corpus import open_corpus
from seedbed.data.store import digest
from seedbed.errors import UserError
from seedbed.recipes import find
from seedbed.recipes.saved import find_saved
from seedbed.track import files, jsonl
from seedbed.train import checkpoint, checkpoint_loading

# ---- what our own source may call ------------------------------------------------------------------------------------

READERS = {
    "yaml.load": "yaml.safe_load", "yaml.unsafe_load": "yaml.safe_load", "yaml.full_load": "yaml.safe_load",
    "torch.jit.load": "safetensors", "torch.hub.load": "a package", "torch.package.PackageImporter": "safetensors",
    "pandas.read_pickle": "arrays", "pd.read_pickle": "arrays", "shutil.unpack_archive": "tarfile with a filter",
    "tempfile.mktemp": "tempfile.mkstemp", "os.execvp": "subprocess", "compile": "nothing", "builtins.eval": "nothing",
}  # fmt: skip
# Modules named by a variable: where the variable can only come from a table of ours, or was looked at first.
IMPORTERS = {
    "src/seedbed/config/__init__.py": "registries that fields of a dataclass name",
    "src/seedbed/__init__.py": "a table in the file",
    "src/seedbed/recipes/__init__.py": "a folder of the package",
    "src/seedbed/recipes/catalogue.py": "a folder of the package",
    "src/seedbed/checks/registry.py": "modules of the package",
    "src/seedbed/cli/__init__.py": "a table in the file",
    "src/seedbed/recipes/world/simulators/__init__.py": "a table in the file",
    "src/seedbed/data/image_store.py": "data.encode, which a test below looks at",
}


def risky(tree: ast.AST, name: str) -> Iterator[str]:
    """Calls that parse, unpack or import what a file says."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        called, words = ast.unparse(node.func), {k.arg: ast.unparse(k.value) for k in node.keywords}
        if called in READERS:
            yield f"line {node.lineno}: {called}(; use {READERS[called]}"
        if called in ("np.load", "numpy.load") and words.get("allow_pickle") != "False":
            yield f"line {node.lineno}: np.load without allow_pickle=False"
        if called.endswith((".extractall", ".extract")) and words.get("filter") != "'data'":
            yield f"line {node.lineno}: {called} without filter='data'"
        constant = bool(node.args) and isinstance(node.args[0], ast.Constant)
        if called in ("importlib.import_module", "import_module") and not constant and name not in IMPORTERS:
            yield f"line {node.lineno}: imports a module that a variable names"


@pytest.mark.parametrize("path", SOURCES, ids=short)
def test_unsafe_parsers_are_not_used_in_the_source(path: Path) -> None:
    tree = ast.parse(path.read_text())
    assert list(risky(tree, short(path))) == [], "and tests/test_style.py looks for pickle, eval, shell=True and their like"


@pytest.mark.parametrize(
    "code",
    [
        "yaml.load(f)", "np.load(p)", "np.load(p, allow_pickle=flag)", "torch.jit.load(p)", "archive.extractall(p)",
        "archive.extractall(p, filter='fully_trusted')", "importlib.import_module(name)", "pd.read_pickle(p)",
    ],
)  # fmt: skip
def test_unsafe_parser_gate_catches(code: str) -> None:
    assert list(risky(ast.parse(code), "src/seedbed/new.py"))


@pytest.mark.parametrize("code", ["np.load(p, allow_pickle=False)", "import_module('wandb')", "a.extractall(p, filter='data')"])
def test_unsafe_parser_gate_lets_pass(code: str) -> None:
    assert not list(risky(ast.parse(code), "src/seedbed/new.py"))


def test_unsafe_parser_gate_exceptions_are_still_needed() -> None:
    for name in IMPORTERS:
        assert list(risky(ast.parse((ROOT / name).read_text()), "elsewhere.py")), f"{name} needs no exception any more"


def test_security_page_names_existing_tests() -> None:
    text = (ROOT / "docs" / "security.md").read_text()
    known = "".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    named = set(re.findall(r"`(test_\w+)`", text))
    assert len(named) > 20 and not [name for name in named if f"def {name}(" not in known]
    assert not [name for name in re.findall(r"`(tests/[\w/]+\.py)`", text) if not (ROOT / name).is_file()]


# ---- planted files ---------------------------------------------------------------------------------------------------


class Bomb:
    """Unpickling it leaves a mark."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self):
        return (os.mkdir, (str(self.mark),))


@pytest.fixture
def bomb(tmp_path: Path) -> Iterator[bytes]:
    """A pickle that must not go off while a test runs."""
    yield pickle.dumps(Bomb(tmp_path / "exploded"))
    assert not (tmp_path / "exploded").exists(), "a planted file ran code"


def zipped(bomb: bytes) -> bytes:
    """A pickle as torch.save wraps it."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        archive.writestr("archive/data.pkl", bomb)
    return out.getvalue()


def plant(folder: Path, name: str, content: bytes) -> None:
    """Exchange a file of a checkpoint and let the manifest vouch for it, as a stranger could."""
    (folder / name).write_bytes(content)
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["sha256"][name] = hashlib.sha256(content).hexdigest()
    (folder / "manifest.json").write_text(json.dumps(manifest))


def huge_header(claimed: int = 10 << 20) -> bytes:
    return claimed.to_bytes(8, "little") + b'{"a":' + b" " * 1000


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    return checkpoint.save(tmp_path, 4, {"model": {"w": torch.ones(3)}}, {"items": 4})


@pytest.mark.parametrize("wrap", [bytes, zipped], ids=["pickle", "pt"])
@pytest.mark.parametrize("name", ["model.safetensors", "state.json", "manifest.json"])
def test_pickle_in_a_checkpoint_is_refused(saved: Path, bomb: bytes, wrap, name: str) -> None:
    if name == "manifest.json":
        (saved / name).write_bytes(wrap(bomb))
    else:
        plant(saved, name, wrap(bomb))
    with pytest.raises(checkpoint_loading.Damaged):
        checkpoint_loading.load(saved)


@pytest.mark.parametrize("name", ["model.pt", "../../model.safetensors", "/etc/passwd", "sub/model.safetensors", ".metadata", ""])
def test_manifest_names_only_files_of_its_folder(saved: Path, bomb: bytes, name: str) -> None:
    manifest = json.loads((saved / "manifest.json").read_text())
    manifest["sha256"][name] = hashlib.sha256(bomb).hexdigest()
    del manifest["hash"]
    (saved / "manifest.json").write_text(json.dumps({**manifest, "hash": checkpoint.digest(manifest)}))
    with pytest.raises(checkpoint_loading.Damaged, match="no file of a checkpoint"):
        checkpoint_loading.load(saved)


def test_best_checkpoint_link_stays_in_its_folder(saved: Path, tmp_path: Path) -> None:
    checkpoint.mark_best(tmp_path, saved)
    assert checkpoint.best(tmp_path) == saved.resolve()
    elsewhere = tmp_path / "elsewhere" / "checkpoints"
    elsewhere.mkdir(parents=True)
    (elsewhere / "best").symlink_to(saved)
    assert checkpoint.best(elsewhere) is None


@pytest.mark.parametrize("content", [huge_header(), huge_header(2**60), b"", b"\0" * 8, b"\xff" * 8 + b"{}"])
def test_header_that_claims_too_much_is_refused(saved: Path, content: bytes, tmp_path: Path) -> None:
    plant(saved, "model.safetensors", content)
    with pytest.raises(checkpoint_loading.Damaged):
        checkpoint_loading.load(saved)
    (tmp_path / "images.safetensors").write_bytes(content)
    with pytest.raises(UserError, match="cannot be read"):
        image_dataset.open_image_dataset(str(tmp_path / "images.safetensors"))


def test_valid_header_passes() -> None:
    many = {f"model.blocks.{n}.attention.projection.weight": torch.zeros(1) for n in range(5000)}
    assert not limits.header_problem(safetensors.torch.save(many)[:8])


def test_json_has_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "big.json").write_text(json.dumps({"a": "x" * 1000}))
    monkeypatch.setattr(files, "MAX_JSON", 100)
    with pytest.raises(UserError, match="larger than"):
        jsonl.read_object(tmp_path / "big.json")
    with pytest.raises(ValueError, match="larger than"):
        files.read_json(tmp_path / "big.json")


@pytest.mark.parametrize("text", ["[" * 100_000, '{"a":' * 100_000])
def test_deep_nesting_is_damage_not_a_crash(tmp_path: Path, text: str) -> None:
    (tmp_path / "deep.json").write_text(text)
    with pytest.raises(UserError, match="damaged"):
        jsonl.read_object(tmp_path / "deep.json")
    with pytest.raises(ValueError):
        files.read_json(tmp_path / "deep.json")


@pytest.mark.parametrize("name", ["a.npy", "a.npz"])
def test_arrays_of_objects_are_refused(tmp_path: Path, name: str) -> None:
    objects = np.array([Bomb(tmp_path / "exploded")], dtype=object)
    (np.save if name == "a.npy" else np.savez)(tmp_path / name, objects)
    with pytest.raises(UserError, match="cannot be read"):
        image_dataset.open_image_dataset(str(tmp_path / name))
    assert not (tmp_path / "exploded").exists()


@pytest.mark.parametrize("content", [b"\x80\x04.", b"{}", b'{"kind": "char"}', b"[1]", b'{"model": {"type": "exec"}}', b"\xff"])
def test_planted_tokenizer_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "tokenizer.json").write_bytes(content)
    with pytest.raises(UserError, match="tokenizer"):
        tokenizers.load(tmp_path)


def test_planted_export_is_refused(tmp_path: Path, bomb: bytes) -> None:
    (tmp_path / "model.safetensors").write_bytes(zipped(bomb))
    (tmp_path / "config.json").write_bytes(bomb)
    with pytest.raises(UserError):
        inference.load(tmp_path.parent, tmp_path.name)
    (tmp_path / "config.json").write_text(json.dumps({"format": 2, "recipe": "gpt", "preset": "demo", "config": {}}))
    with pytest.raises(UserError, match="damaged"):
        inference.load(tmp_path.parent, tmp_path.name)


@pytest.mark.parametrize("name", ["../secret", "/etc/passwd", "a/b", "..", ".hidden", ""])
def test_store_names_only_its_own_files(tmp_path: Path, name: str) -> None:
    manifest = {"format": 1, "arrays": {}, "files": {name: "0"}, "splits": {}, "fingerprint": "x"}
    (tmp_path / "manifest.json").write_text(json.dumps({**manifest, "hash": digest(manifest)}))
    from seedbed.data.store import DamagedStore, Store

    with pytest.raises(DamagedStore, match="outside the store"):
        Store.open(tmp_path)


# ---- code that a folder names ----------------------------------------------------------------------------------------

EVIL = "import os\nos.mkdir({mark!r})\n"


def test_recipe_code_in_a_run_folder_is_not_executed(tmp_path: Path, capsys) -> None:
    """A folder from somebody else, whose config.json names a file inside it."""
    root = tmp_path / "runs"
    start(root, "one", "steps=2")
    evil = root / "one" / "evil.py"
    evil.write_text(EVIL.format(mark=str(tmp_path / "exploded")))
    config = json.loads((root / "one" / "config.json").read_text())
    for name in (str(evil), "evil.py", "runs/one/evil.py", str(root / "two" / ".." / "one" / "evil.py")):
        (root / "one" / "config.json").write_text(json.dumps({**config, "recipe": name}))
        for act in (lambda: resume(root, "one", "steps=4"), lambda: inference.load(root, "one")):
            with pytest.raises(UserError, match=r"would execute|recipe file .* cannot be read"):
                act()
    assert not (tmp_path / "exploded").exists()


def test_recipe_code_behind_a_link_is_not_executed(tmp_path: Path) -> None:
    root = tmp_path / "runs"
    (root / "one").mkdir(parents=True)
    (root / "one" / "evil.py").write_text(EVIL.format(mark=str(tmp_path / "exploded")))
    (tmp_path / "outside.py").symlink_to(root / "one" / "evil.py")
    with pytest.raises(UserError, match="would execute"):
        find_saved(str(tmp_path / "outside.py"), root)


def test_users_own_recipe_still_resumes(tmp_path: Path) -> None:
    start(tmp_path / "runs", "one", "steps=2")
    assert find_saved(TOY, tmp_path / "runs").name == TOY
    assert find_saved("gpt", tmp_path / "runs").name == "gpt"


@pytest.mark.parametrize("name", ["os.system", "seedbed.launch.local", "subprocess:run", "../gpt", "gpt.presets", "", "evil"])
def test_recipes_are_never_dotted_imports(name: str) -> None:
    with pytest.raises(UserError):
        find(name)


@pytest.mark.parametrize(
    "name", ["os:system", "subprocess:getoutput", "builtins:exec", "pickle:loads", "os.path:exists", "shutil:rmtree"]
)
def test_encoder_of_the_standard_library_is_refused(name: str) -> None:
    with pytest.raises(UserError, match="not an encoder"):
        image_store.load_encoder(name)


def test_text_that_is_a_link_out_of_its_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "secret.txt").write_text("a password")
    (tmp_path / "corpus").mkdir()
    (tmp_path / "corpus" / "fine.txt").write_text("some text")
    (tmp_path / "corpus" / "again.txt").symlink_to("fine.txt")
    assert open_corpus(str(tmp_path / "corpus"))
    (tmp_path / "corpus" / "notes.txt").symlink_to(tmp_path / "secret.txt")
    with pytest.raises(UserError, match="points out of"):
        open_corpus(str(tmp_path / "corpus"))


# ---- what we write ---------------------------------------------------------------------------------------------------

SECRETS = {
    "AWS_SECRET_ACCESS_KEY": "planted-aws-0123456789", "WANDB_API_KEY": "planted-wandb-0123456789",
    "HF_TOKEN": "planted-hf-0123456789", "SSH_AUTH_SOCK": "/planted/ssh-0123456789", "MY_PASSWORD": "planted-pw-0123456789",
}  # fmt: skip


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """The command line in this process, with secrets in its environment and beside it; what it said and wrote."""
    for name, value in SECRETS.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)
    (tmp_path / ".env").write_text("TOKEN=planted-file-0123456789")

    def call(*words: str) -> tuple[str, list[Path]]:
        assert main(list(words)) == 0
        return "".join(capsys.readouterr()), [p for p in tmp_path.rglob("*") if p.is_file() and p.name != ".env"]

    return call


def test_environment_is_never_written_to_a_run_folder(command) -> None:
    """A whole run, its checks and its report: no secret in any file, nor on the screen."""
    printed, written = command("train", TOY, "steps=4", "--run", "one", "--dirty")
    assert "planted" not in printed and len(written) > 8
    for path in written:
        assert b"planted" not in path.read_bytes(), f"{path} holds a secret"


def test_job_script_contains_no_secret(command) -> None:
    printed, written = command("train", TOY, "steps=4", "--run", "one", "--dirty", "--on", "slurm", "--dry")
    assert "#SBATCH" in printed and "planted" not in printed
    assert not any(b"planted" in path.read_bytes() for path in written)
