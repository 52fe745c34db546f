"""The plain transformer trained beside an energy model: the same size, data, order, schedule and number of updates."""

from __future__ import annotations

import time
from dataclasses import replace

import torch

from seedbed.config import Config
from seedbed.data.feed import Feed
from seedbed.data.text import TextData, TextSource
from seedbed.train.engine import Engine, forked_dice
from seedbed.train.system import System


def train_control(system: System, config: Config, data: TextData, judged: TextSource, device: torch.device) -> dict[str, float]:
    """Train a freshly built plain system to the end of the run's schedule; its numbers on `judged`, and the seconds it took."""
    config = replace(config, compile="off", ema=0.0, ema2=0.0)
    with forked_dice(device), torch.enable_grad():
        engine = Engine(system.to(device), config, device)
        feed = Feed(data.train, batch=config.batch, parts=config.accum, seed=config.seed, device=device)
        start = time.perf_counter()
        for step in range(config.steps):
            feed.load(step * config.batch)
            engine.begin(step, (step + 1) / config.steps)
            engine.step(feed.part)
        seconds = time.perf_counter() - start
        feed.close()
    with engine.evaluating():
        return {**system.evaluate(judged, engine), "seconds": seconds}
