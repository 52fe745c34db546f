"""Guards on the host: which losses are spikes, and how many incidents there were."""

from collections import deque
from math import isfinite, sqrt

from seedbed.config import Guard

# Clean runs on batches of 8, three seeds of 800 steps: 8 to 11 alarms without it, none with it; injected spikes are far above.
TAIL = 3.0
# Below this share of the first loss the task is solved: single items that still fail make the loss jump by factors, and it
# recovers by itself. Roll-backs there cost a run that had learned to add half of its steps.
SOLVED = 0.1


# Names in checkpoints of earlier versions.
RENAMED = {"lesson": "stage"}


class SpikeWatch:
    """Mean and deviation of the last finite losses; a loss above mean + sigmas x deviation is a spike.

    Losses of small batches have heavy tails, so a spike must also rise `TAIL` times as far above the mean as anything in the
    window did, and above the `SOLVED` share of the first loss.
    """

    def __init__(self, guard: Guard) -> None:
        self.guard = guard
        self.losses: deque[float] = deque(maxlen=guard.window)
        self._sum = self._squares = self._shift = 0.0
        self._floor: float | None = None
        self._stage = 0.0
        self._near = 0.5 * guard.sigmas**2

    def spikes(self, loss: float, stage: float = 0.0) -> bool:
        """Whether the next loss is a spike. Spikes and non-finite values do not enter the statistics; a new stage resets them."""
        if not isfinite(loss):
            return False
        if stage != self._stage:
            self._stage = stage
            self.restart()
        if self._floor is None:
            self._floor = SOLVED * loss
        losses, shift = self.losses, self._shift
        num = len(losses)
        if num == losses.maxlen:
            # A few products show that nearly every loss is well inside the band. Here the distance is multiplied by `num`, and
            # the variance by `num` squared.
            above = (loss - shift) * num - self._sum
            variance = num * self._squares - self._sum * self._sum
            if above > 0.0 and above * above > self._near * variance and loss > self._band() and loss > self.limit():
                return True
            gone = losses[0] - shift
            self._sum -= gone
            self._squares -= gone * gone
        elif not losses:
            self._shift = shift = loss  # sums of differences keep their precision
        losses.append(loss)
        far = loss - shift
        self._sum += far
        self._squares += far * far
        return False

    def limit(self) -> float:
        mean = self._sum / len(self.losses) + self._shift
        return max(self._band(), mean + TAIL * (max(self.losses) - mean), self._floor or 0.0)

    def _band(self) -> float:
        mean = self._sum / len(self.losses)
        variance = max(self._squares / len(self.losses) - mean * mean, 0.0)
        return mean + self._shift + self.guard.sigmas * max(sqrt(variance), 1e-3 * abs(mean + self._shift), 1e-9)

    def restart(self) -> None:
        """Reset the statistics: they do not apply after a roll-back or a change of stage."""
        self.losses.clear()
        self._sum = self._squares = 0.0

    def state(self) -> dict:
        sums = [self._sum, self._squares, self._shift]
        return {"losses": list(self.losses), "sums": sums, "floor": self._floor, "stage": self._stage}

    def load_state(self, state: dict) -> None:
        state = {RENAMED.get(key, key): value for key, value in state.items()}
        self.losses = deque(state["losses"], maxlen=self.guard.window)
        self._sum, self._squares, self._shift = state["sums"]  # not summed again: rounding would differ
        self._floor = state["floor"]
        self._stage = state.get("stage", 0.0)  # older checkpoints have none


class Incidents:
    """Counts incidents; rollback.py decides by them. Checkpoints keep its state."""

    def __init__(self, guard: Guard) -> None:
        self.guard, self.watch = guard, SpikeWatch(guard)
        self.num_skips = self.num_rollbacks = 0
        self.spikes: deque[int] = deque(maxlen=3)

    def state(self) -> dict:
        counts = {"num_skips": self.num_skips, "num_rollbacks": self.num_rollbacks}
        return {**counts, "spikes": list(self.spikes), "watch": self.watch.state()}

    def load_state(self, state: dict) -> None:
        self.num_skips, self.num_rollbacks = state["num_skips"], state["num_rollbacks"]
        self.spikes = deque(state["spikes"], maxlen=3)
        self.watch.load_state(state["watch"])
