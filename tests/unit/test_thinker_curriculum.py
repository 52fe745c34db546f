"""Curricula: lengths within bounds and even, promotions exactly when earned, state in one tensor that vmap may stack."""

import dataclasses

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from seedbed.nn import rng
from seedbed.recipes import find
from seedbed.recipes.thinker import curriculum
from seedbed.recipes.thinker.data import open_data
from seedbed.recipes.thinker.presets import CurriculumConfig

KEYS = rng.keys(0, torch.arange(40_000), 1)
GATED = CurriculumConfig(kind="gated", start=2, threshold=0.9, window=10, min_steps=0)


def counts(config: CurriculumConfig, limit: Tensor | int, length: int) -> list[float]:
    """The share of each length from 1 on."""
    drawn = curriculum.lengths(KEYS, limit, config, length)
    assert drawn.dtype == torch.int64 and drawn.shape == KEYS.shape and drawn.min() >= 1 and drawn.max() <= length
    return (torch.bincount(drawn, minlength=length + 1)[1:] / len(drawn)).tolist()


def run(stage: Tensor, steps: list[tuple[int, int]], config: CurriculumConfig, length: int = 8) -> Tensor:
    for hits, count in steps:
        stage = curriculum.advance(stage, torch.tensor(hits), torch.tensor(count), config, length)
    return stage


def entries(stage: Tensor) -> dict[str, float]:
    return {name: float(value) for name, value in curriculum.read(stage)._asdict().items()}


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("uniform", [0.25, 0.25, 0.25, 0.25, 0, 0, 0, 0]),
        ("gated", [0.25, 0.25, 0.25, 0.25, 0, 0, 0, 0]),
        ("mixed", [0.8 / 4 + 0.2 / 8] * 4 + [0.2 / 8] * 4),
        ("fixed", [0, 0, 0, 0, 0, 0, 0, 1]),
        ("mostly", [0.2 / 4] * 4 + [0, 0, 0, 0.8]),
    ],
)
@pytest.mark.parametrize("limit", [4, torch.tensor(4)])
def test_curriculum_lengths_follow_their_kind(kind, expected, limit):
    assert counts(CurriculumConfig(kind=kind), limit, 8) == pytest.approx(expected, abs=0.01)


def test_curriculum_mixed_samples_do_not_depend_on_the_limit():
    """Who is drawn from the full range is decided by the key alone."""
    config = CurriculumConfig(kind="mixed")
    one, two = (curriculum.lengths(KEYS, limit, config, 8) for limit in (1, 2))
    assert one[two > 2].tolist() == two[two > 2].tolist()


@pytest.mark.parametrize(("kind", "longest"), [("uniform", 8), ("fixed", 8), ("mostly", 8), ("gated", 3), ("mixed", 3)])
def test_curriculum_first_stage(kind, longest):
    stage = curriculum.first(CurriculumConfig(kind=kind, start=3), 8)
    assert stage.dtype == torch.float32 and stage.ndim == 1
    assert entries(stage) == {"longest": longest, "hits": 0, "count": 0, "age": 0, "promotions": 0, "accuracy": 0}
    limit = curriculum.limit(stage)
    assert limit.dtype == torch.int64 and limit.item() == longest
    assert curriculum.limit(curriculum.first(CurriculumConfig(kind=kind, start=99), 8)).item() == 8


def test_curriculum_promotion_is_decided_by_the_longest_samples():
    stage = curriculum.first(GATED, 8)
    assert curriculum.on_longest(torch.tensor([1, 2, 3, 2]), stage).tolist() == [False, True, False, True]


@pytest.mark.parametrize("kind", ["gated", "mixed"])
@pytest.mark.parametrize(
    ("steps", "longest"),
    [
        ([(9, 10)] * 9, 2),  # the window is not over
        ([(9, 10)] * 10, 3),
        ([(9, 10)] * 9 + [(8, 10)], 2),  # one answer too few
        ([(0, 0)] * 10, 2),  # no sample of the longest length
        ([(0, 0)] * 9 + [(1, 1)], 3),  # samples count, not steps
        ([(0, 10)] * 10 + [(10, 10)] * 10, 3),  # the old window is forgotten
        ([(10, 10)] * 15 + [(0, 10)] * 5, 3),
        ([(10, 10)] * 20, 4),
        ([(10, 10)] * 500, 8),  # and no further
    ],
)
def test_curriculum_promotion_needs_accuracy(kind, steps, longest):
    config = dataclasses.replace(GATED, kind=kind)
    end = entries(run(curriculum.first(config, 8), steps, config))
    assert end["longest"] == longest and end["promotions"] == longest - 2


def test_curriculum_stage_has_a_minimum_age():
    config = dataclasses.replace(GATED, min_steps=25)
    ages = []
    stage = curriculum.first(config, 8)
    for step in range(1, 100):
        before = curriculum.limit(stage).item()
        stage = run(stage, [(1, 1)], config)
        ages += [step] if curriculum.limit(stage).item() > before else []
    assert ages == [30, 60, 90]


def test_curriculum_stage_entries():
    stage = run(curriculum.first(GATED, 8), [(10, 10)] * 10 + [(3, 4)] * 2, GATED)
    assert entries(stage) == {"longest": 3, "hits": 6, "count": 8, "age": 2, "promotions": 1, "accuracy": 1}


@pytest.mark.parametrize("kind", ["uniform", "fixed"])
def test_curriculum_without_stages_is_constant(kind):
    config = dataclasses.replace(GATED, kind=kind)
    stage = curriculum.first(config, 8)
    assert torch.equal(run(stage, [(10, 10)] * 50, config), stage)


def test_curriculum_stacked_stages_equal_single_ones():
    rng_ = torch.Generator().manual_seed(0)
    stages = [curriculum.first(dataclasses.replace(GATED, start=start), 8) for start in (1, 2, 7)]
    stack = torch.stack(stages)
    rates = torch.tensor([0.85, 0.95, 1.0])
    moved = torch.func.vmap(lambda stage, hits, count: curriculum.advance(stage, hits, count, GATED, 8))
    for _ in range(60):
        count = torch.randint(0, 30, (3,), generator=rng_)
        hits = (count * rates).round().long()
        stack = moved(stack, hits, count)
        stages = [curriculum.advance(*entry, GATED, 8) for entry in zip(stages, hits, count, strict=True)]
    assert torch.equal(stack, torch.stack(stages))
    assert len(set(curriculum.limit(stack).tolist())) > 1
    drawn = torch.func.vmap(lambda stage: curriculum.lengths(KEYS[:99], curriculum.limit(stage), GATED, 8))(stack)
    for one, stage in zip(drawn, stages, strict=True):
        assert torch.equal(one, curriculum.lengths(KEYS[:99], curriculum.limit(stage), GATED, 8))


def test_curriculum_stage_resumes_from_a_copy():
    """All there is to know is in the tensor: a checkpoint that keeps it keeps the curriculum."""
    steps = [(7, 8), (8, 8), (3, 3)] * 40
    whole = run(curriculum.first(GATED, 8), steps, GATED)
    half = run(curriculum.first(GATED, 8), steps[:57], GATED)
    assert torch.equal(run(torch.tensor(half.tolist()), steps[57:], GATED), whole)
    assert entries(whole)["promotions"] > 0


def test_curriculum_samples_are_made_on_another_device_than_the_stage() -> None:
    """Checks read batches on the CPU while the stage is on a GPU. Fake tensors know devices, not numbers."""
    source = open_data(find("thinker")[0].preset("prefix")).train
    with FakeTensorMode():
        source.limit = lambda: torch.zeros((), dtype=torch.int64, device="cuda")
        batch = source.batch({"index": torch.arange(4)})
    assert {value.device.type for value in batch.values()} == {"cpu"}
