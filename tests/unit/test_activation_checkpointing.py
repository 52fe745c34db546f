"""Options of the engine: recomputation, compiled parts, float8 and a chosen attention kernel leave the numbers as they are."""

import copy
import sys
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from helpers import offline
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from seedbed import config as configs
from seedbed.config import keys
from seedbed.errors import UserError
from seedbed.nn.attention_choice import NAMED
from seedbed.nn.layers import choose_attention
from seedbed.recipes import find
from seedbed.train import activation_checkpointing, engine, float8, optim
from seedbed.train.system import System
from seedbed.tune.packing.pack import why_not_packed
from seedbed.tune.workload import Rig, Workload, rigged

CPU = torch.device("cpu")
TINY = {
    "gpt/demo": ("model.depth=2", "model.width=32", "model.heads=2", "data.block=16", "batch=4", "model.out_init=0.5"),
    "flow/demo": ("model.depth=2", "model.width=32", "model.heads=2", "batch=4"),
    "thinker/demo": ("model.width=16", "model.heads=2", "batch=4"),
}
DROPPING = ("model.dropout=0.3", "model.drop_path=0.3")


@pytest.fixture(scope="module")
def data() -> dict[str, Any]:
    """Each recipe's data, opened once."""
    return {}


@pytest.fixture
def quick_compiler(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Graphs as the compiler sees them, run without generating code for them."""
    real = nn.Module.compile
    monkeypatch.setattr(nn.Module, "compile", lambda self, **options: real(self, backend="aot_eager", **options))
    for module in (engine, optim):
        monkeypatch.setattr(module, "BACKEND", "aot_eager")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the compiler looks at things that warn when they are looked at
        yield


def workload(data: dict[str, Any], name: str, *settings: str) -> Workload:
    recipe, preset = find(name)
    config = configs.override(recipe.preset(preset), [*TINY[name], *settings])
    if name not in data:
        data[name] = recipe.open_data(config)
    return Workload(name, recipe, config, data[name], CPU)


def trained(data: dict[str, Any], name: str, *settings: str, num_steps: int = 3) -> tuple[list[Tensor], list[float], Rig]:
    """Weights and losses after a few steps, and the rig that took them."""
    made = workload(data, name, *settings)
    printed: list[str] = []
    with rigged(made.build(), made.data, printed.append) as rig:
        losses = []
        for step in range(num_steps):
            rig.take_step(step)
            losses.append(rig.pop_result(lag=0).loss)
    assert printed == []
    return [p.detach().clone() for p in rig.engine.system.parameters()], losses, rig


def apart(one: list[Tensor], other: list[Tensor]) -> float:
    return max(float((a - b).abs().max() / a.abs().max().clamp_min(1e-6)) for a, b in zip(one, other, strict=True))


CASES = [
    ("gpt/demo", ()),
    ("gpt/demo", DROPPING),
    ("gpt/demo", (*DROPPING, "precision=bf16", "accum=2")),
    ("flow/demo", ("attention=math",)),
]
CASES += [("flow/demo", ("model.condition=context", "precision=bf16")), ("thinker/demo", ("model.loss.backprop_steps=2",))]


@pytest.mark.parametrize("mode", ["selective", "full"])
@pytest.mark.parametrize(("name", "settings"), CASES, ids=lambda v: v if isinstance(v, str) else ",".join(v))
def test_checkpointing_gives_the_same_gradients(data, name: str, settings: tuple[str, ...], mode: str) -> None:
    """Weights after three steps are equal bit for bit, dropout and all."""
    plain, losses, _ = trained(data, name, *settings)
    again, same_losses, rig = trained(data, name, *settings, f"remat={mode}")
    assert losses == same_losses
    assert apart(plain, again) == 0.0
    assert f"{mode} remat" in rig.runner.how


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["selective", "full"])
@pytest.mark.parametrize("compile", ["blocks", "whole"])
def test_checkpointing_inside_compiled_code(data, quick_compiler, mode: str, compile: str) -> None:
    settings = ("model.dropout=0.3",)
    plain, _, _ = trained(data, "gpt/demo", *settings, f"compile={compile}")
    again, _, rig = trained(data, "gpt/demo", *settings, f"compile={compile}", f"remat={mode}")
    assert rig.runner.units
    assert apart(plain, again) < 1e-6


def test_checkpointing_full_repeats_the_forward_pass_and_selective_no_products(data) -> None:
    found = {}
    for mode in ("none", "selective", "full"):
        made = workload(data, "gpt/demo", f"remat={mode}", "attention=math", "optim.kind=adamw")
        with rigged(made.build(), made.data, print) as rig:
            rig.engine.system.kernels()  # type: ignore[operator]  # tried once, and that is not part of a step
            with FlopCounterMode(display=False) as counter:
                rig.take_step(0)
        found[mode] = counter.get_total_flops()
    assert found["selective"] == found["none"]
    # Forward and backward are 3 passes, recomputed 4; products of the last layers of a unit need not be made again.
    assert 1.15 < found["full"] / found["none"] < 4 / 3


def test_checkpointing_is_off_without_gradients(data, monkeypatch: pytest.MonkeyPatch) -> None:
    made = workload(data, "gpt/demo", "remat=full")
    running = made.build()
    monkeypatch.setattr(activation_checkpointing, "checkpoint", lambda *a, **k: pytest.fail("checkpointed without a gradient"))
    with running.evaluating():
        assert running.system.evaluate(made.data.valid, running)["loss"] > 0


def test_checkpointed_system_copy_uses_its_own_weights(data) -> None:
    system = workload(data, "gpt/demo", "remat=full").build().system
    twin = copy.deepcopy(system)
    for one, other in zip(system.compile_units(), twin.compile_units(), strict=True):
        assert one.forward.__self__ is one  # type: ignore[attr-defined]
        assert other.forward.__self__ is other  # type: ignore[attr-defined]


class Drawing(System):
    """A unit that draws numbers in the ways that a CUDA device does, which are whole operations there."""

    class Unit(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.line = nn.Linear(6, 6)

        def forward(self, x: Tensor) -> Tensor:
            kept = torch.native_dropout(self.line(x), 0.5, True)[0]
            return torch.tanh(kept) * torch.rand(len(x), 1) + self.line(kept)

    def __init__(self) -> None:
        super().__init__()
        self.units = nn.ModuleList(Drawing.Unit() for _ in range(2))

    def compile_units(self):
        return iter(self.units)

    def forward(self, x: Tensor) -> Tensor:
        for unit in self.units:
            x = unit(x)
        return x.square().mean()


@pytest.mark.parametrize("mode", ["selective", "full"])
def test_checkpointing_keeps_random_draws_of_a_device(mode: str) -> None:
    """The policy of CUDA, whose generator cannot be set back inside a graph, on operations that the CPU has too."""
    torch.manual_seed(0)
    plain = Drawing()
    again = copy.deepcopy(plain)
    for unit in again.units:
        unit.forward = activation_checkpointing._forward(mode, keep_drawn=True).__get__(unit)
    x, grads = torch.randn(5, 6), []
    for system in (plain, again):
        torch.manual_seed(7)
        loss = system(x)
        before = torch.get_rng_state()
        loss.backward()
        assert torch.equal(torch.get_rng_state(), before), "recomputing moved the generator"
        grads.append([p.grad for p in system.parameters()])
    assert apart(*grads) == 0.0


def test_random_operations_are_recognised() -> None:
    aten = torch.ops.aten
    x = torch.zeros(1, 1, 2, 2)
    flash = aten._scaled_dot_product_flash_attention.default
    assert activation_checkpointing.draws(aten.rand.default, ([3],), {})
    assert activation_checkpointing.draws(aten.native_dropout.default, (x, 0.1, True), {})
    assert not activation_checkpointing.draws(aten.mm.default, (x, x), {})
    assert not activation_checkpointing.draws(flash, (x, x, x), {"scale": 1.0})
    assert not activation_checkpointing.draws(flash, (x, x, x, 0.0), {})
    assert activation_checkpointing.draws(flash, (x, x, x, 0.1), {})


def test_remat_without_units_is_refused() -> None:
    with pytest.raises(UserError, match=r"remat=full.*compile_units"):
        activation_checkpointing.checkpoint_units(System(), "full", CPU)
    assert activation_checkpointing.checkpoint_units(System(), "none", CPU) == []


@pytest.mark.parametrize("setting", ["remat=full", "compile_autograd=true", "compile_optimizer=true"])
def test_pack_refuses_remat_and_float8(data, setting: str) -> None:
    made = workload(data, "thinker/demo", setting)
    system = made.recipe.build(made.config, made.data)
    assert why_not_packed(system, [made.config]) == setting


# ---- compiled parts -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("part", "kind"),
    [
        ("compile_optimizer", "adamw"),
        ("compile_optimizer", "muon"),
        pytest.param("compile_autograd", "adamw", marks=pytest.mark.slow),
    ],
)
def test_compiled_part_gives_the_same_numbers(data, quick_compiler, part: str, kind: str) -> None:
    settings = (f"optim.kind={kind}", "model.dropout=0.2")
    plain, losses, _ = trained(data, "gpt/demo", *settings)
    again, same_losses, rig = trained(data, "gpt/demo", *settings, f"{part}=true")
    assert f"compiled ({part.partition('_')[2]})" in rig.runner.how
    assert apart(plain, again) < 1e-5
    assert same_losses == pytest.approx(losses, rel=1e-5)


def test_compiled_optimizer_skips_bad_steps(data, quick_compiler) -> None:
    made = workload(data, "gpt/demo", "optim.kind=adamw", "compile_optimizer=true")
    running = made.build()
    with rigged(running, made.data, print) as rig:
        rig.take_step(0)
        running.halted.fill_(1.0)
        before = {file: {n: t.clone() for n, t in group.items()} for file, group in running.tensors().items()}
        rig.take_step(1)
        for file, group in running.tensors().items():
            for name, tensor in group.items():
                assert torch.equal(tensor, before[file][name]), f"{file} {name} moved"


def test_compilation_failure_falls_back_to_eager(data, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any) -> Any:
        raise RuntimeError("no compiler here")

    monkeypatch.setattr(optim, "BACKEND", refuse)
    made, printed = workload(data, "gpt/demo", "compile_optimizer=true"), []
    with rigged(made.build(), made.data, printed.append) as rig:
        rig.take_step(0)
        assert rig.pop_result(lag=0).loss > 0
        assert rig.runner.how.startswith("eager")
    assert len(printed) == 1 and "goes on eager" in printed[0]


# ---- float8 -------------------------------------------------------------------------------------------------------------


def linear(rows: int, columns: int) -> nn.Linear:
    return nn.Linear(columns, rows, bias=False, device="meta")


@pytest.mark.parametrize(
    ("rows", "columns", "pays"),
    [(4097, 4096, False), (2048, 4096, False), (4096, 2048, False), (4112, 1024, False), (4112, 1040, True), (4096, 4096, True)],
)
def test_float8_layers_are_selected_by_shape(rows: int, columns: int, pays: bool) -> None:
    assert float8.convertible(linear(rows, columns)) == pays


def test_float8_converts_layers_and_reports_their_number(data, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torchao", reason="float8 needs torchao")
    made = workload(data, "gpt/demo", "precision=bf16")
    system = made.build().system
    assert float8.to_float8(system, CPU, emulate=True) == float8.num_float8(system) == 0
    monkeypatch.setattr(float8, "convertible", lambda module: isinstance(module, nn.Linear))
    before = dict(system.named_parameters())
    reference, _ = system.loss(rig_batch(made), offline(system))
    num = float8.to_float8(system, CPU, emulate=True)
    assert num == float8.num_float8(system) > 0
    assert all(before[name] is param for name, param in system.named_parameters()), "weights must stay the same objects"
    with torch.autocast("cpu", torch.bfloat16):
        loss, _ = system.loss(rig_batch(made), offline(system))
    # Three bits of mantissa: a few percent in every product, far less in the mean loss.
    assert loss.item() == pytest.approx(reference.item(), rel=0.02)
    assert loss.item() != reference.item()


def rig_batch(made: Workload) -> dict[str, Tensor]:
    with rigged(made.build(), made.data, print) as rig:
        rig.feed.load(0)
        return {name: tensor.clone() for name, tensor in rig.feed.part(0).items()}


def test_float8_without_hardware_or_package_is_refused(data, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match=r"8-bit products, and this is cpu"):
        workload(data, "gpt/demo", "precision=bf16", "float8=true").build()
    with pytest.raises(UserError, match=r"precision=bf16"):
        workload(data, "gpt/demo", "float8=true")
    monkeypatch.setitem(sys.modules, "torchao.float8", None)
    with pytest.raises(UserError, match=r"pip install 'seedbed\[fp8\]'"):
        float8.to_float8(System(), CPU, emulate=True)


# ---- attention ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["gpt/demo", "flow/demo"])
def test_attention_kernel_forced_gives_the_same_numbers(data, name: str) -> None:
    (plain, losses, _), (again, same, rig) = trained(data, name), trained(data, name, "attention=math")
    assert rig.engine.system.kernels() == (NAMED["math"],)  # type: ignore[operator]
    assert apart(plain, again) < 1e-3
    assert same == pytest.approx(losses, rel=1e-5)


@pytest.mark.parametrize(("only", "dropout"), [("cudnn", 0.0), ("efficient", 0.0), ("flash", 0.5)])
def test_attention_kernel_that_cannot_run_is_refused(only: str, dropout: float) -> None:
    with pytest.raises(UserError, match=rf"attention={only} does not run float32 heads of 8 over 16 tokens.* on cpu"):
        choose_attention((2, 2, 16, 8), torch.float32, CPU, dropout=dropout, only=only)


def test_attention_kernel_names_are_values_of_the_config() -> None:
    assert keys.kind_of(configs.Config(model=None, data=None), "attention").__args__ == ("auto", *NAMED)
