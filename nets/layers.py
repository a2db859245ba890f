"""Layers with the variable names and the arithmetic of TF-slim, over `tf.nn` and `tf.get_variable`.

Names and defaults follow slim (`tensorflow.contrib.slim`, Apache-2.0), so that checkpoints written
with slim load: `weights`, `biases`, `BatchNorm/{gamma,beta,moving_mean,moving_variance}`. Variables
are resource variables; each layer reads its own once and uses that read both for the op and for the
regularizer.

Variables, batch statistics and regularization are float32. Convolutions and matrix products cast
their inputs and weights to `layer_options.current().compute_dtype` (without an op for float32), and
what follows them works on that type.
"""

import contextlib
import contextvars
import functools
import inspect
import math
import types

import tensorflow.compat.v1 as tf

from utils.towers import layer_options
from utils.towers.averages import add_moving_average_update

_NO_DEFAULTS = types.MappingProxyType({})
_DEFAULTS = contextvars.ContextVar("layer_defaults", default=_NO_DEFAULTS)  # layer -> keywords


# --- defaults of a block of layers ---------------------------------------------------------------


def add_arg_scope(layer):
    """Makes `layer` take keyword defaults from the enclosing `arg_scope`s."""

    @functools.wraps(layer)
    def with_defaults(*args, **kwargs):
        return layer(*args, **{**_DEFAULTS.get().get(with_defaults, {}), **kwargs})

    return with_defaults


@contextlib.contextmanager
def arg_scope(layers, **defaults):
    """Within this context, calls of `layers` use `defaults` for keywords they are not given.

    Args:
        layers: list of functions decorated with `add_arg_scope`.
        **defaults: keyword arguments; an inner scope overrides an outer one, key by key.

    Yields:
        Nothing.

    Raises:
        ValueError: a layer does not have such an argument.
    """
    outer = _DEFAULTS.get()
    inner = dict(outer)
    for layer in layers:
        known = inspect.signature(layer).parameters
        unknown = sorted(set(defaults) - set(known))
        if unknown:
            raise ValueError(
                f"arg_scope got {unknown} for {layer.__name__}, which takes {list(known)}; "
                "use one of these names"
            )
        inner[layer] = {**outer.get(layer, {}), **defaults}
    token = _DEFAULTS.set(inner)
    try:
        yield
    finally:
        _DEFAULTS.reset(token)


# --- initial values and regularization -----------------------------------------------------------


def xavier_initializer(shape, dtype=tf.float32, partition_info=None):
    """Uniform within +-sqrt(6 / (fan_in + fan_out)), slim's default (Glorot, Bengio 2010)."""
    del partition_info  # part of the initializer protocol of tf.get_variable
    limit = math.sqrt(6.0 / (math.prod(shape[:-1]) + math.prod(shape[:-2]) * shape[-1]))
    return tf.random_uniform(shape, -limit, limit, dtype)


def variance_scaling_initializer(shape, dtype=tf.float32, partition_info=None):
    """Truncated normal, standard deviation sqrt(2.6 / fan_in) before truncation (He et al. 2015).

    2.6 is slim's 1.3 * 2, which only roughly makes up for the truncation:
    `tf.variance_scaling_initializer` gives values that are 0.3 % smaller.
    """
    del partition_info
    return tf.truncated_normal(shape, 0.0, math.sqrt(2.6 / math.prod(shape[:-1])), dtype)


def l2_regularizer(scale):
    """A regularizer: weights -> scalar `scale * sum(weights ** 2) / 2`.

    Args:
        scale: float >= 0.

    Returns:
        A function of a tensor, or None for scale 0, which leaves the loss out.

    Raises:
        ValueError: negative scale.
    """
    if scale < 0:
        raise ValueError(f"l2_regularizer got scale {scale}, needs a number >= 0; pass 0 for none")
    if scale == 0:
        return None

    def regularizer(weights):
        with tf.name_scope("l2_regularizer"):
            return tf.multiply(tf.nn.l2_loss(weights), scale)

    return regularizer


# --- variables -----------------------------------------------------------------------------------


def model_variable(name, shape, initializer, trainable=True, on_create=tf.no_regularizer):
    """A float32 resource variable of the current scope, also in `GraphKeys.MODEL_VARIABLES`.

    Args:
        name: last part of the variable's name.
        shape: list of ints.
        initializer: as for `tf.get_variable`.
        trainable: whether it joins `GraphKeys.TRAINABLE_VARIABLES`.
        on_create: function of the variable that returns None; called if this call made the
            variable, not if the scope reused it.

    Returns:
        The variable.
    """
    return tf.get_variable(
        name,
        shape,
        tf.float32,
        initializer,
        regularizer=on_create,  # TensorFlow calls it for new variables only; None adds no loss
        trainable=trainable,
        collections=[tf.GraphKeys.GLOBAL_VARIABLES, tf.GraphKeys.MODEL_VARIABLES],
        use_resource=True,
    )


def _parameter(name, shape, initializer, regularizer=None):
    """Value of a trainable variable; whoever makes the variable adds its regularization loss."""
    made = []
    variable = model_variable(name, shape, initializer, on_create=made.append)
    value = tf.convert_to_tensor(variable)
    if made and regularizer is not None:
        tf.add_to_collection(tf.GraphKeys.REGULARIZATION_LOSSES, regularizer(value))
    return value


# --- types ---------------------------------------------------------------------------------------


def to_compute_dtype(tensor):
    """`tensor` in the type that layers compute in; the same tensor where it has that already."""
    return tf.cast(tensor, layer_options.current().compute_dtype)


def in_float32(activation_fn):
    """An activation for a network's outputs: of its input as float32, whatever layers compute in.

    Args:
        activation_fn: function of a tensor.

    Returns:
        A function of a tensor.
    """
    return lambda tensor: activation_fn(tf.cast(tensor, tf.float32))


# --- layers --------------------------------------------------------------------------------------


@add_arg_scope
def batch_norm(
    inputs,
    decay=0.999,
    center=True,
    scale=False,
    epsilon=0.001,
    activation_fn=None,
    is_training=True,
    reuse=None,
    scope=None,
):
    """Batch normalization over all axes but the last (Ioffe, Szegedy 2015), fused, as slim's.

    In training the batch's statistics are used, and the updates of the moving ones (the variance
    with Bessel's correction) are registered in `GraphKeys.UPDATE_OPS`; the train op runs them.
    Otherwise the moving ones are used. With `layer_options.current().sum_over_towers` the batch is
    that of all towers together.

    Args:
        inputs: [batch, height, width, channels] or [batch, channels] float32.
        decay: share of the moving statistics that an update keeps; float or scalar tensor.
        center: whether to add `beta`.
        scale: whether to multiply with `gamma`.
        epsilon: added to the variance.
        activation_fn: function of a tensor, or None.
        is_training: bool.
        reuse: as for `tf.variable_scope`.
        scope: name of the variable scope, `BatchNorm` by default.

    Returns:
        Tensor of the shape of `inputs`.

    Raises:
        ValueError: rank is neither 2 nor 4.
    """
    rank = inputs.shape.rank
    if rank not in (2, 4):
        raise ValueError(
            f"batch_norm got shape {inputs.shape}, needs rank 2 or 4; reshape the input"
        )
    with tf.variable_scope(scope, "BatchNorm", [inputs], reuse=reuse):
        shape, zeros, ones = (
            [inputs.shape.as_list()[-1]],
            tf.zeros_initializer(),
            tf.ones_initializer(),
        )
        gamma = _parameter("gamma", shape, ones) if scale else tf.ones(shape)
        beta = _parameter("beta", shape, zeros) if center else tf.zeros(shape)
        moving_mean = model_variable("moving_mean", shape, zeros, trainable=False)
        moving_variance = model_variable("moving_variance", shape, ones, trainable=False)
        image = inputs if rank == 4 else inputs[:, tf.newaxis, tf.newaxis, :]
        sum_over_towers = layer_options.current().sum_over_towers
        if is_training and sum_over_towers is not None:
            outputs, batch_mean, batch_variance, _ = batch_norm_over_towers(
                image, gamma, beta, epsilon, sum_over_towers
            )
        else:
            outputs, batch_mean, batch_variance = tf.nn.fused_batch_norm(
                image,
                gamma,
                beta,
                mean=None if is_training else tf.convert_to_tensor(moving_mean),
                variance=None if is_training else tf.convert_to_tensor(moving_variance),
                epsilon=epsilon,
                is_training=is_training,
            )
        if is_training:
            add_moving_average_update(moving_mean, batch_mean, decay)
            add_moving_average_update(moving_variance, batch_variance, decay)
        if rank == 2:
            outputs = tf.squeeze(outputs, [1, 2])
        return outputs if activation_fn is None else activation_fn(outputs)


def batch_norm_over_towers(inputs, gamma, beta, epsilon, sum_over_towers):
    """Normalizes with the statistics of all towers' inputs; batches may differ in size.

    The variance is of the distances from the common mean: a second sum over the towers, but no
    difference of large squares.

    Args:
        inputs: [..., channels].
        gamma: [channels] float32.
        beta: [channels] float32.
        epsilon: added to the variance.
        sum_over_towers: see utils.towers.layer_options.

    Returns:
        Tuple (outputs, mean, variance, number): outputs as `inputs`; mean and variance [channels]
        float32, the variance with Bessel's correction, as of `tf.nn.fused_batch_norm`; number
        scalar float32, of what was averaged, in all towers.
    """
    axes = list(range(inputs.shape.rank - 1))
    exact = tf.cast(inputs, tf.float32)
    own_number = tf.cast(tf.reduce_prod(tf.shape(inputs)[:-1]), tf.float32)
    sums = sum_over_towers(tf.concat([tf.reduce_sum(exact, axes), [own_number]], 0))
    number = tf.stop_gradient(sums[-1])
    mean = sums[:-1] / number
    centered = exact - mean
    variance = sum_over_towers(tf.reduce_sum(tf.square(centered), axes)) / number
    outputs = centered * (tf.rsqrt(variance + epsilon) * gamma) + beta
    unbiased = variance * (number / tf.maximum(number - 1, 1))
    return tf.cast(outputs, inputs.dtype), mean, unbiased, number


def _finish(outputs, normalizer_fn, normalizer_params, biases_initializer, activation_fn):
    """Normalization if there is one, else biases; then the activation."""
    if normalizer_fn is not None:
        outputs = normalizer_fn(outputs, **(normalizer_params or {}))
    elif biases_initializer is not None:
        biases = _parameter("biases", [outputs.shape.as_list()[-1]], biases_initializer)
        outputs = tf.nn.bias_add(outputs, tf.cast(biases, outputs.dtype))
    return outputs if activation_fn is None else activation_fn(outputs)


def _pair(size):
    """A kernel size or stride given as one int or as (vertical, horizontal)."""
    return [size, size] if isinstance(size, int) else list(size)


@add_arg_scope
def conv2d(
    inputs,
    num_outputs,
    kernel_size,
    stride=1,
    padding="SAME",
    rate=1,
    activation_fn=tf.nn.relu,
    normalizer_fn=None,
    normalizer_params=None,
    weights_initializer=xavier_initializer,
    weights_regularizer=None,
    biases_initializer=tf.zeros_initializer(),  # noqa: B008  (stateless)
    reuse=None,
    scope=None,
):
    """2-D convolution, then normalization or biases, then activation, as slim's.

    Args:
        inputs: [batch, height, width, channels] float32 with a known number of channels.
        num_outputs: number of output channels.
        kernel_size: int or (vertical, horizontal).
        stride: int or pair, in pixels.
        padding: 'SAME', 'VALID', or explicit zeros [[top, bottom], [left, right]] in pixels.
        rate: int or pair; distance in pixels of neighbouring kernel elements.
        activation_fn: function of a tensor, or None.
        normalizer_fn: e.g. `batch_norm`; with it there are no biases.
        normalizer_params: dict of keyword arguments of `normalizer_fn`.
        weights_initializer: initializer of [vertical, horizontal, channels, num_outputs].
        weights_regularizer: e.g. `l2_regularizer(1e-5)`.
        biases_initializer: None for no biases.
        reuse: as for `tf.variable_scope`.
        scope: name of the variable scope; `Conv`, `Conv_1`, ... by default.

    Returns:
        [batch, out_height, out_width, num_outputs] float32.
    """
    if not isinstance(padding, str):
        padding = [[0, 0], *map(list, padding), [0, 0]]
    with tf.variable_scope(scope, "Conv", [inputs], reuse=reuse):
        shape = [*_pair(kernel_size), inputs.shape.as_list()[-1], num_outputs]
        weights = _parameter("weights", shape, weights_initializer, weights_regularizer)
        outputs = tf.nn.conv2d(
            to_compute_dtype(inputs),
            to_compute_dtype(weights),
            strides=_pair(stride),
            padding=padding,
            dilations=_pair(rate),
        )
        return _finish(outputs, normalizer_fn, normalizer_params, biases_initializer, activation_fn)


@add_arg_scope
def fully_connected(
    inputs,
    num_outputs,
    activation_fn=tf.nn.relu,
    normalizer_fn=None,
    normalizer_params=None,
    weights_initializer=xavier_initializer,
    weights_regularizer=None,
    biases_initializer=tf.zeros_initializer(),  # noqa: B008  (stateless)
    reuse=None,
    scope=None,
):
    """Matrix product, then normalization or biases, then activation; arguments as of `conv2d`.

    Args:
        inputs: [batch, features] float32.
        num_outputs: number of output features.

    Returns:
        [batch, num_outputs] float32.
    """
    with tf.variable_scope(scope, "fully_connected", [inputs], reuse=reuse):
        shape = [inputs.shape.as_list()[-1], num_outputs]
        weights = _parameter("weights", shape, weights_initializer, weights_regularizer)
        outputs = tf.matmul(to_compute_dtype(inputs), to_compute_dtype(weights))
        return _finish(outputs, normalizer_fn, normalizer_params, biases_initializer, activation_fn)


@add_arg_scope
def max_pool2d(inputs, kernel_size, stride=2, padding="VALID", scope=None):
    """Maximum over windows of `kernel_size` pixels that are `stride` pixels apart.

    Args:
        inputs: [batch, height, width, channels] float32.
        kernel_size: int or (vertical, horizontal).
        stride: int or pair.
        padding: 'SAME' or 'VALID'.
        scope: name scope of the op.

    Returns:
        [batch, out_height, out_width, channels] float32.
    """
    with tf.name_scope(scope, "MaxPool2D", [inputs]):
        return tf.nn.max_pool2d(inputs, _pair(kernel_size), _pair(stride), padding)
