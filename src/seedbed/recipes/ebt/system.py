"""The ebt systems: an energy model trained through its own optimisation steps, and the plain transformer as its baseline.

Shape suffixes: B batch, T time, V vocabulary.
"""

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from seedbed.config import Config
from seedbed.data.text import TextData, TextSource
from seedbed.errors import UserError
from seedbed.nn import eagerly
from seedbed.nn.decoding import Decoder, Sampling
from seedbed.recipes.ebt import evaluate, optimize
from seedbed.recipes.ebt.denoise.system import EnergyDenoiser, RegressSystem
from seedbed.recipes.ebt.generate import CachedDecoder, OptimizeOptions, PlainDecoder
from seedbed.recipes.ebt.model import EnergyModel, PlainModel, build_model
from seedbed.recipes.ebt.objective import METRICS, cross_entropy, energy_metrics, optimize_to_loss, step_sizes
from seedbed.recipes.ebt.optimize import ReplayBatch, ReplayBuffer
from seedbed.recipes.ebt.presets import DenoiseConfig, MCMCConfig
from seedbed.recipes.ebt.probe import build_plain_probe, build_probe
from seedbed.train.engine import EvalEngine, mix
from seedbed.train.system import Batch, Request, Sample, System, option, over_ranks
from seedbed.train.text_system import TextOptions, TextSystem
from seedbed.train.watch import Alarm

# Up to this width a second CPU thread is slower.
NARROW = 128
NUM_CALIBRATED = 4
# Targets and samples of the inference curves at the end of a run; `seedbed inference-curve` measures more.
END_TOKENS, END_SAMPLES = {"cuda": 1 << 13, "mps": 1 << 12, "cpu": 1 << 11}, 2
GB = 1e9
# Copies of all logits that a step with a loss keeps for the backward pass, and those that are live at any time.
KEPT, ALIVE = 2, 3
# A guarded step keeps the old buffer while it makes the new one.
BUFFERS = 3


@dataclass(frozen=True)
class SampleOptions(TextOptions):
    """Options of `seedbed sample` on text."""

    optimize_steps: int | None = option(None, "inference-time optimisation steps for every token", low=1)
    best_of: int | None = option(None, "initial predictions for every token; the lowest energy wins", low=1)
    early_stop: float | None = option(None, "stop when the energy falls by less", low=0)


@dataclass(frozen=True)
class CurveOptions:
    """Options of `seedbed inference-curve` on text."""

    tokens: int = option(1 << 13, "number of tokens of each text", low=2)
    starts: int = option(8, "number of initial predictions, at most", low=1, high=64)
    text: tuple[str, ...] = option((), "a further text, unlike the one trained on")


class EbtSystem(TextSystem):
    """Base of both systems: text batches."""

    sample_options = SampleOptions
    model: EnergyModel | PlainModel

    def __init__(self, config: Config, data: TextData) -> None:
        super().__init__(config, data)
        self.model = build_model(config.model, data.vocab_size, config.data.block, config.seed)

    def compile_units(self) -> Iterator[nn.Module]:
        yield from self.model.blocks


class PlainSystem(EbtSystem):
    """The baseline: same blocks, data and order, with a softmax head instead of an energy."""

    model: PlainModel
    probe = build_plain_probe

    def loss(self, batch: Batch, engine: EvalEngine) -> tuple[Tensor, dict[str, Tensor]]:
        return cross_entropy(self.logits(batch["tokens"][:, :-1]).float(), batch["tokens"][:, 1:]), {}

    def logits(self, tokens_BT: Tensor) -> Tensor:
        positions_T = torch.arange(tokens_BT.shape[1], device=tokens_BT.device)
        return self.model(tokens_BT, self.model.rope(positions_T))

    @torch.no_grad()
    def evaluate(self, source: TextSource, engine: EvalEngine) -> dict[str, float]:
        """Every target of the split once."""
        nats = 0.0
        with eagerly():  # a shape that is used a few times is not worth compiling
            windows = evaluate.windows_with_counters(source, self.model.vocab, self.model.embed.weight.device)
            for tokens_BT, _ in engine.ranks.shard_of(windows):
                nats += evaluate.token_nats(self.logits(tokens_BT[:, :-1]), tokens_BT[:, 1:]).sum(-1).cpu().double().sum().item()
        return evaluate.report(over_ranks(nats, engine) / source.num_targets, source)

    def decoder(
        self, rows: list[list[int]], num: int, sampling: Sampling, seed: int, capture: bool, **options: Any
    ) -> PlainDecoder:
        asked = [name for name, value in options.items() if value is not None]
        if asked:
            raise UserError(f"--{asked[0].replace('_', '-')} needs energies, and this run is a plain transformer, which has none")
        return PlainDecoder(self, rows, num, sampling, seed, capture=capture)

    def flops_per_item(self) -> float:
        """An item is a block: one context of tokens."""
        return 3.0 * (self.model.forward_flops() + 2.0 * self.model.head.weight.numel()) * self.config.data.block


class EnergySystem(EbtSystem):
    """An energy over next tokens, trained by differentiating through its optimisation steps."""

    curve_options = CurveOptions
    probe, onnx_network = build_probe, optimize.no_onnx_network
    model: EnergyModel

    def __init__(self, config: Config, data: TextData) -> None:
        super().__init__(config, data)
        self.mcmc = config.model.mcmc
        self.noise = optimize.CounterNormal(config.seed, data.vocab_size)
        self.log_alpha = optimize.log_step_size(self.mcmc.alpha, self.mcmc.learn_alpha)
        if config.model.head_init == "calibrated":
            self._calibrate()
        self.replay = None
        if self.mcmc.replay_buffer:
            if self.mcmc.replay_buffer < config.batch:
                raise UserError(
                    f"model.mcmc.replay_buffer={self.mcmc.replay_buffer} cannot hold one batch of {config.batch}; use more, or 0"
                )
            sizes = (self.mcmc.replay_buffer, config.data.block, data.vocab_size)
            self.replay = ReplayBuffer(*sizes, config.seed, self.mcmc.write_back)

    # ---- training ----------------------------------------------------------------------------------------------------

    def variant(self, step: int, num_steps: int) -> tuple[int, bool]:
        """The number of optimisation steps, drawn by counter, and whether this step is logged and needs its energies."""
        counts = self.mcmc.counts()
        return counts[mix(self.config.seed, step, optimize.NUM_STEPS) % len(counts)], (step + 1) % self.config.every.log == 0

    def alpha(self, mean: Callable[[Tensor], Tensor] | None = None) -> Tensor:
        """The step size; in training, its gradient is averaged over ranks."""
        if self.log_alpha is None:
            return torch.full((), self.mcmc.alpha, device=self.model.embed.weight.device)
        return optimize.SeparateClip.apply(self.log_alpha, mean).exp()  # type: ignore[union-attr]

    def loss(self, batch: Batch, engine: EvalEngine) -> tuple[Tensor, dict[str, Tensor]]:
        variant = engine.variant
        num_steps, log_energies = variant if isinstance(variant, tuple) else (self.mcmc.num_steps, False)
        mcmc, num_steps = self.mcmc_settings(num_steps)
        rows = self.initial_batch(batch)
        tokens_BL, z_BTV, counter_BT, *_ = rows
        contexts, alpha = self.model.encode_context(tokens_BL[:, :-1]), self.alpha(engine.ranks.all_reduce_mean)
        sizes = step_sizes(mcmc, alpha, self.config.seed, counter_BT)
        chosen = {"config": mcmc, "alpha": sizes, "num_steps": num_steps, "noise": self.noise}
        outcome = optimize_to_loss(self.model, contexts, z_BTV, tokens_BL[:, 1:], counter_BT, **chosen)
        if self.replay and self.training:
            self.replay.store(rows, outcome.last.z_BTV, batch["index"])
        missing = torch.full_like(outcome.loss, float("nan"))
        nats = [*outcome.nats_K, *[missing] * (self.mcmc.num_steps - num_steps)]
        found = {f"loss_{k}": n.detach() for k, n in enumerate(nats, 1)}
        facts = energy_metrics(self.model, contexts, outcome, sizes) if log_energies else {name: missing for name in METRICS}
        return outcome.loss, {**found, **facts, "alpha": alpha.detach()}

    def mcmc_settings(self, num_steps: int) -> tuple[MCMCConfig, int]:
        """Settings and number of steps; noise, random step sizes and random numbers of steps are for training only."""
        if self.training:
            return self.mcmc, num_steps
        return replace(self.mcmc, langevin_noise=0.0, random_alpha=1.0), self.mcmc.num_steps

    def initial_batch(self, batch: Batch) -> ReplayBatch:
        """The batch with its initial predictions, extended by rows of the replay buffer where there is one."""
        tokens_BL, counter_BT = batch["tokens"], self.counters(batch["index"])
        z_BTV = optimize.initial_predictions(self.noise, self.mcmc, counter_BT, optimize.INITIAL, self.model.embed.weight.dtype)
        if self.replay and self.training:
            return self.replay.sample(tokens_BL, z_BTV, counter_BT, batch["index"])
        return ReplayBatch(tokens_BL, z_BTV, counter_BT, batch["index"][:0], batch["index"][:0] > 0)

    def single_rank_reason(self) -> str:
        if self.mcmc.replay_buffer:
            return f"model.mcmc.replay_buffer={self.mcmc.replay_buffer} keeps its replay buffer on one rank; set it to 0"
        return ""

    def counters(self, index_B: Tensor) -> Tensor:
        """Random-number counters: one for every position of every sample of the run."""
        block = self.config.data.block
        return index_B[:, None] * block + torch.arange(block, device=index_B.device)

    def compile_units(self) -> Iterator[nn.Module]:
        yield from super().compile_units()
        yield self.model
        yield self.noise

    @torch.no_grad()
    def _calibrate(self) -> None:
        """Scale the energy until the first step changes logits by about 1: the gradient is linear in the head's weight."""
        if self.model.head.weight.is_meta:
            return
        size = self.data.train.block
        tokens = torch.from_numpy(self.data.train.tokens[: NUM_CALIBRATED * size].astype("int64"))
        tokens_BT = tokens[: len(tokens) // size * size].view(-1, size)
        counter_BT = torch.arange(tokens_BT.numel()).view(tokens_BT.shape)
        z_BTV = optimize.initial_predictions(self.noise, self.mcmc, counter_BT, optimize.INITIAL, torch.float32)
        step = optimize.optimize_step(self.model, self.model.encode_context(tokens_BT), z_BTV, 0, 0.0, self.mcmc.space)
        self.model.head.weight /= (self.mcmc.alpha * step.grad_BTV).std()

    def alarms(self, measured: dict[str, float], progress: float) -> list[Alarm]:
        return optimize.step_alarms(measured, progress, self.mcmc.alpha) if progress > self.config.schedule.warmup else []

    # ---- evaluation and samples --------------------------------------------------------------------------------------

    @torch.no_grad()
    def evaluate(self, source: TextSource, engine: EvalEngine) -> dict[str, float]:
        """Every target of the split once per sample, after the trained number of steps, and after one."""
        with eagerly():  # a shape that is used a few times is not worth compiling
            nats = evaluate.nats_by_steps(self, source, sorted({1, self.mcmc.num_steps}), engine)
        return {**evaluate.report(nats[-1], source), "nats_one_step": nats[0]}

    def decoder(
        self, rows: list[list[int]], num: int, sampling: Sampling, seed: int, capture: bool, **options: Any
    ) -> CachedDecoder:
        steps, best_of, early_stop = (options[name] for name in ("optimize_steps", "best_of", "early_stop"))
        wanted = OptimizeOptions(self.mcmc.num_steps if steps is None else steps, best_of or 1, early_stop or 0.0)
        return CachedDecoder(self, wanted, rows, num, sampling, seed, capture=capture)

    def about_tokens(self, decoder: Decoder, num: int) -> str:
        """The energy of each token."""
        assert self.tokenizer is not None and isinstance(decoder, CachedDecoder)
        new = slice(decoder.lengths[0] - num, decoder.lengths[0])
        columns = (decoder.history_BN, decoder.initial.energy_BL, decoder.initial.steps_BL)
        tokens, energies, steps = (column_BL[0, new].tolist() for column_BL in columns)
        words = " ".join(f"{self.tokenizer.decode([t])!r}:{energy:.2f}" for t, energy in zip(tokens, energies, strict=True))
        return f"\n\nenergy of each token, after {sum(steps) / num:.2f} steps on average\n{words}"

    @torch.no_grad()
    def sample(self, request: Request, engine: EvalEngine) -> Sample:
        """Text; at the end of training also the inference curves, and the plain transformer's number."""
        if request.options or request.write or float(engine.progress) < 1.0:
            return super().sample(request, engine)
        tokens, more = END_TOKENS[engine.device.type], {}
        if self.config.model.control:
            config = replace(self.config, model=replace(self.config.model, kind="plain"))
            part = evaluate.held_out_part(self.data.valid, tokens)
            more["plain"] = evaluate.train_control(PlainSystem(config, self.data), config, self.data, part, engine.device)
        closing = self._inference_curve(request, more, tokens=tokens, num_samples=END_SAMPLES)
        shown = super().sample(request, engine)
        return Sample(f"{closing.text}\n\n{shown.text}", closing.files, shown.facts)

    @torch.no_grad()
    def inference_curve(self, request: Request, engine: EvalEngine) -> Sample:
        """Perplexity by number of steps and of samples, in and out of distribution: a table, a picture, and the numbers."""
        options = request.read(CurveOptions)
        return self._inference_curve(request, {}, tokens=options.tokens, num_samples=options.starts, texts=options.text)

    def _inference_curve(self, request: Request, more: dict[str, Any], **sizes: Any) -> Sample:
        with eagerly():
            found = evaluate.inference_curves(self, **sizes) | more
        return Sample(evaluate.table(found), evaluate.write(found, request.folder))

    def describe(self) -> dict[str, Any]:
        """The optimisation steps, their cost in memory and in operations."""
        mcmc, model = self.mcmc, self.model
        plain = 3.0 * (model.forward_flops() + 2.0 * model.enter.weight.numel()) * self.config.data.block
        steps = f"{mcmc.min_steps} to {mcmc.num_steps}" if mcmc.min_steps else f"{mcmc.num_steps}"
        alpha = f"{mcmc.alpha:g}" + ", learned" * mcmc.learn_alpha
        if mcmc.random_alpha > 1 and not mcmc.learn_alpha:
            alpha += f", times 1/{mcmc.random_alpha:g} to {mcmc.random_alpha:g}"
        return {
            "optimisation": f"{steps} steps, {mcmc.num_landscapes} landscapes, alpha {alpha}, loss on {mcmc.loss}",
            "logits": require_memory(self.config, model.vocab, model.embed.weight.device),
            "operations": f"{self.flops_per_item() / plain:.1f} times those of the plain transformer",
        }

    def flops_per_item(self) -> float:
        """An item is a block. A step with a loss has a forward pass, its gradient, and a backward pass through both: six
        forward passes. Replay makes every batch half as large again."""
        model, mcmc = self.model, self.mcmc
        one = model.forward_flops() + 2.0 * model.enter.weight.numel()
        steps = sum(mcmc.counts()) / len(mcmc.counts())
        with_loss = steps if mcmc.loss == "each" or mcmc.backprop_through == "all" else 1.0
        real = 3.0 * model.num_context_passes() * model.context_flops()
        rows = 1.5 if mcmc.replay_buffer else 1.0
        return rows * (real + (6.0 * with_loss + 2.0 * (steps - with_loss)) * one) * self.config.data.block


def build(config: Config, data: Any) -> System:
    """The recipe's entry point. Tensors this small are handled faster by one CPU thread."""
    if isinstance(config.model, DenoiseConfig):
        return (EnergyDenoiser if config.model.kind == "energy" else RegressSystem)(config, data)
    system = (EnergySystem if config.model.kind == "energy" else PlainSystem)(config, data)
    system.num_cpu_threads = 1 if config.model.shape[2] <= NARROW else 0
    return system


def require_memory(config: Config, vocab: int, device: torch.device) -> str:
    """The arithmetic of the predictions' logits as text; an error where the device could not hold them even when empty."""
    mcmc, rows = config.model.mcmc, config.batch // config.accum
    rows += max(1, rows // 2) if mcmc.replay_buffer else 0
    copy = rows * config.data.block * vocab * 4
    with_loss = mcmc.num_steps if mcmc.loss == "each" or mcmc.backprop_through == "all" else 1
    copies = KEPT * with_loss + ALIVE
    total = copy * copies
    words = f"{rows} rows x {config.data.block} tokens x {vocab:,} ids x 4 bytes = {copy / GB:.2f} GB a copy, {copies} copies"
    if mcmc.replay_buffer:
        buffer = mcmc.replay_buffer * config.data.block * vocab * 4
        total += BUFFERS * buffer
        words += f"; replay of {mcmc.replay_buffer}: {buffer / GB:.2f} GB, {BUFFERS} times in a step"
    words, room = f"{total / GB:.2f} GB ({words})", device_memory(device)
    if total > room:
        raise UserError(
            f"the logits of predictions do not fit: {words}, and the {device.type} has {room / GB:.1f} GB\n"
            "use a smaller batch or more accum, a shorter data.block, a smaller data.vocab, or less model.mcmc.replay_buffer"
        )
    return words


def device_memory(device: torch.device) -> float:
    """The total memory of a device in bytes; infinite where it is unknown."""
    if device.type == "cuda":
        return float(torch.cuda.mem_get_info(device)[1])
    return float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")) if device.type == "cpu" else float("inf")
