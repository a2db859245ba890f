"""The two kinds of reader that `data_util.GeneratorEnqueuer` runs: a thread or a process.

Both run one generator ahead of the consumer and are asked for one message at a time:
`("batch", batch, state)`, `("end",)` or `("error", text, exception or None, notes)`.

How a reader process is started. The spawn method of `multiprocessing` imports the parent's main
script again in every child; for a training script that means TensorFlow: seconds and 600 MB a
reader. So a child is a plain `python -c` that imports this module only, with the parent's
`sys.path`. What the main module is does not matter (a script in another folder, pytest, a
notebook), nothing runs between fork and exec (safe after CUDA or threads were started), and no
global of `multiprocessing` has to be patched.

How batches travel. Arrays go through anonymous memory files whose descriptors the child inherits,
everything else through a socket. Such files have no name in /dev/shm: nothing has to be removed,
they end with the last process that has them open, however it ends, even when the whole process
group is killed; and the small /dev/shm of a container does not limit them.
"""

import contextlib
import functools
import mmap
import os
import pickle
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from multiprocessing.connection import Connection, Pipe

import numpy as np

_ALIGNMENT = 64  # bytes; where an array may start within a slot


def _run_generator(make_generator, index, state, take_slot, send):
    """The work of a reader: first a free slot, then a batch, so that the bound includes both."""
    generator = make_generator(index)
    if state is not None:
        generator.set_state(state)
    get_state = getattr(generator, "get_state", lambda: None)
    batches = iter(generator)
    while (slot := take_slot()) is not None:
        try:
            batch = next(batches)
        except StopIteration:
            return
        send(slot, batch, get_state())
        del batch  # not to be kept alive while the next one is made


def _describe(error):
    return f"failed: {type(error).__name__}: {error}"


class ThreadReader:
    """One generator in a daemon thread.

    Args:
      make_generator: called with `index` in the thread.
      index: of the reader.
      state: of the generator to continue from, or None.
      capacity: most batches finished or being made.
    """

    def __init__(self, make_generator, index, state, capacity):
        self.name = f"reader {index}"
        self._free = threading.Semaphore(capacity)
        # Not a SimpleQueue: its get(timeout) waits for ever when a signal handler that interrupts
        # it takes longer than the rest of the timeout.
        self._messages = queue.Queue()
        self._ending = False
        self._thread = threading.Thread(
            target=self._run, args=(make_generator, index, state), name=self.name, daemon=True
        )
        self._thread.start()

    def _run(self, make_generator, index, state):
        try:
            _run_generator(make_generator, index, state, self._take_slot, self._send)
        # Raised in the consumer; SystemExit as well, or the consumer would wait for ever.
        except BaseException as error:
            self._messages.put(("error", _describe(error), error, []))
        else:
            self._messages.put(("end",))

    def _take_slot(self):
        self._free.acquire()
        return None if self._ending else 0

    def _send(self, unused_slot, batch, state):
        self._messages.put(("batch", batch, state))

    def receive(self, timeout):
        """Next message, or None after `timeout` seconds."""
        try:
            message = self._messages.get(timeout=timeout)
        except queue.Empty:
            return None
        self._free.release()
        return message

    def end(self):
        """Asks the thread to end after the batch that it is making."""
        self._ending = True
        self._free.release()

    def join(self, deadline):
        """True when the thread has ended by then (`time.monotonic()`)."""
        self._thread.join(max(0.0, deadline - time.monotonic()))
        return not self._thread.is_alive()

    def close(self):
        """Lets go of the batches that nobody will take."""
        self._messages = queue.Queue()


class _Slot:
    """Shared memory for one batch: an anonymous file that grows to the largest batch it held."""

    def __init__(self, descriptor):
        self.descriptor = descriptor
        self._memory = np.empty(0, np.uint8)

    @classmethod
    def new(cls):
        if hasattr(os, "memfd_create"):
            return cls(os.memfd_create("reader"))
        with tempfile.TemporaryFile() as file:
            return cls(os.dup(file.fileno()))

    def memory(self, size=0):
        """uint8 array over the file, which is made at least `size` bytes long."""
        length = os.fstat(self.descriptor).st_size
        if length < size:
            os.ftruncate(self.descriptor, size)
        if self._memory.size < max(size, length):
            self._memory = np.frombuffer(mmap.mmap(self.descriptor, 0), np.uint8)
        return self._memory

    def write(self, values):
        """Writes memoryviews of bytes one after the other; returns their [(start, stop)]."""
        spans, stop = [], 0
        for value in values:
            start = -(-stop // _ALIGNMENT) * _ALIGNMENT
            stop = start + value.nbytes
            spans.append((start, stop))
        memory = memoryview(self.memory(stop))
        for value, (start, stop) in zip(values, spans):
            memory[start:stop] = value
        return spans

    def read(self, spans):
        """Copies of what was written: writable, in one block that lives as long as any of them."""
        block = memoryview(self.memory()[: spans[-1][1] if spans else 0].copy())
        return [block[start:stop] for start, stop in spans]

    def close(self):
        self._memory = np.empty(0, np.uint8)
        os.close(self.descriptor)


class ProcessReader:
    """One generator in a process of its own.

    Args:
      make_generator: called with `index` in the process; travels there by pickle.
      index: of the reader.
      state: of the generator to continue from, or None.
      capacity: most batches finished or being made; as many slots of shared memory.

    Raises:
      ValueError: `make_generator` cannot be sent to another process.
      OSError: the system allows no more processes or open files.
    """

    def __init__(self, make_generator, index, state, capacity):
        payload = _pickled_for_child(make_generator, state)
        self._slots, self._connection = [], None
        try:
            self._slots.extend(_Slot.new() for _ in range(capacity))
            # The first slot carries the payload: a socket would make this wait for the child.
            self._slots[0].write([memoryview(payload)])
            self._connection, child_end = Pipe()
        except BaseException:
            self.close()
            raise
        descriptors = [slot.descriptor for slot in self._slots]
        root = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
        code = (
            f"import sys; sys.path[:] = {[root, *map(str, sys.path)]!r}; "
            "from data.readers import run_reader_process; "
            f"run_reader_process({child_end.fileno()}, {descriptors}, {index}, {os.getpid()})"
        )
        # Signals to the process group (Ctrl-C, SIGTERM from a job scheduler) are the parent's to
        # judge: the child is born with them blocked, and ends when the parent kills it or is gone.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-c", code],
                stdin=subprocess.DEVNULL,
                pass_fds=[child_end.fileno(), *descriptors],
                # Whatever a generator imports, no reader takes hold of a GPU.
                env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
            )
        except BaseException:
            self.close()
            raise
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            child_end.close()
        self.name = f"reader {index} (process {self._process.pid})"

    def receive(self, timeout):
        """Next message, or None after `timeout` seconds."""
        try:
            if not self._connection.poll(timeout):
                return None
            kind, *content = pickle.loads(self._connection.recv_bytes())
        except (EOFError, OSError):  # the child is gone, and so is its end of the socket
            return "error", self._how_it_ended(), None, []
        if kind != "batch":
            return kind, *content
        slot, spans, pickled = content
        batch, state = pickle.loads(pickled, buffers=self._slots[slot].read(spans))
        # A child that died after it had sent this batch, which is whole, is told by the next call.
        with contextlib.suppress(OSError):
            self._connection.send_bytes(str(slot).encode())
        return "batch", batch, state

    def _how_it_ended(self):
        code = self._process.wait()
        if code >= 0:
            return f"ended with exit code {code} and no message; see what it printed above"
        hint = "; is the machine out of memory?" if code == -signal.SIGKILL else ""
        return f"was killed by {signal.Signals(-code).name} (exit code {code}){hint}"

    def end(self):
        """Kills the process: it owns nothing that outlives it."""
        self._process.kill()

    def join(self, deadline):
        """True when the process has ended by then (`time.monotonic()`)."""
        try:
            self._process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            return False
        return True

    def close(self):
        """Closes the descriptors."""
        if self._connection is not None:
            self._connection.close()
        for slot in self._slots:
            slot.close()


def _pickled_for_child(make_generator, state):
    needed = (
        "it must be a function or class of a module that can be imported, or a functools.partial "
        "of one; move it to a module or pass reader='thread'"
    )
    function = make_generator
    while isinstance(function, functools.partial):
        function = function.func
    if getattr(function, "__module__", None) == "__main__":
        raise ValueError(
            f"make_generator {function!r} is defined in the main script, which reader processes do "
            f"not import; {needed}"
        )
    try:
        return pickle.dumps((make_generator, state))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise ValueError(
            f"make_generator {function!r} cannot be sent to a reader process ({error}); {needed}"
        ) from error


def run_reader_process(connection_descriptor, slot_descriptors, index, parent):
    """Main function of a reader process: sends batches until its generator or its parent ends.

    Args:
      connection_descriptor: socket to the parent; messages go up, numbers of free slots come down.
      slot_descriptors: memory files; at first the first one holds (make_generator, state), pickled.
      index: of the reader.
      parent: process id of the parent.
    """
    connection = Connection(connection_descriptor)
    slots = [_Slot(descriptor) for descriptor in slot_descriptors]
    free = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(connection, parent, free), daemon=True).start()

    def send(slot, batch, state):
        buffers = []
        pickled = pickle.dumps((batch, state), protocol=5, buffer_callback=buffers.append)
        spans = slots[slot].write([buffer.raw() for buffer in buffers])
        connection.send_bytes(pickle.dumps(("batch", slot, spans, pickled)))

    try:
        make_generator, state = pickle.loads(slots[0].memory())
        for slot in range(len(slots)):
            free.put(slot)
        _run_generator(make_generator, index, state, free.get, send)
        message = ("end",)
    except BaseException as error:  # raised in the consumer
        message = ("error", _describe(error), None, [traceback.format_exc()])
    try:
        connection.send_bytes(pickle.dumps(message))
    except ConnectionError:  # nobody is left to be told
        os._exit(0)


def _listen(connection, parent, free):
    """Takes back free slots; ends the process, whatever it is doing, when the parent is gone.

    The closed socket tells; where a fork of the parent holds the other end, the parent's id does.
    """
    try:
        while os.getppid() == parent:
            if connection.poll(1.0):
                free.put(int(connection.recv_bytes()))
    except (EOFError, OSError):
        os._exit(0)
    os._exit(0)
