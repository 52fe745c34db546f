"""The ebt systems: an energy model trained through its own walk, and the plain transformer it is held against.

Shape suffixes: B batch, T time, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from seedbed.config import Config
from seedbed.data.text import TextData, TextSource
from seedbed.errors import UserError
from seedbed.nn.decoding import Decoder
from seedbed.nn.groups import declare
from seedbed.nn.sampling import Sampling
from seedbed.recipes.ebt import show
from seedbed.recipes.ebt.alarms import walk_alarms
from seedbed.recipes.ebt.bill import require_room
from seedbed.recipes.ebt.control import train_control
from seedbed.recipes.ebt.curves import held_out_part, thinking_curves
from seedbed.recipes.ebt.denoise import build_denoiser
from seedbed.recipes.ebt.denoise_presets import DenoiseConfig
from seedbed.recipes.ebt.evaluate import nats_by_steps, placed_windows, report, token_nats
from seedbed.recipes.ebt.generate import CachedDecoder, PlainDecoder, Thinking, Written, prompt_rows, write
from seedbed.recipes.ebt.model import EnergyModel, PlainModel, build_model
from seedbed.recipes.ebt.objective import FACTS, cross_entropy, energy_facts, step_sizes, walk_to_loss
from seedbed.recipes.ebt.presets import WalkConfig
from seedbed.recipes.ebt.probe import open_up, open_up_plain
from seedbed.recipes.ebt.replay import Replay, Taken
from seedbed.recipes.ebt.walk import COUNT, STARTS, Apart, Draw, first_candidates, take_step
from seedbed.train.engine import mix
from seedbed.train.system import Batch, Request, Sample, System, over_ranks, own_share

if TYPE_CHECKING:
    from seedbed.train.engine import Engine
    from seedbed.train.probe import Probe
    from seedbed.train.watch import Alarm

ALPHA_RATE = 3.0
# Up to this width a second CPU thread costs more than it gives.
NARROW = 128
NUM_CALIBRATED = 4
PROMPT_TOKENS = 24
# Targets and starts of the curves that close a run; `seedbed think` looks longer.
END_TOKENS, END_STARTS = {"cuda": 1 << 14, "mps": 1 << 12, "cpu": 1 << 11}, 2


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

    def complete(self, prompts: list[str], request: Request, options: dict[str, Any]) -> list[Written]:
        """Continuations of `prompts`; the first is told as it comes."""
        if self.tokenizer is None:
            raise UserError("this run was trained on random tokens; there is no text to generate")

        def on_piece(row: int, piece: str) -> None:
            if row == 0 and request.write:
                request.write(piece)

        num, seed = options.pop("tokens"), options.pop("seed")
        sampling = Sampling(options.pop("temperature"), options.pop("top_k"), options.pop("top_p"))
        # While training, a capture would cost more than the few tokens it speeds up.
        capture = bool(request.options) or request.write is not None
        decoder = self.decoder(prompt_rows(self.tokenizer, prompts), num, sampling, seed, capture, options)
        return write(decoder, self.tokenizer, num, on_piece)

    def decoder(
        self, rows: list[list[int]], num: int, sampling: Sampling, seed: int, capture: bool, thinking: dict[str, Any]
    ) -> Decoder:
        """What writes the next `num` tokens of each row."""
        raise NotImplementedError

    @torch.no_grad()
    def sample(self, request: Request, engine: Engine) -> Sample:
        """Text after a prompt, by default the beginning of the validation part; energies where there are any."""
        options = request.read(
            prompt=None, num=1, tokens=200, temperature=0.8, top_k=0, top_p=1.0, seed=1, think=None, best_of=None, early_stop=None
        )
        if self.tokenizer is None and not request.options:
            return Sample()
        given, num = options.pop("prompt"), options.pop("num")
        prompt = self._first_words() if given is None else given
        if request.write:
            request.write(prompt)
        written = self.complete([prompt] * num, request, dict(options))
        rest = "".join(f"\n\n---- sample {i} of {num}\n{prompt}{one.text}" for i, one in enumerate(written[1:], 2))
        rest += "".join(self._costs(one) for one in written[:1] if request.options)
        if request.write:
            request.write(rest + "\n")
        return Sample(text=prompt + written[0].text + rest, facts={"prompt": prompt, **options})

    def _costs(self, written: Written) -> str:
        """The energies of a text's tokens, in words; plain models have none."""
        return ""

    def _first_words(self) -> str:
        if self.tokenizer is None:
            return ""
        return self.tokenizer.decode(self.data.valid.tokens[:PROMPT_TOKENS].tolist())


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
            windows = placed_windows(source, self.model.vocab, self.model.embed.weight.device)
            for tokens_BT, _ in own_share(windows, engine):
                nats += token_nats(self.logits(tokens_BT[:, :-1]), tokens_BT[:, 1:]).sum(-1).cpu().double().sum().item()
        return report(over_ranks(nats, engine) / source.num_targets, source)

    def decoder(
        self, rows: list[list[int]], num: int, sampling: Sampling, seed: int, capture: bool, thinking: dict[str, Any]
    ) -> Decoder:
        asked = [name for name, value in thinking.items() if value is not None]
        if asked:
            raise UserError(f"--{asked[0].replace('_', '-')} needs energies, and this run is a plain transformer, which has none")
        return PlainDecoder(self, rows, num, sampling, seed, capture=capture)

    def probe(self, batch: Batch) -> Probe:
        return open_up_plain(self, batch)

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
        self.replay = None
        if self.walk.replay:
            if self.walk.replay < config.batch:
                raise UserError(f"model.walk.replay={self.walk.replay} cannot hold one batch of {config.batch}; use more, or 0")
            sizes = (self.walk.replay, config.data.block, data.vocab_size)
            self.replay = Replay(*sizes, config.seed, self.walk.write_back)

    # ---- training ----------------------------------------------------------------------------------------------------

    def variant(self, step: int, num_steps: int) -> tuple[int, bool]:
        """How many steps this batch walks, drawn by counter, and whether its row will be read and wants its energies."""
        counts = self.walk.counts()
        return counts[mix(self.config.seed, step, COUNT) % len(counts)], (step + 1) % self.config.every.log == 0

    def alpha(self, engine: Engine | None = None) -> Tensor:
        """The step size; in training, as something to be learned by all ranks."""
        if self.log_alpha is None:
            return torch.full((), self.walk.alpha, device=self.model.embed.weight.device)
        return Apart.apply(self.log_alpha, engine.ranks.mean if engine else None).exp()  # type: ignore[union-attr]

    def loss(self, batch: Batch, engine: Engine) -> tuple[Tensor, dict[str, Tensor]]:
        variant = engine.variant if engine is not None else None
        num_steps, look = variant if isinstance(variant, tuple) else (self.walk.steps, False)
        walk, num_steps = self.calm(num_steps)
        taken = self.begin(batch)
        tokens_BL, z_BTV, place_BT, *_ = taken
        memories, targets_BT, alpha = self.model.read(tokens_BL[:, :-1]), tokens_BL[:, 1:], self.alpha(engine)
        sizes = step_sizes(walk, alpha, self.config.seed, place_BT)
        chosen = {"config": walk, "alpha": sizes, "num_steps": num_steps, "draw": self.draw}
        outcome = walk_to_loss(self.model, memories, z_BTV, targets_BT, place_BT, **chosen)
        if self.replay and self.training:
            self.replay.put(taken, outcome.last.z_BTV, batch["index"])
        missing = torch.full_like(outcome.loss, float("nan"))
        found = {f"loss_{k}": n.detach() for k, n in enumerate([*outcome.nats_K, *[missing] * (self.walk.steps - num_steps)], 1)}
        facts = energy_facts(self.model, memories, outcome, sizes) if look else {name: missing for name in FACTS}
        return outcome.loss, {**found, **facts, "alpha": alpha.detach()}

    def calm(self, num_steps: int) -> tuple[WalkConfig, int]:
        """How to walk, and how far: noise, random sizes and counts are for training."""
        if self.training:
            return self.walk, num_steps
        return replace(self.walk, langevin=0.0, spread=1.0), self.walk.steps

    def begin(self, batch: Batch) -> Taken:
        """The batch with its first candidates, and with walks that go on where there is a replay."""
        tokens_BL, place_BT = batch["tokens"], self.places(batch["index"])
        z_BTV = first_candidates(self.draw, self.walk, place_BT, STARTS, self.model.embed.weight.dtype)
        if self.replay and self.training:
            return self.replay.take(tokens_BL, z_BTV, place_BT, batch["index"])
        return Taken(tokens_BL, z_BTV, place_BT, batch["index"][:0], batch["index"][:0] > 0)

    def why_one_rank(self) -> str:
        if self.walk.replay:
            return f"model.walk.replay={self.walk.replay} keeps unfinished walks in one place; set it to 0"
        return ""

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

    def probe(self, batch: Batch) -> Probe:
        return open_up(self, batch)

    def alarms(self, measured: dict[str, float], progress: float) -> list[Alarm]:
        return walk_alarms(measured, self.walk.alpha) if progress > self.config.schedule.warmup else []

    # ---- evaluation and samples --------------------------------------------------------------------------------------

    @torch.no_grad()
    def evaluate(self, source: TextSource, engine: Engine) -> dict[str, float]:
        """Every target of the split once per start, after as many steps as were trained, and after one."""
        with torch.compiler.set_stance("force_eager"):  # a shape met a few times is not worth compiling
            steps = sorted({1, self.walk.steps})
            nats = nats_by_steps(self, source, steps, engine=engine)
        return {**report(nats[-1], source), "nats_one_step": nats[0]}

    def decoder(
        self, rows: list[list[int]], num: int, sampling: Sampling, seed: int, capture: bool, thinking: dict[str, Any]
    ) -> Decoder:
        steps, best_of, early_stop = (thinking[name] for name in ("think", "best_of", "early_stop"))
        asked = Thinking(self.walk.steps if steps is None else steps, best_of or 1, early_stop or 0.0)
        return CachedDecoder(self, asked, rows, num, sampling, seed, capture=capture)

    def _costs(self, written: Written) -> str:
        assert self.tokenizer is not None
        pairs = zip(written.tokens, written.energies, strict=True)
        words = " ".join(f"{self.tokenizer.decode([token])!r}:{energy:.2f}" for token, energy in pairs)
        mean = sum(written.steps) / len(written.steps)
        return f"\n\nenergy of each token, after {mean:.2f} steps on average\n{words}"

    @torch.no_grad()
    def sample(self, request: Request, engine: Engine) -> Sample:
        """Text; when training has ended also what more thinking buys, and the plain transformer's number beside it."""
        shown = super().sample(request, engine)
        if request.options or request.write or float(engine.progress) < 1.0:
            return shown
        tokens = END_TOKENS[engine.device.type]
        more = {"plain": self._train_control(engine, tokens)} if self.config.model.control else {}
        closing = self._think(request, tokens=tokens, starts=END_STARTS, more=more)
        return Sample(f"{closing.text}\n\n{shown.text}", closing.files, shown.facts)

    @torch.no_grad()
    def think(self, request: Request, engine: Engine) -> Sample:
        """Perplexity against steps and against starts, in and out of distribution: a table, a picture, and the numbers."""
        options = request.read(tokens=1 << 13, starts=8, text=())
        return self._think(request, tokens=options["tokens"], starts=options["starts"], texts=tuple(options["text"]))

    def _think(self, request: Request, *, more: dict[str, Any] | None = None, **sizes: Any) -> Sample:
        with torch.compiler.set_stance("force_eager"):
            found = thinking_curves(self, **sizes) | (more or {})
        return Sample(show.table(found), show.write(found, request.folder))

    def _train_control(self, engine: Engine, tokens: int) -> dict[str, float]:
        config = replace(self.config, model=replace(self.config.model, kind="plain"))
        judged = held_out_part(self.data.valid, tokens)
        return train_control(PlainSystem(config, self.data), config, self.data, judged, engine.device)

    def describe(self) -> dict[str, Any]:
        """The walk, its price in memory and in operations."""
        walk, model = self.walk, self.model
        plain = 3.0 * (model.forward_flops() + 2.0 * model.enter.weight.numel()) * self.config.data.block
        steps = f"{walk.fewest} to {walk.steps}" if walk.fewest else f"{walk.steps}"
        learned = ", learned" if walk.learn_alpha else f", times 1/{walk.spread:g} to {walk.spread:g}" if walk.spread > 1 else ""
        return {
            "walk": f"{steps} steps, {walk.landscapes} landscapes, alpha {walk.alpha:g}{learned}, loss on {walk.loss}",
            "logits": require_room(self.config, model.vocab, model.embed.weight.device),
            "operations": f"{self.flops_per_item() / plain:.1f} times those of the plain transformer",
        }

    def flops_per_item(self) -> float:
        """An item is a block. A step that carries loss goes forward, down the slope, and back through both: six forwards.

        Replay makes every batch half as large again.
        """
        model, walk = self.model, self.walk
        one = model.forward_flops() + 2.0 * model.enter.weight.numel()
        steps = sum(walk.counts()) / len(walk.counts())
        carrying = steps if walk.loss == "each" or walk.through == "all" else 1.0
        real = 3.0 * model.num_readings() * model.reading_flops()
        rows = 1.5 if walk.replay else 1.0
        return rows * (real + (6.0 * carrying + 2.0 * (steps - carrying)) * one) * self.config.data.block


def build(config: Config, data: Any) -> System:
    """The recipe's entry point. Tensors this small are handled faster by one CPU thread."""
    if isinstance(config.model, DenoiseConfig):
        return build_denoiser(config, data)
    if config.model.shape[2] <= NARROW:
        torch.set_num_threads(1)
    return (EnergySystem if config.model.kind == "energy" else PlainSystem)(config, data)
