"""Generation: prefill, then one cached decode step per token. B rows, T time, C width, N rows that are filled."""

from __future__ import annotations

from collections.abc import Callable

import torch

from seedbed.data.tokenizers import TextStream, Tokenizer, encode_prompt
from seedbed.errors import UserError
from seedbed.nn import decoding, eagerly
from seedbed.nn.decoding import READ_EVERY, Decoder, Sampling
from seedbed.recipes.gpt.model import Transformer


class CachedDecoder(decoding.CachedDecoder):
    """Caches keys and values."""

    def _open(self) -> None:
        self.cache = self.model.new_cache(len(self.lengths))
        self.counters = (self.cache.length_B, self.count_B)

    def _fill(self, rows: list[int]) -> None:
        """Prefill all but the last token of each window; the last one is the next decode step's input."""
        tokens_NT, sizes = self._windows(rows, leave=1)
        rows_N = torch.tensor(rows, device=tokens_NT.device)
        if tokens_NT.shape[1]:
            self.model.hidden(tokens_NT, caches=self.cache.prefill(rows_N))
        self.cache.length_B[rows_N] = torch.tensor(sizes, device=tokens_NT.device)

    def step(self, num_slots: int = 0) -> None:
        """One decode step on the device, without a host sync."""
        token_B1 = self.history_BN.gather(1, self.count_B[:, None] - 1)
        tables = self.model.position_tables(token_B1, self.cache.length_B[:, None])
        x_B1C = self.model.hidden(token_B1, tables, self.cache.decode(num_slots))
        self.cache.length_B += 1
        self._append(self.model.read_out(x_B1C[:, 0]))


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
    on_text: Callable[[int, str], None] | None = None,
    decoder_type: type[Decoder] = CachedDecoder,
    capture: bool = False,
) -> list[str]:
    """Continuations of `prompts`, without them; `on_text(row, text)` gets text as soon as it is complete."""
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
        # Compiled blocks would be compiled again for every length.
        with eagerly():
            decoder = decoder_type(model, rows, tokens, sampling, seed, capture=capture)
            done = 0
            for portion in decoder.run(tokens, read_every):
                done += len(portion[0])
                for row, ids in enumerate(portion):
                    piece = streams[row].push(ids, last=done == tokens)
                    if on_text and piece:
                        on_text(row, piece)
    finally:
        model.train(was_training)
    return [stream.text for stream in streams]
