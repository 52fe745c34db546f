"""Gymnasium environments with rgb_array rendering, and Atari games, as simulators.

Shape suffixes: A control axes.
"""

from typing import Any

import numpy as np
from PIL import Image

from seedbed.errors import UserError

MAX_ACTIONS = 64
ATARI_SKIP = 4  # game frames for which a control is held
DEFAULT_FPS = 30


class Gym:
    """An environment by its id. Buttons become one axis each, 0 or 1; continuous controls stay as they are."""

    has_pose = False

    def __init__(self, name: str, height: int, width: int, **options: Any):
        import gymnasium

        self.name, self.size = "gym", (width, height)
        try:
            self.env: Any = gymnasium.make(name, render_mode="rgb_array", disable_env_checker=True, **options)
        except (gymnasium.error.Error, ImportError, TypeError, ValueError) as error:
            raise UserError(f"gymnasium cannot make {name}: {(str(error).splitlines() or [type(error).__name__])[0]}") from None
        self.title, self.space = name, self.env.action_space
        self.kind = type(self.space).__name__
        self.axes = (*((axis, "") for axis in _axes(self.env, name)), ("dt", "s"))
        self.seconds = 1 / float(self.env.metadata.get("render_fps") or DEFAULT_FPS)

    def reset(self, seed: int) -> None:
        self.env.reset(seed=seed)

    def frame(self) -> np.ndarray:
        picture = self.env.render()
        if not isinstance(picture, np.ndarray) or picture.ndim != 3 or picture.shape[2] != 3 or picture.dtype != np.uint8:
            raise UserError(f"gym:{self.title} draws no RGB pictures of bytes in render_mode rgb_array")
        # The whole image, even if the aspect ratio changes: a score or a paddle may be at the border.
        return np.asarray(Image.fromarray(picture).resize(self.size, Image.Resampling.BOX))

    def choose(self, rng: np.random.Generator) -> np.ndarray:
        """Buttons uniformly; of continuous controls one at a time at either end, all at random, or none."""
        num = len(self.axes) - 1
        if self.kind == "Discrete":
            return np.append(np.eye(num)[rng.integers(num)], self.seconds)
        if self.kind == "MultiBinary":
            return np.append(rng.integers(0, 2, num).astype(np.float64), self.seconds)
        # Bounds of continuous controls; 1 where unbounded.
        low, high = (np.asarray(end, np.float64).ravel() for end in (self.space.low, self.space.high))
        low, high = np.where(np.isfinite(low), low, -1.0), np.where(np.isfinite(high), high, 1.0)
        action_A = low + (high - low) * rng.random(num)
        way = rng.integers(4)
        if way > 1:
            rest_A = np.clip(np.zeros(num), low, high)
            one = rng.integers(num)
            action_A = np.where((np.arange(num) == one) & (way == 2), np.where(rng.random() < 0.5, low, high), rest_A)
        return np.append(action_A, self.seconds)

    def step(self, action_A: np.ndarray) -> bool:
        value_A = action_A[:-1]
        if self.kind == "Discrete":
            action = int(self.space.start + value_A.argmax())
        else:
            action = value_A.astype(np.int8 if self.kind == "MultiBinary" else self.space.dtype).reshape(self.space.shape)
        _, _, terminated, truncated, _ = self.env.step(action)
        return not (terminated or truncated)

    def close(self) -> None:
        self.env.close()


class Atari(Gym):
    """A game of ale-py. A control is held for four game frames, without sticky actions; flicker is removed."""

    def __init__(self, name: str, height: int, width: int):
        import ale_py
        import gymnasium

        gymnasium.register_envs(ale_py)
        # The defaults have sticky actions and random frame skips: frame t+1 would not follow from frame t.
        super().__init__(f"ALE/{name}-v5", height, width, frameskip=1, repeat_action_probability=0.0)
        self.name, self.seconds = "atari", ATARI_SKIP / 60
        self._seen: list[np.ndarray] = []

    def reset(self, seed: int) -> None:
        super().reset(seed)
        self._seen = [super().frame()]

    def frame(self) -> np.ndarray:
        return np.maximum.reduce(self._seen[-2:])

    def step(self, action_A: np.ndarray) -> bool:
        self._seen, alive = [], True
        for n in range(ATARI_SKIP):
            alive = super().step(action_A)
            if n >= ATARI_SKIP - 2 or not alive:
                self._seen.append(super().frame())
            if not alive:
                break
        return alive


def _axes(env: Any, name: str) -> list[str]:
    space, kind = env.action_space, type(env.action_space).__name__
    if kind == "Discrete" and space.n <= MAX_ACTIONS:
        spoken = getattr(env.unwrapped, "get_action_meanings", None)
        return [str(word).lower() for word in spoken()] if spoken else [f"button{n}" for n in range(space.n)]
    if kind in ("MultiBinary", "Box") and 0 < int(np.prod(space.shape)) <= MAX_ACTIONS:
        return [f"{'button' if kind == 'MultiBinary' else 'control'}{n}" for n in range(int(np.prod(space.shape)))]
    env.close()
    raise UserError(f"gym:{name} is steered by {space}; up to {MAX_ACTIONS} of Discrete, MultiBinary or Box can be recorded")
