"""What EAST's network accepts, and that it does not depend on how TensorFlow was set up."""

import subprocess
import sys

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

from nets import east, resnet_v1


@pytest.mark.parametrize(
    ("shape", "dtype", "message"),
    [
        ([None, None, 3], tf.float32, r"images have shape .* pass a batch of RGB images"),
        ([None, 64, 64, 1], tf.float32, r"images have shape .* pass a batch of RGB images"),
        ([None, None, None, None], tf.float32, r"images have shape .* pass a batch"),
        (None, tf.float32, r"images have shape .* pass a batch of RGB images"),
        ([None, 100, 64, 3], tf.float32, r"height is 100, .* multiple of .* 32; .* to 96 or 128"),
        ([None, 64, 20, 3], tf.float32, r"width is 20, .* multiple of .* 32; .* to 32$"),
        ([None, 0, 64, 3], tf.float32, r"height is 0, "),
        ([None, 64, 64, 3], tf.uint8, r"images are uint8, .* pass tf.cast\(images, tf.float32\)"),
    ],
)
def test_wrong_images_are_refused_before_anything_is_built(shape, dtype, message):
    with tf.Graph().as_default() as graph:
        images = tf.placeholder(dtype, shape)
        with pytest.raises(ValueError, match=message):
            east.model(images)
        assert len(graph.get_operations()) == 1


def test_output_shapes_are_known_where_the_inputs_are():
    with tf.Graph().as_default():
        score, geometry = east.model(tf.zeros([2, 64, 96, 3]), is_training=False)
        assert score.shape.as_list() == [2, 16, 24, 1]
        assert geometry.shape.as_list() == [2, 16, 24, 5]


def test_mean_image_subtraction():
    with tf.Graph().as_default(), tf.Session() as session:
        images = tf.constant([[[[123.68, 117.78, 101.94]]]])
        difference = session.run(east.mean_image_subtraction(images))
        np.testing.assert_allclose(difference, [[[[0, 1, -2]]]], atol=1e-5)
        with pytest.raises(ValueError, match="got 2 means for 3 channels"):
            east.mean_image_subtraction(images, means=[1, 2])


@pytest.mark.parametrize("shape", [[1, 2, 1, 1], [None, None, None, 1]])
def test_unpool_samples_from_the_corner(shape):
    with tf.Graph().as_default(), tf.Session() as session:
        small = tf.placeholder(tf.float32, shape)
        large = session.run(east.unpool(small), {small: np.float32([[[[0.0]], [[4.0]]]])})
    np.testing.assert_array_equal(large[0, :, :, 0], [[0, 0], [2, 2], [4, 4], [4, 4]])


def test_dice_coefficient():
    with tf.Graph().as_default(), tf.Session() as session:
        truth, score, mask = np.float32([[1, 1, 0, 0], [0.5, 1, 1, 0.25], [1, 1, 1, 0]])
        loss = session.run(east.dice_coefficient(truth, score, mask))
    np.testing.assert_allclose(loss, 1 - 2 * 1.5 / (2 + 2.5), rtol=1e-5)


@pytest.mark.parametrize(
    ("network", "num_convolutions"),
    [(resnet_v1.resnet_v1_50, 53), (resnet_v1.resnet_v1_101, 104), (resnet_v1.resnet_v1_152, 155)],
)
def test_resnets_have_as_many_convolutions_as_their_names_say(network, num_convolutions):
    # 50 and so on count the classifier and leave out the four shortcuts
    with tf.Graph().as_default():
        net, end_points = network(tf.zeros([1, 64, 64, 3]), is_training=False)
        assert net.shape.as_list() == [1, 2, 2, 2048]
        sizes = [end_points[f"pool{k}"].shape.as_list()[1] for k in (2, 3, 4, 5)]
        assert sizes == [16, 8, 4, 2]
        names = [v.op.name for v in tf.trainable_variables() if v.op.name.endswith("/weights")]
        assert len(names) == num_convolutions
        assert {name.split("/")[0] for name in names} == {network.__name__}


def test_weight_decay_and_batch_norm_decay_reach_every_layer():
    with tf.Graph().as_default() as graph:
        east.model(tf.zeros([1, 32, 32, 3]), weight_decay=0.0, batch_norm_decay=0.5)
        assert not graph.get_collection(tf.GraphKeys.REGULARIZATION_LOSSES)
        updates = graph.get_collection(tf.GraphKeys.UPDATE_OPS)
        assert {update.decay for update in updates} == {0.5}


TWO_TOWERS = """
import tensorflow.compat.v1 as tf
{setting}
from nets import east
assert tf.executing_eagerly() == {eager}
with tf.Graph().as_default():
    losses, reuse = [], None
    for i in range(2):
        with tf.name_scope(f"model_{{i}}"), tf.variable_scope(tf.get_variable_scope(), reuse=reuse):
            score, geometry = east.model(tf.ones([2, 32, 32, 3]))
            losses.append(east.loss(score, score, geometry, geometry, score))
        reuse = True
    gradients = tf.gradients(tf.add_n(losses), tf.trainable_variables())
    assert len(gradients) == 186 and None not in gradients
    assert len(tf.global_variables()) == 306
    updates = tf.group(*tf.get_collection(tf.GraphKeys.UPDATE_OPS, "model_1"))
    moving_mean = [v for v in tf.global_variables() if v.op.name.endswith("moving_mean")][0]
    with tf.Session() as session:
        session.run(tf.global_variables_initializer())
        session.run(updates)
        values = losses + [tf.norm(gradients[0]), tf.reduce_sum(tf.abs(moving_mean))]
        print(*session.run(values))
"""


@pytest.mark.parametrize(
    ("setting", "eager"), [("", True), ("tf.disable_v2_behavior()", False)], ids=["v2", "v1"]
)
def test_works_whether_or_not_tensorflow_2_behaviour_is_on(setting, eager):
    program = TWO_TOWERS.format(setting=setting, eager=eager)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    values = np.float64(done.stdout.split())
    assert len(values) == 4 and np.isfinite(values).all()
    assert values[3] > 0  # the update ran
