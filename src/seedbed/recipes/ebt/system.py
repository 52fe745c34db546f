"""The ebt systems: an energy model trained through its own walk, and the plain transformer it is held against.

Shape suffixes: B batch, T time, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from seedbed.config import Config
from seedbed.data.text import TextData, TextSource
from seedbed.nn import dice
from seedbed.nn.groups import declare
from seedbed.recipes.ebt.evaluate import nats_by_steps, placed_windows, report, token_nats
from seedbed.recipes.ebt.model import EnergyModel, PlainModel, build_model
from seedbed.recipes.ebt.objective import FACTS, cross_entropy, energy_facts, step_sizes, walk_to_loss
from seedbed.recipes.ebt.walk import COUNT, STARTS, Apart, Draw, first_candidates, take_step
from seedbed.train.system import Batch, System

if TYPE_CHECKING:
    from seedbed.train.engine import Engine

ALPHA_RATE = 3.0
# Up to this width a second CPU thread costs more than it gives.
NARROW = 128
NUM_CALIBRATED = 4


class TextSystem(System):
    """What both systems share: text in, whole splits scored, the same items."""

    model: EnergyModel | PlainModel

    def __init__(self, config: Config, data: TextData) -> None:
        super().__init__()
        self.config, self.data, self.tokenizer = config, data, data.tokenizer

    def num_targets(self, batch: Batch) -> int:
        return batch["tokens"][:, 1:].numel()

    def compile_units(self) -> Iterator[nn.Module]:
        yield from self.model.blocks


class PlainSystem(TextSystem):
    """The control of every table: same blocks, data and order, a head instead of an energy."""

    model: PlainModel

    def __init__(self, config: Config, data: TextData) -> None:
        super().__init__(config, data)
        model = build_model(config.model, data.vocab_size, config.data.block, config.seed)
        assert isinstance(model, PlainModel)
        self.model = model

    def loss(self, batch: Batch, engine: Engine) -> tuple[Tensor, dict[str, Tensor]]:
        return cross_entropy(self.logits(batch["tokens"][:, :-1]).float(), batch["tokens"][:, 1:]), {}

    def logits(self, tokens_BT: Tensor) -> Tensor:
        places_T = torch.arange(tokens_BT.shape[1], device=tokens_BT.device)
        return self.model(tokens_BT, self.model.rope(places_T))

    @torch.no_grad()
    def evaluate(self, source: TextSource, engine: Engine) -> dict[str, float]:
        """Every target of the split once."""
        nats = 0.0
        with torch.compiler.set_stance("force_eager"):  # a shape met a few times is not worth compiling
            for tokens_BT, _ in placed_windows(source, self.model.vocab, self.model.embed.weight.device):
                nats += token_nats(self.logits(tokens_BT[:, :-1]), tokens_BT[:, 1:]).sum(-1).cpu().double().sum().item()
        return report(nats / source.num_targets, source)

    def flops_per_item(self) -> float:
        """An item is a block: one context of tokens."""
        return 3.0 * (self.model.forward_flops() + 2.0 * self.model.head.weight.numel()) * self.config.data.block


class EnergySystem(TextSystem):
    """An energy over next tokens, trained by differentiating through the steps that lower it."""

    model: EnergyModel

    def __init__(self, config: Config, data: TextData) -> None:
        super().__init__(config, data)
        self.walk = config.model.walk
        model = build_model(config.model, data.vocab_size, config.data.block, config.seed)
        assert isinstance(model, EnergyModel)
        self.model, self.draw = model, Draw(config.seed, data.vocab_size)
        log_alpha = torch.tensor(math.log(self.walk.alpha))
        # As a logarithm it stays positive, and one rate moves it by the same share whatever its size.
        self.log_alpha = nn.Parameter(log_alpha) if self.walk.learn_alpha else None
        if self.log_alpha is not None:
            declare(self.log_alpha, "scalar", lr_scale=ALPHA_RATE, decay=False)
        if config.model.head_init == "calibrated":
            self._calibrate()

    # ---- training ----------------------------------------------------------------------------------------------------

    def variant(self, step: int, num_steps: int) -> tuple[int, bool]:
        """How many steps this batch walks, drawn by counter, and whether its row will be read and wants its energies."""
        counts = self.walk.counts()
        drawn = dice.integers(dice.keys(self.config.seed, torch.tensor(step), COUNT), 1, len(counts))
        return counts[int(drawn)], (step + 1) % self.config.every.log == 0

    def alpha(self) -> Tensor:
        """The step size."""
        if self.log_alpha is None:
            return torch.full((), self.walk.alpha, device=self.model.embed.weight.device)
        return Apart.apply(self.log_alpha).exp()  # type: ignore[union-attr]

    def loss(self, batch: Batch, engine: Engine) -> tuple[Tensor, dict[str, Tensor]]:
        variant = engine.variant if engine is not None else None
        num_steps, look = variant if isinstance(variant, tuple) else (self.walk.steps, False)
        tokens_BT, targets_BT = batch["tokens"][:, :-1], batch["tokens"][:, 1:]
        place_BT = self.places(batch["index"])
        z_BTV = first_candidates(self.draw, self.walk, place_BT, STARTS, torch.float32)
        memories, alpha = self.model.read(tokens_BT), self.alpha()
        sizes = step_sizes(self.walk, alpha, self.config.seed, place_BT)
        chosen = {"config": self.walk, "alpha": sizes, "num_steps": num_steps, "draw": self.draw}
        outcome = walk_to_loss(self.model, memories, z_BTV, targets_BT, place_BT, **chosen)
        missing = torch.full_like(outcome.loss, float("nan"))
        found = {f"loss_{k}": n.detach() for k, n in enumerate([*outcome.nats_K, *[missing] * (self.walk.steps - num_steps)], 1)}
        facts = energy_facts(self.model, memories, outcome, sizes) if look else {name: missing for name in FACTS}
        return outcome.loss, {**found, **facts, "alpha": alpha.detach()}

    def places(self, index_B: Tensor) -> Tensor:
        """A number for every position of every sample of the run."""
        block = self.config.data.block
        return index_B[:, None] * block + torch.arange(block, device=index_B.device)

    def compile_units(self) -> Iterator[nn.Module]:
        yield from super().compile_units()
        yield self.model
        yield self.draw

    @torch.no_grad()
    def _calibrate(self) -> None:
        """Scale the energy until the first step moves logits by about 1: the slope is linear in the head's weight."""
        size = self.data.train.block
        tokens = torch.from_numpy(self.data.train.tokens[: NUM_CALIBRATED * size].astype("int64"))
        tokens_BT = tokens[: len(tokens) // size * size].view(-1, size)
        place_BT = torch.arange(tokens_BT.numel()).view(tokens_BT.shape)
        z_BTV = first_candidates(self.draw, self.walk, place_BT, STARTS, torch.float32)
        step = take_step(self.model, self.model.read(tokens_BT), z_BTV, 0, 0.0, self.walk.space)
        self.model.head.weight /= (self.walk.alpha * step.slope_BTV).std()

    # ---- evaluation --------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def evaluate(self, source: TextSource, engine: Engine) -> dict[str, float]:
        """Every target of the split once per start, after as many steps as were trained, and after one."""
        with torch.compiler.set_stance("force_eager"):  # a shape met a few times is not worth compiling
            steps = sorted({1, self.walk.steps})
            nats = nats_by_steps(self, source, steps)
        return {**report(nats[-1], source), "loss_one_step": nats[0]}

    def flops_per_item(self) -> float:
        """An item is a block. A step that carries loss goes forward, down the slope, and back through both: six forwards."""
        model, walk = self.model, self.walk
        one = model.forward_flops() + 2.0 * model.enter.weight.numel()
        carrying = walk.steps if walk.loss == "each" or walk.through == "all" else 1
        real = 3.0 * model.num_readings() * model.forward_flops()
        return (real + (6.0 * carrying + 2.0 * (walk.steps - carrying)) * one) * self.config.data.block


def build(config: Config, data: TextData) -> TextSystem:
    """The recipe's entry point. Tensors this small are handled faster by one CPU thread."""
    if config.model.shape[2] <= NARROW:
        torch.set_num_threads(1)
    return (EnergySystem if config.model.kind == "energy" else PlainSystem)(config, data)
