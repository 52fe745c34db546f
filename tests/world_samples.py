"""A small box world for the tests of the world recipe: one recording for a session, and systems that are built in no time."""

from typing import Any

import numpy as np
import torch

from seedbed import config as configs
from seedbed.config import Config
from seedbed.data.feed import Feed
from seedbed.recipes import find
from seedbed.recipes.world.data import WindowSource, WorldData
from seedbed.recipes.world.emulator import Emulator
from seedbed.recipes.world.memory import Memory, to_float
from seedbed.recipes.world.simulators.box import rebuild_simulator
from seedbed.recipes.world.system import build
from seedbed.train.engine import Engine

TINY = ["data.frames=1200", "data.height=16", "data.width=16", "model.size=0.05m", "batch=8", "steps=6", "data.examined=0"]
# The larger world, long rollouts and no fine pass.
PLAIN = ["data.recording=box", "model.fine_samples=0", "model.rollout=64"]


def config_of(*assignments: str, preset: str = "demo") -> Config:
    recipe, name = find(f"world/{preset}")
    return configs.override(recipe.preset(name), [*TINY, *PLAIN, "device=cpu", *assignments])


def made(*assignments: str, preset: str = "demo") -> tuple[Emulator, Engine, Feed]:
    config = config_of(*assignments, preset=preset)
    data = find("world")[0].open_data(config)
    assert isinstance(data, WorldData)
    system = build(config, data)
    feed = Feed(data.train, batch=config.batch, parts=1, seed=config.seed, device=torch.device("cpu"))
    feed.load(0)
    return system, Engine(system, config, torch.device("cpu")), feed


def valid(system: Emulator) -> WindowSource:
    assert isinstance(system.data.valid, WindowSource)
    return system.data.valid


class Oracle(Emulator):
    """An emulator that looks at the world itself; `shuffled` ones stand still, `share` of a control reaches the others."""

    def __init__(self, config: Config, data: WorldData, share: float = 1.0) -> None:
        super().__init__(config, data)
        self.unused = torch.nn.Parameter(torch.zeros(1))
        self.world, self.share = rebuild_simulator(data.recording), share
        self.poses: dict[int, np.ndarray] = {}

    def advance(self, memory: Memory, action_BA: torch.Tensor, frame_B3HW: torch.Tensor) -> Memory:
        return memory.push(frame_B3HW)  # it looks at none of it

    def predict_frame(self, memory: Memory, action_BA: torch.Tensor, index_B: torch.Tensor, turn: int, level: float = 0.0) -> Any:
        recording, world = self.data.recording, self.world
        assert world is not None and recording.pose_T44 is not None
        scale_A = np.array([axis.scale for axis in recording.axes])
        motion_BA = action_BA.double().numpy() * scale_A * self.share
        if turn == 1:
            start_B = index_B.numpy() + self.layout.num_frames - 1
            self.pose_B44 = recording.pose_T44[start_B]
        self.pose_B44 = world.slide(self.pose_B44, motion_BA[:, :6])
        return to_float(world.render(torch.from_numpy(self.pose_B44)))
