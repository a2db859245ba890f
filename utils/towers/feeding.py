"""Batches -> tower inputs."""

import numpy as np
import tensorflow.compat.v1 as tf
from absl import logging

FEW_PER_TOWER = 4  # samples; with fewer the statistics of a tower's batch are mostly noise


def split_equally(tensors, num_towers):
    """Slices of one size along the first axis, which must be a multiple of `num_towers`.

    Args:
        tensors: tensors with the same first axis, the batch.
        num_towers: number of slices.

    Returns:
        Tuple (slices, weights). slices: one list of tensors a tower. weights: an empty list, since
        every tower counts the same.
    """
    return list(zip(*[tf.split(tensor, num_towers) for tensor in tensors])), []


def split_evenly(tensors, num_towers):
    """Slices along the first axis, of sizes that differ by at most 1, larger ones first.

    Args:
        tensors: tensors with the same first axis, the batch, of at least `num_towers` samples.
        num_towers: number of slices.

    Returns:
        Tuple (slices, weights). slices: one list of tensors a tower. weights: one float32 scalar a
        tower, its share of the batch times num_towers, so that the mean over the towers of
        `weights[i] * mean over the slice` is the mean over the batch. Exactly 1 where all slices
        are of one size.
    """
    batch = tf.shape(tensors[0])[0]
    sizes = batch // num_towers + tf.cast(tf.range(num_towers) < batch % num_towers, tf.int32)
    columns = [tf.split(tensor, sizes, num=num_towers) for tensor in tensors]
    weights = tf.cast(sizes * num_towers, tf.float32) / tf.cast(batch, tf.float32)
    return list(zip(*columns)), tf.unstack(weights, num_towers)


def split_sizes(batch, num_towers):
    """The sizes of `split_evenly` in Python.

    Args:
        batch: number of samples.
        num_towers: number of slices.
    """
    return [batch // num_towers + (tower < batch % num_towers) for tower in range(num_towers)]


def split_arrays(arrays, num_towers):
    """What `split_evenly` gives, in NumPy.

    Args:
        arrays: arrays with the same first axis, the batch.
        num_towers: number of slices.

    Returns:
        Tuple (slices, weights): one list of arrays a tower, one float32 a tower.
    """
    batch = len(arrays[0])
    sizes = split_sizes(batch, num_towers)
    columns = [np.split(array, np.cumsum(sizes)[:-1]) for array in arrays]
    weights = [np.float32(size * num_towers) / np.float32(batch) for size in sizes]
    return list(zip(*columns)), weights


def check_batch_size(batch_size, num_towers):
    """Refuses a batch that the towers can't share evenly; warns of one too small for batch norm.

    Args:
        batch_size: samples of all towers.
        num_towers: number of towers.

    Raises:
        ValueError: with the nearest batch sizes that can be.
    """
    if batch_size < 1 or batch_size % num_towers:
        below = batch_size // num_towers * num_towers
        sizes = f"{below} or {below + num_towers}" if below > 0 else f"{num_towers}"
        raise ValueError(
            f"batch_size {batch_size} cannot be split over {num_towers} towers; use {sizes}"
        )
    if batch_size // num_towers < FEW_PER_TOWER:
        logging.warning(
            "%d sample(s) per tower are too few for batch norm, which uses the statistics of the"
            " tower's own; use a batch_size of %d or more",
            batch_size // num_towers,
            FEW_PER_TOWER * num_towers,
        )
