"""The reference net: with plain TensorFlow, and with towers as the training scripts build it.

10 convolutions of 16 channels with batch norm on 24 x 24, total batch 8, Adam, moving averages of
the weights.
"""

from typing import Any, NamedTuple

import numpy as np
import tensorflow.compat.v1 as tf

from nets import layers
from utils.towers import averages, context, devices, engine_flags, gradients, layer_options, loop
from utils.towers.engine import Engine

BATCH, SIDE, CHANNELS, LAYERS = 8, 24, 16, 10
BN_DECAY, EMA_DECAY, LEARNING_RATE, EPSILON = 0.997, 0.997, 1e-4, 1e-3


class Training(NamedTuple):
    """A training graph and how to run it.

    Attributes:
        graph: tf.Graph.
        images: placeholder of a batch, [batch, 24, 24, 16] float32; None where the graph has its
            own.
        fetches: what a step runs.
        config: ConfigProto of its session.
        engine: utils.towers.engine.Engine, or None where the graph has none.
    """

    graph: tf.Graph
    images: tf.Tensor | None
    fetches: Any
    config: tf.ConfigProto
    engine: Engine | None = None


def one_thread():
    """Lets every session of this process compute with one inter-op and one intra-op thread.

    The thread pools belong to the process and are made once, by whatever needs them first, so the
    settings of a session alone come too late. Call this before anything else of TensorFlow.

    Returns:
        Function that sets the same in a ConfigProto and returns it.
    """
    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(1)

    def limited(config):
        config.intra_op_parallelism_threads = 1
        config.inter_op_parallelism_threads = 1
        return config

    return limited


def all_threads():
    """In the place of `one_thread`, where a session may compute with as many as it likes."""
    return lambda config: config


def logical_cpus(num_towers):
    """Devices of so many towers on logical CPUs."""
    return devices.Devices("CPU", tuple(range(num_towers)))


def adam():
    """The optimizer of the reference net."""
    return tf.train.AdamOptimizer(LEARNING_RATE)


def plain_graph(num_parts=1, *, normalized=True, make_optimizer=adam):
    """The reference net with plain TensorFlow.

    Args:
        num_parts: 1 for one batch; more to split it, with shared weights, on one device.
        normalized: whether it has batch norm.
        make_optimizer: function without arguments that makes a tf.train.Optimizer.

    Returns:
        Training; the last fetch is the loss.
    """
    with tf.Graph().as_default() as graph:
        images = tf.placeholder(tf.float32, [BATCH, SIDE, SIDE, CHANNELS])
        step = global_step()
        losses = []
        for part in tf.split(images, num_parts):
            # Only the last part's batch-norm updates run, as with towers.
            tf.get_collection_ref(tf.GraphKeys.UPDATE_OPS).clear()
            with tf.variable_scope("", reuse=bool(losses)):
                losses.append(reference_loss(part, _assign_moving_average, normalized))
        loss = tf.add_n(losses) * (1.0 / num_parts)
        opt = make_optimizer()
        apply_gradients = opt.apply_gradients(opt.compute_gradients(loss), global_step=step)
        variable_averages = tf.train.ExponentialMovingAverage(EMA_DECAY, step)
        with tf.control_dependencies([apply_gradients]):
            averages_op = variable_averages.apply(tf.trainable_variables())
        updates = tf.get_collection(tf.GraphKeys.UPDATE_OPS)
        return Training(graph, images, [tf.group(averages_op, *updates), loss], tf.ConfigProto())


def tower_graph(
    place,
    batch=BATCH,
    make_images=None,
    *,
    options=engine_flags.DEFAULTS,
    normalized=True,
    make_optimizer=adam,
    cluster=None,
):
    """The reference net with towers, put together as in the training scripts.

    Args:
        place: utils.towers.devices.Devices.
        batch: images of all towers together.
        make_images: function of Devices that returns the placeholder of a batch and the towers'
            shares; None for a placeholder that is split.
        options: utils.towers.engine_flags.EngineOptions.
        normalized, make_optimizer: see `plain_graph`.
        cluster: utils.towers.cluster.Cluster whose devices `place` has, or None.

    Returns:
        Training; its fetches are the train op, the loss, and where a loss is not finite.
    """
    place = options.place_variables(place)
    with tf.Graph().as_default() as graph:
        with tf.device(place.host):
            if make_images is None:
                images = tf.placeholder(tf.float32, [batch, SIDE, SIDE, CHANNELS])
                parts = tf.split(images, place.num_towers)
            else:
                images, parts = make_images(place)
            with tf.device(place.step_device):
                step = global_step()
            engine = Engine(place, options, make_optimizer, step, images, cluster)
        towers, tower_grads, losses = [], [], []
        for i in range(place.num_towers):
            with engine.tower(i) as tower:
                with tf.variable_scope(tf.get_variable_scope(), reuse=i > 0):
                    loss = reference_loss(parts[i], averages.add_moving_average_update, normalized)
                context.add_loss_term(loss)
                tower_grads.append(engine.compute_gradients(loss))
            towers.append(tower)
            losses.append(loss)
        with tf.device(place.host):
            copies = engine.combine_gradients(tower_grads, gradients.average_gradients, towers)
            variable_averages = tf.train.ExponentialMovingAverage(EMA_DECAY, engine.global_step)
            engine.build_train_op(copies, towers, variable_averages)
            loss = gradients.add_in_order(losses) * (1.0 / place.num_towers)
            nonfinite = loop.first_nonfinite(towers)
        fetches = [engine.train_op, loss, nonfinite]
        return Training(graph, images, fetches, place.session_config(), engine)


def reference_loss(images, add_update, normalized=True):
    """Loss of the reference net, with nothing in it that knows of towers.

    Args:
        images: [batch, 24, 24, 16] float32.
        add_update: called with (moving average, value of this batch, decay).
        normalized: whether there is batch norm.

    Returns:
        Scalar.
    """
    net = images
    for number in range(LAYERS):
        with tf.variable_scope(f"conv{number}"):
            shape = [3, 3, net.shape[-1], CHANNELS]
            weights = make_variable("weights", shape, tf.glorot_uniform_initializer(seed=number))
            net = tf.nn.conv2d(net, weights, 1, "SAME")
            if normalized:
                net = _batch_norm(net, add_update)
            net = tf.nn.relu(net)
    return tf.reduce_mean(tf.square(net))


def _batch_norm(net, add_update):
    zeros, ones = tf.zeros_initializer(), tf.ones_initializer()
    gamma = make_variable("gamma", [CHANNELS], ones)
    beta = make_variable("beta", [CHANNELS], zeros)
    moving_mean = make_variable("moving_mean", [CHANNELS], zeros, trainable=False)
    moving_variance = make_variable("moving_variance", [CHANNELS], ones, trainable=False)
    sum_over_towers = layer_options.current().sum_over_towers
    if sum_over_towers is None:
        net, mean, variance = tf.nn.fused_batch_norm(net, gamma, beta, epsilon=EPSILON)
    else:
        net, mean, variance, _ = layers.batch_norm_over_towers(
            net, gamma, beta, EPSILON, sum_over_towers
        )
    add_update(moving_mean, mean, BN_DECAY)
    add_update(moving_variance, variance, BN_DECAY)
    return net


def start(training, limited=lambda config: config):
    """Finalizes a graph, starts a session of it and initializes its variables.

    Args:
        training: Training.
        limited: function of a ConfigProto, such as `one_thread` returns.

    Returns:
        tf.Session.
    """
    with training.graph.as_default():
        initialize = tf.global_variables_initializer()
    training.graph.finalize()
    session = tf.Session(graph=training.graph, config=limited(training.config))
    session.run(initialize)
    if training.engine is not None:
        session.run(training.engine.synchronize)
    return session


def make_step(training, limited=lambda config: config):
    """Starts a session of a graph; returns a function that makes one training step."""
    session = start(training, limited)
    feed = feed_of(training)
    return lambda: session.run(training.fetches, feed)


def feed_of(training):
    """feed_dict of a made-up batch."""
    if training.images is None:
        return {}
    size = training.images.shape.as_list()
    return {training.images: np.random.RandomState(0).uniform(size=size).astype(np.float32)}


def make_variable(name, shape, initializer, trainable=True):
    """A resource variable of the current scope."""
    return tf.get_variable(
        name, shape, initializer=initializer, trainable=trainable, use_resource=True
    )


def global_step():
    """The variable that counts the steps."""
    return make_variable("global_step", [], tf.zeros_initializer(), trainable=False)


def _assign_moving_average(variable, value, decay):
    update = tf.assign_sub(variable, (variable - value) * (1 - decay))
    tf.add_to_collection(tf.GraphKeys.UPDATE_OPS, update.op)
