"""Generation: prefill, then one cached decode step per token. B rows, V vocabulary, N tokens of history.

Past the context the last half of it is read again and generation goes on from there: `window_start` is the policy.
"""

from __future__ import annotations

import codecs
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from seedbed.data.tokenizers import Tokenizer
from seedbed.errors import UserError
from seedbed.recipes.gpt.model import Transformer

READ_EVERY = 16  # tokens between two looks of the host at a CUDA device; elsewhere every token is read at once


@dataclass(frozen=True)
class Sampling:
    """How the next token is drawn: temperature 0 takes the likeliest; top_k 0 and top_p 1 are off."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0

    def __post_init__(self) -> None:
        if not 0.0 <= self.temperature < math.inf:
            raise UserError(f"temperature={self.temperature} is out of range: 0 is greedy, 1 samples as trained")
        if self.top_k < 0:
            raise UserError(f"top_k={self.top_k} is out of range: 0 keeps all tokens, 40 the forty likeliest")
        if not 0.0 < self.top_p <= 1.0:
            raise UserError(f"top_p={self.top_p} is out of range: it must be above 0 and at most 1 (1 keeps all tokens)")


def pick(logits_BV: Tensor, sampling: Sampling, generator: torch.Generator) -> Tensor:
    """One token per row by the Gumbel-max trick: no division, no host, one shape."""
    if sampling.temperature == 0.0:
        return logits_BV.argmax(-1)
    logits_BV = logits_BV.float() / sampling.temperature
    if 0 < sampling.top_k < logits_BV.shape[-1]:
        floor_B1 = logits_BV.topk(sampling.top_k).values[:, -1:]
        logits_BV = logits_BV.masked_fill(logits_BV < floor_B1, -math.inf)
    if sampling.top_p < 1.0:
        logits_BV = logits_BV.masked_fill(logits_BV < _nucleus_floor(logits_BV, sampling.top_p), -math.inf)
    waits_BV = torch.empty_like(logits_BV).exponential_(generator=generator).clamp_min(1e-20)
    return (logits_BV - waits_BV.log()).argmax(-1)


def _nucleus_floor(logits_BV: Tensor, top_p: float) -> Tensor:
    """The smallest logit among the likeliest tokens that together reach `top_p`."""
    sorted_BV = logits_BV.sort(dim=-1, descending=True).values
    probs_BV = sorted_BV.softmax(-1)
    before_BV = probs_BV.cumsum(-1) - probs_BV
    last_B1 = (before_BV < top_p).sum(-1, keepdim=True) - 1
    return sorted_BV.gather(-1, last_B1.clamp_min(0))


def window_start(start: int, num_tokens: int, context: int) -> int:
    """Where the model's window begins once a row holds `num_tokens`; a full window is cut to its last half."""
    return start if num_tokens - start <= context else num_tokens - max(1, context // 2)


class Decoder:
    """Extends token rows. The host knows every length; tokens, lengths and dice stay on the device."""

    def __init__(
        self,
        model: Transformer,
        prompts: list[list[int]],
        num_tokens: int,
        sampling: Sampling,
        seed: int,
        *,
        capture: bool = False,
    ) -> None:
        self.model, self.sampling = model, sampling
        device = model.embed.weight.device
        self.lengths = [len(p) for p in prompts]
        self.starts = [window_start(0, n, model.block) for n in self.lengths]
        self.history_BN = torch.zeros(len(prompts), max(self.lengths) + num_tokens, dtype=torch.int64, device=device)
        for row, prompt in zip(self.history_BN, prompts, strict=True):
            row[: len(prompt)] = torch.tensor(prompt)
        self.count_B = torch.tensor(self.lengths, device=device)
        self.generator = torch.Generator(device).manual_seed(seed)
        self.why_not_captured = "not asked for" if not capture else "" if device.type == "cuda" else f"no graphs on {device.type}"

    def advance(self) -> None:
        """Append one token to every row."""
        raise NotImplementedError

    def run(self, num_tokens: int, read_every: int) -> Iterator[list[list[int]]]:
        """New tokens of every row, in portions of `read_every`; in between the host does not wait for the device."""
        for first in range(0, num_tokens, read_every):
            count = min(read_every, num_tokens - first)
            for _ in range(count):
                self.advance()
            newest_BN = (self.count_B - count)[:, None] + torch.arange(count, device=self.count_B.device)
            yield self.history_BN.gather(1, newest_BN).tolist()

    def _append(self, logits_BV: Tensor) -> None:
        token_B = pick(logits_BV, self.sampling, self.generator)
        self.history_BN.scatter_(1, self.count_B[:, None], token_B[:, None])
        self.count_B += 1

    def _windows(self, rows: list[int], leave: int) -> tuple[Tensor, list[int]]:
        """The rows' windows without their last `leave` tokens, padded on the right, where causal attention cannot look."""
        sizes = [self.lengths[r] - self.starts[r] - leave for r in rows]
        tokens_NT = self.history_BN.new_zeros(len(rows), max(sizes))
        for i, (row, size) in enumerate(zip(rows, sizes, strict=True)):
            tokens_NT[i, :size] = self.history_BN[row, self.starts[row] : self.starts[row] + size]
        return tokens_NT, sizes


class UncachedDecoder(Decoder):
    """Reads the whole window again for every token: the slow way, kept as the yardstick."""

    def advance(self) -> None:
        rows = list(range(len(self.lengths)))
        self.starts = [window_start(s, n, self.model.block) for s, n in zip(self.starts, self.lengths, strict=True)]
        tokens_BT, sizes = self._windows(rows, leave=0)
        last_B = torch.tensor(sizes, device=tokens_BT.device) - 1
        x_BTC = self._hidden(tokens_BT)
        self._append(self.model.read_out(x_BTC[torch.arange(len(rows), device=x_BTC.device), last_B]))
        self.lengths = [n + 1 for n in self.lengths]

    def _hidden(self, tokens_BT: Tensor) -> Tensor:
        return self.model.hidden(tokens_BT)


class CachedDecoder(Decoder):
    """Keeps keys and values: a token costs one token's work, and on CUDA one graph launch."""

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self.cache = self.model.new_cache(len(self.lengths))
        self.graph: torch.cuda.CUDAGraph | None = None
        self._fill(list(range(len(self.lengths))))

    def advance(self) -> None:
        full = [r for r, n in enumerate(self.lengths) if window_start(self.starts[r], n, self.model.block) != self.starts[r]]
        for row in full:
            self.starts[row] = window_start(self.starts[row], self.lengths[row], self.model.block)
        if full:
            self._fill(full)
        if self.graph is None and not self.why_not_captured:
            self._capture()
        if self.graph is None:
            self._step(max(n - s for n, s in zip(self.lengths, self.starts, strict=True)))
        else:
            self.graph.replay()
        self.lengths = [n + 1 for n in self.lengths]

    def _fill(self, rows: list[int]) -> None:
        """Prefill all but the last token of each window; the last one is the next decode step's input."""
        tokens_NT, sizes = self._windows(rows, leave=1)
        rows_N = torch.tensor(rows, device=tokens_NT.device)
        if tokens_NT.shape[1]:
            self.model.hidden(tokens_NT, caches=self.cache.prefill(rows_N))
        self.cache.length_B[rows_N] = torch.tensor(sizes, device=tokens_NT.device)

    def _step(self, num_slots: int = 0) -> None:
        """One decode step, without host work: input, position, draw and bookkeeping all on the device."""
        token_B1 = self.history_BN.gather(1, self.count_B[:, None] - 1)
        setting = self.model.setting(token_B1, self.cache.length_B[:, None])
        x_B1C = self.model.hidden(token_B1, setting, self.cache.decode(num_slots))
        self.cache.length_B += 1
        self._append(self.model.read_out(x_B1C[:, 0]))

    def _capture(self) -> None:
        """Record the step as one CUDA graph. Rehearsals rewrite the same slots, so only counters and dice are put back."""
        counters = (self.cache.length_B, self.count_B)
        before, dice = [c.clone() for c in counters], self.generator.get_state()
        graph = torch.cuda.CUDAGraph()
        try:
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                self._step()
            torch.cuda.current_stream().wait_stream(side)
            graph.register_generator_state(self.generator)
            with torch.cuda.graph(graph):
                self._step()
            self.graph = graph
        except RuntimeError as error:
            torch.cuda.synchronize()
            self.why_not_captured = str(error).splitlines()[0]
            self.generator = torch.Generator(self.generator.device)  # the old one would believe it is still being captured
        for counter, value in zip(counters, before, strict=True):
            counter.copy_(value)
        self.generator.set_state(dice)


class TextStream:
    """Token ids to text as they come; the bytes of a character may be spread over several tokens."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self.pieces: list[str] = []

    def push(self, ids: list[int], last: bool = False) -> str:
        """The characters that `ids` complete; what is left over waits, unless these are the last."""
        piece = self.decoder.decode(self.tokenizer.bytes_of(ids), last)
        self.pieces.append(piece)
        return piece

    @property
    def text(self) -> str:
        return "".join(self.pieces)


def encode_prompt(tokenizer: Tokenizer, prompt: str) -> list[int]:
    """The prompt's ids. An empty prompt stands for the start of a document: the tokenizer's separator, else its first id."""
    return tokenizer.encode(prompt).tolist() or tokenizer.separator.tolist() or [0]


@torch.no_grad()
def generate(
    model: Transformer,
    tokenizer: Tokenizer,
    prompts: list[str],
    *,
    tokens: int = 200,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    seed: int = 1,
    on_piece: Callable[[int, str], None] | None = None,
    cached: bool = True,
    capture: bool = False,
) -> list[str]:
    """Continuations of `prompts`, without them; `on_piece(row, text)` hears each piece of text as soon as it is whole."""
    if tokens < 1:
        raise UserError(f"tokens={tokens} is out of range: ask for at least 1")
    if not prompts:
        raise UserError("there is no prompt; an empty one starts a new document")
    sampling = Sampling(temperature, top_k, top_p)
    rows = [encode_prompt(tokenizer, prompt) for prompt in prompts]
    streams = [TextStream(tokenizer) for _ in rows]
    was_training, read_every = model.training, READ_EVERY if model.embed.weight.is_cuda else 1
    model.eval()
    try:
        # Compiled blocks would be compiled again for every length met here.
        with torch.compiler.set_stance("force_eager"):
            kind = CachedDecoder if cached else UncachedDecoder
            decoder = kind(model, rows, tokens, sampling, seed, capture=capture)
            done = 0
            for portion in decoder.run(tokens, read_every):
                done += len(portion[0])
                for row, ids in enumerate(portion):
                    piece = streams[row].push(ids, last=done == tokens)
                    if on_piece and piece:
                        on_piece(row, piece)
    finally:
        model.train(was_training)
    return [stream.text for stream in streams]
