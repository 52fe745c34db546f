"""Base of language models: prompts are continued, and the text of the first one is streamed."""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch

from seedbed.config import Config
from seedbed.data.text import TextData
from seedbed.data.tokenizers import TextStream, encode_prompt
from seedbed.errors import UserError
from seedbed.nn import eagerly
from seedbed.nn.decoding import READ_EVERY, Decoder, Sampling
from seedbed.train.engine import EvalEngine
from seedbed.train.system import Batch, Request, Sample, System, option

PROMPT_TOKENS = 24


@dataclass(frozen=True)
class TextOptions:
    """Options of `seedbed sample` on text."""

    prompt: str | None = option(None, "what the samples begin with")
    num: int = option(1, "number of samples", low=1)
    tokens: int = option(200, "length of each sample", low=1)
    temperature: float = option(0.8, "0 always takes the likeliest token", low=0)
    top_k: int = option(0, "choose among the K likeliest; 0: all", low=0)
    top_p: float = option(1.0, "choose among the likeliest that make up P", low=0, high=1)
    seed: int = option(1, "the same seed gives the same samples", low=0)


class TextSystem(System):
    """A subclass makes `model` and its `decoder`. Options that it adds to `TextOptions` are given to the decoder."""

    sample_options: ClassVar[type] = TextOptions
    model: Any

    def __init__(self, config: Config, data: TextData) -> None:
        super().__init__()
        self.config, self.data, self.tokenizer = config, data, data.tokenizer

    def num_targets(self, batch: Batch) -> int:
        return batch["tokens"][:, 1:].numel()

    def decoder(self, rows: list[list[int]], num: int, sampling: Sampling, seed: int, capture: bool, **options: Any) -> Decoder:
        """A decoder that generates the next `num` tokens of each row."""
        raise NotImplementedError

    def about_tokens(self, decoder: Decoder, num: int) -> str:
        """What `seedbed sample` prints of the first row's `num` new tokens, below the text."""
        return ""

    def complete(self, prompts: list[str], **options: Any) -> list[str]:
        """Continuations of `prompts`; the options are those of `seedbed sample`."""
        return self.generate(prompts, asdict(Request(Path(), options).read(self.sample_options)))[0]

    @torch.no_grad()
    def generate(
        self,
        prompts: list[str],
        options: dict[str, Any],
        on_text: Callable[[int, str], None] | None = None,
        capture: bool = False,
    ) -> tuple[list[str], Decoder]:
        """Continuations of `prompts`, and their decoder; `on_text(row, text)` gets text as soon as it is complete."""
        if self.tokenizer is None:
            raise UserError("this run was trained on random tokens; there is no text to generate")
        if not prompts:
            raise UserError("there is no prompt; an empty one starts a new document")
        left = {name: value for name, value in options.items() if name not in ("prompt", "num")}
        num, seed = left.pop("tokens"), left.pop("seed")
        sampling = Sampling(left.pop("temperature"), left.pop("top_k"), left.pop("top_p"))
        rows = [encode_prompt(self.tokenizer, prompt) for prompt in prompts]
        streams, done, was_training = [TextStream(self.tokenizer) for _ in rows], 0, self.model.training
        self.model.eval()
        try:
            # Compiled modules would be compiled again for every length.
            with eagerly():
                decoder = self.decoder(rows, num, sampling, seed, capture, **left)
                for portion in decoder.run(num, READ_EVERY if decoder.history_BN.is_cuda else 1):
                    done += len(portion[0])
                    for row, ids in enumerate(portion):
                        piece = streams[row].push(ids, last=done == num)
                        if on_text and piece:
                            on_text(row, piece)
        finally:
            self.model.train(was_training)
        return [stream.text for stream in streams], decoder

    def sample(self, request: Request, engine: EvalEngine) -> Sample:
        """Text after a prompt, by default the beginning of the validation part."""
        options = asdict(request.read(self.sample_options))
        if self.tokenizer is None and not request.options:
            return Sample()
        given, num = options.pop("prompt"), options.pop("num")
        first = self.tokenizer.decode(self.data.valid.tokens[:PROMPT_TOKENS].tolist()) if self.tokenizer else ""
        prompt = first if given is None else given
        write = request.write or (lambda text: None)

        def on_text(row: int, piece: str) -> None:
            if row == 0:
                write(piece)

        # A capture runs the garbage collector and frees memory: between steps that costs more than it saves.
        capture = bool(request.options) or request.write is not None or float(engine.progress) >= 1.0
        write(prompt)
        texts, decoder = self.generate([prompt] * num, options, on_text, capture)
        # The first sample was streamed; the others were generated with it.
        rest = "".join(f"\n\n---- sample {i} of {num}\n{prompt}{text}" for i, text in enumerate(texts[1:], 2))
        rest += self.about_tokens(decoder, options["tokens"]) if request.options else ""
        write(rest + "\n")
        return Sample(text=prompt + texts[0] + rest, facts={"prompt": prompt, **options})
