"""PointNet++ for classification, multi-scale grouping (Qi et al. 2017, section 3.3).

Source: `models/pointnet2_cls_msg.py` of charlesq34/pointnet2 before February 2018, with which the
published accuracy was reached. Since then its first layer transposes its input and mixes the points
of a group in place of their channels; `as_shipped` gives that network, for its checkpoints.
`nets.pointnet2.identify` tells which of the two a checkpoint is of.
"""

import tensorflow.compat.v1 as tf

from nets.pointnet2.inputs import NUM_CLASSES, split_channels
from nets.pointnet2.inputs import classification_loss as get_loss
from nets.pointnet2.inputs import classification_placeholders as placeholder_inputs
from utils import tf_util
from utils.pointnet_util import pointnet_sa_module, pointnet_sa_module_msg

__all__ = ["get_loss", "get_model", "placeholder_inputs"]


def get_model(point_cloud, is_training, bn_decay=None, dropout_seed=None, as_shipped=False):
    """Classes of clouds.

    Args:
        point_cloud: [batch, num_point, 3 or 6] float32; the last three of six channels are normals,
            features of the first set abstraction.
        is_training: bool or scalar bool tensor.
        bn_decay: share of the moving statistics that an update keeps; None for 0.9.
        dropout_seed: see `tf_util.dropout_mask`.
        as_shipped: whether to build the original's last state, see the module.

    Returns:
        net: [batch, 40] float32 logits.
        end_points: empty dict.

    Raises:
        ValueError: another number of channels.
    """
    l0_xyz, l0_points = split_channels(point_cloud, allowed=(3, 6))
    mode = {"is_training": is_training, "bn_decay": bn_decay}

    # Set abstraction layers
    l1_xyz, l1_points = pointnet_sa_module_msg(
        l0_xyz,
        l0_points,
        npoint=512,
        radius_list=[0.1, 0.2, 0.4],
        nsample_list=[16, 32, 128],
        mlp_list=[[32, 32, 64], [64, 64, 128], [64, 96, 128]],
        scope="layer1",
        use_nchw=as_shipped,
        **mode,
    )
    l2_xyz, l2_points = pointnet_sa_module_msg(
        l1_xyz,
        l1_points,
        npoint=128,
        radius_list=[0.2, 0.4, 0.8],
        nsample_list=[32, 64, 128],
        mlp_list=[[64, 64, 128], [128, 128, 256], [128, 128, 256]],
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
    net = tf_util.dropout(net, is_training, "dp1", keep_prob=0.4, seed=dropout_seed)
    net = tf_util.fully_connected(net, 256, bn=True, scope="fc2", **mode)
    net = tf_util.dropout(net, is_training, "dp2", keep_prob=0.4, seed=dropout_seed)
    net = tf_util.fully_connected(net, NUM_CLASSES, activation_fn=None, scope="fc3")
    return tf.cast(net, tf.float32), {}
