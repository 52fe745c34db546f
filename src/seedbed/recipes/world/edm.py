"""The second system: a pixel-space diffusion denoiser of the next frame, in the manner of EDM and DIAMOND, to compare.

Shape suffixes: B windows, A control axes, H W pixels.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from seedbed.config import Config
from seedbed.nn import dice
from seedbed.recipes.world.data import DENOISE, SIGMA, WorldData
from seedbed.recipes.world.emulator import Emulator, stage_of
from seedbed.recipes.world.memory import Memory
from seedbed.recipes.world.model import Trunk, stay, widths_of
from seedbed.recipes.world.objective import Rows, Window, l1
from seedbed.recipes.world.stages import Stage
from seedbed.train.engine import mix
from seedbed.train.system import Batch

if TYPE_CHECKING:
    from seedbed.train.engine import Engine

DATA_VARIANCE, OFFSET = 0.25, 0.3
LOG_MEAN, LOG_SPREAD, LOWEST, HIGHEST = -0.4, 1.2, 0.002, 20.0
FIRST, LAST, RHO = 5.0, 0.002, 7.0


class Factors(NamedTuple):
    """EDM's preconditioning for a level of noise, the offset included."""

    skip: Tensor
    out: Tensor
    enter: Tensor
    told: Tensor


def factors(sigma_B: Tensor) -> Factors:
    """What makes input, output and loss of unit size at every level."""
    square_B = sigma_B.square() + OFFSET**2
    skip_B = DATA_VARIANCE / (square_B + DATA_VARIANCE)
    out_B, enter_B = square_B.sqrt() * skip_B.sqrt(), (square_B + DATA_VARIANCE).rsqrt()
    skip, out, enter = (f[:, None, None, None] for f in (skip_B, out_B, enter_B))
    return Factors(skip, out, enter, square_B.log() / 8.0)


def levels(num: int) -> list[float]:
    """Levels of noise on the way from FIRST to LAST, then 0."""
    ends = FIRST ** (1 / RHO), LAST ** (1 / RHO)
    shares = [k / max(1, num - 1) for k in range(num)]
    return [(ends[0] + share * (ends[1] - ends[0])) ** RHO for share in shares] + [0.0]


class Denoiser(Emulator):
    """Each frame is drawn: noise, then a few steps towards what the network takes for the clean frame."""

    def __init__(self, config: Config, data: WorldData) -> None:
        super().__init__(config, data)
        widths = widths_of(config.model.size, self.height, self.width)
        inputs = {name: shape[0] for name, shape in self.layout.shapes(self.height, self.width).items()}
        self.net = Trunk({**inputs, "m1": inputs["m1"] + 3}, self.num_axes + 2, 12, widths, config.model, self.new_place())
        self.net.init_weights(torch.Generator().manual_seed(mix(config.seed, 1)))

    @property
    def trunk(self) -> Trunk:
        return self.net

    def clean(self, noisy: Tensor, sigma_B: Tensor, seen: dict[str, Tensor], action_BA: Tensor, level_B: Tensor) -> Tensor:
        """What the network takes for the frame without its noise."""
        return self._clean(noisy, factors(sigma_B), seen, action_BA, level_B)[0]

    def _clean(
        self, noisy: Tensor, by: Factors, seen: dict[str, Tensor], action_BA: Tensor, level_B: Tensor
    ) -> tuple[Tensor, Tensor]:
        memory = {**seen, "m1": torch.cat((by.enter * noisy, seen["m1"] / DATA_VARIANCE**0.5), dim=1)}
        numbers_BN = torch.cat((action_BA, level_B[:, None], by.told[:, None]), dim=1)
        still = torch.zeros_like(noisy[:, :1])
        said = F.pixel_shuffle(self.net(memory, numbers_BN, still)[0].float(), 2)
        return by.skip * noisy + by.out * said, said

    def dream(self, memory: Memory, action_BA: Tensor, index_B: Tensor, turn: int, level: float = 0.0) -> Tensor:
        level_B = action_BA.new_full((len(action_BA),), level)
        return self.draw(memory.tensors(), action_BA, level_B, index_B, turn)

    def draw(self, seen: dict[str, Tensor], action_BA: Tensor, level_B: Tensor, index_B: Tensor, turn: int) -> Tensor:
        """`model.samples` Euler steps from noise of unit size, as DIAMOND starts."""
        x = self.dust(index_B, DENOISE, 1024 + turn, (3, self.height, self.width))
        path = levels(self.config.model.samples)
        for here, there in pairwise(path):
            sigma_B = action_BA.new_full((len(action_BA),), here)
            clean = self.clean(x, sigma_B, seen, action_BA, level_B)
            x = clean + (x - clean) * (there / here)
        return stay(x, seen, action_BA) if self.config.model.static else x

    # ---- training --------------------------------------------------------------------------------------------------

    def loss(self, batch: Batch, engine: Engine) -> tuple[Tensor, dict[str, Tensor]]:
        loss, _, _, measured = self._losses(batch, stage_of(engine))
        return loss, measured

    def update(self, batch: Batch, engine: Engine) -> dict[str, Tensor]:
        loss, going, fed_back, measured = self._losses(batch, stage_of(engine))
        if going is not None:
            self.rollouts.keep(going, self.layout.num_frames, fed_back[-len(going.index_B) :])
        engine.descend(loss)
        return {"loss": measured.pop("loss_open"), **measured}

    def _losses(self, batch: Batch, stage: Stage) -> tuple[Tensor, Rows | None, Tensor, dict[str, Tensor]]:
        """The loss of the stage, the rollouts and what they remember next, and what is measured."""
        window, going = self.opened(batch, stage)
        (level_B, real_B), sigma_B = self.noises.levels(window), self.sigma(window.counter_B)
        seen, by = self.noises.context(window, real_B), factors(sigma_B)
        noisy = self._noised(window.target_B3HW, sigma_B, window.counter_B)
        clean, said = self._clean(noisy, by, seen, window.action_BA, level_B)
        loss_B = (said - (window.target_B3HW - by.skip * noisy) / by.out).square().flatten(1).mean(1)
        kept = len(loss_B) - (0 if going is None else len(going.index_B))
        opened, closed = loss_B[:kept].mean(), loss_B[kept:].mean() if going is not None else loss_B.mean()
        copied = l1(window.memory.last[:kept], window.target_B3HW[:kept])
        measured = {"loss_open": opened.detach(), "loss_closed": closed.detach(), "copy_last": copied}
        measured["own_frames"] = torch.full_like(copied, stage.length)
        loss = self.with_map(0.5 * (opened + closed), window, measured)
        return loss, going, self._fed_back(clean, seen, window, level_B), measured

    @torch.no_grad()
    def _fed_back(self, clean: Tensor, seen: dict[str, Tensor], window: Window, level_B: Tensor) -> Tensor:
        """One denoising of the noised true frame, or a true draw."""
        if self.config.model.feedback == "denoised":
            return clean.detach()
        return self.draw(seen, window.action_BA, level_B, window.counter_B, 0)

    def sigma(self, counter_B: Tensor) -> Tensor:
        """A level for each window and age, by counter."""
        normal_B = dice.normal(dice.keys(self.config.seed, counter_B, SIGMA), 1)[:, 0]
        return (LOG_MEAN + LOG_SPREAD * normal_B).exp().clamp(LOWEST, HIGHEST)

    def _noised(self, target: Tensor, sigma_B: Tensor, counter_B: Tensor) -> Tensor:
        drawn = self.dust(counter_B, DENOISE, 0, tuple(target.shape[1:]))
        offset = dice.normal(dice.keys(self.config.seed, counter_B, DENOISE + 64 * 512), 3)[:, :, None, None]
        return target + sigma_B[:, None, None, None] * drawn + OFFSET * offset

    # ---- for the loop ----------------------------------------------------------------------------------------------

    def flops_per_item(self) -> float:
        return 3.0 * self.net.flops(self.height, self.width) - self.net.input_flops(self.height, self.width) + self.map_flops()

    def describe(self) -> dict[str, Any]:
        widths = " ".join(map(str, self.net.widths))
        return {**super().describe(), "denoiser": f"{self.config.model.samples} steps a frame", "channels": widths}
