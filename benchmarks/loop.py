"""What the loop itself costs per step: seedbed beside a plain PyTorch loop and Lightning's Trainer, on a d=16 model on the CPU.

One process, contestants interleaved in short rounds. Steps are cut into windows of ten, one log point each, and the windows of
all rounds are pooled: what a loop costs is their 10 % quantile, since what else the machine does only ever adds. The plain loop
runs twice: what it costs over itself is what cannot be told apart. Run `python benchmarks/loop.py`; Lightning with extra `bench`.
"""

import argparse
import contextlib
import gc
import io
import itertools
import logging
import math
import os
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from _report import write_result
from torch import Tensor, nn

from seedbed.config import Config, Every, Optim, Schedule
from seedbed.data.feed import Data, Source
from seedbed.track.console import Console
from seedbed.track.run import Run
from seedbed.train.engine import Engine
from seedbed.train.job import Job
from seedbed.train.loop import fit
from seedbed.train.system import Batch, System
from seedbed.train.watch import LAYERS_EVERY

# Seconds of a step by the clock and of the processor, for each window of a run.
Windows = list[tuple[float, float]]
Contestant = Callable[[int], Windows]
KINDS = ("wall", "cpu")

# B items of a batch, T positions, D width, V symbols
B, T, D, V, NUM_LAYERS, NUM_HEADS = 4, 16, 16, 64, 1, 2
LR, CLIP, LOG = 1e-3, 1.0, 10
NUM_WARM = 50
# Watchers look at layers in one window of so many: every place in the cycle has a quantile of its own, or those would not count.
CYCLE = LAYERS_EVERY // LOG
QUANTILE = 0.1
TARGET = 40.0
TOKENS = np.random.default_rng(1).integers(0, V, size=200 * T * B + 1, dtype=np.uint8)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(D), nn.LayerNorm(D)
        self.qkv, self.out = nn.Linear(D, 3 * D), nn.Linear(D, D)
        self.mlp = nn.Sequential(nn.Linear(D, 4 * D), nn.GELU(), nn.Linear(4 * D, D))

    def forward(self, x_BTD: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x_BTD)).view(B, T, 3, NUM_HEADS, -1).permute(2, 0, 3, 1, 4)
        y_BTD = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(B, T, D)
        x_BTD = x_BTD + self.out(y_BTD)
        return x_BTD + self.mlp(self.norm2(x_BTD))


class Model(nn.Module):
    """The same small transformer for every contestant."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(V, D), nn.Linear(D, V)
        self.blocks = nn.Sequential(*[Block() for _ in range(NUM_LAYERS)])

    def forward(self, window: Tensor) -> Tensor:
        x_BTD = self.blocks(self.embed(window[:, :-1]))
        return F.cross_entropy(self.head(x_BTD).view(-1, V), window[:, 1:].reshape(-1))


class Clock:
    """Wall and processor time at every step."""

    def __init__(self) -> None:
        self.stamps: Windows = []

    def tick(self) -> None:
        self.stamps.append((time.perf_counter(), time.process_time()))

    def windows(self) -> Windows:
        """Seconds per step in each window after warm-up, in whole cycles."""
        edges = self.stamps[NUM_WARM::LOG]
        edges = edges[: (len(edges) - 1) // CYCLE * CYCLE + 1]
        assert len(edges) > CYCLE, f"too few steps for a cycle of {CYCLE} windows"
        return [((b[0] - a[0]) / LOG, (b[1] - a[1]) / LOG) for a, b in itertools.pairwise(edges)]


@contextlib.contextmanager
def quiet_collector() -> Iterator[None]:
    """seedbed keeps the garbage collector out of the steps, so every contestant is given the same."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def rate(step: int, num_steps: int) -> float:
    """Warm-up and cosine to 10 %, as a person would write it."""
    warmup = 0.02 * num_steps
    if step < warmup:
        return (step + 1) / warmup
    return 0.1 + 0.45 * (1 + math.cos(math.pi * (step - warmup) / (num_steps - warmup)))


def windows() -> Iterator[Tensor]:
    """Shuffled blocks, gathered by `index_select`: the fast way on a CPU."""
    tokens, offsets_T = torch.from_numpy(TOKENS), torch.arange(T + 1)
    rng = torch.Generator().manual_seed(1)
    while True:
        starts = torch.randperm((len(TOKENS) - 1) // T, generator=rng) * T
        for starts_B in starts.split(B):
            yield tokens.index_select(0, (starts_B[:, None] + offsets_T).view(-1)).view(B, T + 1).long()


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=LR, betas=(0.9, 0.95), weight_decay=0.1, fused=True)


def bare(num_steps: int) -> Windows:
    """Forward, backward, optimizer step, on one fixed batch: nothing else."""
    torch.manual_seed(1)
    model, clock, window = Model(), Clock(), next(windows())
    optimizer = adamw(model)
    with quiet_collector():
        for _ in range(num_steps):
            clock.tick()
            model(window).backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
    return clock.windows()


def plain(num_steps: int) -> Windows:
    """A good hand-written loop: data, schedule, clipping, the loss read every ten steps."""
    torch.manual_seed(1)
    model, clock, losses, batches = Model(), Clock(), [], windows()
    optimizer, params = adamw(model), list(model.parameters())
    with quiet_collector():
        for step in range(num_steps):
            clock.tick()
            for group in optimizer.param_groups:
                group["lr"] = LR * rate(step, num_steps)
            loss = model(next(batches))
            loss.backward()
            nn.utils.clip_grad_norm_(params, CLIP, foreach=True)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            if step % LOG == 0:
                losses.append(loss.item())
    return clock.windows()


class Tokens(Source):
    """The same blocks, as seedbed's feed takes them."""

    num_items = (len(TOKENS) - 1) // T
    arrays: ClassVar = {"tokens": TOKENS}
    spans: ClassVar = {"tokens": T + 1}

    def locate(self, epoch_B: np.ndarray, index_B: np.ndarray) -> np.ndarray:
        return index_B * T

    def batch(self, raw: Batch) -> Batch:
        return {"window": raw["tokens"].long()}


class Timed(System):
    """The same model as a system. The loop asks for the variant once per step, which is where the clock ticks."""

    def __init__(self) -> None:
        super().__init__()
        self.model, self.clock = Model(), Clock()

    def loss(self, batch: Batch, engine: Engine) -> tuple[Tensor, dict[str, Tensor]]:
        return self.model(batch["window"]), {}

    def variant(self, step: int, num_steps: int) -> None:
        self.clock.tick()

    def evaluate(self, source: Source, engine: Engine) -> dict[str, float]:
        return {"loss": 0.0}


def seedbed(num_steps: int) -> Windows:
    """The real thing: `fit` on a real run folder, with rows, console, guard and read-back."""
    config = Config(
        model=None,
        data=None,
        optim=Optim(lr=LR, clip=CLIP),
        schedule=Schedule(kind="cosine"),
        every=Every(log=LOG, eval=0, sample=0, save=0),
        steps=num_steps,
        batch=B,
        device="cpu",
    )
    torch.manual_seed(1)
    system, data = Timed(), Data(train=Tokens(), valid=Tokens(), facts={})
    engine = Engine(system, config, torch.device("cpu"))
    with tempfile.TemporaryDirectory() as folder:
        run = Run.create(Path(folder), "bench", "loop", config, code={})
        console = Console(run.path / "console.log", stream=io.StringIO())
        fit(Job(run=run, config=config, system=system, data=data, engine=engine, console=console))
        run.close()
    return system.clock.windows()


def lightning_contestant() -> Contestant | None:
    """Lightning's Trainer with everything switched off that can be; None when it is not installed."""
    try:
        import lightning
    except ImportError:
        return None

    class Module(lightning.LightningModule):
        def __init__(self, num_steps: int) -> None:
            super().__init__()
            self.model, self.clock, self.num_steps = Model(), Clock(), num_steps

        def training_step(self, window: Tensor) -> Tensor:
            self.clock.tick()
            return self.model(window)

        def configure_optimizers(self) -> dict:
            optimizer = adamw(self)
            schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: rate(step, self.num_steps))
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def run(num_steps: int) -> Windows:
        torch.manual_seed(1)
        module = Module(num_steps)
        off = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
        with quiet_collector(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            trainer = lightning.Trainer(max_steps=num_steps, accelerator="cpu", gradient_clip_val=CLIP, **off)
            trainer.fit(module, train_dataloaders=windows())
        return module.clock.windows()

    for name in ("lightning.pytorch", "lightning.fabric", "lightning"):
        logging.getLogger(name).setLevel(logging.ERROR)
    print(f"Lightning {lightning.__version__}")
    return run


def measure(contestants: dict[str, Contestant], num_rounds: int, num_steps: int) -> dict[str, list[Windows]]:
    """The windows of each contestant and round; the order turns round by round."""
    times: dict[str, list[Windows]] = {name: [] for name in contestants}
    names = list(contestants)
    for number in range(num_rounds + 1):
        for name in names[number % len(names) :] + names[: number % len(names)]:
            windows = contestants[name](num_steps)
            if number:  # round 0 warms allocators and caches
                times[name].append(windows)
    return times


def undisturbed(rounds: list[Windows], kind: str) -> float:
    """Microseconds of a step: the low quantile of the pooled windows at each place in the cycle, averaged over places."""
    pooled_RW = 1e6 * np.array(rounds)[:, :, KINDS.index(kind)]
    pooled_RCP = pooled_RW.reshape(len(rounds), -1, CYCLE)
    return float(np.quantile(pooled_RCP, QUANTILE, axis=(0, 1)).mean())


def over_plain(times: dict[str, list[Windows]], name: str, kind: str) -> list[float]:
    """What a contestant costs over the plain loop: by all rounds, by the even ones and by the odd ones."""
    parts = (slice(None), slice(0, None, 2), slice(1, None, 2))
    return [undisturbed(times[name][part], kind) - undisturbed(times["plain"][part], kind) for part in parts]


def summary(times: dict[str, list[Windows]]) -> dict[str, dict[str, Any]]:
    """Per contestant: a step, and what it costs over the plain loop, by all rounds and by either half of them."""
    rows: dict[str, dict[str, Any]] = {name: {} for name in times}
    for name, kind in itertools.product(times, KINDS):
        over, *halves = over_plain(times, name, kind)
        rows[name][f"{kind}_us"] = round(undisturbed(times[name], kind), 1)
        rows[name][f"{kind}_over_plain_us"] = round(over, 1)
        rows[name][f"{kind}_over_plain_halves_us"] = [round(x, 1) for x in halves]
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--steps", type=int, default=NUM_WARM + 2 * LAYERS_EVERY + 1)
    options = parser.parse_args()
    if options.rounds < 2 or options.steps <= NUM_WARM + LAYERS_EVERY:
        parser.error(f"at least 2 rounds of more than {NUM_WARM + LAYERS_EVERY} steps")
    torch.set_num_threads(1)
    contestants: dict[str, Contestant] = {"bare": bare, "plain": plain, "plain again": plain, "seedbed": seedbed}
    if lightning := lightning_contestant():
        contestants["lightning"] = lightning
    rows = summary(measure(contestants, options.rounds, options.steps))
    show(rows)
    facts = {"target_us": TARGET, "verdict": verdict(rows), "quantile": QUANTILE, "load": load()}
    write_result("loop", {**facts, "rounds": options.rounds, "steps": options.steps, **rows})


def show(rows: dict[str, dict[str, Any]]) -> None:
    print("microseconds per step, and over the plain loop: by all rounds (by the even ones, by the odd ones)")
    print(f"{'':12}{'wall':>10}{'over plain':>30}{'processor':>12}{'over plain':>30}")
    for name, row in rows.items():
        line = f"{name:12}"
        for kind, width in (("wall", 10), ("cpu", 12)):
            even, odd = row[f"{kind}_over_plain_halves_us"]
            line += f"{row[f'{kind}_us']:{width}.1f}{row[f'{kind}_over_plain_us']:12.1f} ({even:7.1f}, {odd:7.1f})"
        print(line)
    print(f"seedbed: {verdict(rows)} (target: at most {TARGET:g} us over a plain loop, judged by processor time)")


def verdict(rows: dict[str, dict[str, Any]]) -> str:
    """Met or missed only where the answer would be the same if it were wrong by all that the plain loop differs from itself."""
    over = rows["seedbed"]["cpu_over_plain_us"]
    control = rows["plain again"]
    unsure = max(abs(x) for x in (control["cpu_over_plain_us"], *control["cpu_over_plain_halves_us"]))
    unsure = max(unsure, *(abs(x - over) for x in rows["seedbed"]["cpu_over_plain_halves_us"]))
    shown = f"{over:.1f} us over a plain loop, give or take {unsure:.1f}"
    if over - unsure <= TARGET < over + unsure:
        return f"not resolved: {shown}; try more rounds on a quiet machine"
    return f"{'met' if over <= TARGET else 'missed'}: {shown}"


def load() -> float | None:
    """How busy the machine was, as a mean number of processes; None where the system does not say."""
    return round(os.getloadavg()[0], 1) if hasattr(os, "getloadavg") else None


if __name__ == "__main__":
    main()
