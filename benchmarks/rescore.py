"""A second opinion on a tiny-shakespeare figure: the forward pass written again from the exported files, in plain torch.

Nothing of the package's model, data or evaluation is used. Every target of the last tenth of the text is scored once, in cold
windows of the context; then some of them again from a prefix that holds nothing else, so that no target can have been seen.
`python benchmarks/rescore.py --text tinyshakespeare.txt --export FOLDER` after `seedbed export RUN --out FOLDER`.
"""

import argparse
import json
import math
from pathlib import Path

import torch
import torch.nn.functional as F
from _report import write_result
from safetensors.torch import load_file
from torch import Tensor

EPS = 1e-7


def norm(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS)


def rotate(x_BTHD: Tensor) -> Tensor:
    half = x_BTHD.shape[-1] // 2
    speed = 1e4 ** (-torch.arange(half, device=x_BTHD.device) / half)
    angle = torch.arange(x_BTHD.shape[1], device=x_BTHD.device)[:, None, None] * speed
    left, right = x_BTHD[..., :half], x_BTHD[..., half:]
    return torch.cat((left * angle.cos() - right * angle.sin(), left * angle.sin() + right * angle.cos()), -1)


def logits(weights: dict[str, Tensor], shape: dict, tokens_BT: Tensor) -> Tensor:
    """The U-shaped character model of `gpt/shakespeare`, in float32."""
    x = norm(weights["embed.weight"][tokens_BT])
    x0, early, depth, heads = x, [], shape["depth"], shape["heads"]
    size, length = tokens_BT.shape
    future = torch.ones(length, length, dtype=torch.bool, device=x.device).triu(1)
    for i in range(depth):
        at = {n.removeprefix(f"blocks.{i}."): w for n, w in weights.items() if n.startswith(f"blocks.{i}.")}
        if "skip_weight" in at:
            x = x + at["skip_weight"] * early.pop()
        if i < depth // 2:
            early.append(x)
        h = norm(x)
        q, k, v = (h @ at["attention.qkv.weight"].T).view(size, length, 3, heads, -1).unbind(2)
        v = v + (x0 @ at["attention.values_x0.weight"].T).view_as(v)
        q, k = rotate(norm(q)), rotate(norm(k))
        scores = torch.einsum("bthd,bshd->bhts", q, k) * 1.44 / math.sqrt(q.shape[-1])
        y = torch.einsum("bhts,bshd->bthd", scores.masked_fill(future, -math.inf).softmax(-1), v)
        y = y * (2 * torch.sigmoid(h @ at["attention.gate.weight"].T))[..., None]
        x = x + y.flatten(2) @ at["attention.out.weight"].T
        gate, value = (norm(x) @ at["mlp.up.weight"].T).chunk(2, -1)
        x = x + (F.silu(gate) * value) @ at["mlp.down.weight"].T
    return norm(x) @ weights["embed.weight"].T


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--export", type=Path, required=True)
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    facts = json.loads((args.export / "config.json").read_text())
    weights = {n.removeprefix("model."): w.to(device) for n, w in load_file(args.export / "model.safetensors").items()}
    text = args.text.read_text(encoding="utf-8")
    table = {c: i for i, c in enumerate(sorted(set(text)))}
    tokens = torch.tensor([table[c] for c in text[len(text) * 9 // 10 :]], device=device)
    model, block, vocab, nats = facts["config"]["model"], facts["config"]["data"]["block"], facts["data"]["vocab_size"], []
    assert vocab == len(table), f"the export knows {vocab} characters, the text has {len(table)}"
    whole = (len(tokens) - 1) // block
    parts = [(tokens[: whole * block].view(whole, block), tokens[1 : whole * block + 1].view(whole, block))]
    parts.append((tokens[None, whole * block : -1], tokens[None, whole * block + 1 :]))
    for inputs, targets in ((x, y) for p in parts for x, y in zip(p[0].split(32), p[1].split(32), strict=True)):
        out = logits(weights, model, inputs)[..., :vocab]
        nats.append(F.cross_entropy(out.mT, targets, reduction="none").flatten())
    scored = torch.cat(nats).double()
    rng, worst = torch.Generator().manual_seed(1), 0.0
    for n in torch.randint(whole * block, (200,), generator=rng).tolist():
        alone = logits(weights, model, tokens[None, n - n % block : n + 1])[0, -1, :vocab]
        worst = max(worst, abs(F.cross_entropy(alone, tokens[n + 1]).item() - scored[n].item()))
    figures = {"loss": scored.mean().item(), "num_targets": len(scored), "largest_difference_from_prefix_alone": worst}
    print(json.dumps(figures))
    write_result("shakespeare-rescored", figures)


if __name__ == "__main__":
    main()
