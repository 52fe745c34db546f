"""A step on paper: its growth with the batch is exact, its products are those that torch counts, and predictions have reasons."""

import dataclasses

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from tune_toys import CPU, talker_recipe, workload

from seedbed import config as configs
from seedbed.errors import UserError
from seedbed.recipes import find
from seedbed.tune.ablate import predictions
from seedbed.tune.ablate.predictions import Attention, Matmul, Parts, Prediction, Predictor, Rates
from seedbed.tune.estimate import EstimateEngine, real_batch
from seedbed.tune.workload import Workload

TINY = ("model.depth=2", "model.width=32", "model.heads=2", "data.block=16", "batch=5", "optim.kind=adamw")


def gpt(*settings: str) -> Workload:
    recipe, preset = find("gpt/demo")
    config = configs.override(recipe.preset(preset), [*TINY, *settings])
    return Workload("gpt/demo", recipe, config, recipe.open_data(config), CPU)


@pytest.fixture(scope="module")
def small() -> Workload:
    return gpt()


def changed(made: Workload, *settings: str):
    return configs.override(made.config, list(settings))


def test_op_counts_extrapolate_to_a_real_batch(small: Workload) -> None:
    extrapolate = predictions.count(small.recipe, small.config, small.data)
    engine = EstimateEngine(small.recipe.build(small.config, small.data), small.config, CPU)
    real = predictions._count(engine, real_batch(small.data, small.config.batch, small.config.seed))
    assert extrapolate.matmuls == real.matmuls
    assert extrapolate.attentions == real.attentions
    assert extrapolate.num_ops == real.num_ops
    assert extrapolate.bytes == pytest.approx(real.bytes, rel=1e-3)


def test_matmul_flops_equal_torch_counts(small: Workload) -> None:
    found = predictions.count(small.recipe, small.config, small.data)
    engine = EstimateEngine(small.recipe.build(small.config, small.data), small.config, CPU)
    with FlopCounterMode(display=False) as counter:
        engine.system.update(real_batch(small.data, small.config.batch, 1), engine)
    fused = sum(v for op, v in counter.get_flop_counts()["Global"].items() if "attention" in str(op))
    assert sum(product.flops for product in found.matmuls) == counter.get_total_flops() - fused


def test_attention_is_counted_as_the_recipe_counts_it(small: Workload) -> None:
    """Products and attention together are the formula of the recipe, which torch's own count confirms elsewhere."""
    found = predictions.count(small.recipe, small.config, small.data)
    assert found.flops == pytest.approx(small.config.batch * small.build().system.flops_per_item(), rel=0.01)


def test_parts_of_a_step_add_up(small: Workload) -> None:
    config = changed(small, "batch=6", "accum=3")
    whole, part = (predictions.count(small.recipe, c, small.data) for c in (config, changed(small, "batch=2")))
    assert whole.flops == 3 * part.flops and whole.num_ops == 3 * part.num_ops


def test_remat_flops_are_counted(small: Workload) -> None:
    predictor = Predictor(small, lambda config: small.data)
    plain, some, full = (predictor.op_counts(changed(small, f"remat={mode}")) for mode in ("none", "selective", "full"))
    assert plain.flops == some.flops < full.flops
    assert plain.num_ops < some.num_ops
    assert len(full.attentions) == len(some.attentions) + small.config.model.depth
    assert predictor.overhead(changed(small, "remat=selective")) == 1.0
    assert 1.0 < predictor.overhead(changed(small, "remat=full")) < 4 / 3


def test_recipe_that_needs_real_values_is_counted_with_real_batches() -> None:
    made = workload()
    found = predictions.count(made.recipe, made.config, made.data)
    assert found.flops > 0 and found.num_params == sum(p.numel() for p in made.build().system.parameters())


def test_muon_matmuls_are_counted(small: Workload) -> None:
    system = small.build().system
    none, moved = predictions.optimizer(system, small.config)
    some, same = predictions.optimizer(system, changed(small, "optim.kind=muon"))
    assert none == [] and some and moved == same > 0
    assert predictions.optimizer(system, changed(small, "ema=0.9"))[1] == moved * 9 / 7


def test_views_are_not_counted() -> None:
    x = torch.zeros(4, 6)
    with predictions.OpCounter() as counter:
        x.view(6, 4).t()[1:].detach().transpose(0, 1)
    assert counter.op_counts.num_ops == 0
    with predictions.OpCounter() as counter:
        x + 1.0
    assert (counter.op_counts.num_ops, counter.op_counts.bytes) == (1, 2 * x.numel() * 4)


# ---- rates and predictions ----------------------------------------------------------------------------------------------


class Even(Rates):
    """A device on which everything takes what its size says: no clock decides a test."""

    per_op, bandwidth = 1e-6, 1e9  # type: ignore[assignment]

    def __init__(self) -> None:
        self.device = CPU

    def product(self, shape: Matmul, precision: str) -> float:
        return shape.flops / {"fp32": 1e9, "bf16": 4e9}[precision]

    def attentions(self, call: Attention, precision: str, kernel: str) -> float:
        return 4.0 * call.batch * call.heads * call.queries * call.keys * call.head_dim / (1e9 if kernel == "auto" else 5e8)

    def recomputed(self, mode: str) -> float:
        return 1e-6


@pytest.fixture
def predictor(small: Workload) -> Predictor:
    found = Predictor(small, lambda config: small.data)
    found.rates = Even()
    return found


def predicted(predictor: Predictor, axis: str, *settings: str) -> Prediction:
    return predictor.predict(axis, changed(predictor.workload, *settings))


def test_predictions_have_a_direction_and_a_reason(predictor: Predictor) -> None:
    some, full = (predicted(predictor, "remat", f"remat={mode}").ratio for mode in ("selective", "full"))
    assert full < some < 1
    assert predicted(predictor, "dtype", "precision=bf16").ratio > 1
    assert predicted(predictor, "attention", "attention=math").ratio < 1
    assert predicted(predictor, "compile", "compile=whole").ratio > predicted(predictor, "x", "compile_autograd=true").ratio > 1
    assert predicted(predictor, "batch", "batch=50").ratio > 1 > predicted(predictor, "batch", "batch=1").ratio
    assert predicted(predictor, "model.depth", "model.depth=4").ratio < 0.7
    basis = predicted(predictor, "remat", "remat=full").basis
    assert basis.startswith("executed FLOP per item x1.") and "at measured rates (matmul" in basis


@pytest.mark.parametrize(
    ("axis", "settings", "reason"),
    [
        ("capture", ("capture=off",), "there are no CUDA graphs here"),
        ("compile_optimizer", ("compile_optimizer=true",), "one fused pass already"),
        ("optim.lr", ("optim.lr=0.5",), "the same operations"),
        ("float8", ("float8=true", "precision=bf16"), "0 layers are large enough"),
    ],
)
def test_prediction_of_no_effect(predictor: Predictor, axis: str, settings: tuple[str, ...], reason: str) -> None:
    found = predicted(predictor, axis, *settings)
    assert found.ratio == 1.0
    assert found.basis.startswith("no effect expected: ") and reason in found.basis


def test_prediction_uses_the_formula_where_parts_do_not_fit(predictor: Predictor, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(product: Matmul, precision: str) -> float:
        raise torch.OutOfMemoryError("too much")

    monkeypatch.setattr(predictor.rates, "product", fail)
    found = predicted(predictor, "model.depth", "model.depth=4")
    assert 0.5 < found.ratio < 0.7 and "do not fit to be timed" in found.basis


def test_prediction_of_an_impossible_row_says_why() -> None:
    made = workload()
    with pytest.raises(UserError, match="compile_units"):
        Predictor(made, lambda config: made.data).predict("remat", dataclasses.replace(made.config, remat="full"))


def test_prediction_of_a_combination_is_the_product() -> None:
    found = predictions.product([1.5, 2.0], ["a=1", "b=2"])
    assert found.ratio == 3.0 and "a=1, b=2" in found.basis


def test_parts_of_a_step_in_words() -> None:
    parts = Parts(matmul=3.0, attention=0.0, memory=1.0, launches=0.0, update=0.0)
    assert parts.total == 4.0 and parts.in_words() == "matmul 75%, memory 25%"


def test_op_rates_are_measured_on_the_device() -> None:
    rates = Rates(CPU)
    little, much = Matmul(1, 32, 32, 32), Matmul(1, 512, 512, 512)
    assert 0 < rates.product(little, "fp32") < rates.product(much, "fp32")
    assert rates.product(much, "fp32") is rates.product(much, "fp32"), "measured once"
    forward = Attention(False, 2, 2, 1, 16, 16, 8, True)
    assert rates.attentions(forward, "fp32", "auto") > 0
    assert rates.attentions(dataclasses.replace(forward, backward=True, batch=64), "fp32", "math") > 0
    assert rates.bandwidth > 1e7 and 0 < rates.per_op < 1e-3 and rates.recomputed("full") > 0
    with pytest.raises(UserError, match="attention=cudnn"):
        rates.attentions(forward, "fp32", "cudnn")


def test_matmul_too_large_to_try_is_extrapolated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(predictions.MOST, "cpu", 64)
    shapes = []
    rates = Rates(CPU)
    monkeypatch.setattr(torch, "mm", lambda a, b: shapes.append((a.shape, b.shape)))
    monkeypatch.setattr(rates, "seconds", lambda work: (work(), 1.0)[1])
    assert rates.product(Matmul(1, 32, 4, 4), "fp32") == 2.0
    assert shapes == [((16, 4), (4, 4))]


def test_attention_calls_are_counted_once_each_way() -> None:
    recipe, data = talker_recipe()
    made = workload()
    found = predictions.count(recipe, made.config, data)
    assert [call.backward for call in found.attentions] == [False, True]
    assert found.attentions[0].batch == made.config.batch
