"""Base class of world models: prediction, memory, rollouts, evaluation and play, whatever the network and its objective.

Shape suffixes: B windows, A control axes, H W pixels.
"""

import contextlib
import math
from collections.abc import Iterator
from pathlib import Path
from types import MappingProxyType
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor, nn

from seedbed.config import Config
from seedbed.errors import UserError
from seedbed.nn import eagerly
from seedbed.nn.cuda_graph import GraphedCalls
from seedbed.recipes.world.curriculum import BLIND, OPEN, Curriculum, Stage
from seedbed.recipes.world.data import OWN, CounterNoise, Turn, WindowSource, WorldData
from seedbed.recipes.world.evaluate import quick
from seedbed.recipes.world.export_web import export_web
from seedbed.recipes.world.memory import Layout, Memory
from seedbed.recipes.world.model import Trunk, WorldNet, layout_of, widths_of
from seedbed.recipes.world.objective import Rollouts, Rows, TrainingNoise, Window, field_loss, l1, open_window, rows_of
from seedbed.recipes.world.player import WorldPlayer
from seedbed.recipes.world.presets import NEVER
from seedbed.recipes.world.radiance_field import POSE_SIZE, RadianceField, flatten_poses
from seedbed.recipes.world.show import SampleOptions, show
from seedbed.train.alarm_tables import raised, read_alarms
from seedbed.train.engine import EvalEngine
from seedbed.train.system import Batch, Request, Sample, System
from seedbed.train.watch import Alarm

FIELD_ROW_STRIDE = 4  # the radiance field has a loss of its own on every fourth prediction
ALARMS = read_alarms(Path(__file__).with_name("alarms.toml"))
CLOSE = 4.0  # margin of the critic up to which it wins by little


def stage_of(engine: EvalEngine) -> Stage:
    """The curriculum stage of the current step; checks run steps without one."""
    return engine.variant if isinstance(engine.variant, Stage) else OPEN


class Emulator(System):
    """Predicts the next frame from a memory and a control. Subclasses define the network and the training step."""

    stage_metric = "own_frames"
    higher_is_better = ("psnr_*", "free_[0-9]*", "copy_[0-9]*", "mean_[0-9]*", "fade_[0-9]*", "listens")
    sample_options = SampleOptions
    evaluation_steers = True  # stages depend on evaluation results
    net: WorldNet | Trunk
    layout: Layout
    # On an H200 tuning each elementwise kernel took 17 s of 110 s of compiling box64 and gained nothing (9.7k and 9.8k items/s).
    compile_options = MappingProxyType({"triton.autotune_pointwise": False, "loop_ordering_after_fusion": False})

    def __init__(self, config: Config, data: WorldData) -> None:
        super().__init__()
        self.config, self.data = config, data
        self.height, self.width = data.recording.frames_THWC.shape[1:3]
        self.num_axes = len(data.recording.axes)
        self.layout = layout_of(config.model, self.height, self.width)
        self.noise_table = CounterNoise(config.seed)
        self.training_noise = TrainingNoise(self.noise_table, config.model.context_noise, config.model.memory_dropout)
        self.curriculum = Curriculum(config.model)
        span = self.layout.num_frames + config.model.rollout
        num = config.batch // 2 if config.model.closed < NEVER else 0
        numbers = POSE_SIZE if config.model.pose_tracking else 0
        self.rollouts = Rollouts(num, span, self.height, self.width, self.num_axes, numbers)
        self.evaluated: dict[str, float] = {}  # the latest evaluation
        self.trained_rows = 0  # rows per network call in training; 0 before the first step
        self._chunk = 0
        self._graphs: GraphedCalls | None = None

    def predict_frame(self, memory: Memory, action_BA: Tensor, index_B: Tensor, turn: Turn, level: float = 0.0) -> Tensor:
        """The next frame, unclamped, in evaluation and play alike. Noise depends on the window counter and `turn` only."""
        raise NotImplementedError

    @property
    def trunk(self) -> Trunk:
        return self.net if isinstance(self.net, Trunk) else self.net.trunk

    @contextlib.contextmanager
    def with_compiled_graph(self) -> Iterator[None]:
        """Predictions inside use the graph compiled for training, or eager mode without one. Nothing is compiled.

        What it was compiled for is kept to: as many rows, contiguous, with gradients on, in training mode, which changes no
        number: the network has no dropout and no statistics of batches.
        """
        net = self.net
        compiled = net._compiled_call_impl is not None and bool(self.trained_rows)
        before, self._chunk = self._chunk, self.trained_rows if compiled else 0
        modes = {module: module.training for module in net.modules()} if compiled else {}
        for module in modes:
            module.training = True
        try:
            with torch.compiler.set_stance("eager_on_recompile") if compiled else eagerly():
                yield
        finally:
            self._chunk = before
            for module, mode in modes.items():
                module.training = mode

    @contextlib.contextmanager
    def long_rollouts(self) -> Iterator[None]:
        """`with_compiled_graph`, and on CUDA a step of a rollout is one CUDA graph for each number of rows."""
        self._graphs = GraphedCalls()
        try:
            with self.with_compiled_graph():
                yield
        finally:
            self._graphs = None
            if torch.cuda.is_initialized():
                torch.cuda.empty_cache()  # the memory of graphs is their own until it is given back

    def rollout_step(self, memory: Memory, action_BA: Tensor, index_B: Tensor, turn: int, level: float = 0.0) -> Memory:
        """The memory after the frame that is predicted for this control."""

        def step(action_BA: Tensor, index_B: Tensor, turn: Turn, *tensors: Tensor) -> Memory:
            before = memory.of(tensors)
            return self.advance(before, action_BA, self.predict_frame(before, action_BA, index_B, turn, level))

        if self._graphs is None or not action_BA.is_cuda:
            return step(action_BA, index_B, turn, *memory.tensors().values())
        given = (action_BA, index_B, torch.full((), turn, device=action_BA.device), *memory.tensors().values())
        after = self._graphs((len(action_BA), level), step, *given)
        return after.of(tensor.clone() for tensor in after.tensors().values())  # the next step overwrites them

    def call(self, memory: dict[str, Tensor], *inputs: Tensor) -> Tensor:
        """The network's output for these rows; inside `with_compiled_graph`, in calls of the training batch size."""
        if not self._chunk:
            found = self.net(memory, *inputs)
            return found[0] if isinstance(found, tuple) else found
        num, parts = len(inputs[0]), []
        for first in range(0, num, self._chunk):
            row_B = torch.arange(first, first + self._chunk, device=inputs[0].device).clamp_max(num - 1)
            with torch.enable_grad():
                found = self.net({name: kept[row_B] for name, kept in memory.items()}, *(column[row_B] for column in inputs))
            parts.append((found[0] if isinstance(found, tuple) else found).detach())
        return torch.cat(parts)[:num]

    def new_radiance_field(self) -> RadianceField | None:
        if not self.config.model.pose_tracking:
            return None
        widths = widths_of(self.config.model.size, self.height, self.width)
        model = self.config.model
        return RadianceField(self.data.recording, widths, model.plane_resolution, model.fine_samples)

    def pose_of(self, row_B: np.ndarray) -> Tensor | None:
        """Camera poses at these rows of the recording, for pose tracking."""
        recorded = self.data.recording.pose_T44
        return None if recorded is None else self.as_pose(recorded[row_B])

    def as_pose(self, pose_B44: np.ndarray) -> Tensor | None:
        """The network's input for poses; None without pose tracking."""
        if not self.config.model.pose_tracking:
            return None
        return torch.from_numpy(flatten_poses(pose_B44)).to(next(self.parameters()).device)

    def advance(self, memory: Memory, action_BA: Tensor, frame_B3HW: Tensor) -> Memory:
        """The memory after this control and the frame it led to."""
        if memory.pose_BP is None:
            return memory.push(frame_B3HW)
        assert self.trunk.field is not None
        return memory.push(frame_B3HW, self.trunk.field.next_pose(memory.pose_BP, action_BA))

    def own_noise(self, index_B: Tensor, turn: Turn) -> Tensor:
        return self.noise_table(index_B, OWN, turn, (1, self.height, self.width))

    def rank_local_buffers(self) -> frozenset[str]:
        return frozenset(f"rollouts.{name}" for name in self.rollouts.state_dict())

    def variant(self, step: int, num_steps: int) -> Stage:
        return self.curriculum.stage(step, num_steps)

    def variants(self, num_steps: int) -> tuple[Stage, ...]:
        """Every stage that the curriculum can reach."""
        model = self.config.model
        closed = (Stage("closed", max(2, min(4, model.rollout))),) if model.closed < NEVER and model.rollout > 1 else ()
        length = closed[0].length if closed else 1
        last = (Stage("critic", length), Stage("adversarial", length)) if model.adversarial < NEVER else ()
        return (OPEN, *closed, *last)

    def training_windows(self, batch: Batch, stage: Stage) -> tuple[Window, Rows | None]:
        """The predictions of a step: every window of the batch, or half of them and the continued rollouts."""
        given = rows_of(batch)
        num = len(given.index_B) // 2 if stage.length > 1 else 0
        self.trained_rows = len(given.index_B)
        if not num:
            return open_window(given, self.layout), None
        kept = len(given.index_B) - num
        going = self.rollouts.next_rows(Rows(*(column[kept:] for column in given)), stage.length)
        joined = Rows(*(torch.cat((column[:kept], own)) for column, own in zip(given, going, strict=True)))
        return open_window(joined, self.layout, num), going

    def loss_of_step(self, opened: Tensor, closed: Tensor, window: Window, stage: Stage) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss of both kinds of predictions, on true memories and in rollouts, and the metrics of all stages.

        The radiance field has its own loss, on some of the windows: the U-net would compensate for a wrong field.
        """
        first = slice(0, len(window.index_B) - window.num_own)
        copied = l1(window.memory.last[first], window.target_B3HW[first])
        measured = {"loss_open": opened.detach(), "loss_closed": closed.detach(), "copy_last": copied}
        measured["own_frames"], error = torch.full_like(copied, stage.length), 0.5 * (opened + closed)
        if self.trunk.field is None or window.memory.pose_BP is None:
            return error, measured
        rows = slice(None, None, FIELD_ROW_STRIDE)  # the same ones for any number of micro-batches
        mapped = field_loss(self.render_field(window.memory.pose_BP[rows], window.action_BA[rows]), window.target_B3HW[rows])
        return error + mapped, {**measured, "loss_map": mapped.detach()}

    def render_field(self, pose_BP: Tensor, action_BA: Tensor) -> tuple[Tensor, ...]:
        """The field's own images after a control: coarse, and full size where there is a fine pass."""
        field = self.trunk.field
        assert field is not None
        coarse_B3HW, picture_B3HW = field(field.next_pose(pose_BP, action_BA))
        return (coarse_B3HW,) if picture_B3HW is None else (coarse_B3HW, picture_B3HW)

    def row_stride(self) -> int:
        return 1 if self.trunk.field is None else FIELD_ROW_STRIDE

    def field_flops(self) -> float:
        """Cost of the field's own loss per item, with the backward pass."""
        return 0.0 if self.trunk.field is None else 3.0 * self.trunk.field.render_flops() / FIELD_ROW_STRIDE

    def compile_units(self) -> Iterator[nn.Module]:
        yield self.net
        if self.trunk.field is not None:
            yield self.trunk.field

    @torch.no_grad()
    def evaluate(self, source: WindowSource, engine: EvalEngine) -> dict[str, float]:
        """Free-running error on fixed held-out windows with their true controls, and that of the baselines."""
        with self.with_compiled_graph():
            found = self.evaluated = engine.ranks.broadcast_object(quick(self, source))  # the stage depends on it
        if source is self.data.valid:
            self.curriculum.measured(found["gap"], found["listens"], found["free_l1"], found["free_4"])
        return found

    def sample(self, request: Request, engine: EvalEngine) -> Sample:
        return show(self, request, engine)

    def play(self, runtime: str) -> WorldPlayer:
        return WorldPlayer(self, runtime)

    def export_web(self, folder: Path) -> list[Path]:
        return export_web(WorldPlayer(self, "torch"), folder)

    def onnx_network(self) -> NoReturn:
        raise UserError("a world is exported with --to web: its folder holds network.onnx and the memory that the network needs")

    def alarms(self, measured: dict[str, float], progress: float) -> list[Alarm]:
        """Of the latest evaluation, and of an unbalanced critic: one that wins by little does no harm."""
        seen = dict(self.evaluated)
        if measured.get("loss_critic"):
            names = ("critic_won", "critic_margin", "r1") if abs(measured["critic_margin"]) > CLOSE else ("r1",)
            seen |= {name: measured[name] for name in names}
        least = {"blind": BLIND, "below_copy": seen.get("copy_1", -math.inf)}
        return raised(ALARMS, seen, progress, **{kind: (low, math.inf) for kind, low in least.items()})

    def state(self) -> dict[str, Any]:
        return {"ladder": self.curriculum.state()}

    def load_state(self, state: dict[str, Any]) -> None:
        self.curriculum.load_state(state["ladder"])

    def describe(self) -> dict[str, Any]:
        kept = ", ".join(f"{num} at 1/{r}" if r > 1 else f"{num} full" for r, num in self.layout.scales)
        closed = "open loop only" if self.config.model.closed >= NEVER else f"closed loop from {self.config.model.closed:.0%}"
        facts = {"memory": f"{kept} frames", "stages": f"{closed}, up to {self.config.model.rollout} frames"}
        if self.config.data.examined:
            facts["examined"] = f"{self.config.data.examined} windows when the run has ended"
        return facts
