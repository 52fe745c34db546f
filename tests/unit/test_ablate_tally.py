"""A step on paper: its growth with the batch is exact, its products are those that torch counts, and predictions have reasons."""

import dataclasses

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from tune_toys import CPU, bench, talker_recipe

from seedbed import config as configs
from seedbed.errors import UserError
from seedbed.recipes import find
from seedbed.tune.ablate import predictions, tally
from seedbed.tune.ablate import rates as rates_file
from seedbed.tune.ablate.predictions import Oracle, Parts, Prediction
from seedbed.tune.ablate.rates import Rates
from seedbed.tune.ablate.tally import Attended, Product
from seedbed.tune.bench import Bench
from seedbed.tune.paper import PaperEngine, real_batch

TINY = ("model.depth=2", "model.width=32", "model.heads=2", "data.block=16", "batch=5", "optim.kind=adamw")


def gpt(*settings: str) -> Bench:
    recipe, preset = find("gpt/demo")
    config = configs.override(recipe.preset(preset), [*TINY, *settings])
    return Bench("gpt/demo", recipe, config, recipe.open_data(config), CPU)


@pytest.fixture(scope="module")
def small() -> Bench:
    return gpt()


def changed(made: Bench, *settings: str):
    return configs.override(made.config, list(settings))


def test_the_tally_of_a_batch_is_that_of_a_real_one(small: Bench) -> None:
    grown = tally.count(small.recipe, small.config, small.data)
    engine = PaperEngine(small.recipe.build(small.config, small.data), small.config, CPU)
    real = tally._count(engine, real_batch(small.data, small.config.batch, small.config.seed))
    assert grown.products == real.products
    assert grown.attended == real.attended
    assert grown.num_ops == real.num_ops
    assert grown.bytes == pytest.approx(real.bytes, rel=1e-3)


def test_products_are_those_that_torch_counts(small: Bench) -> None:
    found = tally.count(small.recipe, small.config, small.data)
    engine = PaperEngine(small.recipe.build(small.config, small.data), small.config, CPU)
    with FlopCounterMode(display=False) as counter:
        engine.system.update(real_batch(small.data, small.config.batch, 1), engine)
    fused = sum(v for op, v in counter.get_flop_counts()["Global"].items() if "attention" in str(op))
    assert sum(product.flops for product in found.products) == counter.get_total_flops() - fused


def test_attention_is_counted_as_the_recipe_counts_it(small: Bench) -> None:
    """Products and attention together are the formula of the recipe, which torch's own count confirms elsewhere."""
    found = tally.count(small.recipe, small.config, small.data)
    assert found.flops == pytest.approx(small.config.batch * small.build().system.flops_per_item(), rel=0.01)


def test_parts_of_a_step_add_up(small: Bench) -> None:
    config = changed(small, "batch=6", "accum=3")
    whole, part = (tally.count(small.recipe, c, small.data) for c in (config, changed(small, "batch=2")))
    assert whole.flops == 3 * part.flops and whole.num_ops == 3 * part.num_ops


def test_recomputation_on_paper(small: Bench) -> None:
    oracle = Oracle(small, lambda config: small.data)
    plain, some, full = (oracle.tally(changed(small, f"recompute={mode}")) for mode in ("none", "selective", "full"))
    assert plain.flops == some.flops < full.flops
    assert plain.num_ops < some.num_ops
    assert len(full.attended) == len(some.attended) + small.config.model.depth
    assert oracle.overhead(changed(small, "recompute=selective")) == 1.0
    assert 1.0 < oracle.overhead(changed(small, "recompute=full")) < 4 / 3


def test_a_recipe_that_looks_at_numbers_is_counted_in_earnest() -> None:
    made = bench()
    found = tally.count(made.recipe, made.config, made.data)
    assert found.flops > 0 and found.num_params == sum(p.numel() for p in made.build().system.parameters())


def test_muon_has_products_of_its_own(small: Bench) -> None:
    system = small.build().system
    none, moved = tally.optimizer(system, small.config)
    some, same = tally.optimizer(system, changed(small, "optim.kind=muon"))
    assert none == [] and some and moved == same > 0
    assert tally.optimizer(system, changed(small, "ema=0.9"))[1] == moved * 9 / 7


def test_views_are_no_work() -> None:
    x = torch.zeros(4, 6)
    with tally.Counting() as counting:
        x.view(6, 4).t()[1:].detach().transpose(0, 1)
    assert counting.tally.num_ops == 0
    with tally.Counting() as counting:
        x + 1.0
    assert (counting.tally.num_ops, counting.tally.bytes) == (1, 2 * x.numel() * 4)


# ---- rates and predictions ----------------------------------------------------------------------------------------------


class Even(Rates):
    """A device on which everything takes what its size says: no clock decides a test."""

    per_op, bandwidth = 1e-6, 1e9  # type: ignore[assignment]

    def __init__(self) -> None:
        self.device = CPU

    def product(self, shape: Product, precision: str) -> float:
        return shape.flops / {"fp32": 1e9, "bf16": 4e9}[precision]

    def attended(self, call: Attended, precision: str, kernel: str) -> float:
        return 4.0 * call.batch * call.heads * call.queries * call.keys * call.head_dim / (1e9 if kernel == "auto" else 5e8)

    def recomputed(self, mode: str) -> float:
        return 1e-6


@pytest.fixture
def oracle(small: Bench) -> Oracle:
    found = Oracle(small, lambda config: small.data)
    found.rates = Even()
    return found


def predicted(oracle: Oracle, axis: str, *settings: str) -> Prediction:
    return oracle.predict(axis, changed(oracle.bench, *settings))


def test_predictions_have_a_direction_and_a_reason(oracle: Oracle) -> None:
    some, full = (predicted(oracle, "recompute", f"recompute={mode}").ratio for mode in ("selective", "full"))
    assert full < some < 1
    assert predicted(oracle, "dtype", "precision=bf16").ratio > 1
    assert predicted(oracle, "attention", "attention=math").ratio < 1
    assert predicted(oracle, "compile", "compile=whole").ratio > predicted(oracle, "x", "compile_autograd=true").ratio > 1
    assert predicted(oracle, "batch", "batch=50").ratio > 1 > predicted(oracle, "batch", "batch=1").ratio
    assert predicted(oracle, "model.depth", "model.depth=4").ratio < 0.7
    basis = predicted(oracle, "recompute", "recompute=full").basis
    assert basis.startswith("executed FLOP per item x1.") and "at measured rates (matmul" in basis


@pytest.mark.parametrize(
    ("axis", "settings", "reason"),
    [
        ("capture", ("capture=off",), "there are no CUDA graphs here"),
        ("compile_optimizer", ("compile_optimizer=true",), "one fused pass already"),
        ("optim.lr", ("optim.lr=0.5",), "the same work on paper"),
        ("float8", ("float8=true", "precision=bf16"), "0 layers are large enough"),
    ],
)
def test_that_nothing_happens_is_a_prediction(oracle: Oracle, axis: str, settings: tuple[str, ...], reason: str) -> None:
    found = predicted(oracle, axis, *settings)
    assert found.ratio == 1.0
    assert found.basis.startswith("no effect expected: ") and reason in found.basis


def test_where_even_a_part_does_not_fit_the_formula_decides(oracle: Oracle, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(product: Product, precision: str) -> float:
        raise torch.OutOfMemoryError("too much")

    monkeypatch.setattr(oracle.rates, "product", fail)
    found = predicted(oracle, "model.depth", "model.depth=4")
    assert 0.5 < found.ratio < 0.7 and "do not fit to be timed" in found.basis


def test_what_a_recipe_cannot_do_is_said_by_its_prediction() -> None:
    made = bench()
    with pytest.raises(UserError, match="compile_units"):
        Oracle(made, lambda config: made.data).predict("recompute", dataclasses.replace(made.config, recompute="full"))


def test_changes_together() -> None:
    found = predictions.product([1.5, 2.0], ["a=1", "b=2"])
    assert found.ratio == 3.0 and "a=1, b=2" in found.basis


def test_parts_tell_their_shares() -> None:
    parts = Parts(matmul=3.0, attention=0.0, memory=1.0, launches=0.0, update=0.0)
    assert parts.total == 4.0 and parts.told() == "matmul 75%, memory 25%"


def test_rates_are_measured_on_the_device() -> None:
    rates = Rates(CPU)
    little, much = Product(1, 32, 32, 32), Product(1, 512, 512, 512)
    assert 0 < rates.product(little, "fp32") < rates.product(much, "fp32")
    assert rates.product(much, "fp32") is rates.product(much, "fp32"), "measured once"
    forward = Attended(False, 2, 2, 1, 16, 16, 8, True)
    assert rates.attended(forward, "fp32", "auto") > 0
    assert rates.attended(dataclasses.replace(forward, backward=True, batch=64), "fp32", "math") > 0
    assert rates.bandwidth > 1e7 and 0 < rates.per_op < 1e-3 and rates.recomputed("full") > 0
    with pytest.raises(UserError, match="attention=cudnn"):
        rates.attended(forward, "fp32", "cudnn")


def test_a_product_too_large_to_try_is_measured_in_part(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(rates_file.MOST, "cpu", 64)
    shapes = []
    rates = Rates(CPU)
    monkeypatch.setattr(torch, "mm", lambda a, b: shapes.append((a.shape, b.shape)))
    monkeypatch.setattr(rates, "seconds", lambda work: (work(), 1.0)[1])
    assert rates.product(Product(1, 32, 4, 4), "fp32") == 2.0
    assert shapes == [((16, 4), (4, 4))]


def test_the_talker_attends_once_each_way() -> None:
    recipe, data = talker_recipe()
    made = bench()
    found = tally.count(recipe, made.config, data)
    assert [call.backward for call in found.attended] == [False, True]
    assert found.attended[0].batch == made.config.batch
