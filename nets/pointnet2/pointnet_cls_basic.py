"""PointNet for classification, without its transformation networks (Qi et al. 2016).

Source: `models/pointnet_cls_basic.py` of charlesq34/pointnet2.
"""

import tensorflow.compat.v1 as tf

from nets.pointnet2.inputs import NUM_CLASSES, split_channels
from nets.pointnet2.inputs import classification_loss as get_loss
from nets.pointnet2.inputs import classification_placeholders as placeholder_inputs
from utils import tf_util

__all__ = ["get_loss", "get_model", "placeholder_inputs"]


def get_model(point_cloud, is_training, bn_decay=None, dropout_seed=None):
    """Classes of clouds.

    Args:
        point_cloud: [batch, num_point, 3 or 6] float32; the last three of six channels are normals,
            seen by the first layer like the coordinates.
        is_training: bool or scalar bool tensor.
        bn_decay: share of the moving statistics that an update keeps; None for 0.9.
        dropout_seed: see `tf_util.dropout_mask`.

    Returns:
        net: [batch, 40] float32 logits.
        end_points: empty dict.

    Raises:
        ValueError: another number of channels.
    """
    split_channels(point_cloud, allowed=(3, 6))  # refuses others
    num_point, channels = point_cloud.shape.as_list()[1:]
    mode = {"is_training": is_training, "bn_decay": bn_decay}

    # Point functions
    net = tf.expand_dims(point_cloud, -1)  # [batch, num_point, channels, 1]
    for i, size in enumerate([64, 64, 64, 128, 1024], start=1):
        kernel_size = [1, channels if i == 1 else 1]
        net = tf_util.conv2d(
            net, size, kernel_size, padding="VALID", bn=True, scope=f"conv{i}", **mode
        )

    # Symmetric function
    net = tf_util.max_pool2d(net, [num_point, 1], scope="maxpool")

    # Fully connected layers
    net = tf.squeeze(net, [1, 2])  # [batch, 1024]
    net = tf_util.fully_connected(net, 512, bn=True, scope="fc1", **mode)
    net = tf_util.fully_connected(net, 256, bn=True, scope="fc2", **mode)
    net = tf_util.dropout(net, is_training, "dp1", keep_prob=0.7, seed=dropout_seed)
    net = tf_util.fully_connected(net, NUM_CLASSES, activation_fn=None, scope="fc3")
    return tf.cast(net, tf.float32), {}
