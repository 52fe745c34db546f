"""Generation without a cache: the slow reference that tests and benchmarks compare with. B rows, T time, C width."""

import torch
from torch import Tensor

from seedbed.nn.decoding import Decoder, window_start


class UncachedDecoder(Decoder):
    """Encodes the whole window again for every token: the slow reference."""

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
