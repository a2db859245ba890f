"""Readers: generators that make batches ahead of the training loop, in threads or in processes.

`GeneratorEnqueuer` has the name and the methods of the class in EAST's `data_util.py` (`start`,
`get`, `is_running`, `stop`). Here it hands batches out in a defined order, carries the states of
the generators with them, and raises in the consumer what happens in a reader.

    make_generator = functools.partial(module.make_generator, seed=1)
    with GeneratorEnqueuer(make_generator, num_readers=4, max_queue_size=24) as readers:
        for step in range(max_steps):
            batch = readers.get()
"""

import atexit
import os
import threading
import time

from absl import logging

from data.reader_state import advanced_state, check_state, initial_state
from data.reader_state import load_matching_state as load_matching_state
from data.reader_state import load_reader_state as load_reader_state
from data.reader_state import save_reader_state as save_reader_state
from data.reader_state import state_to_continue as state_to_continue
from data.readers import ProcessReader, ThreadReader

READERS = {"thread": ThreadReader, "process": ProcessReader}

_POLL_SECONDS = 0.1  # longest time for which get() overlooks a stop() or a signal


class ReaderError(RuntimeError):
    """A reader failed; the text has its number, the type of the exception and its text.

    A reader thread's exception is the `__cause__`; a reader process's traceback is in a note.
    """


class EndOfData(Exception):
    """There are no more batches: every generator has ended, or the readers were stopped."""


class GeneratorEnqueuer:
    """Runs `num_readers` generators ahead of the consumer and hands out their batches in turn.

    Batch j comes from reader j % num_readers. When a generator ends, the others go on in turn.

    Args:
      make_generator: called in each reader with the reader's index, returns an iterator of
        batches. One with `get_state()` (flat dict of arrays, numbers and strings: where it is
        right after its last batch) and `set_state(state)` can be continued. Reader processes get
        it by pickle: a function or class of a module, or a `functools.partial` of one.
      num_readers: number of generators, each in its own thread or process.
      max_queue_size: most batches, of all readers together, that are finished or being made. Each
        reader has a fixed share, at least one batch: max(max_queue_size, num_readers) is the bound.
      reader: 'thread' or 'process'.
      states: what `get_state()` returned; goes on with the batch that would have come next.
      watchdog_seconds: `get()` logs a warning each time that it has waited so long.

    Raises:
      ValueError: an argument is out of range, or `states` does not fit.
    """

    def __init__(
        self,
        make_generator,
        *,
        num_readers=1,
        max_queue_size=10,
        reader="thread",
        states=None,
        watchdog_seconds=60,
    ):
        if reader not in READERS:
            raise ValueError(f"reader is {reader!r}; pass one of {', '.join(map(repr, READERS))}")
        if num_readers < 1:
            raise ValueError(f"num_readers is {num_readers}; it must be positive; pass 1 or more")
        if max_queue_size < 1:
            raise ValueError(
                f"max_queue_size is {max_queue_size}; it must be positive; pass 1 or more"
            )
        if watchdog_seconds <= 0:
            raise ValueError(
                f"watchdog_seconds is {watchdog_seconds}; it must be positive; pass 60, or inf"
            )
        if states is not None:
            check_state(states, num_readers)
        self._make_generator = make_generator
        self._reader_class = READERS[reader]
        self._num_readers = num_readers
        self._capacities = [
            max(1, max_queue_size // num_readers + (index < max_queue_size % num_readers))
            for index in range(num_readers)
        ]
        self._watchdog_seconds = watchdog_seconds
        self._state = initial_state(num_readers) if states is None else states
        self._readers = []
        self._owner = None  # id of the process that started the readers
        self._stopped = False
        self._error = None
        self._waited = 0.0
        # One get() at a time; re-entrant, so that a signal handler that interrupts it may stop().
        self._lock = threading.RLock()

    def start(self):
        """Starts the readers and returns at once; what goes wrong in them, `get()` raises.

        Raises:
          RuntimeError: they were started before.
          ReaderError: the system allows no more threads, processes or open files.
          ValueError: `make_generator` cannot be sent to a process.
        """
        if self._owner is not None:
            raise RuntimeError(
                "start() was called twice; readers start once; make a new GeneratorEnqueuer with "
                "states=get_state() to go on"
            )
        self._owner = os.getpid()
        atexit.register(self.stop)
        try:
            for index, capacity in enumerate(self._capacities):
                reader = None
                if not self._state["ended"][index]:
                    state = self._state["readers"][index]
                    reader = self._reader_class(self._make_generator, index, state, capacity)
                self._readers.append(reader)
        except (OSError, RuntimeError) as error:  # out of descriptors, processes or threads
            self.stop()
            raise ReaderError(
                f"reader {len(self._readers)} of {self._num_readers} cannot be started: {error}; "
                "use fewer readers or a shorter queue, or raise the limit (ulimit)"
            ) from error
        except BaseException:
            self.stop()
            raise

    def is_running(self):
        """True between `start()` and `stop()`."""
        return self._owner is not None and not self._stopped

    def get(self):
        """Waits for the next batch.

        Returns:
          What the generator whose turn it is returned.

        Raises:
          ReaderError: that reader failed, or its process was killed.
          EndOfData: all generators have ended, or `stop()` was called, also during this call.
          RuntimeError: not started.
        """
        if self._owner is None:
            raise RuntimeError(
                "get() was called before start(); readers must run; call start() or use `with`"
            )
        started = time.monotonic()
        with self._lock:
            try:
                return self._next_batch(started)
            finally:
                self._waited += time.monotonic() - started

    def __iter__(self):
        """Yields batches until the data end."""
        while True:
            try:
                batch = self.get()
            except EndOfData:
                return
            yield batch

    def get_state(self):
        """State after the last batch that `get()` returned; never waits.

        Returns:
          A dict for `states=` and `save_reader_state`, not to be changed (`data.reader_state`).
        """
        return self._state

    def wait_seconds(self):
        """Seconds spent in `get()` since this was last asked."""
        waited, self._waited = self._waited, 0.0
        return waited

    def stop(self, timeout=2.0):
        """Ends the readers; a `get()` that waits raises EndOfData. The second call does nothing.

        Processes are killed. A thread ends after the batch that it is making; one that takes
        longer than `timeout` is left behind as a daemon, which does not delay the program's end.

        Args:
          timeout: longest time to wait for all readers together, in seconds.
        """
        # A fork of this process has a copy of this object, but the readers are not its own.
        if self._stopped or self._owner != os.getpid():
            return
        self._stopped = True
        atexit.unregister(self.stop)
        readers = [reader for reader in self._readers if reader is not None]
        for reader in readers:
            reader.end()
        deadline = time.monotonic() + timeout
        busy = [reader.name for reader in readers if not reader.join(deadline)]
        if busy:
            logging.warning("still busy %.1f s after stop(): %s", timeout, ", ".join(busy))
        # A get() in another thread uses the descriptors until it notices.
        if self._lock.acquire(timeout=10 * _POLL_SECONDS):
            try:
                for reader in readers:
                    reader.close()
            finally:
                self._lock.release()

    def __enter__(self):
        if self._owner is None:
            self.start()
        return self

    def __exit__(self, *unused_exception):
        self.stop()

    def _next_batch(self, started):
        warn_after = self._watchdog_seconds
        while True:
            if self._stopped:
                raise EndOfData("the readers were stopped")
            if self._error is not None:
                raise self._error
            if all(self._state["ended"]):
                raise EndOfData(f"all {self._num_readers} generators have ended")
            index = self._state["next_reader"]
            reader = self._readers[index]
            if self._state["ended"][index]:
                self._state = advanced_state(self._state, index)
                continue
            message = reader.receive(_POLL_SECONDS)
            if message is None:
                waited = time.monotonic() - started
                if waited >= warn_after:
                    logging.warning(
                        "no batch for %.0f s: waiting for %s of %d readers",
                        waited,
                        reader.name,
                        self._num_readers,
                    )
                    warn_after += self._watchdog_seconds
                continue
            kind, *content = message
            if kind == "batch":
                batch, generator_state = content
                self._state = advanced_state(
                    self._state, index, generator_state=generator_state, handed_out=1
                )
                return batch
            if kind == "end":
                self._state = advanced_state(self._state, index, ended=True)
            elif not self._stopped:  # a reader that stop() killed did not fail
                text, cause, notes = content
                self._error = ReaderError(f"{reader.name} of {self._num_readers} {text}")
                self._error.__cause__ = cause
                for note in notes:
                    self._error.add_note(note)
