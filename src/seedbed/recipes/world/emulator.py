"""What dreams: everything that emulators of a world share, whatever network they are and however they are trained.

Shape suffixes: B windows, A control axes, H W pixels.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from seedbed.config import Config
from seedbed.data.feed import Source
from seedbed.recipes.world.alarms import world_alarms
from seedbed.recipes.world.data import OWN, Dust, WindowsOfPlay, WorldData
from seedbed.recipes.world.evaluate import Judge
from seedbed.recipes.world.export_web import export_web
from seedbed.recipes.world.memory import Layout, Memory
from seedbed.recipes.world.model import Trunk, layout_of, widths_of
from seedbed.recipes.world.objective import Noises, Rollouts, Rows, Window, l1, open_window, rows_of
from seedbed.recipes.world.place import COARSE, NUMBERS, Place, as_numbers
from seedbed.recipes.world.player import WorldPlayer
from seedbed.recipes.world.presets import NEVER
from seedbed.recipes.world.show import show
from seedbed.recipes.world.stages import OPEN, Ladder, Stage
from seedbed.train.system import Batch, Request, Sample, System

if TYPE_CHECKING:
    from seedbed.train.engine import Engine
    from seedbed.train.watch import Alarm

MAPPED = 4  # one in so many predictions of a step is also held against the map alone


def stage_of(engine: Engine | None) -> Stage:
    """The stage of the step that is being taken; checks take steps without one."""
    return engine.variant if engine is not None and isinstance(engine.variant, Stage) else OPEN


class Emulator(System):
    """What dreams: from a memory and a control to the next frame. Training is up to the kinds of it."""

    lesson = "own_frames"
    layout: Layout

    def __init__(self, config: Config, data: WorldData) -> None:
        super().__init__()
        self.config, self.data = config, data
        self.height, self.width = data.recording.frames_THWC.shape[1:3]
        self.num_axes = len(data.recording.axes)
        self.layout = layout_of(config.model, self.height, self.width)
        self.dust = Dust(config.seed)
        self.noises = Noises(self.dust, config.model.context_noise, config.model.blank)
        self.ladder = Ladder(config.model)
        span = self.layout.num_frames + config.model.rollout
        num = config.batch // 2 if config.model.closed < NEVER else 0
        numbers = NUMBERS if config.model.odometer else 0
        self.rollouts = Rollouts(num, span, self.height, self.width, self.num_axes, numbers)
        self.judge = Judge(data)

    def dream(self, memory: Memory, action_BA: Tensor, index_B: Tensor, turn: int, level: float = 0.0) -> Tensor:
        """The next frame, unclamped, by the code that play uses too; noise follows from the counters of window and turn."""
        raise NotImplementedError

    @property
    def trunk(self) -> Trunk:
        raise NotImplementedError

    def new_place(self) -> Place | None:
        """For a network that is to be told where the camera stands."""
        if not self.config.model.odometer:
            return None
        return Place(self.data.recording, widths_of(self.config.model.size, self.height, self.width))

    def pose_of(self, row_B: np.ndarray) -> Tensor | None:
        """Where the camera stood at these rows of the recording, for an odometer."""
        recorded = self.data.recording.pose_T44
        return None if recorded is None else self.as_pose(recorded[row_B])

    def as_pose(self, pose_B44: np.ndarray) -> Tensor | None:
        """As the network is told of it, where it is."""
        if not self.config.model.odometer:
            return None
        return torch.from_numpy(as_numbers(pose_B44)).to(next(self.parameters()).device)

    def onward(self, memory: Memory, action_BA: Tensor, frame_B3HW: Tensor) -> Memory:
        """The memory after this control has led to this frame."""
        if memory.pose_BP is None:
            return memory.push(frame_B3HW)
        assert self.trunk.place is not None
        return memory.push(frame_B3HW, self.trunk.place.after(memory.pose_BP, action_BA))

    def own_noise(self, index_B: Tensor, turn: int) -> Tensor:
        return self.dust(index_B, OWN, turn, (1, self.height, self.width))

    def working(self) -> frozenset[str]:
        return frozenset(f"rollouts.{name}" for name in self.rollouts.state_dict())

    def variant(self, step: int, num_steps: int) -> Stage:
        return self.ladder.stage(step, num_steps)

    def opened(self, batch: Batch, stage: Stage) -> tuple[Window, Rows | None]:
        """What a step predicts: every window of the batch, or half of them beside the rollouts that go on."""
        given = rows_of(batch)
        num = len(given.index_B) // 2 if stage.length > 1 else 0
        if not num:
            return open_window(given, self.layout), None
        kept = len(given.index_B) - num
        going = self.rollouts.go_on(Rows(*(column[kept:] for column in given)), stage.length)
        joined = Rows(*(torch.cat((column[:kept], own)) for column, own in zip(given, going, strict=True)))
        return open_window(joined, self.layout, num), going

    def with_map(self, error: Tensor, window: Window, measured: dict[str, Tensor]) -> Tensor:
        """The error with that of the map alone, for some of the windows, which is measured too.

        Convolutions make up for a map whose walls stand a little wrong, and then it stays so. Alone it has to be right.
        """
        place = self.trunk.place
        if place is None or window.memory.pose_BP is None:
            return error
        rows = slice(None, None, MAPPED)  # the same ones, however many micro-batches there are
        target_B3HW = window.target_B3HW[rows]
        coarse_B3HW, picture_B3HW = place(place.after(window.memory.pose_BP[rows], window.action_BA[rows]))
        mapped = l1(coarse_B3HW, F.avg_pool2d(target_B3HW, COARSE))
        if picture_B3HW is not None:
            mapped = mapped + l1(picture_B3HW, target_B3HW)
        measured["loss_map"] = mapped.detach()
        return error + mapped

    def map_flops(self) -> float:
        """What the map alone costs an item, with its way back."""
        return 0.0 if self.trunk.place is None else 3.0 * self.trunk.place.look_flops() / MAPPED

    def compile_units(self) -> Iterator[nn.Module]:
        yield self.get_submodule("net")
        if self.trunk.place is not None:
            yield self.trunk.place

    @torch.no_grad()
    def evaluate(self, source: Source, engine: Engine) -> dict[str, float]:
        """Free-running error on fixed held-out windows with their true controls, beside what trivial predictors reach."""
        assert isinstance(source, WindowsOfPlay)
        with torch.compiler.set_stance("force_eager"):  # a shape met a few times is not worth compiling
            found = engine.ranks.tell(self.judge.quick(self, source))  # stages follow from it: one answer for all ranks
        if source is self.data.valid:
            gap, error, near = found["gap"], found["free_l1"], found["free_4"]
            self.ladder.measured(gap, found["listens"], error, near)
        return found

    def sample(self, request: Request, engine: Engine) -> Sample:
        return show(self, request, engine)

    def play(self, runtime: str) -> WorldPlayer:
        return WorldPlayer(self, runtime)

    def export_web(self, folder: Path) -> list[Path]:
        return export_web(WorldPlayer(self, "torch"), folder)

    def alarms(self, measured: dict[str, float], progress: float) -> list[Alarm]:
        return world_alarms(measured, self.judge.latest, progress)

    def state(self) -> dict[str, Any]:
        return {"ladder": self.ladder.state()}

    def load_state(self, state: dict[str, Any]) -> None:
        self.ladder.load_state(state["ladder"])

    def describe(self) -> dict[str, Any]:
        kept = ", ".join(f"{num} at 1/{r}" if r > 1 else f"{num} full" for r, num in self.layout.scales)
        closed = "open loop only" if self.config.model.closed >= NEVER else f"closed loop from {self.config.model.closed:.0%}"
        facts = {"memory": f"{kept} frames", "stages": f"{closed}, up to {self.config.model.rollout} frames"}
        examined = self.config.data.examined
        return {**facts, "examined": f"{examined} windows when the run has ended"} if examined else facts
