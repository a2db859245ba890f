"""The session of a worker that has its own variables and exchanges gradients with the others."""

import contextlib
import math
import queue
import threading
import time
import zlib

import numpy as np
import tensorflow.compat.v1 as tf

from utils.towers import collectives, loop
from utils.towers.cluster import WORKER, ClusterError
from utils.towers.cluster_losses import LOST, PAUSE_SECONDS, close_in_background
from utils.towers.cluster_worker import WorkerSession, op_of_update

# Keys of collectives beside those of the towers.
_STOP_GROUP, _START_GROUP, _TEXT_GROUP = 1001, 1002, 1003
_LONGEST_TEXT = 16384  # bytes of a worker's settings
_MEETING_SECONDS = 20.0  # least time for all workers to meet once they can be reached


class AllReduceSession(WorkerSession):
    """The session of a worker that has its own variables and exchanges gradients with the others.

    All begin with the chief's values.
    """

    def __init__(self, cluster, place, *args):
        workers = cluster.num_workers
        with tf.device(place.host):
            self._vote = tf.placeholder_with_default(0.0, [])
            group = collectives.CollectiveGroup(1, num_workers=workers, group_key=_STOP_GROUP)
            self._votes = group.sum_over_towers(0)(self._vote)
        super().__init__(cluster, place, *args)
        with tf.device(place.host):
            self._rows = self._exchanged(self._text_as_row())
            self._begin = self._chiefs_values(tf.global_variables())

    def defer_signals(self):
        """Nothing: a signal ends the run of all workers with a step, since they have met."""

    def interruptible(self):
        """A block that a signal does not break off: the others wait for this worker's step."""
        return contextlib.nullcontext()

    def current_step(self):
        """Number of updates that the variables have seen, for saving them."""
        return self.step

    def run_step(self, fetches, feed=None):
        """Runs a training step, or one batch of it.

        Args, Returns: see LocalSession.

        Raises:
            ClusterError: a worker is gone.
        """
        status = self._status[op_of_update(fetches)]
        feed = {**(feed or {}), self._vote: self._stop_vote()}
        try:
            with self._step_in_progress():
                values, (step, votes) = self.session.run([fetches, status], feed)
        except LOST as error:
            raise ClusterError(self._reason(error)) from error
        self.step = int(step)
        self._stopped = self._stopped or votes > 0
        return values

    def _needed(self):
        return self._others(), 0

    def _status_after(self, op, place):
        """(step, number of workers that want to stop), read when an op of an update has run."""
        with tf.control_dependencies([op]):
            return self._engine.global_step.read_value(), self._votes

    def _text_as_row(self):
        """Checksum of the cluster's signature, and the settings as bytes: what must be alike."""
        text = np.frombuffer(self._settings.encode(), np.uint8)
        row = np.zeros(1 + _LONGEST_TEXT, np.int64)
        row[0] = zlib.crc32(self._cluster.signature().encode())
        row[1 : 1 + len(text)] = text
        return row

    def _exchanged(self, row):
        """Every worker's row, [workers, length], and the number of workers that want to stop."""
        rows = np.zeros([self._cluster.num_workers, len(row)], row.dtype)
        rows[self._cluster.task] = row
        return self._summed([tf.constant(rows), self._vote], _TEXT_GROUP)

    def _chiefs_values(self, variables):
        """An op that gives every worker the chief's variables."""
        values = [variable.read_value() for variable in variables]
        if not self.is_chief:
            values = [tf.zeros_like(value) for value in values]
        sums = self._summed(values, _START_GROUP)
        if self.is_chief:
            return tf.group(*sums)
        return tf.group(*(v.assign(value) for v, value in zip(variables, sums)))

    def _summed(self, values, group_key):
        """Sums over the workers."""
        workers = self._cluster.num_workers
        group = collectives.CollectiveGroup(1, num_workers=workers, group_key=group_key)
        return group.all_reduce_list(0, values)

    def _start(self):
        self._watch.wait_until_reachable()
        self._stop.only_note()  # who leaves now would keep the others waiting
        self.session = tf.Session(self._server.target, config=self._config)
        limit = max(self._timeout, _MEETING_SECONDS)
        self._check_rows(self._watched(self._rows, {self._vote: self._stop_vote()}, limit))
        if self.is_chief:
            self._initialise(self.session)
        else:
            self.session.run(self._init)
        self._watched(self._begin)
        self.session.run(self._engine.synchronize)
        self.step = int(self.session.run(self._engine.global_step))

    def _watched(self, fetches, feed=None, limit=math.inf):
        """`session.run` of what all workers must run, while it is watched whether they can.

        Args:
            fetches, feed: of `session.run`.
            limit: seconds that it may take.

        Raises:
            ClusterError: a worker is gone, or they do not meet.
        """
        answers = queue.SimpleQueue()

        def run():
            try:
                answers.put((self.session.run(fetches, feed), None))
            except LOST as error:
                answers.put((None, error))

        threading.Thread(target=run, name="meeting", daemon=True).start()
        begun = time.monotonic()
        while True:
            with contextlib.suppress(queue.Empty):
                values, error = answers.get(timeout=min(PAUSE_SECONDS, self._timeout / 4))
                if error:
                    raise ClusterError(self._reason(error)) from error
                return values
            self._watch.missing()
            lost = self._watch.lost()
            if lost:
                raise ClusterError(lost)
            if time.monotonic() - begun > limit:
                own = (WORKER, self._cluster.task)
                others = [name for name in self._others() if name != own]
                names = ", ".join(self._cluster.describe(*name) for name in others)
                raise ClusterError(
                    f"not all of {names} take part; check that these ports are theirs, and give"
                    " all processes the same list of workers"
                )

    def _stop_vote(self):
        """1 where this worker has been asked to stop, else 0."""
        return float(bool(self._stop.requested))

    def _check_rows(self, exchanged):
        """Looks at what `_exchanged` gives.

        Raises:
            ClusterError: the workers are not alike.
            loop.StopRequested: one of them has been asked to stop.
        """
        rows, votes = exchanged
        own = self._cluster.task
        for task, row in enumerate(rows):
            if row[0] != rows[own][0]:
                raise ClusterError(
                    f"{self._cluster.describe(WORKER, task)} has another list of workers, or"
                    " another TensorFlow; give all processes the same"
                )
            self._check_alike(task, bytes(row[1:].astype(np.uint8)).rstrip(b"\0"))
        if votes:
            raise loop.StopRequested

    def _reason(self, error):
        """One sentence about a step that failed, with the address of who is gone if it shows."""
        for _ in range(10):
            missing = [] if self._lost else self._watch.missing()
            if self._lost or missing:
                break
            time.sleep(PAUSE_SECONDS)
        names = ", ".join(self._cluster.describe(*name) for name in missing) or "a worker"
        lost = self._lost or f"{names} ended in the middle of the run ({type(error).__name__})"
        return f"{lost}; nothing was saved since the last checkpoint, start all with --restore"

    def _break_step(self):
        close_in_background(self.session)

    def _leave(self, failed):
        self._close()
