"""Trains the baseline of an energy model: a plain transformer of the same size, data, order, schedule and updates."""

import time
from contextlib import closing
from dataclasses import replace

import torch

from seedbed.config import Config
from seedbed.data.text import TextData, TextSource
from seedbed.train.engine import Engine, fork_rng
from seedbed.train.stepper import Stepper
from seedbed.train.system import System


def train_control(system: System, config: Config, data: TextData, judged: TextSource, device: torch.device) -> dict[str, float]:
    """Train a freshly built plain system to the end of the run's schedule; its numbers on `judged`, and the seconds it took."""
    config = replace(config, compile="off", ema=0.0, ema2=0.0)
    with fork_rng(device), torch.enable_grad():
        engine = Engine(system.to(device), config, device)
        with closing(Stepper(engine, data.train)) as stepper:
            start = time.perf_counter()
            for step in range(config.steps):
                stepper.step(step, step * config.batch, (step + 1) / config.steps, config.steps)
                stepper.pop_result()
            seconds = time.perf_counter() - start
    with engine.evaluating():
        return {**system.evaluate(judged, engine), "seconds": seconds}
