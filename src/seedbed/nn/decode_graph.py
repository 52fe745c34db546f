"""The decode step of generation as one CUDA graph."""

import torch

from seedbed.nn.decoding import CachedDecoder


def capture(decoder: CachedDecoder) -> None:
    """Capture the decode step. Warm-up steps rewrite the same slots; counters and generator are restored."""
    before, rng = [c.clone() for c in decoder.counters], decoder.generator.get_state()
    graph = torch.cuda.CUDAGraph()
    try:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            decoder.step()
        torch.cuda.current_stream().wait_stream(side)
        graph.register_generator_state(decoder.generator)
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):  # another thread may copy a checkpoint meanwhile
            decoder.step()
        decoder.graph = graph
    except RuntimeError as error:
        torch.cuda.synchronize()
        decoder.why_not_captured = str(error).splitlines()[0]
        decoder.generator = torch.Generator(decoder.generator.device)  # the old state would stay marked as being captured
    for counter, value in zip(decoder.counters, before, strict=True):
        counter.copy_(value)
    decoder.generator.set_state(rng)
