"""Figures against other ways to train the reference net: one device, and TensorFlow's own towers.

One inter-op and one intra-op thread; see `benchmarks.reference_net`.
"""

import contextlib
import dataclasses

import numpy as np
import tensorflow.compat.v1 as tf

from benchmarks import reference_net
from benchmarks.measure import Figure, interleave, ratio_figure
from benchmarks.reference_net import logical_cpus, make_step, one_thread, plain_graph, tower_graph
from benchmarks.tower_figures import REPLICATED, SYNC_BN, count_ops
from utils.towers import engine_flags

STEPS, DESCENT_RATE = 10, 0.01  # of the comparison with one device
TIME_BAR, OPS_BAR = 1.00, 0.6  # over those of the strategy


def equality(make_place=logical_cpus, towers=(2, 4)):
    """Largest difference between any variable of K towers and the same of one plain device.

    After 10 steps of the same batches; optimizer's slots, moving statistics and averaged weights
    count too. Towers that each normalise over their own part compute something else than one
    device, so the net has no batch norm, or batch norm over all towers (`sync_bn`).

    With batch norm the steps are those of gradient descent. Adam divides the smallest gradients by
    their own size, so that rounding decides the way of some weights: the detail has Adam's
    difference, and what one device gives for the same batches in another order.

    Args:
        make_place: function of a number of towers that returns their Devices.
        towers: numbers of towers.

    Returns:
        List of Figure.
    """
    return [
        *_equality("equality", {"normalized": False}, engine_flags.DEFAULTS, make_place, towers),
        *_equality("equality_sync_bn", {"make_optimizer": _descent}, SYNC_BN, make_place, towers),
    ]


def _equality(name, net, options, make_place, towers):
    """Figures of one kind of net; see `equality`.

    Args:
        net: keywords of `plain_graph` and `tower_graph`.
        options: EngineOptions of the towers.
    """
    first, expected = _train(plain_graph(**net))
    figures = []
    for num_towers in towers:
        place = make_place(num_towers)
        _, found = _train(tower_graph(place, options=options, **net))
        difference, where = _largest_difference(found, expected)
        detail = {
            "steps": STEPS,
            "variables": len(expected),
            "largest_in": where,
            "largest_change_of_weights": _rounded(_change_of_weights(first, expected)),
        }
        replicated = dataclasses.replace(options, variable_update="replicated")
        _, copies = _train(tower_graph(place, options=replicated, **net))
        detail["replicated"] = _rounded(_largest_difference(copies, expected)[0])
        if options.sync_bn:
            _, reordered = _train(plain_graph(**net), order=-1)
            detail["other_order"] = _rounded(_largest_difference(reordered, expected)[0])
            _, adam = _train(plain_graph())
            _, found = _train(tower_graph(place, options=options))
            _, reordered = _train(plain_graph(), order=-1)
            detail["adam"] = _rounded(_largest_difference(found, adam)[0])
            detail["adam_other_order"] = _rounded(_largest_difference(reordered, adam)[0])
        figures.append(
            Figure(f"{name}_k{num_towers}", difference, "largest difference", "<=", 1e-5, detail)
        )
    return figures


def _descent():
    return tf.train.GradientDescentOptimizer(DESCENT_RATE)


def _train(training, order=1):
    """Trains some steps on batches of their own.

    Args:
        training: Training.
        order: -1 reverses the images of each batch.

    Returns:
        Two dicts name -> value of every variable: before, and after.
    """
    rng = np.random.RandomState(0)
    size = training.images.shape.as_list()
    with training.graph.as_default():
        variables = {variable.op.name: variable for variable in tf.global_variables()}
    with contextlib.closing(reference_net.start(training)) as session:
        before = session.run(variables)
        for _ in range(STEPS):
            session.run(training.fetches, {training.images: rng.uniform(size=size)[::order]})
        return before, session.run(variables)


def _largest_difference(found, expected):
    """(largest difference, name of its variable); raises KeyError where a variable is missing."""
    differences = {
        name: float(np.abs(found[name] - expected[name]).max())
        for name in expected
        if name != "global_step"
    }
    where = max(differences, key=differences.get)
    return differences[where], where


def _change_of_weights(first, last):
    weights = [name for name in first if name.endswith("weights")]
    return max(np.abs(last[name] - first[name]).max() for name in weights)


def _rounded(number):
    return float(f"{number:.3g}")


def mirrored(suffix="", make_place=logical_cpus, towers=(2, 4), limit=one_thread, **timing):
    """Towers against `tf.distribute.MirroredStrategy` on the same devices: time of a step, and ops.

    The same net, optimizer, batch-norm updates and averaged weights, the same parts of the batch,
    both in a session. The strategy keeps a copy of the variables on every device; so does
    `--variable_update=replicated`, whose ratio is in the detail. The value is that of the default.

    Args:
        suffix: of the figures' names.
        make_place, towers: see `equality`.
        limit: function like `one_thread`.
        **timing: of `interleave`; CPU time without.

    Returns:
        List of Figure.
    """
    limited = limit()
    trainings, steps = {}, {}
    for num_towers in towers:
        place = make_place(num_towers)
        made = {
            "towers": tower_graph(place),
            "replicated": tower_graph(place, options=REPLICATED),
            "strategy": strategy_graph(place),
        }
        for name, training in made.items():
            trainings[name, num_towers] = training
            steps[f"{name} {num_towers}"] = make_step(training, limited)
    seconds = interleave(steps, **timing)
    figures = []
    for num_towers in towers:
        ours, copies, theirs = (
            seconds[f"{name} {num_towers}"] for name in ("towers", "replicated", "strategy")
        )
        name = f"mirrored_strategy_k{num_towers}{suffix}"
        replicated = round(np.median(copies / theirs), 3)
        figures.append(
            ratio_figure(f"{name}_time", ours, theirs, "<=", TIME_BAR, replicated=replicated)
        )
        if not suffix:
            ops = {key: count_ops(trainings[key, num_towers]) for key in made}
            figures.append(
                Figure(f"{name}_ops", ops["towers"] / ops["strategy"], "ratio", "<=", OPS_BAR, ops)
            )
    return figures


def strategy_graph(place):
    """The reference net with MirroredStrategy.

    Args:
        place: utils.towers.devices.Devices.

    Returns:
        Training; its fetches are the train op and the loss.
    """
    with tf.Graph().as_default() as graph:
        strategy = tf.distribute.MirroredStrategy(
            [place.tower_name(i) for i in range(place.num_towers)]
        )
        with tf.device(place.host):
            shape = [reference_net.BATCH, *[reference_net.SIDE] * 2, reference_net.CHANNELS]
            images = tf.placeholder(tf.float32, shape)
            parts = tf.split(images, place.num_towers)
        with strategy.scope():
            step = reference_net.global_step()

            def train():
                context = tf.distribute.get_replica_context()
                part = parts[tf.get_static_value(context.replica_id_in_sync_group)]
                updates = []

                def add_update(variable, value, decay):
                    updates.append(variable.assign_sub((variable - value) * (1 - decay)))

                with tf.variable_creator_scope(_statistics_per_replica):
                    loss = reference_net.reference_loss(part, add_update)
                opt = tf.train.AdamOptimizer(reference_net.LEARNING_RATE)
                # Under a strategy the optimizer divides the loss by the number of replicas.
                grads = opt.compute_gradients(loss)
                apply_gradients = opt.apply_gradients(grads, global_step=step)
                averages = tf.train.ExponentialMovingAverage(reference_net.EMA_DECAY, step)
                with tf.control_dependencies([apply_gradients]):
                    averages_op = averages.apply(tf.trainable_variables())
                with tf.control_dependencies([averages_op, *updates]):
                    return tf.identity(loss)

            loss = strategy.reduce(tf.distribute.ReduceOp.MEAN, strategy.run(train), axis=None)
        return reference_net.Training(graph, images, [loss], place.session_config())


def _statistics_per_replica(next_creator, **keywords):
    """Variable creator: every replica keeps its own moving statistics, as Keras's batch norm does.

    Their mean is taken when they are read, so that an update sends nothing around.
    """
    if "moving" in keywords["name"]:
        keywords["synchronization"] = tf.VariableSynchronization.ON_READ
        keywords["aggregation"] = tf.VariableAggregation.MEAN
    return next_creator(**keywords)
