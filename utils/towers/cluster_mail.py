"""What parameter servers and workers tell each other beside the training.

It is kept on the parameter servers, where it outlives a new start of the training.
"""

import contextlib
import queue
import threading
import time

import tensorflow.compat.v1 as tf

from utils.towers import devices
from utils.towers.cluster import PS, ClusterError
from utils.towers.cluster_losses import LOST, PAUSE_SECONDS, close_in_background

CONTAINER = "cluster"  # of variables that a new start of the training leaves alone
CALL_SECONDS = 5.0  # for a question to a parameter server, which answers at once or is not there


class Mailbox:
    """The place on one parameter server; build it in every process that uses it.

    Attributes:
        signature: string variable, `Cluster.signature` of the parameter server.
        who_stopped: string variable, the worker that has ended the run, or ''.
        done: queue of the numbers of workers that have ended.

    Args:
        task: number of the parameter server.
    """

    def __init__(self, task):
        graph = tf.get_default_graph()
        with graph.container(CONTAINER), tf.device(devices.parameter_server(task)):
            self.signature = text_variable(f"cluster/signature_{task}")
            self.who_stopped = text_variable(f"cluster/who_stopped_{task}")
            self.done = tf.FIFOQueue(-1, [tf.int32], [[]], shared_name=f"cluster/done_{task}")


class Mail:
    """A worker's questions to the parameter servers, and what it tells them.

    Each goes over a session of its own, of a graph that holds nothing else: it works whatever
    becomes of the training's session.

    Args:
        cluster: utils.towers.cluster.Cluster.
        target: of the worker's tf.train.Server.
        config: ConfigProto of the training's sessions.
    """

    def __init__(self, cluster, target, config):
        self._cluster = cluster
        self._target = target
        self._config = tf.ConfigProto()
        self._config.CopyFrom(config)
        self._config.operation_timeout_in_ms = int(1000 * CALL_SECONDS)
        with tf.Graph().as_default() as self._graph:
            boxes = [Mailbox(task) for task in range(len(cluster.ps_hosts))]
            self._text = tf.placeholder(tf.string, [])
            self._signatures = [box.signature.read_value() for box in boxes]
            self._who_stopped = boxes[0].who_stopped.read_value()
            self._stop = [box.who_stopped.assign(self._text).op for box in boxes]
            self._done = [box.done.enqueue(cluster.task) for box in boxes]
            self._graph.finalize()

    def who_stopped(self):
        """Name of the worker that has ended the run, or ''; '' where nobody answers."""
        with contextlib.suppress(*LOST):
            return self._run(self._who_stopped).decode()
        return ""

    def say_stopped(self, who):
        """Tells that a worker ends the run."""
        self._run(self._stop, {self._text: who})

    def say_done(self):
        """Tells that this worker has ended."""
        self._run(self._done)

    def signatures(self, wait, timeout_seconds):
        """What the parameter servers say about themselves.

        Asked in a thread, because TensorFlow waits for ever for something that accepts connections
        and is no server of it.

        Args:
            wait: called again and again meanwhile.
            timeout_seconds: how long they may say nothing.

        Returns:
            List of texts.

        Raises:
            ClusterError: they say nothing.
        """
        pause = min(PAUSE_SECONDS, timeout_seconds / 4)
        answers = queue.SimpleQueue()

        def ask():
            while True:
                try:
                    return answers.put(self._run(self._signatures))
                except LOST:  # a server that has only just begun
                    time.sleep(pause)

        threading.Thread(target=ask, name="first question", daemon=True).start()
        deadline = time.monotonic() + max(timeout_seconds, CALL_SECONDS)
        while True:
            with contextlib.suppress(queue.Empty):
                return [text.decode() for text in answers.get(timeout=pause)]
            wait()
            if time.monotonic() > deadline:
                servers = range(len(self._cluster.ps_hosts))
                names = ", ".join(self._cluster.describe(PS, task) for task in servers)
                raise ClusterError(
                    f"not all of {names} answer as parameter servers; check that these ports are"
                    " theirs"
                )

    def _run(self, fetches, feed=None):
        session = tf.Session(self._target, graph=self._graph, config=self._config)
        try:
            return session.run(fetches, feed)
        finally:
            close_in_background(session)


def text_variable(name):
    """A string variable that is not saved with a training."""
    return tf.get_variable(
        name,
        [],
        tf.string,
        tf.constant_initializer(""),
        trainable=False,
        collections=[CONTAINER],
        use_resource=True,
    )
