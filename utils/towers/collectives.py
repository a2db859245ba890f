"""All-reduce: sums over the towers that are at hand in every tower, without a common host.

A group has one member a tower, all workers' towers together. Members meet by numbers: the n-th
collective that a tower builds meets the n-th of every other tower. So towers must be built alike,
which `CollectiveGroup.check` verifies, and one `session.run` must run either all towers'
collectives or none: a member waits for the others.

    group = CollectiveGroup(place.num_towers)
    for i in range(place.num_towers):
        with context.tower_context(place, i):
            total = group.sum_over_towers(i)(tensor)  # differentiable
            ...
            tower_grads.append(opt.compute_gradients(loss))
    copies = mean_gradients(group, place, tower_grads)  # [K][N] (gradient, variable)
    group.check()

Sums have the same bits in all towers and in all runs: one member adds up each part of a tensor, in
the order of the members, and passes it on.
"""

import math
from typing import NamedTuple

import tensorflow.compat.v1 as tf

BUCKET_BYTES = 32 * 2**20


class Collective(NamedTuple):
    """What a tower put in, to be compared with the other towers.

    Attributes:
        kind: 'sum', 'gradient of a sum' or 'gradients'.
        dtype: name of the element type.
        shape: text of the static shape; sizes that only the session knows are '?'.
        op: name of the op.
    """

    kind: str
    dtype: str
    shape: str
    op: str


class CollectiveGroup:
    """All towers of all workers as the members of all-reduces.

    Args:
        num_towers: towers of each worker.
        num_workers: processes that build the same graph; 1 for a single one.
        group_key: int, another one for each group in a graph.
        timeout_seconds: after which a member that waits in vain ends the run with a
            DeadlineExceededError; 0 waits for ever. TensorFlow keeps one sleeping thread a
            collective for this time even after success, so it suits few collectives a second;
            `tf.RunOptions(timeout_in_ms=...)` limits a run without that cost.
        communication_hint: 'auto', 'ring' or 'nccl' (GPUs).

    Raises:
        ValueError: a number is not positive, or the time-out is negative.
    """

    def __init__(
        self,
        num_towers,
        *,
        num_workers=1,
        group_key=1,
        timeout_seconds=0.0,
        communication_hint="auto",
    ):
        for name, number in (("num_towers", num_towers), ("num_workers", num_workers)):
            if number < 1:
                raise ValueError(f"{name}={number} members make no group; pass 1 or more")
        if timeout_seconds < 0:
            raise ValueError(
                f"timeout_seconds={timeout_seconds} is negative; pass seconds, or 0 to wait for"
                " ever"
            )
        self.num_towers = num_towers
        self.size = num_towers * num_workers
        self.group_key = group_key
        self._timeout_seconds = float(timeout_seconds)
        self._communication_hint = communication_hint
        self._built = [[] for _ in range(num_towers)]  # Collectives, in each tower's order
        self._last_ops = [None] * num_towers

    def sum_over_towers(self, tower_index):
        """The sum over all towers, as a function for the layers of one tower.

        Args:
            tower_index: the tower that will call it, on whose device it is built.

        Returns:
            Function of a float tensor of the same shape in every tower; returns the sum, which
            all towers share. Its gradient is the sum over the towers of the gradients: a tower's
            `tf.gradients` then count what its tensor does to the losses of all towers.
        """

        def sum_as(kind):
            @tf.custom_gradient
            def summed(tensor):
                total = self._reduce(tower_index, tensor, kind)

                def gradient(by_total):
                    with tf.device(total.device):  # a device can be a member once only
                        return sum_as("gradient of a sum")(by_total)

                return total, gradient

            return summed

        return sum_as("sum")

    def all_reduce_list(self, tower_index, tensors):
        """Sums over all towers of a list of tensors, packed into few collectives.

        Tensors of a type go into buckets of at most BUCKET_BYTES; a larger one has a bucket of its
        own. The last tensors come first, because a backward pass finishes the gradients of the
        last layers first.

        Args:
            tower_index: the tower, on whose device this is built.
            tensors: list of tensors of known shapes, or of IndexedSlices, which become dense; the
                same shapes and types in every tower.

        Returns:
            List of tensors, in the same order.

        Raises:
            ValueError: a shape is not known before the run.
        """
        tensors = [tf.convert_to_tensor(tensor) for tensor in tensors]
        for tensor in tensors:
            if not tensor.shape.is_fully_defined():
                raise ValueError(
                    f"all_reduce_list got {tensor.name} of shape {tensor.shape}, needs known"
                    " sizes; call set_shape on it first"
                )
        if self.size == 1:
            return tensors
        sums = [None] * len(tensors)
        for bucket in _buckets(tensors):
            packed = tf.concat([tf.reshape(tensors[i], [-1]) for i in bucket], 0)
            total = self._reduce(tower_index, packed, "gradients")
            sizes = [tensors[i].shape.num_elements() for i in bucket]
            for i, part in zip(bucket, tf.split(total, sizes)):
                sums[i] = tf.reshape(part, tensors[i].shape)
        return sums

    def check(self):
        """Verifies, once the graph is built, that every tower's collectives meet their like.

        Raises:
            ValueError: two towers built different numbers of them, or different ones.
        """
        first = self._built[0]
        for tower, built in enumerate(self._built[1:], start=1):
            for n, (ours, theirs) in enumerate(zip(first, built)):
                if ours[:3] != theirs[:3]:
                    raise ValueError(
                        f"collective {n} is {_described(ours)} in tower 0 and"
                        f" {_described(theirs)} in tower {tower}, so that they cannot meet; build"
                        " all towers alike"
                    )
            if len(built) != len(first):
                shorter, longer = sorted((first, built), key=len)
                raise ValueError(
                    f"tower 0 built {len(first)} collectives and tower {tower} {len(built)}, so"
                    f" that some would wait for ever, first {longer[len(shorter)].op}; build all"
                    " towers alike"
                )

    def _reduce(self, tower_index, tensor, kind):
        if self.size == 1:
            return tf.identity(tensor)
        built = self._built[tower_index]
        last = self._last_ops[tower_index]
        # One after the other, in the order of the build: NCCL needs one order on all devices.
        with tf.control_dependencies([] if last is None else [last]):
            total = tf.raw_ops.CollectiveReduce(
                input=tensor,
                group_size=self.size,
                group_key=self.group_key,
                instance_key=len(built) + 1,
                merge_op="Add",
                final_op="Id",
                subdiv_offsets=[0],
                communication_hint=self._communication_hint,
                timeout_seconds=self._timeout_seconds,
            )
        total.set_shape(tensor.shape)
        self._last_ops[tower_index] = total.op
        shape = str(tensor.shape).replace("None", "?")
        built.append(Collective(kind, tensor.dtype.name, shape, total.op.name))
        return total


def mean_gradients(group, devices, tower_grads):
    """Mean over all towers of every variable's gradient, in every tower.

    Args:
        group: CollectiveGroup.
        devices: utils.towers.devices.Devices; each tower's part is built on its device.
        tower_grads: K lists of N (gradient, variable) pairs: the same variables, or each tower's
            own copies of them, in the same order. A gradient is a tensor, an IndexedSlices, or
            None (counts as zero; None in every tower stays None).

    Returns:
        K lists of N (gradient, variable) pairs with each tower's variables; dense gradients, the
        same bits in every tower.

    Raises:
        ValueError: the towers' variables differ in number or shape.
    """
    _check_alike(tower_grads)
    dtypes = [
        next((grad.dtype for grad, _ in pairs if grad is not None), None)
        for pairs in zip(*tower_grads)
    ]
    copies = []
    for i, grads in enumerate(tower_grads):
        with tf.device(devices.tower_name(i)), tf.name_scope(f"all_reduce_{i}"):
            present = [
                _dense(grad, variable.shape, dtype)
                for (grad, variable), dtype in zip(grads, dtypes)
                if dtype is not None
            ]
            means = iter(
                [total * (1.0 / group.size) for total in group.all_reduce_list(i, present)]
            )
        copies.append(
            [
                (None if dtype is None else next(means), variable)
                for (_, variable), dtype in zip(grads, dtypes)
            ]
        )
    return copies


def _dense(grad, shape, dtype):
    if grad is None:
        return tf.zeros(shape, dtype)
    grad = tf.convert_to_tensor(grad)
    grad.set_shape(shape)
    return grad


def _check_alike(tower_grads):
    first = tower_grads[0]
    for tower, grads in enumerate(tower_grads[1:], start=1):
        if len(grads) != len(first):
            raise ValueError(
                f"tower {tower} has gradients of {len(grads)} variables and tower 0 of"
                f" {len(first)}; pass the same var_list to compute_gradients in every tower"
            )
        for (_, ours), (_, theirs) in zip(first, grads):
            if ours.shape != theirs.shape:
                raise ValueError(
                    f"{theirs.op.name} of tower {tower} has shape {theirs.shape} where tower 0 has"
                    f" {ours.op.name} of shape {ours.shape}; pass the variables in the same order"
                    " in every tower"
                )


def _buckets(tensors):
    """Lists of indices of `tensors`, last first, of one type and at most BUCKET_BYTES each."""
    buckets = []
    open_buckets = {}  # dtype -> (bucket, its bytes)
    for i in reversed(range(len(tensors))):
        dtype = tensors[i].dtype
        size = math.prod(tensors[i].shape.as_list()) * dtype.size
        bucket, filled = open_buckets.get(dtype, (None, 0))
        if bucket is None or filled + size > BUCKET_BYTES:
            bucket, filled = [], 0
            buckets.append(bucket)
        bucket.append(i)
        open_buckets[dtype] = bucket, filled + size
    return buckets


def _described(collective):
    return f"the {collective.kind} {collective.shape} {collective.dtype} ({collective.op})"
