"""Augmentation of point clouds, and files of clouds, as in PointNet++'s `utils/provider.py`.

Every function works on a whole batch at once, and draws the same random numbers in the same order
as the original: same seed, same result. `rng` is a `numpy.random.RandomState`; without it NumPy's
global one is drawn from, as in the original. "Up" is the second axis, y.
"""

import h5py
import numpy as np

_BLOCK = 24576  # values that are transformed at a time, so that temporaries stay in the cache
_FEW = 2048  # normal variates below which NumPy's own loop is as fast


def random_state(rng=None):
    """`rng` itself, or the object behind `numpy.random.seed` and `numpy.random.rand`."""
    return np.random.mtrand._rand if rng is None else rng


# -------------------------------------------------------------------------------- order


def shuffle_data(data, labels, *, rng=None):
    """Puts clouds and labels into a random order.

    Args:
      data: [B, ...] array.
      labels: [B, ...] array.
      rng: numpy.random.RandomState.

    Returns:
      (data, labels, order): shuffled copies, and the [B] int64 order.
    """
    order = np.arange(len(labels))
    random_state(rng).shuffle(order)
    return data[order, ...], labels[order], order


def shuffle_points(batch_data, *, rng=None):
    """Puts the points of each cloud into one random order, common to all clouds of the batch.

    It changes what farthest point sampling, which starts at the first point, selects.

    Args:
      batch_data: [B, N, C] array.
      rng: numpy.random.RandomState.

    Returns:
      A shuffled copy.
    """
    order = np.arange(batch_data.shape[1])
    random_state(rng).shuffle(order)
    return np.take(batch_data, order, axis=1)


# ---------------------------------------------------------------------------- rotations


def rotate_point_cloud(batch_data, *, rng=None):
    """Turns each cloud about the up axis by an angle of its own, uniform in [0, 2 pi).

    Args:
      batch_data: [B, N, 3] array.
      rng: numpy.random.RandomState.

    Returns:
      [B, N, 3] float32, a new array.

    Raises:
      ValueError: the number of channels is another one.
    """
    _check_channels(batch_data, 3, "rotate_point_cloud_with_normal")
    return _rotated(batch_data, _about_y(_random_angles(batch_data, rng)))


def rotate_point_cloud_z(batch_data, *, rng=None):
    """As `rotate_point_cloud`, about the third axis."""
    _check_channels(batch_data, 3)
    angles = _random_angles(batch_data, rng)
    return _rotated(batch_data, _rotation(angles, sin=((0, 1), (1, 0)), axis=2))


def rotate_point_cloud_with_normal(batch_xyz_normal, *, rng=None):
    """As `rotate_point_cloud`, for points with normals; changes its input, as the original does.

    Args:
      batch_xyz_normal: [B, N, 6] array: x, y, z and the normal's.
      rng: numpy.random.RandomState.

    Returns:
      `batch_xyz_normal`.

    Raises:
      ValueError: the number of channels is another one.
    """
    _check_channels(batch_xyz_normal, 6, "rotate_point_cloud")
    matrices = _about_y(_random_angles(batch_xyz_normal, rng))
    for first in (0, 3):
        part = batch_xyz_normal[:, :, first : first + 3]
        part[...] = np.matmul(part, matrices)
    return batch_xyz_normal


def rotate_point_cloud_by_angle(batch_data, rotation_angle):
    """Turns all clouds about the up axis by one angle.

    Args:
      batch_data: [B, N, C] array; of more than three channels the others come back as 0, as in the
        original.
      rotation_angle: in radians.

    Returns:
      [B, N, C] float32, a new array.
    """
    rotated = np.zeros(batch_data.shape, np.float32)
    rotated[:, :, :3] = np.matmul(batch_data[:, :, :3], _about_y(rotation_angle))
    return rotated


def rotate_point_cloud_by_angle_with_normal(batch_data, rotation_angle):
    """As `rotate_point_cloud_by_angle`, for [B, N, 6] points with normals."""
    _check_channels(batch_data, 6, "rotate_point_cloud_by_angle")
    return _rotated(batch_data, _about_y(rotation_angle))


def rotate_perturbation_point_cloud(batch_data, angle_sigma=0.06, angle_clip=0.18, *, rng=None):
    """Turns each cloud a little about all three axes.

    Args:
      batch_data: [B, N, 3] array.
      angle_sigma: standard deviation of the angles in radians.
      angle_clip: largest angle.
      rng: numpy.random.RandomState.

    Returns:
      [B, N, 3] float32, a new array.

    Raises:
      ValueError: the number of channels is another one.
    """
    _check_channels(batch_data, 3, "rotate_perturbation_point_cloud_with_normal")
    return _rotated(batch_data, _perturbations(len(batch_data), angle_sigma, angle_clip, rng))


def rotate_perturbation_point_cloud_with_normal(
    batch_data, angle_sigma=0.06, angle_clip=0.18, *, rng=None
):
    """As `rotate_perturbation_point_cloud`, for [B, N, 6] points with normals."""
    _check_channels(batch_data, 6, "rotate_perturbation_point_cloud")
    return _rotated(batch_data, _perturbations(len(batch_data), angle_sigma, angle_clip, rng))


def _check_channels(batch_data, channels, other=None):
    if batch_data.ndim != 3 or batch_data.shape[2] != channels:
        raise ValueError(
            f"the batch has the shape {batch_data.shape}; it must be [clouds, points, {channels}]; "
            f"pass {channels} channels" + (f" or call {other}" if other else "")
        )


def _random_angles(batch_data, rng):
    return random_state(rng).uniform(size=len(batch_data)) * 2 * np.pi


def _rotation(angles, sin, axis):
    """[..., 3, 3] matrices to multiply row vectors by; `sin` has the places of sin and -sin."""
    angles = np.asarray(angles)
    matrices = np.zeros((*angles.shape, 3, 3))
    matrices[..., range(3), range(3)] = np.cos(angles)[..., np.newaxis]
    matrices[..., axis, axis] = 1
    matrices[(..., *sin[0])] = np.sin(angles)
    matrices[(..., *sin[1])] = -np.sin(angles)
    return matrices


def _about_y(angles):
    return _rotation(angles, sin=((0, 2), (2, 0)), axis=1)


def _perturbations(count, angle_sigma, angle_clip, rng):
    angles = angle_sigma * random_state(rng).randn(count, 3)
    angles = np.clip(angles, -angle_clip, angle_clip)
    about_x = _rotation(angles[:, 0], sin=((2, 1), (1, 2)), axis=0)
    about_z = _rotation(angles[:, 2], sin=((1, 0), (0, 1)), axis=2)
    return about_z @ (_about_y(angles[:, 1]) @ about_x)


def _rotated(batch_data, matrices):
    """float32 copy with points and, if there are any, normals turned.

    The original turns normals by the inverse transpose, which for a rotation is the same matrix.
    """
    rotated = np.empty(batch_data.shape, np.float32)
    for first in range(0, batch_data.shape[2], 3):
        part = slice(first, first + 3)
        rotated[:, :, part] = np.matmul(batch_data[:, :, part], matrices)
    return rotated


# ------------------------------------------------------------- jitter, shift, scale, dropout


def jitter_point_cloud(batch_data, sigma=0.01, clip=0.05, *, rng=None):
    """Moves each point by Gaussian noise.

    Args:
      batch_data: [B, N, C] array.
      sigma: standard deviation.
      clip: largest movement along an axis.
      rng: numpy.random.RandomState.

    Returns:
      [B, N, C] float64, a new array.

    Raises:
      ValueError: `clip` is not positive.
    """
    if clip <= 0:
        raise ValueError(f"clip is {clip}; it must be positive; pass 0.05 for example")
    jittered = np.clip(sigma * random_state(rng).randn(*batch_data.shape), -clip, clip)
    jittered += batch_data
    return jittered


def shift_point_cloud(batch_data, shift_range=0.1, *, rng=None):
    """Moves each cloud as a whole; changes its input, as the original does.

    Args:
      batch_data: [B, N, 3] array.
      shift_range: largest movement along an axis; uniform.
      rng: numpy.random.RandomState.

    Returns:
      `batch_data`.
    """
    shifts = random_state(rng).uniform(-shift_range, shift_range, (len(batch_data), 3))
    batch_data += shifts[:, np.newaxis, :]
    return batch_data


def random_scale_point_cloud(batch_data, scale_low=0.8, scale_high=1.25, *, rng=None):
    """Scales each cloud; changes its input, as the original does.

    Args:
      batch_data: [B, N, C] array.
      scale_low, scale_high: limits of the factor; uniform.
      rng: numpy.random.RandomState.

    Returns:
      `batch_data`.
    """
    scales = random_state(rng).uniform(scale_low, scale_high, len(batch_data))
    batch_data *= scales.astype(batch_data.dtype)[:, np.newaxis, np.newaxis]
    return batch_data


def random_point_dropout(batch_pc, max_dropout_ratio=0.875, *, rng=None):
    """Replaces random points of each cloud by its first one; changes its input.

    Args:
      batch_pc: [B, N, C] array.
      max_dropout_ratio: largest part of a cloud that is replaced; uniform in [0, this).
      rng: numpy.random.RandomState.

    Returns:
      `batch_pc`.
    """
    clouds, points = batch_pc.shape[:2]
    draws = random_state(rng).random_sample((clouds, 1 + points))  # the ratio, then each point's
    dropped = draws[:, 1:] <= draws[:, :1] * max_dropout_ratio
    np.copyto(batch_pc, batch_pc[:, :1].copy(), where=dropped[:, :, np.newaxis])
    return batch_pc


# --------------------------------------------------------------- all of a training batch


def augment_batch(batch_data, *, rng=None):
    """What the classification data sets do to a training batch, in one go.

    `rotate_point_cloud`, `rotate_perturbation_point_cloud`, `random_scale_point_cloud`,
    `shift_point_cloud`, `jitter_point_cloud` with their defaults, then `shuffle_points`; the
    variants with normals for six channels. Same draws, same result but for the rounding between
    the steps (2e-7 for clouds in the unit sphere).

    Args:
      batch_data: [B, N, 3 or 6] array.
      rng: numpy.random.RandomState.

    Returns:
      [B, N, 3 or 6] float32, a new array.

    Raises:
      ValueError: the number of channels is another one.
    """
    if batch_data.shape[2:] != (6,):
        _check_channels(batch_data, 3)
    rng = random_state(rng)
    clouds, points, channels = batch_data.shape
    matrices = _about_y(_random_angles(batch_data, rng)) @ _perturbations(clouds, 0.06, 0.18, rng)
    scaled = matrices * rng.uniform(0.8, 1.25, clouds)[:, np.newaxis, np.newaxis]
    shifts = rng.uniform(-0.1, 0.1, (clouds, 3))
    noise = _clipped_noise((clouds, points, 3), 0.01, 0.05, rng)
    order = np.arange(points)
    rng.shuffle(order)

    values = batch_data.astype(np.float32, copy=False)
    moved = np.matmul(values[:, :, :3], scaled.astype(np.float32))
    moved += noise
    # Adding three numbers at a time is slow, so a row of shifts serves several points.
    repeats = np.gcd(points, 64) if points else 1
    rows = moved.reshape(clouds, points // repeats, 3 * repeats)
    rows += np.tile(shifts.astype(np.float32), repeats)[:, np.newaxis, :]
    if channels == 6:
        normals = np.matmul(values[:, :, 3:], matrices.astype(np.float32))
        moved = np.concatenate([moved, normals], axis=2)
    return moved.take(order, axis=1)


def _clipped_noise(shape, sigma, clip, rng):
    """float32 of clip(sigma * rng.randn(*shape)), from the same draws, in less time.

    `RandomState` makes two normal variates of a point (x, y) drawn in a square, if it lies in the
    unit circle: y, then x, times sqrt(-2 log(r^2) / r^2) (Marsaglia's polar method). Which points
    count is decided in double precision, as there; the rest is done in single precision.
    """
    noise = np.empty(int(np.prod(shape)), np.float32)
    done = 0
    if len(noise) > _FEW and rng.get_state(legacy=False)["has_gauss"]:
        noise[0] = sigma * rng.randn()  # left over from an earlier pair
        done = 1
    while len(noise) - done > _FEW:
        # A pair of draws gives at most two variates: never more draws than are needed.
        draws = rng.random_sample(min(_BLOCK, (len(noise) - done) // 2 * 2))
        draws -= 0.5
        squares = draws * draws
        squares = squares[0::2] + squares[1::2]
        inside = (squares < 0.25).nonzero()[0]
        square = squares.astype(np.float32)
        square *= 4
        np.minimum(square, 1, out=square)  # those outside drop out below
        factor = np.log(square)
        factor *= np.float32(-8 * sigma * sigma)
        factor /= square
        np.sqrt(factor, out=factor)
        pairs = draws.astype(np.float32)
        variates = np.empty_like(pairs)
        np.multiply(pairs[1::2], factor, out=variates[0::2])
        np.multiply(pairs[0::2], factor, out=variates[1::2])
        kept = noise[done : done + 2 * len(inside)]
        variates.view(np.complex64).take(inside, out=kept.view(np.complex64), mode="clip")
        done += len(kept)
    noise[done:] = sigma * rng.randn(len(noise) - done)
    return np.clip(noise, -clip, clip, out=noise).reshape(shape)


# -------------------------------------------------------------------------------- files


def getDataFiles(list_filename):
    """Reads a list of files: one a line, any line ends, `\\` for `/`, blank lines left out.

    Args:
      list_filename: path of a text file.

    Returns:
      List of str.

    Raises:
      FileNotFoundError: there is no such file.
    """
    with open(list_filename, encoding="utf-8-sig", errors="surrogateescape") as file:
        lines = [line.strip().replace("\\", "/") for line in file]
    return [line for line in lines if line]


def load_h5(h5_filename):
    """Reads an HDF5 file of clouds.

    Args:
      h5_filename: path.

    Returns:
      (data, label): arrays as stored, [B, N, 3] and [B, 1] in ModelNet40's files.

    Raises:
      FileNotFoundError: there is no such file.
      OSError: it is damaged or of another kind.
      KeyError: it has no `data` or no `label`.
    """
    with h5py.File(h5_filename, "r") as file:
        return file["data"][:], file["label"][:]


def loadDataFile(filename):
    """`load_h5` under the original's second name."""
    return load_h5(filename)
