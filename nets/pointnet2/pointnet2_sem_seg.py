"""PointNet++ for semantic segmentation of indoor scenes, single-scale grouping.

Source: `models/pointnet2_sem_seg.py` of charlesq34/pointnet2.
"""

import tensorflow.compat.v1 as tf

from nets.pointnet2.inputs import split_channels
from utils import tf_util
from utils.pointnet_util import pointnet_fp_module, pointnet_sa_module


def placeholder_inputs(batch_size, num_point):
    """Placeholders of a batch of scenes, their points' classes and their points' weights.

    Args:
        batch_size: number of scenes; None for any.
        num_point: points of a scene.

    Returns:
        pointclouds_pl: [batch, num_point, 3] float32.
        labels_pl: [batch, num_point] int32.
        smpws_pl: [batch, num_point] float32.
    """
    shape = [batch_size, num_point]
    pointclouds_pl = tf.placeholder(tf.float32, [*shape, 3])
    return pointclouds_pl, tf.placeholder(tf.int32, shape), tf.placeholder(tf.float32, shape)


def get_model(point_cloud, is_training, num_class, bn_decay=None, dropout_seed=None):
    """Classes of the points of scenes.

    Args:
        point_cloud: [batch, num_point, 3] float32, in metres.
        is_training: bool or scalar bool tensor.
        num_class: number of classes, 21 for ScanNet.
        bn_decay: share of the moving statistics that an update keeps; None for 0.9.
        dropout_seed: see `tf_util.dropout_mask`.

    Returns:
        net: [batch, num_point, num_class] float32 logits.
        end_points: dict with `l0_xyz`, the coordinates, and `feats`, the [batch, num_point, 128]
            features before the last layer.

    Raises:
        ValueError: another number of channels.
    """
    l0_xyz, l0_points = split_channels(point_cloud, allowed=(3,))
    end_points = {"l0_xyz": l0_xyz}
    mode = {"is_training": is_training, "bn_decay": bn_decay}

    # Set abstraction layers
    l1_xyz, l1_points, _ = pointnet_sa_module(
        l0_xyz,
        l0_points,
        npoint=1024,
        radius=0.1,
        nsample=32,
        mlp=[32, 32, 64],
        mlp2=None,
        group_all=False,
        scope="layer1",
        **mode,
    )
    l2_xyz, l2_points, _ = pointnet_sa_module(
        l1_xyz,
        l1_points,
        npoint=256,
        radius=0.2,
        nsample=32,
        mlp=[64, 64, 128],
        mlp2=None,
        group_all=False,
        scope="layer2",
        **mode,
    )
    l3_xyz, l3_points, _ = pointnet_sa_module(
        l2_xyz,
        l2_points,
        npoint=64,
        radius=0.4,
        nsample=32,
        mlp=[128, 128, 256],
        mlp2=None,
        group_all=False,
        scope="layer3",
        **mode,
    )
    l4_xyz, l4_points, _ = pointnet_sa_module(
        l3_xyz,
        l3_points,
        npoint=16,
        radius=0.8,
        nsample=32,
        mlp=[256, 256, 512],
        mlp2=None,
        group_all=False,
        scope="layer4",
        **mode,
    )

    # Feature propagation layers
    l3_points = pointnet_fp_module(
        l3_xyz, l4_xyz, l3_points, l4_points, [256, 256], scope="fa_layer1", **mode
    )
    l2_points = pointnet_fp_module(
        l2_xyz, l3_xyz, l2_points, l3_points, [256, 256], scope="fa_layer2", **mode
    )
    l1_points = pointnet_fp_module(
        l1_xyz, l2_xyz, l1_points, l2_points, [256, 128], scope="fa_layer3", **mode
    )
    l0_points = pointnet_fp_module(
        l0_xyz, l1_xyz, l0_points, l1_points, [128, 128, 128], scope="fa_layer4", **mode
    )

    # Layers that see one point each
    net = tf_util.conv1d(l0_points, 128, 1, padding="VALID", bn=True, scope="fc1", **mode)
    end_points["feats"] = tf.cast(net, tf.float32)
    net = tf_util.dropout(net, is_training, "dp1", keep_prob=0.5, seed=dropout_seed)
    net = tf_util.conv1d(net, num_class, 1, padding="VALID", activation_fn=None, scope="fc2")
    return tf.cast(net, tf.float32), end_points


def get_loss(pred, label, smpw):
    """Weighted cross entropy, also in the collection `losses` and as summary.

    Args:
        pred: [batch, num_point, num_class] float32 logits.
        label: [batch, num_point] int32.
        smpw: [batch, num_point] float32 weights.

    Returns:
        Scalar: the sum of the weighted losses over the number of weights that are not 0.
    """
    classify_loss = tf.losses.sparse_softmax_cross_entropy(labels=label, logits=pred, weights=smpw)
    tf.summary.scalar("classify_loss", classify_loss)
    return classify_loss
