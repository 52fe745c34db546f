"""Out of memory on a real device: the step that did not fit is taken in smaller parts, captured or not."""

import gc
from pathlib import Path

import pytest
import torch
from helpers import kinds, rows, start

from seedbed.track.run import Run

pytestmark = pytest.mark.usefixtures("no_report")
# 4096 x 16384 activations are 256 MiB each, the weights less than one: memory follows the micro-batch.
LARGE = ["device=cuda", "model.width=16384", "batch=4096", "data.num=8192", "steps=6", "every.eval=0"]


@pytest.mark.parametrize("capture", ["auto", "off"])
def test_out_of_memory_on_a_small_device_is_survived(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capture: str) -> None:
    settings = [*LARGE, f"capture={capture}"]
    torch.cuda.reset_peak_memory_stats()
    start(tmp_path, "roomy", *settings)
    peak, total = torch.cuda.max_memory_reserved(), torch.cuda.get_device_properties(0).total_memory
    gc.collect()  # the first run lies in circles; what it held would count against the second
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(0.6 * peak / total)
    try:
        assert start(tmp_path, "tight", *settings) == 0
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert "out_of_memory" in kinds(tmp_path, "tight")
    assert Run.open(tmp_path, "tight").config_json()["config"]["accum"] > 1
    for one, other in zip(rows(tmp_path, "roomy"), rows(tmp_path, "tight"), strict=True):
        assert other["loss"] == pytest.approx(one["loss"], rel=1e-3)
