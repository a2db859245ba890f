"""What a session raises whose processes end or begin anew, and how it is closed."""

import contextlib
import threading

import tensorflow.compat.v1 as tf

PAUSE_SECONDS = 0.5  # between two tries

# Other errors are faults of the program.
LOST = (
    tf.errors.AbortedError,
    tf.errors.CancelledError,
    tf.errors.DeadlineExceededError,
    tf.errors.FailedPreconditionError,
    tf.errors.NotFoundError,
    tf.errors.OutOfRangeError,
    tf.errors.UnavailableError,
    tf.errors.UnknownError,  # of gRPC, where a process ends while it answers
)


def close_in_background(session):
    """Closes a session; that waits as long as a parameter server that it had is gone."""

    def close():
        with contextlib.suppress(tf.errors.OpError):
            session.close()

    threading.Thread(target=close, name="closing a session", daemon=True).start()
