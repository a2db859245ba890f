"""Batch normalization whose sums add one float32 value after the other.

So did the CPU kernel of the TensorFlow that the golden numbers of PointNet++ were made with. Such
sums over hundreds of thousands of values are off by up to 1e-4 of a standard deviation, and
training amplifies that. With the same sums, what remains between a network and its golden numbers
is small, so a mistake shows.
"""

import numpy as np
import tensorflow.compat.v1 as tf

_LIBRARY_FUSED_BATCH_NORM = tf.nn.fused_batch_norm


def one_by_one_sum(rows):
    """[n, channels] float32 -> [channels]: NumPy adds whole rows in their order."""
    return rows.sum(axis=0, dtype=np.float32)


def _forward(inputs, scale, offset, epsilon):
    rows = inputs.reshape(-1, inputs.shape[-1])
    number = np.float32(len(rows))
    mean = one_by_one_sum(rows) * (1 / number)
    centred = rows - mean
    variance = one_by_one_sum(centred**2) * (1 / number)
    outputs = centred * (scale / np.sqrt(variance + epsilon)) + offset
    unbiased = variance * (number / max(number - 1, np.float32(1)))
    return outputs.reshape(inputs.shape), mean, unbiased, variance


def _backward(grad, inputs, scale, mean, variance, epsilon):
    rows, grads = (value.reshape(-1, value.shape[-1]) for value in (inputs, grad))
    number = np.float32(len(rows))
    centred, factor = rows - mean, 1 / np.sqrt(variance + epsilon)
    grad_scale, grad_offset = one_by_one_sum(grads * (centred * factor)), one_by_one_sum(grads)
    slope = factor**2 * (one_by_one_sum(grads * centred) / number)
    grad_rows = scale * factor * (grads - grad_offset * (1 / number) - centred * slope)
    return grad_rows.reshape(inputs.shape), grad_scale, grad_offset


def fused_batch_norm(
    inputs, scale, offset, mean=None, variance=None, epsilon=0.001, is_training=True
):
    """Stands in for `tf.nn.fused_batch_norm`; in evaluation, where nothing is summed, is it.

    Args:
        inputs: [batch, height, width, channels] float32.
        scale: [channels] float32.
        offset: [channels] float32.
        mean: [channels] float32, in evaluation.
        variance: [channels] float32, in evaluation.
        epsilon: float.
        is_training: bool.

    Returns:
        outputs, mean, variance with Bessel's correction.
    """
    if not is_training:
        return _LIBRARY_FUSED_BATCH_NORM(
            inputs, scale, offset, mean, variance, epsilon=epsilon, is_training=False
        )
    epsilon = np.float32(epsilon)

    def shaped(values, like):
        for value, example in zip(values, like):
            value.set_shape(example.shape)
        return values

    @tf.custom_gradient
    def normalize(inputs, scale, offset):
        found = tf.numpy_function(
            lambda *args: _forward(*args, epsilon), [inputs, scale, offset], [tf.float32] * 4
        )
        outputs, mean, unbiased, variance = shaped(found, [inputs, scale, scale, scale])

        def backward(grad, *_):
            found = tf.numpy_function(
                lambda *args: _backward(*args, epsilon),
                [grad, inputs, scale, mean, variance],
                [tf.float32] * 3,
            )
            return shaped(found, [inputs, scale, offset])

        return (outputs, mean, unbiased), backward

    return normalize(inputs, scale, offset)
