"""A budget of time stays one when steps change their pace: by a stand-in for the job, whose clock is set by hand."""

from collections import deque
from types import SimpleNamespace

import pytest

from seedbed.train.budget import adjust_length

BATCH = 4


class Run:
    """A run of `budget` seconds whose length was fixed by steps of `planned` seconds."""

    def __init__(self, budget: float, planned: float) -> None:
        self.config = SimpleNamespace(budget=budget, batch=BATCH)
        self.clock, self.pace, self.ranks = {"train": 0.0}, deque(maxlen=5), SimpleNamespace(broadcast_object=lambda value: value)
        self.step, self.items, self.total_items = 0, 0, int(budget / planned) * BATCH
        self.printed: list[str] = []
        self.console = SimpleNamespace(line=self.printed.append)
        self.run = SimpleNamespace(event=lambda step, kind, **facts: None)

    @property
    def num_steps(self) -> int:
        return self.total_items // BATCH

    @property
    def progress(self) -> float:
        return self.items / self.total_items

    def go(self, num: int, seconds: float) -> None:
        """Log points every ten steps."""
        for _ in range(num // 10):
            self.step, self.items = self.step + 10, self.items + 10 * BATCH
            self.clock["train"] += 10 * seconds
            adjust_length(self)  # type: ignore[arg-type]


@pytest.mark.parametrize(("pace", "word"), [(0.05, "faster"), (0.2, "slower")])
def test_budget_length_follows_measured_step_time(pace: float, word: str) -> None:
    run = Run(budget=100.0, planned=0.1)
    run.go(100, pace)
    assert run.printed and all(word in line for line in run.printed)
    assert run.num_steps * pace == pytest.approx(100.0, rel=0.02)


def test_budget_length_stays_when_steps_are_as_fast_as_planned() -> None:
    run = Run(budget=100.0, planned=0.1)
    run.go(500, 0.1)
    assert not run.printed and run.num_steps == 1000


def test_budget_length_only_shrinks_late_in_a_run() -> None:
    run = Run(budget=100.0, planned=0.1)
    run.go(600, 0.1)
    run.go(200, 0.01)
    assert not run.printed and run.num_steps == 1000
    run.go(60, 0.6)
    assert "slower" in run.printed[-1] and run.num_steps < 1000
