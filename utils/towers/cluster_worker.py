"""What a worker's session does in both kinds of cluster: it begins, ends, and notices losses."""

import contextlib
import json
import threading

import tensorflow.compat.v1 as tf

from utils.towers import cluster_hosts, cluster_server
from utils.towers.cluster import WORKER
from utils.towers.cluster_losses import close_in_background


class WorkerSession:
    """What both kinds of cluster have in common; see LocalSession for the methods.

    Attributes:
        session: tf.Session, another one after a loss.
        step: number of updates so far, of all workers.
        is_chief: whether this process saves and writes summaries.
    """

    def __init__(self, cluster, place, engine, init, stop, timeout_seconds, settings):
        self._cluster = cluster
        self._config = place.session_config()
        self._engine = engine
        self._init = init
        self._stop = stop
        self._timeout = timeout_seconds
        self._settings = json.dumps(settings)
        self._server = cluster_server.start_server(cluster, self._config)
        needed, spare = self._needed()
        self._watch = cluster_hosts.HostWatch(cluster, needed, timeout_seconds, spare)
        self._lost = None  # sentence about a process that is gone
        self._error = None  # with which the run ends after the chief has saved
        self._stopped = False
        self._in_step = False
        self._lock = threading.Lock()  # of what the watching thread looks at
        self._initialise = None
        self.session = None
        self.step = 0
        self.is_chief = cluster.is_chief
        with tf.device(place.host):
            self._status = {op: self._status_after(op, place) for op in engine.ops_of_update}

    @contextlib.contextmanager
    def started(self, initialise):
        """As LocalSession.started; `initialise` is called in the chief only.

        Raises:
            ClusterError: a process cannot be reached for the time-out.
        """
        self._initialise = initialise
        failed = True
        try:
            self._start()
            self._watch.start(self._on_lost)
            yield self
            failed = False
        finally:
            self._watch.stop()
            self._leave(failed)
        if self._error:
            raise self._error

    def run(self, fetches, feed=None):
        """`session.run`, for what is no training step."""
        return self.session.run(fetches, feed)

    def until_done(self, function):
        """As LocalSession.until_done; these variables are here, and lost with this process."""
        return function()

    def defer_signals(self):
        """As LocalSession.defer_signals."""
        self._stop.defer()

    def should_stop(self):
        """Whether the loop is to end."""
        return self._stopped

    def _check_alike(self, other, settings):
        """Raises ClusterError where another worker has other settings.

        Args:
            other: its number.
            settings: its `_settings`.
        """
        self._cluster.check_alike(json.loads(self._settings), other, json.loads(settings))

    def _others(self):
        return [(WORKER, task) for task in range(self._cluster.num_workers)]

    @contextlib.contextmanager
    def _step_in_progress(self):
        """A block that the watching thread may break off."""
        if self._lost:
            self._watch.missing()
            self._lost = self._watch.lost()
        with self._lock:
            self._in_step = True
        try:
            yield
        finally:
            with self._lock:
                self._in_step = False

    def _on_lost(self, sentence):
        with self._lock:
            self._lost = sentence
            if self._in_step:
                self._break_step()

    def _close(self):
        if self.session is not None:
            close_in_background(self.session)
            self.session = None


def op_of_update(fetches):
    """The op among some fetches of a training step."""
    [op] = [fetch for fetch in fetches if isinstance(fetch, tf.Operation)]
    return op
