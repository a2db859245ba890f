"""PointNet++ for classification, single-scale grouping (Qi et al. 2017, section 3.2).

Source: `models/pointnet2_cls_ssg.py` of charlesq34/pointnet2.
"""

import tensorflow.compat.v1 as tf

from nets.pointnet2.inputs import NUM_CLASSES, split_channels
from nets.pointnet2.inputs import classification_loss as get_loss
from nets.pointnet2.inputs import classification_placeholders as placeholder_inputs
from utils import tf_util
from utils.pointnet_util import pointnet_sa_module

__all__ = ["get_loss", "get_model", "placeholder_inputs"]


def get_model(point_cloud, is_training, bn_decay=None, dropout_seed=None):
    """Classes of clouds.

    Args:
        point_cloud: [batch, num_point, 3 or 6] float32; the last three of six channels are normals,
            features of the first set abstraction.
        is_training: bool or scalar bool tensor.
        bn_decay: share of the moving statistics that an update keeps; None for 0.9.
        dropout_seed: see `tf_util.dropout_mask`.

    Returns:
        net: [batch, 40] float32 logits.
        end_points: dict with `l0_xyz`, the coordinates.

    Raises:
        ValueError: another number of channels.
    """
    l0_xyz, l0_points = split_channels(point_cloud, allowed=(3, 6))
    end_points = {"l0_xyz": l0_xyz}
    mode = {"is_training": is_training, "bn_decay": bn_decay}

    # Set abstraction layers
    l1_xyz, l1_points, _ = pointnet_sa_module(
        l0_xyz,
        l0_points,
        npoint=512,
        radius=0.2,
        nsample=32,
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
    _, l3_points, _ = pointnet_sa_module(
        l2_xyz,
        l2_points,
        npoint=None,
        radius=None,
        nsample=None,
        mlp=[256, 512, 1024],
        mlp2=None,
        group_all=True,
        features_only=True,
        scope="layer3",
        **mode,
    )

    # Fully connected layers
    net = tf.squeeze(l3_points, [1])  # [batch, 1024]
    net = tf_util.fully_connected(net, 512, bn=True, scope="fc1", **mode)
    net = tf_util.dropout(net, is_training, "dp1", keep_prob=0.5, seed=dropout_seed)
    net = tf_util.fully_connected(net, 256, bn=True, scope="fc2", **mode)
    net = tf_util.dropout(net, is_training, "dp2", keep_prob=0.5, seed=dropout_seed)
    net = tf_util.fully_connected(net, NUM_CLASSES, activation_fn=None, scope="fc3")
    return tf.cast(net, tf.float32), end_points
