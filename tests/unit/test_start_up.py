"""What a start does not load: torch's compiler, which takes seconds, where nothing is compiled."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from seedbed.nn.deferred import shapes_only
from seedbed.nn.init import materialize, on_meta
from seedbed.recipes import find

CODE = """
import sys
from pathlib import Path
from seedbed.launch import local
settings = {settings}
assert local.train("{recipe}/demo", settings, root=Path("runs"), run_name="one", dirty=True, check="quick") == 0
heavy = [name for name in ("torch._dynamo", "torch._inductor", "sympy") if name in sys.modules]
print("loaded:", heavy)
"""
SMALL = {
    "gpt": ["steps=2", "device=cpu", "model.depth=1", "model.width=32", "limit.valid=32"],
    "flow": ["steps=2", "device=cpu", "model.depth=1", "limit.train=64", "limit.valid=32"],
}


@pytest.mark.slow
@pytest.mark.parametrize("recipe", SMALL)
def test_compiler_is_not_loaded_by_a_cpu_run(tmp_path: Path, recipe: str) -> None:
    code = CODE.format(recipe=recipe, settings=SMALL[recipe])
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip().endswith("loaded: []")


def test_compiler_is_not_loaded_by_building_a_model() -> None:
    code = (
        "import sys; from seedbed.nn.init import materialize, on_meta; from torch import nn\n"
        "with on_meta():\n    net = nn.Sequential(nn.Embedding(4, 8), nn.Linear(8, 8), nn.Conv2d(3, 4, 3), nn.LayerNorm(8))\n"
        "materialize(net)\nassert 'torch._dynamo' not in sys.modules and 'sympy' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_meta_model_has_the_same_shapes_and_draws_nothing() -> None:
    def make() -> nn.Module:
        return nn.Sequential(nn.Embedding(4, 8), nn.Linear(8, 6), nn.Conv2d(3, 4, 3), nn.LayerNorm(8))

    real = make()
    before = torch.get_rng_state()
    with on_meta():
        net = make()
    assert all(p.is_meta for p in net.parameters())
    materialize(net)
    assert torch.equal(torch.get_rng_state(), before)
    assert {n: (p.shape, p.dtype, p.stride()) for n, p in net.named_parameters()} == {
        n: (p.shape, p.dtype, p.stride()) for n, p in real.named_parameters()
    }
    assert all(p.isnan().all() for p in net.parameters()), "a forgotten initialisation shows"


def test_system_of_shapes_only_has_the_same_parameters_and_no_storage() -> None:
    recipe, preset = find("gpt/demo")
    config = recipe.preset(preset)
    data = recipe.open_data(config)
    with shapes_only():
        shapes = recipe.build(config, data)
    real = recipe.build(config, data)
    assert all(p.is_meta for p in shapes.parameters()) and not any(p.is_meta or p.isnan().any() for p in real.parameters())
    assert [(n, p.shape) for n, p in shapes.named_parameters()] == [(n, p.shape) for n, p in real.named_parameters()]


LEFT = """
import sys, threading, time
from concurrent.futures import ThreadPoolExecutor
import torch
from seedbed.cli import main
pool = ThreadPoolExecutor(2)
pool.submit(sorted, []).result()
threading.Thread(target=lambda: (time.sleep(0.5), print("finished", flush=True))).start()
sys.argv = ["seedbed", "--version"]
main()
"""


def test_command_ends_idle_pools_of_threads_and_waits_for_the_others() -> None:
    """A compiled run leaves such a pool: torch builds kernels for CPUs in one."""
    done = subprocess.run([sys.executable, "-c", LEFT], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and done.stdout.endswith("finished\n"), done.stderr
