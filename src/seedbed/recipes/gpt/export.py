"""The language model for other programs: as a Llama, and as ONNX. V vocabulary, C width, B batch, T time."""

from typing import Any

import torch

from seedbed.data.tokenizers import Tokenizer
from seedbed.errors import UserError
from seedbed.nn.layers import EPS, rms_norm
from seedbed.recipes.gpt.model import Transformer
from seedbed.train.export_llama import Llama, llama_config
from seedbed.train.export_onnx import Function, OnnxNetwork

# What Llama has; all other settings it can have, or they matter in training only.
SHAPE: dict[str, Any] = {
    "mlp": "swiglu",
    "norm": "rms",
    "positions": "rope",
    "qk_norm": False,
    "softcap": 0.0,
    "skips": False,
    "gate": False,
    "values_x0": False,
}


def to_llama(model: Transformer, tokenizer: Tokenizer | None) -> Llama:
    """Weights under the names of `transformers`, in float32 on the CPU. What computes the same is written in its terms:
    norms without a weight get ones, and the norm of the embeddings is in their table, which is therefore never tied."""
    config = model.config
    if wrong := [name for name, value in SHAPE.items() if getattr(config, name) != value]:
        found = ", ".join(f"model.{name}={getattr(config, name)}" for name in wrong)
        needed = " ".join(f"model.{name}={str(SHAPE[name]).lower()}" for name in wrong)
        raise UserError(f"{found}: Llama has no place for this; train gpt/llama, or with {needed}")
    table_VC, ones_C = model.embed.weight[: model.vocab], torch.ones(config.width)
    tensors = {"model.embed_tokens": rms_norm(table_VC), "model.norm": ones_C, "lm_head": model.head_weight[: model.vocab]}
    for i, block in enumerate(model.blocks):
        attention, (gate, up) = block.attention, block.mlp.up.weight.chunk(2)
        queries, keys = attention.heads * attention.head_dim, attention.kv_heads * attention.head_dim
        q, k, v = attention.qkv.weight.split((queries, keys, keys))
        parts = {"self_attn.q_proj": q, "self_attn.k_proj": k, "self_attn.v_proj": v, "self_attn.o_proj": attention.out.weight}
        parts |= {"mlp.gate_proj": gate, "mlp.up_proj": up, "mlp.down_proj": block.mlp.down.weight}
        parts |= {"input_layernorm": ones_C, "post_attention_layernorm": ones_C}
        tensors |= {f"model.layers.{i}.{name}": tensor for name, tensor in parts.items()}
    settings = llama_config(
        vocab=model.vocab,
        width=config.width,
        hidden=tensors["model.layers.0.mlp.up_proj"].shape[0],
        depth=config.depth,
        heads=config.heads,
        kv_heads=config.kv_heads or config.heads,
        context=model.block,
        rope_theta=config.rope_base,
        rms_norm_eps=EPS,
    )
    # Copies: safetensors refuses tensors that share their memory.
    return Llama(settings, {f"{name}.weight": t.detach().float().cpu().clone() for name, t in tensors.items()}, tokenizer)


def onnx_network(model: Transformer) -> OnnxNetwork:
    example_BT = torch.zeros(2, min(3, model.block), dtype=torch.long)
    axes = {"tokens": ("batch", "length"), "logits": ("batch", "length", str(model.vocab))}
    facts = {"max_length": model.block, "cache": "none: every call computes all positions again, there are no keys and values"}
    return OnnxNetwork(Function(model, model.logits), {"tokens": example_BT}, axes, "logits", facts)
