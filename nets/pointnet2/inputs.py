"""Inputs and losses that several of the networks share."""

import tensorflow.compat.v1 as tf

NUM_CLASSES = 40  # of ModelNet40


def classification_placeholders(batch_size, num_point, normal=False):
    """Placeholders of a batch of clouds and their classes.

    Args:
        batch_size: number of clouds; None for any.
        num_point: points of a cloud.
        normal: whether each point has a normal after its coordinates.

    Returns:
        pointclouds_pl: [batch, num_point, 3 or 6] float32.
        labels_pl: [batch] int32.
    """
    shape = [batch_size, num_point, 6 if normal else 3]
    return tf.placeholder(tf.float32, shape), tf.placeholder(tf.int32, [batch_size])


def split_channels(point_cloud, allowed):
    """Coordinates and the features after them.

    Args:
        point_cloud: [batch, num_point, channels] tensor.
        allowed: which numbers of channels the network takes, each 3 or 6.

    Returns:
        xyz: [batch, num_point, 3].
        normals: [batch, num_point, 3], None for 3 channels.

    Raises:
        ValueError: another shape.
    """
    shape = point_cloud.shape
    if shape.rank != 3 or shape[2] not in allowed:
        meant = " or ".join({3: "3 (xyz)", 6: "6 (xyz and normal)"}[number] for number in allowed)
        raise ValueError(
            f"point_cloud has shape {shape}, needs [batch, num_point, {meant}]; pass clouds with"
            " that many channels"
        )
    return point_cloud[:, :, :3], None if shape[2] == 3 else point_cloud[:, :, 3:]


def mean_cross_entropy(pred, label):
    """Mean cross entropy of softmax, also in the collection `losses` and as summary.

    Args:
        pred: [..., classes] float32 logits.
        label: [...] int32.

    Returns:
        Scalar.
    """
    loss = tf.nn.sparse_softmax_cross_entropy_with_logits(logits=pred, labels=label)
    classify_loss = tf.reduce_mean(loss)
    tf.summary.scalar("classify_loss", classify_loss)
    tf.add_to_collection(tf.GraphKeys.LOSSES, classify_loss)
    return classify_loss


def classification_loss(pred, label, end_points):
    """Mean cross entropy of the classes, also in the collection `losses` and as summary.

    Args:
        pred: [batch, classes] float32 logits.
        label: [batch] int32.
        end_points: the network's, unused as in the original.

    Returns:
        Scalar.
    """
    del end_points
    return mean_cross_entropy(pred, label)
