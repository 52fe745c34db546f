"""plan: operations against torch's count, memory against arithmetic, money only from a dated file, nothing really allocated."""

import dataclasses
import json

import pytest
import torch
from torch import nn
from tune_toys import CPU, Regression, Rows, Talker, config, recipe, talker_recipe, workload

from seedbed.config import Optim
from seedbed.data.feed import Data
from seedbed.errors import UserError
from seedbed.track.flops import GPUS
from seedbed.tune import batch, plan
from seedbed.tune.estimate import estimate_costs
from seedbed.tune.plan import GIB, Prices, Rate, cost, make, read_prices

SHAPES = [{}, {"width": 64, "heads": 4}, {"vocab": 200, "length": 50}, {"width": 8, "heads": 1, "length": 3}]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_flops_formula_equals_count(shape: dict, precision: str) -> None:
    found = make(*_with_config(talker_recipe(**shape), config(precision=precision)))
    assert found.flops_difference == pytest.approx(0.0, abs=1e-9) and found.estimate.fake_tensors
    assert not any("formula" in note for note in found.notes)


def _with_config(made, cfg):
    return made[0], cfg, made[1]


@pytest.mark.parametrize(("wrong", "noted"), [(1.009, False), (1.02, True), (0.98, True), (0.5, True)])
def test_wrong_flops_formula_is_noted(wrong: float, noted: bool) -> None:
    found = make(*_with_config(talker_recipe(wrong=wrong), config()))
    assert found.flops_difference == pytest.approx(wrong - 1)
    assert any("flops_per_item() is wrong" in note for note in found.notes) == noted


def test_flops_count_replaces_a_missing_formula() -> None:
    toys = workload()
    found = make(toys.recipe, toys.config, toys.data)
    # Two products forward; backward one for each weight and one for the hidden layer, none for the input.
    assert found.estimate.flops_counted == 2 * (4 * 16) * 2 + 2 * 16 * 3
    assert found.flops_difference is None and all(c.hours > 0 for c in found.costs)


class Two(Regression):
    """Two players, each with its own backward pass through a shared input."""

    def __init__(self) -> None:
        super().__init__()
        self.other = nn.Linear(4, 1)

    def named_optimizers(self):
        return {"net": self.net, "other": self.other}

    def update(self, batch, engine):
        mine = self.net(batch["x"])
        engine.minimize(((mine - batch["y"]) ** 2).mean(), "net")
        engine.minimize(((self.other(batch["x"]) - mine.detach()) ** 2).mean(), "other")
        return {"loss": mine.detach().mean()}


def test_flops_of_several_optimizers_are_added() -> None:
    toys = workload(lambda c: Two())
    estimate = estimate_costs(toys.recipe, toys.config, toys.data)
    assert estimate.flops_counted == 2 * (4 * 16) * 2 + 2 * 16 * 3 + 2 * 4 * 2
    assert estimate.num_params == 4 * 16 + 16 + 16 + 1 + 4 + 1 and estimate.fake_tensors


@pytest.mark.parametrize(
    ("changes", "moments", "average"),
    [
        ({}, 2.0, 0.0),
        ({"ema": 0.9}, 2.0, 1.0),
        ({"optim": Optim(kind="muon")}, None, 0.0),
    ],
    ids=str,
)
def test_memory_of_the_state_is_exact(changes: dict, moments: float | None, average: float) -> None:
    toys = workload(**changes)
    estimate = estimate_costs(toys.recipe, toys.config, toys.data)
    num = 4 * 16 + 16 + 16 + 1
    assert (estimate.num_params, estimate.gradients, estimate.average) == (num, 4 * num, 4 * num * average)
    assert estimate.weights == 4 * (num + 1), "the saved buffer counts, the scratch one does not"
    real = toys.build().tensors()["optim"]
    assert estimate.moments == sum(t.numel() * 4 for t in real.values())
    if moments:
        assert estimate.moments - 4 * num * moments <= 8, "beside two moments only the counts"


def test_activation_memory_equals_saved_tensors() -> None:
    class Plain(Regression):
        def loss(self, batch, engine):
            return self.net(batch["x"]).square().mean(), {}

    toys = workload(lambda c: Plain())
    estimate = estimate_costs(toys.recipe, toys.config, toys.data)
    # Per item: the hidden layer after tanh (16) and the output for the square (1); input and weights are not activations.
    assert (estimate.per_item, estimate.fixed) == (4 * 17, 0)
    assert estimate.memory(part=10)["activations"] == 680


def test_memory_includes_micro_batches_and_data() -> None:
    toys = workload()
    one, four = (make(toys.recipe, dataclasses.replace(toys.config, accum=a), toys.data) for a in (1, 4))
    fixed, each = one.estimate.fixed, one.estimate.per_item
    assert one.memory["activations"] == fixed + 8 * each and four.memory["activations"] == fixed + 2 * each
    assert one.memory["data"] == 256 * 5 * 4 and one.needed > sum(one.memory.values())


def test_non_embedding_parameters_exclude_embedding_and_head() -> None:
    made, data = talker_recipe()
    estimate = estimate_costs(made, config(), data)
    assert estimate.num_non_embedding == 4 * 32 * 32 + 48 * 32, "an undeclared Linear is a matrix, wherever it stands"
    assert estimate.num_params == estimate.num_non_embedding + 48 * 32


def test_tied_weight_counts_once() -> None:
    class Tied(Talker):
        def __init__(self):
            super().__init__()
            self.head.weight = self.embed.weight

    _, data = talker_recipe()
    estimate = estimate_costs(recipe(lambda c, d: Tied(), None), config(), data)
    assert estimate.num_params == 4 * 32 * 32 + 48 * 32 and estimate.num_non_embedding == 4 * 32 * 32


def test_tokens_against_chinchilla() -> None:
    found = make(*_with_config(talker_recipe(), config(batch=4, steps=100)))
    tokens, num = found.tokens(), found.estimate.num_params
    assert tokens["per_item"] == 16 and tokens["seen"] == 6400 and tokens["unique"] == 640
    assert tokens["seen_per_parameter"] == pytest.approx(6400 / num) and tokens["chinchilla"] == 20 * num


class Asking(Regression):
    """Looks at a number on the way, which is not there on paper."""

    def loss(self, batch, engine):
        loss, extra = super().loss(batch, engine)
        return loss * (2.0 if loss.item() > 0 else 1.0), extra


def test_system_that_needs_real_values_is_run() -> None:
    plain, asking = workload(), workload(lambda c: Asking())
    found = make(asking.recipe, asking.config, asking.data)
    assert not found.estimate.fake_tensors and any("real values" in note for note in found.notes)
    assert found.estimate.flops_counted == estimate_costs(plain.recipe, plain.config, plain.data).flops_counted


class Wrong(Regression):
    def loss(self, batch, engine):
        raise KeyError("no such batch entry")


def test_recipe_errors_pass_through_the_estimate() -> None:
    toys = workload(lambda c: Wrong())
    with pytest.raises(KeyError, match="no such batch entry"):
        estimate_costs(toys.recipe, toys.config, toys.data)


class Huge(Regression):
    """Two billion parameters: 24 GB with gradients and moments, if they were real."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 32768), nn.Linear(32768, 32768), nn.Linear(32768, 32768), nn.Linear(32768, 1))


def test_estimate_allocates_nothing() -> None:
    batch.reset_peak(CPU)
    before = batch.peak_memory(CPU)
    toys = workload(lambda c: Huge())
    found = make(toys.recipe, toys.config, toys.data)
    assert found.estimate.num_params > 2e9 and found.estimate.fake_tensors
    assert batch.peak_memory(CPU) - before < 2**28
    fits = {c.gpu: c.fits for c in found.costs}
    assert not fits["RTX 4090"] and fits["A100"]


def test_estimate_restores_rng_and_mode() -> None:
    toys = workload()
    estimate_costs(toys.recipe, toys.config, toys.data)
    assert type(torch.zeros(2)) is torch.Tensor


# ---- hours and money --------------------------------------------------------------------------------------------------


def gpu(name: str):
    return next(g for g in GPUS if g.name == name)


def test_hours_are_operations_over_rate() -> None:
    cfg = config(batch=64, steps=1000)
    found = cost(gpu("H100 SXM"), GIB, 1e12, cfg, 0.4, Prices("2026-01-01", {"H100 SXM": 2.5}))
    assert found.hours == pytest.approx(1e12 * 64_000 / (989e12 * 0.4) / 3600)
    assert found.dollars == pytest.approx(2.5 * found.hours) and found.steps == 1000
    assert cost(gpu("A100"), GIB, 1e12, cfg, 0.4, Prices("2026-01-01", {"H100 SXM": 2.5})).dollars is None
    assert cost(gpu("A100"), GIB, 1e12, cfg, 0.4, None).dollars is None


def test_steps_with_a_time_budget_depend_on_the_gpu() -> None:
    cfg = config(batch=64, budget=3600.0)
    slow, fast = (cost(gpu(n), GIB, 1e12, cfg, 0.4, None) for n in ("A100", "H100 SXM"))
    assert slow.hours == fast.hours == 1.0 and fast.steps == pytest.approx(slow.steps * 989 / 312, rel=1e-3)


@pytest.mark.parametrize(("gib", "fits"), [(23.9, True), (24.1, False)])
def test_plan_says_whether_a_gpu_fits(gib: float, fits: bool) -> None:
    assert cost(gpu("RTX 4090"), int(gib * GIB), 1e9, config(), 0.4, None).fits == fits


def test_assumed_mfu_is_marked() -> None:
    made = _with_config(talker_recipe(), config())
    assert make(*made).rate.assumed and make(*made).rate.mfu == plan.ASSUMED_MFU
    measured = make(*made, rate=Rate(0.2, "measured in run x"))
    assert not measured.rate.assumed and measured.costs[0].hours == pytest.approx(2 * make(*made).costs[0].hours)


class Rowed:
    name = "night"

    def __init__(self, rows):
        self._rows = rows

    def rows(self):
        return self._rows


def test_measured_mfu_is_the_median_of_rows() -> None:
    found = plan.measured_rate(Rowed([{"step": i, "mfu": m} for i, m in enumerate([0.1, 0.45, 0.5, 0.52, 0.9])] + [{"step": 9}]))
    assert found.mfu == 0.5 and "night" in found.source


@pytest.mark.parametrize("rows", [[], [{"step": 1, "loss": 2.0}], [{"mfu": None}], [{"mfu": "0.5"}], [{"mfu": 0.0}]], ids=str)
def test_run_without_mfu_is_an_error(rows: list) -> None:
    with pytest.raises(UserError, match="night has no MFU"):
        plan.measured_rate(Rowed(rows))


def test_prices_are_read_with_their_date(tmp_path) -> None:
    path = tmp_path / "prices.json"
    path.write_text('{"date": "2026-05-01", "H100 SXM": 2.5, "A100": 1}')
    assert read_prices(path) == Prices("2026-05-01", {"H100 SXM": 2.5, "A100": 1.0})


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "cannot be read"),
        ("not json", "not JSON"),
        ("[1, 2]", "needs a date"),
        ('{"H100 SXM": 2.5}', "needs a date"),
        ('{"date": "yesterday", "H100 SXM": 2.5}', "yesterday"),
        ('{"date": "2026-05-01", "H100": 2.5}', "did you mean H100 PCIe or H100 NVL or H100 SXM"),
        ('{"date": "2026-05-01", "TPU": 2.5}', "not in the table"),
        ('{"date": "2026-05-01", "A100": "cheap"}', "no price"),
        ('{"date": "2026-05-01", "A100": 0}', "no price"),
        ('{"date": "2026-05-01", "A100": -1}', "no price"),
        ('{"date": "2026-05-01", "A100": true}', "no price"),
        ('{"date": "2026-05-01", "A100": NaN}', "no price"),
    ],
)
def test_wrong_prices_file_is_a_one_line_error(tmp_path, content: str | None, words: str) -> None:
    path = tmp_path / "prices.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(UserError, match=words) as caught:
        read_prices(path)
    assert str(caught.value).count("\n") <= 1


def test_notes_say_what_the_table_cannot_know() -> None:
    toys = workload()
    notes = " ".join(make(toys.recipe, toys.config, toys.data).notes)
    assert "fp32" in notes and "lower limit" in notes
    notes = " ".join(make(toys.recipe, dataclasses.replace(toys.config, precision="bf16"), toys.data).notes)
    assert "fp32" not in notes


def test_plan_is_plain_json() -> None:
    shown = json.loads(json.dumps(make(*_with_config(talker_recipe(), config())).to_json()))
    assert shown["estimate"]["num_params"] and shown["tokens"]["seen"] and len(shown["costs"]) == len(GPUS)
    assert shown["flops_difference"] == pytest.approx(0.0, abs=1e-9)


def test_generated_source_has_no_unique_items() -> None:
    class Endless(Rows):
        def __init__(self):
            super().__init__(8)
            self.num_items, self.arrays, self.spans = 0, {}, {}

        def batch(self, raw):
            x = raw["index"].float()[:, None].expand(-1, 4)
            return {"x": x, "y": x[:, :1]}

    data = Data(Endless(), Rows(8), {})
    found = make(recipe(lambda c, d: Regression(), None), config(), data)
    assert found.unique_items == 0 and found.tokens()["unique"] == 0 and found.memory["data"] == 0
