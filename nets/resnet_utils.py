"""Pieces shared by the residual networks, as in slim's `nets/resnet_utils.py`."""

import collections
import contextlib

import tensorflow.compat.v1 as tf

from nets import layers


class Block(collections.namedtuple("Block", ["scope", "unit_fn", "args"])):
    """One block of a residual network.

    Attributes:
        scope: name of the block's variable scope.
        unit_fn: function (inputs, *args, end_points=) of one residual unit.
        args: one tuple of arguments for each unit.
    """


def subsample(inputs, factor, scope=None):
    """Every `factor`-th pixel of [batch, height, width, channels], beginning with the first."""
    if factor == 1:
        return inputs
    return layers.max_pool2d(inputs, 1, stride=factor, scope=scope)


def conv2d_same(inputs, num_outputs, kernel_size, stride, rate=1, scope=None):
    """Convolution that pads alike on both sides, whatever the input size.

    TensorFlow's 'SAME' pads a strided convolution of an even-sized input more at the end, which
    shifts the output against that of an odd-sized one; ResNet's checkpoints were trained with this
    form.

    Args:
        inputs: [batch, height, width, channels] float32.
        num_outputs: number of output channels.
        kernel_size: int.
        stride: int, in pixels.
        rate: int, distance in pixels of neighbouring kernel elements.
        scope: name of the variable scope.

    Returns:
        [batch, ceil(height / stride), ceil(width / stride), num_outputs] float32, for odd kernels.
    """
    if stride == 1:
        padding = "SAME"
    else:
        total = (kernel_size - 1) * rate
        padding = [[total // 2, total - total // 2]] * 2
    return layers.conv2d(
        inputs, num_outputs, kernel_size, stride=stride, padding=padding, rate=rate, scope=scope
    )


def stack_blocks_dense(net, blocks, end_points):
    """Applies the units of all blocks one after the other.

    Args:
        net: [batch, height, width, channels] float32.
        blocks: list of Block.
        end_points: dict that receives the output of each block under the name of its variable
            scope, and whatever the units add.

    Returns:
        Output of the last block.
    """
    for block in blocks:
        with tf.variable_scope(block.scope, "block", [net]) as scope:
            for number, arguments in enumerate(block.args, start=1):
                with tf.variable_scope(f"unit_{number}", values=[net]):
                    net = block.unit_fn(net, *arguments, end_points=end_points)
            end_points[scope.name] = net
    return net


@contextlib.contextmanager
def resnet_arg_scope(
    weight_decay=0.0001,
    batch_norm_decay=0.997,
    batch_norm_epsilon=1e-5,
    batch_norm_scale=True,
    is_training=True,
):
    """Defaults of a ResNet's convolutions: slim's variance scaling, L2, batch norm, ReLU.

    Args:
        weight_decay: scale of the L2 loss of the kernels.
        batch_norm_decay: share of the moving statistics that an update keeps.
        batch_norm_epsilon: added to the variance.
        batch_norm_scale: whether batch norm has a `gamma`.
        is_training: whether batch norm uses the batch's statistics.

    Yields:
        Nothing.
    """
    with (
        layers.arg_scope(
            [layers.conv2d],
            weights_initializer=layers.variance_scaling_initializer,
            weights_regularizer=layers.l2_regularizer(weight_decay),
            normalizer_fn=layers.batch_norm,
        ),
        layers.arg_scope(
            [layers.batch_norm],
            decay=batch_norm_decay,
            epsilon=batch_norm_epsilon,
            scale=batch_norm_scale,
            is_training=is_training,
        ),
    ):
        yield
