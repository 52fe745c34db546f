"""Random tokens for speed runs, `random:NUM_TOKENS:VOCAB`. No numpy import, so that presets are fast to list."""

from typing import TYPE_CHECKING

from seedbed.errors import UserError

if TYPE_CHECKING:
    from seedbed.data.corpus import TextConfig
    from seedbed.data.store import Store, Writer

CHUNK = 1 << 22


class RandomPlan:
    def __init__(self, config: "TextConfig"):
        from seedbed.data.prepare import FORMAT
        from seedbed.data.store import digest

        self.config = config
        self.num_tokens, self.vocab = random_size(config.text)
        self.label = f"random-{self.num_tokens}-{self.vocab}"
        self.key = digest([FORMAT, "random", self.num_tokens, self.vocab, config.valid])

    def build(self, writer: "Writer") -> "Store":
        import numpy as np

        from seedbed.data.store import Progress
        from seedbed.data.tokenise import commit
        from seedbed.data.tokenizers import token_dtype

        dtype = token_dtype(self.vocab)
        writer.array("tokens", dtype)
        progress = Progress("drawing random tokens", "tokens")
        for done in range(0, self.num_tokens, CHUNK):
            rng = np.random.Generator(np.random.PCG64([1, done]))
            writer.append("tokens", rng.integers(0, self.vocab, min(CHUNK, self.num_tokens - done), dtype))
            progress(done, self.num_tokens)
        progress.close()
        tokenizer = {"kind": "random", "fingerprint": "random", "vocab_size": self.vocab}
        return commit(writer, self.key, self.config, tokenizer, {"name": self.config.text}, {"num_bytes": 0, "num_unknown": 0})


def random_size(text: str) -> tuple[int, int]:
    """The number of tokens and the vocabulary of `random:NUM_TOKENS:VOCAB`."""
    parts = text.split(":")
    sizes = [int(p.replace("_", "")) for p in parts[1:] if p.replace("_", "").isascii() and p.replace("_", "").isdigit()]
    if len(parts) != 3 or len(sizes) != 2 or sizes[0] < 2 or not 2 <= sizes[1] <= 1 << 31:
        raise UserError(f"data.text={text} is not random:NUM_TOKENS:VOCAB; for example random:10_000_000:50304")
    return sizes[0], sizes[1]
