"""One process through the code of replicas and of shards, over NCCL on one GPU, against a plain process: GPT-2 124M.

What is lost here is lost on every rank of a larger run, before its network. Limit: 97 % of the plain tokens/s, each way against
the plain row that is compiled like it. Every row is measured twice, in the order below and in the reverse one; the faster counts.
"""

import argparse
from typing import Any

from _jobs import measure
from _report import write_result

PRESET, BLOCK, LIMIT = "gpt/gpt2-124m", 1024, 0.97
# Row: what it is compared with, and its settings.
ROWS: dict[str, tuple[str, list[str]]] = {
    "plain, blocks": ("", ["compile=blocks"]),
    "replicate, blocks": ("plain, blocks", ["compile=blocks", "dist.single=replicate"]),
    "shard, blocks": ("plain, blocks", ["compile=blocks", "dist.single=shard"]),
    "plain, whole": ("", ["compile=whole"]),
    "replicate, whole": ("plain, whole", ["compile=whole", "dist.single=replicate"]),
    "replicate, blocks, reduced in bf16": ("plain, blocks", ["compile=blocks", "dist.single=replicate", "dist.reduce=bf16"]),
    "plain, blocks, not captured": ("", ["compile=blocks", "capture=off"]),
    "replicate, blocks, not captured": ("plain, blocks", ["compile=blocks", "capture=off", "dist.single=replicate"]),
}


def row(settings: list[str], num_steps: int, *others: str) -> dict[str, Any]:
    found = measure(PRESET, [*settings, *others], num_steps)
    return found | {"tokens_per_s": round(found["items_per_s"] * BLOCK)} if "ms" in found else found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=25, help="steps of one measurement")
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="further settings of every row")
    parser.add_argument("--once", action="store_true", help="measure every row once")
    args = parser.parse_args()
    figures: dict[str, Any] = {"rows": {}, "ratios": {}, "limit": LIMIT}
    names = list(ROWS)
    for name in names if args.once else [*names, *reversed(names)]:
        found = row(ROWS[name][1], args.steps, *args.set)
        known = figures["rows"].get(name, {})
        if "error" not in known and found.get("tokens_per_s", 0) >= known.get("tokens_per_s", 0):
            figures["rows"][name] = found
        print(f"{name:36} {found}", flush=True)
        for title, (base, _) in ROWS.items():
            ours, theirs = (figures["rows"].get(n, {}).get("tokens_per_s", 0) for n in (title, base))
            if ours and theirs:
                figures["ratios"][title] = round(ours / theirs, 4)
        write_result("dist-h200", figures)
    for title, ratio in figures["ratios"].items():
        print(f"{title}: {ratio:.1%} of the plain process (limit {LIMIT:.0%})")


if __name__ == "__main__":
    main()
