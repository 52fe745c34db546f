"""ViZDoom as a simulator: a maze without monsters. The applied motion is recorded.

Shape suffixes: A control axes.
"""

import contextlib
import os
import tempfile

import numpy as np
from PIL import Image

from seedbed.recipes.world.recording import poses
from seedbed.recipes.world.recording.capture import POSE_AXES, fit

MAP = "my_way_home.wad"
METRES = 1 / 32  # per map unit
# Typical controls per tic: displacement in metres without friction, and rotation in radians.
SPEED_4 = np.array([22.0 * METRES, 22.0 * METRES, np.radians(3.0), np.radians(5.0)])
MAX_PITCH = np.radians(35.0)
START = 14  # tics before the player may move
TIC = 1 / 35
EYE = 41  # map units


class Doom:
    """x forward, y left, pitch down, yaw left: the convention of every other recording, not the game's."""

    name = "doom"
    axes = POSE_AXES
    seconds, has_pose = TIC, True

    def __init__(self, name: str, height: int, width: int):
        import vizdoom

        self.height, self.width = height, width
        self.game = game = vizdoom.DoomGame()
        game.set_doom_scenario_path(os.path.join(vizdoom.scenarios_path, MAP))
        game.set_doom_map("map01")
        large = max(height, width) > 160
        game.set_screen_resolution(getattr(vizdoom.ScreenResolution, "RES_320X240" if large else "RES_160X120"))
        game.set_screen_format(vizdoom.ScreenFormat.RGB24)
        for part in ("hud", "weapon", "crosshair", "decals", "particles", "effects_sprites", "messages", "corpses"):
            getattr(game, f"set_render_{part}")(False)
        buttons = ("MOVE_FORWARD_BACKWARD_DELTA", "MOVE_LEFT_RIGHT_DELTA", "LOOK_UP_DOWN_DELTA", "TURN_LEFT_RIGHT_DELTA")
        game.set_available_buttons([getattr(vizdoom.Button, name) for name in buttons])
        known = ("POSITION_X", "POSITION_Y", "POSITION_Z", "PITCH", "ANGLE")
        game.set_available_game_variables([getattr(vizdoom.GameVariable, name) for name in known])
        game.set_window_visible(False)
        game.set_sound_enabled(False)
        game.set_mode(vizdoom.Mode.PLAYER)
        game.set_episode_timeout(0)
        game.set_episode_start_time(START)
        # View bobbing is not explained by any control.
        game.add_game_args("+movebob 0 +stillbob 0")
        # The game writes its settings and a folder into the working directory.
        self.scratch = tempfile.TemporaryDirectory()
        game.set_doom_config_path(os.path.join(self.scratch.name, "doom.ini"))
        with contextlib.chdir(self.scratch.name):
            game.init()

    def reset(self, seed: int) -> None:
        self.game.set_seed(seed)
        self.game.new_episode()
        self._update()

    def _update(self) -> None:
        """Keep the last state: at the end of an episode there is none."""
        state = self.game.get_state()
        if state is not None:
            self._picture = Image.fromarray(state.screen_buffer)
            self._place_5 = np.array(state.game_variables, np.float64)

    def frame(self) -> np.ndarray:
        return fit(self._picture, self.height, self.width)

    def choose(self, rng: np.random.Generator) -> np.ndarray:
        """One control at a time with either sign, all at random, or none; large pitch is reduced."""
        way = rng.integers(11)
        if way < 8:
            action_4 = np.eye(4)[way // 2] * (1.0 if way % 2 else -1.0) * rng.uniform(0.5, 1.2)
        else:
            action_4 = rng.standard_normal(4) * 0.6 if way < 10 else np.zeros(4)
        down = np.radians(_signed(self._place_5[3]))
        if abs(down) > MAX_PITCH or (abs(down) > 0.5 * MAX_PITCH and rng.random() < 0.5):
            action_4[2] = -np.sign(down) * rng.uniform(0.3, 1.0)
        forward, left, pitch, yaw = action_4 * SPEED_4
        return np.array([forward, left, 0.0, 0.0, pitch, yaw, TIC])

    def step(self, action_A: np.ndarray) -> bool:
        forward, left, _, _, down, turn = action_A[:6]
        self.game.make_action([forward / METRES, -left / METRES, -np.degrees(down), -np.degrees(turn)])
        self._update()
        return not self.game.is_episode_finished()

    def pose(self) -> np.ndarray:
        """Body to world, in metres."""
        x, y, z, down, angle = self._place_5
        pose_44 = np.eye(4)
        yaw_33, pitch_33 = poses.exp(np.array([[0.0, 0.0, np.radians(angle)], [0.0, np.radians(_signed(down)), 0.0]]))
        pose_44[:3, :3] = yaw_33 @ pitch_33
        pose_44[:3, 3] = np.array([x, y, z + EYE]) * METRES
        return pose_44

    def close(self) -> None:
        self.game.close()
        self.scratch.cleanup()


def _signed(degrees: float) -> float:
    """Degrees that wrap at 360, around zero."""
    return (degrees + 180) % 360 - 180
