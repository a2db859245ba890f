"""ResNet v1 in the form that EAST uses.

Paper: He et al. 2015, "Deep residual learning for image recognition". Variable names are those of
slim's `nets/resnet_v1.py`, so slim's ImageNet checkpoints load. As there, a block's stride lies in
the 3x3 convolution of its last unit. There is no classifier; end points `pool2` to `pool5` are the
feature maps of stride 4, 8, 16 and 32, as EAST's `nets/resnet_v1.py` names them.
"""

import tensorflow.compat.v1 as tf

from nets import layers, resnet_utils


def bottleneck(inputs, depth, depth_bottleneck, stride, end_points=None, scope=None):
    """Residual unit of a 1x1, a 3x3 and a 1x1 convolution (He et al. 2015, figure 5, right).

    Args:
        inputs: [batch, height, width, channels] float32.
        depth: number of output channels.
        depth_bottleneck: number of channels of the first two convolutions.
        stride: of the 3x3 convolution and of the shortcut, in pixels.
        end_points: dict that receives the outputs under the names of their variable scopes.
        scope: name of the variable scope, `bottleneck_v1` by default.

    Returns:
        [batch, ceil(height / stride), ceil(width / stride), depth] float32.
    """
    with tf.variable_scope(scope, "bottleneck_v1", [inputs]) as unit:
        outputs = {}
        if depth == inputs.shape.as_list()[-1]:
            shortcut = resnet_utils.subsample(inputs, stride, "shortcut")
        else:
            shortcut = outputs["shortcut"] = layers.conv2d(
                inputs, depth, 1, stride=stride, activation_fn=None, scope="shortcut"
            )
        net = outputs["conv1"] = layers.conv2d(inputs, depth_bottleneck, 1, scope="conv1")
        net = outputs["conv2"] = resnet_utils.conv2d_same(
            net, depth_bottleneck, 3, stride, scope="conv2"
        )
        net = outputs["conv3"] = layers.conv2d(net, depth, 1, activation_fn=None, scope="conv3")
        net = tf.nn.relu(shortcut + net)
        if end_points is not None:
            end_points.update({f"{unit.name}/{name}": value for name, value in outputs.items()})
            end_points[unit.name] = net
        return net


def resnet_v1_block(scope, base_depth, num_units, stride):
    """Description of a block of bottleneck units, the last of which has the stride.

    Args:
        scope: name of the block's variable scope.
        base_depth: depth of the bottleneck; the output has four times as many channels.
        num_units: number of units.
        stride: of the last unit, in pixels.

    Returns:
        A resnet_utils.Block.
    """
    strides = [1] * (num_units - 1) + [stride]
    return resnet_utils.Block(scope, bottleneck, [(4 * base_depth, base_depth, s) for s in strides])


def resnet_v1(
    inputs,
    blocks,
    is_training=True,
    weight_decay=1e-4,
    batch_norm_decay=0.997,
    reuse=None,
    scope=None,
):
    """Feature maps of a ResNet v1.

    Args:
        inputs: [batch, height, width, 3] float32, means subtracted.
        blocks: list of four resnet_utils.Block.
        is_training: whether batch norm uses the batch's statistics.
        weight_decay: scale of the L2 loss of the kernels.
        batch_norm_decay: share of batch norm's moving statistics that an update keeps.
        reuse: as for `tf.variable_scope`.
        scope: name of the variable scope.

    Returns:
        Tuple (net, end_points): output of the last block, [batch, height/32, width/32, 2048]
        float32, and the ordered dict of the layers' outputs under their scopes' names and of
        `pool2` ... `pool5`.
    """
    end_points = {}
    with (
        tf.variable_scope(scope, "resnet_v1", [inputs], reuse=reuse) as root,
        resnet_utils.resnet_arg_scope(
            weight_decay, batch_norm_decay=batch_norm_decay, is_training=is_training
        ),
    ):
        net = resnet_utils.conv2d_same(inputs, 64, 7, stride=2, scope="conv1")
        end_points[f"{root.name}/conv1"] = net
        net = layers.max_pool2d(net, 3, stride=2, padding="SAME", scope="pool1")
        end_points["pool2"] = net
        net = resnet_utils.stack_blocks_dense(net, blocks, end_points)
    end_points["pool3"] = end_points[f"{root.name}/{blocks[0].scope}"]
    end_points["pool4"] = end_points[f"{root.name}/{blocks[1].scope}"]
    end_points["pool5"] = net
    return net, end_points


def _resnet(num_units, inputs, scope, **options):
    """A ResNet v1 with the paper's four stages of `num_units` units each."""
    blocks = [
        resnet_v1_block(f"block{k + 1}", 64 * 2**k, units, stride)
        for k, (units, stride) in enumerate(zip(num_units, (2, 2, 2, 1)))
    ]
    return resnet_v1(inputs, blocks, scope=scope, **options)


def resnet_v1_50(inputs, scope="resnet_v1_50", **options):
    """ResNet-50. Args and Returns: see `resnet_v1`, whose other keywords are the options."""
    return _resnet((3, 4, 6, 3), inputs, scope, **options)


def resnet_v1_101(inputs, scope="resnet_v1_101", **options):
    """ResNet-101. Args and Returns: see `resnet_v1`, whose other keywords are the options."""
    return _resnet((3, 4, 23, 3), inputs, scope, **options)


def resnet_v1_152(inputs, scope="resnet_v1_152", **options):
    """ResNet-152. Args and Returns: see `resnet_v1`, whose other keywords are the options."""
    return _resnet((3, 8, 36, 3), inputs, scope, **options)
