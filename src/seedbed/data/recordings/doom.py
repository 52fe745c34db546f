"""ViZDoom as a simulator to record: a maze without monsters, walked by pushing and turning.

What is recorded is the motion that came of it.

Shape suffixes: A control axes.
"""

import contextlib
import os
import tempfile

import numpy as np
from PIL import Image

from seedbed.data import poses
from seedbed.data.recordings.take import POSE_AXES, fit
from seedbed.errors import UserError

MAP = "my_way_home.wad"
METRES = 1 / 32  # per map unit
# Usual controls of one tic: a push in metres, as if nothing slowed it down, and turns in radians.
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

    def __init__(self, height: int, width: int):
        try:
            import vizdoom
        except ImportError:
            raise UserError('Doom needs vizdoom: pip install "seedbed[doom]"') from None
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
        # The view would go up and down with every step, which no control explains.
        game.add_game_args("+movebob 0 +stillbob 0")
        # The game leaves its settings and a folder wherever it is started.
        self.litter = tempfile.TemporaryDirectory()
        game.set_doom_config_path(os.path.join(self.litter.name, "doom.ini"))
        with contextlib.chdir(self.litter.name):
            game.init()

    def reset(self, seed: int) -> None:
        self.game.set_seed(seed)
        self.game.new_episode()
        self._look()

    def _look(self) -> None:
        """Keep what is seen: at the end of an episode the game shows nothing more."""
        state = self.game.get_state()
        if state is not None:
            self._picture = Image.fromarray(state.screen_buffer)
            self._place_5 = np.array(state.game_variables, np.float64)

    def frame(self) -> np.ndarray:
        return fit(self._picture, self.height, self.width)

    def choose(self, rng: np.random.Generator) -> np.ndarray:
        """One control at a time to either side, all at once, or none; a head that is far up or down comes back."""
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
        self._look()
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
        self.litter.cleanup()


def _signed(degrees: float) -> float:
    """Degrees that wrap at 360, around zero."""
    return (degrees + 180) % 360 - 180
