"""Helpers of a training loop: progress line, non-finite guard, clean stop on signals."""

import contextlib
import os
import signal
import sys
import threading
import time

import tensorflow.compat.v1 as tf

from utils.towers import feeding

_WATCH = "signals"  # name of the thread that reads signals


class NonFiniteLossError(ValueError):
    """A loss was NaN or infinite; the message says where."""


class StopRequested(BaseException):
    """SIGINT or SIGTERM arrived while nothing was half done."""


class Rewound(Exception):
    """The variables were restored meanwhile: the data must go on from that checkpoint too."""


def first_nonfinite(towers):
    """Where the first NaN or infinity among the towers' loss terms is.

    Args:
        towers: list of utils.towers.context.Tower.

    Returns:
        int32 scalar: index into `loss_term_names(towers)`, or -1. A few bytes to fetch with every
            step.
    """
    terms = [term for tower in towers for term in tower.loss_terms]
    bad = tf.cast(tf.logical_not(tf.is_finite(tf.stack(terms))), tf.int32)
    return tf.where(tf.reduce_any(bad > 0), tf.argmax(bad, output_type=tf.int32), -1)


def loss_term_names(towers):
    """(tower, term name) for every index that `first_nonfinite` can return."""
    return [
        (tower.index, term.op.name.removeprefix(tower.scope))
        for tower in towers
        for term in tower.loss_terms
    ]


def check_finite(position, towers, *, step, files):
    """Stops the run on a non-finite loss.

    Args:
        position: the fetched value of `first_nonfinite`.
        towers: the same list of Tower.
        step: the step that gave it.
        files: names of the batch's samples, in the batch's order.

    Raises:
        NonFiniteLossError: names step, loss term, tower and the tower's files.
    """
    if position < 0:
        return
    tower, term = loss_term_names(towers)[position]
    sizes = feeding.split_sizes(len(files), len(towers))
    own = files[sum(sizes[:tower]) : sum(sizes[: tower + 1])]
    raise NonFiniteLossError(
        f"step {step}: {term} of tower {tower} is not finite; nothing of this step was"
        f" saved. Files of that tower's batch: {', '.join(own)}. Check their labels, or lower"
        " the learning rate"
    )


def run_script(train, stopping_errors):
    """Runs a training script and ends the process.

    The exit code is 0, 1 after an error, or 128 + the number of the signal that ended it.

    Args:
        train: function of a StopSignals.
        stopping_errors: exception classes that end the run with one sentence; others are faults of
            the program and keep their traceback.
    """
    with StopSignals() as stop:
        try:
            train(stop)
        except StopRequested:
            print("stopped before the first step; nothing to save")
        except stopping_errors as error:
            print(f"error: {error}", file=sys.stderr)
            _exit(1)
    _exit(stop.exit_code)


def _exit(code):
    """Ends the process.

    A session of a cluster may leave a thread behind inside TensorFlow, waiting for a process that
    is gone. Python's own way of ending would end such a thread, and with it, by abort, the process.
    """
    if any(thread.daemon and thread.name != _WATCH for thread in threading.enumerate()):
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


class Every:
    """Whether a multiple of a number of steps has been reached, also where steps are jumped over.

    Args:
        steps: the number.
        start: first step that counts.
    """

    def __init__(self, steps, start):
        self._steps = steps
        self._next = -(-start // steps) * steps

    def due(self, step):
        """Whether `step` is, or has passed, the next multiple; which then counts as reached.

        Args:
            step: number of steps, never smaller than in the call before.
        """
        if step < self._next:
            return False
        self._next = (step // self._steps + 1) * self._steps
        return True


class Progress:
    """Throughput and input-stall meter between two progress lines."""

    def __init__(self, examples_per_step):
        self._examples_per_step = examples_per_step
        self._start = time.time()
        self._steps = 0
        self._waited = 0.0

    def step(self, waited_seconds):
        """Counts one step, of which `waited_seconds` went by waiting for its batch."""
        self._steps += 1
        self._waited += waited_seconds

    def line(self, step, model_loss, total_loss):
        """The originals' progress line, and the share of time spent waiting for input.

        Starts the next interval.
        """
        elapsed = max(time.time() - self._start, 1e-9)
        text = (
            f"Step {step:06d}, model loss {model_loss:.4f}, total loss {total_loss:.4f},"
            f" {elapsed / self._steps:.2f} seconds/step,"
            f" {self._steps * self._examples_per_step / elapsed:.2f} examples/second,"
            f" {min(100 * self._waited / elapsed, 100):.0f}% waiting for input"
        )
        self._start, self._steps, self._waited = time.time(), 0, 0.0
        return text


class StopSignals:
    """SIGINT and SIGTERM end the run between two steps; a second SIGINT ends the process at once.

    Use as a context manager in the main thread. While the graph is built (nothing to save yet) and
    inside `interruptible()` a signal raises StopRequested; elsewhere it only sets `requested`, so
    that a step or a save in progress is finished. A thread reads the signals as they arrive,
    because Python's own handlers wait until a running `session.run` returns.
    """

    def __init__(self):
        self.requested = None
        self._interruptible = True
        self._at_abort = []
        self._previous = {}

    @property
    def exit_code(self):
        """128 + signal number, as a shell reports it; 0 if no signal arrived."""
        return 128 + self.requested if self.requested else 0

    def at_abort(self, function):
        """Registers what must be done before the process ends at once on a second SIGINT."""
        self._at_abort.append(function)

    def defer(self):
        """From now on signals no longer interrupt, but for `interruptible()` blocks.

        Raises:
            StopRequested: one has arrived already.
        """
        self.only_note()
        if self.requested:
            raise StopRequested

    def only_note(self):
        """As `defer`, but one that has arrived is left to who looks at `requested`."""
        self._interruptible = False

    @contextlib.contextmanager
    def interruptible(self):
        """A block, such as waiting for a batch, that a signal may break off with StopRequested."""
        self._interruptible = True
        try:
            if self.requested:
                raise StopRequested
            yield
        finally:
            self._interruptible = False

    def __enter__(self):
        self._read_fd, write_fd = os.pipe()
        os.set_blocking(write_fd, False)
        self._write_fd = write_fd
        for number in (signal.SIGINT, signal.SIGTERM):
            self._previous[number] = signal.signal(number, self._handle)
        self._previous_fd = signal.set_wakeup_fd(write_fd, warn_on_full_buffer=False)
        threading.Thread(target=self._watch, name=_WATCH, daemon=True).start()
        return self

    def __exit__(self, *exc_info):
        signal.set_wakeup_fd(self._previous_fd)
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        os.close(self._write_fd)  # ends the watching thread

    def _handle(self, number, frame):
        self.requested = self.requested or number
        if self._interruptible:
            self._interruptible = False
            raise StopRequested

    def _watch(self):
        seen = 0
        with os.fdopen(self._read_fd, "rb", buffering=0) as pipe:
            while byte := pipe.read(1):
                number = byte[0]
                if number not in self._previous:
                    continue
                seen += 1
                name = signal.Signals(number).name
                if seen == 1:
                    self._say(
                        f"{name}: stopping after the step in progress; Ctrl-C again exits at once"
                    )
                elif number == signal.SIGINT:
                    self._say(f"{name} again: exiting at once")
                    for function in self._at_abort:
                        function()
                    os._exit(128 + number)

    @staticmethod
    def _say(text):
        print(text, file=sys.stderr, flush=True)
