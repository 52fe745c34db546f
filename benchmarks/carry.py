"""A recording as a small folder that any machine can import: a video without loss of colour planes, and actions.csv.

    python benchmarks/carry.py RECORDING FOLDER          # here; needs av
    seedbed data prepare FOLDER --size 64x64 --out DIR   # there; av or opencv decodes it

Poses go along where there are any, and then stand for the controls; what was asked for and the simulator stay behind, so that
controls are judged as in any other video, by the shift of its pictures.
"""

import argparse
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np

from seedbed.recipes.world.recording import poses
from seedbed.recipes.world.recording.recording import Recording, open_recording
from seedbed.recipes.world.recording.video import POSE_COLUMNS

QUALITY = "8"  # of x264; 0 is without loss, 18 is called invisible
CLOCK = 90_000  # ticks of a second


def write_video(recording: Recording, path: Path, quality: str) -> None:
    import av

    # One clock for all episodes; between two of them stands a frame's time.
    dt_T = np.where(recording.last_T, np.median(recording.dt_T[~recording.last_T]), recording.dt_T)
    stamp_T = np.round(np.concatenate(([0.0], dt_T[:-1])).cumsum() * CLOCK).astype(np.int64)
    with av.open(str(path), "w") as out:
        stream: Any = out.add_stream("libx264", rate=30, options={"crf": quality, "preset": "slow"})
        stream.height, stream.width = recording.frames_THWC.shape[1:3]
        stream.pix_fmt, stream.codec_context.time_base = "yuv444p", Fraction(1, CLOCK)
        for stamp, frame_HWC in zip(stamp_T.tolist(), recording.frames_THWC, strict=True):
            frame = av.VideoFrame.from_ndarray(np.ascontiguousarray(frame_HWC), format="rgb24")
            frame.pts, frame.time_base = stamp, stream.codec_context.time_base
            out.mux(stream.encode(frame))
        out.mux(stream.encode())


def write_actions(recording: Recording, path: Path) -> None:
    if recording.pose_T44 is not None:
        names, pose_T44 = POSE_COLUMNS, recording.pose_T44
        values_TA = np.concatenate((pose_T44[:, :3, 3], poses.to_quaternion(pose_T44[:, :3, :3])), axis=1)
    else:
        kept = [n for n, axis in enumerate(recording.axes) if not axis.is_time]
        names, values_TA = tuple(recording.axes[n].name for n in kept), recording.actions_TA[:, kept]
    lines = ["frame,episode," + ",".join(names)]
    for t, row in enumerate(values_TA):
        lines.append(f"{t},{recording.episode_T[t]}," + ",".join(f"{value:.9g}" for value in row))
    path.write_text("\n".join(lines) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recording", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--quality", default=QUALITY, help="x264's crf: 0 keeps every bit of the colour planes")
    args = parser.parse_args()
    recording = open_recording(args.recording)
    args.folder.mkdir(parents=True)
    write_video(recording, args.folder / "frames.mp4", args.quality)
    write_actions(recording, args.folder / "actions.csv")
    size = sum(file.stat().st_size for file in args.folder.iterdir())
    print(f"{recording.num_frames:,} frames, {size / 1e6:.1f} MB in {args.folder}")


if __name__ == "__main__":
    main()
