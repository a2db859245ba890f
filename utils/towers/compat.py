"""The one place that knows which TensorFlow this is."""

import tensorflow.compat.v1 as tf
from tensorflow.python.ops.data_flow_ops import StagingArea as StagingArea

REQUIRED = (2, 21)


def check_tensorflow(version=tf.__version__):
    """Refuses a TensorFlow older than the one all this was tested with.

    Args:
        version: version string, for example '2.21.0'.

    Raises:
        ValueError: the version is older than 2.21.
    """
    found = tuple(int(part) for part in version.split(".")[:2])
    if found < REQUIRED:
        raise ValueError(
            f"TensorFlow {version} is installed; {REQUIRED[0]}.{REQUIRED[1]} or newer is required:"
            " pip install -r requirements.txt"
        )


def copy_op(op, inputs):
    """A second op of the same type, attributes, device and gradient.

    Args:
        op: tf.Operation.
        inputs: list of tensors for it.

    Returns:
        The tf.Operation, named after `op` in the current name scope.
    """
    attributes = {name: op.node_def.attr[name] for name in op.node_def.attr if name != "_class"}
    with tf.device(op.device):
        copy = op.graph.create_op(
            op.type,
            inputs,
            [tensor.dtype for tensor in op.outputs],
            name=op.name.rpartition("/")[2],
            attrs=attributes,
            op_def=op.op_def,
        )
    copy._gradient_function = op._gradient_function  # of tf.custom_gradient
    return copy


def replace_input(op, index, tensor):
    """Lets an op that no session has run yet take another tensor.

    Args:
        op: tf.Operation.
        index: number of the input.
        tensor: of the same type and shape as the input so far.
    """
    op._update_input(index, tensor)
