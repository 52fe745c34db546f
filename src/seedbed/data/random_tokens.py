"""Stores of random tokens, for speed runs: data.text=random:NUM_TOKENS:VOCAB."""

import numpy as np

from seedbed.data.corpus import TextConfig, random_size
from seedbed.data.prepare import FORMAT, commit
from seedbed.data.progress import Progress
from seedbed.data.store import Store, Writer, digest
from seedbed.data.tokenizers import token_dtype

CHUNK = 1 << 22


class RandomPlan:
    """Random tokens; the key names their number, the vocabulary and the split."""

    def __init__(self, config: TextConfig):
        self.config = config
        self.num_tokens, self.vocab = random_size(config.text)
        self.label = f"random-{self.num_tokens}-{self.vocab}"
        self.key = digest([FORMAT, "random", self.num_tokens, self.vocab, config.valid])

    def build(self, writer: Writer) -> Store:
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
