"""EAST's network and loss, RBOX geometry.

Paper: Zhou et al. 2017, "EAST: An efficient and accurate scene text detector". Names, arguments
and numbers are those of `model.py` in argman/EAST.
"""

import math

import tensorflow.compat.v1 as tf

from nets import layers, resnet_v1

CLASSIFICATION_WEIGHT = 0.01  # lambda of the original; the paper weighs geometry with 1
ANGLE_WEIGHT = 20.0


def unpool(inputs):
    """Doubles height and width, bilinearly, sampling as TensorFlow 1 does (corners, not centres).

    Args:
        inputs: [batch, height, width, channels] float32, bfloat16 or float16.

    Returns:
        [batch, 2 * height, 2 * width, channels] of the type of `inputs`.
    """
    height, width = inputs.shape.as_list()[1:3]
    size = tf.shape(inputs)[1:3] * 2 if None in (height, width) else [2 * height, 2 * width]
    resized = tf.raw_ops.ResizeBilinear(images=inputs, size=size)  # float32 for any input
    return tf.cast(resized, inputs.dtype)


def mean_image_subtraction(images, means=(123.68, 116.78, 103.94)):
    """Subtracts each channel's mean grey level over ImageNet.

    Args:
        images: [batch, height, width, channels] float32, grey levels 0 to 255, RGB order for the
            default means.
        means: one number per channel.

    Returns:
        Tensor of the shape of `images`.

    Raises:
        ValueError: the number of means is not that of the channels.
    """
    channels = images.shape.as_list()[-1]
    if len(means) != channels:
        raise ValueError(
            f"mean_image_subtraction got {len(means)} means for {channels} channels; "
            "pass one mean per channel"
        )
    return tf.subtract(images, tf.constant(means, images.dtype))


def _check_images(images):
    """Refuses images that the network would not fit, before the graph is built."""
    shape = images.shape
    if shape.rank != 4 or shape.as_list()[-1] != 3:
        raise ValueError(
            f"images have shape {shape}, needed is [batch, height, width, 3]; "
            "pass a batch of RGB images"
        )
    if images.dtype.base_dtype != tf.float32:
        raise ValueError(
            f"images are {images.dtype.base_dtype.name}, needed are float32 grey levels 0 to 255; "
            "pass tf.cast(images, tf.float32)"
        )
    for name, size in zip(("height", "width"), shape[1:3].as_list()):
        if size is not None and (size % 32 or not size):
            fitting = [s for s in (size // 32 * 32, size // 32 * 32 + 32) if s]
            raise ValueError(
                f"image {name} is {size}, needed is a multiple of the network's stride 32; "
                f"resize or pad to {' or '.join(map(str, fitting))}"
            )


def model(
    images,
    weight_decay=1e-5,
    is_training=True,
    text_scale=512,
    batch_norm_decay=0.997,
    backbone=resnet_v1.resnet_v1_50,
):
    """The network: ResNet features, merged from coarse to fine, and one layer for each output.

    Args:
        images: [batch, height, width, 3] float32 RGB, grey levels 0 to 255; height and width
            multiples of 32 pixels.
        weight_decay: scale of the L2 loss of the kernels, added to
            `GraphKeys.REGULARIZATION_LOSSES`.
        is_training: bool; whether batch norm uses the batch's statistics and registers updates of
            the moving ones.
        text_scale: largest distance in pixels that the geometry can express.
        batch_norm_decay: share of the moving statistics that an update keeps.
        backbone: function of `nets.resnet_v1`.

    Returns:
        Tuple (F_score, F_geometry): [batch, height/4, width/4, 1] float32, probability of text; and
        [batch, height/4, width/4, 5] float32, distances in pixels to the top, right, bottom and
        left edge of the text box, and its angle in radians, -pi/4 to pi/4.

    Raises:
        ValueError: the images do not have the rank, type, channels, height or width named above.
    """
    _check_images(images)
    _, end_points = backbone(
        mean_image_subtraction(images),
        is_training=is_training,
        weight_decay=weight_decay,
        batch_norm_decay=batch_norm_decay,
    )
    coarse_to_fine = [end_points[name] for name in ("pool5", "pool4", "pool3", "pool2")]
    with (
        tf.variable_scope("feature_fusion", values=coarse_to_fine),
        layers.arg_scope([layers.conv2d], weights_regularizer=layers.l2_regularizer(weight_decay)),
    ):
        normalized = {
            "normalizer_fn": layers.batch_norm,
            "normalizer_params": {
                "decay": batch_norm_decay,
                "epsilon": 1e-5,
                "scale": True,
                "is_training": is_training,
            },
        }
        merged = coarse_to_fine[0]
        for features, num_outputs in zip(coarse_to_fine[1:], (128, 64, 32)):
            merged = tf.concat([unpool(merged), features], axis=-1)
            merged = layers.conv2d(merged, num_outputs, 1, **normalized)
            merged = layers.conv2d(merged, num_outputs, 3, **normalized)
        merged = layers.conv2d(merged, 32, 3, **normalized)

        sigmoid = layers.in_float32(tf.sigmoid)
        F_score = layers.conv2d(merged, 1, 1, activation_fn=sigmoid)
        distances = layers.conv2d(merged, 4, 1, activation_fn=sigmoid) * text_scale
        angle = (layers.conv2d(merged, 1, 1, activation_fn=sigmoid) - 0.5) * (math.pi / 2)
        F_geometry = tf.concat([distances, angle], axis=-1)
    return F_score, F_geometry


def dice_coefficient(y_true_cls, y_pred_cls, training_mask):
    """Dice loss of the score map: 1 - 2 * overlap / (text + predicted text), over the whole batch.

    Args:
        y_true_cls: [batch, height, width, 1] float32, 1 where there is text, else 0.
        y_pred_cls: the same shape, probability of text.
        training_mask: the same shape, 0 where a pixel does not count.

    Returns:
        Scalar float32 in [0, 1].
    """
    masked = y_pred_cls * training_mask
    intersection = tf.reduce_sum(y_true_cls * masked)
    union = tf.reduce_sum(y_true_cls * training_mask) + tf.reduce_sum(masked) + 1e-5
    return 1.0 - 2.0 * intersection / union


def loss_terms(y_true_cls, y_pred_cls, y_true_geo, y_pred_geo, training_mask):
    """The terms of the loss, before their weights; each is also a scalar summary of that name.

    Args:
        y_true_cls: [batch, height, width, 1] float32, 1 where there is text, else 0.
        y_pred_cls: the same shape, probability of text.
        y_true_geo: [batch, height, width, 5] float32, distances in pixels to the top, right, bottom
            and left edge of the text box, and its angle in radians.
        y_pred_geo: the same shape, predicted.
        training_mask: [batch, height, width, 1] float32, 0 where a pixel does not count.

    Returns:
        Ordered dict name -> scalar float32: `classification_dice_loss`; `geometry_AABB`, -log IoU
        of the upright boxes, and `geometry_theta`, 1 - cos of the angle's error: means over all
        pixels, text or not.
    """
    true_top, true_right, true_bottom, true_left, true_theta = tf.split(y_true_geo, 5, axis=3)
    top, right, bottom, left, theta = tf.split(y_pred_geo, 5, axis=3)
    true_area = (true_top + true_bottom) * (true_right + true_left)
    area = (top + bottom) * (right + left)
    width = tf.minimum(true_right, right) + tf.minimum(true_left, left)
    height = tf.minimum(true_top, top) + tf.minimum(true_bottom, bottom)
    intersection = width * height
    union = true_area + area - intersection
    text = y_true_cls * training_mask
    aabb = tf.log((union + 1.0) / (intersection + 1.0))  # + 1: finite for empty boxes
    terms = {
        "classification_dice_loss": dice_coefficient(y_true_cls, y_pred_cls, training_mask),
        "geometry_AABB": tf.reduce_mean(aabb * text),
        "geometry_theta": tf.reduce_mean((1.0 - tf.cos(theta - true_theta)) * text),
    }
    with tf.name_scope("loss_terms"):  # names for whoever reports a term that is not finite
        terms = {name: tf.identity(term, name) for name, term in terms.items()}
    for name, term in terms.items():
        tf.summary.scalar(name, term)
    return terms


def weighted_loss(terms):
    """The training loss: geometry_AABB + 20 geometry_theta + 0.01 classification_dice_loss.

    Args:
        terms: what `loss_terms` returns.

    Returns:
        Scalar float32.
    """
    return (
        terms["geometry_AABB"]
        + ANGLE_WEIGHT * terms["geometry_theta"]
        + CLASSIFICATION_WEIGHT * terms["classification_dice_loss"]
    )


def loss(y_true_cls, y_pred_cls, y_true_geo, y_pred_geo, training_mask):
    """The training loss without regularization: `weighted_loss(loss_terms(...))`, same arguments.

    Returns:
        Scalar float32.
    """
    return weighted_loss(loss_terms(y_true_cls, y_pred_cls, y_true_geo, y_pred_geo, training_mask))
