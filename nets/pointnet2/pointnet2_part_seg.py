"""PointNet++ for part segmentation, single-scale grouping (Qi et al. 2017, appendix B).

Source: `models/pointnet2_part_seg.py` of charlesq34/pointnet2.
"""

import tensorflow.compat.v1 as tf

from nets.pointnet2.inputs import mean_cross_entropy as get_loss
from nets.pointnet2.inputs import split_channels
from utils import tf_util
from utils.pointnet_util import pointnet_fp_module, pointnet_sa_module

__all__ = ["get_loss", "get_model", "placeholder_inputs"]

NUM_PARTS = 50  # of ShapeNetPart


def placeholder_inputs(batch_size, num_point):
    """Placeholders of a batch of clouds and their points' parts.

    Args:
        batch_size: number of clouds; None for any.
        num_point: points of a cloud.

    Returns:
        pointclouds_pl: [batch, num_point, 6] float32, coordinates and normals.
        labels_pl: [batch, num_point] int32.
    """
    pointclouds_pl = tf.placeholder(tf.float32, [batch_size, num_point, 6])
    return pointclouds_pl, tf.placeholder(tf.int32, [batch_size, num_point])


def get_model(point_cloud, is_training, bn_decay=None, dropout_seed=None):
    """Parts of the points of clouds.

    Args:
        point_cloud: [batch, num_point, 6] float32, coordinates and normals.
        is_training: bool or scalar bool tensor.
        bn_decay: share of the moving statistics that an update keeps; None for 0.9.
        dropout_seed: see `tf_util.dropout_mask`.

    Returns:
        net: [batch, num_point, 50] float32 logits.
        end_points: dict with `feats`, the [batch, num_point, 128] features before the last layer.

    Raises:
        ValueError: another number of channels.
    """
    l0_xyz, l0_points = split_channels(point_cloud, allowed=(6,))
    mode = {"is_training": is_training, "bn_decay": bn_decay}

    # Set abstraction layers
    l1_xyz, l1_points, _ = pointnet_sa_module(
        l0_xyz,
        l0_points,
        npoint=512,
        radius=0.2,
        nsample=64,
        mlp=[64, 64, 128],
        mlp2=None,
        group_all=False,
        scope="layer1",
        **mode,
    )
    l2_xyz, l2_points, _ = pointnet_sa_module(
        l1_xyz,
        l1_points,
        npoint=128,
        radius=0.4,
        nsample=64,
        mlp=[128, 128, 256],
        mlp2=None,
        group_all=False,
        scope="layer2",
        **mode,
    )
    l3_xyz, l3_points, _ = pointnet_sa_module(
        l2_xyz,
        l2_points,
        npoint=None,
        radius=None,
        nsample=None,
        mlp=[256, 512, 1024],
        mlp2=None,
        group_all=True,
        scope="layer3",
        **mode,
    )

    # Feature propagation layers
    l2_points = pointnet_fp_module(
        l2_xyz, l3_xyz, l2_points, l3_points, [256, 256], scope="fa_layer1", **mode
    )
    l1_points = pointnet_fp_module(
        l1_xyz, l2_xyz, l1_points, l2_points, [256, 128], scope="fa_layer2", **mode
    )
    l0_points = pointnet_fp_module(
        l0_xyz, l1_xyz, point_cloud, l1_points, [128, 128, 128], scope="fa_layer3", **mode
    )

    # Layers that see one point each
    net = tf_util.conv1d(l0_points, 128, 1, padding="VALID", bn=True, scope="fc1", **mode)
    end_points = {"feats": tf.cast(net, tf.float32)}
    net = tf_util.dropout(net, is_training, "dp1", keep_prob=0.5, seed=dropout_seed)
    net = tf_util.conv1d(net, NUM_PARTS, 1, padding="VALID", activation_fn=None, scope="fc2")
    return tf.cast(net, tf.float32), end_points
