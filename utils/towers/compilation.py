"""`--xla`: the ops of a tower compiled by XLA.

TensorFlow makes clusters of the ops that are marked here and compiles each when it first meets the
shapes of its inputs, on CPUs and GPUs. Point searches, which are XLA programs of their own, stay
what they are.
"""

import contextlib

import tensorflow.compat.v1 as tf

# Not compiled: random numbers, because XLA draws others from the same seed, and batch norm, because
# XLA's statistics have fewer digits, which batches of few samples amplify up to the loss.
_LEFT_OUT = ("Random", "FusedBatchNorm")


@contextlib.contextmanager
def tower_scope(xla=True):
    """Within this context, ops and their gradients are marked to be compiled.

    Args:
        xla: False changes nothing.

    Yields:
        Nothing.
    """
    with contextlib.ExitStack() as stack:
        if xla:
            stack.enter_context(tf.xla.experimental.jit_scope(compile_ops=_compiles))
        yield


def _compiles(node):
    return not any(part in node.op for part in _LEFT_OUT)
