"""What a recipe's `System` may offer to people, to instruments and to several ranks: protocols found by `isinstance`.

Where a capability has a default, callers use the function of the same name; where it has none, `require` raises the error.
What every training run asks for is in system.py.
"""

from collections.abc import Hashable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, TypeVar, runtime_checkable

from torch import Tensor, nn

from seedbed.config import Config, Dist
from seedbed.errors import UserError
from seedbed.train.engine import EvalEngine
from seedbed.train.system import Batch, Request, Sample, System, named_optimizers

if TYPE_CHECKING:
    from seedbed.train.export_llama import Llama
    from seedbed.train.export_onnx import OnnxNetwork
    from seedbed.train.player import Player
    from seedbed.train.probe import Probe

T = TypeVar("T")


@runtime_checkable
class WebExportable(Protocol):
    """`seedbed export --to web`."""

    def export_web(self, folder: Path) -> list[Path]:
        """Write a network and all that a web page needs to run it without Python; the files written."""
        ...


@runtime_checkable
class OnnxExportable(Protocol):
    """`seedbed export --to onnx`."""

    def onnx_network(self) -> "OnnxNetwork":
        """The network that inference calls; a `UserError` says why there is none."""
        ...


@runtime_checkable
class LlamaExportable(Protocol):
    """`seedbed export --to hf` and `--to gguf`."""

    def to_llama(self) -> "Llama":
        """The weights as those of a Llama; a `UserError` names the settings that it has no place for."""
        ...


@runtime_checkable
class Playable(Protocol):
    """`seedbed play`."""

    def play(self, runtime: str) -> "Player":
        """An interactive player of the weights as they are now, run by torch or by onnx."""
        ...


@runtime_checkable
class Completing(Protocol):
    """Prompts are continued, several at once."""

    def complete(self, prompts: list[str], **options: Any) -> list[str]:
        """Continuations of `prompts`, without them; the options are those of `seedbed sample`."""
        ...


@runtime_checkable
class InferenceOptimizable(Protocol):
    """`seedbed inference-curve`: predictions are found by optimisation, so more steps may make them better."""

    curve_options: ClassVar[type]

    def inference_curve(self, request: Request, engine: EvalEngine) -> Sample:
        """The quality of predictions against the number of inference-time optimisation steps."""
        ...


def require(system: System, capability: type[T], problem: str) -> T:
    """The system as one with a capability; `problem` is the error where it has none."""
    if not isinstance(system, capability):
        raise UserError(problem)
    return system


@runtime_checkable
class Packable(Protocol):
    """Several runs as one stacked model (tune/packing/pack.py)."""

    def packable_keys(self) -> frozenset[str]:
        """The config keys in which runs of one pack may differ, besides learning rates, schedule, seed and length."""
        ...

    def padded_config(self, configs: Sequence[Config]) -> Config:
        """One config whose shapes fit all of these. Parameters of a smaller run are the first rows of the larger ones."""
        ...

    def settings_tensors(self) -> dict[str, Tensor]:
        """This run's settings as tensors; those of a smaller run are padded with 0, which must mean off."""
        ...

    def packed_loss(self, index_B: Tensor, settings: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor], dict[str, Tensor]]:
        """Loss, measurements and new values of saved buffers for the items with these counters: a pure function.

        Called through `vmap` with the parameters, buffers and settings of each run on the system built from the padded config:
        no random numbers but those that follow from counters and settings, no host decisions on what tensors hold, no writes.
        """
        ...


def packable(system: System) -> Packable:
    return require(system, Packable, "the recipe does not offer a packed objective")


@runtime_checkable
class Probed(Protocol):
    """Checks can inspect the model; without it, checks that need to are skipped."""

    def probe(self, batch: Batch) -> "Probe":
        """The model and its expectations on one batch."""
        ...


def probe(system: System, batch: Batch) -> "Probe | None":
    return system.probe(batch) if isinstance(system, Probed) else None


@runtime_checkable
class HasVariants(Protocol):
    def variants(self, num_steps: int) -> tuple[Hashable, ...]:
        """All values that `variant` takes in a run, the first one first: checks look at all of them."""
        ...


def variants(system: System, num_steps: int) -> tuple[Hashable, ...]:
    return system.variants(num_steps) if isinstance(system, HasVariants) else (system.variant(0, num_steps),)


@runtime_checkable
class Strided(Protocol):
    def row_stride(self) -> int:
        """The distance between rows that all terms of the loss use."""
        ...


def row_stride(system: System) -> int:
    """The distance between rows that all terms of the loss use; 1 where every term uses every row."""
    return system.row_stride() if isinstance(system, Strided) else 1


@runtime_checkable
class Shardable(Protocol):
    def shard_units(self) -> Iterator[nn.Module]:
        """Modules called once per forward pass: `dist.shard` gathers them one by one, all other weights for a whole step."""
        ...


def shard_units(system: System) -> Iterator[nn.Module]:
    return system.shard_units() if isinstance(system, Shardable) else iter(())


@runtime_checkable
class SingleRank(Protocol):
    def single_rank_reason(self) -> str:
        """Why a batch of this system cannot be split over ranks; empty where it can."""
        ...


def single_rank_reason(system: System) -> str:
    return system.single_rank_reason() if isinstance(system, SingleRank) else ""


def require_possible(system: System, config: Config, degrees: Dist) -> None:
    """Refuse in one line what a system cannot do on several ranks; `degrees` are those of the ranks at hand."""
    if config.dist.world != degrees.world:
        raise UserError(f"dist.replicate x dist.shard = {config.dist.world}, but this command runs in one process; set both to 1")
    if degrees.world > 1 and (why := single_rank_reason(system)):
        raise UserError(f"this run cannot use {degrees.world} ranks: {why}")
    if degrees.is_sharded and len(named_optimizers(system)) > 1:
        names = ", ".join(named_optimizers(system))
        raise UserError(
            f"dist.shard={degrees.shard}: the optimizers of this system ({names}) step one after another in a step, and FSDP2 "
            f"frees the weights after the first; use dist.replicate={degrees.world}"
        )
