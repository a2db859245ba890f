"""Batch norm over all towers: K towers of a part of a batch equal one tower with all of it."""

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

from nets import layers
from utils import tf_util
from utils.towers import (
    collectives,
    context,
    devices,
    gradients,
    layer_options,
    recompute,
    train_op,
)

DECAY = 0.9
FORMS = {  # form -> (shape of an example, batch norm of a tensor)
    "slim 4": ([3, 4, 2], lambda x: layers.batch_norm(x, DECAY, scale=True, scope="bn")),
    "slim 2": ([2], lambda x: layers.batch_norm(x, DECAY, scale=True, scope="bn")),
    "point 4": ([3, 4, 2], lambda x: tf_util.batch_norm(x, True, DECAY, "bn")),
    "point 3": ([5, 2], lambda x: tf_util.batch_norm(x, True, DECAY, "bn")),
    "point 2": ([2], lambda x: tf_util.batch_norm(x, True, DECAY, "bn")),
}


def cpus(num_towers):
    return devices.Devices("CPU", tuple(range(num_towers)))


class Towers:
    """Towers on the current graph, each with a part of the batch.

    `build(input, tower)` builds a tower and returns its outputs.
    """

    def __init__(self, sizes, example, build, synchronize=True):
        self.place = cpus(len(sizes))
        self.inputs = tf.placeholder(tf.float32, [None, *example])
        self.group = collectives.CollectiveGroup(len(sizes))
        self.towers, self.outputs = [], []
        parts = tf.split(self.inputs, sizes)
        for i, part in enumerate(parts):
            sum_over_towers = self.group.sum_over_towers(i) if synchronize else None
            options = layer_options.LayerOptions(sum_over_towers=sum_over_towers)
            with context.tower_context(self.place, i) as tower, layer_options.scope(options):
                part.set_shape([None, *example])
                with tf.variable_scope(tf.get_variable_scope(), reuse=i > 0 or None):
                    self.outputs.append(build(part, i))
            self.towers.append(tower)
        self.group.check()

    def session(self):
        return tf.Session(config=self.place.session_config())


@pytest.mark.parametrize("sizes", [[2, 2], [1, 3], [4, 0]])
@pytest.mark.parametrize("form", ["slim 2", "point 2"])
def test_the_case_on_paper(form, sizes):
    """Values 1, 3, 5, 11: mean 5, variance (16 + 4 + 0 + 36) / 4 = 14, unbiased 56 / 3."""
    batch = np.float32([[1, -1], [3, -3], [5, -5], [11, -11]])
    example, normalize = FORMS[form]
    with tf.Graph().as_default():
        towers = Towers(sizes, example, lambda x, i: normalize(x))
        updates = train_op.batch_norm_updates(towers.towers, "first")
        with towers.session() as session:
            session.run(tf.global_variables_initializer())
            feed = {towers.inputs: batch}
            outputs, _ = session.run([towers.outputs, updates], feed)
            moving = session.run([v for v in tf.global_variables() if "moving" in v.name])
    np.testing.assert_allclose(
        np.concatenate(outputs), (batch - [5, -5]) / np.sqrt(14.001), rtol=1e-6
    )
    np.testing.assert_allclose(moving[0], [0.5, -0.5], rtol=1e-6)
    np.testing.assert_allclose(moving[1], [0.9 + 0.1 * 56 / 3] * 2, rtol=1e-6)


def network(module, images):
    if module == "slim":
        normalization = {
            "normalizer_fn": layers.batch_norm,
            "normalizer_params": {"decay": DECAY, "scale": True},
        }
        net = layers.conv2d(images, 4, 3, **normalization)
        net = layers.conv2d(net, 5, 3, stride=2, **normalization)
        net = tf.reduce_mean(net, [1, 2])
        net = layers.fully_connected(net, 6, **normalization)
        return layers.fully_connected(net, 3, activation_fn=None)
    batch_norm = {"bn": True, "bn_decay": tf.constant(DECAY), "is_training": True}
    net = tf_util.conv2d(images, 4, [3, 3], "conv1", **batch_norm)
    net = tf.reduce_max(net, 2)
    net = tf_util.conv1d(net, 5, 3, "conv2", **batch_norm)
    net = tf_util.fully_connected(tf.reduce_mean(net, 1), 6, "fc1", **batch_norm)
    return tf_util.fully_connected(net, 3, "fc2", activation_fn=None)


def trained(module, sizes, synchronize, steps=3, recomputed=False):
    """Losses, first gradients and final variables; the loss is a mean over the whole batch."""
    total = sum(sizes)

    def build(images, tower):
        predictions = network(module, images)
        share = sizes[tower] * len(sizes) / total
        return tf.reduce_mean(tf.square(predictions - tf.reduce_mean(images, [1, 2]))) * share

    with tf.Graph().as_default():
        tf.set_random_seed(5)
        opt = tf.train.MomentumOptimizer(0.05, 0.9)
        with tf.device("/cpu:0"):
            step = tf.train.get_or_create_global_step()
        towers = Towers(sizes, [8, 8, 3], build, synchronize)
        tower_grads = []
        for i, loss in enumerate(towers.outputs):
            with tf.device(towers.place.tower_device(i)):
                tower_grads.append(
                    recomputed_gradients(loss) if recomputed else opt.compute_gradients(loss)
                )
        grads = gradients.average_gradients(tower_grads)
        towers.group.check()
        train = train_op.build_train_op(opt, grads, step, towers.towers, bn_updates="first")
        loss = tf.add_n(towers.outputs) / len(sizes)
        random = np.random.RandomState(1)
        found_losses, first_grads = [], None
        with towers.session() as session:
            session.run(tf.global_variables_initializer())
            for _ in range(steps):
                feed = {towers.inputs: random.randn(total, 8, 8, 3) * 3 + 1}
                value, found, _ = session.run([loss, [grad for grad, _ in grads], train], feed)
                found_losses.append(value)
                first_grads = first_grads or found
            variables = tf.global_variables()
            values = dict(zip([v.op.name for v in variables], session.run(variables)))
    return found_losses, first_grads, values


def recomputed_gradients(loss):
    variables = tf.trainable_variables()
    return list(zip(recompute.gradients(loss, variables, gradients.PAIRWISE), variables))


@pytest.mark.parametrize("recomputed", [False, True], ids=["", "recomputed"])
@pytest.mark.parametrize("sizes", [[4, 4], [3, 3, 3], [5, 2], [2, 1, 4]])
@pytest.mark.parametrize("module", ["slim", "point"])
def test_towers_of_parts_equal_one_tower_of_the_batch(module, sizes, recomputed):
    expected = trained(module, [sum(sizes)], synchronize=False)
    found = trained(module, sizes, synchronize=True, recomputed=recomputed)
    np.testing.assert_allclose(found[0], expected[0], rtol=1e-5)
    for one, other in zip(found[1], expected[1]):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)
    assert list(found[2]) == list(expected[2])
    assert sum("moving" in name for name in expected[2]) == 6
    for name, value in expected[2].items():
        np.testing.assert_allclose(found[2][name], value, rtol=1e-5, atol=1e-5, err_msg=name)


@pytest.mark.parametrize("module", ["slim", "point"])
def test_statistics_of_single_towers_are_not_enough(module):
    """What the test above compares does depend on the statistics."""
    expected = trained(module, [7], synchronize=False)
    found = trained(module, [5, 2], synchronize=False)
    assert abs(found[0][0] / expected[0][0] - 1) > 1e-3


@pytest.mark.parametrize("form", FORMS)
def test_gradient_through_the_statistics_is_the_numeric_one(form):
    """Of the sum of both towers' losses by both towers' inputs, in float32 with large steps."""
    example, normalize = FORMS[form]
    sizes = [3, 2]
    random = np.random.RandomState(3)
    batch = random.randn(sum(sizes), *example).astype(np.float32)
    factors = random.randn(*batch.shape).astype(np.float32)

    def build(x, tower):
        own = factors[: sizes[0]] if tower == 0 else factors[sizes[0] :]
        return tf.reduce_sum(tf.square(normalize(x)) * own + normalize_cubed(x, own))

    def normalize_cubed(x, own):
        with tf.variable_scope("second"):
            return normalize(x) ** 3 * own

    with tf.Graph().as_default():
        towers = Towers(sizes, example, build)
        grads = [tf.gradients(loss, towers.inputs)[0] for loss in towers.outputs]
        towers.group.check()
        with towers.session() as session:
            session.run(tf.global_variables_initializer())
            found = np.sum(session.run(grads, {towers.inputs: batch}), 0)

            def loss(values):
                return np.sum(session.run(towers.outputs, {towers.inputs: values}), dtype=float)

            for index in list(np.ndindex(*batch.shape))[:: max(1, batch.size // 12)]:
                step = np.zeros_like(batch)
                step[index] = 0.01
                slope = (loss(batch + step) - loss(batch - step)) / 0.02
                assert found[index] == pytest.approx(slope, rel=0.01, abs=0.02)


def test_mode_that_the_session_knows():
    batch = np.float32([[1, -1], [3, -3], [5, -5], [11, -11]])
    with tf.Graph().as_default():
        is_training = tf.placeholder(tf.bool, [])
        towers = Towers([1, 3], [2], lambda x, i: tf_util.batch_norm(x, is_training, DECAY, "bn"))
        updates = train_op.batch_norm_updates(towers.towers, "first")
        moving = [v for v in tf.global_variables() if "moving" in v.name]
        with towers.session() as session:
            session.run(tf.global_variables_initializer())
            feed = {towers.inputs: batch, is_training: False}
            outputs, _ = session.run([towers.outputs, updates], feed)
            np.testing.assert_allclose(np.concatenate(outputs), batch / np.sqrt(1.001), rtol=1e-6)
            np.testing.assert_array_equal(session.run(moving), [[0, 0], [1, 1]])
            outputs, _ = session.run([towers.outputs, updates], {**feed, is_training: True})
            expected = (batch - [5, -5]) / np.sqrt(14.001)
            np.testing.assert_allclose(np.concatenate(outputs), expected, rtol=1e-6)
            np.testing.assert_allclose(session.run(moving[0]), [0.5, -0.5], rtol=1e-6)


def collectives_of(build, example):
    with tf.Graph().as_default() as graph:
        towers = Towers([2, 2], example, build)
        for loss in towers.outputs:
            tf.gradients(loss, tf.trainable_variables() + [towers.inputs])
        return sum(op.type == "CollectiveReduce" for op in graph.get_operations())


@pytest.mark.parametrize("form", FORMS)
def test_two_sums_forward_and_two_backward(form):
    example, normalize = FORMS[form]
    found = collectives_of(lambda x, i: tf.reduce_sum(tf.square(normalize(x))), example)
    assert found == 2 * (2 + 2)


def test_evaluation_communicates_nothing():
    def build(x, tower):
        net = layers.batch_norm(x, is_training=False, scope="slim")
        return tf.reduce_sum(tf_util.batch_norm(net, False, None, "point"))

    assert collectives_of(build, [2]) == 0


@pytest.mark.parametrize("form", FORMS)
def test_half_precision_inputs_have_float32_statistics(form):
    """The sum of these values is beyond float16's largest number."""
    example, normalize = FORMS[form]
    batch = 1000 + 100 * np.random.RandomState(0).randn(80, *example)
    with tf.Graph().as_default():
        towers = Towers([40, 40], example, lambda x, i: normalize(tf.cast(x, tf.float16)))
        values = [update.value for update in towers.towers[0].update_ops]
        assert [output.dtype for output in towers.outputs] == [tf.float16] * 2
        with towers.session() as session:
            session.run(tf.global_variables_initializer())
            outputs, (mean, variance) = session.run(
                [towers.outputs, values], {towers.inputs: batch}
            )
    axes = tuple(range(batch.ndim - 1))
    np.testing.assert_allclose(mean, batch.mean(axes), rtol=1e-3)
    np.testing.assert_allclose(variance, batch.var(axes, ddof=1), rtol=2e-2)
    assert np.isfinite(outputs).all()
