"""The world system: a generator trained in stages: open loop, closed loop, adversary.

Shape suffixes: B windows, A control axes, H W pixels.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from seedbed.config import Config
from seedbed.nn.modulate import full_precision
from seedbed.recipes.world import adversary
from seedbed.recipes.world.data import WorldData
from seedbed.recipes.world.emulator import Emulator, stage_of
from seedbed.recipes.world.memory import Memory
from seedbed.recipes.world.model import build_model
from seedbed.recipes.world.objective import Rollout, Window, l1, open_window, roll, shares
from seedbed.recipes.world.presets import NEVER
from seedbed.recipes.world.probe import open_up
from seedbed.recipes.world.stages import Stage
from seedbed.train.engine import mix
from seedbed.train.system import Batch

if TYPE_CHECKING:
    from seedbed.train.engine import Engine
    from seedbed.train.probe import Probe

CRITIC = "critic"
FACTS = ("loss_critic", "critic_won", "critic_margin", "r1", "r2", "adversarial", "gradient_ratio")
# Weights of adversarial gradients are smoothed over about so many steps.
SMOOTH = 0.98


class World(Emulator):
    """The generator: one pass per frame."""

    weight: Tensor

    def __init__(self, config: Config, data: WorldData) -> None:
        super().__init__(config, data)
        model = config.model
        self.net = build_model(model, self.height, self.width, self.num_axes, mix(config.seed, 1))
        self.critic: adversary.Critic | None = None
        if model.adversarial < NEVER:
            self.critic = adversary.Critic(self.num_axes, len(self.net.trunk.widths), model.critic_lr)
            self.critic.init_weights(torch.Generator().manual_seed(mix(config.seed, 2)))
        self.register_buffer("weight", torch.zeros(2))  # of the adversary's gradient, smoothed; and how often it was measured
        if model.channels_last:
            self.net.to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def players(self) -> dict[str, nn.Module]:
        return {"main": self.net, CRITIC: self.critic} if self.critic else {"main": self}

    def dream(self, memory: Memory, action_BA: Tensor, index_B: Tensor, turn: int, level: float = 0.0) -> Tensor:
        level_B = action_BA.new_full((len(action_BA),), level)
        return self.net(memory.tensors(), action_BA, level_B, self.own_noise(index_B, turn))

    # ---- training --------------------------------------------------------------------------------------------------

    def loss(self, batch: Batch, engine: Engine) -> tuple[Tensor, dict[str, Tensor]]:
        """The mean error of all predictions: one step on true memories, and from the second stage on half of them rolled out."""
        stage = stage_of(engine)
        error, _, _, measured = self._errors(batch, stage)
        return error, measured

    def update(self, batch: Batch, engine: Engine) -> dict[str, Tensor]:
        stage = stage_of(engine)
        error, rollout, window, measured = self._errors(batch, stage)
        if self.critic is None:
            engine.descend(error)
        elif stage.name not in ("critic", "adversarial"):
            measured |= dict.fromkeys(FACTS, torch.zeros_like(error.detach()))
            engine.descend(error)
            engine.norms[CRITIC] = torch.zeros_like(error.detach())  # all stages must measure the same things
        else:
            measured |= self._contest(self.critic, error, rollout, window, stage, engine)
        # The error of true memories means the same in every stage; the others stand beside it.
        return {"loss": measured.pop("loss_open"), **measured}

    def _errors(self, batch: Batch, stage: Stage) -> tuple[Tensor, Rollout, Window, dict[str, Tensor]]:
        """The error of the stage, its last rollout, and what is measured; alike in all stages."""
        num_open, num_closed = shares(len(batch["index"]), stage.length, self.config.model.rollout)
        window = open_window(batch, self.layout, 1, slice(0, num_open))
        first = rolled = roll(self.net, window, self.noises)
        error, copied = first.errors[0], l1(window.memory.last, window.targets[0])
        if num_closed:
            window = open_window(batch, self.layout, stage.length, slice(-num_closed, None))
            rolled = roll(self.net, window, self.noises)
            error = 0.5 * (error + torch.stack(rolled.errors).mean())
        closed = torch.stack(rolled.errors).detach().mean()
        measured = {"loss_open": first.errors[0].detach(), "loss_closed": closed, "copy_last": copied}
        return error, rolled, window, {**measured, "own_frames": torch.full_like(copied, stage.length)}

    def _contest(
        self, critic: adversary.Critic, error: Tensor, rollout: Rollout, window: Window, stage: Stage, engine: Engine
    ) -> dict[str, Tensor]:
        """Both players' turns on the last frame of the rollout; the generator keeps its error as the main thing."""
        model = self.config.model
        real, fake, action = window.targets[-1], rollout.frames[-1], window.actions[-1]
        memory = rollout.memory.tensors()["m1"]
        with full_precision(real.device):
            facts = adversary.critic_loss(critic, real, fake, memory, action, model.gamma)
        engine.descend(facts["loss_critic"], CRITIC)
        with full_precision(real.device):
            wish = adversary.generator_loss(critic, real, fake, memory, action)
        weight, against = adversary.held_weight(error, wish, rollout.frames[-1], model.ratio, engine.together)
        if stage.name == "adversarial":
            # The first measurement counts whole, later ones are smoothed.
            keep = SMOOTH * (self.weight[1] > 0).float()
            self.weight.copy_(torch.stack((self.weight[0] * keep + weight * (1.0 - keep), self.weight[1] + 1.0)))
            error = error + stage.balance * self.weight[0].detach() * wish
        engine.descend(error)
        facts |= {"adversarial": wish, "gradient_ratio": against}
        return {name: facts[name].detach() for name in FACTS}

    # ---- for the loop ----------------------------------------------------------------------------------------------

    def probe(self, batch: Batch) -> Probe:
        return open_up(self, batch)

    def compile_units(self) -> Iterator[nn.Module]:
        yield self.net

    def flops_per_item(self) -> float:
        """An item is a window; in every stage a step makes about one prediction for each."""
        return self.net.flops_per_frame()

    def describe(self) -> dict[str, Any]:
        widths = " ".join(map(str, self.net.trunk.widths))
        adversarial = {} if self.critic is None else {"adversary": f"from {self.config.model.adversarial:.0%}, when gates allow"}
        cost = {"GFLOP/frame": f"{self.net.flops() / 1e9:.3f} to play, {self.net.flops_per_frame() / 1e9:.3f} to train"}
        return {
            **super().describe(),
            **adversarial,
            "channels": f"{widths} at 1/2 .. 1/{2 ** len(self.net.trunk.widths)}",
            **cost,
        }


def build(config: Config, data: WorldData) -> Emulator:
    """The recipe's entry point."""
    if config.model.kind == "edm":
        from seedbed.recipes.world.edm import Denoiser

        return Denoiser(config, data)
    return World(config, data)
