"""Towers compiled by XLA give the losses of those that are not."""

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

from nets import east, layers
from nets.pointnet2 import pointnet2_cls_ssg
from utils import tf_util
from utils.towers import compilation, devices

pytestmark = pytest.mark.skipif(not tf.test.is_built_with_xla(), reason="TensorFlow without XLA")

IMAGES = tf.TensorSpec([None, None, None, 3], tf.float32)
CLOUDS = tf.TensorSpec([None, 64, 3], tf.float32)


def east_loss(images):
    score, geometry = east.model(images)
    return tf.reduce_mean(tf.square(score - 1)) + 1e-2 * tf.reduce_mean(geometry)


def pointnet_loss(clouds):
    labels = tf.range(tf.shape(clouds)[0])
    pred, end_points = pointnet2_cls_ssg.get_model(clouds, True, dropout_seed=tf.constant([1, 2]))
    return pointnet2_cls_ssg.get_loss(pred, labels, end_points)


def small_loss(images):
    net = layers.conv2d(images, 8, 3, activation_fn=tf.tanh, normalizer_fn=layers.batch_norm)
    net = tf_util.dropout(net, True, "dropout", seed=tf.constant([1, 2]))
    net = layers.conv2d(net, 8, 3, activation_fn=tf.tanh)
    return tf.reduce_mean(tf.square(net - 1))


class TwoTowers:
    """The same tower twice, on two devices, the second compiled; `session` has run neither."""

    def __init__(self, build, spec):
        place = devices.Devices("CPU", (0, 1))
        self.inputs = tf.placeholder(spec.dtype, spec.shape)
        self.losses, self.gradients = [], []
        for index, xla in enumerate((False, True)):
            with (
                tf.device(place.tower_device(index)),
                tf.variable_scope(tf.get_variable_scope(), reuse=xla),
                compilation.tower_scope(xla),
            ):
                loss = build(self.inputs)
                self.losses.append(loss)
                self.gradients.append(tf.gradients(loss, tf.trainable_variables()))
        self.session = tf.Session(config=place.session_config())

    def run(self, fetches, inputs):
        """Values, and the types of ops that ran on the second tower's device."""
        metadata = tf.RunMetadata()
        options = tf.RunOptions(output_partition_graphs=True)
        values = self.session.run(fetches, {self.inputs: inputs}, options, metadata)
        graphs = [
            graph
            for graph in metadata.partition_graphs
            if any("CPU:1" in node.device for node in graph.node)
        ]
        return values, {node.op for graph in graphs for node in graph.node}


def samples(spec, batch):
    rng = np.random.RandomState(0)
    size = [batch, *(64 if size is None else size for size in spec.shape.as_list()[1:])]
    return rng.uniform(-1, 1, size)


@pytest.mark.parametrize(
    ("build", "spec", "batch", "scale"),
    [(east_loss, IMAGES, 2, 100), (pointnet_loss, CLOUDS, 8, 1)],
    ids=["east", "pointnet2_cls_ssg"],
)
def test_losses_of_the_networks(build, spec, batch, scale):
    with tf.Graph().as_default():
        tf.set_random_seed(1)
        towers = TwoTowers(build, spec)
        with towers.session as session:
            session.run(tf.global_variables_initializer())
            losses, ops = towers.run(towers.losses, samples(spec, batch) * scale)
    assert "_XlaRun" in ops and "Conv2D" not in ops
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)


def test_gradients_and_other_shapes_than_the_first():
    with tf.Graph().as_default():
        tf.set_random_seed(1)
        towers = TwoTowers(small_loss, IMAGES)
        with towers.session as session:
            session.run(tf.global_variables_initializer())
            for batch in (2, 3):
                grads, ops = towers.run(towers.gradients, samples(IMAGES, batch))
                for plain, compiled in zip(*grads):
                    np.testing.assert_allclose(compiled, plain, 1e-4, 1e-6)
    assert not {"Conv2D", "Conv2DBackpropFilter", "Tanh"} & ops


def test_without_xla_the_graph_is_the_plain_one():
    graphs = []
    for xla in (None, False):
        with tf.Graph().as_default() as graph:
            if xla is None:
                small_loss(tf.zeros([2, 8, 8, 3]))
            else:
                with compilation.tower_scope(xla):
                    small_loss(tf.zeros([2, 8, 8, 3]))
            graphs.append(graph.as_graph_def())
    assert graphs[0] == graphs[1]
