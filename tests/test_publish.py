"""`seedbed publish` against a stand-in for the Hugging Face Hub on loopback: what arrives, and what never leaves."""

import base64
import hashlib
import http.server
import importlib
import importlib.util
import json
import os
import platform
import re
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import ROOT
from helpers import train_once
from PIL import Image
from world_samples import TINY

from seedbed import inference
from seedbed.cli import main

constants = pytest.importorskip("huggingface_hub.constants")
yaml = pytest.importorskip("yaml")

# huggingface_hub 2.4 hands files to its own HTTP client in a way that this calls outdated.
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")

TEXT = "the seed that fell on good ground grew up and bore a hundred seeds. " * 60
TOKEN, HOST = "hf_stand_in", "adas-laptop"
SHORT = ["steps=2", "every.log=1", "every.eval=2", "every.sample=2", "every.save=2", "batch=4"]
SMALL = ["model.depth=1", "model.width=32", "model.heads=2"]
RUNS = {
    "gpt": ("gpt/demo", [*SHORT, *SMALL, "data.block=32", "ema=0.9", "data.text=DATA/text.txt"]),
    "flow": ("flow/demo", [*SHORT, *SMALL, "data.size=16", "data.images=DATA/images"]),
    "thinker": ("thinker/demo", [*SHORT, "data.test=0", "data.length=4", "model.n_step=2"]),
    "denoise": ("ebt/denoise-shapes", [*SHORT, *SMALL, "data.size=16", "data.images=DATA/images"]),
    "world": ("world/demo", [*SHORT, *(setting for setting in TINY if setting[:5] not in ("batch", "steps"))]),
}
ALL = [pytest.param(name, marks=pytest.mark.slow if name in ("denoise", "world") else ()) for name in RUNS]
LLAMA = ["model.kv_heads=2", "model.qk_norm=false", "data.tokenizer=bpe", "data.vocab=300"]
LARGE = (".safetensors", ".onnx", ".gguf")  # what the Hub stores outside of git


@dataclass
class Repo:
    private: bool
    files: dict[str, bytes] = field(default_factory=dict)
    commits: list[str] = field(default_factory=list)


class Hub(http.server.ThreadingHTTPServer):
    """The endpoints that create_repo and create_commit use; `me` is the user, and TOKEN the token."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server_address[1]}"
        self.repos: dict[str, Repo] = {}
        self.objects: dict[str, bytes] = {}
        self.requests: list[str] = []
        self.breaks_at = ""  # the connection is closed once at a path that ends so

    def save(self, repo: str, folder: Path) -> Path:
        for name, content in self.repos[repo].files.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(content)
        return folder


class Handler(http.server.BaseHTTPRequestHandler):
    server: Hub

    def log_message(self, *words: Any) -> None:
        pass

    def do_GET(self) -> None:
        self.answer()

    do_POST = do_PUT = do_GET

    def answer(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        hub, path = self.server, self.path.partition("?")[0]
        hub.requests.append(f"{self.command} {path}")
        if hub.breaks_at and path.endswith(hub.breaks_at):
            hub.breaks_at = ""
            self.connection.shutdown(socket.SHUT_RDWR)
            return
        if not path.startswith("/lfs/") and self.headers.get("Authorization") != f"Bearer {TOKEN}":
            return self.reply(401, {"error": "Invalid credentials in Authorization header"})
        if found := re.fullmatch(r"/lfs/(\w{64})", path):
            assert hashlib.sha256(body).hexdigest() == found[1]
            hub.objects[found[1]] = body
            return self.reply(200, {})
        if path == "/api/validate-yaml":
            return self.validate(json.loads(body)["content"])
        if path == "/api/repos/create":
            return self.create(json.loads(body))
        found = re.fullmatch(r"(?:/api/models)?/([^/]+/[^/]+?)(?:\.git/info)?(?:/(.*))?", path)
        assert found, path
        if found[1] not in hub.repos:
            return self.reply(404, {"error": "Repository not found"}, {"X-Error-Code": "RepoNotFound"})
        repo, what = hub.repos[found[1]], found[2]
        if not what:
            return self.reply(200, {"id": found[1], "private": repo.private, "sha": "0" * 40, "siblings": [], "tags": []})
        if not found[1].startswith("me/"):
            return self.reply(403, {"error": "You have read access but not the required permissions for this operation"})
        if what == "preupload/main":
            files = [one["path"] for one in json.loads(body)["files"]]
            modes = [{"path": p, "uploadMode": "lfs" if p.endswith(LARGE) else "regular", "shouldIgnore": False} for p in files]
            return self.reply(200, {"files": modes})
        if what == "lfs/objects/batch":
            asked = [{"oid": one["oid"], "size": one["size"]} for one in json.loads(body)["objects"]]
            for one in asked:
                if one["oid"] not in hub.objects:
                    one["actions"] = {"upload": {"href": f"{hub.url}/lfs/{one['oid']}"}}
            return self.reply(200, {"transfer": "basic", "objects": asked})
        assert what == "commit/main", what
        self.commit(found[1], [json.loads(line) for line in body.splitlines()])

    def validate(self, card: str) -> None:
        header = yaml.safe_load(card.split("---\n")[1])
        errors = [] if set(header) <= {"library_name", "pipeline_tag", "tags"} and "seedbed" in header["tags"] else ["header"]
        self.reply(400 if errors else 200, {"errors": [{"message": e} for e in errors], "warnings": []})

    def create(self, asked: dict[str, Any]) -> None:
        name = f"{asked['organization']}/{asked['name']}"
        if asked["organization"] != "me":
            return self.reply(403, {"error": "You don't have the rights to create a model under the namespace"})
        assert name not in self.server.repos
        self.server.repos[name] = Repo(asked.get("visibility") == "private" or bool(asked.get("private")))
        self.reply(200, {"url": f"{self.server.url}/{name}", "name": name})

    def commit(self, name: str, lines: list[dict[str, Any]]) -> None:
        repo = self.server.repos[name]
        for line in lines:
            value = line["value"]
            if line["key"] == "header":
                repo.commits.append(value["summary"])
            elif line["key"] == "file":
                repo.files[value["path"]] = base64.b64decode(value["content"])
            else:
                assert line["key"] == "lfsFile"
                repo.files[value["path"]] = self.server.objects[value["oid"]]
        self.reply(200, {"commitUrl": f"{self.server.url}/{name}/commit/{'0' * 40}", "commitOid": "0" * 40})

    def reply(self, status: int, values: dict[str, Any], headers: dict[str, str] | None = None) -> None:
        body = json.dumps(values).encode()
        message = {"X-Error-Message": values["error"]} if "error" in values else {}
        self.send_response(status)
        for key, value in {**message, **(headers or {}), "Content-Length": str(len(body))}.items():
            self.send_header(key, value)
        self.end_headers()
        self.wfile.write(body)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    """A stand-in that huggingface_hub is pointed at, with a token that it takes."""
    server = Hub()
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    for name, value in {"ENDPOINT": server.url, "HF_HUB_DISABLE_XET": True, "HF_TOKEN_PATH": str(tmp_path / "no token")}.items():
        monkeypatch.setattr(constants, name, value)
    for name in ("HUGGING_FACE_HUB_TOKEN", "HF_OIDC_RESOURCE", "HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    yield server
    importlib.import_module("huggingface_hub.utils").close_session()
    server.shutdown()
    server.server_close()


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the user: data in a folder whose name holds spaces, and runs."""
    home, rng = tmp_path_factory.mktemp("home-of-ada"), np.random.default_rng(0)
    data = home / "my private data"
    for n in range(24):
        path = data / "images" / "ab"[n % 2] / f"{n}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(rng.integers(0, 256, (16, 16, 3), np.uint8)).save(path)
    (data / "text.txt").write_text(TEXT)
    return home


@pytest.fixture
def train(home: Path, monkeypatch: pytest.MonkeyPatch):
    """Trains a run of RUNS once, and makes the folder of runs that of this test."""

    def train(name: str) -> Path:
        recipe, settings = RUNS[name] if name in RUNS else (RUNS["gpt"][0], [*RUNS["gpt"][1], *LLAMA])
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("SEEDBED_CACHE", str(home / "cache"))
            patch.setattr(platform, "node", lambda: HOST)
            train_once(home / "runs", name, *(s.replace("DATA", str(home / "my private data")) for s in settings), recipe=recipe)
        monkeypatch.setenv("SEEDBED_RUNS", str(home / "runs"))
        return home / "runs" / name

    return train


@dataclass
class Shown:
    status: int
    out: str
    err: str

    @property
    def files(self) -> dict[str, int]:
        """The lines that list files: name to size."""
        found = re.findall(r"^ *([\d,]+)  (\S.*)$", self.out.split("\n\n")[0], re.MULTILINE)
        return {name: int(size.replace(",", "")) for size, name in found}


@pytest.fixture
def publish(capsys: pytest.CaptureFixture[str]):
    def publish(*words: str) -> Shown:
        capsys.readouterr()
        return Shown(main(["publish", *words]), *capsys.readouterr())

    return publish


@pytest.mark.parametrize("name", ALL)
def test_published_run_is_loaded_and_samples_as_the_run(name: str, train, publish, hub: Hub, tmp_path: Path):
    run = train(name)
    dry = publish(name, "--to", f"hub:me/{name}", "--dry")
    assert dry.status == 0 and hub.requests == [], "a dry run contacts nothing"
    assert "nothing was sent" in dry.out and "read it once before you publish it" in dry.out

    sent = publish(name, "--to", f"hub:me/{name}")
    assert sent.status == 0 and f"{hub.url}/me/{name}" in sent.out.splitlines()[-1]
    repo = hub.repos[f"me/{name}"]
    assert {key: len(content) for key, content in repo.files.items()} == dry.files == sent.files
    assert repo.commits == ["Publish a run of seedbed"] and not repo.private
    assert set(repo.files) >= {"README.md", "config.json", "model.safetensors"}
    card = repo.files["README.md"].decode()
    assert dry.out.endswith("\n\n" + card) and f"hf download me/{name} --local-dir {name}" in card
    assert f'seedbed.load(Path("{name}"))' in card and "done at step 2 of 2" in card
    pictures = re.findall(r"!\[.*?\]\((.*?)\)", card)
    assert set(pictures) == {path for path in repo.files if path.endswith((".png", ".gif"))} and "plots/loss.png" in pictures
    assert any(path.startswith("samples/") for path in pictures) == (name in ("flow", "denoise", "world"))

    folder = hub.save(f"me/{name}", tmp_path / "received")
    there, own = (inference.load(tmp_path, str(path), device="cpu") for path in (folder, run))
    weights = dict(own.system.named_parameters())
    assert weights and all(torch.equal(weights[key], param) for key, param in there.system.named_parameters())
    texts = [trained.sample(tmp_path / "s") for trained in (there, own)]
    assert texts[0].text == texts[1].text
    assert [path.read_bytes() for path in texts[0].files] == [path.read_bytes() for path in texts[1].files]


FORMS = [
    ("gpt", "files"),
    ("flow", "files"),
    ("llama", "hf"),
    ("llama", "gguf"),
    pytest.param("gpt", "onnx", marks=pytest.mark.slow),
]
NEEDS = {"onnx": "onnxscript", "gguf": "gguf"}


@pytest.mark.parametrize(("name", "form"), FORMS)
def test_nothing_of_the_machine_is_published(name: str, form: str, home: Path, train, publish, hub: Hub):
    pytest.importorskip(NEEDS.get(form, "torch"))
    (train(name) / "code.patch").write_text("a secret change")
    assert HOST in (train(name) / "code.json").read_text()
    assert publish(name, "--to", "hub:me/all", "--form", form).status == 0
    files = hub.repos["me/all"].files
    weights = {"onnx": "model.onnx", "gguf": "model.gguf"}.get(form, "model.safetensors")
    assert weights in files and b"step 2 of 2" in files["README.md"] and files["plots/loss.png"]
    private = [str(home), home.name, "my private data", f"{Path.home()}/", str(ROOT), HOST, TOKEN, "a secret change"]
    found = [(path, word) for path, content in files.items() for word in private if word.encode() in content]
    assert not found
    assert not {path for path in files if "log" in path or "patch" in path or path == "code.json"}


def test_sample_files_outside_of_the_samples_are_not_published(train, publish, hub: Hub, tmp_path: Path):
    """The events of a foreign run may name any file."""
    run = tmp_path / "runs" / "foreign"
    shutil.copytree(train("flow"), run, symlinks=True)
    secret = tmp_path / "secret.png"
    secret.write_bytes(b"a secret")
    (run / "samples" / "link.png").symlink_to(secret)
    (run / "samples" / "notes.txt").write_text("a secret")
    names = ["../../secret.png", str(secret), "samples/link.png", "samples/notes.txt", "console.log", "samples/gone.png", 7]
    with (run / "events.jsonl").open("a") as events:
        events.write(json.dumps({"step": 2, "kind": "sample", "text": "", "files": names}) + "\n")
    assert publish(str(run), "--to", "hub:me/foreign").status == 0
    assert not any("samples" in path or b"a secret" in content for path, content in hub.repos["me/foreign"].files.items())


def test_named_checkpoint_and_private_repository(train, publish, hub: Hub):
    run = train("gpt")
    (step,) = (path.name for path in (run / "checkpoints").glob("step-*"))
    sent = publish("gpt", "--to", "hub:me/tiny.v-1", "--checkpoint", step, "--private")
    assert sent.status == 0 and hub.repos["me/tiny.v-1"].private
    assert f"| weights | {step} |" in hub.repos["me/tiny.v-1"].files["README.md"].decode()
    refused = publish("gpt", "--to", "hub:me/other", "--checkpoint", "step-000099")
    assert refused.status == 2 and "no checkpoint 'step-000099'" in refused.err


def test_repository_that_exists_gets_a_commit(train, publish, hub: Hub):
    train("gpt")
    hub.repos["me/tiny"] = Repo(private=False, files={"README.md": b"old", "notes.txt": b"mine"})
    refused = publish("gpt", "--to", "hub:me/tiny", "--private")
    assert refused.status == 2 and "me/tiny exists and is public" in refused.err and hub.repos["me/tiny"].commits == []
    sent = publish("gpt", "--to", "hub:me/tiny")
    assert sent.status == 0 and sent.out.count("me/tiny exists: this is a new commit on it") == 1
    files = hub.repos["me/tiny"].files
    assert files["notes.txt"] == b"mine" and b"gpt/demo" in files["README.md"] and len(hub.repos["me/tiny"].commits) == 1


def test_interrupted_upload_is_run_again(train, publish, hub: Hub):
    train("gpt")
    hub.breaks_at = "/commit/main"
    broken = publish("gpt", "--to", "hub:me/tiny")
    assert broken.status == 2 and "me/tiny is not published at " in broken.err and "run the command again" in broken.err
    assert hub.repos["me/tiny"].files == {}
    sent = [request for request in hub.requests if request.startswith("PUT /lfs/")]
    assert publish("gpt", "--to", "hub:me/tiny").status == 0 and "model.safetensors" in hub.repos["me/tiny"].files
    assert sent and [request for request in hub.requests if request.startswith("PUT /lfs/")] == sent, "weights are sent once"


def test_recipe_file_is_not_published_and_the_card_says_so(home: Path, publish, hub: Hub, tmp_path: Path, monkeypatch):
    recipe = home / "my private data" / "mine.py"
    recipe.write_text((ROOT / "examples" / "my_recipe.py").read_text())
    runs = tmp_path / "runs"
    train_once(runs, "own", "steps=2", "batch=64", "every.log=1", recipe=f"{recipe}:seedling")
    sent = publish("--runs", str(runs), "own", "--to", "hub:me/own")
    assert sent.status == 0 and "mine.py is not published: whoever loads these weights needs that file from you" in sent.out
    files = hub.repos["me/own"].files
    card = files["README.md"].decode()
    assert "The recipe, `mine.py`, is a file that is not part of this folder" in card and "seedbed sample own --trust" in card
    assert not [path for path, content in files.items() if b"class Seedling" in content or str(home).encode() in content]

    # What the card says: the receiver puts the file into the working directory and confirms it.
    monkeypatch.chdir(tmp_path)
    folder = hub.save("me/own", tmp_path / "received")
    assert main(["sample", str(folder)]) == 2
    shutil.copy(recipe, tmp_path / "mine.py")
    assert main(["sample", str(folder)]) == 2, "unread code is not executed"
    assert main(["sample", str(folder), "--trust"]) == 0


WRONG = ["me/tiny", "hub:tiny", "hub:me/", "hub:/tiny", "hub:me/a/b", "hf:me/tiny", "hub:me/-x", "hub:../up", ""]


@pytest.mark.parametrize("target", WRONG)
def test_wrong_target_is_refused(target: str, publish, hub: Hub):
    refused = publish("gpt", f"--to={target}")
    assert (refused.status, refused.err.count("\n")) == (2, 1) and "is not of the form hub:USER/NAME" in refused.err
    assert hub.requests == []


def refused_in_a_line(shown: Shown) -> str:
    assert (shown.status, shown.err.count("\n")) == (2, 1), shown.err
    return shown.err


def test_missing_package_is_named(train, publish, monkeypatch):
    train("gpt")
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == "huggingface_hub" else real(name, *rest))
    assert 'pip install "seedbed[hub]"' in refused_in_a_line(publish("gpt", "--to", "hub:me/tiny"))
    assert publish("gpt", "--to", "hub:me/tiny", "--dry").status == 0, "a dry run needs no package"


def test_missing_and_wrong_tokens_are_explained(train, publish, hub: Hub, monkeypatch):
    train("gpt")
    monkeypatch.delenv("HF_TOKEN")
    shown = refused_in_a_line(publish("gpt", "--to", "hub:me/tiny"))
    assert "needs a token" in shown and "hf auth login" in shown and "HF_TOKEN" in shown and hub.requests == []
    assert publish("gpt", "--to", "hub:me/tiny", "--dry").status == 0, "a dry run needs no token"
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    shown = refused_in_a_line(publish("gpt", "--to", "hub:me/tiny"))
    assert "(401)" in shown and "hf auth login" in shown and "hf_wrong" not in shown and hub.repos == {}


@pytest.mark.parametrize("exists", [False, True])
def test_repository_of_somebody_else_is_refused(exists: bool, train, publish, hub: Hub):
    train("gpt")
    if exists:
        hub.repos["you/tiny"] = Repo(private=False)
    assert "does not let this token write to you/tiny (403)" in refused_in_a_line(publish("gpt", "--to", "hub:you/tiny"))
    assert not exists or hub.repos["you/tiny"].commits == []


def test_network_that_is_down_is_an_error_of_one_line(train, publish, hub: Hub, monkeypatch):
    train("gpt")
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{unused.getsockname()[1]}")
        assert "refused" in refused_in_a_line(publish("gpt", "--to", "hub:me/tiny")).lower()

    def unknown(*words: Any, **named: Any) -> Any:
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(constants, "ENDPOINT", "http://hub.invalid")
    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    shown = refused_in_a_line(publish("gpt", "--to", "hub:me/tiny"))
    assert "at http://hub.invalid: [Errno -2] Name or service not known; run" in shown


def test_run_without_a_checkpoint_or_record_is_refused(train, publish, hub: Hub, tmp_path: Path):
    run = tmp_path / "empty"
    shutil.copytree(train("gpt"), run, symlinks=True)
    shutil.rmtree(run / "checkpoints")
    assert "no checkpoint yet" in refused_in_a_line(publish(str(run), "--to", "hub:me/tiny"))
    inference.export(run.parent, str(train("gpt")), tmp_path / "out")
    assert "publish the run itself" in refused_in_a_line(publish(str(tmp_path / "out"), "--to", "hub:me/tiny"))
    assert "no run 'nothing'" in publish("nothing", "--to", "hub:me/tiny").err
    train("flow")
    assert "not a language model of Llama's shape" in publish("flow", "--to", "hub:me/tiny", "--form", "gguf").err
    assert hub.requests == []


def test_command_goes_where_hf_endpoint_says(train, hub: Hub, tmp_path: Path):
    run = train("gpt")
    env = {**os.environ, "HF_ENDPOINT": hub.url, "HF_HUB_DISABLE_XET": "1", "HF_HOME": str(tmp_path / "hf")}
    command = [sys.executable, "-m", "seedbed", "publish", str(run), "--to", "hub:me/tiny"]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and done.stdout.splitlines()[-1].endswith(f"{hub.url}/me/tiny"), done.stderr
    assert "model.safetensors" in hub.repos["me/tiny"].files
