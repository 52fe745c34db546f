"""A run folder alone, without its data: it can be sampled, evaluated on given data and exported; and so can its export."""

import json
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import TOY, train_once
from PIL import Image
from safetensors.torch import load_file
from world_samples import TINY

from seedbed import inference
from seedbed.data.feed import Source
from seedbed.errors import UserError
from seedbed.launch import local
from seedbed.recipes import INFERENCE
from seedbed.recipes.ebt import system as ebt_system
from seedbed.recipes.world import simulators
from seedbed.train import exports
from seedbed.train.player import NOTHING

TEXT = "the seed that fell on good ground grew up and bore a hundred seeds. " * 60
GIVEN = "good seeds bore seed that grew. " * 9
SHORT = ["steps=2", "every.eval=2", "every.save=2", "batch=4"]
SMALL = ["model.depth=1", "model.width=32", "model.heads=2"]
RECIPES = {
    "gpt": ("gpt/demo", [*SMALL, "data.block=32", "ema=0.9", "data.text=DATA/text.txt"]),
    "bpe": ("gpt/demo", [*SMALL, "data.block=16", "data.tokenizer=bpe", "data.vocab=270", "data.text=DATA/text.txt"]),
    "flow": ("flow/demo", [*SMALL, "data.size=16", "ema2=0.99", "data.images=DATA/images"]),
    "thinker": ("thinker/demo", ["data.test=0", "data.length=4", "model.n_step=2"]),
    "denoise": ("ebt/denoise-shapes", [*SMALL, "data.size=16", "data.images=DATA/images"]),
    "ebt": ("ebt/demo", [*SMALL, "data.block=16", "model.control=false", "data.text=DATA/text.txt"]),
    "world": ("world/demo", [*TINY, "data.recording=DATA/recording"]),
    "unposed": ("world/demo", [*TINY, "model.pose_tracking=false", "limit.valid=30", "data.recording=DATA/recording"]),
}
QUICK = ("gpt", "flow", "thinker")
ALL = [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in RECIPES]


@dataclass
class Places:
    """Where runs were trained, with their data and cache, and data to be evaluated on."""

    home: Path

    def train(self, name: str) -> None:
        recipe, settings = RECIPES[name]
        settings = [setting.replace("DATA", str(self.home / "data")) for setting in settings]
        if name in ("world", "unposed"):
            self._record()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(ebt_system, "END_TOKENS", {"cpu": 32})
            patch.setattr(local.journal, "finish", lambda run, warn: None)
            train_once(self.home / "runs", name, *settings, *SHORT, recipe=recipe)

    def _record(self) -> None:
        for folder, scene in (("data/recording", 1), ("given/recording", 2)):
            simulators.record("box", 1200, 16, 16, scene, out=self.home / folder)

    def given(self, trained: inference.TrainedModel) -> Any:
        """Data that the run was not trained on: a text, the file of one, or a folder; tasks are generated."""
        kind, folder = type(trained.data.valid).__name__, self.home / "given"
        texts = {"TextSource": GIVEN, "CountedText": folder / "text.txt"}
        return {"ImageSource": folder / "images", "WindowSource": folder / "recording", **texts}.get(kind, trained.data.valid)

    def hide(self) -> None:
        """No text, no images, no recording, and nothing that was prepared."""
        os.rename(self.home / "data", self.home / "hidden")
        os.environ["SEEDBED_CACHE"] = str(self.home / "empty")

    def show(self) -> None:
        if (self.home / "hidden").exists():
            os.rename(self.home / "hidden", self.home / "data")
        os.environ["SEEDBED_CACHE"] = str(self.home / "cache")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Places]:
    home, rng = tmp_path_factory.mktemp("home"), np.random.default_rng(0)
    for folder in ("data", "given"):
        for n in range(24):
            path = home / folder / "images" / "ab"[n % 2] / f"{n}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(rng.integers(0, 256, (16, 16, 3), np.uint8)).save(path)
    (home / "data" / "text.txt").write_text(TEXT)
    (home / "given" / "text.txt").write_text(GIVEN)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SEEDBED_CACHE", str(home / "cache"))
        yield Places(home)


@pytest.fixture
def places(made: Places) -> Iterator[Places]:
    yield made
    made.show()


def shown(trained: inference.TrainedModel, folder: Path, **options: Any) -> tuple[str, list[bytes]]:
    """The text and the files of a sample."""
    sample = trained.sample(folder, **options)
    return sample.text, [path.read_bytes() for path in sample.files]


def copied(places: Places, name: str, tmp_path: Path) -> Path:
    """The run's folder alone in another place; its data are hidden."""
    shutil.copytree(places.home / "runs" / name, tmp_path / "elsewhere" / name, symlinks=True)
    places.hide()
    return tmp_path / "elsewhere"


@pytest.mark.parametrize("name", ALL)
def test_copied_run_and_its_export_give_the_outputs_of_the_run(name: str, places: Places, tmp_path: Path):
    places.train(name)
    own = inference.load(places.home / "runs", name, all_data=True)
    wanted, metrics = shown(own, tmp_path / "own"), own.evaluate(places.given(own))
    validated = own.evaluate()
    assert wanted[0] and (metrics != validated or name == "thinker")

    elsewhere = copied(places, name, tmp_path)
    run = inference.load(elsewhere, name)
    inference.export(elsewhere, name, tmp_path / "out")
    shutil.rmtree(elsewhere)
    exported = inference.load(tmp_path, "out")
    for trained in (run, exported):
        assert shown(trained, tmp_path / "copy") == wanted
        assert trained.evaluate(places.given(trained)) == metrics
    weights = dict(own.system.named_parameters())
    assert all(torch.equal(weights[key], param) for key, param in exported.system.named_parameters())
    assert not exported.model.training and all(
        t.dtype != torch.float16 for t in load_file(tmp_path / "out/model.safetensors").values()
    )
    if name == "thinker":
        assert run.evaluate() == exported.evaluate() == validated
    else:
        with pytest.raises(UserError, match=r"data of run \w+, .*/data/\w+.*, is not on this machine .* pass other data"):
            exported.evaluate()
    if name == "flow":
        assert shown(exported, tmp_path / "a", ema="long", num=2) == shown(run, tmp_path / "b", ema="long", num=2)


def test_evaluation_of_a_run_is_that_of_its_training(places: Places):
    places.train("gpt")
    trained = inference.load(places.home / "runs", "gpt")
    event = [event for event in trained.run.events() if event["kind"] == "eval"][-1]
    assert trained.evaluate() == {key: event[key] for key in ("loss", "perplexity", "bits_per_byte")}


def test_evaluation_of_a_text_is_that_of_its_tokens(places: Places):
    """Whatever the length of the text; each target counts once."""
    places.train("gpt")
    trained = inference.load(places.home / "runs", "gpt")
    whole = (places.home / "data" / "text.txt").read_text()
    valid = trained.decode(trained.data.valid.tokens)
    assert whole.endswith(valid) and trained.evaluate(valid) == trained.evaluate()
    assert trained.evaluate(places.home / "given" / "text.txt") == trained.evaluate(GIVEN)
    tokens_1T = torch.tensor([trained.encode("good seed")])
    with trained.evaluating():
        nats = torch.nn.functional.cross_entropy(trained.model.logits(tokens_1T[:, :-1])[0], tokens_1T[0, 1:])
    assert trained.evaluate("good seed")["loss"] == pytest.approx(nats.item(), rel=1e-5)


def test_evaluation_of_images_knows_their_classes_by_name(places: Places, tmp_path: Path):
    places.train("flow")
    trained = inference.load(places.home / "runs", "flow")
    source = trained.recipe.evaluation_source(trained.config, trained.data, places.home / "given" / "images")
    assert source.num_items == 24 and sorted(set(source.arrays["class"].tolist())) == [0, 1]
    shutil.copytree(places.home / "given" / "images" / "b", tmp_path / "images" / "b")
    only = trained.recipe.evaluation_source(trained.config, trained.data, str(tmp_path / "images"))
    assert only.num_items == 12 and set(only.arrays["class"].tolist()) == {trained.data.class_names.index("b")}


@pytest.mark.slow
def test_play_from_a_copied_run_shows_the_same_frames(places: Places, tmp_path: Path):
    frames, facts = {}, []
    for name in ("world", "unposed"):
        places.train(name)
        for place in ("own", "copied"):
            trained = inference.load(
                places.home / "runs" if place == "own" else copied(places, name, tmp_path), name, all_data=place == "own"
            )
            player = trained.system.play("torch")
            facts.append((player.facts(), player.starts.tolist()))
            frames[name, place] = [played(player, seed, reference) for seed in (0, 9) for reference in player.references]
        places.show()
        assert facts[-1] == facts[-2] and frames[name, "own"] == frames[name, "copied"]


def played(player: Any, seed: int, reference: str) -> list[bytes]:
    rollout = player.new_rollout()
    rollout.reset(seed, reference)
    found = []
    while len(found) < 40 and rollout.step(np.array([axis.full[1] for axis in player.axes], np.float32)):
        found += [rollout.frame_HWC.tobytes(), b"" if rollout.reference == NOTHING else rollout.reference_HWC.tobytes()]
    return found


@pytest.mark.slow
def test_recording_is_kept_within_a_few_megabytes_and_refuses_other_frames(places: Places, tmp_path: Path):
    places.train("world")
    trained = inference.load(copied(places, "world", tmp_path), "world")
    assert trained.data.recording.num_frames == 1200
    assert sum(path.stat().st_size for path in (tmp_path / "elsewhere" / "world" / INFERENCE).iterdir()) < 2 << 20
    for rows in (0, slice(0, 5), np.array([[0, 1]])):
        with pytest.raises(UserError, match=r"holds \d+ of the 1,200 frames of .*recording: enough for samples with --num 6"):
            trained.data.recording.frames_THWC[rows]
    with pytest.raises(UserError, match=r"no recording at .*data/recording"):
        trained.sample(tmp_path, examine=2)


# ---- wrong inputs --------------------------------------------------------------------------------------------------------


def edit(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        facts = json.loads((folder / "config.json").read_text())
        change(facts)
        (folder / "config.json").write_text(json.dumps(facts))

    return apply


def flip(folder: Path) -> None:
    data = bytearray((folder / "model.safetensors").read_bytes())
    data[-1] ^= 1
    (folder / "model.safetensors").write_bytes(data)


@pytest.fixture(scope="module")
def gpt_export(made: Places, tmp_path_factory: pytest.TempPathFactory) -> Path:
    made.train("gpt")
    inference.load(made.home / "runs", "gpt").export(tmp_path_factory.mktemp("exports") / "out")
    return tmp_path_factory.getbasetemp() / "exports0" / "out"


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda f: (f / "config.json").unlink(), r"is neither a run nor an export: it has no config\.json"),
        (lambda f: (f / "config.json").write_text("{"), "is not JSON"),
        (lambda f: (f / "config.json").write_text("3"), "no JSON object"),
        (lambda f: (f / "config.json").write_text("{}"), "lacks recipe, preset or config"),
        (lambda f: (f / "model.safetensors").unlink(), r"damaged: out/model\.safetensors cannot be read"),
        (flip, r"damaged: out/model\.safetensors does not match its checksum"),
        (lambda f: (f / INFERENCE / "tokenizer.json").unlink(), r"inference has no tokenizer\.json .* copy"),
        (lambda f: (f / INFERENCE / "tokenizer.json").write_text("{}"), "is not a tokenizer"),
        (lambda f: (f / INFERENCE / "data.json").write_text('{"facts": {}}'), r"inference is damaged .*move it away"),
        (lambda f: (f / INFERENCE / "valid.safetensors").write_bytes(b"x"), r"inference is damaged"),
        (edit(lambda c: c.update(format=3)), r"export of format 3, and this version reads 2; use the newer version"),
        (edit(lambda c: c.update(format=1)), r"export of format 1, .*; export its run again: seedbed export RUN"),
        (edit(lambda c: c.pop("sha256")), "damaged: 'sha256'"),
        (edit(lambda c: c.update(data=3)), "damaged"),
        (edit(lambda c: c["data"].update(fingerprint="0" * 16)), "the data has changed"),
        (edit(lambda c: c["config"]["model"].update(width=64)), r"damaged: config\.json was edited"),
        (edit(lambda c: c.update(recipe="flow")), "saved config has `model.kv_heads`, which this version does not know"),
        (edit(lambda c: c.update(recipe="nothing")), "there is no recipe 'nothing'"),
    ],
)
def test_export_that_is_damaged_is_refused(gpt_export: Path, tmp_path: Path, damage: Callable[[Path], Any], message: str):
    shutil.copytree(gpt_export, tmp_path / "out")
    inference.load(tmp_path, "out")
    damage(tmp_path / "out")
    with pytest.raises(UserError, match=message):
        inference.load(tmp_path, "out")


def test_export_of_other_weights_is_refused(gpt_export: Path, tmp_path: Path):
    """Files that agree with each other and not with the settings."""
    shutil.copytree(gpt_export, tmp_path / "out")
    engine = inference.load(tmp_path, "out").engine
    facts = json.loads((tmp_path / "out" / "config.json").read_text())
    facts["config"]["model"]["width"] = 64
    exports.write(engine, facts, tmp_path / "out")
    with pytest.raises(UserError, match="does not fit this model"):
        inference.load(tmp_path, "out")


@pytest.mark.parametrize(
    ("act", "message"),
    [
        (lambda m: m.evaluate(""), "none to predict"),
        (lambda m: m.evaluate("g"), "a text of 1 tokens has none to predict"),
        (lambda m: m.evaluate("größe"), "ö"),
        (lambda m: m.evaluate(Path("nowhere.txt")), r"nowhere\.txt"),
        (lambda m: m.evaluate(7), "recipe gpt is evaluated on a TextSource, not on a int"),
        (lambda m: m.evaluate(Source()), "recipe gpt is evaluated on a TextSource, not on a Source"),
        (lambda m: m.decode([0, 9999]), "9999 is no id of a vocabulary of"),
        (lambda m: m.encode("größe"), "ö"),
        (lambda m: m.sample(speed=3), "does not know --speed"),
        (lambda m: inference.load(m.run.path.parent, "out", dtype="int8"), "dtype=int8 is not one of float32, bfloat16, float16"),
        (lambda m: inference.load(m.run.path.parent, "out", "step-000002"), "is an export, which has no checkpoint"),
        (lambda m: inference.load(m.run.path.parent, "nothing"), "there is no run 'nothing'"),
        (lambda m: inference.load(m.run.path.parent, "./nothing"), "there is no run './nothing'"),
        (lambda m: m.export(m.run.path), "is not an empty folder"),
        (lambda m: m.export(m.run.path / "config.json"), "is not an empty folder"),
    ],
)
def test_use_of_an_export_that_is_wrong_is_refused(gpt_export: Path, act: Callable[[inference.TrainedModel], Any], message: str):
    before = sorted(gpt_export.rglob("*"))
    with pytest.raises(UserError, match=message):
        act(inference.load(gpt_export.parent, "out"))
    assert sorted(gpt_export.rglob("*")) == before


def test_data_of_another_kind_are_refused(places: Places, tmp_path: Path):
    places.train("flow")
    flow = inference.load(places.home / "runs", "flow")
    os.rename(shutil.copytree(places.home / "given" / "images", tmp_path / "images") / "b", tmp_path / "images" / "c")
    with pytest.raises(UserError, match="has the class c, which the run does not know; its classes are a, b"):
        flow.evaluate(tmp_path / "images")
    with pytest.raises(UserError, match="has no tokenizer"):
        flow.encode("a")


@pytest.mark.slow
def test_recording_of_another_size_is_refused(places: Places, tmp_path: Path):
    places.train("world")
    trained = inference.load(places.home / "runs", "world")
    simulators.record("box", 600, 16, 24, 1, out=tmp_path / "wide")
    with pytest.raises(UserError, match=r"has 16x24 pixels and the controls .*, the run was trained on 16x16 pixels"):
        trained.evaluate(tmp_path / "wide")
    with pytest.raises(UserError, match="there is no recording at"):
        trained.evaluate(tmp_path / "nothing")


def test_precision_that_a_device_cannot_compute_in_is_one_line(gpt_export: Path, monkeypatch: pytest.MonkeyPatch):
    half, full = (inference.load(gpt_export.parent, "out", dtype=dtype) for dtype in ("bfloat16", "float32"))
    assert half.evaluate(GIVEN)["loss"] == pytest.approx(full.evaluate(GIVEN)["loss"], rel=1e-2)
    assert half.evaluate(GIVEN) != full.evaluate(GIVEN)

    def evaluate(source: Source, engine: Any) -> dict[str, float]:
        raise RuntimeError("\"some_kernel\" not implemented for 'BFloat16'")

    for trained in (half, full):
        monkeypatch.setattr(trained.system, "evaluate", evaluate)
    with pytest.raises(UserError, match=r"cannot compute in bfloat16 on cpu .* use dtype='float32'"):
        half.evaluate(GIVEN)
    with pytest.raises(RuntimeError, match="some_kernel") as raised:
        full.evaluate(GIVEN)
    assert not isinstance(raised.value, UserError)


# ---- a recipe of one's own -----------------------------------------------------------------------------------------------


def test_export_of_a_recipe_file_holds_no_code_and_asks_for_trust(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_report: None
):
    recipe = shutil.copy(TOY, tmp_path / "mine.py")
    train_once(tmp_path / "runs", "one", "steps=4", recipe=str(recipe))
    inference.export(tmp_path / "runs", "one", tmp_path / "out")
    assert sorted(path.name for path in (tmp_path / "out").rglob("*")) == ["README.md", "config.json", "model.safetensors"]
    run, exported = inference.load(tmp_path / "runs", "one"), inference.load(tmp_path, "out")
    assert exported.sample().text == run.sample().text and exported.evaluate() == run.evaluate()
    assert exported.model is exported.system.net
    monkeypatch.setenv("SEEDBED_STATE", str(tmp_path / "state"))
    with pytest.raises(UserError, match="would execute"):
        inference.load(tmp_path, "out")


def test_links_in_a_run_are_not_followed_by_its_export(places: Places, tmp_path: Path):
    places.train("gpt")
    shutil.copytree(places.home / "runs" / "gpt", tmp_path / "gpt", symlinks=True)
    (tmp_path / "secret").write_text("mine")
    (tmp_path / "gpt" / INFERENCE / "notes.json").symlink_to(tmp_path / "secret")
    inference.export(tmp_path, "gpt", tmp_path / "out")
    names = ["README.md", "config.json", "inference", "data.json", "tokenizer.json", "valid.safetensors", "model.safetensors"]
    assert [path.name for path in sorted((tmp_path / "out").rglob("*"))] == names


def test_export_is_sampled_by_its_path(
    gpt_export: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    copy = shutil.copytree(gpt_export, tmp_path / "out")
    monkeypatch.chdir(tmp_path)
    for root, name in ((tmp_path / "runs", "./out"), (tmp_path / "runs", str(copy)), (tmp_path, "out")):
        assert inference.sample(root, name, {"tokens": 8, "prompt": "good"}) == 0
    texts = [line for line in capsys.readouterr().out.splitlines() if line.startswith("good")]  # others are its facts
    assert len(texts) == 3 and len(set(texts)) == 1


def test_run_on_random_tokens_has_no_tokenizer_to_lose(places: Places, tmp_path: Path):
    train_once(places.home / "runs", "random", *SMALL, *SHORT, "data.block=16", "data.text=random:4000:50", recipe="gpt/demo")
    trained = inference.load(copied(places, "random", tmp_path), "random")
    trained.export(tmp_path / "out")
    assert inference.load(tmp_path, "out").evaluate(trained.data.valid) == trained.evaluate(trained.data.valid)
    for act in (trained.encode, trained.evaluate):
        with pytest.raises(UserError, match=r"no tokenizer|random tokens"):
            act("good")


def test_folder_in_the_current_one_is_named_without_a_slash(gpt_export: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    shutil.copytree(gpt_export, tmp_path / "mine")
    monkeypatch.chdir(tmp_path)
    wanted = inference.load(gpt_export.parent, gpt_export.name).sample(tmp_path, tokens=8).text
    assert inference.load(Path("runs"), "mine").sample(tmp_path, tokens=8).text == wanted
    (tmp_path / "runs" / "mine").mkdir(parents=True)
    with pytest.raises(UserError, match="neither a run nor an export"):
        inference.load(Path("runs"), "mine")
