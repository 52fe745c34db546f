"""gpt on one GPU: tokens/s at the GPT-2 124M shape, and the captured step of a small character model against its eager one.

Limits: 600,000 tokens/s on one H200 (nanoGPT's own benchmark gave 525,000 there), and 3x for the captured step.
"""

import argparse
import gc
import traceback

import torch
from _jobs import open_job, time_steps
from _report import write_result

SHAPE = "gpt/gpt2-124m"
RANDOM = ["data.text=random:20000000:50304", "batch=64", "accum=1", "precision=bf16"]
NANO = ["model.norm=layer", "model.positions=learned", "model.mlp=gelu", "model.qk_norm=false", "model.tied=true"]
BIG = {
    "ours, whole, captured": ["compile=whole"],
    "ours, blocks, captured": ["compile=blocks"],
    "ours, whole, uncaptured": ["compile=whole", "capture=off"],
    "ours with Muon, whole": ["compile=whole", "optim.kind=muon"],
    "nanoGPT's architecture, whole": ["compile=whole", *NANO],
}
SMALL = {
    "eager": ["compile=off", "capture=off"],
    "eager, captured": ["compile=off"],
    "compiled": ["compile=whole", "capture=off"],
    "compiled, captured": ["compile=whole"],
}


def measure(name: str, settings: list[str], num_steps: int) -> dict:
    """One row; what cannot run is a row too."""
    torch.cuda.reset_peak_memory_stats()
    try:
        with open_job(name, *settings) as job:
            seconds = time_steps(job, num_steps)
            tokens = job.config.batch * job.config.data.block
            row = {
                "ms": round(seconds * 1e3, 3),
                "tokens_per_s": round(tokens / seconds),
                "gib": round(torch.cuda.max_memory_allocated() / 2**30, 2),
                "how": job.runner.how,
                "compile_s": round(job.clock["compile"], 1),
                "loss": round(job.last_loss, 4),
            }
            row |= {k: v for k, v in job.system.describe().items() if "attention" in k}
            flops = job.system.flops_per_item() * job.config.batch / seconds
            row["mfu"] = {"nominal": flops / job.meter.nominal, "measured": flops / job.meter.measured} if job.meter.nominal else None
    except Exception as error:
        traceback.print_exc()
        row = {"error": f"{type(error).__name__}: {error}"[:300]}
    gc.collect()
    torch.compiler.reset()
    torch.cuda.empty_cache()
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="rows whose name contains this")
    parser.add_argument("--text", default="reference", help="corpus of the small model")
    args = parser.parse_args()
    figures: dict = {"big": {}, "small": {}}
    for title, settings in BIG.items():
        if args.only in title:
            figures["big"][title] = row = measure(SHAPE, RANDOM + settings, 40)
            print(f"{title:32} {row}", flush=True)
    for title, settings in SMALL.items():
        if args.only in title:
            base = [f"data.text={args.text}", "precision=bf16", "batch=64"]
            figures["small"][title] = row = measure("gpt/nanogpt-shakespeare", base + settings, 200)
            print(f"{title:32} {row}", flush=True)
    if {"eager", "compiled, captured"} <= figures["small"].keys():
        rows = figures["small"]
        figures["captured_over_eager"] = rows["eager"].get("ms", 0) / rows["compiled, captured"].get("ms", 1)
        print(f"captured step against eager: {figures['captured_over_eager']:.2f}x (limit 3)")
    best = max((r.get("tokens_per_s", 0) for r in figures["big"].values()), default=0)
    print(f"best at the 124M shape: {best:,} tokens/s (limit 600,000)")
    write_result("gpt-h200", figures)


if __name__ == "__main__":
    main()
