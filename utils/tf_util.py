"""Layers of PointNet and PointNet++ with the original's names, arguments and variable names.

Source: `utils/tf_util.py` of charlesq34/pointnet2. A layer applies its weights, adds biases (with
batch normalization too, so that checkpoints fit), normalizes, and activates. Everything is
channels-last, so the original's `data_format` is left out.

Parameters and batch statistics are float32; what layers compute in is said by
`layer_options.current().compute_dtype`, as in `nets.layers`.

`is_training` is a Python bool, or a scalar bool tensor for one graph that does both; a bool leaves
the other mode's ops out of the graph.
"""

import zlib

import numpy as np
import tensorflow.compat.v1 as tf

from nets.layers import (
    batch_norm_over_towers,
    model_variable,
    to_compute_dtype,
    xavier_initializer,
)
from utils.towers import layer_options
from utils.towers.averages import add_moving_average_update

BN_DECAY = 0.9  # where get_model is called without bn_decay, as by the original's evaluation
BN_EPSILON = 0.001


# --- training or not -----------------------------------------------------------------------------


def _static_mode(is_training):
    """`is_training` as a Python bool, or None if only the session will know it."""
    if isinstance(is_training, bool | np.bool_):
        return bool(is_training)
    if not tf.is_tensor(is_training) or is_training.dtype != tf.bool:
        raise ValueError(
            f"is_training is {is_training!r}, needs a truth value; pass True, False or a scalar"
            " tf.bool tensor"
        )
    value = tf.get_static_value(is_training)
    return None if value is None else bool(value)


def _by_mode(is_training, training, inference):
    """Result of one of two functions without arguments."""
    mode = _static_mode(is_training)
    if mode is None:
        return tf.cond(is_training, training, inference)
    return training() if mode else inference()


# --- layers --------------------------------------------------------------------------------------


def _weights(shape, use_xavier, stddev, weight_decay):
    """The variable `weights`; its decay, if any, goes to the collection `losses`."""
    initializer = xavier_initializer if use_xavier else tf.truncated_normal_initializer(0.0, stddev)
    weights = model_variable("weights", shape, initializer)
    if weight_decay is not None:
        decay = tf.multiply(tf.nn.l2_loss(weights), weight_decay, name="weight_loss")
        tf.add_to_collection(tf.GraphKeys.LOSSES, decay)
    return weights


def _finish(outputs, activation_fn, bn, bn_decay, is_training):
    """Biases, batch normalization, activation."""
    biases = model_variable("biases", [outputs.shape.as_list()[-1]], tf.zeros_initializer())
    outputs = tf.nn.bias_add(outputs, to_compute_dtype(biases))
    if bn:
        outputs = batch_norm(outputs, is_training, bn_decay, "bn")
    return outputs if activation_fn is None else activation_fn(outputs)


def conv1d(
    inputs,
    num_output_channels,
    kernel_size,
    scope,
    stride=1,
    padding="SAME",
    use_xavier=True,
    stddev=1e-3,
    weight_decay=None,
    activation_fn=tf.nn.relu,
    bn=False,
    bn_decay=None,
    is_training=None,
):
    """1-D convolution over points; arguments as of `conv2d`, kernel_size and stride are ints.

    Args:
        inputs: [batch, num_point, channels] float32.

    Returns:
        [batch, out_num_point, num_output_channels] float32.
    """
    with tf.variable_scope(scope):
        shape = [kernel_size, inputs.shape.as_list()[-1], num_output_channels]
        weights = _weights(shape, use_xavier, stddev, weight_decay)
        outputs = tf.nn.conv1d(
            to_compute_dtype(inputs), to_compute_dtype(weights), stride=stride, padding=padding
        )
        return _finish(outputs, activation_fn, bn, bn_decay, is_training)


def conv2d(
    inputs,
    num_output_channels,
    kernel_size,
    scope,
    stride=(1, 1),
    padding="SAME",
    use_xavier=True,
    stddev=1e-3,
    weight_decay=None,
    activation_fn=tf.nn.relu,
    bn=False,
    bn_decay=None,
    is_training=None,
):
    """2-D convolution.

    Args:
        inputs: [batch, height, width, channels] float32 with a known number of channels.
        num_output_channels: number of output channels.
        kernel_size: (height, width).
        scope: variable scope of the layer.
        stride: (vertical, horizontal).
        padding: 'SAME' or 'VALID'.
        use_xavier: initial weights uniform after Glorot and Bengio, else truncated normal.
        stddev: of the truncated normal.
        weight_decay: factor of the L2 loss of the weights, which goes to the collection `losses`;
            None (default) for none.
        activation_fn: function of a tensor, or None.
        bn: whether to normalize.
        bn_decay: of the moving statistics; float or scalar tensor, None for 0.9.
        is_training: see the module; needed with `bn`.

    Returns:
        [batch, out_height, out_width, num_output_channels] float32.
    """
    with tf.variable_scope(scope):
        shape = [*kernel_size, inputs.shape.as_list()[-1], num_output_channels]
        weights = _weights(shape, use_xavier, stddev, weight_decay)
        outputs = tf.nn.conv2d(
            to_compute_dtype(inputs),
            to_compute_dtype(weights),
            strides=list(stride),
            padding=padding,
        )
        return _finish(outputs, activation_fn, bn, bn_decay, is_training)


def fully_connected(
    inputs,
    num_outputs,
    scope,
    use_xavier=True,
    stddev=1e-3,
    weight_decay=None,
    activation_fn=tf.nn.relu,
    bn=False,
    bn_decay=None,
    is_training=None,
):
    """Matrix product; arguments as of `conv2d`.

    Args:
        inputs: [batch, features] float32.
        num_outputs: number of output features.

    Returns:
        [batch, num_outputs] float32.
    """
    with tf.variable_scope(scope):
        shape = [inputs.shape.as_list()[-1], num_outputs]
        weights = _weights(shape, use_xavier, stddev, weight_decay)
        outputs = tf.matmul(to_compute_dtype(inputs), to_compute_dtype(weights))
        return _finish(outputs, activation_fn, bn, bn_decay, is_training)


def max_pool2d(inputs, kernel_size, scope, stride=(2, 2), padding="VALID"):
    """Maximum over windows.

    Args:
        inputs: [batch, height, width, channels] float32.
        kernel_size: (height, width).
        scope: name scope of the op.
        stride: (vertical, horizontal).
        padding: 'SAME' or 'VALID'.

    Returns:
        [batch, out_height, out_width, channels] float32.
    """
    with tf.name_scope(scope):
        return tf.nn.max_pool2d(inputs, list(kernel_size), list(stride), padding)


# --- batch normalization -------------------------------------------------------------------------


def batch_norm(inputs, is_training, bn_decay, scope):
    """Batch normalization over all axes but the last (Ioffe, Szegedy 2015), fused.

    In training the batch's statistics are used, and the updates of the moving ones are registered
    in `GraphKeys.UPDATE_OPS`; the train op runs them. With a tensor for `is_training` they change
    nothing where it is False. Otherwise the moving statistics are used. With
    `layer_options.current().sum_over_towers` the batch is that of all towers together.

    The original under TensorFlow 1.4 gave the moving variance N / (N - 1) times the batch's
    variance, except for rank 3, which took another path there. So does this.

    Args:
        inputs: float32 [batch, channels], [batch, num_point, channels] or
            [batch, height, width, channels].
        is_training: see the module.
        bn_decay: share of the moving statistics that an update keeps; float or scalar tensor, None
            for 0.9.
        scope: variable scope.

    Returns:
        Tensor of the shape of `inputs`.

    Raises:
        ValueError: another rank, or `is_training` is no truth value.
    """
    rank = inputs.shape.rank
    if rank not in (2, 3, 4):
        raise ValueError(f"batch_norm got shape {inputs.shape}, needs rank 2 to 4; reshape it")
    mode = _static_mode(is_training)
    decay = BN_DECAY if bn_decay is None else bn_decay
    with tf.variable_scope(scope):
        shape, zeros, ones = inputs.shape[-1:], tf.zeros_initializer(), tf.ones_initializer()
        beta = tf.convert_to_tensor(model_variable("beta", shape, zeros))
        gamma = tf.convert_to_tensor(model_variable("gamma", shape, ones))
        moving_mean = model_variable("moving_mean", shape, zeros, trainable=False)
        moving_variance = model_variable("moving_variance", shape, ones, trainable=False)
        image = inputs
        for _ in range(4 - rank):
            image = tf.expand_dims(image, -2)

        def training():
            return tf.nn.fused_batch_norm(image, gamma, beta, epsilon=BN_EPSILON)

        def inference():
            moving = tf.convert_to_tensor(moving_mean), tf.convert_to_tensor(moving_variance)
            return tf.nn.fused_batch_norm(
                image, gamma, beta, *moving, epsilon=BN_EPSILON, is_training=False
            )

        sum_over_towers = layer_options.current().sum_over_towers
        if mode is not False and sum_over_towers is not None:
            # Not under a condition: towers meet in every run.
            *batch, number = batch_norm_over_towers(image, gamma, beta, BN_EPSILON, sum_over_towers)
            outputs, mean, variance = _by_mode(is_training, lambda: tuple(batch), inference)
        else:
            number = None
            outputs, mean, variance = _by_mode(is_training, training, inference)
        if mode is not False:
            if rank == 3:
                if number is None:
                    number = tf.cast(tf.reduce_prod(tf.shape(inputs)[:-1]), variance.dtype)
                variance *= tf.maximum(number - 1, 1) / number
            if mode is None:
                decay = tf.where_v2(is_training, decay, 1.0)
            add_moving_average_update(moving_mean, mean, decay)
            add_moving_average_update(moving_variance, variance, decay)
        return outputs if rank == 4 else tf.squeeze(outputs, list(range(rank - 1, 3)))


# --- dropout -------------------------------------------------------------------------------------


def dropout_seed(seed, step, tower=0):
    """Seed of a network's dropout, to be passed as `dropout_seed` of its `get_model`.

    The same seed, step and tower give the same masks on every machine, whatever ran before: a
    training that is resumed at a step draws what it would have drawn.

    Args:
        seed: int of the training, 0 to 2**31 - 1.
        step: scalar tensor, the step counter's value before the step.
        tower: number of the tower, so that towers have masks of their own.

    Returns:
        [2] int32 tensor.
    """
    pair = tf.stack([tf.constant(seed, tf.int32), tf.cast(step, tf.int32)])
    return tf.random.experimental.stateless_fold_in(pair, tower)


def dropout_mask(shape, keep_prob, scope, seed=None):
    """Draws which entries a dropout layer keeps.

    Args:
        shape: of the mask, list of ints or int tensor.
        keep_prob: probability of a 1.
        scope: name of the layer; layers of other names have other masks.
        seed: [2] integer tensor, see `dropout_seed`. None: drawn anew in each run, from the graph's
            seed if it has one.

    Returns:
        float32 tensor of 0 and 1.
    """
    if seed is None:
        seed = tf.random.uniform([2], maxval=np.iinfo(np.int32).max, dtype=tf.int32)
    layer = zlib.crc32(scope.encode()) & 0x7FFFFFFF
    layer_seed = tf.random.experimental.stateless_fold_in(seed, layer)
    return tf.floor(keep_prob + tf.random.stateless_uniform(shape, layer_seed))


def dropout(inputs, is_training, scope, keep_prob=0.5, noise_shape=None, seed=None):
    """In training, keeps entries with probability `keep_prob`, divided by it; others become 0.

    Args:
        inputs: float32 tensor.
        is_training: see the module.
        scope: name scope of the layer, which also tells its mask from other layers'.
        keep_prob: probability of keeping an entry.
        noise_shape: shape of the mask if it is to be broadcast.
        seed: see `dropout_mask`.

    Returns:
        Tensor of the shape of `inputs`.
    """
    with tf.name_scope(scope):

        def training():
            shape = tf.shape(inputs) if noise_shape is None else noise_shape
            mask = dropout_mask(shape, keep_prob, scope, seed)
            return inputs / keep_prob * tf.cast(mask, inputs.dtype)

        return _by_mode(is_training, training, lambda: tf.identity(inputs))
