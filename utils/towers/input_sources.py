"""Where a training loop gets its batches from: one interface for fed and for queued inputs.

    source = input_sources.make_source(
        net.inputs,
        sess,
        next_batch,          # () -> (batch, state of the readers after it); raises at the end
        arrays=net.arrays,   # batch -> arrays in the order of the inputs
        keep=keep,           # batch -> what the loop needs of it in Python
        stop_readers=readers.stop,
    )
    with source:
        while ...:
            with stop.interruptible():
                feed, batch, state = source.get()
            sess.run(fetches, feed)              # exactly one training step for each get()
            progress.step(source.wait_seconds())

multigpu_train.py: next_batch is `lambda: (readers.get(), readers.get_state())`, keep is
`lambda batch: batch[1]`, the names. train_multi_gpu.py: next_batch is `train_batches.get`, keep is
`lambda batch: {**batch, "points": None}`; an evaluation feeds its own batches (`inputs.feed`) while
the next training batches wait.
"""

import queue
import threading
import time

from absl import logging

from utils.towers.input_queue import QueuedInputs

_POLL_SECONDS = 0.1  # longest time for which get() overlooks a stop()
_JOIN_SECONDS = 10.0


def make_source(inputs, session, next_batch, *, arrays, keep, stop_readers):
    """The source that belongs to the inputs.

    Args:
        inputs: of `utils.towers.input_queue.training_inputs`.
        session: tf.Session, which must stay open until the source has stopped.
        next_batch: function without arguments that waits for the next batch and returns (batch,
            state of the readers after it).
        arrays: function of a batch that returns the arrays to feed, in the order of the inputs.
        keep: function of a batch that returns what the loop needs of it besides, without the large
            arrays, so that a queued batch is in memory only once.
        stop_readers: function without arguments that makes a `next_batch` that waits raise.

    Returns:
        QueueSource for QueuedInputs, else FeedSource.
    """
    kind = QueueSource if isinstance(inputs, QueuedInputs) else FeedSource
    return kind(inputs, session, next_batch, arrays=arrays, keep=keep, stop_readers=stop_readers)


class FeedSource:
    """Gets a batch when the loop asks for it, to be fed with the step.

    The arguments are those of `make_source`.
    """

    def __init__(self, inputs, session, next_batch, *, arrays, keep, stop_readers):
        self._inputs = inputs
        self._session = session
        self._next_batch = next_batch
        self._arrays = arrays
        self._keep = keep
        self._stop_readers = stop_readers
        self._waited = 0.0

    def start(self):
        """Begins to move batches, where that happens ahead of the loop."""

    def stop(self):
        """Ends what `start` began, and the readers. The second call does nothing."""
        self._stop_readers()

    def get(self):
        """Waits for the next batch; exactly one training step must follow.

        Returns:
            Tuple (feed, batch, state). feed: feed_dict of the step. batch: what `keep` returned.
            state: of the readers after this batch, to be saved when it has been trained on.

        Raises:
            What `next_batch` or `arrays` raised for this batch.
            input_queue.InputError: a value is another one in the dtype in which it travels.
            RuntimeError: the batches go through a queue, and it was not started or was stopped.
        """
        started = time.monotonic()
        try:
            return self._get()
        finally:
            self._waited += time.monotonic() - started

    def wait_seconds(self):
        """Seconds spent in `get()` since this was last asked."""
        waited, self._waited = self._waited, 0.0
        return waited

    def __enter__(self):
        self.start()
        return self

    def __exit__(self, *unused_exception):
        self.stop()

    def _get(self):
        batch, state = self._next_batch()
        return self._inputs.feed(self._arrays(batch)), self._keep(batch), state


class QueueSource(FeedSource):
    """Moves batches into the queue of the inputs while steps run.

    A thread takes batches from the readers and enqueues them; with staging a second one moves them
    on to the towers' devices. What belongs to them in Python follows in the same order. A batch
    that waits has its place counted from before it is asked for until `get()` hands it out: at most
    `inputs.capacity` places in the queue, and one on the devices. What goes wrong with a batch is
    raised by the `get()` that would return it.

    The arguments are those of `make_source`.
    """

    def __init__(self, inputs, session, next_batch, **functions):
        super().__init__(inputs, session, next_batch, **functions)
        self._room = threading.Semaphore(inputs.capacity)
        # Items are (batch, state), an exception, or None to wake who waits.
        self._queued = queue.Queue()
        self._staged = queue.Queue()
        self._stage_room = threading.Semaphore(1)
        self._ready, self._ready_room = self._queued, self._room
        works = [("input queue", self._fill_queue, self._queued)]
        if inputs.staged:
            self._ready, self._ready_room = self._staged, self._stage_room
            works.append(("input staging", self._fill_stage, self._staged))
        self._threads = [
            threading.Thread(target=self._run, args=work, name=name, daemon=True)
            for name, *work in works
        ]
        self._running = False
        self._stopping = False
        self._error = None

    def start(self):
        """Begins to fill the queue, after dropping what an earlier source left there.

        Raises:
            RuntimeError: it was started before.
        """
        if self._running or self._stopping:
            raise RuntimeError(
                "start() was called twice; a source starts once; make a new one with readers that"
                " go on from the state of the last batch that was trained on"
            )
        self._inputs.clear(self._session)
        self._running = True
        for thread in self._threads:
            thread.start()

    def stop(self):
        """Ends the threads and the readers; batches that wait are left to be read again."""
        if self._stopping:
            return
        self._stopping = True
        self._room.release()
        self._stage_room.release()
        self._queued.put(None)
        self._stop_readers()
        if not self._running:
            return
        self._running = False
        deadline = time.monotonic() + _JOIN_SECONDS
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
            if thread.is_alive():
                logging.warning("%s is still busy %.0f s after stop()", thread.name, _JOIN_SECONDS)

    def _get(self):
        while self._error is None:
            if not self._running:
                raise RuntimeError(
                    "get() was called on a source that is not running; use it in its `with` block"
                )
            try:
                item = self._ready.get(timeout=_POLL_SECONDS)
            except queue.Empty:
                continue
            if isinstance(item, BaseException):
                self._error = item
            elif item is not None:
                self._ready_room.release()
                return {}, *item
        raise self._error

    def _run(self, work, results):
        try:
            work()
        # Raised in the loop; SystemExit as well, or the loop would wait for ever.
        except BaseException as error:
            results.put(error)

    def _fill_queue(self):
        while True:
            self._room.acquire()
            if self._stopping:
                return
            batch, state = self._next_batch()
            self._inputs.enqueue(self._session, self._arrays(batch))
            self._queued.put((self._keep(batch), state))
            del batch  # not to be kept alive while waiting for the next one

    def _fill_stage(self):
        while True:
            item = self._queued.get()
            if isinstance(item, BaseException):
                raise item
            self._stage_room.acquire()
            if self._stopping:
                return
            self._inputs.stage(self._session)
            self._room.release()
            self._staged.put(item)
            del item
