"""Cached against uncached generation: one prompt token to a full context of 1,024, with the same weights and dtype.

On CUDA the GPT-2 124M shape in bf16, batch 1 and 32, and both sides also at their best: uncached compiled at one padded
length, cached as one captured graph. On a CPU a small model in fp32. Limit: 10x at batch 1 against the eager uncached path.
"""

import argparse
import time

import torch
from _report import write_result
from _uncached import UncachedDecoder
from torch import Tensor

from seedbed.nn.decoding import Decoder, Sampling
from seedbed.nn.layers import stream_dtype
from seedbed.recipes.gpt.model import CachedDecoder, Transformer, build_model
from seedbed.recipes.gpt.presets import ModelConfig

CONTEXT, LIMIT = 1024, 10.0
SHAPES = {
    "cuda": (ModelConfig(depth=12, heads=12, width=768, mlp="relu2", out_init=1.0, tied=False), 50_304),
    "cpu": (ModelConfig(depth=4, heads=4, width=256, out_init=1.0, tied=False), 65),
}


class PaddedDecoder(UncachedDecoder):
    """Uncached at one length, so that the whole model can be compiled once."""

    forward = None

    def _windows(self, rows: list[int], leave: int) -> tuple[Tensor, list[int]]:
        tokens_NT, sizes = super()._windows(rows, leave)
        return torch.nn.functional.pad(tokens_NT, (0, self.model.block - tokens_NT.shape[1])), sizes

    def hidden(self, tokens_BT: Tensor) -> Tensor:
        if PaddedDecoder.forward is None:
            PaddedDecoder.forward = torch.compile(self.model.hidden, dynamic=False)
        return PaddedDecoder.forward(tokens_BT)


WAYS = {
    "uncached, eager": (UncachedDecoder, False),
    "uncached, padded and compiled": (PaddedDecoder, False),
    "cached, eager": (CachedDecoder, False),
    "cached, captured": (CachedDecoder, True),
}


def measure(model: Transformer, batch: int, way: str) -> dict:
    """Seconds from the prompt to the full context, after a short warm-up of the same path."""
    kind, capture = WAYS[way]
    prompts = [[row % model.vocab] for row in range(batch)]
    run(kind(model, prompts, 8, Sampling(0.0), 1, capture=capture), 8)
    synchronize()
    start = time.perf_counter()
    decoder = kind(model, prompts, CONTEXT - 1, Sampling(0.0), 1, capture=capture)
    run(decoder, 1)
    synchronize()
    first = time.perf_counter() - start
    run(decoder, CONTEXT - 2)
    synchronize()
    seconds = time.perf_counter() - start
    row = {"seconds": round(seconds, 3), "first_token_ms": round(first * 1e3, 2)}
    row["tokens_per_s"] = round(batch * (CONTEXT - 1) / seconds, 1)
    if isinstance(decoder, CachedDecoder):
        # Each step reads every weight but the embedding's once.
        num_bytes = sum(p.numel() * p.element_size() for n, p in model.named_parameters() if n != "embed.weight")
        row["weights_gb_per_s"] = round(num_bytes * (CONTEXT - 1) / seconds / 1e9, 2)
        row["captured"] = decoder.why_not_captured or "yes"
    row["tokens"] = decoder.history_BN
    return row


def run(decoder: Decoder, num_tokens: int) -> None:
    for _ in range(num_tokens):
        decoder.advance()


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def agreement(model: Transformer, tokens_BT: Tensor) -> dict:
    """The same tokens through both paths: the largest difference of logits, and how often the likeliest token agrees."""
    whole_BTV = model.logits(tokens_BT)
    cache, worst, same = model.new_cache(len(tokens_BT)), 0.0, 0
    for t in range(tokens_BT.shape[1]):
        x_B1C = model.hidden(tokens_BT[:, t : t + 1], model.position_tables(tokens_BT, cache.length_B[:, None]), cache.decode())
        cache.length_B += 1
        step_BV = model.read_out(x_B1C[:, 0])
        worst = max(worst, (step_BV - whole_BTV[:, t]).abs().max().item())
        same += (step_BV.argmax(-1) == whole_BTV[:, t].argmax(-1)).sum().item()
    return {"max_abs": worst, "largest_logit": whole_BTV.abs().max().item(), "argmax_agreement": same / tokens_BT.numel()}


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch", type=int, nargs="+", help="rows at once; otherwise 1, and 32 on CUDA")
    batches = parser.parse_args().batch
    device = "cuda" if torch.cuda.is_available() else "cpu"
    shape, vocab = SHAPES[device]
    model = build_model(shape, vocab, CONTEXT, seed=1).eval().to(device, torch.bfloat16 if device == "cuda" else torch.float32)
    ways = [w for w in WAYS if device == "cuda" or w.endswith("eager")]
    figures: dict = {
        "shape": f"{shape.depth}/{shape.heads}/{shape.width}",
        "vocab": vocab,
        "dtype": str(stream_dtype(model.embed.weight)),
    }
    for batch in batches or ([1, 32] if device == "cuda" else [1]):
        rows = {way: measure(model, batch, way) for way in ways}
        base, tokens = rows["uncached, eager"]["seconds"], {w: r.pop("tokens") for w, r in rows.items()}
        for way, row in rows.items():
            row["ratio"] = round(base / row["seconds"], 2)
            row["same_greedy_tokens"] = bool(torch.equal(tokens[way], tokens["uncached, eager"]))
            print(f"batch {batch:>2}  {way:<30} {row['tokens_per_s']:>10,} tokens/s  {row['ratio']:>6.1f}x")
        figures[f"batch {batch}"] = rows
        figures[f"batch {batch}, agreement"] = agreement(model, tokens["cached, eager"])
        print(f"batch {batch:>2}  {figures[f'batch {batch}, agreement']}")
    best = max(r["ratio"] for r in next(v for k, v in figures.items() if k.startswith("batch")).values())
    print(f"cached against eager uncached: {best:.1f}x, limit {LIMIT:g}x: {'ok' if best >= LIMIT else 'MISSED'}")
    write_result(f"generate-{device}", figures)


if __name__ == "__main__":
    main()
