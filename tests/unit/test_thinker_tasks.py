"""Generated tasks: exact answers, honest masks, and samples that depend on their counters alone."""

import itertools
import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from helpers import NoHost
from torch import Tensor

from seedbed.config import Config
from seedbed.data.feed import Feed
from seedbed.data.limiting import limited
from seedbed.errors import UserError
from seedbed.recipes.thinker import addition, tasks
from seedbed.recipes.thinker.addition import Addition
from seedbed.recipes.thinker.data import TaskSource, open_data
from seedbed.recipes.thinker.presets import CurriculumConfig, DataConfig, ModelConfig
from seedbed.recipes.thinker.task import Task
from seedbed.recipes.thinker.tasks import find_task, task_names, trivial_baselines

FIXTURES = Path(__file__).parents[3] / "shared" / "data" / "chomsky_fixtures.json"
# Every task, addition also in other bases and with pairs held out.
CASES = {name: DataConfig(task=name) for name in task_names()} | {
    "add2": DataConfig(task="add2", max_value=100),
    "add held": DataConfig(task="add", base=10, max_value=200, held=0.2),
    "mirrored 256": DataConfig(task="mirrored", vocab=256, length=15),
}
CHOMSKY = ["reverse_string", "duplicate_string", "odds_first", "bucket_sort", *tasks.OTHERS]


def opened(data: DataConfig, seed: int = 1, **changes):
    return open_data(Config(model=ModelConfig(), data=replace(data, **changes), seed=seed))


def rows(batch: dict[str, Tensor], task: Task):
    """Each sample without PAD: what was asked, what is answered, and which tokens of the answer count."""
    for x, y, keep in zip(batch["x"].tolist(), batch["y"].tolist(), batch["keep"].tolist(), strict=True):
        inside = [i for i, token in enumerate(y) if token != task.pad]
        yield [token for token in x if token != task.pad], [y[i] for i in inside], [keep[i] for i in inside]


def expected(task: Task, x: list[int], y: list[int]) -> tuple[list[int], list[bool]]:
    """The reference answer and what counts of it."""
    if task.name == "mirrored":
        half = len(y) // 2
        return task.target(y[:half]), [i >= half for i in range(len(y))]
    if task.name == "binary_addition":
        answer = task.target(x)
        return answer, [i <= answer.index(2) for i in range(len(answer))]
    return task.target(x), [True] * len(y)


def assert_same(one: dict[str, Tensor], two: dict[str, Tensor]) -> None:
    assert one.keys() == two.keys()
    for name in one:
        assert torch.equal(one[name], two[name]), name


def assert_even(values: Tensor, num: int) -> None:
    count = torch.bincount(values.flatten(), minlength=num).double()
    assert len(count) == num
    mean = values.numel() / num
    assert (((count - mean) ** 2 / mean).sum() - num) < 5 * (2 * num) ** 0.5 + 5


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("part", ["train", "valid", "longest", "one", "two", "longer"])
def test_task_answers_equal_the_reference(case, part):
    data = opened(CASES[case])
    source = {"train": data.train, "valid": data.valid}.get(part) or data.train.at(
        {"longest": data.train.length, "one": 1, "two": 2, "longer": data.train.length + 3}[part]
    )
    for x, y, keep in rows(source.make(torch.arange(400), 3), source.task):
        assert (y, keep) == expected(source.task, x, y), x


@pytest.mark.parametrize("case", CASES)
def test_task_samples_and_masks_are_consistent(case):
    source = opened(CASES[case]).train
    task, shape, batch = source.task, source.shape, source.make(torch.arange(2000), 1)
    x, y, keep, learn, length = (batch[name] for name in ("x", "y", "keep", "learn", "length"))
    assert x.shape == (2000, shape.num_in) and y.shape == keep.shape == learn.shape == (2000, shape.num_out)
    assert x.dtype == y.dtype == length.dtype == torch.int64 and keep.dtype == learn.dtype == torch.bool
    assert sorted(set(length.tolist())) == list(range(1, source.length + 1))
    assert torch.equal(learn, y != task.pad) and not (keep & ~learn).any() and keep.any(-1).all()
    assert x.min() >= 0 and x.max() < shape.vocab and y[learn].min() >= 0 and y[learn].max() < shape.symbols
    # No PAD inside: answers begin at the left, inputs of additions end at the right, others begin at the left.
    assert (learn.int().diff(dim=-1) <= 0).all()
    there = (x != task.pad).int()
    assert ((there.diff(dim=-1) >= 0) if isinstance(task, Addition) else (there.diff(dim=-1) <= 0)).all()
    if not isinstance(task, Addition) and case[:8] != "mirrored":
        assert torch.equal(there.sum(-1), length)


@pytest.mark.parametrize("case", CASES)
def test_task_samples_do_not_depend_on_padding(case):
    source = opened(CASES[case]).train
    task, index = source.task, torch.arange(100)
    length_B = source.make(index, 1)["length"]
    tight, roomy = (task.make(index * 7, length_B, task.shape(source.length + more)) for more in (0, 3))
    for small, large in zip(tight, roomy, strict=True):
        for a, b in zip(small.tolist(), large.tolist(), strict=True):
            if isinstance(a[0], bool):
                assert [i for i, on in enumerate(a) if on] == [i for i, on in enumerate(b) if on]
            else:
                assert [token for token in a if token != task.pad] == [token for token in b if token != task.pad]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("kind", ["uniform", "gated", "mixed", "fixed", "mostly"])
def test_task_vmap_equals_separate_calls(case, kind):
    source = opened(CASES[case], curriculum=CurriculumConfig(kind=kind)).train
    index, seeds, limits = torch.arange(40), torch.tensor([0, 3, 2**31]), torch.tensor([1, 2, source.length])
    packed = torch.func.vmap(source.make, (None, 0, 0))(index, seeds, limits)
    for replica in range(3):
        alone = source.make(index, int(seeds[replica]), limits[replica])
        assert_same({name: value[replica] for name, value in packed.items()}, alone)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("kind", ["uniform", "mixed"])
def test_task_has_no_host_sync(case, kind):
    data = opened(CASES[case], curriculum=CurriculumConfig(kind=kind))
    index, seed, limit = torch.arange(8), torch.tensor(1), torch.tensor(2)
    for source in (data.train, data.valid):
        with NoHost():
            source.make(index, seed, limit)


@pytest.mark.parametrize("case", CASES)
def test_task_batch_is_a_function_of_counters_and_seed(case):
    source = opened(CASES[case], seed=5).train
    whole = source.batch({"index": torch.arange(64)})
    again = opened(CASES[case], seed=5).train
    for start in (0, 16, 48):
        part = again.batch({"index": torch.arange(start, start + 16)})
        assert_same(part, {name: value[start : start + 16] for name, value in whole.items()})
    other = opened(CASES[case], seed=6).train.batch({"index": torch.arange(64)})
    assert not torch.equal(whole["y"], other["y"])


def test_task_training_and_evaluation_streams_differ():
    """Even where the seeds are equal; and every run is judged on the same samples."""
    data, other = opened(DataConfig(length=20), seed=0), opened(DataConfig(length=20), seed=9)
    index = {"index": torch.arange(200)}
    train, valid = data.train.at(20).batch(index), data.valid.at(20).batch(index)
    assert not (train["x"].unsqueeze(0) == valid["x"].unsqueeze(1)).all(-1).any()
    assert_same(data.valid.batch(index), other.valid.batch(index))


@pytest.mark.parametrize("name", CHOMSKY)
def test_task_equals_the_published_sampler(name):
    if not FIXTURES.exists():
        pytest.skip(f"{FIXTURES.name} is not there")
    found = json.loads(FIXTURES.read_text())
    task = find_task(name)
    cases = found[name] if name in found else found[f"{name}_string"]
    for case in cases:
        answer, counted = expected(task, case["input"], case["output"])
        assert (answer, counted) == (case["output"], [bool(c) for c in case["counted"]]), case["input"]
        shape = task.shape(case["length"])
        assert (shape.num_in, shape.num_out) == (len(case["input"]), len(case["output"]))
        assert max(case["input"] + case["output"]) < task.symbols


LITERALS = {
    "copy": ([3, 1, 4], [3, 1, 4]),
    "flip": ([3, 1, 4], [4, 1, 3]),
    "roll": ([5, 1, 4, 9], [9, 5, 1, 4]),  # 5 mod 4 places to the right
    "roll_num": ([15, 1, 4], [14, 0, 3]),
    "cumsum": ([9, 9, 1], [9, 2, 3]),
    "prefix": ([1, 1, 0, 1], [1, 0, 0, 1]),
    "odds_first": ([1, 1, 0], [1, 1, 0]),  # the published code, not its description, which would give 1 0 1
    "missing_duplicate": ([0, 1, 2, 1, 3], [0]),
    "binary_addition": ([1, 1, 2, 1], [0, 0, 1, 2, 0]),
    "mirrored": ([7, 8], [7, 8, 8, 7, 16]),
}


@pytest.mark.parametrize("name", LITERALS)
def test_task_reference_by_hand(name):
    x, y = LITERALS[name]
    assert find_task(name).target(x) == y


@pytest.mark.parametrize("case", CASES)
def test_task_examples_and_sizes(case):
    data = opened(CASES[case])
    x, y = data.facts["example"].removeprefix("x: ").split(" -> y: ")
    assert x and y and "PAD" not in data.facts["example"]
    shape = data.train.shape
    assert [data.facts[name] for name in ("num_in", "num_out", "vocab", "symbols")] == list(vars(shape).values())
    assert json.loads(json.dumps(data.facts)) == data.facts


def test_task_examples_are_readable():
    added = re.fullmatch(r"x: base-16 @ (.+) \+ (.+) = base-16 -> y: (.+)", opened(DataConfig(task="add16")).facts["example"])
    assert added
    a, b, total = (addition._value([int(digit) for digit in part.split()], 16) for part in added.groups())
    assert a + b == total
    mirrored = opened(DataConfig(task="mirrored")).facts["example"]
    assert mirrored.startswith("x: BOS -> y: ") and mirrored.endswith(" EOS")


# Chomsky tasks: how inputs are drawn.


def made(name: str, length: int, num: int = 20_000) -> Tensor:
    return opened(DataConfig(task=name, length=length)).train.at(length).make(torch.arange(num), 1)["x"]


@pytest.mark.parametrize("length", [3, 4, 6, 12])
def test_binary_addition_operands_are_positive_and_uniform(length):
    x = made("binary_addition", length)
    assert ((x == 2).sum(-1) == 1).all()
    cut = (x == 2).int().argmax(-1)
    assert_even(cut - 1, length - 2)
    for width in range(1, length - 1):
        first, second = x[cut == width][:, :width], x[cut == length - 1 - width][:, length - width :]
        for bits in (first, second):
            value = (bits << torch.arange(width)).sum(-1)
            assert value.min() >= 1
            assert_even(value - 1, 2**width - 1)


def test_binary_addition_without_room_for_two_numbers():
    assert (made("binary_addition", 1, 50) == 0).all()
    value = (made("binary_addition", 2) << torch.arange(2)).sum(-1)
    assert_even(value, 3)


def test_binary_addition_long_operands_are_random_bits():
    x = made("binary_addition", 500, 2000)
    assert abs(x[x < 2].double().mean() - 0.5) < 0.01
    one_bit_long = x[:, -1][x[:, -2] == 2]
    assert len(one_bit_long) and (one_bit_long == 1).all()


def test_binary_addition_carries_reach_any_distance():
    number = torch.arange(64)
    bit = number.unsqueeze(-1) >> torch.arange(8) & 1
    total = tasks._sum(bit.unsqueeze(0).expand(64, 64, 8), bit.unsqueeze(1).expand(64, 64, 8), torch.arange(8))
    assert torch.equal((total << torch.arange(8)).sum(-1), number + number.unsqueeze(-1))
    ones, one = torch.ones(1, 501, dtype=torch.int64), torch.zeros(1, 501, dtype=torch.int64)
    ones[:, -1], one[:, 0] = 0, 1
    assert tasks._sum(ones, one, torch.arange(501)).nonzero().tolist() == [[0, 500]]


def test_binary_addition_long_operands_are_never_zero():
    words = torch.zeros(1, 40, dtype=torch.int64)
    assert tasks._number(torch.zeros(1, 1, dtype=torch.int64), words, torch.tensor([[30]])).sum() == 1


@pytest.mark.parametrize("length", [2, 5, 8])
def test_missing_duplicate_masks_every_position(length):
    x = made("missing_duplicate", length)
    assert_even((x == 2).int().argmax(-1), length // 2 * 2)
    assert (x[:, -1] == 3).all() == (length % 2 == 1)


# Addition: layout, and pairs held out.


def test_addition_layout():
    task = find_task("add16")
    at, plus, equals, base = (task.operator(name) for name in task.operators)
    made = task.write(torch.tensor([0x3E7, 0]), torch.tensor([5, 0]), task.shape(3))
    pad = task.pad
    assert made.x_BN.tolist() == [
        [pad, pad, base, at, 7, 14, 3, plus, 5, equals, base],
        [pad, pad, pad, pad, base, at, 0, plus, 0, equals, base],
    ]
    assert made.y_BM.tolist() == [[12, 14, 3, pad], [0, pad, pad, pad]]


@pytest.mark.parametrize("base", range(2, 17))
def test_addition_all_pairs_once_and_right_in_every_base(base):
    data = opened(DataConfig(task="add", base=base, max_value=40, held=0.1))
    source, task = data.valid, data.valid.task
    assert source.num_pairs == 1600
    seen = []
    for start, count in ((0, 700), (700, 900)):
        batch = source.all_pairs(start, count)
        assert batch["index"].tolist() == list(range(start, start + count))
        for x, y, keep in rows(batch, task):
            assert (y, keep) == expected(task, x, y)
            plus, equals = x.index(task.operator("+")), x.index(task.operator("="))
            seen.append(tuple(addition._value(part, base) for part in (x[2:plus], x[plus + 1 : equals])))
    assert seen == list(itertools.product(range(40), repeat=2))
    digits = [max(len(str_in(v, base)) for v in pair) for pair in seen]
    assert source.all_pairs(0, 1600)["length"].tolist() == digits


def str_in(value: int, base: int) -> list[int]:
    return [value % base] + (str_in(value // base, base) if value >= base else [])


def pair_numbers(source: TaskSource, batch: dict[str, Tensor]) -> Tensor:
    """The number of each sample's pair, read back from its tokens."""
    task = source.task
    assert isinstance(task, Addition)
    found = []
    for x, _, _ in rows(batch, task):
        plus, equals = x.index(task.operator("+")), x.index(task.operator("="))
        a, b = (addition._value(part, task.base) for part in (x[2:plus], x[plus + 1 : equals]))
        found.append(a * task.max_value + b)
    return torch.tensor(found)


@pytest.mark.parametrize("held", [0.05, 0.1, 0.5, 0.8])
@pytest.mark.parametrize("miss", [None, 0.9999])
def test_addition_held_out_pairs_are_for_evaluation_only(monkeypatch, held, miss):
    if miss:
        monkeypatch.setattr(addition, "MISS", miss)  # one candidate: most samples take the last resort
    data = opened(DataConfig(task="add", max_value=60, held=held))
    is_held = data.train.all_pairs(0, 3600)["held"]
    assert torch.equal(is_held.view(60, 60), is_held.view(60, 60).T)
    assert abs(is_held.double().mean() - held) < 0.04
    index = torch.arange(2500)
    shown = pair_numbers(data.train, data.train.make(index, 1))
    judged = pair_numbers(data.valid, data.valid.make(index, 0))
    assert not is_held[shown].any() and is_held[judged].all()


def test_addition_training_pairs_are_uniform():
    data = opened(DataConfig(task="add", max_value=30, held=0.3))
    is_held = data.train.all_pairs(0, 900)["held"]
    for source, fits in ((data.train, ~is_held), (data.valid, is_held)):
        source = source.at(source.length)
        drawn = pair_numbers(source, source.make(torch.arange(8000), 1))
        place = fits.long().cumsum(0) - 1
        assert_even(place[drawn], int(fits.sum()))


def test_addition_takes_the_first_valid_candidate(monkeypatch):
    """So that no sample changes when more candidates are allowed."""
    source = opened(DataConfig(task="add16", held=0.5)).train
    as_trained = source.make(torch.arange(500), 1)
    monkeypatch.setattr(addition, "MISS", 1e-9)
    assert_same(source.make(torch.arange(500), 1), as_trained)


def test_addition_held_out_pairs_do_not_depend_on_seed_or_range():
    one, two = opened(DataConfig(task="add16", held=0.1), seed=1), opened(DataConfig(task="add16", held=0.1), seed=2)
    number = torch.arange(10_000)
    assert torch.equal(one.train.all_pairs(0, 10_000)["held"], two.valid.all_pairs(0, 10_000)["held"])
    narrow = find_task("add", max_value=100, held=0.1)
    assert torch.equal(narrow.is_held(*narrow.pairs(number)), one.train.task.is_held(*narrow.pairs(number)))
    assert not opened(DataConfig(task="add16")).train.all_pairs(0, 10_000)["held"].any()


def test_addition_digits_bound_the_operands():
    source = opened(DataConfig(task="add16", max_value=1000)).train
    for digits, end in {1: 16, 2: 256, 3: 1000}.items():
        drawn = pair_numbers(source, source.at(digits).make(torch.arange(5000), 1))
        largest = max(int((drawn // 1000).max()), int((drawn % 1000).max()))
        assert 0.98 * end - 1 <= largest < end


# Names and settings.

WRONG = [
    (dict(name="flop"), "no task 'flop'; did you mean flip"),
    (dict(name="cumsun"), "did you mean cumsum"),
    (dict(name="add17"), "no task 'add17'"),
    (dict(name="add1"), "no task 'add1'"),
    (dict(name=""), "there are: copy"),
    (dict(name="flip", held=0.1), "only addition"),
    (dict(name="missing_duplicate_string"), "did you mean missing_duplicate"),
]


@pytest.mark.parametrize(("settings", "message"), WRONG)
def test_task_settings_out_of_range_are_refused(settings, message):
    with pytest.raises(UserError, match=message):
        find_task(**settings)


def test_addition_without_training_pairs_is_refused():
    with pytest.raises(UserError, match="hold less"):
        opened(DataConfig(task="add2", max_value=2, held=0.9))


def test_addition_with_too_many_digits_is_refused():
    with pytest.raises(UserError, match="too large"):
        opened(DataConfig(task="add16")).train.at(8)


def test_addition_base_in_the_name_wins():
    assert find_task("add7", base=3).symbols == 7 and find_task("add", base=3).symbols == 3


CHANGES = [
    dict(task="copy"),
    dict(length=11),
    dict(vocab=17),
    dict(base=7),
    dict(max_value=9),
    dict(curriculum=CurriculumConfig(kind="gated")),
    dict(curriculum=CurriculumConfig(share=0.3)),
]


def test_fingerprint_distinguishes_settings():
    prints = [opened(DataConfig(), **change).facts["fingerprint"] for change in [{}, *CHANGES]]
    assert len(set(prints)) == len(prints)
    assert prints[0] == opened(DataConfig(), seed=7, test=5).facts["fingerprint"]


# The source inside the feed.


def test_feed_equals_the_source():
    source = opened(DataConfig(), seed=4).train
    feed = Feed(source, batch=8, parts=2, seed=0, device=torch.device("cpu"))
    feed.load(24)
    assert feed.tier == "generated"
    assert_same(feed.part(1), source.make(torch.arange(28, 32), 4))


def test_source_first_repeats_its_samples():
    data = opened(DataConfig())
    part = limited(data, replace(Config(model=None, data=None).limit, train=5)).train
    first = data.train.make(torch.arange(5), 1)
    assert_same(part.make(torch.arange(10, 15), 1), first)
    assert_same(part.batch({"index": torch.arange(10, 15)}), first)
    assert_same(part.first(9).make(torch.arange(5, 10), 1), first)
    assert_same(data.train.first(9).make(torch.arange(9, 14), 1), first)


def test_source_limit_is_read_for_every_batch():
    source = opened(DataConfig(curriculum=CurriculumConfig(kind="gated"))).train
    stage = torch.tensor(1)
    source.limit = lambda: stage
    raw = {"index": torch.arange(500)}
    assert source.batch(raw)["length"].max() == 1
    stage.fill_(4)
    assert source.batch(raw)["length"].max() == 4
    assert source.at(9).batch(raw)["length"].min() == 9


# Answers without thought.


def test_baselines_of_copying_a_running_sum():
    source = opened(DataConfig(task="cumsum")).train.at(10)
    found = trivial_baselines(source.make(torch.arange(40_000), 1))
    assert abs(found["copy_token"] - (1 + 9 / 16) / 10) < 0.002
    assert found["copy_exact"] < 0.001 and abs(found["commonest_token"] - 1 / 16) < 0.005


def test_baselines_by_hand():
    y = torch.tensor([[0, 1, 2], [0, 1, 9], [1, 1, 9], [2, 0, 9]])
    batch = {"x": torch.tensor([[0, 1], [0, 1], [0, 9], [2, 0]]), "y": y, "keep": y != 9}
    found = trivial_baselines(batch)
    assert found == pytest.approx(
        {
            "copy_token": 6 / 9,  # the third place has no input to copy
            "copy_exact": 2 / 4,
            "commonest_token": 4 / 9,
            "commonest_exact": 1 / 4,
            "per_position_token": 6 / 9,
            "per_position_exact": 2 / 4,
        }
    )


def test_baselines_ignore_masked_positions():
    batch = opened(DataConfig()).train.make(torch.arange(500), 1)
    other = {**batch, "y": torch.where(batch["keep"], batch["y"], 0)}
    assert trivial_baselines(batch) == trivial_baselines(other)


@pytest.mark.parametrize("breach", [lambda x: x.sum().item(), lambda x: x[x > 0], lambda x: x + torch.tensor(1), torch.nonzero])
def test_capture_check_detects_breaches(breach):
    with pytest.raises(AssertionError), NoHost():
        breach(torch.arange(3))
