"""Schedules of PointNet++: learning rate and batch-norm decay by the number of samples seen."""

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
