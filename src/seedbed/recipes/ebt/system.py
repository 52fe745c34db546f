"""The ebt systems: an energy model trained through its own optimisation steps, and the plain transformer as its baseline.

Shape suffixes: B batch, T time, V vocabulary.
"""

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from seedbed.config import Config
from seedbed.data.text import TextData, TextSource
from seedbed.data.tokenizers import encode_prompt
from seedbed.errors import UserError
from seedbed.nn import eagerly
from seedbed.nn.decoding import Decoder, Sampling
from seedbed.recipes.ebt import show
from seedbed.recipes.ebt.alarms import optimization_alarms
from seedbed.recipes.ebt.denoise.presets import DenoiseConfig
from seedbed.recipes.ebt.denoise.system import EnergyDenoiser, RegressSystem
from seedbed.recipes.ebt.evaluate import nats_by_steps, report, token_nats, train_control, windows_with_counters
from seedbed.recipes.ebt.generate import CachedDecoder, Generated, OptimizeOptions, PlainDecoder, generate
from seedbed.recipes.ebt.inference_curves import held_out_part, inference_curves
from seedbed.recipes.ebt.memory import require_memory
from seedbed.recipes.ebt.model import EnergyModel, PlainModel, build_model
from seedbed.recipes.ebt.objective import METRICS, cross_entropy, energy_metrics, optimize_to_loss, step_sizes
from seedbed.recipes.ebt.optimize import (
    INITIAL,
    NUM_STEPS,
    CounterNormal,
    SeparateClip,
    initial_predictions,
    log_step_size,
    optimize_step,
)
from seedbed.recipes.ebt.presets import MCMCConfig
from seedbed.recipes.ebt.probe import build_plain_probe, build_probe
from seedbed.recipes.ebt.replay import ReplayBatch, ReplayBuffer
from seedbed.train.engine import EvalEngine, mix
from seedbed.train.probe import Probe
from seedbed.train.system import Batch, Request, Sample, System, option, over_ranks, own_share
from seedbed.train.watch import Alarm

# Up to this width a second CPU thread is slower.
NARROW = 128
NUM_CALIBRATED = 4
PROMPT_TOKENS = 24
# Targets and samples of the inference curves at the end of a run; `seedbed inference-curve` measures more.
END_TOKENS, END_SAMPLES = {"cuda": 1 << 14, "mps": 1 << 12, "cpu": 1 << 11}, 2


@dataclass(frozen=True)
class SampleOptions:
    """Options of `seedbed sample` on text."""

    prompt: str | None = option(None, "what the samples begin with")
    num: int = option(1, "number of samples", low=1)
    tokens: int = option(200, "length of each sample", low=1)
    temperature: float = option(0.8, "0 always takes the likeliest token", low=0)
    top_k: int = option(0, "choose among the K likeliest; 0: all", low=0)
    top_p: float = option(1.0, "choose among the likeliest that make up P", low=0, high=1)
    seed: int = option(1, "the same seed gives the same samples", low=0)
    optimize_steps: int | None = option(None, "inference-time optimisation steps for every token", low=1)
    best_of: int | None = option(None, "initial predictions for every token; the lowest energy wins", low=1)
    early_stop: float | None = option(None, "stop when the energy falls by less", low=0)


@dataclass(frozen=True)
class CurveOptions:
    """Options of `seedbed inference-curve` on text."""

    tokens: int = option(1 << 13, "number of tokens of each text", low=2)
    starts: int = option(8, "number of initial predictions, at most", low=1, high=64)
    text: tuple[str, ...] = option((), "a further text, unlike the one trained on")


class TextSystem(System):
    """Base of both systems: text batches, generation and samples."""

    sample_options = SampleOptions
    model: EnergyModel | PlainModel

    def __init__(self, config: Config, data: TextData) -> None:
        super().__init__()
        self.config, self.data, self.tokenizer = config, data, data.tokenizer
        self.model = build_model(config.model, data.vocab_size, config.data.block, config.seed)

    def num_targets(self, batch: Batch) -> int:
        return batch["tokens"][:, 1:].numel()

    def compile_units(self) -> Iterator[nn.Module]:
        yield from self.model.blocks

    def complete(self, prompts: list[str], request: Request, options: dict[str, Any]) -> list[Generated]:
        """Continuations of `prompts`; the first is streamed."""
        if self.tokenizer is None:
            raise UserError("this run was trained on random tokens; there is no text to generate")

        def on_text(row: int, piece: str) -> None:
            if row == 0 and request.write:
                request.write(piece)

        num, seed = options.pop("tokens"), options.pop("seed")
        sampling = Sampling(options.pop("temperature"), options.pop("top_k"), options.pop("top_p"))
        # While training, a capture would cost more than the few tokens it speeds up.
        capture = bool(request.options) or request.write is not None
        rows = [encode_prompt(self.tokenizer, prompt) for prompt in prompts]
        decoder = self.decoder(rows, num, sampling, seed, capture, options)
        return generate(decoder, self.tokenizer, num, on_text)

    def decoder(
        self, rows: list[list[int]], num: int, sampling: Sampling, seed: int, capture: bool, options: dict[str, Any]
    ) -> Decoder:
        """A decoder that generates the next `num` tokens of each row."""
        raise NotImplementedError

    @torch.no_grad()
    def sample(self, request: Request, engine: EvalEngine) -> Sample:
        """Text after a prompt, by default the beginning of the validation part; energies where there are any."""
        options = asdict(request.read(SampleOptions))
        if self.tokenizer is None and not request.options:
            return Sample()
        prompt, num = options.pop("prompt"), options.pop("num")
        if prompt is None:
            first = self.data.valid.tokens[:PROMPT_TOKENS].tolist()
            prompt = "" if self.tokenizer is None else self.tokenizer.decode(first)
        if request.write:
            request.write(prompt)
        written = self.complete([prompt] * num, request, dict(options))
        rest = "".join(f"\n\n---- sample {i} of {num}\n{prompt}{one.text}" for i, one in enumerate(written[1:], 2))
        rest += "".join(self._energies_text(one) for one in written[:1] if request.options)
        if request.write:
            request.write(rest + "\n")
        return Sample(text=prompt + written[0].text + rest, facts={"prompt": prompt, **options})

    def _energies_text(self, written: Generated) -> str:
        """The energies of a text's tokens; plain models have none."""
        return ""


class PlainSystem(TextSystem):
    """The baseline: same blocks, data and order, with a softmax head instead of an energy."""

    model: PlainModel

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
            windows = windows_with_counters(source, self.model.vocab, self.model.embed.weight.device)
            for tokens_BT, _ in own_share(windows, engine):
                nats += token_nats(self.logits(tokens_BT[:, :-1]), tokens_BT[:, 1:]).sum(-1).cpu().double().sum().item()
        return report(over_ranks(nats, engine) / source.num_targets, source)

    def decoder(
        self, rows: list[list[int]], num: int, sampling: Sampling, seed: int, capture: bool, options: dict[str, Any]
    ) -> Decoder:
        asked = [name for name, value in options.items() if value is not None]
        if asked:
            raise UserError(f"--{asked[0].replace('_', '-')} needs energies, and this run is a plain transformer, which has none")
        return PlainDecoder(self, rows, num, sampling, seed, capture=capture)

    def probe(self, batch: Batch) -> Probe:
        return build_plain_probe(self, batch)

    def flops_per_item(self) -> float:
        """An item is a block: one context of tokens."""
        return 3.0 * (self.model.forward_flops() + 2.0 * self.model.head.weight.numel()) * self.config.data.block


class EnergySystem(TextSystem):
    """An energy over next tokens, trained by differentiating through its optimisation steps."""

    curve_options = CurveOptions
    model: EnergyModel

    def __init__(self, config: Config, data: TextData) -> None:
        super().__init__(config, data)
        self.mcmc = config.model.mcmc
        self.noise = CounterNormal(config.seed, data.vocab_size)
        self.log_alpha = log_step_size(self.mcmc.alpha, self.mcmc.learn_alpha)
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
        return counts[mix(self.config.seed, step, NUM_STEPS) % len(counts)], (step + 1) % self.config.every.log == 0

    def alpha(self, mean: Callable[[Tensor], Tensor] | None = None) -> Tensor:
        """The step size; in training, its gradient is averaged over ranks."""
        if self.log_alpha is None:
            return torch.full((), self.mcmc.alpha, device=self.model.embed.weight.device)
        return SeparateClip.apply(self.log_alpha, mean).exp()  # type: ignore[union-attr]

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
        z_BTV = initial_predictions(self.noise, self.mcmc, counter_BT, INITIAL, self.model.embed.weight.dtype)
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
        z_BTV = initial_predictions(self.noise, self.mcmc, counter_BT, INITIAL, torch.float32)
        step = optimize_step(self.model, self.model.encode_context(tokens_BT), z_BTV, 0, 0.0, self.mcmc.space)
        self.model.head.weight /= (self.mcmc.alpha * step.grad_BTV).std()

    def probe(self, batch: Batch) -> Probe:
        return build_probe(self, batch)

    def alarms(self, measured: dict[str, float], progress: float) -> list[Alarm]:
        return optimization_alarms(measured, self.mcmc.alpha) if progress > self.config.schedule.warmup else []

    # ---- evaluation and samples --------------------------------------------------------------------------------------

    @torch.no_grad()
    def evaluate(self, source: TextSource, engine: EvalEngine) -> dict[str, float]:
        """Every target of the split once per sample, after the trained number of steps, and after one."""
        with eagerly():  # a shape that is used a few times is not worth compiling
            steps = sorted({1, self.mcmc.num_steps})
            nats = nats_by_steps(self, source, steps, engine)
        return {**report(nats[-1], source), "nats_one_step": nats[0]}

    def decoder(
        self, rows: list[list[int]], num: int, sampling: Sampling, seed: int, capture: bool, options: dict[str, Any]
    ) -> Decoder:
        steps, best_of, early_stop = (options[name] for name in ("optimize_steps", "best_of", "early_stop"))
        wanted = OptimizeOptions(self.mcmc.num_steps if steps is None else steps, best_of or 1, early_stop or 0.0)
        return CachedDecoder(self, wanted, rows, num, sampling, seed, capture=capture)

    def _energies_text(self, written: Generated) -> str:
        assert self.tokenizer is not None
        pairs = zip(written.tokens, written.energies, strict=True)
        words = " ".join(f"{self.tokenizer.decode([token])!r}:{energy:.2f}" for token, energy in pairs)
        mean = sum(written.steps) / len(written.steps)
        return f"\n\nenergy of each token, after {mean:.2f} steps on average\n{words}"

    @torch.no_grad()
    def sample(self, request: Request, engine: EvalEngine) -> Sample:
        """Text; at the end of training also the inference curves, and the plain transformer's number."""
        shown = super().sample(request, engine)
        if request.options or request.write or float(engine.progress) < 1.0:
            return shown
        tokens, more = END_TOKENS[engine.device.type], {}
        if self.config.model.control:
            config = replace(self.config, model=replace(self.config.model, kind="plain"))
            part = held_out_part(self.data.valid, tokens)
            more["plain"] = train_control(PlainSystem(config, self.data), config, self.data, part, engine.device)
        closing = self._inference_curve(request, more, tokens=tokens, num_samples=END_SAMPLES)
        return Sample(f"{closing.text}\n\n{shown.text}", closing.files, shown.facts)

    @torch.no_grad()
    def inference_curve(self, request: Request, engine: EvalEngine) -> Sample:
        """Perplexity by number of steps and of samples, in and out of distribution: a table, a picture, and the numbers."""
        options = request.read(CurveOptions)
        return self._inference_curve(request, {}, tokens=options.tokens, num_samples=options.starts, texts=options.text)

    def _inference_curve(self, request: Request, more: dict[str, Any], **sizes: Any) -> Sample:
        with eagerly():
            found = inference_curves(self, **sizes) | more
        return Sample(show.table(found), show.write(found, request.folder))

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
