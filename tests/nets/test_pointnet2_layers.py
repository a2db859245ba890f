"""Layers and blocks of PointNet++ against arithmetic written out in NumPy, and what they refuse."""

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

from tests import one_by_one_batch_norm
from utils import pointnet_util, tf_util

MODES = (True, False)


def run_layer(build, feeds=None, updates=False, values=()):
    """Builds in a graph of its own, and runs.

    Args:
        build: function without arguments that returns tensors.
        feeds: dict of function of the graph's tensors, or None.
        updates: whether to run the update ops first.
        values: (variable name, value) pairs to set before.
    """
    with tf.Graph().as_default(), tf.Session() as session:
        tf.set_random_seed(1)
        fetches = build()
        session.run(tf.global_variables_initializer())
        variables = {v.op.name: v for v in tf.global_variables()}
        for name, value in values:
            variables[name].load(value, session)
        if updates:
            session.run([u.op for u in tf.get_collection(tf.GraphKeys.UPDATE_OPS)], feeds)
        return session.run((fetches, variables), feeds)


def sample(shape, seed=0):
    return np.random.RandomState(seed).standard_normal(shape).astype(np.float32)


# --- convolutions ---------------------------------------------------------------------------------


def test_layers_are_weights_biases_and_activation():
    cloud, biases = sample([2, 5, 3]), sample([4], 1)

    def build():
        conv1d = tf_util.conv1d(tf.constant(cloud), 4, 1, "a", padding="VALID")
        conv2d = tf_util.conv2d(tf.constant(cloud[:, :, None]), 4, [1, 1], "b", padding="VALID")
        full = tf_util.fully_connected(tf.constant(cloud[:, 0]), 4, "c", activation_fn=None)
        return conv1d, conv2d, full

    values = [(f"{scope}/biases", biases) for scope in "abc"]
    (conv1d, conv2d, full), variables = run_layer(build, values=values)
    assert [name for name in variables] == [
        f"{scope}/{name}" for scope in "abc" for name in ("weights", "biases")
    ]
    kernels = {scope: variables[f"{scope}/weights"] for scope in "abc"}
    assert [kernels[s].shape for s in "abc"] == [(1, 3, 4), (1, 1, 3, 4), (3, 4)]
    relu = [np.maximum(cloud @ kernels[s].reshape(3, 4) + biases, 0) for s in "ab"]
    np.testing.assert_allclose(conv1d, relu[0], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(conv2d[:, :, 0], relu[1], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(full, cloud[:, 0] @ kernels["c"] + biases, rtol=1e-5, atol=1e-6)


def test_initial_weights():
    def build():
        tf_util.fully_connected(tf.zeros([1, 300]), 200, "xavier")
        tf_util.fully_connected(tf.zeros([1, 300]), 200, "normal", use_xavier=False, stddev=0.02)
        return ()

    _, variables = run_layer(build)
    limit = np.sqrt(6 / 500)
    xavier, normal = variables["xavier/weights"], variables["normal/weights"]
    assert 0.99 * limit < np.abs(xavier).max() <= limit
    np.testing.assert_allclose(xavier.std(), limit / np.sqrt(3), 2e-2)
    assert 0.039 < np.abs(normal).max() <= 0.04  # truncated at two standard deviations
    assert not variables["xavier/biases"].any()


def test_weight_decay_goes_to_the_losses():
    def build():
        tf_util.conv2d(tf.zeros([1, 2, 1, 3]), 4, [1, 1], "a", weight_decay=0.1)
        tf_util.conv2d(tf.zeros([1, 2, 1, 3]), 4, [1, 1], "b")
        return tf.get_collection("losses")

    (losses), variables = run_layer(build)
    np.testing.assert_allclose(losses, [0.05 * (variables["a/weights"] ** 2).sum()], 1e-5)


# --- batch normalization --------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [[6, 3], [2, 5, 3], [2, 5, 4, 3]], ids=["fc", "1d", "2d"])
@pytest.mark.parametrize("tensor", [False, True], ids=["bool", "tensor"])
def test_batch_norm_by_hand(shape, tensor):
    inputs = sample(shape) * 2 + 1
    axes = tuple(range(len(shape) - 1))
    number = np.prod(shape[:-1])
    beta, gamma, mean, variance = sample([4, 3], 1)
    values = {
        "bn/beta": beta,
        "bn/gamma": gamma,
        "bn/moving_mean": mean,
        "bn/moving_variance": variance**2,
    }
    for is_training in MODES:

        def build(is_training=is_training):
            mode = tf.placeholder_with_default(is_training, []) if tensor else is_training
            outputs = tf_util.batch_norm(tf.constant(inputs), mode, 0.7, "bn")
            return outputs, tf.gradients(outputs[..., 0], tf.trainable_variables())

        (outputs, gradients), variables = run_layer(build, updates=True, values=values.items())
        assert list(variables) == list(values)
        batch = inputs.mean(axes), inputs.var(axes)
        used = batch if is_training else (mean, variance**2)
        normal = (inputs - used[0]) / np.sqrt(used[1] + 1e-3)
        np.testing.assert_allclose(outputs, normal * gamma + beta, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(gradients[0], [number, 0, 0], rtol=1e-5)
        expected = np.array([normal[..., 0].sum(), 0, 0])
        np.testing.assert_allclose(gradients[1], expected, rtol=1e-4, atol=1e-4)
        moving = mean, variance**2
        if is_training:
            corrected = batch[1] * (number / (number - 1) if len(shape) != 3 else 1)
            moving = mean * 0.7 + batch[0] * 0.3, variance**2 * 0.7 + corrected * 0.3
        np.testing.assert_allclose(variables["bn/moving_mean"], moving[0], rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(variables["bn/moving_variance"], moving[1], rtol=1e-5)


@pytest.mark.parametrize("shape", [[2, 1, 1, 3], [2, 5, 4, 3]], ids=["two rows", "many rows"])
def test_batch_norm_with_sums_one_by_one_is_the_librarys_but_for_rounding(shape, monkeypatch):
    inputs, values = sample(shape) * 2 + 1, [("bn/gamma", sample([3], 1) + 2)]

    def build():
        image = tf.constant(inputs)
        outputs = tf_util.batch_norm(image, True, 0.7, "bn")
        targets = [image, *tf.trainable_variables()]
        return outputs, tf.gradients(outputs * sample(shape, 2), targets)

    library = run_layer(build, updates=True, values=values)
    monkeypatch.setattr(tf.nn, "fused_batch_norm", one_by_one_batch_norm.fused_batch_norm)
    one_by_one = run_layer(build, updates=True, values=values)
    for found, expected in zip(tf.nest.flatten(one_by_one), tf.nest.flatten(library), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("channels", [3, 64])
def test_sums_one_by_one_round_after_each_value(channels):
    rows = sample([20000, channels]) + 5
    expected = np.zeros(channels, np.float32)
    for row in rows:
        expected += row
    np.testing.assert_array_equal(one_by_one_batch_norm.one_by_one_sum(rows), expected)
    assert np.abs(expected - rows.sum(axis=0, dtype=np.float64)).max() > 1e-2


def test_batch_norm_decay_is_nine_tenths_unless_given():
    def build():
        return tf_util.batch_norm(tf.ones([4, 2]), True, None, "bn")

    _, variables = run_layer(build, updates=True)
    np.testing.assert_allclose(variables["bn/moving_mean"], [0.1, 0.1], 1e-6)
    np.testing.assert_allclose(variables["bn/moving_variance"], [0.9, 0.9], 1e-6)


def test_evaluation_registers_no_update():
    with tf.Graph().as_default():
        tf_util.batch_norm(tf.ones([4, 2]), False, 0.5, "bn")
        assert tf.get_collection(tf.GraphKeys.UPDATE_OPS) == []


@pytest.mark.parametrize("mode", [None, 1, "yes"])
def test_mode_that_is_no_truth_value_is_refused(mode):
    with tf.Graph().as_default(), pytest.raises(ValueError, match="True, False or a scalar"):
        tf_util.batch_norm(tf.ones([4, 2]), mode, 0.5, "bn")


def test_batch_norm_of_another_rank_is_refused():
    with tf.Graph().as_default(), pytest.raises(ValueError, match="rank 2 to 4"):
        tf_util.batch_norm(tf.ones([4]), True, 0.5, "bn")


# --- dropout --------------------------------------------------------------------------------------


def dropped(seed=7, step=3, tower=0, scope="dp1", graph_seed=1, keep_prob=0.4):
    with tf.Graph().as_default(), tf.Session() as session:
        tf.set_random_seed(graph_seed)
        key = None if seed is None else tf_util.dropout_seed(seed, tf.constant(float(step)), tower)
        outputs = tf_util.dropout(tf.ones([50, 40]), True, scope, keep_prob=keep_prob, seed=key)
        return session.run(outputs)


def test_dropout_repeats_for_the_same_seed_step_tower_and_layer_only():
    first = dropped()
    np.testing.assert_array_equal(first, dropped(graph_seed=2))
    for other in ({"seed": 8}, {"step": 4}, {"tower": 1}, {"scope": "dp2"}):
        share = (first == dropped(**other)).mean()
        assert abs(share - (0.4**2 + 0.6**2)) < 0.06, other  # as of independent masks


@pytest.mark.parametrize("seed", [7, None])
@pytest.mark.parametrize("keep_prob", [0.4, 0.5, 0.7])
def test_dropout_keeps_the_stated_share_and_scales_it(keep_prob, seed):
    outputs = dropped(keep_prob=keep_prob, seed=seed)
    np.testing.assert_array_equal(np.unique(outputs), np.float32([0, 1 / np.float32(keep_prob)]))
    assert abs((outputs > 0).mean() - keep_prob) < 0.05


def test_dropout_without_a_seed_draws_anew_in_each_run():
    with tf.Graph().as_default(), tf.Session() as session:
        tf.set_random_seed(1)
        outputs = tf_util.dropout(tf.ones([50, 40]), True, "dp1")
        first, second = session.run(outputs), session.run(outputs)
    assert (first != second).mean() > 0.4


def test_dropout_mode_and_noise_shape():
    ones = np.ones([6, 30, 5], np.float32)
    with tf.Graph().as_default(), tf.Session() as session:
        mode = tf.placeholder(tf.bool, [])
        outputs = tf_util.dropout(tf.constant(ones), mode, "dp1", noise_shape=[6, 30, 1])
        training = session.run(outputs, {mode: True})
        np.testing.assert_array_equal(session.run(outputs, {mode: False}), ones)
        np.testing.assert_array_equal(
            session.run(tf_util.dropout(tf.constant(ones), False, "dp1")), ones
        )
    np.testing.assert_array_equal(np.ptp(training, axis=2), np.zeros([6, 30]))
    assert set(np.unique(training)) == {0, 2}


# --- blocks ---------------------------------------------------------------------------------------


def block_values(build):
    return run_layer(build)[0]


def test_groups_are_relative_to_their_centres_and_followed_by_features():
    xyz, points = sample([2, 20, 3]), sample([2, 20, 4], 1)

    def build():
        ball = pointnet_util.sample_and_group(5, 0.9, 6, tf.constant(xyz), tf.constant(points))
        near = pointnet_util.sample_and_group(
            5, None, 6, tf.constant(xyz), tf.constant(points), knn=True, use_xyz=False
        )
        return ball, near

    ball, near = block_values(build)
    for new_xyz, new_points, idx, grouped_xyz in (ball, near):
        batch = np.arange(2)[:, None, None]
        np.testing.assert_array_equal(grouped_xyz, xyz[batch, idx] - new_xyz[:, :, None])
        np.testing.assert_array_equal(new_points[..., -4:], points[batch, idx])
    np.testing.assert_array_equal(ball[1][..., :3], ball[3])
    assert near[1].shape == (2, 5, 6, 4)
    distances = np.linalg.norm(near[3], axis=-1)
    assert (np.diff(distances, axis=2) >= 0).all() and not distances[..., 0].any()


def test_group_of_all_points():
    xyz, points = sample([2, 7, 3]), sample([2, 7, 4], 1)

    def build():
        both = pointnet_util.sample_and_group_all(tf.constant(xyz), tf.constant(points))
        features = pointnet_util.sample_and_group_all(tf.constant(xyz), tf.constant(points), False)
        return both, features[1], pointnet_util.sample_and_group_all(tf.constant(xyz), None)[1]

    (new_xyz, new_points, idx, grouped_xyz), features, alone = block_values(build)
    np.testing.assert_array_equal(new_xyz, np.zeros([2, 1, 3]))
    np.testing.assert_array_equal(new_points, np.concatenate([xyz, points], axis=2)[:, None])
    np.testing.assert_array_equal(idx, np.tile(np.arange(7), [2, 1, 1]))
    np.testing.assert_array_equal(grouped_xyz, xyz[:, None])
    np.testing.assert_array_equal(features, points[:, None])
    np.testing.assert_array_equal(alone, xyz[:, None])


@pytest.mark.parametrize("features_only", [False, True])
@pytest.mark.parametrize("pooling", pointnet_util.POOLINGS)
def test_pooling_by_hand(pooling, features_only):
    xyz, points = sample([2, 7, 3]), sample([2, 7, 4], 1)

    def build():
        new_xyz, new_points, idx = pointnet_util.pointnet_sa_module(
            tf.constant(xyz),
            tf.constant(points),
            npoint=None,
            radius=None,
            nsample=None,
            mlp=[],
            mlp2=None,
            group_all=True,
            is_training=False,
            bn_decay=None,
            scope="layer",
            pooling=pooling,
            features_only=features_only,
        )
        assert [tensor is None for tensor in (new_xyz, idx)] == [features_only] * 2
        return new_points

    both = np.concatenate([xyz, points], axis=2)
    weights = np.exp(-5 * np.linalg.norm(xyz, axis=2, keepdims=True))
    expected = {
        "max": both.max(1),
        "avg": both.mean(1),
        "weighted_avg": (both * weights).sum(1) / weights.sum(1),
        "max_and_avg": np.concatenate([both.mean(1), both.max(1)], axis=1),
    }[pooling]
    np.testing.assert_allclose(block_values(build)[:, 0], expected, rtol=1e-5, atol=1e-6)


def test_unknown_pooling_is_refused():
    with tf.Graph().as_default(), pytest.raises(ValueError, match="max_and_avg"):
        pointnet_util.pointnet_sa_module(
            tf.zeros([1, 4, 3]), None, 2, 0.5, 2, [], None, False, False, None, "a", pooling="sum"
        )


def test_layers_after_the_pooling():
    def build():
        return pointnet_util.pointnet_sa_module(
            tf.zeros([1, 4, 3]), None, 2, 0.5, 2, [5], [6, 7], False, False, None, "a"
        )[1]

    outputs, variables = run_layer(build)
    assert outputs.shape == (1, 2, 7)
    names = [name for name in variables if name.endswith("/weights")]
    assert names == [f"a/{layer}/weights" for layer in ("conv0", "conv_post_0", "conv_post_1")]


def test_features_of_the_multi_scale_module_come_before_coordinates():
    xyz, points = sample([1, 9, 3]), sample([1, 9, 2], 1) + 10

    def build():
        return pointnet_util.pointnet_sa_module_msg(
            tf.constant(xyz), tf.constant(points), 4, [9.0, 9.0], [9, 9], [[], []], False, None, "a"
        )

    new_xyz, new_points = block_values(build)
    relative = (xyz[:, None] - new_xyz[:, :, None]).max(2)
    pooled = np.concatenate([np.tile(points.max(1, keepdims=True), [1, 4, 1]), relative], axis=2)
    np.testing.assert_allclose(new_points, np.tile(pooled, [1, 1, 2]), rtol=1e-6)


def test_propagation_interpolates_by_inverse_squared_distance():
    known, points = sample([1, 5, 3]), sample([1, 5, 2], 1)
    wanted, skipped = sample([1, 8, 3], 2), sample([1, 8, 4], 3)

    def build():
        return pointnet_util.pointnet_fp_module(
            tf.constant(wanted),
            tf.constant(known),
            tf.constant(skipped),
            tf.constant(points),
            [],
            False,
            None,
            "a",
        )

    squared = ((wanted[0, :, None] - known[0, None]) ** 2).sum(2)
    near = np.argsort(squared, axis=1)[:, :3]
    weights = 1 / np.take_along_axis(squared, near, axis=1)
    weights /= weights.sum(1, keepdims=True)
    expected = (points[0][near] * weights[..., None]).sum(1)
    expected = np.concatenate([expected, skipped[0]], axis=1)
    np.testing.assert_allclose(block_values(build)[0], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("number", [1, 2])
def test_propagation_from_one_or_two_points(number):
    known, points = sample([1, number, 3]), sample([1, number, 2], 1)

    def build():
        return pointnet_util.pointnet_fp_module(
            tf.constant(known), tf.constant(known), None, tf.constant(points), [], False, None, "a"
        )

    np.testing.assert_allclose(block_values(build), points, rtol=1e-5, atol=1e-5)
