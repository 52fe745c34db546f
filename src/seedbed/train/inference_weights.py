"""The weights of a checkpoint for inference: averaged ones take the place of those they average."""

from typing import Any

from torch import Tensor

from seedbed.train import checkpoint_loading
from seedbed.train.ema import Ema
from seedbed.train.engine import EvalEngine, saved_buffers
from seedbed.train.system import rank_local_buffers

# Groups of a checkpoint's tensors that inference reads.
WEIGHTS = ("model", "ema", "ema2")


def inference_tensors(engine: EvalEngine) -> dict[str, dict[str, Tensor]]:
    """The tensors of a system that inference needs: weights and saved buffers, and the longer average where there is one."""
    system = engine.system
    params, local = dict(system.named_parameters()), rank_local_buffers(system)
    live: dict[str, dict[str, Any]] = {"model": params | {n: b for n, b in saved_buffers(system).items() if n not in local}}
    return live | {"ema2": engine.ema2.shadow} if engine.ema2 else live


def restore(engine: EvalEngine, saved: checkpoint_loading.Checkpoint) -> None:
    """The checkpoint's weights into the system, the averaged ones where there are any; the system is in evaluation mode then."""
    system, what = engine.system.eval(), f"checkpoint {saved.path.name}"
    if "ema2" in saved.tensors:
        engine.ema2 = Ema(system, engine.config.ema2)
    checkpoint_loading.restore(inference_tensors(engine), saved.tensors, what)
    if "ema" in saved.tensors:
        averaged: dict[str, dict[str, Tensor]] = {"ema": {n: p for n, p in system.named_parameters() if p.requires_grad}}
        checkpoint_loading.restore(averaged, saved.tensors, what)
