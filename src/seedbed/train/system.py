"""The seam: one class per recipe holds the model and the objective, and one loop runs them all."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn

from seedbed.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence

    from seedbed.config import Config
    from seedbed.data.feed import Source
    from seedbed.train.engine import Engine
    from seedbed.train.playing import Player
    from seedbed.train.probe import Probe
    from seedbed.train.watch import Alarm

T = TypeVar("T")
Batch = dict[str, Tensor]


@dataclass(frozen=True)
class Sample:
    """Something a person looks at: a text, or files written beside it (pictures, videos)."""

    text: str = ""
    files: tuple[Path, ...] = ()
    facts: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Request:
    """What somebody wants to see: the options they gave, a folder for files, and where text goes as it comes."""

    folder: Path
    options: dict[str, Any] = field(default_factory=dict)
    write: Callable[[str], None] | None = None

    def read(self, **defaults: Any) -> dict[str, Any]:
        """The options over a recipe's defaults; one the recipe does not know is an error."""
        for name in self.options:
            if name not in defaults:
                known = ", ".join("--" + n.replace("_", "-") for n in defaults)
                raise UserError(f"this recipe does not know --{name.replace('_', '-')}; it knows {known}")
        return {**defaults, **self.options}


def own_share(things: Iterable[T], engine: Engine | None) -> Iterable[T]:
    """What this rank does of work that ranks divide; all of it for who asks without an engine."""
    return things if engine is None else engine.ranks.mine(things)


def over_ranks(total: float, engine: Engine | None) -> float:
    """A sum over this rank's share as the sum over all."""
    return total if engine is None else engine.together(torch.tensor(total, dtype=torch.float64)).item()


@dataclass(frozen=True)
class ParamGroup:
    """Parameters that share an optimizer and its numbers; `lr` and `weight_decay` are base values."""

    name: str
    kind: str
    lr: float
    weight_decay: float
    params: dict[str, nn.Parameter]


class System(nn.Module):
    """A recipe's model and objective. Override `loss`; override `update` only when one loss is not the story.

    `lesson` names the measurement that tells which lesson of a curriculum is under way: when it changes, the loss may jump.
    """

    lesson: ClassVar[str] = ""

    def loss(self, batch: Batch, engine: Engine) -> tuple[Tensor, dict[str, Tensor]]:
        """The mean loss over this batch's targets, and further measurements."""
        raise NotImplementedError

    def update(self, batch: Batch, engine: Engine) -> dict[str, Tensor]:
        """One step on one batch: call `engine.descend` once per player."""
        loss, extra = self.loss(batch, engine)
        engine.descend(loss)
        return {"loss": loss.detach(), **extra}

    def num_targets(self, batch: Batch) -> Tensor | int:
        """How many targets the loss of this batch averages; unequal parts of a step are weighted by it."""
        return len(next(iter(batch.values())))

    def evaluate(self, source: Source, engine: Engine) -> dict[str, float]:
        """The recipe's own numbers on held-out data, exact and deterministic. The first entry decides `best`, lower is better."""
        raise NotImplementedError

    def sample(self, request: Request, engine: Engine) -> Sample:
        """What to show a person, while training or on request. Deterministic for equal weights and options."""
        return Sample()

    def think(self, request: Request, engine: Engine) -> Sample:
        """What more steps of thought buy, for recipes whose predictions take steps."""
        raise UserError("predictions of this recipe take no steps of thought; those of ebt do")

    def alarms(self, measured: dict[str, float], progress: float) -> list[Alarm]:
        """What the recipe's own measurements warn of at a log point; each kind is raised once in a run."""
        return []

    def describe(self) -> dict[str, Any]:
        """What a person wants to know before step 0, beside the number of parameters."""
        return {}

    def export(self, folder: Path) -> list[Path]:
        """Write what is needed to use the weights elsewhere; the files written."""
        raise UserError("this recipe has no export")

    def play(self, runtime: str) -> Player:
        """What `seedbed play` walks through, with the weights as they are now, run by torch or by onnx."""
        raise UserError("runs of this recipe cannot be played; those of world can")

    def export_web(self, folder: Path) -> list[Path]:
        """Write a network and all that a web page needs to run it without Python; the files written."""
        raise UserError("this recipe has no web page; world has one")

    def players(self) -> dict[str, nn.Module]:
        """The modules that descend under their own name; one player called "main" unless a recipe says otherwise."""
        return {"main": self}

    def compile_units(self) -> Iterator[nn.Module]:
        """The modules that `compile=blocks` compiles one by one."""
        return iter(())

    def shard_units(self) -> Iterator[nn.Module]:
        """Modules called once in a forward pass, which `dist.shard` gathers one by one; all other weights stay for the step."""
        return iter(())

    def why_one_rank(self) -> str:
        """Why a batch of this system cannot be spread over ranks, in words; empty where it can."""
        return ""

    def working(self) -> frozenset[str]:
        """Saved buffers that are work under way, not part of the model: every rank has its own, and checkpoints keep the first
        rank's beside the optimizer."""
        return frozenset()

    def variant(self, step: int, num_steps: int) -> Hashable:
        """What the host decides before a step (a length, a number of iterations); every value is captured apart."""
        return None

    def flops_per_item(self) -> float:
        """Floating-point operations to train on one item, forward and backward; 0 when unknown."""
        return 0.0

    def probe(self, batch: Batch) -> Probe | None:
        """The system opened up for the checks; without it, checks that need to look inside are skipped."""
        return None

    def state(self) -> dict[str, Any]:
        """Further state of the objective that a checkpoint must keep, as plain JSON values."""
        return {}

    def load_state(self, state: dict[str, Any]) -> None:
        """Take back what `state` gave."""

    # ---- several runs as one stacked model (train/pack.py): optional, these four together ------------------------------

    def packs(self) -> frozenset[str] | str:
        """The config keys in which runs of one pack may differ beside rates, schedule, seed and length; or why none may."""
        return "the recipe does not offer a packed objective"

    def envelope(self, configs: Sequence[Config]) -> Config:
        """One config whose shapes hold all of these. Parameters of a smaller run are the first rows of the larger ones."""
        return configs[0]

    def dials(self) -> dict[str, Tensor]:
        """This run's settings as tensors; those of a smaller run are padded with 0 to the envelope's, which must mean off."""
        return {}

    def packed_loss(self, index_B: Tensor, dials: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor], dict[str, Tensor]]:
        """Loss, measurements and new values of saved buffers for the items with these counters: a pure function.

        Called through `vmap` with the parameters, buffers and dials of each run on the system built from the envelope:
        no random numbers but those that follow from counters and dials, no host decisions on what tensors hold, no writes.
        """
        raise NotImplementedError
