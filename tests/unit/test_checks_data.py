"""D2 on generators: lawful repeats pass, periods and held-out samples that were trained on do not."""

import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from seedbed.checks.data_checks import _commonest_distance, _known_beyond_chance, data_split
from seedbed.checks.subject import Subject
from seedbed.config import Config
from seedbed.data.feed import Data, Source
from seedbed.recipes import find
from seedbed.recipes.thinker.data import TaskSource
from seedbed.report.findings import Finding


def draws(num: int, seed: int) -> list[bytes]:
    """Mostly short strings, as a task of all lengths makes them."""
    rng = random.Random(seed)
    return [rng.randbytes(rng.randint(1, 6)) if rng.random() < 0.5 else bytes([rng.randrange(64)]) for _ in range(num)]


def test_sample_distances_of_random_data_are_not_flagged() -> None:
    assert _commonest_distance(draws(4096, 1))[1] < 0.02 * 4096
    assert _commonest_distance([b"a", b"b", b"c"]) == (0, 0)


@pytest.mark.parametrize("period", [1, 3, 100, 2500])
def test_periodic_samples_are_found(period: int) -> None:
    seen = (draws(period, 2) * (4096 // period + 1))[:4096]
    distance, times = _commonest_distance(seen)
    assert times > 0.02 * 4096 and distance <= period


def test_held_out_samples_are_known_only_by_chance() -> None:
    seen = draws(4096, 1)
    value, limit = _known_beyond_chance(seen, draws(4096, 2))
    assert value <= limit
    value, limit = _known_beyond_chance(seen, draws(2048, 2) + seen[:2048])
    assert value > limit


def outcome(change: Callable[[Data], None], monkeypatch: pytest.MonkeyPatch) -> Finding:
    """D2 on thinker/cumsum, with its sources changed."""
    recipe, preset = find("thinker/cumsum")
    config = recipe.preset(preset)
    data = recipe.open_data(config)
    change(data)

    def opened(self: object, config: Config) -> Data:
        return data

    monkeypatch.setattr(type(recipe), "open_data", opened)
    return data_split(Subject(recipe, preset, config, Path()))


def shorten(data: Data, period: int) -> None:
    def make(self: TaskSource, raw: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return TaskSource.make(self, raw["index"] % period, self.seed)

    source: Source = data.train
    source.batch = make.__get__(source)  # type: ignore[method-assign]


def test_task_with_all_lengths_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    assert outcome(lambda data: None, monkeypatch).status == "pass"


def test_generator_with_a_period_fails_and_says_which(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "every 3,000 draws" in outcome(lambda data: shorten(data, 3000), monkeypatch).what


def test_validation_that_repeats_training_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def same(data: Data) -> None:
        data.valid = data.train

    assert "validation samples are training samples" in outcome(same, monkeypatch).what
