"""Exports for other programs: transformers, GGUF and ONNX compute what the run computes, and what they cannot is refused."""

import importlib.util
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import train_once
from safetensors.torch import load_file

from seedbed import inference
from seedbed.cli import main
from seedbed.data.bpe import train_bpe
from seedbed.data.tokenizers import TABLE_75, UNKNOWN, CharTokenizer, Tokenizer
from seedbed.errors import UserError
from seedbed.recipes.flow.objective import velocity
from seedbed.recipes.gpt.export import SHAPE, to_llama
from seedbed.recipes.gpt.model import Transformer, build_model
from seedbed.recipes.gpt.presets import ModelConfig
from seedbed.recipes.thinker.evaluate import as_trained, predict
from seedbed.report.model_card import without_folders
from seedbed.train.export_llama import library_json, write_gguf, write_hf

# What was asked for; two float32 programs of a few layers differ by less.
TOLERANCE = 1e-4
TEXT = "the seed that fell on good ground grew up and bore a hundred seeds. " * 60
SHORT = ["steps=2", "every.eval=2", "every.save=2", "batch=4"]
SMALL = ["model.depth=2", "model.width=32", "model.heads=4", "data.block=16"]
LLAMA = [*SMALL, "model.kv_heads=2", "model.qk_norm=false", "ema=0.9", "data.tokenizer=bpe", "data.vocab=300"]
TEXTS = ("The seed.", "", "a  b\n\n\tc", "naïve 日本 🎉", "<|endoftext|> and </s>", UNKNOWN)


def llama_model(**settings: Any) -> Transformer:
    """A model of Llama's shape whose vocabulary is padded inside."""
    shape = {"depth": 2, "heads": 4, "width": 32, "out_init": 1.0, **SHAPE, **settings}
    return build_model(ModelConfig(**shape), vocab=70, block=24, seed=3).eval()


def random_tokens(model: Transformer, batch: int = 3, length: int = 17) -> torch.Tensor:
    return torch.randint(0, model.vocab, (batch, length), generator=torch.Generator().manual_seed(5))


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("runs")
    (root / "text.txt").write_text(TEXT)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SEEDBED_CACHE", str(root / "cache"))
        train_once(root, "llama", *LLAMA, *SHORT, f"data.text={root / 'text.txt'}", recipe="gpt/demo")
    return root


# ---- transformers --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("settings", [{}, {"tied": False}, {"kv_heads": 2, "rope_base": 500.0}, {"kv_heads": 1, "tied": False}])
def test_transformers_gives_the_logits_of_the_model(settings: dict[str, Any], tmp_path: Path):
    transformers = pytest.importorskip("transformers")
    model = llama_model(**settings)
    write_hf(to_llama(model, None), tmp_path)
    theirs, tokens_BT = transformers.AutoModelForCausalLM.from_pretrained(tmp_path), random_tokens(model)
    assert type(theirs).__name__ == "LlamaForCausalLM"
    with torch.no_grad():
        ours_BTV, theirs_BTV = model.logits(tokens_BT), theirs(tokens_BT).logits
    assert ours_BTV.shape == theirs_BTV.shape == (3, 17, 70) and ours_BTV.std() > 100 * TOLERANCE
    assert (ours_BTV - theirs_BTV).abs().max() < TOLERANCE


def tokenizers() -> dict[str, Tokenizer]:
    return {
        "char": CharTokenizer(sorted({*"".join(TEXTS), *TEXT})),
        "char75": CharTokenizer(TABLE_75, unk=True, unknown="unk"),
        "unk and U+FFFD": CharTokenizer([*"abc ", UNKNOWN], unk=True, unknown="unk"),
        "bpe": train_bpe([TEXT], 300),
    }


@pytest.mark.parametrize("name", tokenizers())
def test_transformers_gives_the_ids_of_the_tokenizer(name: str, tmp_path: Path):
    transformers = pytest.importorskip("transformers")
    ours = tokenizers()[name]
    write_hf(to_llama(llama_model(), ours), tmp_path)
    for theirs in (
        transformers.AutoTokenizer.from_pretrained(tmp_path),
        transformers.PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "tokenizer.json"), split_special_tokens=True),
    ):
        for text in TEXTS:
            ids = ours.encode(text).tolist()
            assert theirs(text)["input_ids"] == ids, text
            if "unk" not in name and name != "char75":
                assert theirs.decode(ids) == ours.decode(ids) == text


def test_exported_run_is_that_of_its_averaged_weights(runs: Path, tmp_path: Path):
    transformers = pytest.importorskip("transformers")
    assert inference.export(runs, "llama", tmp_path / "hf", to="hf") == 0
    trained = inference.load(runs, "llama", device="cpu")
    tokens_BT = random_tokens(trained.model)
    with trained.evaluating():
        ours_BTV = trained.model.logits(tokens_BT)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    with torch.no_grad():
        assert (ours_BTV - theirs(tokens_BT).logits).abs().max() < TOLERANCE
    card = (tmp_path / "hf" / "README.md").read_text()
    num_params = sum(param.numel() for param in trained.model.parameters())
    for fact in (
        "gpt/demo",
        f"{num_params:,}",
        "2 of 2",
        "at step 2",
        "text.txt",
        'from_pretrained("hf")',
        without_folders(trained.run.command()),
    ):
        assert fact in card, fact
    assert str(runs) not in card


# ---- GGUF ----------------------------------------------------------------------------------------------------------------


def field(reader: Any, name: str) -> Any:
    return reader.fields[name].contents()


def test_gguf_holds_the_tensors_with_its_own_rotary_pairs(tmp_path: Path):
    gguf = pytest.importorskip("gguf")
    model = llama_model(kv_heads=2, rope_base=500.0)
    llama = to_llama(model, None)
    write_gguf(llama, "some run", tmp_path)
    reader = gguf.GGUFReader(tmp_path / "model.gguf")
    found = {tensor.name: torch.from_numpy(np.array(tensor.data)) for tensor in reader.tensors}
    assert len(found) == len(llama.tensors) == 3 + 2 * 9
    assert torch.equal(found["token_embd.weight"], llama.tensors["model.embed_tokens.weight"])
    assert torch.equal(found["output.weight"], model.embed.weight[:70])
    for i in range(2):
        theirs = {name.removeprefix(f"model.layers.{i}."): t for name, t in llama.tensors.items()}
        for name, part in (("ffn_gate", "mlp.gate_proj"), ("ffn_up", "mlp.up_proj"), ("attn_v", "self_attn.v_proj")):
            assert torch.equal(found[f"blk.{i}.{name}.weight"], theirs[f"{part}.weight"])
        for name, part, heads in (("attn_q", "self_attn.q_proj", 4), ("attn_k", "self_attn.k_proj", 2)):
            pairs = found[f"blk.{i}.{name}.weight"].view(heads, 4, 2, 32)  # neighbours are a pair
            halves = theirs[f"{part}.weight"].view(heads, 2, 4, 32)  # the two halves of a head are
            assert torch.equal(pairs.transpose(1, 2), halves)
    wanted = {"block_count": 2, "embedding_length": 32, "context_length": 24, "attention.head_count": 4}
    wanted |= {"attention.head_count_kv": 2, "rope.dimension_count": 8, "rope.freq_base": 500.0, "vocab_size": 70}
    assert {name: field(reader, f"llama.{name}") for name in wanted} == wanted
    assert field(reader, "llama.attention.layer_norm_rms_epsilon") == pytest.approx(1e-7)
    assert field(reader, "general.name") == "some run" and field(reader, "tokenizer.ggml.model") == "none"


def test_gguf_holds_a_byte_level_tokenizer_and_leaves_out_one_of_characters(tmp_path: Path):
    gguf = pytest.importorskip("gguf")
    for name, tokenizer in tokenizers().items():
        (tmp_path / name).mkdir()
        write_gguf(to_llama(llama_model(), tokenizer), name, tmp_path / name)
        reader = gguf.GGUFReader(tmp_path / name / "model.gguf")
        body = json.loads((tmp_path / name / "tokenizer.json").read_text(encoding="utf-8"))
        if name != "bpe":
            assert field(reader, "tokenizer.ggml.model") == "none"
            continue
        assert (field(reader, "tokenizer.ggml.model"), field(reader, "tokenizer.ggml.pre")) == ("gpt2", "gpt-2")
        tokens = field(reader, "tokenizer.ggml.tokens")
        assert {token: n for n, token in enumerate(tokens)} == body["model"]["vocab"]
        assert [merge.split(" ") for merge in field(reader, "tokenizer.ggml.merges")] == body["model"]["merges"]
        end = field(reader, "tokenizer.ggml.eos_token_id")
        assert tokens[end] == "<|endoftext|>" and field(reader, "tokenizer.ggml.token_type")[end] == gguf.TokenType.CONTROL


# ---- ONNX ----------------------------------------------------------------------------------------------------------------


def session(folder: Path) -> tuple[Any, dict[str, Any]]:
    onnxruntime = pytest.importorskip("onnxruntime")
    facts = json.loads((folder / "config.json").read_text())
    found = onnxruntime.InferenceSession(str(folder / "model.onnx"), providers=["CPUExecutionProvider"])
    assert [given.name for given in found.get_inputs()] == list(facts["inputs"])
    return found, facts


def test_onnx_of_a_language_model_takes_any_batch_and_length(runs: Path, tmp_path: Path):
    pytest.importorskip("onnxscript")
    trained = inference.load(runs, "llama", device="cpu")
    trained.export(tmp_path / "out", to="onnx")
    network, facts = session(tmp_path / "out")
    assert facts["max_length"] == 16 and facts["cache"].startswith("none")
    for batch, length in ((1, 1), (3, 7), (2, 16)):
        tokens_BT = random_tokens(trained.model, batch, length)
        with trained.evaluating():
            wanted_BTV = trained.model.logits(tokens_BT).numpy()
        assert np.abs(network.run(["logits"], {"tokens": tokens_BT.numpy()})[0] - wanted_BTV).max() < TOLERANCE


@pytest.mark.slow
def test_onnx_of_flow_and_thinker(tmp_path: Path):
    pytest.importorskip("onnxscript")
    train_once(tmp_path, "flow", *SMALL[:3], *SHORT, "data.size=16", recipe="flow/demo")
    train_once(tmp_path, "thinker", *SHORT, "data.test=0", "data.length=4", "model.n_step=2", recipe="thinker/demo")
    for name in ("flow", "thinker"):
        assert inference.export(tmp_path, name, tmp_path / f"{name}-onnx", to="onnx") == 0
    flow, thinker = (inference.load(tmp_path, name, device="cpu") for name in ("flow", "thinker"))
    network, _ = session(tmp_path / "flow-onnx")
    for batch in (1, 3):
        x, time, of_class = torch.randn(batch, *flow.model.shape), torch.rand(batch), torch.arange(batch)
        with flow.evaluating():
            wanted = velocity(flow.model(x, time, of_class), x, time, flow.config.model.predict).numpy()
        given = {"x": x.numpy(), "time": time.numpy(), "class": of_class.numpy()}
        # Near the image a velocity is up to 20 times the network's output.
        assert np.abs(network.run(None, given)[0] - wanted).max() < TOLERANCE * max(1.0, np.abs(wanted).max())
    network, facts = session(tmp_path / "thinker-onnx")
    assert facts["steps"] == 2
    for batch in (1, 3):
        asked = thinker.data.valid.batch({"index": torch.arange(batch) + 7})
        with thinker.evaluating():
            wanted = predict(thinker.system, asked, as_trained(thinker.system))[-1].numpy()
        given = {"tokens": asked["x"].numpy(), "sample_index": asked["index"].numpy()}
        assert np.abs(network.run(None, given)[0] - wanted).max() < TOLERANCE


# ---- what is refused -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"qk_norm": True, "softcap": 15.0},
            r"model.qk_norm=True, model.softcap=15.0: .*model.qk_norm=false model.softcap=0.0$",
        ),
        ({"mlp": "gelu"}, "model.mlp=gelu: .*gpt/llama, or with model.mlp=swiglu"),
        ({"norm": "layer", "positions": "learned"}, "model.norm=layer, model.positions=learned"),
        ({"skips": True, "gate": True, "values_x0": True}, "model.skips=True, model.gate=True, model.values_x0=True"),
    ],
)
def test_other_shapes_are_refused_by_their_settings(settings: dict[str, Any], message: str):
    with pytest.raises(UserError, match=message):
        to_llama(llama_model(**settings), None)


def test_tokenizers_without_a_form_are_refused():
    class Odd(Tokenizer):
        kind = "odd"

    with pytest.raises(UserError, match="kind 'odd' cannot be written"):
        library_json(Odd())
    with pytest.raises(UserError, match="half a surrogate pair"):
        library_json(CharTokenizer(["a", "\ud800"]))


def test_unknown_characters_are_errors_where_they_are_ours():
    from tokenizers import Tokenizer as Library

    library = Library.from_str(json.dumps(library_json(CharTokenizer("abc"))))
    assert library.encode("cab").ids == [2, 0, 1] and library.decode([2, 0, 1]) == "cab"
    with pytest.raises(Exception, match="WordLevel error"):
        library.encode("abd")


def test_wrong_exports_are_refused_and_leave_nothing(runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    trained = inference.load(runs, "llama", device="cpu")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine.txt").write_text("kept")
    with pytest.raises(UserError, match="is not an empty folder"):
        trained.export(tmp_path / "full", to="hf")
    with pytest.raises(UserError, match="to='paper' is not one of files, hf, gguf, onnx, web"):
        trained.export(tmp_path / "out", to="paper")
    with pytest.raises(UserError, match="load the run with device='cpu', dtype='float32'"):
        inference.load(runs, "llama", device="cpu", dtype="bfloat16").export(tmp_path / "out", to="onnx")
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name in ("gguf", "onnx") else real(name, *rest))
    for to in ("gguf", "onnx"):
        with pytest.raises(UserError, match=rf'this needs {to}: pip install "seedbed\[{to}\]"'):
            trained.export(tmp_path / "out", to=to)
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["full", "mine.txt"]


def test_run_without_a_checkpoint_is_refused(runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    import shutil

    shutil.copytree(runs / "llama", tmp_path / "llama", ignore=shutil.ignore_patterns("step-*"))
    assert main(["--runs", str(tmp_path), "export", "llama", "--to", "hf", "--out", str(tmp_path / "out")]) == 2
    assert "has no checkpoint yet" in capsys.readouterr().err and not (tmp_path / "out").exists()


@pytest.mark.slow
def test_recipes_without_a_form_say_why(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    train_once(tmp_path, "flow", *SMALL[:3], *SHORT, "data.size=16", recipe="flow/demo")
    train_once(tmp_path, "ebt", *SMALL, *SHORT, "model.control=false", recipe="ebt/demo")
    for name, to, message in (("flow", "hf", "is not a language model"), ("ebt", "onnx", "gradient of its energy")):
        assert main(["--runs", str(tmp_path), "export", name, "--to", to, "--out", str(tmp_path / "out")]) == 2
        assert message in capsys.readouterr().err and not (tmp_path / "out").exists()


def test_weights_are_stored_once_and_in_float32(tmp_path: Path):
    write_hf(to_llama(llama_model(), None), tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    assert {t.dtype for t in stored.values()} == {torch.float32} and len(stored) == 3 + 2 * 9
    assert not json.loads((tmp_path / "config.json").read_text())["tie_word_embeddings"]
