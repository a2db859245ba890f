"""The augmentation of a batch of clouds as an obvious loop over its clouds.

Independent of `utils.provider`: `bench.py` measures against it, tests compare with it. It draws the
same random numbers in the same order.
"""

import numpy as np


def augment_batch(batch, rng):
    """Same result as `provider.augment_batch` for three channels, but for rounding.

    Args:
        batch: [clouds, points, 3] float32.
        rng: numpy.random.RandomState.

    Returns:
        [clouds, points, 3] float32, a new array.
    """
    clouds = range(len(batch))
    turned = np.zeros(batch.shape, np.float32)
    for k in clouds:
        turned[k] = np.dot(batch[k], about_y(rng.uniform() * 2 * np.pi))
    moved = np.zeros(batch.shape, np.float32)
    for k in clouds:
        x, y, z = np.clip(0.06 * rng.randn(3), -0.18, 0.18)
        moved[k] = np.dot(turned[k], np.dot(about_z(z), np.dot(about_y(y), about_x(x))))
    scales = rng.uniform(0.8, 1.25, len(batch))
    for k in clouds:
        moved[k] *= scales[k]
    shifts = rng.uniform(-0.1, 0.1, (len(batch), 3))
    for k in clouds:
        moved[k] += shifts[k]
    moved[...] = moved + np.clip(0.01 * rng.randn(*batch.shape), -0.05, 0.05)
    order = np.arange(batch.shape[1])
    rng.shuffle(order)
    return moved[:, order]


def about_x(angle):
    """[3, 3] matrix of a turn about the first axis, for row vectors."""
    cos, sin = np.cos(angle), np.sin(angle)
    return np.array([[1, 0, 0], [0, cos, -sin], [0, sin, cos]])


def about_y(angle):
    """[3, 3] matrix of a turn about the second axis, for row vectors."""
    cos, sin = np.cos(angle), np.sin(angle)
    return np.array([[cos, 0, sin], [0, 1, 0], [-sin, 0, cos]])


def about_z(angle):
    """[3, 3] matrix of a turn about the third axis, for row vectors."""
    cos, sin = np.cos(angle), np.sin(angle)
    return np.array([[cos, -sin, 0], [sin, cos, 0], [0, 0, 1]])
