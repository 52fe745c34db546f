"""Curriculum of the objective: open loop, closed loop with growing rollouts, adversarial; each stage gated by evaluations.

Decided on the host at evaluations, one move at a time, and kept in checkpoints.
"""

from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

from seedbed.recipes.world.presets import ModelConfig

# Free-running error over teacher-forced error on the same windows, after four frames: below the first longer rollouts, above the
# second shorter ones. Calibrated on sound runs, whose ratio rises with the skill of a single step: the box world has 2.1 at
# 32 pixels and 2.6 at 64, where what leaves the view must be guessed; Doom has 1.5.
NEAR, EASY, HARD = 4, 3.5, 6.0
# Growth factor of rollouts: 4, 16, 64 frames. Long ones cost no more than short ones.
LONGER = 4
# PSNR lost at 4 frames with shuffled controls: below this the network hardly uses them.
BLIND = 0.2
# The critic starts once the free-running error changes by less than FLAT between evaluations. Its weight is halved when PSNR
# falls by more than HARM; some loss is expected, since sharp details that are a pixel off count twice.
FLAT, HARM = 0.05, 1.0


class Stage(NamedTuple):
    """What a step computes: `open`, `closed`, `critic` (warm-up of the critic) or `adversarial`; the rollout length, and the
    share of the adversarial weight."""

    name: str
    length: int
    balance: float = 1.0


OPEN = Stage("open", 1)


@dataclass
class Curriculum:
    """The stage of a run, moved by evaluation results and saved in checkpoints."""

    config: ModelConfig
    length: int = 1
    latest: dict[str, float] | None = None
    before: dict[str, float] | None = None
    critic_since: int = -1
    balance: float = 1.0
    best: dict[str, float] = field(default_factory=dict)

    def measured(self, gap: float, listens: float, error: float, near: float) -> None:
        """Record an evaluation: the ratio of free-running to teacher-forced error, the PSNR lost with shuffled controls, the
        free-running error and the PSNR at 4 frames. The next step uses it."""
        self.latest = {"gap": gap, "listens": listens, "error": error, "near": near}

    def stage(self, step: int, num_steps: int) -> Stage:
        progress = step / num_steps
        if self.latest is not None and progress >= self.config.closed:
            self._move(self.latest, step, progress)
            self.before, self.latest = self.latest, None
        if self.critic_since >= 0:
            name = "critic" if step - self.critic_since < self.config.critic_warmup else "adversarial"
            return Stage(name, self.length, self.balance)
        return Stage("closed", self.length) if self.length > 1 else OPEN

    def _move(self, seen: dict[str, float], step: int, progress: float) -> None:
        is_flat = self.before is not None and abs(seen["error"] / self.before["error"] - 1.0) < FLAT
        if self.critic_since >= 0:
            # Halve the weight when PSNR at 4 frames has fallen or controls count for half of what they did.
            if seen["near"] < self.best["near"] - HARM or seen["listens"] < 0.5 * self.best["listens"]:
                self.balance, self.best = 0.5 * self.balance, dict(seen)
        elif progress >= self.config.adversarial and seen["listens"] >= BLIND and is_flat:
            self.critic_since, self.best = step, dict(seen)
        # The rollout length stays fixed once the critic trains.
        if self.critic_since < 0:
            if seen["gap"] < EASY and seen["listens"] >= BLIND:
                self.length = min(self.length * LONGER, self.config.rollout)
            elif seen["gap"] > HARD:
                self.length = max(self.length // LONGER, 1)

    def state(self) -> dict[str, Any]:
        return {name: value for name, value in asdict(self).items() if name != "config"}

    def load_state(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
