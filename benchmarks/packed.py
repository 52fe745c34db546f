"""What packing gives: model-steps per second of many thinkers as one stacked model against one after the other.

One process; the contestants take turns of a few steps, and the medians of their turns are compared. Run
`python benchmarks/packed.py` on a CPU (batch 8, 16 trials) or on CUDA (batch 512, packs of 8 to 128).
"""

import argparse
import contextlib
import math
import statistics
import time
from collections.abc import Callable

import torch
from _jobs import open_job, open_pack, time_pack, time_steps
from _report import write_result

CPU_PRESET, CPU_SETTINGS, CPU_REPLICAS = "thinker/demo", ("batch=8", "steps=100000"), 16
CUDA_PRESET = "thinker/copy"
CUDA_SETTINGS = ("model.width=32", "model.heads=4", "model.n_latent=8", "model.n_step=6", "data.length=20", "batch=512")
CUDA_PACKS = (64, 8, 32, 128)
CPU_TARGET, CUDA_TARGET = 2.0, 25.0
SILENT = ("every.eval=0", "every.save=0")

Turn = Callable[[], float]


def single(stack: contextlib.ExitStack, preset: str, settings: tuple[str, ...], num_steps: int) -> Turn:
    job = stack.enter_context(open_job(preset, *settings, *SILENT))
    return lambda: time_steps(job, num_steps)


def stacked(stack: contextlib.ExitStack, preset: str, num: int, settings: tuple[str, ...], num_steps: int) -> Turn:
    pack = stack.enter_context(open_pack(preset, num, *settings, *SILENT))
    return lambda: time_pack(pack, num_steps) / num


def measure(turns: dict[str, Turn], num_rounds: int) -> dict[str, float]:
    """Milliseconds per model-step: the median of every contestant's turns."""
    found: dict[str, list[float]] = {name: [] for name in turns}
    for _ in range(num_rounds):
        for name, turn in turns.items():
            found[name].append(1e3 * turn())
    return {name: statistics.median(values) for name, values in found.items()}


def on_cpu(stack: contextlib.ExitStack, num_rounds: int) -> tuple[dict[str, Turn], int]:
    plain = (*CPU_SETTINGS, "device=cpu", "compile=off")
    return {
        "eager": single(stack, CPU_PRESET, plain, 16),
        f"pack of {CPU_REPLICAS}": stacked(stack, CPU_PRESET, CPU_REPLICAS, plain, 4),
    }, num_rounds


def on_cuda(stack: contextlib.ExitStack, num_rounds: int, budget: float) -> tuple[dict[str, Turn], int]:
    """Eager, compiled and captured runs, and packs captured as they are; the pack with the target compiled as well."""
    start = time.perf_counter()
    plain, whole = (*CUDA_SETTINGS, "device=cuda", "compile=off"), (*CUDA_SETTINGS, "device=cuda", "compile=whole")
    makers: dict[str, Callable[[], Turn]] = {
        "eager": lambda: single(stack, CUDA_PRESET, (*plain, "capture=off"), 20),
        "captured": lambda: single(stack, CUDA_PRESET, plain, 40),
    }
    # The pack with a target first: a budget may leave out the others.
    for num in CUDA_PACKS[:1]:
        makers[f"pack of {num}"] = lambda num=num: stacked(stack, CUDA_PRESET, num, plain, 10)
        makers[f"pack of {num}, compiled"] = lambda num=num: stacked(stack, CUDA_PRESET, num, whole, 10)
    makers["compiled, captured"] = lambda: single(stack, CUDA_PRESET, whole, 40)
    makers["compiled"] = lambda: single(stack, CUDA_PRESET, (*whole, "capture=off"), 20)
    for num in CUDA_PACKS[1:]:
        makers[f"pack of {num}, compiled"] = lambda num=num: stacked(stack, CUDA_PRESET, num, whole, 10)
    turns = {}
    for name, maker in makers.items():
        if time.perf_counter() - start > budget:
            print(f"left out, {budget:.0f} s are over: {name}")
            continue
        began = time.perf_counter()
        turns[name] = maker()
        print(f"ready in {time.perf_counter() - began:.1f} s: {name}", flush=True)
    return turns, num_rounds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument(
        "--budget", type=float, default=60.0, help="seconds after which nothing more is compiled and captured (CUDA)"
    )
    options = parser.parse_args()
    on_gpu = options.device == "cuda"
    with contextlib.ExitStack() as stack:
        turns, num_rounds = on_cuda(stack, options.rounds, options.budget) if on_gpu else on_cpu(stack, options.rounds)
        millis = measure(turns, num_rounds)
    against = {name: millis["eager"] / value for name, value in millis.items()}
    for name, value in millis.items():
        print(f"{name:>24}  {value:8.3f} ms per model-step  {against[name]:6.2f}x eager")
    size = 64 if on_gpu else CPU_REPLICAS
    best = max((against[name] for name in against if name.startswith(f"pack of {size}")), default=math.nan)
    target = CUDA_TARGET if on_gpu else CPU_TARGET
    print(f"pack of {size}: {best:.2f}x sequential eager runs (target {target:g}x)")
    figures = {"ms_per_model_step": millis, "against_eager": against, "pack": size, "ratio": best, "target": target}
    settings = f"{CUDA_PRESET} {' '.join(CUDA_SETTINGS)}" if on_gpu else f"{CPU_PRESET} {' '.join(CPU_SETTINGS)}"
    name = torch.cuda.get_device_name().lower().split()[-1] if on_gpu else "cpu"
    write_result(f"packed-{name}", figures, f"{settings}; {num_rounds} rounds, contestants in turns")


if __name__ == "__main__":
    main()
