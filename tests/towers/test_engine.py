"""The engine on a model of two scalars, whose every step is known on paper.

loss of tower i = w * a_i + (b - c_i)^2 / 2. Gradients: a_i and b - c_i, so with the rate r and K
towers w <- w - r * mean(a), b <- b - r * (b - mean(c)). A moving statistic m follows c_i with decay
0.9.
"""

import collections

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

from utils.towers import averages, context, devices, gradients, train_op

RATE = 0.25
A = np.array([1.0, -3.0, 5.0, 2.0], np.float32)
C = np.array([2.0, 4.0, -8.0, 6.0], np.float32)


def scalar(name, value, trainable=True):
    return tf.get_variable(
        name,
        [],
        initializer=tf.constant_initializer(value),
        trainable=trainable,
        use_resource=True,
    )


def tower_loss(a, c, reuse_variables):
    with tf.variable_scope(tf.get_variable_scope(), reuse=reuse_variables):
        w, b, m = scalar("w", 1.0), scalar("b", 3.0), scalar("m", 0.0, trainable=False)
    averages.add_moving_average_update(m, tf.identity(c), 0.9)
    return w * a + tf.square(b - c) / 2


class Run:
    """Builds the graph with `num_towers` towers and runs `steps` steps."""

    def __init__(self, num_towers, steps, bn_updates="last", opt=None, order=None):
        order = order or range(num_towers)
        with tf.Graph().as_default() as graph:
            place = devices.Devices("CPU", tuple(range(num_towers)))
            a, c = (
                tf.placeholder(tf.float32, [num_towers]),
                tf.placeholder(tf.float32, [num_towers]),
            )
            with tf.device(place.host):
                step = scalar("global_step", 0.0, trainable=False)
            opt = opt or tf.train.GradientDescentOptimizer(RATE)
            towers, tower_grads, reuse = [], [], None
            for i in range(num_towers):
                with context.tower_context(place, i) as tower:
                    loss = tower_loss(a[i], c[i], reuse)
                    context.add_loss_term(tf.identity(loss, name="loss"))
                    reuse = True
                    tower_grads.append(opt.compute_gradients(loss))
                towers.append(tower)
            ema = tf.train.ExponentialMovingAverage(0.5, step)
            with tf.device(place.host):
                grads = gradients.average_gradients(tower_grads)
                train = train_op.build_train_op(opt, grads, step, towers, ema, bn_updates)
            self.graph, self.towers, self.place = graph, towers, place
            self.variables = tf.global_variables()
            init = tf.global_variables_initializer()
            graph.finalize()
            with tf.Session(config=place.session_config()) as session:
                session.run(init)
                self.history = []
                feed = {a: A[list(order)], c: C[list(order)]}
                for _ in range(steps):
                    session.run(train, feed)
                    values = session.run(self.variables)
                    names = [v.op.name for v in self.variables]
                    self.history.append(dict(zip(names, values)))


@pytest.mark.parametrize("num_towers", [1, 2, 3, 4])
def test_every_step_is_the_one_on_paper(num_towers):
    run = Run(num_towers, steps=3)
    w, b, m, w_average, b_average = 1.0, 3.0, 0.0, 1.0, 3.0
    for n, found in enumerate(run.history, start=1):
        w -= RATE * A[:num_towers].mean()
        b -= RATE * (b - C[:num_towers].mean())
        m += (C[num_towers - 1] - m) * 0.1
        decay = min(0.5, (1 + n) / (10 + n))  # the step counter is already at n
        w_average += (w - w_average) * (1 - decay)
        b_average += (b - b_average) * (1 - decay)
        expected = {
            "w": w,
            "b": b,
            "m": m,
            "w/ExponentialMovingAverage": w_average,
            "b/ExponentialMovingAverage": b_average,
            "global_step": n,
        }
        assert found == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("num_towers", [2, 3, 4])
@pytest.mark.parametrize("which", ["first", "last", "all"])
def test_batch_norm_updates_follow_the_chosen_towers(num_towers, which):
    value = {"first": C[0], "last": C[num_towers - 1], "all": C[:num_towers].mean()}[which]
    m = Run(num_towers, steps=2, bn_updates=which).history[-1]["m"]
    assert m == pytest.approx(value * 0.1 * 1.9, rel=1e-6)


def test_all_is_symmetric_in_the_towers():
    one = Run(2, steps=2, bn_updates="all").history[-1]
    other = Run(2, steps=2, bn_updates="all", order=[1, 0]).history[-1]
    assert one == pytest.approx(other, rel=1e-6)


@pytest.mark.parametrize("num_towers", [1, 2, 3, 4])
def test_updates_in_order_run_one_after_the_other(num_towers):
    m = 0.0
    for value in [*C[:num_towers], *C[:num_towers]]:
        m += (value - m) * 0.1
    assert Run(num_towers, steps=2, bn_updates="in_order").history[-1]["m"] == pytest.approx(m)


def test_unknown_bn_updates():
    with pytest.raises(ValueError, match="first, all, in_order"):
        Run(2, steps=0, bn_updates="middle")


def test_variables_are_the_same_for_every_number_of_towers():
    lists = [[(v.op.name, v.shape, v.dtype) for v in Run(k, steps=0).variables] for k in (1, 2, 3)]
    assert lists[0] == lists[1] == lists[2]


def test_only_the_chosen_updates_are_built():
    updates = [
        sum(op.type == "AssignSubVariableOp" and "AssignMovingAvg" in op.name for op in ops)
        for ops in (Run(k, steps=0).graph.get_operations() for k in (1, 4))
    ]
    assert updates[0] == updates[1]


def test_one_update_is_apply_then_statistics_then_averages():
    """By the graph.

    The averages' ops can be reached only through the gradients' and the statistics' ops.
    """
    graph = Run(2, steps=0).graph
    apply = {op for op in graph.get_operations() if op.type == "ResourceApplyGradientDescent"}
    assert len(apply) == 2

    def before(op):
        seen, todo = set(), [op]
        while todo:
            current = todo.pop()
            for parent in [t.op for t in current.inputs] + list(current.control_inputs):
                if parent not in seen:
                    seen.add(parent)
                    todo.append(parent)
        return seen

    averaged = [
        op
        for op in graph.get_operations()
        if op.type == "AssignSubVariableOp" and op.name.startswith("ExponentialMovingAverage")
    ]
    moving = [
        op
        for op in graph.get_operations()
        if op.type == "AssignSubVariableOp" and op not in averaged
    ]
    assert len(averaged) == 2 and len(moving) == 1
    for op in moving:
        assert apply <= before(op)
    for op in averaged:
        assert apply | set(moving) <= before(op)
        read = [t.op for t in op.inputs[1].op.inputs]  # (average - new value) * (1 - decay)
        assert any(apply <= before(parent) for parent in read)


def test_a_tower_that_makes_variables_is_refused():
    place = devices.Devices("CPU", (0, 1))
    with tf.Graph().as_default():
        with context.tower_context(place, 0):
            scalar("w", 1.0)
        with pytest.raises(ValueError, match="tower 1 made 1 new variable.*stray"):
            with context.tower_context(place, 1):
                scalar("stray", 1.0)


@pytest.mark.parametrize("kind", ["CPU", "GPU"])
def test_placement_asked_for(kind):
    """Variables on the host, the towers' ops on their devices.

    On GPUs checked without having one.
    """
    place = devices.Devices(kind, (0, 1, 2))
    with tf.Graph().as_default() as graph:
        opt, reuse = tf.train.AdamOptimizer(), None
        for i in range(3):
            with context.tower_context(place, i):
                opt.compute_gradients(tower_loss(tf.constant(1.0), tf.constant(2.0), reuse))
                reuse = True
    seen = collections.Counter()
    for op in graph.get_operations():
        if op.type == "VarHandleOp":
            assert op.device == "/device:CPU:0", op.name
        elif op.name.startswith("model_") and op.type not in devices.VARIABLE_OPS:
            tower = int(op.name[len("model_") :].split("/")[0])
            assert op.device == f"/device:{kind}:{tower}", op.name
            seen[tower] += 1
    assert seen[1] == seen[2] > 10


def test_placement_at_run_time():
    """TensorFlow's own partitions: variables and their reads on CPU:0.

    Each tower's arithmetic on its device.
    """
    place = devices.Devices("CPU", (0, 1, 2))
    with tf.Graph().as_default():
        x = tf.placeholder(tf.float32, [])
        losses, reuse = [], None
        for i in range(3):
            with context.tower_context(place, i):
                losses.append(tower_loss(x, x, reuse))
                reuse = True
        metadata = tf.RunMetadata()
        with tf.Session(config=place.session_config()) as session:
            session.run(tf.global_variables_initializer())
            session.run(
                losses,
                {x: 1.0},
                options=tf.RunOptions(output_partition_graphs=True),
                run_metadata=metadata,
            )
    squares = {}
    for node in (node for part in metadata.partition_graphs for node in part.node):
        if node.op in ("VarHandleOp", "ReadVariableOp"):
            assert node.device.endswith("CPU:0"), node.name
        if node.op in ("Square", "SquaredDifference"):
            squares[node.name.split("/")[0]] = node.device[-1]
    assert squares == {"model_0": "0", "model_1": "1", "model_2": "2"}
