"""Work of many small kernels as one CUDA graph, for inference: it is launched at once."""

from collections.abc import Callable
from typing import TypeVar

import torch

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
