"""A pixel-space diffusion model of the next frame after EDM and DIAMOND, for comparison.

Shape suffixes: B windows, A control axes, H W pixels.
"""

from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from seedbed.config import Config
from seedbed.nn import rng
from seedbed.recipes.world import probe
from seedbed.recipes.world.curriculum import Stage
from seedbed.recipes.world.data import DENOISE, SIGMA, Turn, WorldData
from seedbed.recipes.world.emulator import Emulator, stage_of
from seedbed.recipes.world.memory import Memory
from seedbed.recipes.world.model import Trunk, hold_still, widths_of
from seedbed.recipes.world.objective import Rows, Window, open_window, rows_of
from seedbed.train.engine import Engine, EvalEngine, mix
from seedbed.train.probe import Probe
from seedbed.train.system import Batch

DATA_VARIANCE, OFFSET = 0.25, 0.3
LOG_MEAN, LOG_SPREAD, LOWEST, HIGHEST = -0.4, 1.2, 0.002, 20.0
SIGMA_MAX, SIGMA_MIN, RHO = 5.0, 0.002, 7.0


class Factors(NamedTuple):
    """EDM's preconditioning: c_skip, c_out, c_in and c_noise, with offset noise."""

    skip: Tensor
    out: Tensor
    input: Tensor
    noise: Tensor


def factors(sigma_B: Tensor) -> Factors:
    """Scales input, output and loss to unit variance at every noise level."""
    square_B = sigma_B.square() + OFFSET**2
    skip_B = DATA_VARIANCE / (square_B + DATA_VARIANCE)
    out_B, input_B = square_B.sqrt() * skip_B.sqrt(), (square_B + DATA_VARIANCE).rsqrt()
    skip, out, input = (f[:, None, None, None] for f in (skip_B, out_B, input_B))
    return Factors(skip, out, input, square_B.log() / 8.0)


def sigmas(num: int) -> list[float]:
    """EDM's noise schedule from SIGMA_MAX to SIGMA_MIN, then 0."""
    ends = SIGMA_MAX ** (1 / RHO), SIGMA_MIN ** (1 / RHO)
    shares = [k / max(1, num - 1) for k in range(num)]
    return [(ends[0] + share * (ends[1] - ends[0])) ** RHO for share in shares] + [0.0]


class Denoiser(Emulator):
    """Samples each frame by a few denoising steps from noise."""

    net: Trunk

    def __init__(self, config: Config, data: WorldData) -> None:
        super().__init__(config, data)
        widths = widths_of(config.model.size, self.height, self.width)
        inputs = {name: shape[0] for name, shape in self.layout.shapes(self.height, self.width).items()}
        inputs["m1"] += 3
        self.net = Trunk(inputs, self.num_axes + 2, 12, widths, config.model, self.new_radiance_field())
        self.net.init_weights(torch.Generator().manual_seed(mix(config.seed, 1)))

    def denoise(
        self, noisy: Tensor, by: Factors, seen: dict[str, Tensor], action_BA: Tensor, level_B: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The denoised frame and the network's raw output."""
        memory = {**seen, "m1": torch.cat((by.input * noisy, seen["m1"] / DATA_VARIANCE**0.5), dim=1)}
        numbers_BN = torch.cat((action_BA, level_B[:, None], by.noise[:, None]), dim=1)
        still = noisy.new_zeros(len(noisy), 1, self.height, self.width)
        outputs = F.pixel_shuffle(self.call(memory, numbers_BN, still).float(), 2)
        return by.skip * noisy + by.out * outputs, outputs

    def predict_frame(self, memory: Memory, action_BA: Tensor, index_B: Tensor, turn: Turn, level: float = 0.0) -> Tensor:
        level_B = action_BA.new_full((len(action_BA),), level)
        return self.sample_frame(memory.tensors(), action_BA, level_B, index_B, turn)

    def sample_frame(self, seen: dict[str, Tensor], action_BA: Tensor, level_B: Tensor, index_B: Tensor, turn: Turn) -> Tensor:
        """`model.samples` Euler steps from unit noise, as in DIAMOND."""
        x = self.noise_table(index_B, DENOISE, 1024 + turn, (3, self.height, self.width))
        for here, there in pairwise(sigmas(self.config.model.samples)):
            clean, _ = self.denoise(x, factors(torch.full_like(level_B, here)), seen, action_BA, level_B)
            x = clean + (x - clean) * (there / here)
        return hold_still(x, seen, action_BA) if self.config.model.static else x

    def loss(self, batch: Batch, engine: EvalEngine) -> tuple[Tensor, dict[str, Tensor]]:
        loss, _, _, measured = self._losses(batch, stage_of(engine))
        return loss, measured

    def update(self, batch: Batch, engine: Engine) -> dict[str, Tensor]:
        loss, going, fed_back, measured = self._losses(batch, stage_of(engine))
        if going is not None:
            self.rollouts.keep(going, self.layout.num_frames, fed_back[-len(going.index_B) :])
        engine.minimize(loss)
        return {"loss": measured.pop("loss_open"), **measured}

    def _losses(self, batch: Batch, stage: Stage) -> tuple[Tensor, Rows | None, Tensor, dict[str, Tensor]]:
        """The loss of the stage, the rollouts, the frames that they are fed back, and the metrics."""
        window, going = self.training_windows(batch, stage)
        (level_B, real_B), (noisy, sigma_B) = self.training_noise.levels(window), self.noised(window)
        seen, by = self.training_noise.context(window, real_B), factors(sigma_B)
        clean, outputs = self.denoise(noisy, by, seen, window.action_BA, level_B)
        loss_B = (outputs - (window.target_B3HW - by.skip * noisy) / by.out).square().flatten(1).mean(1)
        kept, fed_back = len(loss_B) - window.num_own, clean.detach()
        opened, closed = loss_B[:kept].mean(), loss_B[kept:].mean() if going is not None else loss_B.mean()
        loss, measured = self.loss_of_step(opened, closed, window, stage)
        if self.config.model.feedback == "drawn":
            with torch.no_grad():
                fed_back = self.sample_frame(seen, window.action_BA, level_B, window.counter_B, 0)
        return loss, going, fed_back, measured

    def noised(self, window: Window) -> tuple[Tensor, Tensor]:
        """The target with the noise of training, and its level: one per window and age, by counter."""
        counter_B, target = window.counter_B, window.target_B3HW
        normal_B = rng.normal(rng.keys(self.config.seed, counter_B, SIGMA), 1)[:, 0]
        sigma_B = (LOG_MEAN + LOG_SPREAD * normal_B).exp().clamp(LOWEST, HIGHEST)
        drawn = self.noise_table(counter_B, DENOISE, 0, tuple(target.shape[1:]))
        offset = rng.normal(rng.keys(self.config.seed, counter_B, DENOISE + 64 * 512), 3)[:, :, None, None]
        return target + sigma_B[:, None, None, None] * drawn + OFFSET * offset, sigma_B

    def probe(self, batch: Batch) -> Probe:
        """One denoising on true memories with training noise; the network's target is a mix of frame and noise."""
        window = open_window(rows_of(batch), self.layout)
        (level_B, real_B), (noisy, sigma_B) = self.training_noise.levels(window), self.noised(window)
        opened = {**self.training_noise.context(window, real_B), "action": window.action_BA, "level": level_B, "noisy": noisy}

        def target(b: Batch) -> Tensor:
            by = factors(b["sigma"])
            return (b["target"] - by.skip * b["noisy"]) / by.out

        def predict(b: Batch) -> Tensor:
            outputs = self.denoise(b["noisy"], factors(b["sigma"]), probe.memory_of(self, b), b["action"], b["level"])[1]
            return probe.in_rows([outputs, *probe.pictures(self, b)])

        return Probe(
            batch={**opened, "sigma": sigma_B, "target": window.target_B3HW},
            predict=predict,
            objective=lambda y_BN, b: probe.objective(self, y_BN, b["target"], target(b)),
            oracle=lambda b: probe.in_rows([target(b), *probe.field_targets_of(self, b["target"])]),
            lower_bound=0.0,
            dead=tuple(name for name, _ in self.named_parameters() if name.startswith("net.noise.")),  # it is in the frame
            ode=probe.denoising_ode(self, window, OFFSET, SIGMA_MAX),
            **probe.common_facts(self, batch),
        )

    def flops_per_item(self) -> float:
        return 3.0 * self.net.flops(self.height, self.width) - self.net.input_flops(self.height, self.width) + self.field_flops()

    def describe(self) -> dict[str, Any]:
        widths = " ".join(map(str, self.net.widths))
        return {**super().describe(), "denoiser": f"{self.config.model.samples} steps a frame", "channels": widths}
