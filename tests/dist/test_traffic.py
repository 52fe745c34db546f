"""Bytes that a step sends, counted in real gloo runs, against the plan's arithmetic. As a script, this file is one rank."""

import json
import os
import subprocess
import sys
from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

LIMIT, NUM_STEPS = 0.02, 2
GPT = ["device=cpu", "model.depth=4", "model.width=128", "model.heads=4", "data.block=8", "data.text=random:4096:256"]
GPT += ["model.dropout=0", "compile=off"]
CASES = {
    2: [["dist.replicate=2"], ["dist.replicate=2", "accum=2", "dist.reduce=bf16"], ["dist.shard=2"]],
    4: [["dist.replicate=4"], ["dist.shard=4", "precision=bf16", "accum=2"], ["dist.replicate=2", "dist.shard=2", "accum=2"]],
    8: [["dist.replicate=8"], ["dist.replicate=2", "dist.shard=4", "precision=bf16", "dist.reduce=bf16"]],
}


class Counted(TorchDispatchMode):
    """Bytes that this rank's collectives on tensors of weights send in a ring, by the purpose that the plan names."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            self.add(func._schema.name.removeprefix("c10d::"), args)
        return func(*args, **(kwargs or {}))

    def add(self, name: str, args: Any) -> None:
        def group_size(kind: Any) -> int:
            (group,) = (a for a in args if isinstance(a, torch.ScriptObject) and "ProcessGroup" in str(a._type()))
            return kind.unbox(group).size()

        ring = (group_size(dist.ProcessGroup) - 1) / group_size(dist.ProcessGroup)
        if name == "allreduce_":
            self.sent["all-reduce gradients"] += int(2 * ring * sum(t.nbytes for t in args[0]))
        elif name == "_allgather_base_":
            self.sent["gather weights"] += int(ring * args[0].nbytes)
        elif name == "_reduce_scatter_base_":
            self.sent["scatter gradients"] += int(ring * args[1].nbytes)
        else:
            assert name == "broadcast_", f"{name} is not counted"
            self.sent["other"] += sum(t.nbytes for t in args[0] if isinstance(t, Tensor))


def one_rank(settings: list[str]) -> None:
    from seedbed import config as configs
    from seedbed.dist.join import join
    from seedbed.recipes import find
    from seedbed.train.stepper import Stepper, build
    from seedbed.tune import scale
    from seedbed.tune.estimate import estimate_costs

    torch.set_num_threads(1)
    recipe, preset = find("gpt/demo")
    config = configs.override(recipe.preset(preset), [*GPT, *settings])
    data = recipe.open_data(config)
    ranks = join(config.dist, "cpu")
    stepper = Stepper(build(recipe, config, data, ranks=ranks), data.train)
    stepper.step(0, 0, 0.5, 100)  # FSDP2 sets itself up
    with Counted() as counted:
        for step in range(1, 1 + NUM_STEPS):
            stepper.step(step, step * config.batch, 0.5, 100)
    if ranks.is_primary:
        estimate = estimate_costs(recipe, configs.override(config, configs.SINGLE_PROCESS), data)
        planned = scale.estimate_scale(recipe, config, data, estimate, 0.4, ranks.world)
        assert planned.accum == config.accum and planned.batch == config.batch
        counts = {name: num / NUM_STEPS for name, num in counted.sent.items()}
        print("FOUND " + json.dumps({"counted": counts, "planned": planned.sent_bytes}))
    ranks.close()


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("world", "settings"), [(world, case) for world, cases in CASES.items() for case in cases])
def test_counted_bytes_are_those_of_the_plan(world: int, settings: list[str]) -> None:
    from rank_processes import PATHS, ports

    (port,) = ports(1)
    shared = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": PATHS, "WORLD_SIZE": str(world)}
    shared |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    argv = [sys.executable, __file__, *settings, f"batch={2 * world}"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    ranks = [subprocess.Popen(argv, env={**shared, "RANK": str(r), "LOCAL_RANK": str(r)}, **pipes) for r in range(world)]
    texts = [process.communicate(timeout=500)[0] for process in ranks]
    assert [process.returncode for process in ranks] == [0] * world, texts
    found = json.loads(texts[0].partition("FOUND ")[2])
    counted, planned = found["counted"], found["planned"]
    for name, num in planned.items():
        assert abs(counted.get(name, 0) - num) <= LIMIT * sum(planned.values()), (name, counted, planned)
    assert sum(counted.values()) == pytest.approx(sum(planned.values()), rel=LIMIT), (counted, planned)


if __name__ == "__main__":
    one_rank(sys.argv[1:])
