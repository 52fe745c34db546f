"""Rigid motions in float64: rotation vectors, relative motion between poses, camera conventions, interpolation in time.

A pose takes body coordinates (x forward, y left, z up) to the world.
Shape suffixes: N poses (any number), 4 4 homogeneous matrices, 3 3 rotations.
"""

import numpy as np

# Columns are the body's axes in the coordinates of the camera.
FROM_OPENGL = np.array([[0.0, -1.0, 0.0], [0.0, 0.0, 1.0], [-1.0, 0.0, 0.0]])  # camera: right, up, looking along -z
FROM_OPENCV = np.array([[0.0, -1.0, 0.0], [0.0, 0.0, -1.0], [1.0, 0.0, 0.0]])  # camera: right, down, looking along +z
_TINY = 1e-8


def exp(vector_N3: np.ndarray) -> np.ndarray:
    """Rotation matrices of rotation vectors."""
    angle_N = np.linalg.norm(vector_N3, axis=-1)
    safe_N = np.maximum(angle_N, _TINY)
    # Near zero the first terms of the series are exact in float64.
    first_N = np.where(angle_N < _TINY, 1.0, np.sin(safe_N) / safe_N)
    second_N = np.where(angle_N < _TINY, 0.5, 2.0 * (np.sin(safe_N / 2.0) / safe_N) ** 2)
    x, y, z = np.moveaxis(vector_N3, -1, 0)
    zero = np.zeros_like(x)
    skew_N33 = np.stack([zero, -z, y, z, zero, -x, -y, x, zero], -1).reshape(*x.shape, 3, 3)
    return np.eye(3) + first_N[..., None, None] * skew_N33 + second_N[..., None, None] * (skew_N33 @ skew_N33)


def log(rotation_N33: np.ndarray) -> np.ndarray:
    """Rotation vectors of rotation matrices, of length pi at most; accurate near zero and near pi, where the trace is not."""
    quaternion_N4 = to_quaternion(rotation_N33)
    axis_N3, real_N = quaternion_N4[..., :3], quaternion_N4[..., 3]
    sine_N = np.linalg.norm(axis_N3, axis=-1)
    angle_N = 2.0 * np.arctan2(sine_N, real_N)
    factor_N = np.where(sine_N < _TINY, 2.0, angle_N / np.maximum(sine_N, _TINY))
    return axis_N3 * factor_N[..., None]


def relative(pose_N44: np.ndarray) -> np.ndarray:
    """(N - 1, 6): motion from each pose to the next in the frame of the first; metres, then a rotation vector."""
    turn_N33 = np.swapaxes(pose_N44[:-1, :3, :3], -1, -2)
    shift_N3 = np.einsum("nij,nj->ni", turn_N33, pose_N44[1:, :3, 3] - pose_N44[:-1, :3, 3])
    return np.concatenate((shift_N3, log(turn_N33 @ pose_N44[1:, :3, :3])), axis=-1)


def step(pose_N44: np.ndarray, motion_N6: np.ndarray) -> np.ndarray:
    """The poses after these motions: the inverse of `relative`."""
    after_N44 = pose_N44.copy()
    after_N44[..., :3, 3] += np.einsum("...ij,...j->...i", pose_N44[..., :3, :3], motion_N6[..., :3])
    after_N44[..., :3, :3] = pose_N44[..., :3, :3] @ exp(motion_N6[..., 3:6])
    return after_N44


def body_pose(camera_N44: np.ndarray, basis_33: np.ndarray) -> np.ndarray:
    """Camera-to-world matrices as body-to-world ones; `basis_33` is FROM_OPENGL or FROM_OPENCV."""
    body_N44 = np.array(camera_N44, np.float64)
    body_N44[..., :3, :3] = body_N44[..., :3, :3] @ basis_33
    return body_N44


def from_quaternion(quaternion_N4: np.ndarray, position_N3: np.ndarray) -> np.ndarray:
    """Poses from quaternions x, y, z, w and positions; quaternions need not be normalised."""
    x, y, z, w = np.moveaxis(quaternion_N4 / np.linalg.norm(quaternion_N4, axis=-1, keepdims=True), -1, 0)
    rows = [
        [1 - 2 * (y * y + z * z), 2 * (x * y - z * w), 2 * (x * z + y * w)],
        [2 * (x * y + z * w), 1 - 2 * (x * x + z * z), 2 * (y * z - x * w)],
        [2 * (x * z - y * w), 2 * (y * z + x * w), 1 - 2 * (x * x + y * y)],
    ]
    pose_N44 = np.zeros((*np.shape(x), 4, 4))
    pose_N44[..., :3, :3] = np.moveaxis(np.array(rows), (0, 1), (-2, -1))
    pose_N44[..., :3, 3], pose_N44[..., 3, 3] = position_N3, 1.0
    return pose_N44


def to_quaternion(rotation_N33: np.ndarray) -> np.ndarray:
    """x, y, z, w with w >= 0, computed from the largest of the four components to avoid small divisors."""
    r = np.moveaxis(rotation_N33, (-2, -1), (0, 1))
    squares = np.stack([1 + r[0, 0] - r[1, 1] - r[2, 2], 1 - r[0, 0] + r[1, 1] - r[2, 2], 1 - r[0, 0] - r[1, 1] + r[2, 2]])
    squares = np.concatenate((squares, (1 + r[0, 0] + r[1, 1] + r[2, 2])[None]))
    a, b, c = r[2, 1] - r[1, 2], r[0, 2] - r[2, 0], r[1, 0] - r[0, 1]
    d, e, f = r[0, 1] + r[1, 0], r[0, 2] + r[2, 0], r[1, 2] + r[2, 1]
    rows = [(squares[0], d, e, a), (d, squares[1], f, b), (e, f, squares[2], c), (a, b, c, squares[3])]
    choices = np.stack([np.stack(row, -1) for row in rows])
    best = np.take_along_axis(choices, squares.argmax(0)[None, ..., None], 0)[0]
    best = best / np.linalg.norm(best, axis=-1, keepdims=True)
    return np.where(best[..., 3:] < 0, -best, best)


def interpolate(time_N: np.ndarray, pose_N44: np.ndarray, wanted_M: np.ndarray) -> np.ndarray:
    """Poses at other times: linear interpolation of positions, slerp of rotations. Times outside the range are a bug."""
    assert time_N[0] <= wanted_M.min() and wanted_M.max() <= time_N[-1]
    right_M = np.clip(np.searchsorted(time_N, wanted_M, side="right"), 1, len(time_N) - 1)
    left_M = right_M - 1
    share_M1 = ((wanted_M - time_N[left_M]) / (time_N[right_M] - time_N[left_M]))[:, None]
    before_M44, after_M44 = pose_N44[left_M], pose_N44[right_M]
    turn_M3 = log(np.swapaxes(before_M44[:, :3, :3], -1, -2) @ after_M44[:, :3, :3])
    found_M44 = before_M44.copy()
    found_M44[:, :3, :3] = before_M44[:, :3, :3] @ exp(turn_M3 * share_M1)
    found_M44[:, :3, 3] += (after_M44[:, :3, 3] - before_M44[:, :3, 3]) * share_M1
    return found_M44
