"""Set abstraction and feature propagation, the blocks of PointNet++ (Qi et al. 2017, section 3).

Names and arguments are those of `utils/pointnet_util.py` of charlesq34/pointnet2. Without its
`use_nchw` in `pointnet_sa_module`, which changed the memory layout and no result. Clouds may have
fewer points than `npoint`: the sampling repeats point 0.

Coordinates are float32 up to the layers, so that samples, groups and distances do not depend on the
type that layers compute in; features have that type, except those that come with the points.
"""

import tensorflow.compat.v1 as tf

from nets.pointnet2.ops import (
    farthest_point_sample,
    gather_point,
    group_point,
    knn_point,
    query_ball_point,
    three_interpolate,
    three_nn,
)
from utils import tf_util

POOLINGS = ("max", "avg", "weighted_avg", "max_and_avg")
NEAREST = 1e-10  # squared distance below which a point's weight in an interpolation grows no more


def _group(xyz, new_xyz, idx):
    """[batch, npoint, nsample, 3] coordinates relative to each group's centre."""
    return group_point(xyz, idx) - tf.expand_dims(new_xyz, 2)


def sample_and_group(npoint, radius, nsample, xyz, points, knn=False, use_xyz=True):
    """Samples centres, the farthest from each other, and groups the points around them.

    Args:
        npoint: number of centres.
        radius: of a group, in the unit of the coordinates; without effect with `knn`.
        nsample: number of points of a group.
        xyz: [batch, num_point, 3] float32 coordinates.
        points: [batch, num_point, channels] float32 features, or None.
        knn: whether a group is the nearest points, instead of the first ones within the radius.
        use_xyz: whether relative coordinates precede the features.

    Returns:
        new_xyz: [batch, npoint, 3] float32 centres.
        new_points: [batch, npoint, nsample, 3 + channels] float32.
        idx: [batch, npoint, nsample] int32 indices into num_point.
        grouped_xyz: [batch, npoint, nsample, 3] float32 relative coordinates.
    """
    new_xyz = gather_point(xyz, farthest_point_sample(npoint, xyz))
    if knn:
        _, idx = knn_point(nsample, xyz, new_xyz)
    else:
        idx, _ = query_ball_point(radius, nsample, xyz, new_xyz)
    grouped_xyz = _group(xyz, new_xyz, idx)
    if points is None:
        return new_xyz, grouped_xyz, idx, grouped_xyz
    new_points = group_point(points, idx)
    if use_xyz:
        new_points = tf.concat([tf.cast(grouped_xyz, new_points.dtype), new_points], axis=-1)
    return new_xyz, new_points, idx, grouped_xyz


def sample_and_group_all(xyz, points, use_xyz=True):
    """Makes one group of all points, around the origin.

    Args:
        xyz: [batch, num_point, 3] float32 coordinates.
        points: [batch, num_point, channels] float32 features, or None.
        use_xyz: whether coordinates precede the features.

    Returns:
        new_xyz: [batch, 1, 3] float32 zeros.
        new_points: [batch, 1, num_point, 3 + channels] float32.
        idx: [batch, 1, num_point] int32.
        grouped_xyz: [batch, 1, num_point, 3] float32.
    """
    new_xyz = tf.zeros_like(xyz[:, :1])
    idx = tf.broadcast_to(tf.range(tf.shape(xyz)[1]), tf.shape(xyz[:, tf.newaxis, :, 0]))
    grouped_xyz = tf.expand_dims(xyz, 1)
    return new_xyz, _group_of_all(xyz, points, use_xyz), idx, grouped_xyz


def _group_of_all(xyz, points, use_xyz):
    """new_points of `sample_and_group_all`."""
    if points is None:
        return tf.expand_dims(xyz, 1)
    if use_xyz:
        points = tf.concat([tf.cast(xyz, points.dtype), points], axis=2)
    return tf.expand_dims(points, 1)


def _mlp(points, mlp, scope_format, bn, is_training, bn_decay):
    """Layers that see one point each; `scope_format` takes the layer's number."""
    for i, num_out_channel in enumerate(mlp):
        points = tf_util.conv2d(
            points,
            num_out_channel,
            [1, 1],
            padding="VALID",
            bn=bn,
            is_training=is_training,
            scope=scope_format.format(i),
            bn_decay=bn_decay,
        )
    return points


def _pool(points, grouped_xyz, pooling):
    """[batch, npoint, nsample, channels] -> [batch, npoint, 1, channels]."""
    if pooling == "max":
        return tf.reduce_max(points, axis=2, keepdims=True, name="maxpool")
    if pooling == "avg":
        return tf.reduce_mean(points, axis=2, keepdims=True, name="avgpool")
    if pooling == "weighted_avg":
        distances = tf.norm(grouped_xyz, axis=-1, keepdims=True)
        weights = tf.nn.softmax(-5.0 * distances, axis=2)
        return tf.reduce_sum(points * tf.cast(weights, points.dtype), axis=2, keepdims=True)
    if pooling == "max_and_avg":
        pooled = [_pool(points, grouped_xyz, kind) for kind in ("avg", "max")]
        return tf.concat(pooled, axis=-1)
    raise ValueError(f"pooling={pooling} is unknown; use one of {', '.join(POOLINGS)}")


def pointnet_sa_module(
    xyz,
    points,
    npoint,
    radius,
    nsample,
    mlp,
    mlp2,
    group_all,
    is_training,
    bn_decay,
    scope,
    bn=True,
    pooling="max",
    knn=False,
    use_xyz=True,
    features_only=False,
):
    """Set abstraction: groups of points become points with the features of their group.

    Args:
        xyz: [batch, num_point, 3] float32 coordinates.
        points: [batch, num_point, channels] float32 features, or None.
        npoint: number of groups.
        radius: see `sample_and_group`.
        nsample: see `sample_and_group`.
        mlp: list of layer sizes, applied to every point of a group.
        mlp2: list of layer sizes, applied to every pooled group; None for none.
        group_all: whether all points are one group; npoint, radius and nsample are unused then.
        is_training: bool or scalar bool tensor.
        bn_decay: see `tf_util.batch_norm`.
        scope: variable scope.
        bn: whether the layers normalize.
        pooling: 'max', 'avg', 'weighted_avg' (by exp(-5 x distance)) or 'max_and_avg'.
        knn: see `sample_and_group`.
        use_xyz: see `sample_and_group`.
        features_only: with `group_all`, whether new_xyz and idx, constants that a classifier has no
            use for, are None and their ops left out of the graph.

    Returns:
        new_xyz: [batch, npoint, 3] float32.
        new_points: [batch, npoint, channels of the last layer] float32.
        idx: [batch, npoint, nsample] int32 indices into num_point.

    Raises:
        ValueError: unknown pooling.
    """
    with tf.variable_scope(scope):
        if group_all and features_only:
            grouped_xyz = tf.expand_dims(xyz, 1) if pooling == "weighted_avg" else None
            grouped = None, _group_of_all(xyz, points, use_xyz), None, grouped_xyz
        elif group_all:
            grouped = sample_and_group_all(xyz, points, use_xyz)
        else:
            grouped = sample_and_group(npoint, radius, nsample, xyz, points, knn, use_xyz)
        new_xyz, new_points, idx, grouped_xyz = grouped
        new_points = _mlp(new_points, mlp, "conv{}", bn, is_training, bn_decay)
        new_points = _pool(new_points, grouped_xyz, pooling)
        new_points = _mlp(new_points, mlp2 or [], "conv_post_{}", bn, is_training, bn_decay)
        return new_xyz, tf.squeeze(new_points, [2]), idx


def pointnet_sa_module_msg(
    xyz,
    points,
    npoint,
    radius_list,
    nsample_list,
    mlp_list,
    is_training,
    bn_decay,
    scope,
    bn=True,
    use_xyz=True,
    use_nchw=False,
):
    """Set abstraction with groups of several sizes around each centre (multi-scale grouping).

    Args:
        xyz: [batch, num_point, 3] float32 coordinates.
        points: [batch, num_point, channels] float32 features, or None.
        npoint: number of centres.
        radius_list: radius of each scale.
        nsample_list: number of points of a group of each scale.
        mlp_list: list of layer sizes of each scale.
        is_training: bool or scalar bool tensor.
        bn_decay: see `tf_util.batch_norm`.
        scope: variable scope.
        bn: whether the layers normalize.
        use_xyz: whether relative coordinates follow the features.
        use_nchw: the original's mistake: it put the channels before the groups and convolved as if
            they still came last, so the layers mix the points of a group (their kernels are
            [1, 1, nsample, size]) and the pooling leaves as many features as there were channels.
            Only for checkpoints that were trained that way.

    Returns:
        new_xyz: [batch, npoint, 3] float32.
        new_points: [batch, npoint, sum of the scales' last layers] float32.
    """
    with tf.variable_scope(scope):
        new_xyz = gather_point(xyz, farthest_point_sample(npoint, xyz))
        new_points_list = []
        for i, (radius, nsample, mlp) in enumerate(zip(radius_list, nsample_list, mlp_list)):
            idx, _ = query_ball_point(radius, nsample, xyz, new_xyz)
            grouped_points = _group(xyz, new_xyz, idx)
            if points is not None:
                grouped_xyz, grouped_points = grouped_points, group_point(points, idx)
                if use_xyz:
                    grouped_xyz = tf.cast(grouped_xyz, grouped_points.dtype)
                    grouped_points = tf.concat([grouped_points, grouped_xyz], axis=-1)
            if use_nchw:
                grouped_points = tf.transpose(grouped_points, [0, 3, 1, 2])
            grouped_points = _mlp(grouped_points, mlp, f"conv{i}_{{}}", bn, is_training, bn_decay)
            if use_nchw:
                grouped_points = tf.transpose(grouped_points, [0, 2, 3, 1])
            new_points_list.append(tf.reduce_max(grouped_points, axis=2))
        return new_xyz, tf.concat(new_points_list, axis=-1)


def pointnet_fp_module(xyz1, xyz2, points1, points2, mlp, is_training, bn_decay, scope, bn=True):
    """Feature propagation: features of a sparse set of points interpolated at a denser set.

    A point takes the features of its three nearest neighbours, weighted by the inverse of their
    squared distances; with one or two points in the sparse set, of these.

    Args:
        xyz1: [batch, num_point1, 3] float32 coordinates.
        xyz2: [batch, num_point2, 3] float32 coordinates of the sparser set.
        points1: [batch, num_point1, channels1] float32 features that are appended, or None.
        points2: [batch, num_point2, channels2] float32 features to interpolate.
        mlp: list of layer sizes, applied to every point.
        is_training: bool or scalar bool tensor.
        bn_decay: see `tf_util.batch_norm`.
        scope: variable scope.
        bn: whether the layers normalize.

    Returns:
        [batch, num_point1, channels of the last layer] float32.
    """
    with tf.variable_scope(scope):
        dist, idx = three_nn(xyz1, xyz2)
        closeness = 1.0 / tf.maximum(dist, NEAREST)  # 0 for neighbours that don't exist
        weight = closeness / tf.reduce_sum(closeness, axis=2, keepdims=True)
        new_points1 = three_interpolate(points2, idx, weight)
        if points1 is not None:
            new_points1 = tf.concat([new_points1, tf.cast(points1, new_points1.dtype)], axis=2)
        new_points1 = tf.expand_dims(new_points1, 2)
        new_points1 = _mlp(new_points1, mlp, "conv_{}", bn, is_training, bn_decay)
        return tf.squeeze(new_points1, [2])
