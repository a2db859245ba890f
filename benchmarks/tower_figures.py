"""Figures of the tower engine on the reference net: what towers cost over a plain graph.

One inter-op and one intra-op thread; see `benchmarks.reference_net`.
"""

import functools

import numpy as np
import tensorflow.compat.v1 as tf

from benchmarks.measure import Figure, interleave, ratio_figure
from benchmarks.reference_net import (
    logical_cpus,
    make_step,
    make_variable,
    one_thread,
    plain_graph,
    tower_graph,
)
from utils.towers import engine_flags, gradients

OVERHEAD_BARS = {1: 1.03, 2: 1.10, 4: 1.20}  # towers -> CPU time over the plain graph
REPLICATED = engine_flags.EngineOptions(variable_update="replicated")
SYNC_BN = engine_flags.EngineOptions(sync_bn=True)


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
    steps = {"plain": make_step(plain_graph(), limited)}
    for num_towers in OVERHEAD_BARS:
        steps[f"towers {num_towers}"] = make_step(tower_graph(logical_cpus(num_towers)), limited)
        if num_towers > 1:
            steps[f"split {num_towers}"] = make_step(plain_graph(num_towers), limited)
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


def update_modes():
    """CPU time of a step with each update mode over that of the default one, 2 towers.

    The modes: every tower with its own variables and an all-reduce; batch norm over both towers.

    Returns:
        List of Figure, which have no bar.
    """
    limited = one_thread()
    steps = {
        name: make_step(tower_graph(logical_cpus(2), options=options), limited)
        for name, options in (
            ("default", engine_flags.DEFAULTS),
            ("replicated_k2", REPLICATED),
            ("sync_bn_k2", SYNC_BN),
        )
    }
    seconds = interleave(steps)
    return [
        ratio_figure(name, seconds[name], seconds["default"])
        for name in ("replicated_k2", "sync_bn_k2")
    ]


def ops_linear_in_k():
    """Whether the number of ops grows by the same for each further tower.

    The value is the largest increase of the increment, over K = 1 to 4. From K = 1 to 2 the
    averaging appears, so that this increment is larger than the later ones.

    Returns:
        List of one Figure.
    """
    ops = [count_ops(tower_graph(logical_cpus(k), batch=12)) for k in (1, 2, 3, 4)]
    value = int(np.diff(ops, n=2).max())
    detail = {"ops_k1_to_k4": ops, "plain": count_ops(plain_graph())}
    return [Figure("ops_linear_in_k", value, "ops", "<=", 0, detail)]


def build_time():
    """Whether each further tower takes the same CPU time to build as the ones before it.

    The value is what towers 5 to 8 take over twice what towers 3 and 4 take, each as the difference
    of whole graphs: 1 where the growth is linear, 1.2 where a part of the order of 20 % of a tower
    grows with their number. The bar leaves 15 % for the noise of these differences.

    Returns:
        List of one Figure.
    """
    graphs = {k: functools.partial(tower_graph, logical_cpus(k)) for k in (1, 2, 4, 8)}
    seconds = interleave(graphs, rounds=9, warm_up=1)
    medians = {k: float(np.median(values)) for k, values in seconds.items()}
    value = (medians[8] - medians[4]) / (2 * (medians[4] - medians[2]))
    detail = {"ms_k1_k2_k4_k8": [round(medians[k] * 1e3, 1) for k in graphs], "rounds": 9}
    return [Figure("build_time_linear_in_k", value, "ratio", "<=", 1.15, detail)]


def count_ops(training):
    """Number of ops of a Training's graph."""
    return len(training.graph.get_operations())


def averaging(**timing):
    """`average_gradients` against the originals' stack and mean, for 2 and 4 towers.

    The gradients have the shapes of a ResNet-50's with half of its channels. They are read from
    variables, so that nothing can be folded, and one element of each mean is consumed.

    Args:
        **timing: of `interleave`; CPU time without.

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
                seconds = interleave(calls, **timing)
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


def _gradients_in_variables(num_towers):
    """K lists of (gradient, variable); the gradients are values of variables of the same shape."""
    tower_grads = [[] for _ in range(num_towers)]
    for number, shape in enumerate(_resnet_shapes()):
        variable = make_variable(f"v{number}", shape, tf.zeros_initializer())
        for tower, grads in enumerate(tower_grads):
            initializer = tf.random_uniform_initializer(seed=tower)
            held = make_variable(f"grad{number}_{tower}", shape, initializer, trainable=False)
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
