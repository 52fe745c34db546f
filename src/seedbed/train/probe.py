"""What a recipe declares so that checks can test it: pure functions, roles of inputs, and expected values."""

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

from torch import Tensor

Batch = dict[str, Tensor]
Velocity = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class OdeSampler:
    """Generation from noise at time 0 to data at time 1, with an analytic velocity in place of the network's.

    `run` takes a velocity(x, time, condition), the name of a sampler (`orders` has them with their orders), a number of steps and
    a guidance scale; it makes a sample for each of `conditions`. Training changes the entry `condition` to `null` at rate `drop`.
    """

    orders: Mapping[str, int]
    run: Callable[[Velocity, str, int, float], Tensor]
    conditions: Tensor
    condition: str = ""
    null: int = -1
    drop: float = 0.0


@dataclass(frozen=True)
class Rollouts:
    """A world whose frames differ from the one before by `level` everywhere, and whose control t is `control` times the level
    of frame t; driven by the code of the recipe.

    Within `replaced(step)` the network is step(remembered frames (B, T, C, H, W) of every scale, finest first, control), and
    training adds no noise. `stage` is the variant that trains on rollouts of a length, `error` the metric of their mean absolute
    error, `windows` the function that takes inputs and targets from a batch. `free` has the ways to make rollouts of so many
    steps from the start of the batch, `true` gives what they are compared with.
    """

    batch: Batch
    level: float
    control: float
    replaced: Callable[[Callable[[list[Tensor], Tensor], Tensor]], AbstractContextManager[Any]]
    windows: Callable[..., Any]
    stage: Callable[[int], Hashable]
    error: str
    free: Mapping[str, Callable[[int], list[Tensor]]]
    true: Callable[[int], list[Tensor]]


@dataclass(frozen=True)
class Alignment:
    """Frames agree best with action[t + lag]; `pose_error` is that of the poses which `integrate` computes from the controls."""

    lag: int
    is_clear: bool
    summary: str
    reversed_axes: list[str]
    pose_error: float
    integrate: Any = None


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
    order: Literal["causal", "strict", "full"] | None = None
    """Whether output i along axis 1 may depend on inputs after i; `strict`: on inputs before i only."""
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
    ode: OdeSampler | None = None
    """The sampler of a flow."""
    options: Mapping[str, tuple[Sequence[Any], Callable[[Any], Tensor]]] | None = None
    """Options of samples: values in turn, and what falls in some sample from the first to the last, and rises in none."""
    quantise: tuple[Tensor, Mapping[str, Callable[[Tensor], Tensor]]] | None = None
    """The values of all levels of a pixel, as a frame; and by name, the ways in which a frame is stored and read again."""
    rollouts: Rollouts | None = None
    """Training and evaluation on predicted frames."""
    alignment: Callable[[Any], Alignment] | None = None
    """Controls against frames of training data."""
    patches: tuple[Callable[[Tensor, int], Tensor], Callable[[Tensor, int, int, int], Tensor], int] | None = None
    """Images to tokens (B, N, K), tokens to images of a height and width, both given the side of a patch, and that side; axis 1
    of inputs is N."""
    critic: str = ""
    """The named optimizer of a network whose scores (logits) of its first input the main one is trained to raise."""
    terms: tuple[str, ...] = ()
    """Metrics of a step that are terms of the loss: each must be part of what is minimised."""
    calls: Mapping[str, tuple[str, int]] | None = None
    """By module: the one that begins a prediction, and the number of its own calls for each of those, in training and after."""
    recall: tuple[Mapping[int, bool], Callable[[int, bool], Tensor]] | None = None
    """Entries written to a memory, by number, and whether they are read; what is predicted at that reading (or at the end) with
    the entry as it is, or with another one."""
    trains_at_end: bool = False
    """Whether the last sample of a run trains and evaluates something to compare with."""
    perfect: Callable[[], AbstractContextManager[Any]] | None = None
    """Within it, losses and evaluations are those of a model that has learned everything, so that a curriculum ends."""
    stage_entry: str = ""
    """The entry of a training batch whose largest value is the stage of the curriculum."""
    own_scores: Callable[[Path], Mapping[str, tuple[float, float, float]]] | None = None
    """Metrics of held-out items that are scored as samples, with files in a folder: what each is, what it must be, and what it is
    for noise."""
    definitions: Mapping[str, Callable[[], Iterable[tuple]]] | None = None
    """The recipe's own formulas, written a second time: by place (data, model, objective, evaluation, inference), tuples of what
    it is, its functions, what they give, what they must, and the largest difference relative to that, if not 1e-4."""
    chance: tuple[str, Mapping[str, float]] | None = None
    """The module whose output are logits, and the probability that a metric counts a sample as right when they are random."""

    def declares(self, name: str) -> bool:
        """Whether a field is declared."""
        assert name in {f.name for f in fields(self)}, f"a probe has no field {name!r}"
        return getattr(self, name) not in (None, "", ())
