"""Settings of the whole test run, made before any test imports TensorFlow."""

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
# The golden numbers come from TensorFlow's plain kernels. Another kernel library rounds otherwise,
# which batch norm over a few pixels and Adam's first steps amplify up to the tolerances.
os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "0")
