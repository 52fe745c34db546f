"""The numeric suites as other machines would run them: other instruction sets, other libraries, more threads, other last bits."""

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import perturbation
import pytest
import torch
from conftest import ROOT
from helpers import assert_close_in_float
from torch import Tensor

NUMERIC = [
    "unit/test_activation_checkpointing.py",
    *(f"unit/test_{name}.py" for name in ("engine", "optim", "rng", "nn_attention", "nn_layers", "nn_kernels")),
    *(f"unit/test_{name}_model.py" for name in ("gpt", "flow", "ebt", "world", "thinker")),
    *(f"unit/test_{name}.py" for name in ("gpt_generate", "flow_sampling", "world_objective", "world_radiance_field")),
    "test_equalities.py",
    "golden/test_golden.py",
]
SYSTEMS = [
    *(f"unit/test_{name}_system.py" for name in ("gpt", "flow", "ebt", "world", "thinker")),
    *("unit/test_ebt_generate.py", "unit/test_ebt_denoise.py", "unit/test_thinker_packed.py"),
]


@dataclass(frozen=True)
class Row:
    """One kind of machine: what is set in its environment, what pytest is told, and which suites it runs."""

    env: dict[str, str] = field(default_factory=dict)
    options: tuple[str, ...] = ()
    suites: tuple[str, ...] = tuple(NUMERIC)
    needs: tuple[str, ...] = ()


ROWS = {
    "without vectors": Row({"ATEN_CPU_CAPABILITY": "default"}),
    "avx2": Row({"ATEN_CPU_CAPABILITY": "avx2"}, needs=("AVX2", "AVX512")),
    "compatible libraries": Row({"ONEDNN_MAX_CPU_ISA": "SSE41", "MKL_CBWR": "COMPATIBLE"}),
    "two threads": Row({"OMP_NUM_THREADS": "2"}),
    "other last bits": Row(options=("--perturb-kernels",), suites=(*NUMERIC, *SYSTEMS)),
}


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", ROWS)
def test_numeric_suites_hold_on_other_kernels(name: str, tmp_path: Path) -> None:
    row, have = ROWS[name], torch.backends.cpu.get_cpu_capability()
    if row.needs and have not in row.needs:
        pytest.skip(f"this processor is {have}, which cannot be told to be {row.needs[0]}")
    clean = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST_")}
    command = [sys.executable, "-m", "pytest", "-q", "-m", "not slow", "-p", "no:cacheprovider", "-p", "no:xdist"]
    done = subprocess.run(
        [*command, f"--basetemp={tmp_path / 'base'}", *row.options, *(f"tests/{suite}" for suite in row.suites)],
        cwd=ROOT,
        env={**clean, **row.env},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, "\n".join(done.stdout.splitlines()[-60:])


@pytest.fixture
def perturbed() -> Iterator[None]:
    library = perturbation.install()
    yield
    library._destroy()


def product_and_slopes(a: Tensor, b: Tensor) -> list[Tensor]:
    a, b = a.clone().requires_grad_(), b.clone().requires_grad_()
    y = a @ b
    return [y.detach(), *torch.autograd.grad(y.square().sum(), (a, b))]


def test_perturbed_kernels_differ_in_last_bits_and_only_between_shapes(perturbed: None) -> None:
    draw = torch.Generator().manual_seed(1)
    a, b = torch.randn(64, 8, generator=draw), torch.randn(8, 16, generator=draw)
    whole, again, part = product_and_slopes(a, b), product_and_slopes(a, b), product_and_slopes(a[:32], b)
    exact = product_and_slopes(a.double(), b.double())
    assert all(torch.equal(one, two) for one, two in zip(whole, again, strict=True))
    for found in (0, 1):
        assert not torch.equal(whole[found][:32], part[found]), "rows beside others are other kernels' work"
        assert_close_in_float(whole[found][:32], part[found], 8 + 16)
    for one, two in zip(whole, exact, strict=True):
        assert_close_in_float(one, two.float(), 8 + 16 + 64)
    assert_close_in_float(torch.vmap(lambda row: row @ b)(a), a @ b, 8)
    assert not torch.equal(a.exp()[:32], a[:32].exp()) and not torch.equal(a.sum(1)[:32], a[:32].sum(1))
    whole_numbers = torch.arange(24.0).view(4, 6)
    assert torch.equal(whole_numbers @ whole_numbers.T, (whole_numbers.long() @ whole_numbers.long().T).float())


def test_kernels_are_unchanged_without_perturbation(pytestconfig: pytest.Config) -> None:
    if pytestconfig.getoption("perturb_kernels"):
        pytest.skip("they are replaced for the whole session")
    before = torch.linspace(0, 1, 64).exp()
    perturbation.install()._destroy()
    assert torch.equal(torch.linspace(0, 1, 64).exp(), before)
