"""PointNet++ networks apart from golden numbers: inputs, modes, small clouds, checkpoints."""

import functools
import json

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

from nets.pointnet2 import (
    identify,
    pointnet2_cls_msg,
    pointnet2_cls_ssg,
    pointnet2_part_seg,
    pointnet2_part_seg_msg_one_hot,
    pointnet2_sem_seg,
    pointnet_cls_basic,
)
from tests.golden_sets import golden_path

CLASSIFICATION = (pointnet_cls_basic, pointnet2_cls_ssg, pointnet2_cls_msg)


def short_name(network):
    return network.__name__.rpartition(".")[2]


def clouds(batch, num_point, channels, seed=0):
    return np.random.RandomState(seed).uniform(-1, 1, [batch, num_point, channels]).astype("f4")


@functools.lru_cache
def network_shapes(network, channels, **keywords):
    """{name: shape} of the variables that a network makes."""
    with tf.Graph().as_default():
        network.get_model(tf.placeholder(tf.float32, [2, 64, channels]), False, **keywords)
        return {v.op.name: v.shape.as_list() for v in tf.global_variables()}


@pytest.fixture(scope="module")
def basic():
    """pointnet_cls_basic with bools and with a placeholder for the mode, on the same variables."""
    cloud, label = clouds(4, 32, 6), np.array([3, 1, 0, 39])
    results, moving = {}, {}
    with tf.Graph().as_default(), tf.Session() as session:
        tf.set_random_seed(3)
        mode = tf.placeholder(tf.bool, [])
        for key in (True, False, mode):
            with tf.variable_scope(tf.get_variable_scope(), reuse=tf.AUTO_REUSE):
                net, end_points = pointnet_cls_basic.get_model(
                    tf.constant(cloud), key, bn_decay=0.5, dropout_seed=tf.constant([1, 2])
                )
            loss = pointnet_cls_basic.get_loss(net, label, end_points)
            results[key] = net, tf.gradients(loss, tf.trainable_variables())
        updates = tf.group(*tf.get_collection(tf.GraphKeys.UPDATE_OPS)[-14:])
        session.run(tf.global_variables_initializer())
        variables = tf.global_variables()
        values = {key: session.run(results[key]) for key in (True, False)}
        for key in (False, True):
            before = session.run(variables)
            values[f"tensor {key}"] = session.run(results[mode], {mode: key})
            session.run(updates, {mode: key})
            after = session.run(variables)
            moving[key] = [
                v.op.name
                for v, old, new in zip(variables, before, after)
                if not np.array_equal(old, new)
            ]
    return values, moving


@pytest.mark.parametrize("mode", [True, False])
def test_mode_as_tensor_gives_what_a_bool_gives(basic, mode):
    values, _ = basic
    assert not np.allclose(values[True][0], values[False][0])
    for found, expected in zip(*map(tf.nest.flatten, (values[f"tensor {mode}"], values[mode]))):
        scale = np.abs(expected).max()
        np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-4 * scale + 1e-7)


def test_mode_as_tensor_updates_moving_statistics_in_training_only(basic):
    _, moving = basic
    assert moving[False] == []
    assert len(moving[True]) == 14 and all("/moving_" in name for name in moving[True])


# --- inputs ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("network", CLASSIFICATION, ids=short_name)
def test_normals_change_the_first_kernels_only(network):
    plain, normals = (network_shapes(network, channels) for channels in (3, 6))
    assert plain.keys() == normals.keys()
    different = [name for name in plain if plain[name] != normals[name]]
    first = {
        pointnet_cls_basic: ["conv1/weights"],
        pointnet2_cls_ssg: ["layer1/conv0/weights"],
        pointnet2_cls_msg: [f"layer1/conv{scale}_0/weights" for scale in range(3)],
    }[network]
    assert different == first
    for name in first:
        assert (plain[name] + normals[name]).count(6) == 1


def test_normals_are_features_and_do_not_group():
    """Clouds turned about with their normals left alone: groups follow the coordinates."""
    cloud = clouds(1, 40, 6)
    with tf.Graph().as_default(), tf.Session() as session:
        pointclouds_pl, _ = pointnet2_cls_ssg.placeholder_inputs(None, 40, normal=True)
        assert pointclouds_pl.shape.as_list() == [None, 40, 6]
        net, end_points = pointnet2_cls_ssg.get_model(pointclouds_pl, False)
        session.run(tf.global_variables_initializer())
        first, xyz = session.run((net, end_points["l0_xyz"]), {pointclouds_pl: cloud})
        np.testing.assert_array_equal(xyz, cloud[:, :, :3])
        moved = cloud + np.float32([8, 8, 8, 0, 0, 0])
        turned = cloud * np.float32([1, 1, 1, -1, -1, -1])
        second, third = (session.run(net, {pointclouds_pl: other}) for other in (moved, turned))
    assert not np.allclose(first, third, atol=1e-4)
    assert not np.allclose(first, second, atol=1e-4)  # the last layers see absolute coordinates


@pytest.mark.parametrize(
    "network, channels, arguments, meant",
    [
        (pointnet_cls_basic, 4, [], "3 (xyz) or 6"),
        (pointnet2_cls_ssg, 4, [], "3 (xyz) or 6"),
        (pointnet2_cls_msg, 2, [], "3 (xyz) or 6"),
        (pointnet2_part_seg, 3, [], "6 (xyz and normal)"),
        (pointnet2_sem_seg, 6, [21], "3 (xyz)"),
    ],
    ids=lambda value: short_name(value) if hasattr(value, "__name__") else "",
)
def test_other_numbers_of_channels_are_refused(network, channels, arguments, meant):
    with tf.Graph().as_default(), pytest.raises(ValueError) as error:
        network.get_model(tf.placeholder(tf.float32, [2, 64, channels]), False, *arguments)
    assert meant in str(error.value) and str(channels) in str(error.value)


def test_placeholders():
    with tf.Graph().as_default():
        for network in CLASSIFICATION:
            found = network.placeholder_inputs(8, 64)
            assert [p.shape.as_list() for p in found] == [[8, 64, 3], [8]]
            assert [p.dtype for p in found] == [tf.float32, tf.int32]
        found = pointnet2_part_seg.placeholder_inputs(8, 64)
        assert [p.shape.as_list() for p in found] == [[8, 64, 6], [8, 64]]
        found = pointnet2_part_seg_msg_one_hot.placeholder_inputs(8, 64)
        assert [p.shape.as_list() for p in found] == [[8, 64, 6], [8, 64], [8]]
        found = pointnet2_sem_seg.placeholder_inputs(8, 64)
        assert [p.shape.as_list() for p in found] == [[8, 64, 3], [8, 64], [8, 64]]
        assert [p.dtype for p in found] == [tf.float32, tf.int32, tf.float32]


# --- clouds and batches of other sizes ------------------------------------------------------------


@pytest.fixture(scope="module")
def evaluation():
    """Function of clouds [batch, num_point, 3]: logits of pointnet2_cls_ssg, the same weights."""
    graphs = {}

    def logits(cloud):
        num_point = cloud.shape[1]
        if num_point not in graphs:
            with tf.Graph().as_default() as graph:
                tf.set_random_seed(5)
                pointclouds_pl, _ = pointnet2_cls_ssg.placeholder_inputs(None, num_point)
                net, _ = pointnet2_cls_ssg.get_model(pointclouds_pl, False)
                session = tf.Session(graph=graph)
                session.run(tf.global_variables_initializer())
            graphs[num_point] = session, pointclouds_pl, net
        session, pointclouds_pl, net = graphs[num_point]
        return session.run(net, {pointclouds_pl: cloud})

    yield logits
    for session, _, _ in graphs.values():
        session.close()


def test_one_cloud_evaluates_alike_in_batches_of_any_size(evaluation):
    cloud = clouds(5, 96, 3)
    together = evaluation(cloud)
    for size in (1, 3):
        np.testing.assert_allclose(evaluation(cloud[:size]), together[:size], rtol=0, atol=1e-5)


@pytest.mark.parametrize("num_point", [1, 33])
def test_fewer_points_than_the_network_samples(evaluation, num_point):
    """A cloud of few points is the same shape as one that repeats each of them."""
    cloud = clouds(2, num_point, 3)
    logits = evaluation(cloud)
    assert logits.shape == (2, 40) and np.isfinite(logits).all()
    np.testing.assert_allclose(evaluation(np.tile(cloud, [1, 3, 1])), logits, rtol=0, atol=1e-5)


def test_segmentation_of_few_points_trains():
    cloud = clouds(2, 5, 6)
    with tf.Graph().as_default(), tf.Session() as session:
        tf.set_random_seed(1)
        cls_label, label = tf.constant([3, 15]), tf.zeros([2, 5], tf.int32)
        net, _ = pointnet2_part_seg_msg_one_hot.get_model(tf.constant(cloud), cls_label, True)
        loss = pointnet2_part_seg_msg_one_hot.get_loss(net, label)
        gradients = tf.gradients(loss, tf.trainable_variables())
        assert tf.get_collection("losses") == [loss]
        session.run(tf.global_variables_initializer())
        values = session.run([loss, *gradients])
    assert all(np.isfinite(value).all() for value in values)
    assert any(value.any() for value in values[1:])


def test_weighted_loss_counts_weights_that_are_not_zero():
    logits, label = np.float32([[[2, 0], [0, 2], [1, 1]]]), [[0, 0, 1]]
    with tf.Graph().as_default(), tf.Session() as session:
        loss = pointnet2_sem_seg.get_loss(tf.constant(logits), label, [[2.0, 0.5, 0.0]])
        value = session.run(loss)
    first, second = np.log(1 + np.exp(-2)), np.log(1 + np.exp(2))
    np.testing.assert_allclose(value, (2 * first + 0.5 * second) / 2, 1e-6)


# --- checkpoints ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name, expected",
    [
        ("pointnet_cls_basic", "pointnet_cls_basic"),
        ("pointnet2_cls_ssg", "pointnet2_cls_ssg"),
        ("pointnet2_cls_msg_fixed", "pointnet2_cls_msg"),
        ("pointnet2_part_seg", "pointnet2_part_seg"),
        ("pointnet2_part_seg_msg_one_hot", "pointnet2_part_seg_msg_one_hot"),
        ("pointnet2_sem_seg", "pointnet2_sem_seg"),
    ],
)
def test_golden_variables_tell_the_network(name, expected):
    assert identify.describe_checkpoint(golden_shapes(name)) == expected


def test_golden_variables_tell_the_transposed_network():
    text = identify.describe_checkpoint(golden_shapes("pointnet2_cls_msg"))
    assert text.startswith("pointnet2_cls_msg as its repository shipped it last")
    assert "--as_shipped" in text and "as_shipped=True" in text
    built = network_shapes(pointnet2_cls_msg, 3, as_shipped=True)
    assert identify.describe_checkpoint(built) == text


@pytest.mark.parametrize("network", CLASSIFICATION, ids=short_name)
def test_variables_tell_normals(network):
    text = identify.describe_checkpoint(network_shapes(network, 6))
    assert text == f"{short_name(network)} with normals"


@pytest.mark.parametrize(
    "shapes",
    [
        {},
        {"resnet_v1_50/conv1/weights": [7, 7, 3, 64]},
        {"conv1/weights": [7, 7, 3, 64]},
        {"layer1/conv0/weights": [3]},
        {"layer1/conv0/weights": [1, 1, 3, 64]},
    ],
)
def test_other_checkpoints_are_told_apart(shapes):
    assert identify.describe_checkpoint(shapes) is None


def golden_shapes(name):
    listed = json.loads(golden_path("pointnet2", f"variables_{name}.json").read_text())
    return {entry["name"]: entry["shape"] for entry in listed["variables"]}
