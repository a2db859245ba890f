"""What tests of the point ops share: running an op, and what it should give by brute force."""

import numpy as np
import tensorflow.compat.v1 as tf


def fed(array, axes=None):
    """Placeholder for an array; all of its sizes are dynamic but those of `axes`."""
    shape = [size if axis in (axes or ()) else None for axis, size in enumerate(array.shape)]
    return tf.placeholder(array.dtype, shape)


def run(op, *arrays, **keywords):
    """Values of `op(*arrays)` with everything fed, so that nothing is computed ahead of time."""
    with tf.Graph().as_default(), tf.Session() as session:
        tensors = [fed(array, axes=[array.ndim - 1]) for array in arrays]
        return session.run(op(*tensors, **keywords), dict(zip(tensors, arrays)))


def value_and_gradient(op, points, *others, upstream):
    """Value of `op(points, *others)` and the gradient of sum(value * upstream) by `points`."""
    with tf.Graph().as_default(), tf.Session() as session:
        tensors = [fed(array, axes=[array.ndim - 1]) for array in (points, *others)]
        value = op(*tensors)
        gradients = tf.gradients(value, tensors, upstream)
        assert gradients[1:] == [None] * len(others)
        return session.run((value, gradients[0]), dict(zip(tensors, (points, *others))))


# --- brute force ----------------------------------------------------------------------------------


def squared_distances(queries, points):
    """[M, N] in float32, from differences."""
    difference = queries[:, None, :] - points[None, :, :]
    return (difference[..., 0] ** 2 + difference[..., 1] ** 2) + difference[..., 2] ** 2


def brute_farthest(npoint, points):
    """Thread by thread, as the original's kernel: 512 threads, the lower one wins a tie."""
    nearest = np.full(len(points), 1e38, np.float32)
    picked = [0]
    for _ in range(npoint - 1):
        nearest = np.minimum(nearest, squared_distances(points[picked[-1:]], points)[0])
        winners = [
            thread + 512 * np.argmax(nearest[thread::512])
            for thread in range(min(512, len(points)))
        ]
        picked.append(int(winners[np.argmax(nearest[winners])]))
    return picked


def brute_ball(radius, nsample, points, queries):
    inside = np.maximum(np.sqrt(squared_distances(queries, points)), 1e-20) < np.float32(radius)
    idx = np.zeros((len(queries), nsample), np.int32)
    count = np.zeros(len(queries), np.int32)
    for row, hits in enumerate(inside):
        found = np.flatnonzero(hits)[:nsample]
        count[row] = len(found)
        if len(found):
            idx[row] = found[0]
            idx[row, : len(found)] = found
    return idx, count


def brute_selection_sort(k, values):
    values, index = values.copy(), np.arange(len(values))
    for step in range(min(k, len(values))):
        least = step + np.argmin(values[step:])
        values[[step, least]] = values[[least, step]]
        index[[step, least]] = index[[least, step]]
    return index, values


def brute_three(points, known):
    distances = squared_distances(points, known)
    distances = np.concatenate([distances, np.full((len(points), 3), np.inf)], 1)
    order = np.argsort(distances, 1, kind="stable")[:, :3]
    return np.take_along_axis(distances, order, 1), np.where(order < len(known), order, 0)


def lattice(rng, *shape, side=5):
    """Points on a grid: many ties and duplicates, and distances without rounding."""
    return rng.randint(0, side, shape + (3,)).astype(np.float32) / 4
