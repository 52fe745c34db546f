"""Guards on the host side: what to do when a step was not finite, or the loss left its band."""

from collections import deque
from math import isfinite, sqrt

from seedbed.config import Guard

# Clean runs on batches of 8, three seeds of 800 steps: 8 to 11 alarms without it, none with it; kicks exceed it many times.
TAIL = 3.0
# A loss below this share of the run's first one is a task that is solved: single items that still fail make it jump by factors,
# and it comes back by itself. Roll-backs there cost a run that had learned to add half of its steps.
SOLVED = 0.1


class SpikeWatch:
    """Mean and deviation of the last finite losses; a loss above mean + sigmas x deviation is a spike.

    Small batches have heavy tails, which a deviation does not know: a spike also rises `TAIL` times as far above the mean as
    anything in the window did, and above the `SOLVED` share of the first loss.
    """

    def __init__(self, guard: Guard) -> None:
        self.guard = guard
        self.losses: deque[float] = deque(maxlen=guard.window)
        self._sum = self._squares = self._shift = 0.0
        self._floor: float | None = None
        self._lesson = 0.0
        self._near = 0.5 * guard.sigmas**2

    def spikes(self, loss: float, lesson: float = 0.0) -> bool:
        """Look at the next loss. Spikes and non-finite values never enter the statistics; a new lesson begins new ones."""
        if not isfinite(loss):
            return False
        if lesson != self._lesson:
            self._lesson = lesson
            self.restart()
        if self._floor is None:
            self._floor = SOLVED * loss
        losses, shift = self.losses, self._shift
        num = len(losses)
        if num == losses.maxlen:
            # Nearly every loss is known by a few products to lie well inside the band. Distance and variance are `num` times
            # and `num` squared times what they are called.
            above = (loss - shift) * num - self._sum
            variance = num * self._squares - self._sum * self._sum
            if above > 0.0 and above * above > self._near * variance and loss > self._band() and loss > self.limit():
                return True
            gone = losses[0] - shift
            self._sum -= gone
            self._squares -= gone * gone
        elif not losses:
            self._shift = shift = loss  # sums of differences keep their digits
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
        """Forget everything: after a roll-back or a change of stage the old band means nothing."""
        self.losses.clear()
        self._sum = self._squares = 0.0

    def state(self) -> dict:
        sums = [self._sum, self._squares, self._shift]
        return {"losses": list(self.losses), "sums": sums, "floor": self._floor, "lesson": self._lesson}

    def load_state(self, state: dict) -> None:
        self.losses = deque(state["losses"], maxlen=self.guard.window)
        self._sum, self._squares, self._shift = state["sums"]  # the sums as they were, not summed anew: rounding counts
        self._floor = state["floor"]
        self._lesson = state.get("lesson", 0.0)  # older checkpoints have none


class Incidents:
    """Counts trouble and decides: go on, roll back, or stop. Its state travels with the checkpoint."""

    def __init__(self, guard: Guard) -> None:
        self.guard, self.watch = guard, SpikeWatch(guard)
        self.num_skips = self.num_rollbacks = 0
        self.spikes: deque[int] = deque(maxlen=3)

    def not_finite(self) -> str:
        """The answer to a step that was not finite: "skip", "rollback" or "stop"."""
        self.num_skips += 1
        if self.guard.policy == "stop" or (self.guard.policy == "skip" and self.num_skips > self.guard.max_skips):
            return "stop"
        return "skip" if self.num_skips <= self.guard.max_skips else self._roll_back()

    def spike(self, step: int) -> str:
        """The answer to a spike: "warn", and a roll-back at the third within 50 steps."""
        self.spikes.append(step)
        crowded = len(self.spikes) == 3 and self.spikes[-1] - self.spikes[0] < 50
        return self._roll_back() if crowded and self.guard.policy == "rollback" else "warn"

    def _roll_back(self) -> str:
        self.num_rollbacks += 1
        self.num_skips = 0
        self.spikes.clear()
        self.watch.restart()
        return "rollback" if self.num_rollbacks <= self.guard.max_rollbacks else "stop"

    def state(self) -> dict:
        counts = {"num_skips": self.num_skips, "num_rollbacks": self.num_rollbacks}
        return {**counts, "spikes": list(self.spikes), "watch": self.watch.state()}

    def load_state(self, state: dict) -> None:
        self.num_skips, self.num_rollbacks = state["num_skips"], state["num_rollbacks"]
        self.spikes = deque(state["spikes"], maxlen=3)
        self.watch.load_state(state["watch"])
