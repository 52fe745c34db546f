"""What a recipe declares so that checks can test it: pure functions, roles of inputs, and expected values."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal

from torch import Tensor

Batch = dict[str, Tensor]


@dataclass(frozen=True)
class Probe:
    """A system's model and expectations on one batch; None means not declared, and checks that need it are skipped.

    All intended noise (t, corruption, initial predictions) is in `batch`, so `predict` is a pure function in evaluation mode.
    """

    batch: Batch
    """Inputs, targets and noise as separate entries, made from a training batch by the system's own code."""
    predict: Callable[[Batch], Tensor]
    """The forward pass that feeds the loss; axis 0 of the prediction is the batch."""
    objective: Callable[[Tensor, Batch], Tensor]
    """The mean loss of a prediction, by the system's own code."""
    inputs: str = ""
    """The entry of `batch` that is the model's main input."""
    targets: str = ""
    """The entry of `batch` that a prediction is compared with; changing it must change nothing but the loss."""
    rule: Callable[[Batch], Tensor] | None = None
    """What `targets` should be, from the inputs; NaN or -1 where the inputs cannot tell."""
    mask: str = ""
    """The entry of `batch` that is 0 where a target does not count."""
    ranges: Mapping[str, tuple[float, float]] | None = None
    """The smallest and largest value that entries of a training batch can have."""
    constant: tuple[str, ...] = ()
    """Entries of a training batch that may have one value, such as the length in the first stage of a curriculum."""
    oracle: Callable[[Batch], Tensor] | None = None
    """A perfect prediction."""
    lower_bound: float | None = None
    """The smallest possible loss; that of the oracle, up to rounding."""
    order: Literal["causal", "full"] | None = None
    """Whether output i along axis 1 may depend on inputs after i."""
    positions: Literal["none", "absolute", "relative"] | None = None
    """How the model encodes positions along axis 1."""
    at_positions: Callable[[Batch, Tensor], Tensor] | None = None
    """The prediction when the inputs along axis 1 have the given positions instead of 0, 1, 2..."""
    uses: tuple[str, ...] = ()
    """Further inputs that must affect the prediction: a class, a time, an action."""
    scalars: Mapping[str, tuple[float, float]] | None = None
    """Scalar conditions with their range."""
    corrupt: Callable[[Batch], tuple[Tensor, Tensor, Tensor, Tensor]] | None = None
    """Clean, noise, the level that the network is given, and its input: mixture = (1 - level) * noise + level * clean."""
    at_init: Callable[[Batch], float] | None = None
    """The loss that an untrained model should have."""
    baselines: Callable[[Batch], dict[str, float]] | None = None
    """Trivial predictors by name and their losses, easiest first."""
    decode: Callable[[Tensor], str] | None = None
    """Decodes one row of inputs for a person to read."""
    holds: Callable[[str], bool] | None = None
    """Whether a decoded row is in the source, verbatim."""
    reencode: Callable[[], tuple[Any, Any]] | None = None
    """Some items of the source encoded again, and the same items as stored."""
    mixes_rows: tuple[str, ...] = ()
    """Modules that may mix items of a batch, such as BatchNorm."""
    dead: tuple[str, ...] = ()
    """Parameters that may have no effect, such as key biases."""
    cached: Callable[[Tensor], Tensor] | None = None
    """The prediction for these inputs, made step by step through the cache that generation uses."""

    held: Callable[[], Callable[[], Tensor]] | None = None
    """For losses with intended stop-gradients: fixes the detached parts at their present values and returns the training loss
    as a function of the weights, whose gradient is the one that training uses."""

    def declares(self, name: str) -> bool:
        """Whether a field is declared."""
        assert name in {f.name for f in fields(self)}, f"a probe has no field {name!r}"
        return getattr(self, name) not in (None, "", ())
