"""Moving averages: batch-norm statistics while training, and averaged weights for evaluation.

Batch norm does not update its moving statistics itself: it leaves a `MovingAverageUpdate` in
`tf.GraphKeys.UPDATE_OPS`. Whoever builds the train op decides which towers' updates run, and in
which order (`utils.towers.train_op`), so that no update op is built that nothing runs.
"""

import tensorflow.compat.v1 as tf


class MovingAverageUpdate:
    """One pending update of a moving average; becomes an op when it is grouped or run.

    `tf.group(*tf.get_collection(tf.GraphKeys.UPDATE_OPS, scope))` works as with slim's update ops.

    Attributes:
        variable: the moving average, a non-trainable resource variable.
        value: tensor of the variable's shape, the statistic of this tower's batch.
        decay: float or scalar tensor, the share of the old average that is kept.
        name: name of `value`, by which `tf.get_collection(key, scope)` finds the tower's updates.
    """

    def __init__(self, variable, value, decay):
        self.variable = variable
        self.value = value
        self.decay = decay
        self.name = value.name
        self._op = None

    @property
    def device(self):
        """Device of the update: that of the variable."""
        return self.variable.device

    @property
    def op(self):
        """The op `variable -= (variable - value) * (1 - decay)`, made on first use."""
        if self._op is None:
            self._op = assign_moving_average(self.variable, self.value, self.decay)
        return self._op

    def _as_graph_element(self):
        return self.op


def add_moving_average_update(variable, value, decay):
    """Registers that `variable` follows `value`, to be run by the train op.

    Args:
        variable: non-trainable resource variable.
        value: tensor of the same shape and dtype.
        decay: float or scalar tensor in [0, 1].

    Returns:
        The MovingAverageUpdate, which is now in `tf.GraphKeys.UPDATE_OPS`.
    """
    update = MovingAverageUpdate(variable, value, decay)
    tf.add_to_collection(tf.GraphKeys.UPDATE_OPS, update)
    return update


def assign_moving_average(variable, value, decay):
    """`variable -= (variable - value) * (1 - decay)`, the arithmetic of slim's batch norm.

    Args:
        variable: resource variable.
        value: tensor of the same shape.
        decay: float or scalar tensor in [0, 1].

    Returns:
        The assignment op.
    """
    with tf.name_scope(None, "AssignMovingAvg"), tf.device(variable.device):
        keep = tf.convert_to_tensor(1.0 - decay, variable.dtype.base_dtype, name="decay")
        return variable.assign_sub((variable.read_value() - value) * keep, read_value=False)
