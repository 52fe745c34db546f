"""The thinker system: the loss over steps, the curriculum, evaluation, and the seam through which many train as one.

Shape suffixes: B batch, M output tokens, T steps.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from seedbed.config import Config
from seedbed.data.feed import Data, Source
from seedbed.errors import UserError
from seedbed.recipes.thinker import curriculum, show
from seedbed.recipes.thinker.data import TaskSource
from seedbed.recipes.thinker.draws import Dials, Setting, dials_of, draw_shape, settle
from seedbed.recipes.thinker.evaluate import quick
from seedbed.recipes.thinker.examine import examine
from seedbed.recipes.thinker.model import Sizes, Thinker
from seedbed.recipes.thinker.plan import LOOKUP, OUTPUT
from seedbed.recipes.thinker.presets import CurriculumConfig, LossConfig
from seedbed.recipes.thinker.probe import open_up
from seedbed.train.engine import mix
from seedbed.train.system import Batch, Request, Sample, System

if TYPE_CHECKING:
    from seedbed.train.engine import Engine
    from seedbed.train.probe import Probe

LESSONS = ("threshold", "window", "min_steps")
# Settings in which runs of one pack may differ: all of them are numbers or masks of the computation.
PACKABLE = frozenset(
    {
        *(f"model.{name}" for name in ("n_latent", "n_step", "noise", "perturb", "plan", "n_memory")),
        *(f"model.loss.{name}" for name in ("steps", "base", "backprop_steps")),
        *(f"data.curriculum.{name}" for name in ("start", *LESSONS)),
    }
)
# Up to this width a second CPU thread costs more than it gives.
NARROW = 128


class ThinkerSystem(System):
    """A thinker on one task."""

    lesson = "longest"
    stage: Tensor

    def __init__(self, config: Config, data: Data) -> None:
        super().__init__()
        assert isinstance(data.train, TaskSource)
        self.config, self.data, self.source = config, data, data.train
        task, shape = self.source.task, self.source.shape
        self.model = Thinker(config.model, Sizes(shape.num_in, shape.num_out, shape.vocab, task.pad, task.bos))
        self.model.init_weights(torch.Generator().manual_seed(mix(config.seed, 1)))
        self.register_buffer("stage", curriculum.first(config.data.curriculum, task.length))
        self.is_staged = config.data.curriculum.kind in curriculum.STAGED
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
        measures, stage = self._measure(batch, right_BM, self.stage, self.config.data.curriculum, engine)
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
        steps = torch.full((), num_steps, device=index_B.device)
        setting = settle(self._dials(index_B.device), index_B[0] // self.config.batch, num_steps, None, steps)
        reach = model.loss.backprop_steps
        setting = setting._replace(
            group=self.config.batch,
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

    def _measure(
        self, batch: Batch, right_BM: Tensor, stage: Tensor, lessons: CurriculumConfig, engine: Engine | None = None
    ) -> tuple[dict[str, Tensor], Tensor]:
        """Accuracy on this batch, and the curriculum's next stage."""
        keep_BM = batch["keep"]
        token = (right_BM * keep_BM).sum() / keep_BM.sum().clamp_min(1)
        exact_B = ((right_BM > 0.5) | ~keep_BM).all(-1)
        measures = {"token": token, "exact": exact_B.to(token.dtype).mean()}
        if not self.is_staged:
            return measures, stage
        longest_B = curriculum.on_longest(batch["length"], stage)
        hits, tries = (exact_B & longest_B).sum(), longest_B.sum()
        if engine is not None:  # all ranks look at the same lesson; a pack is one rank
            hits, tries = engine.together(hits), engine.together(tries)
        stage = curriculum.advance(stage, hits, tries, lessons, self.source.task.length)
        return {**measures, "longest": curriculum.limit(stage).to(token.dtype)}, stage

    def probe(self, batch: Batch) -> Probe:
        return open_up(self, batch)

    def compile_units(self) -> Iterator[nn.Module]:
        yield self.model.start
        yield from self.model.cell
        yield self.model.decoder

    # ---- evaluation and samples --------------------------------------------------------------------------------------

    @torch.no_grad()
    def evaluate(self, source: Source, engine: Engine) -> dict[str, float]:
        """Exact match on fresh samples of the full length, unless something leaks."""
        assert isinstance(source, TaskSource)
        with torch.compiler.set_stance("force_eager"):  # a shape met a few times is not worth compiling
            return quick(self, source)

    @torch.no_grad()
    def sample(self, request: Request, engine: Engine) -> Sample:
        """Some answers; when training has ended, or on request, the complete examination with its pictures."""
        wanted = request.read(prompt=None, num=show.NUM_EXAMPLES, latents=None, steps=None, examine=None)
        source, look = self.data.valid, show.look_of(self, wanted["latents"], wanted["steps"])
        assert isinstance(source, TaskSource)
        has_ended = not request.options and float(engine.progress) >= 1.0
        num = wanted["examine"] or (self.config.data.test if has_ended else 0)
        if wanted["prompt"] is not None:
            text, files = show.answer(self, source, wanted["prompt"], look), ()
        else:
            text, files = show.examples(self, source, look, wanted["num"]), ()
        if num:
            found = examine(self, source, request.folder, num)
            text, files = f"{show.table(found)}\n\n{text}", tuple(sorted(request.folder.glob("*.png")))
        if request.write:
            request.write(text + "\n")
        return Sample(text=text, files=files)

    def describe(self) -> dict[str, Any]:
        return show.describe(self)

    def flops_per_item(self) -> float:
        """Three times the matrix products of a forward pass, at the top of the ranges."""
        config, shape = self.config.model, self.source.shape
        width, latents, steps = config.width, self.latents.high, self.steps.high
        rows = 1 + shape.num_in + config.static_memory + self.model.num_memory * latents
        step = latents * (14 * width**2 + 2 * width * (rows + latents)) * config.blocks
        answer = (latents * 2 + shape.num_out * 10) * width**2 * config.output.layers + shape.num_out * width * shape.vocab
        return 6.0 * (steps * step + rows * 2 * width**2 + len(self.answers(steps)) * answer)

    def state(self) -> dict[str, Any]:
        return {"plan": str(self.plan)}

    def load_state(self, state: dict[str, Any]) -> None:
        if state["plan"] != str(self.plan):
            raise UserError(f"the plan has changed: this run was trained with {state['plan']}, now it is {self.plan}")

    # ---- many as one -------------------------------------------------------------------------------------------------

    def packs(self) -> frozenset[str]:
        return PACKABLE

    def envelope(self, configs: Sequence[Config]) -> Config:
        """Room for the most latents, steps and memory of all; what each run makes of it is in its dials."""
        models = [config.model for config in configs]
        is_progressive = any(model.loss.steps == "progressive" for model in models)
        low = 1 if is_progressive else min(model.steps.low for model in models)
        plans = [model.parsed_plan() for model in models]
        reaches = [model.loss.backprop_steps for model in models]
        latents = [n for model in models for n in (model.latents.low, model.latents.high)]
        model = replace(
            models[0],
            n_latent=f"{min(latents)}:{max(latents)}",
            n_step=f"{low}:{max(model.steps.high for model in models)}",
            plan="everything" if any(plan is None or plan.uses(LOOKUP) for plan in plans) else "ro*",
            n_memory=max(model.n_memory for model in models),
            perturb=max(model.perturb for model in models),
            loss=LossConfig(steps="progressive" if is_progressive else "all", backprop_steps=max(reaches)),
        )
        return replace(configs[0], model=model)

    def dials(self) -> Dials:
        lessons = self.config.data.curriculum
        device = self.stage.device
        numbers = {name: torch.tensor(getattr(lessons, name), device=device) for name in LESSONS}
        return dict(self._dials(device)) | numbers

    def packed_loss(self, index_B: Tensor, dials: Dials) -> tuple[Tensor, dict[str, Tensor], dict[str, Tensor]]:
        """The loss with this system's shapes, and everything that a smaller run does not have masked."""
        model, top = self.config.model, self.steps.high
        batch = self.source.make(index_B, dials["seed"], curriculum.limit(self.stage) if self.is_staged else None)
        turn = index_B[0] // self.config.batch
        latents, steps = draw_shape(dials, turn)
        setting = settle(dials, turn, top, None if self.latents.low == self.latents.high else latents, steps)
        setting = setting._replace(
            group=self.config.batch,
            perturb=setting.perturb if model.perturb else None,
            cut=setting.cut if model.loss.steps == "progressive" or model.loss.backprop_steps else None,
        )
        answers = tuple(range(self.steps.low - 1, top))
        loss, right_BM = self.model(batch, setting, self.latents.high, top, answers)
        lessons: Any = replace(
            self.config.data.curriculum, **{name: dials[name] for name in ("threshold", "window", "min_steps")}
        )
        measures, stage = self._measure(batch, right_BM, self.stage, lessons)
        return loss, measures, {"stage": stage}


def build(config: Config, data: Data) -> ThinkerSystem:
    """The recipe's entry point. Tensors this small are handled faster by one CPU thread, many times so on a busy machine."""
    if config.model.width <= NARROW:
        torch.set_num_threads(1)
    return ThinkerSystem(config, data)
