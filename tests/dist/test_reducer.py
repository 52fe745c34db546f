"""Gradients of replicas over gloo: their mean, sent while the backward pass runs. Run as a script, this file is one rank."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

WIDTH = 40


class Net(nn.Module):
    """Tied weights, a parameter that only some ranks use, and one that none does."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first = nn.Linear(WIDTH, WIDTH, bias=False)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.odd = nn.Parameter(torch.randn(WIDTH))
        self.unused = nn.Parameter(torch.randn(WIDTH))
        self.last = nn.Linear(WIDTH, WIDTH, bias=False)
        self.last.weight = self.first.weight

    def forward(self, x_BN: Tensor, uses_odd: bool) -> Tensor:
        x_BN = self.first(x_BN)
        for layer in self.layers:
            x_BN = x_BN + layer(x_BN).tanh()
        return self.last(x_BN + self.odd if uses_odd else x_BN)


def loss_of(net: Net, rank: int, part: int, second_order: bool) -> Tensor:
    x_BN = torch.randn(5, WIDTH, generator=torch.Generator().manual_seed(10 * rank + part)).requires_grad_()
    loss = net(x_BN, rank % 2 == 1).square().mean()
    if second_order:
        (slope_BN,) = torch.autograd.grad(loss, x_BN, create_graph=True)
        loss = loss + slope_BN.square().sum()
    return loss


def one_rank(rank: int, world: int, store: str) -> None:
    from seedbed.dist import reducer

    dist.init_process_group("gloo", store=dist.FileStore(store, world), rank=rank, world_size=world)
    reducer.BUCKET_BYTES = 4 * WIDTH * WIDTH + 4 * WIDTH  # one layer each
    found: list[dict[str, Any]] = []
    for dtype in (torch.float32, torch.bfloat16):
        for second_order in (False, True):
            for overlaps in (True, False):
                found.append(one_case(rank, world, dtype, second_order, overlaps))
    dist.destroy_process_group()
    print("FOUND " + json.dumps(found))


def one_case(rank: int, world: int, dtype: torch.dtype, second_order: bool, overlaps: bool) -> dict[str, Any]:
    from seedbed.dist.reducer import Reducer

    net, num_parts = Net(), 2
    params = list(net.parameters())
    own = Reducer(params, dtype, overlaps)
    sent: list[int] = []
    for step in range(2):
        for part in range(num_parts):
            if part == num_parts - 1:
                own.start()
            loss_of(net, rank, part, second_order).backward()
            sent.append(len(own._sent))
        own.finish()
        grads = [p.grad for p in params]
        if step == 0:
            for p in params:
                p.grad = None
    plain = Net()
    for r in range(world):
        for part in range(num_parts):
            (loss_of(plain, r, part, second_order) / world).backward()
    wanted = [torch.zeros_like(p) if p.grad is None else p.grad for p in plain.parameters()]
    size = max(w.abs().max().item() for w in wanted)
    apart = max((g - w).abs().max().item() for g, w in zip(grads, wanted, strict=True) if g is not None) / size
    return {
        "case": f"{dtype} {second_order} {overlaps}",
        "apart": apart,
        "limit": 1e-6 if dtype == torch.float32 else 2**-6,
        "missing": sum(g is None for g in grads),
        "dtypes": sorted({str(g.dtype) for g in grads if g is not None}),
        "sent": sent,
        "buckets": len(own.buckets),
        "overlaps": overlaps,
    }


@pytest.mark.timeout(120)
@pytest.mark.parametrize("world", [2, 4])
def test_gradients_are_averaged_during_the_backward_pass(tmp_path: Path, world: int) -> None:
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    argv = [sys.executable, __file__, str(tmp_path / "store"), str(world)]
    ranks = [subprocess.Popen([*argv, str(r)], env=env, stdout=subprocess.PIPE, text=True) for r in range(world)]
    texts = [process.communicate(timeout=100)[0] for process in ranks]
    assert [process.returncode for process in ranks] == [0] * world
    for text in texts:
        cases = json.loads(text.partition("FOUND ")[2])
        assert len(cases) == 8
        for case in cases:
            assert case["apart"] < case["limit"] and not case["missing"] and case["dtypes"] == ["torch.float32"], case
            # Nothing before the last micro-batch; then, with overlap, all buckets up to the first with an unused parameter.
            early, during = case["sent"][0::2], case["sent"][1::2]
            assert early == [0, 0], case
            assert case["buckets"] == 6 and during == ([4, 4] if case["overlaps"] else [0, 0]), case


if __name__ == "__main__":
    one_rank(int(sys.argv[3]), int(sys.argv[2]), sys.argv[1])
