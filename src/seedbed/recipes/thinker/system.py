"""The thinker system: the loss over steps, the curriculum, evaluation, and the seam through which many train as one.

Shape suffixes: B batch, M output tokens, T steps.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from seedbed.config import Config
from seedbed.data.feed import Data, Source
from seedbed.recipes.thinker import curriculum
from seedbed.recipes.thinker.data import TaskSource
from seedbed.recipes.thinker.draws import Dials, Setting, dials_of, draw_shape, settle
from seedbed.recipes.thinker.evaluate import quick
from seedbed.recipes.thinker.model import Sizes, Thinker
from seedbed.recipes.thinker.plan import OUTPUT
from seedbed.train.engine import mix
from seedbed.train.system import Batch, System

if TYPE_CHECKING:
    from seedbed.train.engine import Engine

# Up to this width a second CPU thread costs more than it gives.
NARROW = 128


class ThinkerSystem(System):
    """A thinker on one task."""

    stage: Tensor

    def __init__(self, config: Config, data: Data) -> None:
        super().__init__()
        assert isinstance(data.train, TaskSource)
        self.config, self.data, self.source = config, data, data.train
        task, shape = self.source.task, self.source.shape
        self.model = Thinker(config.model, Sizes(shape.num_in, shape.num_out, shape.vocab, task.pad, task.bos))
        self.model.init_weights(torch.Generator().manual_seed(mix(config.seed, 1)))
        self.register_buffer("stage", curriculum.first(config.data.curriculum, task.length))
        self.is_staged = config.data.curriculum.kind in ("gated", "mixed")
        if self.is_staged:
            self.source.limit = lambda: curriculum.limit(self.stage)
        self.latents, self.steps, self.plan = config.model.latents, config.model.steps, config.model.parsed_plan()
        self._host_dials = dials_of(config.model, config.seed, self.steps.high, torch.device("cpu"))
        self._device_dials: Dials = self._host_dials
        self._settled: dict[tuple[int, int], Setting] = {}

    # ---- training ----------------------------------------------------------------------------------------------------

    def variant(self, step: int, num_steps: int) -> tuple[int, int]:
        """How many latents and steps this step computes: shapes, decided on the host as a pack decides them on the device."""
        if self.latents.low == self.latents.high and self.config.model.loss.steps in ("all", "last"):
            return self.latents.high, self.steps.high
        latents, steps = draw_shape(self._host_dials, torch.tensor(step))
        return int(latents), int(steps)

    def loss(self, batch: Batch, engine: Engine) -> tuple[Tensor, dict[str, Tensor]]:
        num_latents, num_steps = engine.variant if isinstance(engine.variant, tuple) else (self.latents.high, self.steps.high)
        setting = self.setting(batch["index"], num_latents, num_steps)
        loss, right_BM = self.model(batch, setting, num_latents, num_steps, self.answers(num_steps))
        measures, stage = self._measure(batch, right_BM, self.stage)
        if self.is_staged:
            self.stage.copy_(stage)
        return loss, measures

    def num_targets(self, batch: Batch) -> Tensor:
        return batch["learn"].sum()

    def setting(self, index_B: Tensor, num_latents: int, num_steps: int) -> Setting:
        """The draw for a batch of exactly these shapes; kept where nothing in it is drawn."""
        shape, model = (num_latents, num_steps), self.config.model
        if shape in self._settled and self._settled[shape].plan_T5.device == index_B.device:
            return self._settled[shape]
        steps = torch.tensor(num_steps, device=index_B.device)
        setting = settle(self._dials(index_B.device), index_B, num_steps, None, steps)
        reach = model.loss.backprop_steps
        setting = setting._replace(
            perturb=setting.perturb if model.perturb else None,
            cut=setting.cut if model.loss.steps == "progressive" else None,
            first=max(0, num_steps - reach) if reach else 0,
        )
        if self.plan is not None and model.loss.steps != "progressive":
            self._settled[shape] = setting
        return setting

    def answers(self, num_steps: int) -> tuple[int, ...]:
        """The steps, counted from 0, that must be decoded for the loss: the others have no weight."""
        model = self.config.model
        if model.loss.steps != "all":
            return (num_steps - 1,)
        first = num_steps - model.loss.backprop_steps if model.loss.backprop_steps else 0
        wanted = [step - 1 for step in self.steps.values() if first < step <= num_steps]
        rows = self.plan.rows(num_steps) if self.plan else None
        return tuple(t for t in wanted if rows is None or rows[t][OUTPUT])

    def _dials(self, device: torch.device) -> Dials:
        if self._device_dials["seed"].device != device:
            self._device_dials = {name: tensor.to(device) for name, tensor in self._host_dials.items()}
        return self._device_dials

    def _measure(self, batch: Batch, right_BM: Tensor, stage: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        """Accuracy on this batch, and the curriculum's next stage."""
        keep_BM = batch["keep"]
        token = (right_BM * keep_BM).sum() / keep_BM.sum().clamp_min(1)
        exact_B = ((right_BM > 0.5) | ~keep_BM).all(-1)
        measures = {"token": token, "exact": exact_B.to(token.dtype).mean()}
        if not self.is_staged:
            return measures, stage
        longest_B = curriculum.on_longest(batch["length"], stage)
        hits = (exact_B & longest_B).sum()
        stage = curriculum.advance(stage, hits, longest_B.sum(), self.config.data.curriculum, self.source.task.length)
        return {**measures, "longest": curriculum.limit(stage).to(token.dtype)}, stage

    def compile_units(self) -> Iterator[nn.Module]:
        yield from self.model.cell
        yield self.model.decoder

    # ---- evaluation and samples --------------------------------------------------------------------------------------

    @torch.no_grad()
    def evaluate(self, source: Source, engine: Engine) -> dict[str, float]:
        """Exact match on fresh samples of the full length, unless something leaks."""
        assert isinstance(source, TaskSource)
        with torch.compiler.set_stance("force_eager"):  # a shape met a few times is not worth compiling
            return quick(self, source)

    # ---- many as one -------------------------------------------------------------------------------------------------

    def packs(self) -> frozenset[str] | str:
        return PACKABLE

    def dials(self) -> Dials:
        return dict(self._dials(self.stage.device))


PACKABLE = frozenset({"model.n_latent"})


def build(config: Config, data: Data) -> ThinkerSystem:
    """The recipe's entry point. Tensors this small are handled faster by one CPU thread, many times so on a busy machine."""
    if config.model.width <= NARROW:
        torch.set_num_threads(1)
    return ThinkerSystem(config, data)
