"""Weights of Llama's architecture and tokenizers as files of other programs: a folder that `transformers` loads, a GGUF file."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from seedbed.data.bpe import ByteTokenizer
from seedbed.data.tokenizers import UNKNOWN, CharTokenizer, Tokenizer
from seedbed.errors import UserError
from seedbed.train.export_onnx import needs

GGUF_FILE = "model.gguf"
UNK_NAME = "<unk>"  # longer than a character, so that no text encodes to it


@dataclass(frozen=True)
class Llama:
    """Config and tensors under the names of `transformers`; its rotary pairs are (i, i + D/2)."""

    config: dict[str, Any]
    tensors: dict[str, Tensor]
    tokenizer: Tokenizer | None


def llama_config(*, vocab: int, width: int, hidden: int, depth: int, heads: int, kv_heads: int, **rest: Any) -> dict[str, Any]:
    """The config.json of a LlamaForCausalLM without biases and with two tables; `rest` is context, rope_theta, rms_norm_eps."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": vocab,
        "hidden_size": width,
        "intermediate_size": hidden,
        "num_hidden_layers": depth,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": width // heads,
        "max_position_embeddings": rest["context"],
        "rms_norm_eps": rest["rms_norm_eps"],
        "rope_theta": rest["rope_theta"],
        "rope_parameters": {"rope_type": "default", "rope_theta": rest["rope_theta"]},
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "bos_token_id": None,
        "eos_token_id": None,
    }


def write_hf(llama: Llama, folder: Path) -> None:
    """config.json, model.safetensors and, where the run has a tokenizer, tokenizer.json."""
    config = dict(llama.config)
    if llama.tokenizer is not None:
        config["eos_token_id"] = _write_tokenizer(llama.tokenizer, config["max_position_embeddings"], folder)
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    save_file(llama.tensors, folder / "model.safetensors", metadata={"format": "pt"})


def _write_tokenizer(tokenizer: Tokenizer, context: int, folder: Path) -> int | None:
    """The files of a PreTrainedTokenizerFast; returns the id of the end of a text."""
    body, end = library_json(tokenizer), end_of_text(tokenizer)
    (folder / "tokenizer.json").write_text(json.dumps(body, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
    facts = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": context, "clean_up_tokenization_spaces": False}
    # Otherwise text that looks like a special token would become one.
    facts |= {"split_special_tokens": True, **({"eos_token": end[0]} if end else {})}
    (folder / "tokenizer_config.json").write_text(json.dumps(facts, indent=1) + "\n")
    return end[1] if end else None


def write_gguf(llama: Llama, name: str, folder: Path) -> None:
    """model.gguf in float32; a tokenizer that GGUF has no name for is in a tokenizer.json beside it only."""
    needs("gguf", "gguf")
    import gguf

    config, writer = llama.config, gguf.GGUFWriter(folder / GGUF_FILE, "llama")
    writer.add_name(name)
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    if llama.tokenizer is not None:
        _write_tokenizer(llama.tokenizer, config["max_position_embeddings"], folder)
    _add_tokenizer(writer, llama.tokenizer)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config["num_hidden_layers"])
    for key, tensor in llama.tensors.items():
        writer.add_tensor(f"{names[key.removesuffix('.weight')]}.weight", _in_gguf_order(key, tensor, config).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _in_gguf_order(key: str, tensor: Tensor, config: dict[str, Any]) -> Tensor:
    """The rotary pairs of GGUF are (2i, 2i + 1): rows of queries and keys are put in that order."""
    heads = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}.get(key.split(".")[-2])
    return tensor.unflatten(0, (config[heads], 2, -1)).transpose(1, 2).flatten(0, 2).contiguous() if heads else tensor


def _add_tokenizer(writer: Any, tokenizer: Tokenizer | None) -> None:
    if tokenizer is None or not is_gpt2(tokenizer):
        return writer.add_tokenizer_model("none")
    import gguf

    body = tokenizer.to_json()
    names = {n: name for name, n in body["model"]["vocab"].items()} | {t["id"]: t["content"] for t in body["added_tokens"]}
    special = {t["id"] for t in body["added_tokens"] if t["special"]}
    ids, kinds = range(tokenizer.vocab_size), gguf.TokenType
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([names.get(n, f"[unused{n}]") for n in ids])
    writer.add_token_types([kinds.CONTROL if n in special else kinds.NORMAL if n in names else kinds.UNUSED for n in ids])
    writer.add_token_merges([m if isinstance(m, str) else " ".join(m) for m in body["model"]["merges"]])
    writer.add_add_bos_token(False)
    if end := end_of_text(tokenizer):
        writer.add_eos_token_id(end[1])


def library_json(tokenizer: Tokenizer) -> dict[str, Any]:
    """The body of a tokenizer.json that gives the same ids."""
    if isinstance(tokenizer, ByteTokenizer):
        # Ours adds no special tokens, and a post-processor might.
        return {**tokenizer.to_json(), "post_processor": None}
    if isinstance(tokenizer, CharTokenizer):
        return _characters(tokenizer)
    raise UserError(f"a tokenizer of kind {tokenizer.kind!r} cannot be written as a tokenizer.json; use char, char75 or bpe")


def _characters(tokenizer: CharTokenizer) -> dict[str, Any]:
    """Every character is a word, and words are joined without blanks."""
    from tokenizers import Regex, decoders, models, pre_tokenizers
    from tokenizers import Tokenizer as Library

    if any("\ud800" <= c <= "\udfff" for c in tokenizer.table):
        raise UserError("the table of characters holds half a surrogate pair, which a tokenizer.json cannot; train on clean text")
    vocab, replaces = {c: n for n, c in enumerate(tokenizer.table)}, tokenizer.unknown != "error"
    unk = UNKNOWN if replaces and UNKNOWN not in vocab else UNK_NAME
    if tokenizer.unk:
        vocab[unk] = len(vocab)
    # Without a token for unknown characters the library raises an error on them, as ours does.
    library = Library(models.WordLevel(vocab, unk) if replaces else models.WordLevel(vocab, UNK_NAME + UNK_NAME))
    library.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    library.decoder = decoders.Fuse()
    return json.loads(library.to_str())


def end_of_text(tokenizer: Tokenizer) -> tuple[str, int] | None:
    """The special token between documents and its id, where there is one."""
    added = tokenizer.to_json()["added_tokens"] if isinstance(tokenizer, ByteTokenizer) else []
    named = {t["id"]: t["content"] for t in added if t["special"]}
    found = tokenizer.separator.tolist()
    return (named[found[0]], found[0]) if len(found) == 1 and found[0] in named else None


def is_gpt2(tokenizer: Tokenizer) -> bool:
    """Whether it splits text as GPT-2 does, which GGUF has a name for."""
    if not isinstance(tokenizer, ByteTokenizer):
        return False
    body = tokenizer.to_json()
    split = body["pre_tokenizer"] or {}
    plain = split.get("type") == "ByteLevel" and split.get("use_regex", True) and not split.get("add_prefix_space")
    return bool(plain and body["normalizer"] is None and body["model"]["merges"])
