"""Tiny takes in every format that can be imported: pictures of the box world from known poses, and what must come out."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from seedbed.recipes.world.recording import poses
from seedbed.recipes.world.simulators import box
from seedbed.recipes.world.simulators.box import BoxWorld

NUM, SIDE = 240, 48
CLOCK = 60_000  # of a video with uneven times


class Truth:
    """A walk with uneven times: its poses, frames and motions."""

    def __init__(self, num: int = NUM, seed: int = 7):
        self.world = BoxWorld(3, SIDE, SIDE)
        pose_NT44, action_NTA, _ = box.trajectories(self.world, num, 1, seed)
        self.pose_T44, self.action_T6 = pose_NT44[0], action_NTA[0, :, :6]
        self.frames_THWC = self.world.render(torch.from_numpy(self.pose_T44)).numpy()
        self.time_T = np.cumsum(np.random.default_rng(0).uniform(0.03, 0.04, num))

    def camera(self, basis_33: np.ndarray) -> np.ndarray:
        """Camera-to-world, for a camera whose axes are not the body's."""
        return poses.body_pose(self.pose_T44, np.linalg.inv(basis_33))

    def rows(self, basis_33: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Places, and quaternions x, y, z, w."""
        camera_T44 = self.camera(basis_33)
        return camera_T44[:, :3, 3], poses.to_quaternion(camera_T44[:, :3, :3])


def write_video(path: Path, frames_THWC: np.ndarray, stamps: list[int] | None = None) -> None:
    """An mp4 of 30 frames a second; `stamps` are other times, in 1/CLOCK s."""
    import av

    with av.open(str(path), "w") as container:
        stream: Any = container.add_stream("mpeg4", rate=30)
        stream.height, stream.width = frames_THWC.shape[1:3]
        stream.pix_fmt, stream.bit_rate = "yuv420p", 8_000_000
        if stamps:
            from fractions import Fraction

            stream.codec_context.time_base = Fraction(1, CLOCK)
        for n, frame_HWC in enumerate(frames_THWC):
            frame = av.VideoFrame.from_ndarray(np.ascontiguousarray(frame_HWC), format="rgb24")
            if stamps:
                frame.pts, frame.time_base = stamps[n], stream.codec_context.time_base
            for packet in stream.encode(frame):
                container.mux(packet)
        for packet in stream.encode():
            container.mux(packet)


def write_pictures(folder: Path, frames_THWC: np.ndarray, name: str = "{}.png") -> list[str]:
    folder.mkdir(parents=True, exist_ok=True)
    names = [name.format(n) for n in range(len(frames_THWC))]
    for file, frame_HWC in zip(names, frames_THWC, strict=True):
        Image.fromarray(frame_HWC).save(folder / file, compress_level=1)
    return names


def write_stray(folder: Path, truth: Truth, basis_33: np.ndarray = poses.FROM_OPENCV) -> None:
    folder.mkdir(parents=True)
    write_video(folder / "rgb.mp4", truth.frames_THWC)
    place_T3, turn_T4 = truth.rows(basis_33)
    lines = ["timestamp, frame, x, y, z, qx, qy, qz, qw"]
    for n, time in enumerate(truth.time_T):
        lines.append(f"{time!r}, {n:06d}, " + ", ".join(repr(float(v)) for v in (*place_T3[n], *turn_T4[n])))
    (folder / "odometry.csv").write_text("\n".join(lines).replace("np.float64(", "").replace(")", ""))


def write_nerfstudio(folder: Path, truth: Truth) -> None:
    names = write_pictures(folder / "images", truth.frames_THWC, "frame_{}.png")
    camera_T44 = truth.camera(poses.FROM_OPENGL)
    entries = [{"file_path": f"./images/{name}", "transform_matrix": camera_T44[n].tolist()} for n, name in enumerate(names)]
    mixed = np.random.default_rng(1).permutation(len(entries))
    (folder / "transforms.json").write_text(json.dumps({"frames": [entries[n] for n in mixed]}))


def write_record3d(folder: Path, truth: Truth) -> None:
    write_pictures(folder / "rgbd", truth.frames_THWC)
    place_T3, turn_T4 = truth.rows(poses.FROM_OPENGL)
    facts = {"poses": np.column_stack((turn_T4, place_T3)).tolist(), "fps": 60, "frameTimestamps": truth.time_T.tolist()}
    (folder / "metadata").write_text(json.dumps(facts))


def write_tum(folder: Path, truth: Truth) -> None:
    names = write_pictures(folder / "rgb", truth.frames_THWC)
    (folder / "rgb.txt").write_text(
        "# color images\n" + "\n".join(f"{t:.9f} rgb/{n}" for t, n in zip(truth.time_T, names, strict=True))
    )
    place_T3, turn_T4 = truth.rows(poses.FROM_OPENCV)
    rows = np.column_stack((truth.time_T, place_T3, turn_T4))
    text = "\n".join(" ".join([f"{row[0]:.9f}", *(f"{v:.17g}" for v in row[1:])]) for row in rows)
    (folder / "groundtruth.txt").write_text(f"# timestamp tx ty tz qx qy qz qw\n{text}\n")


def write_euroc(folder: Path, truth: Truth) -> None:
    """The camera sits askew on the body, as it does on the real one."""
    place = folder / "mav0"
    stamps = [int(1_403_636_579_763_555_584 + t * 1e9) for t in truth.time_T]
    names = write_pictures(place / "cam0" / "data", truth.frames_THWC)
    lines = [f"{stamp},{name}" for stamp, name in zip(stamps, names, strict=True)]
    (place / "cam0" / "data.csv").write_text("#timestamp [ns],filename\n" + "\n".join(lines))
    mount_44 = np.eye(4)
    mount_44[:3, :3], mount_44[:3, 3] = poses.exp(np.array([0.3, -0.2, 1.1])), (0.1, -0.05, 0.02)
    numbers = ", ".join(f"{v:.17g}" for v in mount_44.ravel())
    (place / "cam0" / "sensor.yaml").write_text(
        f"sensor_type: camera\nT_BS:\n  cols: 4\n  rows: 4\n  data: [{numbers}]\nrate_hz: 20\n"
    )
    body_T44 = truth.camera(poses.FROM_OPENCV) @ np.linalg.inv(mount_44)
    turn_T4 = poses.to_quaternion(body_T44[:, :3, :3])[:, [3, 0, 1, 2]]
    rows = np.column_stack((body_T44[:, :3, 3], turn_T4, np.zeros((len(stamps), 9))))
    track = place / "state_groundtruth_estimate0"
    track.mkdir()
    text = "\n".join(f"{stamp}," + ",".join(f"{v:.17g}" for v in row) for stamp, row in zip(stamps, rows, strict=True))
    (track / "data.csv").write_text(f"#timestamp, p_x, p_y, p_z, q_w, q_x, q_y, q_z\n{text}\n")


def write_actions(folder: Path, truth: Truth) -> None:
    """A video of uneven times, and speeds as controls."""
    folder.mkdir(parents=True)
    stamps = (truth.time_T * CLOCK).round().astype(int)
    write_video(folder / "walk.mp4", truth.frames_THWC, stamps=(stamps - stamps[0]).tolist())
    shown_T = (stamps - stamps[0]) / CLOCK
    rows = np.column_stack((shown_T, truth.action_T6))
    text = "\n".join(",".join(f"{v:.9f}" for v in row) for row in rows)
    (folder / "actions.csv").write_text(f"time,x,y,z,roll,pitch,yaw\n{text}\n")


WRITERS = {
    "stray": write_stray,
    "nerfstudio": write_nerfstudio,
    "record3d": write_record3d,
    "tum": write_tum,
    "euroc": write_euroc,
    "actions": write_actions,
}
