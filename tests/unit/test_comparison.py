"""Verdicts on runs: equal ones are not called better or worse, true differences are found, other tasks are not compared."""

import math
import random
import tomllib
from pathlib import Path

import pytest
from track_samples import make

from seedbed.report import comparison, facts
from seedbed.report.comparison import Curve, compare, judge, quantile
from seedbed.track import events
from seedbed.track.run import Run

SRC = Path(comparison.__file__).parents[1]
NUM_PAIRS = 200
# Of seeds and of single evaluations, in units of the metric.
SEED, JITTER = 0.02, 0.006


def simulated(rng: random.Random, shift: float = 0.0, last: int = 2000, every: int = 100) -> Curve:
    """A falling evaluation whose level depends on the seed and which fluctuates from one evaluation to the next."""
    own, speed = rng.gauss(0.0, SEED), math.exp(rng.gauss(0.0, 0.02))
    steps = range(0, last + 1, every)
    level = 1.5 + shift + own
    return Curve(tuple(steps), tuple(level + 3 * (1 + step * speed / 60) ** -0.8 + rng.gauss(0, JITTER) for step in steps))


def flipped(group: list[Curve], higher: bool) -> list[Curve]:
    """The same curves as they are of a metric of which more is better."""
    return [Curve(one.x, tuple(-y if higher else y for y in one.y)) for one in group]


# Seeds of the one and of the other; then how the other one differs in what must not matter.
CASES = {
    "one seed each": (1, 1, {}),
    "two seeds each": (2, 2, {}),
    "three seeds each": (3, 3, {}),
    "a baseline of three seeds": (1, 3, {}),
    "a baseline of two seeds that trained longer": (1, 2, {"last": 4000}),
    "evaluated twice as often": (3, 3, {"every": 50}),
    "evaluated at other steps": (4, 3, {"every": 70, "last": 2100}),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("higher", [False, True])
def test_equal_runs_are_called_different_in_at_most_5_percent(case: str, higher: bool) -> None:
    num_mine, num_base, how = CASES[case]
    rng, words = random.Random(case), []
    for _ in range(NUM_PAIRS):
        mine = [simulated(rng) for _ in range(num_mine)]
        base = [simulated(rng, **how) for _ in range(num_base)]
        words.append(judge(flipped(mine, higher), flipped(base, higher), higher).word)
    assert words.count("better") + words.count("worse") <= 0.05 * NUM_PAIRS
    if (num_mine, num_base) == (1, 1):
        assert set(words) == {"equal", "unknown"}, "one seed each cannot show more than the noise of evaluations"
    else:
        assert words.count("equal") >= 0.95 * NUM_PAIRS


@pytest.mark.parametrize(("num_mine", "num_base"), [(3, 3), (1, 5), (5, 1), (2, 4)])
@pytest.mark.parametrize("higher", [False, True])
def test_runs_that_differ_by_eight_deviations_are_told_apart(num_mine: int, num_base: int, higher: bool) -> None:
    rng, words = random.Random(num_mine), []
    for _ in range(NUM_PAIRS):
        groups = [simulated(rng, -8 * SEED) for _ in range(num_mine)], [simulated(rng) for _ in range(num_base)]
        words.append(judge(*(flipped(group, higher) for group in groups), higher).word)
    assert words.count("better") >= 0.9 * NUM_PAIRS
    assert "better" not in words or "worse" not in words


def test_a_difference_that_seeds_explain_is_equal_and_one_seed_alone_is_unknown() -> None:
    flat = [Curve((0, 10, 20, 30, 40), (3.0, *[1.0 + shift] * 4)) for shift in (0.0, 0.1, 0.2, 0.05)]
    assert judge([flat[3], flat[0]], [flat[1], flat[2]], False).word == "equal"
    found = judge([flat[0]], [flat[1]], False)
    assert found.word == "unknown" and "one seed: unknown" in found.why
    assert judge([flat[0]], [flat[0]], False).word == "equal"


def test_only_the_shared_range_counts() -> None:
    """A run that has trained twice as long is not better for it."""
    short = [Curve((0, 100, 200), (3.0, 2.0, 1.5 + d)) for d in (0.0, 0.001, -0.001)]
    long = [Curve((0, 100, 200, 300, 400), (3.0, 2.0, 1.5 + d, 1.2, 1.0)) for d in (0.0, 0.001, -0.001)]
    found = judge(long, short, False)
    assert (found.word, found.end, found.num_seeds) == ("equal", 200, (3, 3))
    assert judge([Curve((0,), (3.0,))], short, False).word == "unknown"
    assert judge([Curve((), ())], short, False).word == "unknown"


def test_seeds_that_have_not_come_so_far_are_left_out() -> None:
    whole = Curve((0, 100, 200), (3.0, 2.0, 1.5))
    begun = Curve((0, 100), (3.0, 2.0))
    assert judge([whole, begun, whole], [whole, whole, Curve((), ())], False).num_seeds == (2, 2)


def test_noise_of_evaluations_has_no_trend_in_it() -> None:
    steps = tuple(range(0, 2001, 100))
    assert Curve(steps, tuple(5.0 - step / 1000 for step in steps)).fluctuation(2000)[0] == pytest.approx(0.0, abs=1e-9)
    rng, found = random.Random(0), []
    for _ in range(400):
        noisy = Curve(steps, tuple(5.0 - step / 1000 + rng.gauss(0, 0.01) for step in steps))
        found.append(noisy.fluctuation(2000)[0] ** 2)
    assert math.sqrt(sum(found) / len(found)) == pytest.approx(0.01, rel=0.1)


def test_quantiles_are_those_of_students_t() -> None:
    known = {1: 31.821, 5: 3.365, 10: 2.764, 11: 2.718, 15: 2.602, 20: 2.528, 30: 2.457, 100: 2.364}
    assert {num: quantile(num) for num in known} == pytest.approx(known, rel=3e-3)


def test_curves_are_interpolated_and_end_at_their_ends() -> None:
    curve = Curve((0, 10, 30), (4.0, 2.0, 1.0))
    assert [curve.at(x) for x in (-5, 0, 5, 10, 20, 30, 99)] == [4.0, 4.0, 3.0, 2.0, 1.5, 1.0, 1.0]


# ---- runs on disk -----------------------------------------------------------------------------------------------------------


def trained(root: Path, name: str, *settings: str, level: float = 1.0, metric: str = "loss", **facts) -> Run:
    """A run that is done, with five evaluations."""
    more = facts.pop("more", {})
    run = make(root, name, *settings, **facts)
    for step in range(0, 500, 100):
        run.event(step, "eval", **{metric: level + 1.0 / (step + 50), **more}, best=True, seconds=step * 0.01)
    run.set_status("done", step=400, last_step=400)
    run.close()
    return run


def verdict(mine: Run, base: Run, **options) -> comparison.Outcome:
    return compare(mine, base, comparison.read_runs(mine.path.parent), **options)


def groups(root: Path, apart: float, **how) -> tuple[Run, Run]:
    """Three seeds of a baseline, and three of another learning rate whose values are `apart` from them."""
    for seed in range(3):
        trained(root, f"base-{seed}", f"seed={seed}", level=1.0 + 0.01 * seed, **how)
        trained(root, f"other-{seed}", f"seed={seed}", "optim.lr=0.5", level=1.0 + apart + 0.01 * seed, **how)
    return Run(root / "other-0"), Run(root / "base-0")


def test_seeds_are_runs_whose_config_differs_in_the_seed_only(tmp_path: Path) -> None:
    mine, base = groups(tmp_path / "runs", -0.5)
    trained(tmp_path / "runs", "stranger", "seed=7", "optim.lr=0.25", level=9.0)
    (make(tmp_path / "runs", "hurt").path / "config.json").write_text("{")
    found = verdict(mine, base)
    assert (found.word, found.num_seeds, found.metric) == ("better", (3, 3), "loss")
    assert found.change == pytest.approx(-0.5) and found.band == pytest.approx(3.747 * 0.01 * math.sqrt(2 / 3))
    assert verdict(base, mine).word == "worse"
    assert verdict(mine, base, axis="seconds").word == "better"


def test_direction_of_a_metric_decides_what_is_better(tmp_path: Path) -> None:
    mine, base = groups(tmp_path / "runs", -0.5, metric="reward", more={"higher_is_better": ["reward"], "error": 1.0})
    assert verdict(mine, base).word == "worse"
    assert verdict(mine, base, metric="error").word == "equal"
    assert facts.best(mine.events()) == (0, pytest.approx(0.52)) and facts.best(mine.events(), "error") == (0, 1.0)
    missing = verdict(mine, base, metric="psnr")
    assert missing.word == "unknown" and "same metric" in missing.why


@pytest.mark.parametrize(
    ("settings", "facts", "why"),
    [
        (["data.source=another"], {}, "another task: data.source differs"),
        ([], {"recipe": "flow"}, "another recipe: flow and gpt"),
        ([], {"metric": "nats"}, "no evaluation of the same metric"),
    ],
)
def test_what_is_not_comparable_is_unknown(tmp_path: Path, settings: list[str], facts: dict, why: str) -> None:
    base = trained(tmp_path / "runs", "base")
    found = verdict(trained(tmp_path / "runs", "mine", *settings, level=0.1, **facts), base)
    assert (found.word, found.why) == ("unknown", why)


@pytest.mark.parametrize("recipe", ["ebt", "flow", "gpt", "thinker", "world"])
def test_recipes_and_their_sentences_agree_on_which_metrics_are_to_be_high(recipe: str) -> None:
    """`seedbed explain` says it where training and reports follow it, and nowhere else."""
    import importlib

    from seedbed.train.system import System, maximized

    for module in {"ebt": ["denoise.system", "system"], "world": ["system"]}.get(recipe, ["system"]):
        importlib.import_module(f"seedbed.recipes.{recipe}.{module}")
    found, open_classes = set[type[System]](), [System]
    while open_classes:
        open_classes += (below := open_classes.pop().__subclasses__())
        found |= {one for one in below if one.__module__.startswith(f"seedbed.recipes.{recipe}.")}
    sentences = tomllib.loads((SRC / "recipes" / recipe / "metrics.toml").read_text())
    names = [name.replace("*", "4") for name in sentences]
    declared = {name for one in found for name in maximized(one, dict.fromkeys(names, 0.0))}  # type: ignore[arg-type]
    assert found and declared == {n for n, about in zip(names, sentences.values(), strict=True) if "higher is better" in about}
    for name in names:
        assert not events.is_score(name) or name in declared


def test_another_seed_of_the_same_settings_is_equal_unless_the_code_differs(tmp_path: Path) -> None:
    root = tmp_path / "runs"
    for seed in range(3):
        trained(root, f"a-{seed}", f"seed={seed}", level=1.0 + 0.01 * seed)
        trained(root, f"b-{seed}", f"seed={seed}", level=0.2 + 0.01 * seed, code={"version": "1", "commit": "f" * 40})
    assert verdict(Run(root / "a-1"), Run(root / "a-0")).word == "equal"
    found = verdict(Run(root / "b-0"), Run(root / "a-0"))
    assert (found.word, found.num_seeds) == ("better", (3, 3))


def test_journal_names_the_verdict_at_equal_time_where_it_differs(tmp_path: Path) -> None:
    root = tmp_path / "runs"
    for seed in range(3):
        for name, lr, level, pace in (("base", 0.1, 1.0, 0.01), ("slow", 0.5, 0.9, 0.1)):
            run = make(root, f"{name}-{seed}", f"seed={seed}", f"optim.lr={lr}")
            for step in range(0, 500, 100):
                run.event(step, "eval", loss=level + 0.01 * seed + 2 * 0.5 ** (step / 100), best=True, seconds=step * pace)
            run.set_status("done", step=400, last_step=400)
    title, numbers = comparison.against(Run(root / "slow-0"), Run(root / "base-0"))
    assert title == "better than base-0" and "at step 400: outside the noise band" in numbers
    assert "; worse at equal time, 0:04: outside the noise band" in numbers
