"""Half precision: scaling the loss for float16, and gradients that travel as float16.

    scale = LossScale()
    ... scale.scale(loss) in every tower, instead of the loss
    grads = scale.unscale(average)
    finite = all_finite(grads)
    train_op = scale.guarded(finite, lambda: opt.apply_gradients(grads))

float16 has no number between 0 and 6e-8 and none above 65504. Small gradients would vanish, so the
loss is multiplied by a scale before it is differentiated, and the gradients divided by it after. A
scale that is too large shows as an infinite gradient: that step is left out and the scale halved.
"""

import tensorflow.compat.v1 as tf

from utils.towers.checkpoint_contents import OPTIONAL_VARIABLES

INITIAL_SCALE = 2.0**15
LARGEST_SCALE = 2.0**24  # gradients that are all zero would let it grow without end
GROWTH_STEPS = 2000


class LossScale:
    """A loss scale that adapts, kept in the variables `loss_scale` and `loss_scale_good_steps`.

    They are saved with a training and may be missing in a checkpoint (OPTIONAL_VARIABLES). Scales
    are powers of two, so scaling changes no bit of a gradient that neither overflows nor vanishes.

    Attributes:
        value: float32 scalar, the scale of this step.

    Args:
        initial: first scale, a power of two.
        growth_steps: number of steps without overflow after which the scale is doubled.
    """

    def __init__(self, initial=INITIAL_SCALE, growth_steps=GROWTH_STEPS):
        self._growth_steps = growth_steps
        self._scale = _state("loss_scale", tf.float32, initial)
        self._good_steps = _state("loss_scale_good_steps", tf.int32, 0)
        # Read once, because the step changes it: towers and `unscale` use the value before that.
        self.value = self._scale.read_value()

    def scale(self, loss):
        """The loss times the scale, to be differentiated in its place.

        Args:
            loss: float32 scalar.

        Returns:
            float32 scalar.
        """
        return loss * self.value

    def unscale(self, grads):
        """Gradients of the loss from those of the scaled loss.

        Args:
            grads: list of (gradient, variable); float32, dense, IndexedSlices or None.

        Returns:
            List of (gradient, variable) in the same order.
        """
        inverse = 1.0 / self.value
        return _map_gradients(lambda values: values * inverse, grads)

    def guarded(self, finite, update):
        """An op that makes an update only if its gradients are finite, and then adapts the scale.

        Args:
            finite: bool scalar, see `all_finite`.
            update: function that builds all ops of the update and returns one op that waits for
                them: weights, batch-norm statistics, moving averages. What it makes with
                `tf.get_variable` or as an optimizer's slots are ordinary variables of the graph.

        Returns:
            The op. Where `finite` is False, it changes the scale alone.
        """

        def run_update():
            with tf.control_dependencies([update()]):
                return tf.constant(True)

        with tf.name_scope("loss_scale_guard"):
            updated = tf.cond(finite, run_update, lambda: tf.constant(False))
            with tf.control_dependencies([updated]):
                return self._adapt(finite)

    def _adapt(self, finite):
        good_steps = tf.where_v2(finite, self._good_steps.read_value() + 1, 0)
        grow = good_steps >= self._growth_steps
        doubled = tf.minimum(self.value * 2.0, LARGEST_SCALE)
        halved = tf.maximum(self.value * 0.5, 1.0)
        scale = tf.where_v2(finite, tf.where_v2(grow, doubled, self.value), halved)
        return tf.group(
            self._scale.assign(scale, read_value=False),
            self._good_steps.assign(tf.where_v2(grow, 0, good_steps), read_value=False),
        )


def all_finite(grads):
    """Whether no gradient has an infinity or a NaN.

    Args:
        grads: list of (gradient, variable); dense, IndexedSlices or None.

    Returns:
        bool scalar.
    """
    finite = []
    for gradient, _ in grads:
        if gradient is not None:
            values = gradient.values if isinstance(gradient, tf.IndexedSlices) else gradient
            finite.append(tf.reduce_all(tf.is_finite(values)))
    return tf.reduce_all(tf.stack(finite)) if finite else tf.constant(True)


def compress(grads):
    """Gradients as float16, half the bytes; built on the device that they leave.

    Ten bits of a gradient remain. Beyond 65504 it becomes infinite; below 6e-5 bits are lost, and
    below 6e-8 it becomes 0.

    Args:
        grads: list of (gradient, variable); float32, dense, IndexedSlices (whose indices stay as
            they are) or None.

    Returns:
        List of (gradient, variable) in the same order.
    """
    with tf.name_scope("compress"):
        return _map_gradients(lambda values: tf.cast(values, tf.float16), grads)


def decompress(grads):
    """Compressed gradients as float32 again; built on the device that they arrive at.

    Args:
        grads: what `compress` returned.

    Returns:
        List of (gradient, variable) in the same order.
    """
    with tf.name_scope("decompress"):
        return _map_gradients(lambda values: tf.cast(values, tf.float32), grads)


def _state(name, dtype, initial):
    return tf.get_variable(
        name,
        [],
        dtype,
        tf.constant_initializer(initial),
        trainable=False,
        use_resource=True,
        collections=[tf.GraphKeys.GLOBAL_VARIABLES, OPTIONAL_VARIABLES],
    )


def _map_gradients(function, grads):
    """Applies a function to the numbers of every gradient."""
    mapped = []
    for gradient, variable in grads:
        if isinstance(gradient, tf.IndexedSlices):
            gradient = tf.IndexedSlices(
                function(gradient.values), gradient.indices, gradient.dense_shape
            )
        elif gradient is not None:
            gradient = function(gradient)
        mapped.append((gradient, variable))
    return mapped
