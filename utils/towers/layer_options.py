"""What a tower asks of the layers that are built in it; layers know nothing else of towers."""

import contextlib
import contextvars
import dataclasses
from collections.abc import Callable

import tensorflow.compat.v1 as tf


@dataclasses.dataclass(frozen=True)
class LayerOptions:
    """How layers compute.

    Attributes:
        compute_dtype: of convolutions and matrix products; the variables stay float32.
        sum_over_towers: function of a float32 tensor that returns its sum over all towers, which
            is differentiable, for batch statistics of all towers together; None for a tower's own.
    """

    compute_dtype: tf.DType = tf.float32
    sum_over_towers: Callable | None = None


_DEFAULT = LayerOptions()
_CURRENT = contextvars.ContextVar("layer_options", default=_DEFAULT)


def current():
    """The LayerOptions of the enclosing `scope`."""
    return _CURRENT.get()


@contextlib.contextmanager
def scope(options):
    """Layers built within this context follow `options`.

    Args:
        options: LayerOptions.

    Yields:
        Nothing.
    """
    token = _CURRENT.set(options)
    try:
        yield
    finally:
        _CURRENT.reset(token)
