"""Figures of the tower engine on the reference net: what towers cost over a plain graph.

Reference net: 10 convolutions of 16 channels with batch norm on 24 x 24, total batch 8, Adam,
moving averages of the weights. One inter-op and one intra-op thread.
"""

import numpy as np
import tensorflow.compat.v1 as tf

from benchmarks.measure import Figure, interleave, ratio_figure
from utils.towers import averages, context, devices, gradients, loop, train_op

BATCH, SIDE, CHANNELS, LAYERS = 8, 24, 16, 10
BN_DECAY, EMA_DECAY, LEARNING_RATE = 0.997, 0.997, 1e-4
OVERHEAD_BARS = {1: 1.03, 2: 1.10, 4: 1.20}  # towers -> CPU time over the plain graph


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


def tower_overhead(suffix=""):
    """CPU time of a step with 1, 2, 4 towers over that of the plain graph, same total batch.

    The plain graph is the same network with the same Adam, batch-norm updates and moving averages
    of the weights, built with TensorFlow alone. 'same work' in the detail is a graph in which the
    batch is split as for the towers and that has nothing else of them: all on one device, the sum
    of the losses of the parts minimised. It shows what kernels on smaller batches cost in any case.

    Args:
        suffix: of the figures' names.

    Returns:
        List of Figure.
    """
    limited = one_thread()
    steps = {"plain": make_step(*plain_graph(1), limited(tf.ConfigProto()))}
    for num_towers in OVERHEAD_BARS:
        graph, config = tower_graph(num_towers)
        steps[f"towers {num_towers}"] = make_step(*graph, limited(config))
        if num_towers > 1:
            split = plain_graph(num_towers)
            steps[f"split {num_towers}"] = make_step(*split, limited(tf.ConfigProto()))
    seconds = interleave(steps)
    figures = []
    for num_towers, bar in OVERHEAD_BARS.items():
        detail = {}
        if num_towers > 1:
            split = np.median(seconds[f"split {num_towers}"] / seconds["plain"])
            detail["same_work_split_on_one_device"] = round(split, 3)
        figures.append(
            ratio_figure(
                f"tower_overhead_k{num_towers}{suffix}",
                seconds[f"towers {num_towers}"],
                seconds["plain"],
                "<=",
                bar,
                **detail,
            )
        )
    return figures


def ops_linear_in_k():
    """Whether the number of ops grows by the same for each further tower.

    The value is the largest increase of the increment, over K = 1 to 4. From K = 1 to 2 the
    averaging appears, so that this increment is larger than the later ones.

    Returns:
        List of one Figure.
    """
    ops = [len(tower_graph(k, batch=12)[0][0].get_operations()) for k in (1, 2, 3, 4)]
    plain = len(plain_graph(1)[0].get_operations())
    value = int(np.diff(ops, n=2).max())
    detail = {"ops_k1_to_k4": ops, "plain": plain}
    return [Figure("ops_linear_in_k", value, "ops", "<=", 0, detail)]


def averaging():
    """`average_gradients` against the originals' stack and mean, for 2 and 4 towers.

    The gradients have the shapes of a ResNet-50's with half of its channels. They are read from
    variables, so that nothing can be folded, and one element of each mean is consumed.

    Returns:
        List of Figure.
    """
    limited = one_thread()
    figures = []
    for num_towers in (2, 4):
        with tf.Graph().as_default():
            tower_grads = _gradients_in_variables(num_towers)
            forms = {
                "add_n": gradients.average_gradients(tower_grads),
                "stack": gradients.stack_mean_gradients(tower_grads),
            }
            consumed = {
                form: tf.stack([tf.reshape(grad, [-1])[-1] for grad, _ in average])
                for form, average in forms.items()
            }
            with tf.Session(config=limited(tf.ConfigProto())) as session:
                session.run(tf.global_variables_initializer())
                results = {form: session.run(fetch) for form, fetch in consumed.items()}
                calls = {form: session.make_callable(fetch) for form, fetch in consumed.items()}
                seconds = interleave(calls)
        difference = np.abs(results["add_n"] - results["stack"]).max()
        figures.append(
            ratio_figure(
                f"average_gradients_k{num_towers}",
                seconds["add_n"],
                seconds["stack"],
                "<=",
                0.65,
                variables=len(forms["add_n"]),
                floats=sum(variable.shape.num_elements() for _, variable in forms["add_n"]),
                largest_difference=float(difference),
            )
        )
    return figures


def plain_graph(num_parts):
    """The reference net with plain TensorFlow.

    Args:
        num_parts: 1 for one batch; more to split it, with shared weights, on one device.

    Returns:
        (graph, images placeholder, fetches).
    """
    with tf.Graph().as_default() as graph:
        images = tf.placeholder(tf.float32, [BATCH, SIDE, SIDE, CHANNELS])
        step = _variable("global_step", [], tf.zeros_initializer(), trainable=False)
        losses = []
        for part in tf.split(images, num_parts):
            # Only the last part's batch-norm updates run, as with towers.
            tf.get_collection_ref(tf.GraphKeys.UPDATE_OPS).clear()
            with tf.variable_scope("", reuse=bool(losses)):
                losses.append(reference_loss(part, _assign_moving_average))
        loss = tf.add_n(losses) * (1.0 / num_parts)
        opt = tf.train.AdamOptimizer(LEARNING_RATE)
        apply_gradients = opt.apply_gradients(opt.compute_gradients(loss), global_step=step)
        variable_averages = tf.train.ExponentialMovingAverage(EMA_DECAY, step)
        with tf.control_dependencies([apply_gradients]):
            averages_op = variable_averages.apply(tf.trainable_variables())
        updates = tf.get_collection(tf.GraphKeys.UPDATE_OPS)
        return graph, images, [tf.group(averages_op, *updates), loss]


def tower_graph(num_towers, batch=BATCH, make_images=None):
    """The reference net with towers, put together as in the training scripts.

    Args:
        num_towers: number of logical CPUs, each with an equal share of the batch.
        batch: images of all towers together.
        make_images: function of Devices that returns the placeholder of a batch and the towers'
            shares; None for a placeholder that is split.

    Returns:
        ((graph, images placeholder, fetches), ConfigProto).
    """
    place = devices.Devices("CPU", tuple(range(num_towers)))
    with tf.Graph().as_default() as graph:
        with tf.device(place.host):
            if make_images is None:
                images = tf.placeholder(tf.float32, [batch, SIDE, SIDE, CHANNELS])
                parts = tf.split(images, num_towers)
            else:
                images, parts = make_images(place)
            step = _variable("global_step", [], tf.zeros_initializer(), trainable=False)
            opt = tf.train.AdamOptimizer(LEARNING_RATE)
        towers, tower_grads, losses = [], [], []
        for i in range(num_towers):
            with context.tower_context(place, i) as tower:
                with tf.variable_scope(tf.get_variable_scope(), reuse=i > 0):
                    loss = reference_loss(parts[i], averages.add_moving_average_update)
                context.add_loss_term(loss)
                tower_grads.append(
                    opt.compute_gradients(loss, aggregation_method=gradients.PAIRWISE)
                )
            towers.append(tower)
            losses.append(loss)
        with tf.device(place.host):
            grads = gradients.average_gradients(tower_grads)
            variable_averages = tf.train.ExponentialMovingAverage(EMA_DECAY, step)
            train = train_op.build_train_op(opt, grads, step, towers, variable_averages)
            loss = gradients.add_in_order(losses) * (1.0 / num_towers)
            nonfinite = loop.first_nonfinite(towers)
        return (graph, images, [train, loss, nonfinite]), place.session_config()


def reference_loss(images, add_update):
    """Loss of the reference net, with nothing in it that knows of towers.

    Args:
        images: [batch, 24, 24, 16] float32.
        add_update: called with (moving average, value of this batch, decay).

    Returns:
        Scalar.
    """
    net = images
    for number in range(LAYERS):
        with tf.variable_scope(f"conv{number}"):
            shape = [3, 3, net.shape[-1], CHANNELS]
            weights = _variable("weights", shape, tf.glorot_uniform_initializer(seed=number))
            zeros, ones = tf.zeros_initializer(), tf.ones_initializer()
            gamma, beta = _variable("gamma", [CHANNELS], ones), _variable("beta", [CHANNELS], zeros)
            moving_mean = _variable("moving_mean", [CHANNELS], zeros, trainable=False)
            moving_variance = _variable("moving_variance", [CHANNELS], ones, trainable=False)
            net = tf.nn.conv2d(net, weights, 1, "SAME")
            net, mean, variance = tf.nn.fused_batch_norm(net, gamma, beta, epsilon=1e-3)
            add_update(moving_mean, mean, BN_DECAY)
            add_update(moving_variance, variance, BN_DECAY)
            net = tf.nn.relu(net)
    return tf.reduce_mean(tf.square(net))


def make_step(graph, images, fetches, config):
    """Starts a session of a graph; returns a function that makes one training step."""
    values = np.random.RandomState(0).uniform(size=images.shape.as_list()).astype(np.float32)
    with graph.as_default():
        initialize = tf.global_variables_initializer()
    graph.finalize()
    session = tf.Session(graph=graph, config=config)
    session.run(initialize)
    return lambda: session.run(fetches, {images: values})


def _variable(name, shape, initializer, trainable=True):
    return tf.get_variable(
        name, shape, initializer=initializer, trainable=trainable, use_resource=True
    )


def _assign_moving_average(variable, value, decay):
    update = tf.assign_sub(variable, (variable - value) * (1 - decay))
    tf.add_to_collection(tf.GraphKeys.UPDATE_OPS, update.op)


def _gradients_in_variables(num_towers):
    """K lists of (gradient, variable); the gradients are values of variables of the same shape."""
    tower_grads = [[] for _ in range(num_towers)]
    for number, shape in enumerate(_resnet_shapes()):
        variable = _variable(f"v{number}", shape, tf.zeros_initializer())
        for tower, grads in enumerate(tower_grads):
            initializer = tf.random_uniform_initializer(seed=tower)
            held = _variable(f"grad{number}_{tower}", shape, initializer, trainable=False)
            grads.append((held.read_value(), variable))
    return tower_grads


def _resnet_shapes():
    """Shapes of the weights, gammas and betas of a ResNet-50 with half of its channels."""
    shapes = [[7, 7, 3, 32], [32], [32]]
    channels = 32
    for base, units in ((32, 3), (64, 4), (128, 6), (256, 3)):
        for unit in range(units):
            kernels = [[1, 1, channels, base], [3, 3, base, base], [1, 1, base, 4 * base]]
            if unit == 0:
                kernels.append([1, 1, channels, 4 * base])
            for kernel in kernels:
                shapes += [kernel, kernel[-1:], kernel[-1:]]
            channels = 4 * base
    return shapes
