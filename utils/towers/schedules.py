"""Schedules: of PointNet++ by the number of samples seen, and the scaling for large batches."""

import tensorflow.compat.v1 as tf

MIN_LEARNING_RATE = 0.00001
BN_INIT_DECAY = 0.5
BN_DECAY_DECAY_RATE = 0.5
BN_DECAY_CLIP = 0.99


def get_learning_rate(batch, *, learning_rate, batch_size, decay_step, decay_rate):
    """Learning rate that falls in steps, down to 1e-5 (train_multi_gpu.py of pointnet2).

    Args:
        batch: scalar, number of steps taken.
        learning_rate: at step 0.
        batch_size: samples a step, of all towers.
        decay_step: samples between two decays.
        decay_rate: factor of each decay.

    Returns:
        Scalar tensor.
    """
    decayed = tf.train.exponential_decay(
        learning_rate, batch * batch_size, decay_step, decay_rate, staircase=True
    )
    return tf.maximum(decayed, MIN_LEARNING_RATE)


def get_bn_decay(batch, *, batch_size, decay_step):
    """Share of a moving statistic that an update keeps: 0.5, 0.75, 0.875 ... up to 0.99.

    Args:
        batch: scalar, number of steps taken.
        batch_size: samples a step, of all towers.
        decay_step: samples between two changes.

    Returns:
        Scalar tensor.
    """
    bn_momentum = tf.train.exponential_decay(
        BN_INIT_DECAY, batch * batch_size, float(decay_step), BN_DECAY_DECAY_RATE, staircase=True
    )
    return tf.minimum(BN_DECAY_CLIP, 1 - bn_momentum)


def scale_learning_rate(rate, step, *, factor, warmup_steps=0):
    """Learning rate for a batch `factor` times as large, reached by a warm-up (Goyal et al. 2017).

    Args:
        rate: scalar, the learning rate that is not scaled.
        step: scalar, number of updates made.
        factor: number > 0; 1 leaves the rate as it is.
        warmup_steps: updates in which the factor climbs linearly from 1.

    Returns:
        Scalar tensor.
    """
    if factor == 1:
        return rate
    if warmup_steps:
        climbed = tf.minimum(tf.cast(step, tf.float32) / warmup_steps, 1.0)
        factor = 1.0 + (factor - 1.0) * climbed
    return rate * factor
