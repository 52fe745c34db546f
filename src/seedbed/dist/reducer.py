"""Gradients of replicas, averaged over ranks bucket by bucket while the backward pass computes the others."""

import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

# The size of a bucket: large enough for the network, small enough that most of them leave before the backward pass ends.
BUCKET_BYTES = 25 << 20


class Reducer:
    """Averages gradients between `start` and `finish`: a bucket is sent once all of its gradients have been accumulated.

    Every rank sends the same buckets in the same order, from the last parameter to the first, whatever the order in which
    gradients arrive; one that never does counts as zero. The order is fixed, so that a resumed run rounds as before.
    `dtype` is that of the sums. Without `overlaps` all is sent by `finish`.
    """

    def __init__(self, params: Sequence[nn.Parameter], dtype: torch.dtype = torch.float32, overlaps: bool = True) -> None:
        self.dtype = dtype
        self.buckets = list(_buckets(list(reversed(params))))
        self._missing = [0] * len(self.buckets)
        self._sent: list[tuple[Any, Tensor]] = []
        self._is_open = False
        for number, bucket in enumerate(self.buckets if overlaps else ()):
            for param in bucket:
                param.register_post_accumulate_grad_hook(functools.partial(self._accumulated, number))

    def start(self) -> None:
        """Send gradients from now on: the next backward pass is the last of the step for these parameters."""
        self._missing, self._is_open = [len(bucket) for bucket in self.buckets], True
        self._sent.clear()

    @torch.no_grad()
    def finish(self) -> None:
        """Send what is left and wait; every parameter then has the mean of its gradients."""
        self._is_open = False
        while len(self._sent) < len(self.buckets):
            self._send()
        for bucket, (work, flat) in zip(self.buckets, self._sent, strict=True):
            work.wait()
            if not _can_average():
                flat /= dist.get_world_size()
            sizes = [param.numel() for param in bucket]
            for param, mean in zip(bucket, flat.to(bucket[0].dtype).split(sizes), strict=True):
                param.grad = mean.view_as(param)  # the gradient's own memory is free since the bucket was sent
        self._sent.clear()

    @torch.no_grad()
    def _accumulated(self, number: int, _param: Tensor) -> None:
        if not self._is_open:
            return
        assert self._missing[number] > 0, "a parameter got a second gradient in one backward pass: the first may have been sent"
        self._missing[number] -= 1
        while len(self._sent) < len(self.buckets) and self._missing[len(self._sent)] == 0:
            self._send()

    def _send(self) -> None:
        bucket = self.buckets[len(self._sent)]
        parts = [(torch.zeros_like(p) if p.grad is None else p.grad).reshape(-1) for p in bucket]
        flat = (parts[0] if len(parts) == 1 else torch.cat(parts)).to(self.dtype)
        for param in bucket:
            param.grad = None
        work = dist.all_reduce(flat, dist.ReduceOp.AVG if _can_average() else dist.ReduceOp.SUM, async_op=True)
        self._sent.append((work, flat))


def make_reducers(modules: Mapping[str, nn.Module], dtype: torch.dtype, overlaps: bool) -> dict[str, Reducer]:
    """One for the trained parameters of every module that are not sharded."""
    params = {n: [p for p in m.parameters() if p.requires_grad and not hasattr(p, "to_local")] for n, m in modules.items()}
    return {name: Reducer(found, dtype, overlaps) for name, found in params.items() if found}


def _can_average() -> bool:
    """Whether the collective itself divides; gloo only adds."""
    return "nccl" in dist.get_backend()


def _buckets(params: Sequence[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    """Consecutive parameters of one dtype, at most BUCKET_BYTES together."""
    bucket: list[nn.Parameter] = []
    size = 0
    for param in params:
        if bucket and (size + param.nbytes > BUCKET_BYTES or param.dtype != bucket[0].dtype):
            yield bucket
            bucket, size = [], 0
        bucket.append(param)
        size += param.nbytes
    if bucket:
        yield bucket
