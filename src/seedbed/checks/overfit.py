"""overfit: memorises a few fixed batches, noise included. A model that cannot do this will not learn anything else."""

import contextlib
import json
import math
from dataclasses import dataclass, replace

from seedbed import config as configs
from seedbed.data.feed import Feed
from seedbed.errors import EXIT_FAILED, EXIT_OK, UserError
from seedbed.recipes import find
from seedbed.track.text import number
from seedbed.train import capabilities
from seedbed.train.engine import Engine
from seedbed.train.stepper import build

# Shares of the first loss above the bound: memorised, and learning.
MEMORISED, LEARNING = 0.05, 0.5
WARM_UP = 10
_BARS = "▁▂▃▄▅▆▇█"


def overfit(name: str, assignments: list[str], *, num_batches: int = 1, steps: int = 200, as_json: bool = False) -> int:
    """Memorises `num_batches` batches within `steps` steps, prints the curve and a verdict; 1 on failure."""
    if steps < num_batches:
        raise UserError(f"--steps {steps} does not reach each of {num_batches} batches once; use at least {num_batches}")
    recipe, preset = find(name)
    config = configs.override(recipe.preset(preset), [*assignments, *configs.PLAIN])
    data = recipe.open_data(config)
    engine = build(recipe, replace(config, ema=0.0), data)
    feed = Feed(data.train, batch=config.batch, parts=config.accum, seed=config.seed, device=engine.device)
    with contextlib.closing(feed):
        curve = learn(engine, feed, num_batches, steps)
    if as_json:
        shown = {"losses": curve.losses, "left": curve.left, "ok": curve.ok, "verdict": curve.verdict()}
        print(json.dumps(shown if all(map(math.isfinite, curve.losses)) else {**shown, "losses": None, "left": None}))
    else:
        print("\n".join([*picture(curve), curve.verdict()]))
    return EXIT_OK if curve.ok else EXIT_FAILED


@dataclass(frozen=True)
class Curve:
    """Mean loss over the batches per epoch."""

    losses: list[float]
    bound: float
    num_batches: int

    @property
    def left(self) -> float:
        """The remaining share of the first loss, above the lower bound."""
        first, last = self.losses[0] - self.bound, self.losses[-1] - self.bound
        return max(last, 0.0) / first if first > 0 else 0.0

    @property
    def ok(self) -> bool:
        return math.isfinite(self.losses[-1]) and self.left <= LEARNING

    def verdict(self) -> str:
        what = f"{self.num_batches} batch{'es' if self.num_batches > 1 else ''}"
        course = f"{number(self.losses[0])} -> {number(self.losses[-1])} in {len(self.losses)} rounds"
        if not math.isfinite(self.losses[-1]):
            return f"{what}: the loss is not finite after {len(self.losses)} rounds; lower optim.lr, then: seedbed check"
        if self.left <= MEMORISED:
            return f"{what}: {course}: memorised, as it should be"
        if self.ok:
            return f"{what}: {course}: learning, {self.left:.0%} is left; give it more with --steps"
        return f"{what}: {course}: it cannot even memorise; look at frozen or unused parameters, lr and targets: seedbed check"


def learn(engine: Engine, feed: Feed, num_batches: int, steps: int) -> Curve:
    """Trains on the same batches with the same noise, at the full lr after a short warm-up."""
    config, losses, bound = engine.config, [], 0.0
    for step in range(steps // num_batches * num_batches):
        k = step % num_batches
        engine.variant = engine.system.variant(step, config.steps)
        feed.load(k * config.batch)
        engine.begin(step, (step + 1) / steps, lr_factor=min(1.0, (step + 1) / WARM_UP))
        engine.seed_step(k)
        if step == 0:
            with engine.evaluating():
                probe = capabilities.probe(engine.system, feed.part(0))
            bound = probe.lower_bound or 0.0 if probe else 0.0
            engine.seed_step(k)
        loss = float(engine.step(feed.part)["loss"])
        losses.append(loss)
        if not math.isfinite(loss):
            return Curve([*_rounds(losses[:-1] or [loss], num_batches), loss], bound, num_batches)
        if k == num_batches - 1 and Curve(_rounds(losses, num_batches), bound, num_batches).left < MEMORISED / 5:
            break
    return Curve(_rounds(losses, num_batches), bound, num_batches)


def _rounds(losses: list[float], size: int) -> list[float]:
    chunks = [losses[i : i + size] for i in range(0, len(losses), size)]
    return [sum(chunk) / len(chunk) for chunk in chunks]


def picture(curve: Curve, width: int = 60) -> list[str]:
    """The curve as one line of bars on a logarithmic scale, and its values at epochs 1, 2, 5, 10 ..."""
    sizes = [math.log(max(loss - curve.bound, 1e-6)) for loss in curve.losses if math.isfinite(loss)]
    picked = [sizes[i * len(sizes) // min(width, len(sizes))] for i in range(min(width, len(sizes)))]
    low, high = min(picked), max(picked)
    bars = "".join(_BARS[round((s - low) / max(high - low, 1e-9) * (len(_BARS) - 1))] for s in picked)
    marks = [r for scale in (1, 10, 100, 1000) for r in (scale, 2 * scale, 5 * scale) if r < len(curve.losses)]
    return [f"  {bars}", *(f"  round {r:>5}  loss {number(curve.losses[r - 1])}" for r in [*marks, len(curve.losses)])]
