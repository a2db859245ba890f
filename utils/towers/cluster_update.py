"""One update of the parameter servers' variables by all workers together.

Each worker hands in the mean of its towers' gradients. When enough have, the chief's
`aggregate_op`, which a thread of its session runs again and again, averages them, updates the
variables and puts a token for every worker's next step into a queue: the number of the update
(tf.train.SyncReplicasOptimizer). Where a worker is gone its token stays there, and another worker
could take two and hand in twice; `Tokens` is what it takes to notice that.
"""

import dataclasses

import tensorflow.compat.v1 as tf


@dataclasses.dataclass(frozen=True)
class Tokens:
    """The tokens of updates, as one worker sees them.

    Attributes:
        taken: the token that `SyncUpdate.train_op` has taken.
        last: the worker's last token, or the step at which it began.
        take: takes another one.
        put_back: op that lets another worker have `returned`.
        returned: placeholder of a token.
    """

    taken: tf.Tensor
    last: tf.Tensor
    take: tf.Tensor
    put_back: tf.Operation
    returned: tf.Tensor


@dataclasses.dataclass(frozen=True)
class SyncUpdate:
    """Ops of a synchronous update.

    Attributes:
        train_op: hands in a worker's gradients and waits for the update.
        aggregate_op: makes one update; for the chief's thread.
        close_op: ends the waiting of all workers with an OutOfRangeError.
        chief_init_op: to be run by the chief once the variables are there.
        worker_init_op: to be run by the others after that.
        backup_workers: how many workers' gradients an update does not wait for.
        tokens: Tokens.
    """

    train_op: tf.Operation
    aggregate_op: tf.Operation
    close_op: tf.Operation
    chief_init_op: tf.Operation
    worker_init_op: tf.Operation
    backup_workers: int
    tokens: Tokens


class _Inner:
    """Stands in SyncReplicasOptimizer's place for the optimizer: a whole update, not only that."""

    def __init__(self, apply):
        self._apply = apply

    def apply_gradients(self, grads_and_vars, global_step):
        return self._apply(list(grads_and_vars), global_step)


def build_sync_update(cluster, grads, global_step, apply, backup_workers=0):
    """Builds the ops of a synchronous update.

    Args:
        cluster: utils.towers.cluster.Cluster with parameter servers.
        grads: (gradient, variable) pairs of this worker.
        global_step: variable that counts the updates, on a parameter server.
        apply: function of the averaged (gradient, variable) pairs and `global_step` that returns
            the op of the update, which increases the step. It must not use this worker's towers.
        backup_workers: how many workers' gradients an update does not wait for.

    Returns:
        SyncUpdate.

    Raises:
        ValueError: there are too few workers for so many backups.
    """
    needed = cluster.num_workers - backup_workers
    if needed < 1:
        raise ValueError(
            f"--backup_workers={backup_workers} leaves none of {cluster.num_workers} workers to"
            f" wait for; pass {cluster.num_workers - 1} or less"
        )
    optimizer = tf.train.SyncReplicasOptimizer(
        _Inner(apply), replicas_to_aggregate=needed, total_num_replicas=cluster.num_workers
    )
    train_op = optimizer.apply_gradients(grads, global_step).op
    # Or a process that ends before its first step is told that nobody used it.
    optimizer.ready_for_local_init_op.mark_used()
    runner = optimizer.get_chief_queue_runner()
    return SyncUpdate(
        train_op=train_op,
        aggregate_op=runner.enqueue_ops[0],
        close_op=runner.close_op,
        chief_init_op=optimizer.chief_init_op,
        worker_init_op=optimizer.local_step_init_op,
        backup_workers=backup_workers,
        tokens=_tokens(train_op),
    )


def _tokens(train_op):
    """Tokens of an op that assigns a token from the queue to the worker's local step."""
    local_step, taken = train_op.inputs
    [queue] = taken.op.inputs
    with tf.device(taken.op.device):
        [again] = tf.raw_ops.QueueDequeueV2(handle=queue, component_types=[taken.dtype])
        returned = tf.placeholder(taken.dtype, [])
        put_back = tf.raw_ops.QueueEnqueueV2(handle=queue, components=[returned])
    with tf.device(local_step.device):
        kept = tf.raw_ops.AssignVariableOp(resource=local_step, value=again)
        with tf.control_dependencies([kept]):
            take = tf.identity(again)
        last = tf.raw_ops.ReadVariableOp(resource=local_step, dtype=taken.dtype)
    return Tokens(taken, last, take, put_back, returned)
