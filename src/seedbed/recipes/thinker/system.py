"""The thinker system: the loss over steps, the curriculum, evaluation, and packing of several runs.

Shape suffixes: B batch, M output tokens, T steps.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from seedbed.config import Config
from seedbed.data.feed import Data
from seedbed.errors import UserError
from seedbed.nn import eagerly
from seedbed.recipes.thinker import curriculum, show
from seedbed.recipes.thinker.batch_settings import BatchSettings, SettingsTensors, draw_settings, draw_shape, settings_tensors
from seedbed.recipes.thinker.data import TaskSource
from seedbed.recipes.thinker.evaluate import Inference, onnx_network, quick_evaluation
from seedbed.recipes.thinker.full_evaluation import full_evaluation
from seedbed.recipes.thinker.model import Sizes, Thinker
from seedbed.recipes.thinker.presets import CurriculumConfig, LossConfig
from seedbed.recipes.thinker.probe import build_probe
from seedbed.recipes.thinker.program import LOOKUP, OUTPUT
from seedbed.train.engine import EvalEngine, mix
from seedbed.train.system import Batch, Request, Sample, System, option

STAGE_SETTINGS = ("threshold", "window", "min_steps")
# Settings in which runs of one pack may differ: all of them are numbers or masks of the computation.
PACKABLE = frozenset(
    {
        *(f"model.{name}" for name in ("n_latent", "n_step", "noise", "perturb", "program", "n_memory")),
        *(f"model.loss.{name}" for name in ("steps", "base", "backprop_steps")),
        *(f"data.curriculum.{name}" for name in ("start", *STAGE_SETTINGS)),
    }
)
# Up to this width a second CPU thread is slower.
NARROW = 128


@dataclass(frozen=True)
class SampleOptions:
    """Options of `seedbed sample`."""

    prompt: str | None = option(None, "a question in the words of the task")
    num: int = option(show.NUM_EXAMPLES, "number of examples", low=1)
    latents: int | None = option(None, "number of latents", low=1)
    steps: int | None = option(None, "number of recurrent steps", low=1)
    examine: int | None = option(None, "evaluate on N fresh samples, with maps and curves", low=1)


class ThinkerSystem(System):
    """A thinker on one task."""

    stage_metric = "longest"
    higher_is_better = ("exact", "token")
    sample_options = SampleOptions
    probe, onnx_network = build_probe, onnx_network
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
        self.latents, self.steps, self.program = config.model.latents, config.model.steps, config.model.parsed_program()
        self._settings: dict[torch.device, SettingsTensors] = {}
        self._batch_settings: dict[tuple[torch.device, int, int], BatchSettings] = {}

    def variant(self, step: int, num_steps: int) -> tuple[int, int]:
        """The numbers of latents and steps of this step, drawn on the host as a pack draws them on the device."""
        if self.latents.low == self.latents.high and self.config.model.loss.steps in ("all", "last"):
            return self.latents.high, self.steps.high
        latents, steps = draw_shape(self._settings_on(torch.device("cpu")), torch.tensor(step))
        return int(latents), int(steps)

    def loss(self, batch: Batch, engine: EvalEngine) -> tuple[Tensor, dict[str, Tensor]]:
        num_latents, num_steps = engine.variant if isinstance(engine.variant, tuple) else (self.latents.high, self.steps.high)
        setting = self.batch_settings(batch["index"], num_latents, num_steps)
        loss, right_BM = self.model(batch, setting, num_latents, num_steps, self.output_steps(num_steps))
        measures, stage = self._measure(batch, right_BM, self.stage, self.config.data.curriculum, engine.all_reduce_sum)
        if self.is_staged:
            self.stage.copy_(stage)
        return loss, measures

    def num_targets(self, batch: Batch) -> Tensor:
        return batch["learn"].sum()

    def batch_settings(self, index_B: Tensor, num_latents: int, num_steps: int) -> BatchSettings:
        """The settings of a batch of exactly these shapes; cached where nothing in them is random."""
        shape, model = (index_B.device, num_latents, num_steps), self.config.model
        if shape in self._batch_settings:
            return self._batch_settings[shape]
        steps = torch.full((), num_steps, device=index_B.device)
        setting = draw_settings(self._settings_on(index_B.device), index_B[0] // self.config.batch, num_steps, None, steps)
        reach = model.loss.backprop_steps
        setting = setting._replace(
            group=self.config.batch,
            perturb=setting.perturb if model.perturb else None,
            cut=setting.cut if model.loss.steps == "progressive" else None,
            first=max(0, num_steps - reach) if reach else 0,
        )
        if self.program is not None and model.loss.steps != "progressive":
            self._batch_settings[shape] = setting
        return setting

    def output_steps(self, num_steps: int) -> tuple[int, ...]:
        """The steps, counted from 0, that are decoded for the loss; the others have no weight."""
        model = self.config.model
        if model.loss.steps != "all":
            return (num_steps - 1,)
        first = num_steps - model.loss.backprop_steps if model.loss.backprop_steps else 0
        wanted = [step - 1 for step in self.steps.values() if first < step <= num_steps]
        rows = self.program.rows(num_steps) if self.program else None
        return tuple(t for t in wanted if rows is None or rows[t][OUTPUT])

    def _settings_on(self, device: torch.device) -> SettingsTensors:
        if device not in self._settings:
            self._settings[device] = settings_tensors(self.config.model, self.config.seed, self.steps.high, device)
        return self._settings[device]

    def _measure(
        self,
        batch: Batch,
        right_BM: Tensor,
        stage: Tensor,
        stages: CurriculumConfig,
        total: Callable[[Tensor], Tensor] = lambda value: value,
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
        # All ranks have the same stage; a pack is one rank.
        stage = curriculum.advance(stage, total(hits), total(tries), stages, self.source.task.length)
        return {**measures, "longest": curriculum.limit(stage).to(token.dtype)}, stage

    def compile_units(self) -> Iterator[nn.Module]:
        yield self.model.start
        yield from self.model.cell
        yield self.model.decoder

    @torch.no_grad()
    def evaluate(self, source: TaskSource, engine: EvalEngine) -> dict[str, float]:
        """Exact match on fresh samples of the full length, unless something leaks."""
        with eagerly():  # a shape that is used a few times is not worth compiling
            return quick_evaluation(self, source)

    @torch.no_grad()
    def sample(self, request: Request, engine: EvalEngine) -> Sample:
        """Sample answers; at the end of training, or on request, the full evaluation with its plots."""
        wanted = asdict(request.read(SampleOptions))
        source = self.data.valid
        inference = Inference(wanted["latents"] or self.latents.high, (wanted["steps"] or self.steps.high,))
        assert isinstance(source, TaskSource)
        has_ended = not request.options and float(engine.progress) >= 1.0
        num = wanted["examine"] or (self.config.data.test if has_ended else 0)
        with eagerly():  # each of their lengths, latents and steps is used once
            if wanted["prompt"] is not None:
                text, files = show.answer(self, source, wanted["prompt"], inference), ()
            else:
                text, files = show.examples(self, source, inference, wanted["num"]), ()
            if num:
                found = full_evaluation(self, source, request.folder, num)
                text, files = f"{show.table(found)}\n\n{text}", tuple(sorted(request.folder.glob("*.png")))
        return Sample(text=text, files=files)

    def describe(self) -> dict[str, Any]:
        program = str(self.program) if self.program else "drawn for every batch"
        steps = f"{self.steps}, loss: {self.config.model.loss.steps}"
        return {"capacity": show.capacity(self), "latents": str(self.latents), "steps": steps, "program": program}

    def flops_per_item(self) -> float:
        """Three times the matrix products of a forward pass, at the top of the ranges."""
        config, shape = self.config.model, self.source.shape
        width, latents, steps = config.width, self.latents.high, self.steps.high
        rows = 1 + shape.num_in + config.static_memory + self.model.num_memory * latents
        step = latents * (14 * width**2 + 2 * width * (rows + latents)) * config.blocks
        answer = (latents * 2 + shape.num_out * 10) * width**2 * config.output.layers + shape.num_out * width * shape.vocab
        return 6.0 * (steps * step + rows * 2 * width**2 + len(self.output_steps(steps)) * answer)

    def state(self) -> dict[str, Any]:
        return {"plan": str(self.program)}

    def load_state(self, state: dict[str, Any]) -> None:
        if state["plan"] != str(self.program):
            raise UserError(f"the program has changed: this run was trained with {state['plan']}, now it is {self.program}")

    def packable_keys(self) -> frozenset[str]:
        return PACKABLE

    def padded_config(self, configs: Sequence[Config]) -> Config:
        """The largest numbers of latents, steps and memory; each trial's own are in its settings tensors."""
        models = [config.model for config in configs]
        is_progressive = any(model.loss.steps == "progressive" for model in models)
        low = 1 if is_progressive else min(model.steps.low for model in models)
        programs = [model.parsed_program() for model in models]
        reaches = [model.loss.backprop_steps for model in models]
        latents = [n for model in models for n in (model.latents.low, model.latents.high)]
        model = replace(
            models[0],
            n_latent=f"{min(latents)}:{max(latents)}",
            n_step=f"{low}:{max(model.steps.high for model in models)}",
            program="everything" if any(program is None or program.uses(LOOKUP) for program in programs) else "ro*",
            n_memory=max(model.n_memory for model in models),
            perturb=max(model.perturb for model in models),
            loss=LossConfig(steps="progressive" if is_progressive else "all", backprop_steps=max(reaches)),
        )
        return replace(configs[0], model=model)

    def settings_tensors(self) -> SettingsTensors:
        stages = self.config.data.curriculum
        device = self.stage.device
        numbers = {name: torch.tensor(getattr(stages, name), device=device) for name in STAGE_SETTINGS}
        return dict(self._settings_on(device)) | numbers

    def packed_loss(self, index_B: Tensor, settings: SettingsTensors) -> tuple[Tensor, dict[str, Tensor], dict[str, Tensor]]:
        """The loss with this system's shapes; what a smaller trial does not have is masked."""
        model, top = self.config.model, self.steps.high
        batch = self.source.make(index_B, settings["seed"], curriculum.limit(self.stage) if self.is_staged else None)
        turn = index_B[0] // self.config.batch
        latents, steps = draw_shape(settings, turn)
        setting = draw_settings(settings, turn, top, None if self.latents.low == self.latents.high else latents, steps)
        setting = setting._replace(
            group=self.config.batch,
            perturb=setting.perturb if model.perturb else None,
            cut=setting.cut if model.loss.steps == "progressive" or model.loss.backprop_steps else None,
        )
        output_steps = tuple(range(self.steps.low - 1, top))
        loss, right_BM = self.model(batch, setting, self.latents.high, top, output_steps)
        stages: Any = replace(self.config.data.curriculum, **{name: settings[name] for name in STAGE_SETTINGS})
        measures, stage = self._measure(batch, right_BM, self.stage, stages)
        return loss, measures, {"stage": stage}


def build(config: Config, data: Data) -> ThinkerSystem:
    """The recipe's entry point. Tensors this small are handled faster by one CPU thread, many times so on a busy machine."""
    system = ThinkerSystem(config, data)
    system.num_cpu_threads = 1 if config.model.width <= NARROW else 0
    return system
