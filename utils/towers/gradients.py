"""Averaging the towers' gradients: K x N x (gradient, variable) -> N x (gradient, variable)."""

import tensorflow.compat.v1 as tf

# For `compute_gradients(..., aggregation_method=...)`: a tensor that is used several times gets its
# gradient as a chain of pairs. The default, one AddN, adds up in an order that depends on which
# input's memory happens to be free, so that the same step would not give the same bits twice.
PAIRWISE = tf.AggregationMethod.EXPERIMENTAL_TREE


def average_gradients(tower_grads):
    """Mean over the towers of every variable's gradient.

    Args:
        tower_grads: K lists of N (gradient, variable) pairs, as `compute_gradients` returns them:
            the same variables in the same order in every tower. A gradient is a tensor, an
            IndexedSlices, or None (no influence on that tower's loss: counts as zero; None in every
            tower stays None).

    Returns:
        One list of N (gradient, variable) pairs. IndexedSlices where all towers that have a
        gradient give IndexedSlices, else dense.

    Raises:
        ValueError: there is no tower, or the towers' variables differ.
    """
    _check_same_variables(tower_grads)
    average = []
    for pairs in zip(*tower_grads):  # K x (gradient, variable) of one variable
        variable = pairs[0][1]
        grads = [grad for grad, _ in pairs if grad is not None]
        average.append((_mean(grads, len(pairs)), variable))
    return average


def stack_mean_gradients(tower_grads):
    """The originals' form of `average_gradients`: stack, then mean. Dense gradients only.

    Kept as the reference that the tests and `bench.py` compare with: it copies every gradient once
    more.
    """
    _check_same_variables(tower_grads)
    return [
        (tf.reduce_mean(tf.stack([grad for grad, _ in pairs], axis=0), axis=0), pairs[0][1])
        for pairs in zip(*tower_grads)
    ]


def add_regularization(grads, regularization_loss):
    """Adds the gradient of a loss that does not depend on the batch, once and not in every tower.

    It equals the mean over towers that each differentiate it with their own loss, without their
    reading every weight for it.

    Args:
        grads: averaged (gradient, variable) pairs.
        regularization_loss: scalar.

    Returns:
        (gradient, variable) pairs, in the same order.
    """
    variables = [variable for _, variable in grads]
    added = []
    for (grad, variable), extra in zip(grads, tf.gradients(regularization_loss, variables)):
        if grad is None or extra is None:
            added.append((extra if grad is None else grad, variable))
        else:
            added.append((tf.convert_to_tensor(grad) + extra, variable))
    return added


def add_in_order(tensors):
    """The sum of some tensors of one shape, added up in the same order in every run.

    AddN starts with the first input whose memory it can reuse, whichever that is at the moment.
    The memory of a sum of two always is.
    """
    if len(tensors) > 2:
        tensors = [tensors[0] + tensors[1], *tensors[2:]]
    return tf.add_n(tensors)


def _mean(grads, num_towers):
    if not grads:
        return None
    if num_towers == 1:
        return grads[0]
    if all(isinstance(grad, tf.IndexedSlices) for grad in grads):
        return tf.IndexedSlices(
            values=tf.concat([grad.values for grad in grads], axis=0) * (1.0 / num_towers),
            indices=tf.concat([grad.indices for grad in grads], axis=0),
            dense_shape=grads[0].dense_shape,
        )
    return add_in_order([tf.convert_to_tensor(grad) for grad in grads]) * (1.0 / num_towers)


def _check_same_variables(tower_grads):
    if not tower_grads:
        raise ValueError("no tower gave gradients; pass one list of (gradient, variable) a tower")
    names = [[variable.op.name for _, variable in grads] for grads in tower_grads]
    for tower, found in enumerate(names[1:], start=1):
        if found == names[0]:
            continue
        only_first = sorted(set(names[0]) - set(found))
        only_this = sorted(set(found) - set(names[0]))
        raise ValueError(
            f"tower {tower} has {len(found)} variables and tower 0 has {len(names[0])}, or in"
            " another"
            f" order (only tower 0: {only_first}; only tower {tower}: {only_this});"
            " pass the same var_list to compute_gradients in every tower"
        )
