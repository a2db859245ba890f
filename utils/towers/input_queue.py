"""Inputs of a training graph: fed with each step, or taken from a queue that is filled meanwhile.

In the graph:

    with tf.device(place.host):
        inputs = input_queue.training_inputs("queue", place, SPECS, capacity)
        slices, weights = inputs.split(feeding.split_evenly)      # one list of tensors a tower

SPECS is a list of (name, dtype, shape, wire dtype); `specs_of` makes one from a function that makes
placeholders. `inputs.tensors` are the whole batch in the order of SPECS. What is computed from them
beside the towers takes `inputs.whole(number)` in a training step. Towers that evaluate take
`inputs.fed_slices` and `inputs.fed_weights`. An evaluation runs with `inputs.feed(arrays)`, arrays
in the order of SPECS, whatever the mode, and leaves the queue alone.

In Python `utils.towers.input_sources` gives the batches to the loop.

What a script needs, with the number of batches that the queue may hold from its flags:

    sizes = [[batch, side, side, 3], ...]                          # shapes of a full batch
    bytes_per_batch = input_queue.batch_bytes(SPECS, sizes)
    capacity = input_queue.queue_capacity(options, bytes_per_batch)  # before the graph: may raise
    ...
    print(inputs.describe(bytes_per_batch))

multigpu_train.py: SPECS are its four placeholders, the images with wire dtype uint8, split with
`feeding.split_equally`; its readers make them so with image_dtype=numpy.uint8.
train_multi_gpu.py: SPECS are `specs_of` its network's `placeholder_inputs`, split with
`feeding.split_evenly`; the accuracy of a training step compares with `inputs.whole(1)`.
"""

import os
from typing import NamedTuple

import numpy as np
import tensorflow.compat.v1 as tf

from utils.towers import compat, feeding

MODES = ("feed", "queue")


class InputError(ValueError):
    """A batch cannot travel as asked for without another number arriving; the message says why."""


class InputSpec(NamedTuple):
    """One input of the training graph.

    Attributes:
        name: of the placeholder.
        dtype: of the tensor that the towers get.
        shape: of the whole batch; the first axis is the batch, None where a size may differ.
        wire: dtype in which the queue holds it and in which it goes to the towers' devices; None
            for `dtype`. Only the mode 'queue' looks at it.
    """

    name: str
    dtype: tf.DType
    shape: list
    wire: tf.DType | None = None


def specs_of(make_placeholders):
    """InputSpecs of the placeholders that a function makes, which are made in a graph of no use.

    Args:
        make_placeholders: function without arguments that returns a sequence of placeholders.
    """
    with tf.Graph().as_default():
        return [InputSpec(p.op.name, p.dtype, p.shape) for p in make_placeholders()]


def batch_bytes(specs, shapes):
    """Bytes of a batch in the queue.

    Args:
        specs: list of InputSpec, or of tuples of its attributes.
        shapes: the shape of a full batch for each of them.
    """
    wires = [_wire(InputSpec(*spec)) for spec in specs]
    return sum(wire.size * int(np.prod(shape)) for wire, shape in zip(wires, shapes, strict=True))


def queue_capacity(options, bytes_per_batch, memory=None):
    """Number of batches that the queue may hold.

    Args:
        options: utils.towers.engine_flags.EngineOptions.
        bytes_per_batch: of a full batch.
        memory: bytes of this machine's memory; None to ask it.

    Returns:
        --input_queue_size, or as many as fit into --input_queue_megabytes.

    Raises:
        ValueError: not one fits, or more were asked for than this machine can hold.
    """
    capacity, megabytes = options.input_queue_size, options.input_queue_megabytes
    if megabytes:
        capacity = min(capacity, megabytes * 10**6 // bytes_per_batch)
        if not capacity:
            raise ValueError(
                f"--input_queue_megabytes={megabytes} is too little for one batch of"
                f" {_megabytes(bytes_per_batch)}; pass {-(-bytes_per_batch // 10**6)} or more"
            )
    if memory is None:
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if options.input == "queue" and capacity * bytes_per_batch > memory:
        raise ValueError(
            f"--input_queue_size={options.input_queue_size} may take"
            f" {_megabytes(capacity * bytes_per_batch)}, and this machine has"
            f" {_megabytes(memory)}; pass a smaller number"
        )
    return capacity


def training_inputs(mode, place, specs, capacity=2, staged=None):
    """Makes the inputs of the training graph.

    Args:
        mode: 'feed': plain placeholders, nothing else; or 'queue'.
        place: utils.towers.devices.Devices.
        specs: list of InputSpec, or of tuples of its attributes.
        capacity: batches that wait in the queue at most; 'queue' only.
        staged: whether one batch more waits on the towers' devices; None: on GPUs only.

    Returns:
        FedInputs or QueuedInputs.

    Raises:
        ValueError: the mode is none of MODES, or capacity is not positive.
    """
    specs = [InputSpec(*spec) for spec in specs]
    if mode not in MODES:
        raise ValueError(f"input mode {mode!r} is unknown; pass one of {', '.join(MODES)}")
    if mode == "feed":
        return FedInputs(place, specs)
    if capacity < 1:
        raise ValueError(f"capacity is {capacity}; it must be positive; pass 1 or more batches")
    staged = place.kind == "GPU" if staged is None else staged
    return QueuedInputs(place, specs, capacity, staged)


class FedInputs:
    """Placeholders that every step is fed.

    Args:
        place, specs: of `training_inputs`.

    Attributes:
        tensors: the whole batch, in the order of the specs.
        fed_slices, fed_weights: after `split`, the towers' shares of a batch that is fed.
    """

    def __init__(self, place, specs):
        self._place = place
        self._specs = specs
        self.tensors = self._make_tensors()

    def _make_tensors(self):
        return [tf.placeholder(spec.dtype, spec.shape, spec.name) for spec in self._specs]

    def split(self, split_batch):
        """Splits the batch into the towers' shares; call once.

        Args:
            split_batch: function of (tensors, number of towers) that returns (slices, weights):
                feeding.split_evenly or feeding.split_equally.

        Returns:
            (slices, weights) of a training step: one list of tensors a tower, in the order of the
            specs, and one scalar a tower or an empty list.
        """
        self.fed_slices, self.fed_weights = split_batch(self.tensors, self._place.num_towers)
        return self.fed_slices, self.fed_weights

    def whole(self, number):
        """Input `number` of the batch that a training step trains on, to be used on the host."""
        return self.tensors[number]

    def feed(self, arrays):
        """feed_dict with which a run uses these arrays and no others.

        Args:
            arrays: in the order of the specs; what `numpy.asarray` takes.
        """
        return dict(zip(self.tensors, arrays, strict=True))

    def describe(self, bytes_per_batch):
        """One line for the start of a run: what waits between readers and steps."""
        return f"input: each batch of {_megabytes(bytes_per_batch)} is fed with its step"


class QueuedInputs(FedInputs):
    """Inputs that come from a queue in host memory unless they are fed.

    Nothing in the graph ever waits: `utils.towers.input_sources.QueueSource` counts the batches in
    Python, and lets a step run only when its batch is there. A wait inside a session could not be
    broken off by a signal, and that of a staging area holds one of the session's threads.

    Args:
        place, specs, capacity, staged: of `training_inputs`.

    Attributes:
        tensors: the whole batch in the wire dtypes.
        capacity: batches that may wait in the queue.
        staged: whether batches go through a staging area on each tower's device.
        fed_slices, fed_weights: after `split`, the towers' shares of a batch that is fed.
    """

    def __init__(self, place, specs, capacity, staged):
        self.capacity = capacity
        self.staged = staged
        self._shares = []  # with staging, the staged tensors of each tower, in the wire dtypes
        self._areas = []
        self._stage_op = None
        super().__init__(place, specs)

    def _make_tensors(self):
        wires = [_wire(spec) for spec in self._specs]
        with tf.name_scope("input_queue"):
            self._incoming = [
                tf.placeholder(wire, spec.shape, spec.name)
                for spec, wire in zip(self._specs, wires)
            ]
            # No shapes: the last batch of an epoch may be smaller. No bound: see the class.
            queue = tf.queue.FIFOQueue(-1, wires, name="queue")
            self._enqueue_op = queue.enqueue(self._incoming)
            self._size = queue.size()
            dequeued = queue.dequeue()
            dequeued = list(dequeued) if len(wires) > 1 else [dequeued]
            self._drop_op = dequeued[0].op
        return [
            tf.placeholder_with_default(value, spec.shape, spec.name)
            for spec, value in zip(self._specs, dequeued)
        ]

    def split(self, split_batch):
        """As FedInputs.split; the slices lie on the towers' devices."""
        slices, weights = split_batch(self.tensors, self._place.num_towers)
        self.fed_slices, self.fed_weights = self._casted(slices), weights
        if not self.staged:
            return self.fed_slices, weights
        self._shares, puts = [], []
        for tower, tensors in enumerate(slices):
            tensors = [*tensors, *weights[tower : tower + 1]]
            with self._on_tower(tower):
                area = compat.StagingArea(
                    [tensor.dtype for tensor in tensors], [tensor.shape for tensor in tensors]
                )
                puts.append(area.put(tensors))
                self._shares.append(area.get())
                self._areas.append(area.clear())
        self._stage_op = tf.group(*puts, name="input_queue/stage")
        count = len(self._specs)
        self.slices = self._casted([share[:count] for share in self._shares])
        return self.slices, [share[count] for share in self._shares if len(share) > count]

    def _on_tower(self, tower):
        return tf.device(self._place.tower_device(tower))

    def _casted(self, slices):
        """The towers' slices in the dtypes of the specs, cast on the towers' devices."""
        result = []
        for tower, tensors in enumerate(slices):
            with self._on_tower(tower):
                result.append(
                    [
                        tensor if tensor.dtype == spec.dtype else tf.cast(tensor, spec.dtype)
                        for spec, tensor in zip(self._specs, tensors)
                    ]
                )
        return result

    def whole(self, number):
        """As FedInputs.whole. With staging `tensors` are those of a later batch."""
        if not self.staged:
            return self.tensors[number]
        return tf.concat([tensors[number] for tensors in self.slices], 0)

    def feed(self, arrays):
        """As FedInputs.feed; neither the queue nor the staging areas are touched.

        Raises:
            InputError: a value is another one in its wire dtype.
        """
        values = self._in_wire_dtypes(arrays)
        feed = dict(zip(self.tensors, values, strict=True))
        if self.staged:
            slices, weights = feeding.split_arrays(values, self._place.num_towers)
            for share, tensors, weight in zip(self._shares, slices, weights):
                feed.update(zip(share, [*tensors, weight]))
        return feed

    def enqueue(self, session, arrays):
        """Puts a batch at the end of the queue.

        Args:
            session: tf.Session.
            arrays: as for `feed`.

        Raises:
            InputError: a value is another one in its wire dtype.
        """
        values = self._in_wire_dtypes(arrays)
        session.run(self._enqueue_op, dict(zip(self._incoming, values, strict=True)))

    def stage(self, session):
        """Moves the first batch of the queue, which must not be empty, to the towers' devices."""
        session.run(self._stage_op)

    def queued(self, session):
        """Number of batches in the queue."""
        return int(session.run(self._size))

    def clear(self, session):
        """Drops the batches in the queue and in the staging areas."""
        for _ in range(self.queued(session)):
            session.run(self._drop_op)
        session.run(self._areas)

    def describe(self, bytes_per_batch):
        """One line for the start of a run: how many batches wait, and their size."""
        staged = " and 1 more on the towers' devices" if self.staged else ""
        return (
            f"input queue: at most {self.capacity} batch(es) of {_megabytes(bytes_per_batch)},"
            f" {_megabytes(self.capacity * bytes_per_batch)} in all, in host memory{staged}"
        )

    def _in_wire_dtypes(self, arrays):
        return [_in_wire_dtype(spec, value) for spec, value in zip(self._specs, arrays)]


def _wire(spec):
    return spec.wire or spec.dtype


def _megabytes(size):
    return f"{size / 1e6:.1f} MB" if size >= 10**5 else f"{size / 1e3:.1f} kB"


def _in_wire_dtype(spec, value):
    """Array in the wire dtype.

    Raises:
        InputError: casting it back gives another array.
    """
    wire, dtype = _wire(spec).as_numpy_dtype, spec.dtype.as_numpy_dtype
    if wire == dtype:
        return np.asarray(value, dtype)
    array = np.asarray(value)
    if array.dtype == wire:
        return array
    with np.errstate(invalid="ignore"):  # what does not fit shows below
        sent = array.astype(wire)
    different = sent.astype(dtype) != array.astype(dtype)
    if different.any():
        raise InputError(
            f"{spec.name} holds {array[different].flat[0]}, which is not a number of"
            f" {_wire(spec).name}, as it travels; give whole numbers of that type, or feed the"
            " batches with their steps (input 'feed')"
        )
    return sent
