"""The order of one update: apply the gradients, then batch-norm statistics.

Then moving averages.
"""

import tensorflow.compat.v1 as tf

from utils.towers import averages, gradients

BN_UPDATES = ("last", "first", "all", "in_order")


def build_train_op(
    opt,
    grads,
    global_step,
    towers,
    variable_averages=None,
    bn_updates="last",
    batch_norm_updates_op=None,
):
    """Builds the op that makes one training step.

    The originals leave batch-norm updates and moving averages to a race with the weights' update;
    here each waits for the one before, so that the averages always see the new weights.

    Args:
        opt: a tf.train.Optimizer.
        grads: averaged (gradient, variable) pairs.
        global_step: variable that counts the steps; increased by 1.
        towers: list of utils.towers.context.Tower, whose batch-norm updates are at hand.
        variable_averages: tf.train.ExponentialMovingAverage over the trainable variables, or None.
        bn_updates: which tower's batch-norm updates run: 'last' or 'first' tower's alone, 'all':
            one update with the mean of the towers' batch statistics, or 'in_order': every tower's
            update, one after the other, tower 0 first.
        batch_norm_updates_op: what `batch_norm_updates` gave, if it runs in other steps as well;
            it does not wait for the gradients then.

    Returns:
        The op `train_op`.

    Raises:
        ValueError: bn_updates is none of BN_UPDATES.
    """
    apply_gradient_op = opt.apply_gradients(grads, global_step=global_step)
    if batch_norm_updates_op is None:
        with tf.control_dependencies([apply_gradient_op]):
            batch_norm_updates_op = batch_norm_updates(towers, bn_updates)
    if variable_averages is None:
        return tf.group(apply_gradient_op, batch_norm_updates_op, name="train_op")
    with tf.control_dependencies([apply_gradient_op, batch_norm_updates_op]):
        variables_averages_op = variable_averages.apply(tf.trainable_variables())
    return tf.group(variables_averages_op, name="train_op")


def batch_norm_updates(towers, which):
    """Groups the batch-norm updates of the towers.

    Args:
        towers: list of utils.towers.context.Tower.
        which: one of BN_UPDATES, see `build_train_op`.

    Returns:
        An op. Ops in UPDATE_OPS that are no moving-average updates run as they are: of the chosen
        tower, or of all.

    Raises:
        ValueError: `which` is none of BN_UPDATES.
    """
    towers = updating_towers(towers, which)
    if len(towers) == 1:
        return tf.group(*towers[0].update_ops, name="batch_norm_updates")
    per_variable = {}
    other_ops = []
    for update in (update for tower in towers for update in tower.update_ops):
        if isinstance(update, averages.MovingAverageUpdate):
            per_variable.setdefault(update.variable.ref(), []).append(update)
        else:
            other_ops.append(update)
    combine = _mean_update if which == "all" else _updates_in_order
    combined = [combine(updates) for updates in per_variable.values()]
    return tf.group(*combined, *other_ops, name="batch_norm_updates")


def updating_towers(towers, which):
    """The towers whose batch-norm updates run.

    Args:
        towers: list of utils.towers.context.Tower.
        which: one of BN_UPDATES, see `build_train_op`.

    Returns:
        List of Tower.

    Raises:
        ValueError: `which` is none of BN_UPDATES.
    """
    if which not in BN_UPDATES:
        raise ValueError(f"bn_updates={which} is unknown; use one of {', '.join(BN_UPDATES)}")
    return {"first": towers[:1], "last": towers[-1:]}.get(which, towers)


def _mean_update(updates):
    """One update of a variable with the mean of the towers' values."""
    total = gradients.add_in_order([update.value for update in updates])
    return averages.assign_moving_average(
        updates[0].variable, total * (1.0 / len(updates)), updates[0].decay
    )


def _updates_in_order(updates):
    """The towers' updates of a variable, each after the one before; returns the last."""
    op = updates[0].op
    for update in updates[1:]:
        with tf.control_dependencies([op]):
            op = update.op
    return op
