"""gpt on one GPU: tokens/s at the GPT-2 124M shape, and the captured step of a small character model against its eager one.

Limits: 600,000 tokens/s on one H200 (nanoGPT's own benchmark gave 525,000 there), and 3x for the captured step.
"""

import argparse
from typing import Any

from _jobs import measure
from _report import write_result

# Speed at the 124M shape; "ours" is the preset as it is, the last row nanoGPT's own architecture on this loop.
BIG = {
    "ours": ("gpt/gpt2-124m", []),
    "ours with rotary positions and query-key norm": ("gpt/gpt2-124m", ["model.positions=rope", "model.qk_norm=true"]),
    "ours, compiled by blocks": ("gpt/gpt2-124m", ["compile=blocks"]),
    "ours with Muon": ("gpt/gpt2-124m", ["optim.kind=muon"]),
    "nanoGPT's architecture": ("gpt/nanogpt-124m", []),
}
# The small character models: how a step runs, from everything off to the preset's own way.
SMALL = {
    "eager": ["compile=off", "capture=off"],
    "captured": ["compile=off"],
    "compiled": ["capture=off"],
    "compiled and captured": [],
}


def tokens(name: str, settings: list[str], num_steps: int, block: int) -> dict[str, Any]:
    row = measure(name, settings, num_steps)
    return row | {"tokens_per_s": round(row["items_per_s"] * block)} if "ms" in row else row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--text", default="reference", help="corpus of the small models")
    args = parser.parse_args()
    figures: dict = {"124M": {}}
    for title, (name, settings) in BIG.items():
        figures["124M"][title] = row = tokens(name, settings, 40, 1024)
        print(f"{title:28} {row}", flush=True)
        write_result("gpt-h200", figures)
    for preset in ("gpt/shakespeare", "gpt/nanogpt-shakespeare"):
        rows = figures[preset] = {}
        for title, settings in SMALL.items():
            base = [f"data.text={args.text}", "budget=none"]
            rows[title] = row = tokens(preset, base + settings, 150, 256)
            print(f"{preset} {title:28} {row}", flush=True)
        ratio = rows["eager"].get("ms", 0.0) / rows["compiled and captured"].get("ms", 1.0)
        rows["captured_over_eager"] = ratio
        print(f"{preset}: captured step {ratio:.2f}x faster than eager (limit 3)")
        write_result("gpt-h200", figures)
    speed = figures["124M"]["ours"].get("tokens_per_s", 0)
    print(f"124M shape: {speed:,} tokens/s, {speed / 600_000:.3f} of the 600,000 asked for, {speed / 525_000:.3f} of nanoGPT's")


if __name__ == "__main__":
    main()
