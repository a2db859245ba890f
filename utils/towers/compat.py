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
