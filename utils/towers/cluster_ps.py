"""The session of a worker whose variables are on parameter servers.

The chief fills the parameter servers when it begins, and again when one of them has lost its
variables. The others wait until it has. A worker that ends the run says so there.
"""

import contextlib
import json
import threading
import time

import tensorflow.compat.v1 as tf
from absl import logging

from utils.towers import loop
from utils.towers.checkpoint_files import CheckpointError
from utils.towers.cluster import PS, WORKER, ClusterError
from utils.towers.cluster_losses import LOST, PAUSE_SECONDS, close_in_background
from utils.towers.cluster_mail import CALL_SECONDS, Mail, Mailbox, text_variable
from utils.towers.cluster_worker import WorkerSession, op_of_update

_SAY_SECONDS = 30.0
_TOKEN_SECONDS = 0.05  # between two looks for a token


class ParameterServerSession(WorkerSession):
    """The session of a worker whose variables are on parameter servers."""

    def __init__(self, cluster, place, *args):
        self._who_stopped = Mailbox(0).who_stopped
        with tf.device(place.step_device):
            # The chief's settings and the time of its beginning; empty while it prepares.
            chief = text_variable("cluster/chief")
        super().__init__(cluster, place, *args)
        self._mail = Mail(cluster, self._server.target, self._config)
        self._sync = self._engine.sync_update
        self._text = tf.placeholder(tf.string, [])
        self._chief = chief.read_value()
        self._set_chief = chief.assign(self._text).op
        self._reset = chief.initializer
        self._beginning = None  # which beginning of the chief this session belongs to
        self._step_value = self._engine.global_step.read_value()
        self._connected = False  # at least once, to the parameter servers of this cluster
        self._update_error = None
        self._token = None  # the last one of a synchronous update
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
        status = self._status[op_of_update(fetches)]
        while True:
            try:
                with self._step_in_progress():
                    values, (step, who, tokens) = self.session.run([fetches, status], feed)
                    self._note_stop(who.decode())
                    if tokens:
                        step = max(step, self._new_token(*tokens))
            except LOST as error:
                self._recover(error)
            else:
                self._failing_since = None
                self.step = int(step)
                return values

    def until_done(self, function):
        """See LocalSession.until_done."""
        while True:
            try:
                done = function()
            except (*LOST, CheckpointError) as failed:
                error = failed
            else:
                self._failing_since = None
                return done
            # A run that ends has no time to wait for its servers.
            loss = _loss_in(error)
            if loss is None or self.should_stop():
                raise error
            try:
                self._recover(loss)
            except loop.StopRequested:
                raise error from None

    def _needed(self):
        servers = [(PS, task) for task in range(len(self._cluster.ps_hosts))]
        if not self._cluster.is_chief:
            return [*servers, (WORKER, 0)], 0
        if self._engine.sync_update is None:
            return servers, 0
        return [*servers, *self._others()], self._engine.sync_update.backup_workers

    def _status_after(self, op, place):
        """(step, who stopped, [token]), read when an op of an update has run.

        No token where the op makes no synchronous update.
        """
        tokens = []
        if self._engine.sync_update and op is self._engine.train_op:
            tokens = [self._engine.sync_update.tokens.taken]
        with tf.control_dependencies([op]):
            return self._engine.global_step.read_value(), self._who_stopped.read_value(), tokens

    def _new_token(self, token):
        """Waits until this worker has the token of an update that it has not had yet.

        An older one is that of a worker which does not come for it: unless updates have gone on
        without that worker, it is put back.

        Args:
            token: the one that a step has taken.

        Returns:
            The new token, or 0 where the run ends meanwhile.
        """
        tokens = self._sync.tokens
        while token <= self._token:
            if token >= self.session.run(self._step_value):
                self.session.run(tokens.put_back, {tokens.returned: token})
                time.sleep(_TOKEN_SECONDS)
            self._note_stop(self._mail.who_stopped())
            if self.should_stop():
                return 0
            token = self.session.run(tokens.take)
        self._token = token
        return token

    def _note_stop(self, who):
        if who and not self._stopped:
            logging.info("%s ends the run", who)
            self._stopped = True

    # --------------------------------------------------------------------- begin and begin again

    def _start(self):
        """Begins; once more where a process is lost meanwhile, and with it what was prepared."""
        while True:
            try:
                self._connect()
                if self.is_chief:
                    self._prepare()
                else:
                    self._wait_until_ready()
                self.step = int(self.session.run(self._step_value))
                if self._sync:
                    self._token = self.session.run(self._sync.tokens.last)
                return
            except (*LOST, CheckpointError) as error:
                loss = _loss_in(error)
                if loss is None:
                    raise
                self._wait_to_begin_again(loss)

    def _connect(self):
        """Returns when all needed processes can be reached and have the same cluster.

        Raises:
            ClusterError: one cannot or has not.
        """
        self._watch.wait_until_reachable(PS)
        signatures = self._mail.signatures(
            lambda: self._watch.wait_until_reachable(PS), self._timeout
        )
        own = self._cluster.signature()
        for task, signature in enumerate(signatures):
            if signature != own:
                raise ClusterError(
                    f"{self._cluster.describe(PS, task)} belongs to {signature}, and this process"
                    f" to {own}; give all processes the same hosts and TensorFlow"
                )
        self._connected = True
        self._check_stopped()
        self._watch.wait_until_reachable(wait=self._check_stopped)

    def _prepare(self):
        """The chief's beginning: empties the parameter servers and fills them anew."""
        with tf.Session(self._server.target, self._graph, self._new_config()) as session:
            session.run(self._reset)
            if self._sync:  # there may be workers that wait in the run before this one
                self._end_waiting(session)
        config = self._new_config()
        config.operation_timeout_in_ms = int(1000 * CALL_SECONDS)
        tf.Session.reset(self._server.target, config=config)
        self.session = tf.Session(self._server.target, self._graph, self._new_config())
        self.session.run(self._reset)
        self._initialise(self.session)
        self.session.run(self._engine.synchronize)
        if self._sync:
            self.session.run(self._sync.chief_init_op)
            self._update_error = None
            threading.Thread(
                target=self._aggregate, args=(self.session,), name="aggregator", daemon=True
            ).start()
        self._beginning = time.time_ns()
        text = json.dumps([self._beginning, self._settings])
        self.session.run(self._set_chief, {self._text: text})

    def _wait_until_ready(self):
        """Returns when the chief has prepared the variables."""
        self.session = tf.Session(self._server.target, self._graph, self._new_config())
        said = time.monotonic() - _SAY_SECONDS + 2
        while True:
            self._check_stopped()
            try:
                options = tf.RunOptions(timeout_in_ms=int(1000 * CALL_SECONDS))
                if text := self.session.run(self._chief, options=options):
                    break
            except tf.errors.FailedPreconditionError:
                pass  # the chief has not come to that yet
            except LOST:  # a server began anew, which does not know this session
                self._close()
                self.session = tf.Session(self._server.target, self._graph, self._new_config())
            self._watch.wait_until_reachable(wait=self._check_stopped)
            if time.monotonic() - said > _SAY_SECONDS:
                logging.info("waiting for the chief to prepare the variables")
                said = time.monotonic()
            with self._stop.interruptible():
                time.sleep(min(PAUSE_SECONDS, self._timeout / 4))
        self._beginning, settings = json.loads(text)
        self._check_alike(0, settings)
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
            loop.Rewound: the data must go on from the newest checkpoint.
            loop.StopRequested, ClusterError: there is no session to be had.
        """
        if self._lost:
            self._give_up()
        self._check_stopped()
        update_error = self._update_error
        if isinstance(update_error, tf.errors.OpError) and not isinstance(update_error, LOST):
            raise update_error
        beginning = self._beginning
        self._wait_to_begin_again(error)
        self._start()
        # Batches that waited in a queue have gone with the session.
        if self._beginning != beginning or self._engine.queued_input:
            raise loop.Rewound

    def _wait_to_begin_again(self, error):
        """A pause after a loss.

        Raises:
            ClusterError: no step has been possible for the time-out.
        """
        self._failing_since = self._failing_since or time.monotonic()
        seconds = time.monotonic() - self._failing_since
        if seconds > self._timeout + CALL_SECONDS:
            raise ClusterError(
                f"no step for {seconds:.0f} seconds ({type(error).__name__}); look at the"
                " output of the other processes"
            ) from error
        logging.warning("the session is lost (%s); beginning again", type(error).__name__)
        self._close()
        time.sleep(min(PAUSE_SECONDS, self._timeout / 4))

    def _check_stopped(self):
        """Raises StopRequested where a worker has ended the run."""
        self._note_stop(self._mail.who_stopped())
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
            close_in_background(self.session)

    # -------------------------------------------------------------------------------------- end

    def _leave(self, failed):
        """Tells the others: that the run ends, if it does, and that this worker is done."""
        self._close()
        self._watch.missing()
        if not (self._connected and self._watch.has_servers()):
            return
        with contextlib.suppress(tf.errors.OpError):
            # Without the chief nothing would be saved any more; updates that all wait for need all.
            if failed or self._error or self._stop.requested or self.is_chief or self._sync:
                self._mail.say_stopped(self._cluster.describe(WORKER, self._cluster.task))
                if self._sync:
                    with self._short_session() as session:
                        self._end_waiting(session)
        with contextlib.suppress(tf.errors.OpError):
            self._mail.say_done()

    def _end_waiting(self, session):
        """Ends the waiting of all workers for an update."""
        with contextlib.suppress(tf.errors.CancelledError):  # that is over already
            session.run(self._sync.close_op)

    @contextlib.contextmanager
    def _short_session(self):
        """A session for what a parameter server does at once, if it is there."""
        config = self._new_config()
        config.operation_timeout_in_ms = int(1000 * CALL_SECONDS)
        session = tf.Session(self._server.target, graph=self._graph, config=config)
        try:
            yield session
        finally:
            close_in_background(session)

    def _new_config(self):
        config = tf.ConfigProto()
        config.CopyFrom(self._config)
        return config


def _loss_in(error):
    """An error, or what a save or a restore failed of, if it is the loss of a process."""
    cause = error.__cause__ if isinstance(error, CheckpointError) else error
    return cause if isinstance(cause, LOST) else None
