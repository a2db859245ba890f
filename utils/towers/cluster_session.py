"""The session that a training loop works with: of one process, or of a worker in a cluster.

    session = cluster_session.make_session(cluster, place, net.engine, init, stop, timeout_seconds)
    graph.finalize()
    with session.started(initialise):
        session.defer_signals()
        step = session.step
        while step < FLAGS.max_steps and not session.should_stop():
            try:
                with session.interruptible():
                    batch = readers.get()
                loss, _ = session.run_step([net.loss, net.train_op], net.feed(batch))
            except loop.StopRequested:
                break
            step = session.step
        if session.is_chief:
            saver.save(session.session, session.current_step())

`initialise(session)` is called with the tf.Session in which variables are to be initialised or
restored, in the chief only, and again whenever the variables were lost: it must then take the
newest checkpoint. Make the saver under `tf.device(place.host)`, so that it writes on this machine.

What happens when a process of a cluster ends:

* A signal ends the run of all: every worker's loop ends, and the chief saves. So does the
  end of the chief, and of any worker of a synchronous run with parameter servers.
* With parameter servers, a worker that is killed is waited for (unless the run is asynchronous or
  has backup workers left), and goes on when it is started again. If a parameter server or the chief
  is killed, all wait until it is started again; the chief then restores the newest checkpoint, and
  `run_step` and `until_done` raise loop.Rewound in all, to begin with that checkpoint's data.
* Without parameter servers nobody can go on alone. All end with a sentence, without saving, since
  variables may be half updated; start all again with --restore.
* Whoever cannot be reached for `timeout_seconds` ends the run with one sentence.
"""

import contextlib

import tensorflow.compat.v1 as tf
from absl import logging

from utils.towers import checkpoint_restore, loop
from utils.towers.checkpoint_files import CheckpointError
from utils.towers.cluster_all_reduce import AllReduceSession
from utils.towers.cluster_ps import ParameterServerSession
from utils.towers.cluster_worker import op_of_update


def make_session(cluster, place, engine, init, stop, timeout_seconds=60, settings=None):
    """The session that belongs to a cluster; build it when the graph is complete.

    Args:
        cluster: utils.towers.cluster.Cluster, or None for one process.
        place: utils.towers.devices.Devices, of `Cluster.devices` in a cluster.
        engine: utils.towers.engine.Engine after `build_train_op`, or what has its `global_step`,
            `ops_of_update`, `synchronize`, `sync_update` and `queued_input`.
        init: op that initializes the variables.
        stop: utils.towers.loop.StopSignals.
        timeout_seconds: how long a process that cannot be reached is waited for.
        settings: {name: value} that must be the same in all workers; text, numbers, lists.

    Returns:
        LocalSession, ParameterServerSession or AllReduceSession.

    Raises:
        ClusterError: the port of this process cannot be used.
    """
    if cluster is None:
        return LocalSession(place, engine, stop)
    kind = ParameterServerSession if cluster.ps_hosts else AllReduceSession
    return kind(cluster, place, engine, init, stop, timeout_seconds, settings or {})


def train_and_rewind(session, train_from, found, path):
    """Trains, and once more from the newest checkpoint where a lost process made that necessary.

    Args:
        session: of `make_session`, started.
        train_from: function of a CheckpointReader, or of None for the beginning: trains with the
            data that follow that checkpoint.
        found: the CheckpointReader of --restore, or None.
        path: folder of the checkpoints.
    """
    while True:
        if found is None and session.step:  # a worker that joins a run, or that was rewound
            with contextlib.suppress(CheckpointError, OSError):
                found = checkpoint_restore.newest_undamaged(path)
            data = f"the data after {found.prefix}" if found else "the data from their beginning"
            logging.info("the run is at step %d: this worker goes on with %s", session.step, data)
        try:
            return train_from(found)
        except loop.Rewound:
            found = None


class LocalSession:
    """The session of a training in one process.

    Attributes:
        session: tf.Session.
        step: number of updates so far.
        is_chief: True.
    """

    is_chief = True

    def __init__(self, place, engine, stop):
        self._config = place.session_config()
        self._engine = engine
        self._stop = stop
        self.session = None
        self.step = 0

    @contextlib.contextmanager
    def started(self, initialise):
        """The session, open for the block.

        Args:
            initialise: function of a tf.Session that initialises or restores the variables.

        Yields:
            self.
        """
        with tf.Session(config=self._config) as self.session:
            initialise(self.session)
            self.session.run(self._engine.synchronize)
            self.step = int(self.session.run(self._engine.global_step))
            yield self

    def run(self, fetches, feed=None):
        """`session.run`, for what is no training step."""
        return self.session.run(fetches, feed)

    def until_done(self, function):
        """Result of a function that uses the session and makes no training step, such as a save.

        Where variables are lost meanwhile and restored, it is called again.

        Args:
            function: without arguments; it must take `self.session` anew in each call.
        """
        return function()

    def run_step(self, fetches, feed=None):
        """Runs a training step, or one batch of it.

        Args:
            fetches: list whose only op is one of the engine's `ops_of_update`.
            feed: feed_dict.

        Returns:
            The fetched values.
        """
        values = self.session.run(fetches, feed)
        if op_of_update(fetches) is self._engine.train_op:
            self.step += 1
        return values

    def should_stop(self):
        """Whether the loop is to end."""
        return bool(self._stop.requested)

    def interruptible(self):
        """A block, such as waiting for a batch, that a signal breaks off with StopRequested."""
        return self._stop.interruptible()

    def defer_signals(self):
        """From now on a signal ends the run between two steps, and in `interruptible` blocks."""
        self._stop.defer()

    def current_step(self):
        """Number of updates that the variables have seen, for saving them."""
        return self.step
