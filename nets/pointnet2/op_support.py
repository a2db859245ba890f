"""What the point ops share: checks of arguments, compiled searches, rows by their indices."""

import operator

import tensorflow.compat.v1 as tf


def count_argument(op, name, value):
    """`value` as a positive Python int."""
    try:
        number = operator.index(value)
    except TypeError:
        number = 0
    if number <= 0:
        raise ValueError(f"{op} got {name}={value}; pass a whole number of 1 or more")
    return number


FEATURES = (tf.float32, tf.bfloat16, tf.float16)


def tensor_argument(op, name, value, axes, dtype=tf.float32, others=()):
    """`value` as a tensor of `dtype`, or one of `others`.

    `axes` are names of axes of any size, or sizes.
    """
    if not tf.is_tensor(value):
        value = tf.convert_to_tensor(value, dtype)
    sizes = value.shape.as_list() if value.shape.rank is not None else []
    fits = len(sizes) == len(axes) and 0 not in sizes[1:]
    fits = fits and all(isinstance(a, str) or size in (None, a) for size, a in zip(sizes, axes))
    if not fits or value.dtype not in (dtype, *others):
        raise ValueError(
            f"{op} got {name} of type {value.dtype.name} and shape {value.shape}; pass {dtype.name}"
            f" [{', '.join(map(str, axes))}] with at least one entry along each axis"
        )
    return value


def search_program(function, tensors, jit_compile):
    """Calls `function` on constants, as one XLA program unless `jit_compile` says otherwise."""
    if jit_compile is None:
        jit_compile = tf.test.is_built_with_xla()
    # A new tf.function every time: a shared one would keep the device of its first caller.
    traced = tf.function(function, jit_compile=jit_compile, autograph=False)
    return tf.nest.map_structure(
        tf.stop_gradient, traced(*[tf.stop_gradient(tensor) for tensor in tensors])
    )


def sum_by_index(shares, idx, points):
    """Adds [batch, ..., C] shares to where `idx` [batch, ...] says, in a tensor like `points`.

    One sum over all shares in their order, as the original's loops have it, so the result is equal
    to the last bit. It is a float32 sum for every type of shares.
    """
    batch, number, channels = tf.unstack(tf.shape(points))
    first_rows = number * tf.reshape(tf.range(batch), [-1] + [1] * (idx.shape.rank - 1))
    summed = tf.math.unsorted_segment_sum(
        tf.reshape(tf.cast(shares, tf.float32), [-1, channels]),
        tf.reshape(first_rows + idx, [-1]),
        batch * number,
    )
    return tf.cast(tf.reshape(summed, tf.shape(points)), points.dtype)


def take(points, idx):
    """[batch, ..., C] rows of [batch, N, C] points by [batch, ...] indices."""

    @tf.custom_gradient  # TensorFlow's own for batched indices takes over a hundred ops
    def gather(points):
        taken = tf.gather(points, idx, batch_dims=1)
        return taken, lambda upstream: sum_by_index(upstream, idx, points)

    return gather(points)
