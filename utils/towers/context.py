"""One tower: its device, its name scope, and which variables it may make."""

import contextlib

import tensorflow.compat.v1 as tf

LOSS_TERMS = "tower_loss_terms"


class Tower:
    """What one tower has built; complete after its `tower_context` has ended.

    Attributes:
        index: number of the tower.
        scope: its name scope, for example 'model_0/'; a key for `tf.get_collection(key, scope)`.
        update_ops: its batch-norm updates.
        loss_terms: the scalars it registered with `add_loss_term`, in order.
        summaries: its summary ops.
        regularization_losses: of the variables that it uses.
    """

    def __init__(self, index, scope):
        self.index = index
        self.scope = scope
        self.update_ops = []
        self.loss_terms = []
        self.summaries = []
        self.regularization_losses = []


@contextlib.contextmanager
def tower_context(devices, index):
    """Enters tower `index`: device, name scope `model_<index>`, and the rule that only tower 0
    makes variables.

    Args:
        devices: utils.towers.devices.Devices.
        index: number of the tower, 0 first.

    Yields:
        A Tower. What it collects is filled in when the context ends.

    Raises:
        ValueError: a tower after the first made a variable, which would be in no other tower's
            gradients.
    """
    known = {v.name for v in tf.global_variables()} if index else set()
    with tf.device(devices.tower_device(index)), tf.name_scope(f"model_{index}") as scope:
        tower = Tower(index, scope)
        yield tower
    if index:
        new = [v.op.name for v in tf.global_variables() if v.name not in known]
        if new:
            raise ValueError(
                f"tower {index} made {len(new)} new variable(s), first {new[0]}; every tower must"
                " use those of tower 0: build it under"
                " tf.variable_scope(tf.get_variable_scope(), reuse=True)"
            )
    tower.update_ops = tf.get_collection(tf.GraphKeys.UPDATE_OPS, scope)
    tower.loss_terms = tf.get_collection(LOSS_TERMS, scope)
    tower.summaries = tf.get_collection(tf.GraphKeys.SUMMARIES, scope)
    tower.regularization_losses = tf.get_collection(tf.GraphKeys.REGULARIZATION_LOSSES)


def add_loss_term(tensor):
    """Registers a scalar of this tower's loss to be watched for NaN and infinity."""
    tf.add_to_collection(LOSS_TERMS, tensor)
