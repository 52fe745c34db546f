"""Work of many small kernels as one CUDA graph, for inference: it is launched at once."""

from collections.abc import Callable, Hashable
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from seedbed.nn.decoding import CachedDecoder

T = TypeVar("T")


def record(work: Callable[[], T], generator: torch.Generator | None = None) -> tuple[torch.cuda.CUDAGraph, T]:
    """A graph that repeats `work` on the same memory, and the result, which every replay overwrites; `work` runs once before."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        work()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    if generator is not None:
        graph.register_generator_state(generator)
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):  # another thread may copy a checkpoint meanwhile
        result = work()
    return graph, result


class GraphedCalls:
    """Repeated calls of functions of tensors: on CUDA, those with the same key are one CUDA graph, recorded at the first of them.

    For work of many small kernels, whose launches take longer than they do. Where recording fails, calls go on eager.
    """

    def __init__(self) -> None:
        self.recorded: dict[Hashable, tuple[list[Tensor], torch.cuda.CUDAGraph, Any]] = {}
        self.is_possible = True

    def __call__(self, key: Hashable, work: Callable[..., T], *inputs: Tensor) -> T:
        """`work(*inputs)`; valid until the next call with this key, and `work` is the one of the first call with it."""
        if not (self.is_possible and inputs[0].is_cuda):
            return work(*inputs)
        if key not in self.recorded:
            held = [tensor.clone() for tensor in inputs]
            try:
                self.recorded[key] = (held, *record(partial(work, *held)))
            except RuntimeError:
                torch.cuda.synchronize()
                self.is_possible = False
                return work(*inputs)
        held, graph, result = self.recorded[key]
        for kept, tensor in zip(held, inputs, strict=True):
            kept.copy_(tensor)
        graph.replay()
        return result


def capture(decoder: CachedDecoder) -> None:
    """Capture the decode step. Warm-up steps rewrite the same slots; counters and generator are restored."""
    before, rng = [c.clone() for c in decoder.counters], decoder.generator.get_state()
    try:
        decoder.graph, _ = record(decoder.step, decoder.generator)
    except RuntimeError as error:
        torch.cuda.synchronize()
        decoder.why_not_captured = str(error).splitlines()[0]
        decoder.generator = torch.Generator(decoder.generator.device)  # the old state would stay marked as being captured
    for counter, value in zip(decoder.counters, before, strict=True):
        counter.copy_(value)
    decoder.generator.set_state(rng)
