"""ebt on one GPU: the S1 step, learning against the plain transformer, inference curves, denoising, and cached generation.

    python benchmarks/ebt.py --step --generate                          # random tokens, no data needed
    python benchmarks/ebt.py --learn --text tinyshakespeare.txt         # with the curves of every run
    python benchmarks/ebt.py --denoise --seeds 1 2 3 --images CIFAR10   # beside a regressor of equal size; shapes by default

Limits on one H200: 42 ms for the S1 step of the xxs size (6 layers, 384 wide), batch 32, context 256, 2 steps, vocabulary
4,096, in the best precision (the original: 167 ms, 17.8 GiB); cached generation at least 10 times uncached at 1,024 tokens.
"""

import argparse
import contextlib
import io
import itertools
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from _report import write_result
from _uncached import UncachedEnergyDecoder

from seedbed import config as configs
from seedbed import inference
from seedbed.data.feed import Feed
from seedbed.launch import local
from seedbed.nn.decoding import Sampling
from seedbed.recipes import find
from seedbed.recipes.ebt.denoise.system import curves
from seedbed.recipes.ebt.evaluate import inference_curves
from seedbed.recipes.ebt.generate import CachedDecoder, OptimizeOptions
from seedbed.track.run import Run
from seedbed.train.capture import StepRunner
from seedbed.train.stepper import build

STEP_LIMIT_MS, ORIGINAL_MS, CACHE_LIMIT = 42.0, 167.0, 10.0
RANDOM = "data.text=random:2_000_000:4096"
# Their architecture and precision, ours in the same precision, and ours at its best.
STEP_ROWS = {
    "replica, fp32": ("ebt/replica", ["precision=fp32"]),
    "replica, tf32": ("ebt/replica", ["precision=tf32"]),
    "s1, fp32": ("ebt/s1", ["precision=fp32"]),
    "s1, tf32": ("ebt/s1", ["precision=tf32"]),
    "s1, bf16": ("ebt/s1", ["precision=bf16"]),
    "s1, bf16, eager": ("ebt/s1", ["precision=bf16", "compile=off", "capture=off"]),
    "s2, bf16": ("ebt/s2", ["precision=bf16"]),
    "plain, bf16": ("ebt/plain", ["precision=bf16"]),
}
LEARN_ROWS = {
    "s1": ("ebt/shakespeare-s1", []),
    "s2, random step size": ("ebt/shakespeare-s2", []),
    "s2, fixed step size": ("ebt/shakespeare-s2", ["model.mcmc.random_alpha=1"]),
    "s2, no noise": ("ebt/shakespeare-s2", ["model.mcmc.langevin_noise=0"]),
    "plain, equal tokens": ("ebt/plain", ["data.tokenizer=char"]),
    "plain, equal time": ("ebt/plain", ["data.tokenizer=char"]),  # as many steps as fit into the time of s1's
}
STEPS_COMPARED = {"s1 step": "s1", "plain step": "plain, equal tokens"}
# Energies over images, and the regressor that is their baseline; on shapes, and on a folder of images.
DENOISE_ROWS = {
    "energy": ("denoise", []),
    "energy that sees the noisy image": ("denoise", ["model.observe=concat"]),
    "energy, random step size": ("denoise", ["model.steps=2", "model.random_alpha=2"]),
    "regressor": ("regress", []),
}


def time_step(preset: str, settings: list[str], seconds: float, data: Sequence[str] = (RANDOM,)) -> dict[str, Any]:
    """Milliseconds of a whole training step, optimizer included, and the most memory it took."""
    recipe, name = find(preset)
    config = configs.override(recipe.preset(name), [*data, "batch=32", "data.block=256", "every.log=1_000_000", *settings])
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    data = recipe.open_data(config)
    engine = build(recipe, config, data)
    system = engine.system
    feed = Feed(data.train, batch=config.batch, parts=1, seed=1, device=engine.device)
    runner = StepRunner(engine, feed, print)
    variants = sorted({system.variant(step, 100) for step in range(20)}, key=str) if system.variant(0, 1) else [None]
    began = time.perf_counter()
    times = []
    for variant in variants:
        engine.variant = variant
        feed.load(0)
        engine.begin(0, 0.5)
        runner.prepare()
        times.append(_rate(lambda step: (feed.load(32 * step), engine.begin(step, 0.5), runner()), seconds / len(variants)))
    row = {"ms": round(1e3 * sum(times) / len(times), 2), "how": runner.how}
    row |= {"peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 2), "setup_s": round(time.perf_counter() - began, 1)}
    row["tokens_per_s"] = round(32 * 256e3 / row["ms"])
    feed.close()
    return row


def _rate(act: Callable[[int], Any], seconds: float) -> float:
    """Seconds per call, the best of three rounds."""
    for step in range(3):
        act(step)
    torch.cuda.synchronize()
    start, count = time.perf_counter(), 0
    while time.perf_counter() - start < seconds / 4 and count < 200:
        act(count)
        torch.cuda.synchronize()
        count += 1
    rounds = []
    for _ in range(3):
        start = time.perf_counter()
        for step in range(count):
            act(step)
        torch.cuda.synchronize()
        rounds.append((time.perf_counter() - start) / count)
    return min(rounds)


def train(root: Path, name: str, preset: str, settings: list[str]) -> dict[str, Any]:
    """One run; its evaluation at the end, its best, and its seconds."""
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        code = local.train(preset, settings, root=root, run_name=name, dirty=True)
    if code:
        return {"error": said.getvalue()[-400:]}
    run = Run.open(root, name)
    evals = [e for e in run.events() if e["kind"] == "eval"]
    keys = ("nats", "perplexity", "bits_per_byte", "nats_one_step", "psnr_in", "psnr_out")
    final = {key: round(evals[-1][key], 4) for key in keys if key in evals[-1]}
    if "nats" in final:
        final["best"] = round(min(e["nats"] for e in evals), 4)
    status = run.status()
    return {**final, "steps": status["step"], "train_s": round(status["clock"]["train"], 1)}


def learn(text: str, steps: int, seeds: list[int], texts: tuple[str, ...], wanted: str) -> dict[str, Any]:
    """Equal parameters always; equal tokens, and equal seconds, against the plain transformer; and the curves of each."""
    chosen = {title: row for title, row in LEARN_ROWS.items() if wanted in title}
    data, rows, facts = [f"data.text={text}"], {}, {}
    if "plain, equal time" in chosen:  # by the times of single steps, so that runs may share a card
        facts = {name: time_step(*LEARN_ROWS[title], 4.0, data) for name, title in STEPS_COMPARED.items()}
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        spelled = tuple(_spelled(text, other, root) for other in texts)
        for seed, (title, (preset, extra)) in itertools.product(seeds, chosen.items()):
            num = round(steps * facts["s1 step"]["ms"] / facts["plain step"]["ms"]) if title == "plain, equal time" else steps
            name = f"{title.replace(', ', '-').replace(' ', '-')}-{seed}"
            row = train(root, name, preset, [*data, f"steps={num}", *extra, f"seed={seed}"])
            if "error" not in row and not title.startswith("plain"):
                row["curves"] = _curves(root, name, spelled)
            rows[f"{title}, seed {seed}"] = row
            write_result(name_of("ebt-learn", wanted), {**facts, "rows": rows})  # each as it is done
            print(title, seed, {k: v for k, v in row.items() if k != "curves"}, flush=True)
    return rows


def name_of(part: str, wanted: str) -> str:
    """The file's name tells which rows it holds, where it does not hold all."""
    return f"{part}-{wanted.replace(' ', '-').replace(',', '')}" if wanted else part


def _spelled(text: str, other: str, root: Path) -> str:
    """Another text in the letters of the first: what a tokenizer of its characters can read."""
    letters = set(Path(text).read_text(encoding="utf-8"))
    path = root / f"{Path(other).stem}.txt"
    path.write_text("".join(c for c in Path(other).read_text(encoding="utf-8") if c in letters), encoding="utf-8")
    return str(path)


def _curves(root: Path, name: str, texts: tuple[str, ...]) -> dict[str, Any]:
    trained = inference.load(root, name)
    with trained.engine.evaluating():
        found = inference_curves(trained.system, tokens=1 << 14, num_samples=8, texts=texts)  # type: ignore[arg-type]
    return found | {"sets": {Path(name).stem: one for name, one in found["sets"].items()}}


def denoise(images: str, steps: int, seeds: list[int], wanted: str, further: list[str]) -> dict[str, Any]:
    """PSNR in and out of distribution by optimisation steps, for every seed."""
    kind, data = ("cifar", [f"data.images={Path(images).absolute()}"]) if images else ("shapes", [])
    rows: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        for seed in seeds:
            for title, (model, extra) in DENOISE_ROWS.items():
                if wanted not in title:
                    continue
                name = f"{title.replace(', ', '-').replace(' ', '-')}-{seed}"
                settings = [*data, *extra, f"steps={steps}", f"every.eval={steps // 2}", f"seed={seed}", *further]
                row = train(root, name, f"ebt/{model}-{kind}", settings)
                if "error" not in row:
                    trained = inference.load(root, name, all_data=True)
                    with trained.engine.evaluating():
                        row["curves"] = curves(trained.system)  # type: ignore[arg-type]
                rows[f"{title}, seed {seed}"] = row
                write_result(name_of(f"ebt-denoise-{kind}", wanted), {"rows": rows})
                print(kind, title, seed, {k: v for k, v in row.items() if k != "curves"}, flush=True)
    for title in DENOISE_ROWS:
        good = [row for name, row in rows.items() if name.startswith(f"{title}, seed") and "error" not in row]
        print(kind, title, {key: [row[key] for row in good] for key in ("psnr_in", "psnr_out")}, flush=True)
    return rows


def generation(num_tokens: int) -> dict[str, Any]:
    """Seconds for one row to a full context: cached (on CUDA also captured), and reading everything anew for each token."""
    recipe, preset = find("ebt/s1")
    settings = [RANDOM, f"data.block={num_tokens}", "precision=fp32", "compile=off", "batch=1"]
    config = configs.override(recipe.preset(preset), settings)
    data = recipe.open_data(config)
    engine = build(recipe, config, data)
    system = engine.system
    ways = {
        "cached": lambda num: CachedDecoder(system, OptimizeOptions(2), [[1]], num, Sampling(0.0), 1),
        "uncached": lambda num: UncachedEnergyDecoder(system, OptimizeOptions(2), [[1]], num, Sampling(0.0), 1),
    }
    on_cuda = engine.device.type == "cuda"
    wait = torch.cuda.synchronize if on_cuda else lambda: None
    if on_cuda:
        ways["cached, captured"] = lambda num: CachedDecoder(
            system, OptimizeOptions(2), [[1]], num, Sampling(0.0), 1, capture=True
        )
    rows: dict[str, Any] = {}
    with engine.evaluating():
        for title, make in ways.items():
            for num in (8, num_tokens - 1):
                decoder = make(num)
                wait()
                start = time.perf_counter()
                for _ in range(num):
                    decoder.advance()
                wait()
            rows[title] = {"seconds": round(time.perf_counter() - start, 3), "tokens": decoder.history_BN.tolist()[0]}
    uncached = rows["uncached"]
    for row in rows.values():
        row["ratio"] = round(uncached["seconds"] / row["seconds"], 1)
        row["same_tokens"] = sum(a == b for a, b in zip(row["tokens"], uncached["tokens"], strict=True)) / num_tokens
    return {title: {k: v for k, v in row.items() if k != "tokens"} for title, row in rows.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for part in ("step", "learn", "denoise", "generate"):
        parser.add_argument(f"--{part}", action="store_true")
    parser.add_argument("--seconds", type=float, default=8.0, help="how long each row of --step is timed")
    parser.add_argument("--rows", default="", help="only rows whose name holds this")
    parser.add_argument("--tokens", type=int, default=1024, help="how far --generate writes")
    parser.add_argument("--text", default="tinyshakespeare.txt")
    parser.add_argument("--unlike", nargs="*", default=[], help="texts out of distribution, for the curves")
    parser.add_argument("--images", default="", help="a folder of images for --denoise, in place of shapes")
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="further settings of --denoise")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--seeds", type=int, nargs="*", default=[1])
    args = parser.parse_args()
    if not torch.cuda.is_available() and (args.step or args.learn or args.denoise):
        parser.error("only --generate runs without a CUDA device")
    if args.step:
        rows = {}
        for title, (preset, settings) in STEP_ROWS.items():
            if args.rows in title:
                rows[title] = time_step(preset, settings, args.seconds)
                print(title, rows[title], flush=True)
        best = min((row["ms"] for title, row in rows.items() if title.startswith("s1")), default=float("nan"))
        figures = {"rows": rows, "best_ms": best, "limit_ms": STEP_LIMIT_MS, "against_original": round(ORIGINAL_MS / best, 2)}
        write_result("ebt-step", figures)
    if args.generate:
        rows = generation(args.tokens)
        print(rows)
        write_result(f"ebt-generate-{'cuda' if torch.cuda.is_available() else 'cpu'}", {"rows": rows, "limit": CACHE_LIMIT})
    if args.learn:
        learn(args.text, args.steps, args.seeds, tuple(args.unlike), args.rows)
    if args.denoise:
        denoise(args.images, args.steps, args.seeds, args.rows, args.set)


if __name__ == "__main__":
    main()
