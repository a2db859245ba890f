"""Activations that are computed again: the same gradients, less memory, nothing done twice."""

import os
import pathlib
import subprocess
import sys

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

from nets import east, layers
from nets.pointnet2 import pointnet2_cls_ssg
from utils import tf_util
from utils.towers import devices, gradients, recompute

ROOT = pathlib.Path(__file__).resolve().parents[2]

# Peak memory in MB of one step of 40 layers with 1 MB of activations an op.
PEAK = """
import sys
import numpy as np
import tensorflow.compat.v1 as tf
from nets import layers
from utils.towers import gradients, recompute

with tf.Graph().as_default():
    net = tf.placeholder(tf.float32, [64, 32, 32, 4])
    feed = {net: np.ones(net.shape)}
    for _ in range(40):
        net = net + layers.conv2d(net, 4, 1, normalizer_fn=layers.batch_norm)
    loss = tf.reduce_mean(net)
    differentiate = {"plain": tf.gradients, "recompute": recompute.gradients}[sys.argv[1]]
    grads = differentiate(
        loss, tf.trainable_variables(), aggregation_method=gradients.PAIRWISE
    )
    with tf.Session() as session:
        session.run(tf.global_variables_initializer())
        session.run(grads, feed)
for line in open("/proc/self/status"):
    if line.startswith("VmHWM"):
        print(int(line.split()[1]) / 1024)
"""


def branching_loss(images):
    """Residual units whose results meet again at the end, as in the detection networks."""
    net, ends = layers.conv2d(images, 8, 3), []
    for stride in (1, 2, 1, 2):
        shortcut = layers.conv2d(net, 8, 1, stride=stride, activation_fn=None)
        net = layers.conv2d(net, 8, 3, stride=stride, normalizer_fn=layers.batch_norm)
        net = tf.nn.relu(shortcut + tf_util.dropout(net, True, f"dropout{len(ends)}"))
        ends.append(tf.reduce_mean(net, [1, 2]))
    return tf.reduce_mean(tf.square(tf.concat(ends, 1) - 1))


def east_loss(images):
    score, geometry = east.model(images)
    return tf.reduce_mean(tf.square(score - 1)) + 1e-2 * tf.reduce_mean(geometry)


def pointnet_loss(images):
    clouds = tf.reshape(images, [8, -1, 3])
    pred, end_points = pointnet2_cls_ssg.get_model(clouds, True, dropout_seed=tf.constant([1, 2]))
    return pointnet2_cls_ssg.get_loss(pred, tf.range(8), end_points)


def differentiate(loss, recomputed, variables=None):
    variables = variables or tf.trainable_variables()
    function = recompute.gradients if recomputed else tf.gradients
    return function(loss, variables, aggregation_method=gradients.PAIRWISE)


@pytest.mark.parametrize(
    ("build", "shape"),
    [
        (branching_loss, [4, 16, 16, 3]),
        (east_loss, [4, 64, 64, 3]),
        (pointnet_loss, [8, 8, 8, 3]),
    ],
)
def test_gradients_are_the_same(build, shape):
    config = devices.Devices("CPU", (0,)).session_config()
    with tf.Graph().as_default(), tf.Session(config=config) as session:
        tf.set_random_seed(1)
        images = tf.constant(np.random.RandomState(0).uniform(-1, 1, shape), tf.float32)
        loss = build(images)
        grads = [differentiate(loss, recomputed) for recomputed in (False, True)]
        session.run(tf.global_variables_initializer())
        # One run, because dropout without a given seed draws in every run.
        plain, recomputed = session.run(grads)
    plain, recomputed = (
        np.concatenate([g.ravel() for g in grads]) for grads in (plain, recomputed)
    )
    assert np.linalg.norm(recomputed - plain) <= 1e-6 * np.linalg.norm(plain)


def test_forward_ops_run_twice_and_what_has_a_state_once():
    with tf.Graph().as_default() as graph:
        loss = branching_loss(tf.placeholder(tf.float32, [4, 16, 16, 3]))
        first_pass = graph.get_operations()
        updates = tf.get_collection(tf.GraphKeys.UPDATE_OPS)
        differentiate(loss, recomputed=True)
        copies = [op for op in graph.get_operations() if op.name.startswith("recompute")]
        assert tf.get_collection(tf.GraphKeys.UPDATE_OPS) == updates
        kinds = {op.type for op in copies}
        convolutions = [op for op in copies if op.type == "Conv2D"]
        of_first_pass = [op for op in first_pass if op.type == "Conv2D"]
    assert len(of_first_pass) / 2 < len(convolutions) <= len(of_first_pass)
    assert {"Conv2D", "FusedBatchNormV3", "Relu"} <= kinds
    assert not {"ReadVariableOp", "VarHandleOp", "RandomUniform", "RandomUniformInt"} & kinds


def test_copies_wait_for_the_gradients_of_their_end():
    """Without this they would run in the forward pass, and nothing would be saved."""
    with tf.Graph().as_default() as graph:
        loss = branching_loss(tf.placeholder(tf.float32, [4, 16, 16, 3]))
        differentiate(loss, recomputed=True)
        copies = {op for op in graph.get_operations() if op.name.startswith("recompute")}
        for op in copies:
            within = [tensor for tensor in op.inputs if tensor.op in copies]
            assert within or op.control_inputs


def test_variables_without_influence_have_no_gradient():
    with tf.Graph().as_default():
        other = tf.get_variable("other", [2], use_resource=True)
        loss = branching_loss(tf.zeros([4, 16, 16, 3]))
        assert differentiate(loss, recomputed=True)[0] is None
        assert differentiate(tf.constant(1.0), True, [other]) == [None]


def test_embeddings_keep_their_sparse_gradients():
    with tf.Graph().as_default(), tf.Session() as session:
        table = tf.get_variable("table", [50, 4], use_resource=True)
        net = tf.nn.embedding_lookup(table, [3, 3, 7])
        for _ in range(5):
            net = tf.tanh(layers.fully_connected(net, 4))
        grads = [differentiate(tf.reduce_sum(net), recomputed) for recomputed in (False, True)]
        assert isinstance(grads[1][0], tf.IndexedSlices)
        session.run(tf.global_variables_initializer())
        plain, recomputed = session.run([[tf.convert_to_tensor(g) for g in gs] for gs in grads])
    for value, reference in zip(recomputed, plain):
        np.testing.assert_allclose(value, reference, 1e-6, 1e-7)


def test_a_loop_is_refused():
    with tf.Graph().as_default():
        weight = tf.get_variable("w", [], use_resource=True)
        value = tf.convert_to_tensor(weight)
        switched = tf.raw_ops.Switch(data=value, pred=tf.constant(True))
        merged = tf.raw_ops.Merge(inputs=[switched.output_false, switched.output_true])
        with pytest.raises(ValueError, match="is_training as a Python bool"):
            differentiate(merged.output, recomputed=True)


@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="no /proc")
def test_peak_memory_is_lower():
    peak = {}
    for how in ("plain", "recompute"):
        environment = dict(os.environ, PYTHONPATH=str(ROOT))
        command = [sys.executable, "-c", PEAK, how]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=ROOT)
        assert done.returncode == 0, done.stderr[-2000:]
        peak[how] = float(done.stdout)
    # 40 layers of 4 ops: about 120 MB of activations, of which some 13 segments' ends remain.
    assert peak["recompute"] < peak["plain"] - 50
