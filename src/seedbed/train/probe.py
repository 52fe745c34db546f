"""What a recipe says about itself so that checks can test it: pure functions, roles of inputs, and what to expect."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal

from torch import Tensor

Batch = dict[str, Tensor]


@dataclass(frozen=True)
class Probe:
    """A system opened up on one batch; what is None is not declared, and checks that need it are skipped.

    All lawful noise (t, corruption, first guesses) lies in `batch`, so that `predict` is a pure function in evaluation mode.
    """

    batch: Batch
    """Inputs, targets and noise apart, as the system's own code makes them from a training batch."""
    predict: Callable[[Batch], Tensor]
    """The forward pass that feeds the loss; axis 0 of the prediction is the batch."""
    objective: Callable[[Tensor, Batch], Tensor]
    """The mean loss of a prediction, by the system's own code."""
    inputs: str = ""
    """The entry of `batch` that the prediction is mainly made from."""
    targets: str = ""
    """The entry of `batch` that a prediction is compared with; changing it must change nothing but the loss."""
    rule: Callable[[Batch], Tensor] | None = None
    """What `targets` should be, from the inputs; NaN or -1 where the inputs cannot tell."""
    mask: str = ""
    """The entry of `batch` that is 0 where a target does not count."""
    ranges: Mapping[str, tuple[float, float]] | None = None
    """The smallest and largest value that entries of a training batch can have."""
    oracle: Callable[[Batch], Tensor] | None = None
    """A perfect prediction."""
    lower_bound: float | None = None
    """The smallest loss there can be; that of the oracle, up to rounding."""
    order: Literal["causal", "full"] | None = None
    """Whether output i along axis 1 may depend on inputs after i."""
    positions: Literal["none", "absolute", "relative"] | None = None
    """How the model knows where along axis 1 an input stands."""
    at_positions: Callable[[Batch, Tensor], Tensor] | None = None
    """The prediction when the inputs along axis 1 stand at the given whole numbers instead of 0, 1, 2..."""
    uses: tuple[str, ...] = ()
    """Conditions beside the main input that must matter: a class, a time, an action."""
    scalars: Mapping[str, tuple[float, float]] | None = None
    """Scalar conditions with their range."""
    corrupt: Callable[[Batch], tuple[Tensor, Tensor, Tensor, Tensor]] | None = None
    """Clean, noise, level told to the network, and the mixture it sees: mixture = (1 - level) * noise + level * clean."""
    at_init: Callable[[Batch], float] | None = None
    """The loss that a model should have before it has learned anything."""
    baselines: Callable[[Batch], dict[str, float]] | None = None
    """Trivial predictors by name and their losses, easiest first."""
    decode: Callable[[Tensor], str] | None = None
    """One row of inputs back to what a person reads."""
    holds: Callable[[str], bool] | None = None
    """Whether a decoded row stands in the source, verbatim."""
    reencode: Callable[[], tuple[Any, Any]] | None = None
    """Some items of the source encoded anew, and the same items as stored."""
    mixes_rows: tuple[str, ...] = ()
    """Modules that lawfully look across the batch, such as BatchNorm."""
    dead: tuple[str, ...] = ()
    """Parameters that lawfully change nothing, such as key biases."""
    cached: Callable[[Tensor], Tensor] | None = None
    """The prediction for these inputs, made step by step through the cache that generation uses."""

    held: Callable[[], Callable[[], Tensor]] | None = None
    """Where gradients lawfully stop on their way back: holds what they do not pass through as it is now, and gives the
    training loss as a function of the weights alone, whose gradient is the one that training takes."""

    def declares(self, name: str) -> bool:
        """Whether a field was filled in."""
        assert name in {f.name for f in fields(self)}, f"a probe has no field {name!r}"
        return getattr(self, name) not in (None, "", ())
