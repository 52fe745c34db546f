"""The stages of the objective: open loop, closed loop on ever more frames of its own, the adversary; each gated by measurement.

Decided on the host at evaluations, one move at a time, and kept in checkpoints.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

from seedbed.recipes.world.presets import ModelConfig

# Free-running error over teacher-forced error on the same windows, after four frames: below the first longer rollouts, above the
# second shorter ones. Calibrated on sound runs, whose ratio rises with the skill of a single step: the box world has 2.1 at
# 32 pixels and 2.6 at 64, where what has moved out of sight must be guessed; Doom has 1.5.
NEAR, EASY, HARD = 4, 3.5, 6.0
# A rollout costs no more when it is long, so that few evaluations should do: 4, 16, 64 frames.
LONGER = 4
# Decibels lost at 4 frames when controls are exchanged between windows: below this the network hardly listens.
BLIND = 0.2
# The adversary waits until free-running error moves less than this share between evaluations, and is held back when it costs
# more decibels: some it always does, since what is sharp and a pixel off counts twice.
FLAT, HARM = 0.05, 1.0


class Stage(NamedTuple):
    """What a step computes: `open`, `closed`, `critic` (the adversary learns alone) or `adversarial`; on how many frames of its
    own, and with which share of the adversary's weight."""

    name: str
    length: int
    balance: float = 1.0


OPEN = Stage("open", 1)


@dataclass
class Ladder:
    """Where the run stands on its way up."""

    config: ModelConfig
    length: int = 1
    latest: dict[str, float] | None = None
    before: dict[str, float] | None = None
    critic_since: int = -1
    balance: float = 1.0
    best: dict[str, float] = field(default_factory=dict)

    def measured(self, gap: float, listens: float, error: float, near: float) -> None:
        """What an evaluation found: the gap after four frames, the loss in dB of exchanged controls, the free-running error
        and the PSNR at 4 frames. To look twice changes nothing; the next step makes use of it."""
        self.latest = {"gap": gap, "listens": listens, "error": error, "near": near}

    def stage(self, step: int, num_steps: int) -> Stage:
        """What this step computes."""
        progress = step / num_steps
        if self.latest is not None and progress >= self.config.closed:
            self._move(self.latest, step, progress)
            self.before, self.latest = self.latest, None
        if self.critic_since >= 0:
            name = "critic" if step - self.critic_since < self.config.warm_critic else "adversarial"
            return Stage(name, self.length, self.balance)
        return Stage("closed", self.length) if self.length > 1 else OPEN

    def _move(self, seen: dict[str, float], step: int, progress: float) -> None:
        if self.critic_since >= 0:
            self._hold_back(seen)
        elif progress >= self.config.adversarial and seen["listens"] >= BLIND and self._is_flat(seen):
            self.critic_since, self.best = step, dict(seen)
        # An adversary judges rollouts of one length.
        if self.critic_since < 0:
            if seen["gap"] < EASY and seen["listens"] >= BLIND:
                self.length = min(self.length * LONGER, self.config.rollout)
            elif seen["gap"] > HARD:
                self.length = max(self.length // LONGER, 1)

    def _is_flat(self, seen: dict[str, float]) -> bool:
        return self.before is not None and abs(seen["error"] / self.before["error"] - 1.0) < FLAT

    def _hold_back(self, seen: dict[str, float]) -> None:
        """Half the weight each time near frames have got worse or controls count for half of what they did."""
        if seen["near"] < self.best["near"] - HARM or seen["listens"] < 0.5 * self.best["listens"]:
            self.balance *= 0.5
            self.best = dict(seen)

    def state(self) -> dict[str, Any]:
        return {name: value for name, value in asdict(self).items() if name != "config"}

    def load_state(self, state: dict[str, Any]) -> None:
        for name, value in state.items():
            setattr(self, name, value)
