"""The world system: a generator trained by a curriculum: open loop, closed loop, adversarial.

Shape suffixes: B windows, A control axes, H W pixels.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from seedbed.config import Config
from seedbed.nn.modulate import full_precision
from seedbed.recipes.world import critic as adversarial
from seedbed.recipes.world.curriculum import Stage
from seedbed.recipes.world.data import Turn, WorldData
from seedbed.recipes.world.emulator import Emulator, stage_of
from seedbed.recipes.world.memory import Memory
from seedbed.recipes.world.model import WorldNet, build_model
from seedbed.recipes.world.objective import Rows, l1
from seedbed.recipes.world.presets import NEVER
from seedbed.recipes.world.probe import open_probe
from seedbed.train.engine import Engine, EvalEngine, mix
from seedbed.train.system import Batch

CRITIC = "critic"
SMALL = 32 * 32  # pixels
FACTS = ("loss_critic", "critic_won", "critic_margin", "r1", "r2", "adversarial", "gradient_ratio")
# Decay of the moving average of the adversarial weight.
SMOOTH = 0.98


class Predictions(NamedTuple):
    """Predicted frames with their targets and inputs: those of rollouts where there are any."""

    frame_B3HW: Tensor
    target_B3HW: Tensor
    memory_BMHW: Tensor
    action_BA: Tensor
    num_predicted: int  # in the whole step


class World(Emulator):
    """The generator: one pass per frame."""

    net: WorldNet
    weight: Tensor
    probe = open_probe

    def __init__(self, config: Config, data: WorldData) -> None:
        super().__init__(config, data)
        model = config.model
        self.net = build_model(model, self.height, self.width, self.num_axes, mix(config.seed, 1), self.new_radiance_field())
        self.critic: adversarial.Critic | None = None
        if model.adversarial < NEVER:
            self.critic = adversarial.Critic(self.num_axes, len(self.net.trunk.widths), model.critic_lr)
            self.critic.init_weights(torch.Generator().manual_seed(mix(config.seed, 2)))
        self.register_buffer("weight", torch.zeros(2))  # of the adversarial gradient, smoothed; and the number of measurements
        if model.channels_last:
            for net in filter(None, (self.net, self.critic)):
                net.to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def named_optimizers(self) -> dict[str, nn.Module]:
        return {"main": self.net, CRITIC: self.critic} if self.critic else {"main": self}

    def predict_frame(self, memory: Memory, action_BA: Tensor, index_B: Tensor, turn: Turn, level: float = 0.0) -> Tensor:
        level_B = action_BA.new_full((len(action_BA),), level)
        return self.call(memory.tensors(), action_BA, level_B, self.own_noise(index_B, turn))

    def loss(self, batch: Batch, engine: EvalEngine) -> tuple[Tensor, dict[str, Tensor]]:
        """Mean error of all predictions: on true memories, and from the second stage on half of them on rollouts."""
        error, _, _, measured = self._errors(batch, stage_of(engine))
        return error, measured

    def update(self, batch: Batch, engine: Engine) -> dict[str, Tensor]:
        stage = stage_of(engine)
        error, made, going, measured = self._errors(batch, stage)
        if going is not None:
            self.rollouts.keep(going, self.layout.num_frames, made.frame_B3HW)
        if self.critic is None:
            engine.minimize(error)
        elif stage.name not in ("critic", "adversarial"):
            measured |= dict.fromkeys(FACTS, torch.zeros_like(error.detach()))
            engine.minimize(error)
            engine.norms[CRITIC] = torch.zeros_like(error.detach())  # every stage has the same metrics
        else:
            measured |= self._adversarial_step(self.critic, error, made, stage, engine)
        # The error on true memories is comparable between stages.
        return {"loss": measured.pop("loss_open"), **measured}

    def _errors(self, batch: Batch, stage: Stage) -> tuple[Tensor, Predictions, Rows | None, dict[str, Tensor]]:
        """The loss of the stage, the frames for the critic, the rollouts, and the metrics of all stages."""
        window, going = self.training_windows(batch, stage)
        level_B, real_B = self.training_noise.levels(window)
        seen = self.training_noise.context(window, real_B)
        frame_B3HW = self.net(seen, window.action_BA, level_B, self.training_noise.own(window))
        rows = slice(0 if going is None else len(level_B) - len(going.index_B), None)
        # One tensor for both losses: their gradients are compared at it.
        known = (window.memory.tensors()["m1"][rows], window.action_BA[rows])
        made = Predictions(frame_B3HW[rows], window.target_B3HW[rows], *known, len(level_B))
        first = slice(0, rows.start or None)
        closed = l1(made.frame_B3HW, made.target_B3HW)
        opened = closed if going is None else l1(frame_B3HW[first], window.target_B3HW[first])
        error, measured = self.loss_of_step(opened, closed, window, stage)
        return error, made, going, measured

    def _adversarial_step(
        self, critic: adversarial.Critic, error: Tensor, made: Predictions, stage: Stage, engine: Engine
    ) -> dict[str, Tensor]:
        """One update of the critic and one of the generator, on some of the predicted frames."""
        model, scored = self.config.model, slice(0, max(1, 2 * len(made.frame_B3HW) // adversarial.ONE_IN))
        fake, real, memory, action = (column[scored] for column in made[:4])
        with full_precision(real.device):
            facts = adversarial.critic_loss(critic, real, fake, memory, action, model.gamma)
        engine.minimize(facts["loss_critic"], CRITIC)
        with full_precision(real.device):
            wish = adversarial.generator_loss(critic, real, fake, memory, action)
        frame, share = made.frame_B3HW, len(fake) / made.num_predicted
        given = (error, wish, frame, scored, share, model.ratio, engine.all_reduce_sum)
        weight, against, slope = adversarial.adversarial_weight(*given)
        if stage.name == "adversarial":
            # The first measurement is taken as it is, later ones are averaged.
            keep = SMOOTH * (self.weight[1] > 0).float()
            self.weight.copy_(torch.stack((self.weight[0] * keep + weight * (1.0 - keep), self.weight[1] + 1.0)))
            # The critic's backward pass is done: only its gradient at the frames is needed.
            error = error + stage.balance * self.weight[0].detach() * (slope * frame).sum()
        engine.minimize(error)
        facts |= {"adversarial": wish, "gradient_ratio": against}
        return {name: facts[name].detach() for name in FACTS}

    def flops_per_item(self) -> float:
        """An item is a window; a step makes about one prediction per window in every stage."""
        return self.net.flops_per_frame() + self.field_flops()

    def describe(self) -> dict[str, Any]:
        widths = " ".join(map(str, self.net.trunk.widths))
        facts = super().describe()
        if self.critic is not None:
            facts["critic"] = f"from {self.config.model.adversarial:.0%}, when gates allow"
        facts["channels"] = f"{widths} at 1/2 .. 1/{2 ** len(self.net.trunk.widths)}"
        cost = f"{self.net.flops() / 1e9:.3f} to play, {self.net.flops_per_frame() / 1e9:.3f} to train"
        return {**facts, "GFLOP/frame": cost}


def build(config: Config, data: WorldData) -> Emulator:
    """The recipe's entry point."""
    kind: type[Emulator] = World
    if config.model.kind == "edm":
        from seedbed.recipes.world.edm import Denoiser

        kind = Denoiser
    system = kind(config, data)
    system.num_cpu_threads = 1 if system.height * system.width <= SMALL else 0
    return system
