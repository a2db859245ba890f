"""The session that a training loop works with: of one process, or of a worker in a cluster.

    session = cluster_session.make_session(cluster, place, net.engine, init, stop, timeout_seconds)
    graph.finalize()
    with session.started(initialise):
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

* A signal ends the run of all: every worker's loop ends, and the chief saves.
* With parameter servers, a worker that is killed is waited for (unless the run is asynchronous or
  has backup workers left), and goes on when it is started again. If a parameter server or the chief
  is killed, all wait until it is started again; the chief then restores the newest checkpoint.
* Without parameter servers nobody can go on alone. All end with a sentence, without saving, since
  variables may be half updated; start all again with --restore.
* Whoever cannot be reached for `timeout_seconds` ends the run with one sentence.
"""

import contextlib
import queue
import threading
import time
import zlib

import tensorflow.compat.v1 as tf
from absl import logging

from utils.towers import cluster_hosts, cluster_server, collectives, loop
from utils.towers.cluster import PS, WORKER, ClusterError

COLLECTION = "cluster"  # variables that workers tell each other things with
_STOP_GROUP, _START_GROUP = 1001, 1002  # keys of collectives beside those of the towers
_PAUSE_SECONDS = 0.5
_CALL_SECONDS = 5.0  # for a question to a parameter server, which answers at once or is not there
_SAY_SECONDS = 30.0

# What a session raises whose processes end or begin anew; other errors are faults of the program.
_LOST = (
    tf.errors.AbortedError,
    tf.errors.CancelledError,
    tf.errors.DeadlineExceededError,
    tf.errors.FailedPreconditionError,
    tf.errors.NotFoundError,
    tf.errors.OutOfRangeError,
    tf.errors.UnavailableError,
)


def make_session(cluster, place, engine, init, stop, timeout_seconds=60):
    """The session that belongs to a cluster; build it when the graph is complete.

    Args:
        cluster: utils.towers.cluster.Cluster, or None for one process.
        place: utils.towers.devices.Devices, of `Cluster.devices` in a cluster.
        engine: utils.towers.engine.Engine after `build_train_op`, or what has its `global_step`,
            `ops_of_update`, `synchronize` and `sync_update`.
        init: op that initializes the variables.
        stop: utils.towers.loop.StopSignals.
        timeout_seconds: how long a process that cannot be reached is waited for.

    Returns:
        LocalSession, ParameterServerSession or AllReduceSession.

    Raises:
        ClusterError: the port of this process cannot be used.
    """
    if cluster is None:
        return LocalSession(place, engine, stop)
    kind = ParameterServerSession if cluster.ps_hosts else AllReduceSession
    return kind(cluster, place, engine, init, stop, timeout_seconds)


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

    def run_step(self, fetches, feed=None):
        """Runs a training step, or one batch of it.

        Args:
            fetches: list whose only op is one of the engine's `ops_of_update`.
            feed: feed_dict.

        Returns:
            The fetched values.
        """
        values = self.session.run(fetches, feed)
        if _op_of_update(fetches) is self._engine.train_op:
            self.step += 1
        return values

    def should_stop(self):
        """Whether the loop is to end."""
        return bool(self._stop.requested)

    def interruptible(self):
        """A block, such as waiting for a batch, that a signal breaks off with StopRequested."""
        return self._stop.interruptible()

    def current_step(self):
        """Number of updates that the variables have seen, for saving them."""
        return self.step


class _ClusterSession:
    """What both kinds of cluster have in common; see LocalSession for the methods.

    Attributes:
        session: tf.Session, another one after a loss.
        step: number of updates so far, of all workers.
        is_chief: whether this process saves and writes summaries.
    """

    def __init__(self, cluster, place, engine, init, stop, timeout_seconds):
        self._cluster = cluster
        self._config = place.session_config()
        self._engine = engine
        self._init = init
        self._stop = stop
        self._timeout = timeout_seconds
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

    def should_stop(self):
        """Whether the loop is to end."""
        return self._stopped

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
            _close_in_background(self.session)
            self.session = None


class ParameterServerSession(_ClusterSession):
    """The session of a worker whose variables are on parameter servers."""

    def __init__(self, cluster, place, *args):
        self._mailboxes = [cluster_server.Mailbox(task) for task in range(len(cluster.ps_hosts))]
        with tf.device(place.step_device):
            self._ready = _variable("cluster/ready", tf.bool, False)
            self._who_stopped = _variable("cluster/who_stopped", tf.string, "")
        super().__init__(cluster, place, *args)
        self._sync = self._engine.sync_update
        self._text = tf.placeholder(tf.string, [])
        self._ops = {
            "ready": self._ready.read_value(),
            "who stopped": self._who_stopped.read_value(),
            "set ready": self._ready.assign(True).op,
            "set stopped": self._who_stopped.assign(self._text).op,
            "reset": tf.group(self._ready.initializer, self._who_stopped.initializer),
            "signatures": [mailbox.signature.read_value() for mailbox in self._mailboxes],
            "done": [mailbox.done.enqueue(cluster.task) for mailbox in self._mailboxes],
        }
        self._step_value = self._engine.global_step.read_value()
        self._connected = False  # at least once, to the parameter servers of this cluster
        self._aggregator = None
        self._update_error = None
        self._failing_since = None
        self._graph = tf.get_default_graph()

    def interruptible(self):
        """A block, such as waiting for a batch, that a signal breaks off with StopRequested."""
        return self._stop.interruptible()

    def should_stop(self):
        """Whether the loop is to end, here or in another worker."""
        return self._stopped or bool(self._stop.requested)

    def current_step(self):
        """Number of updates that the variables have seen.

        With backup workers or asynchronous workers others may go on while the chief saves: the
        variables of a checkpoint are then up to a few updates apart, as is usual with such runs.
        """
        return int(self.session.run(self._step_value))

    def run_step(self, fetches, feed=None):
        """Runs a training step, or one batch of it; again, where processes began anew meanwhile.

        Args, Returns: see LocalSession.

        Raises:
            loop.StopRequested: the run ends.
            ClusterError: a process cannot be reached for the time-out.
        """
        status = self._status[_op_of_update(fetches)]
        while True:
            try:
                with self._step_in_progress():
                    values, (self.step, who) = self.session.run([fetches, status], feed)
            except _LOST as error:
                self._recover(error)
            else:
                self._failing_since = None
                self._note_stop(who)
                return values

    def _needed(self):
        servers = [(PS, task) for task in range(len(self._cluster.ps_hosts))]
        if not self._cluster.is_chief:
            return [*servers, (WORKER, 0)], 0
        if self._engine.sync_update is None:
            return servers, 0
        return [*servers, *self._others()], self._engine.sync_update.backup_workers

    def _status_after(self, op, place):
        """(step, who stopped), read when an op of an update has run."""
        with tf.control_dependencies([op]):
            return self._engine.global_step.read_value(), self._who_stopped.read_value()

    def _note_stop(self, who):
        if who and not self._stopped:
            logging.info("%s ends the run", who.decode())
            self._stopped = True

    # --------------------------------------------------------------------- begin and begin again

    def _start(self):
        self._connect()
        if self.is_chief:
            self._prepare()
        else:
            self._wait_until_ready()
        self.step = int(self.session.run(self._step_value))

    def _connect(self):
        """Returns when all needed processes can be reached and have the same cluster.

        Raises:
            ClusterError: one cannot or has not.
        """
        self._watch.wait_until_reachable(PS)
        signatures = self._signatures()
        own = self._cluster.signature()
        for task, signature in enumerate(signatures):
            if signature.decode() != own:
                raise ClusterError(
                    f"{self._cluster.describe(PS, task)} belongs to {signature.decode()}, and this"
                    f" process to {own}; give all processes the same hosts and TensorFlow"
                )
        self._connected = True
        self._watch.wait_until_reachable()

    def _signatures(self):
        """What the parameter servers say about themselves.

        Asked in a thread, because TensorFlow waits for ever for something that accepts connections
        and is no server of it.

        Raises:
            ClusterError: they say nothing.
        """
        answers = queue.SimpleQueue()

        def ask():
            while True:
                try:
                    with self._short_session() as session:
                        answers.put(session.run(self._ops["signatures"]))
                    return
                except _LOST:  # a server that has only just begun
                    time.sleep(min(_PAUSE_SECONDS, self._timeout / 4))

        threading.Thread(target=ask, name="first question", daemon=True).start()
        deadline = time.monotonic() + max(self._timeout, _CALL_SECONDS)
        while True:
            with contextlib.suppress(queue.Empty):
                return answers.get(timeout=min(_PAUSE_SECONDS, self._timeout / 4))
            self._watch.wait_until_reachable(PS)
            if time.monotonic() > deadline:
                servers = range(len(self._mailboxes))
                names = ", ".join(self._cluster.describe(PS, task) for task in servers)
                raise ClusterError(
                    f"not all of {names} answer as parameter servers; check that these ports are"
                    " theirs"
                )

    def _prepare(self):
        """The chief's beginning: empties the parameter servers and fills them anew."""
        with tf.Session(self._server.target, self._graph, self._new_config()) as session:
            session.run(self._ops["reset"])
            if self._sync:  # there may be workers that wait in the run before this one
                self._end_waiting(session)
        tf.Session.reset(self._server.target, config=self._new_config())
        self.session = tf.Session(self._server.target, self._graph, self._new_config())
        self.session.run(self._ops["reset"])
        self._initialise(self.session)
        self.session.run(self._engine.synchronize)
        if self._sync:
            self.session.run(self._sync.chief_init_op)
            self._update_error = None
            self._aggregator = threading.Thread(
                target=self._aggregate, args=(self.session,), name="aggregator", daemon=True
            )
            self._aggregator.start()
        self.session.run(self._ops["set ready"])

    def _wait_until_ready(self):
        """Returns when the chief has prepared the variables."""
        self.session = tf.Session(self._server.target, self._graph, self._new_config())
        said = time.monotonic() - _SAY_SECONDS + 2
        while True:
            self._check_stopped()
            with contextlib.suppress(*_LOST):
                if self._ask("ready"):
                    break
            self._watch.wait_until_reachable()
            if time.monotonic() - said > _SAY_SECONDS:
                logging.info("waiting for the chief to prepare the variables")
                said = time.monotonic()
            with self._stop.interruptible():
                time.sleep(min(_PAUSE_SECONDS, self._timeout / 4))
        if self._sync:
            self.session.run(self._sync.worker_init_op)
        self.session.run(self._engine.synchronize)

    def _aggregate(self, session):
        """Makes updates as long as there are gradients; in a thread of the chief."""
        try:
            while True:
                session.run(self._sync.aggregate_op)
        except (tf.errors.OpError, RuntimeError) as error:  # RuntimeError: the session is closed
            if session is self.session:
                self._update_error = error
                with contextlib.suppress(tf.errors.OpError, RuntimeError):
                    self._end_waiting(session)

    def _recover(self, error):
        """After a lost session: returns when there is a new one.

        Raises:
            loop.StopRequested, ClusterError: there is none to be had.
        """
        if self._lost:
            self._give_up()
        self._check_stopped()
        update_error = self._update_error
        if isinstance(update_error, tf.errors.OpError) and not isinstance(update_error, _LOST):
            raise update_error
        self._failing_since = self._failing_since or time.monotonic()
        while True:
            seconds = time.monotonic() - self._failing_since
            if seconds > self._timeout + _CALL_SECONDS:
                raise ClusterError(
                    f"no step for {seconds:.0f} seconds ({type(error).__name__}); look at the"
                    " output of the other processes"
                ) from error
            logging.warning("the session is lost (%s); beginning again", type(error).__name__)
            self._close()
            try:
                return self._start()
            except _LOST as again:
                error = again
                time.sleep(min(_PAUSE_SECONDS, self._timeout / 4))

    def _check_stopped(self):
        """Raises StopRequested where a worker has ended the run."""
        with contextlib.suppress(*_LOST):
            self._note_stop(self._ask("who stopped"))
        if self._stopped:
            raise loop.StopRequested

    def _give_up(self):
        """A process is gone. The chief saves what the parameter servers have, if they are there."""
        error = ClusterError(self._lost)
        if not self.is_chief or not self._watch.has_servers():
            raise error
        self._error = error
        self._stopped = True
        raise loop.StopRequested

    def _break_step(self):
        if self._sync and self.is_chief and self._watch.has_servers():
            with contextlib.suppress(tf.errors.OpError):
                self._end_waiting(self.session)
        else:
            _close_in_background(self.session)

    # -------------------------------------------------------------------------------------- end

    def _leave(self, failed):
        """Tells the others: that the run ends, if it does, and that this worker is done."""
        self._close()
        self._watch.missing()
        if not (self._connected and self._watch.has_servers()):
            return
        with self._short_session() as session, contextlib.suppress(tf.errors.OpError):
            if failed or self._error or self._stop.requested:
                who = self._cluster.describe(WORKER, self._cluster.task)
                session.run(self._ops["set stopped"], {self._text: who})
                if self._sync:
                    self._end_waiting(session)
            session.run(self._ops["done"])

    def _end_waiting(self, session):
        """Ends the waiting of all workers for an update."""
        with contextlib.suppress(tf.errors.CancelledError):  # that is over already
            session.run(self._sync.close_op)

    def _close(self):
        self._aggregator = None  # ends with its session
        super()._close()

    def _ask(self, what):
        options = tf.RunOptions(timeout_in_ms=int(1000 * _CALL_SECONDS))
        return self.session.run(self._ops[what], options=options)

    @contextlib.contextmanager
    def _short_session(self):
        """A session for questions that a parameter server answers at once, if it is one."""
        config = self._new_config()
        config.operation_timeout_in_ms = int(1000 * _CALL_SECONDS)
        session = tf.Session(self._server.target, graph=self._graph, config=config)
        try:
            yield session
        finally:
            _close_in_background(session)

    def _new_config(self):
        config = tf.ConfigProto()
        config.CopyFrom(self._config)
        return config


class AllReduceSession(_ClusterSession):
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
            self._begin = self._chiefs_values(tf.global_variables())

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
        status = self._status[_op_of_update(fetches)]
        feed = {**(feed or {}), self._vote: float(bool(self._stop.requested))}
        try:
            with self._step_in_progress():
                values, (step, votes) = self.session.run([fetches, status], feed)
        except _LOST as error:
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

    def _chiefs_values(self, variables):
        """(op that gives every worker the chief's variables, checksum of the chief's signature)."""
        group = collectives.CollectiveGroup(
            1, num_workers=self._cluster.num_workers, group_key=_START_GROUP
        )
        checksum = tf.constant(zlib.crc32(self._cluster.signature().encode()), tf.int64)
        values = [checksum, *(variable.read_value() for variable in variables)]
        if not self.is_chief:
            values = [tf.zeros_like(value) for value in values]
        checksum, *sums = group.all_reduce_list(0, values)
        if self.is_chief:
            return tf.group(*sums), checksum
        return tf.group(*(v.assign(value) for v, value in zip(variables, sums))), checksum

    def _start(self):
        self._watch.wait_until_reachable()
        self.session = tf.Session(self._server.target, config=self._config)
        if self.is_chief:
            self._initialise(self.session)
        else:
            self.session.run(self._init)
        try:
            _, checksum = self.session.run(self._begin)
        except _LOST as error:
            raise ClusterError(self._reason(error)) from error
        if checksum != zlib.crc32(self._cluster.signature().encode()):
            raise ClusterError(
                f"{self._cluster.describe(WORKER, 0)} has another list of workers, or another"
                " TensorFlow; give all processes the same"
            )
        self.session.run(self._engine.synchronize)
        self.step = int(self.session.run(self._engine.global_step))

    def _reason(self, error):
        """One sentence about a step that failed, with the address of who is gone if it shows."""
        for _ in range(10):
            missing = [] if self._lost else self._watch.missing()
            if self._lost or missing:
                break
            time.sleep(_PAUSE_SECONDS)
        names = ", ".join(self._cluster.describe(*name) for name in missing) or "a worker"
        lost = self._lost or f"{names} ended in the middle of the run ({type(error).__name__})"
        return f"{lost}; nothing was saved since the last checkpoint, start all with --restore"

    def _break_step(self):
        _close_in_background(self.session)

    def _leave(self, failed):
        self._close()


def _op_of_update(fetches):
    """The op among some fetches."""
    [op] = [fetch for fetch in fetches if isinstance(fetch, tf.Operation)]
    return op


def _variable(name, dtype, value):
    return tf.get_variable(
        name,
        [],
        dtype,
        tf.constant_initializer(value),
        trainable=False,
        collections=[COLLECTION],
        use_resource=True,
    )


def _close_in_background(session):
    """Closes a session; that waits as long as a parameter server that it had is gone."""

    def close():
        with contextlib.suppress(tf.errors.OpError):
            session.close()

    threading.Thread(target=close, name="closing a session", daemon=True).start()
