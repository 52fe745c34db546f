"""Generation without a cache: the slow references that cached decoders are compared with. B rows, T time, C width."""

import torch
from torch import Tensor

from seedbed.nn.decoding import Decoder, Sampling, window_start
from seedbed.recipes.ebt.generate import InitialPredictions, Optimized, OptimizeOptions, optimize_predictions
from seedbed.recipes.ebt.system import EnergySystem


class UncachedDecoder(Decoder):
    """Encodes the whole window again for every token: the slow reference."""

    def advance(self) -> None:
        rows = list(range(len(self.lengths)))
        self.starts = [window_start(s, n, self.model.block) for s, n in zip(self.starts, self.lengths, strict=True)]
        tokens_BT, sizes = self._windows(rows, leave=0)
        last_B = torch.tensor(sizes, device=tokens_BT.device) - 1
        x_BTC = self.hidden(tokens_BT)
        self._append(self.model.read_out(x_BTC[torch.arange(len(rows), device=x_BTC.device), last_B]))
        self.lengths = [n + 1 for n in self.lengths]

    def hidden(self, tokens_BT: Tensor) -> Tensor:
        return self.model.hidden(tokens_BT)


class UncachedEnergyDecoder(Decoder):
    """Encodes the whole window again for every token and optimises at all of its positions: the slow reference."""

    def __init__(
        self, system: EnergySystem, options: OptimizeOptions, prompts: list[list[int]], num: int, sampling: Sampling, seed: int
    ) -> None:
        super().__init__(system.model, prompts, num, sampling, seed)
        self.system, self.initial = system, InitialPredictions(system, self, options, seed)

    def advance(self) -> None:
        rows = list(range(len(self.lengths)))
        self.starts = [window_start(s, n, self.model.block) for s, n in zip(self.starts, self.lengths, strict=True)]
        tokens_BT, sizes = self._windows(rows, leave=0)
        first_B1 = torch.tensor(self.starts, device=tokens_BT.device)[:, None]
        counter_BT = first_B1 + torch.arange(1, tokens_BT.shape[1] + 1, device=tokens_BT.device)
        contexts, last_B = self.model.encode_context(tokens_BT), torch.tensor(sizes, device=tokens_BT.device) - 1
        ends = []
        for number in range(self.initial.options.best_of):
            optimized = optimize_predictions(self.system, contexts, self.initial.at(counter_BT, number), self.initial.options)
            ends.append([whole[torch.arange(len(rows), device=last_B.device), last_B] for whole in optimized])
        self._append(self.initial.record_best(Optimized(*(torch.stack(parts, 1) for parts in zip(*ends, strict=True)))))
        self.lengths = [n + 1 for n in self.lengths]
