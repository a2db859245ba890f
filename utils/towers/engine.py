"""What the engine flags change in a training graph, between the towers and the train op.

    engine = Engine(place, options, make_optimizer, global_step)
    for i in range(place.num_towers):
        with engine.tower(i) as tower:
            loss = tower_loss(...)
            tower_grads.append(engine.compute_gradients(loss))
        towers.append(tower)
    with tf.device(place.host):
        copies = engine.combine_gradients(tower_grads, average_gradients, towers)
        engine.build_train_op(copies, towers, variable_averages, bn_updates)
    ...
    session.run(initialize)  # or restore
    session.run(engine.synchronize)

The way of a gradient: computed in its tower, of the scaled loss; added up over `accumulate_steps`
batches in its tower; compressed; combined over the towers; then decompressed and unscaled, the
regularization's gradient is added, and the global norm clipped. A parameter server gets it
compressed as well, and synchronous workers clip what they have averaged.
"""

import contextlib

import tensorflow.compat.v1 as tf

from utils.towers import (
    averages,
    cluster_update,
    collectives,
    compat,
    compilation,
    context,
    gradients,
    layer_options,
    packing,
    precision,
    recompute,
    train_op,
)
from utils.towers.accumulation import Accumulators
from utils.towers.replication import Replicas


class Engine:
    """Puts the parts of a step together as the flags say.

    Attributes:
        train_op: op of one update.
        accumulate_op: op that adds up the gradients of one batch without an update; None where
            every batch makes an update.
        ops_of_update: the ops of one update, one for each of its batches; the last is `train_op`.
        synchronize: op to be run once, after the variables are initialized or restored.
        sync_update: utils.towers.cluster_update.SyncUpdate where workers with parameter servers
            wait for each other, else None.
        global_step: variable that counts the updates.
        queued_input: whether a session of this graph holds batches that wait for their step.
        summaries: list of summaries of what the flags switched on.
        watched: dict name -> tensor, to be fetched with `train_op`; see `overflow_message`.

    Args:
        place: utils.towers.devices.Devices.
        options: utils.towers.engine_flags.EngineOptions.
        make_optimizer: function without arguments that makes a tf.train.Optimizer.
        global_step: variable that counts the updates.
        inputs: tensor whose first axis is the batch of all towers; only its size matters.
        cluster: utils.towers.cluster.Cluster, or None for one process.
    """

    def __init__(self, place, options, make_optimizer, global_step, inputs, cluster=None):
        self._place = place
        self._options = options
        self._cluster = cluster
        self._synchronous = bool(cluster and cluster.ps_hosts and not options.async_updates)
        self.sync_update = None
        self._compressed = options.compress_gradients == "float16"
        self._replicas = self._group = None
        if options.replicated:
            self._replicas = Replicas(place, [make_optimizer() for _ in range(place.num_towers)])
        if options.replicated or options.sync_bn:
            workers = cluster.num_workers if cluster and not cluster.ps_hosts else 1
            self._group = collectives.CollectiveGroup(
                place.num_towers,
                num_workers=workers,
                communication_hint="nccl" if place.kind == "GPU" else "auto",
            )
        self._optimizer = self._replicas or make_optimizer()
        self.global_step = global_step
        self.queued_input = options.input == "queue"
        self._loss_scale = self._batch_finite = None
        if options.compute_dtype == "float16":
            with tf.device(place.host):
                self._loss_scale = precision.LossScale()
        self._accumulators = None
        if options.accumulate_steps > 1:
            self._accumulators = Accumulators(place, inputs)
        # Of variables on parameter servers, by name: (variable, where it is read, value here).
        self._fetched = {}
        self._synchronize = []
        self.summaries = []
        self.watched = {}
        self.train_op = self.accumulate_op = self.synchronize = self.ops_of_update = None

    @contextlib.contextmanager
    def tower(self, index, training=True):
        """Enters tower `index`: `context.tower_context`, and what layers built in it must know.

        Args:
            index: number of the tower, 0 first.
            training: False for a tower that only evaluates.

        Yields:
            utils.towers.context.Tower.
        """
        with contextlib.ExitStack() as stack:
            if self._replicas:
                stack.enter_context(self._replicas.tower_variables(index))
            if self._place.parameter_servers:
                stack.enter_context(
                    tf.variable_scope(
                        tf.get_variable_scope(),
                        custom_getter=self._get_fetched,
                        auxiliary_name_scope=False,
                    )
                )
            tower = stack.enter_context(context.tower_context(self._place, index))
            if training:
                stack.enter_context(layer_options.scope(self._layer_options(index)))
                stack.enter_context(compilation.tower_scope(self._options.xla))
            self._current = index
            yield tower

    def _get_fetched(self, getter, name, **keywords):
        """Custom getter of `tf.get_variable`: a weight as this worker's towers share it.

        It is fetched from its parameter server once a step, and not once for each tower.
        """
        variable = getter(name, **keywords)
        if not variable.trainable:
            return variable
        if name not in self._fetched:
            with tf.device(variable.device):
                read = variable.read_value()
            with tf.device(self._place.host):
                self._fetched[name] = variable, read, tf.identity(read)
        return self._fetched[name][-1]

    def _fetch_together(self):
        """Lets weights come in few messages, now that all towers have said what they need."""
        fetched = self._fetched.values()
        reads = [read for _, read, _ in fetched]
        servers = [variable.device for variable, _, _ in fetched]
        together = packing.move(reads, servers, [self._place.host] * len(reads))
        for (_, _, value), moved in zip(fetched, together, strict=True):
            compat.replace_input(value.op, 0, moved)

    def _to_servers(self, grads):
        """Gradients on their way to their parameter servers, as packing.PackedGradients."""
        if self._compressed:
            grads = precision.compress(grads)
        packed = packing.PackedGradients(grads, self._place.host)
        if self._compressed:
            packed.pairs = [self._decompressed(*pair) for pair in packed.pairs]
        return packed

    @staticmethod
    def _decompressed(grad, target):
        """(gradient, target), where the target is."""
        with tf.device(target.device):
            return precision.decompress([(grad, target)])[0]

    def _layer_options(self, index):
        """What layers in a tower that trains must know."""
        synchronized = self._options.sync_bn
        return layer_options.LayerOptions(
            compute_dtype=tf.as_dtype(self._options.compute_dtype),
            sum_over_towers=self._group.sum_over_towers(index) if synchronized else None,
        )

    def random_stream(self, index):
        """Number that tells a tower's random draws from all others of the same update.

        Args:
            index: number of the tower in this worker.

        Returns:
            An int, or an int32 scalar tensor where an update has several batches.
        """
        towers = self._place.num_towers
        if self._cluster:
            index += towers * self._cluster.task
            towers *= self._cluster.num_workers
        if self._accumulators is None:
            return index
        return index + towers * self._accumulators.samples_before

    def compute_gradients(self, loss):
        """Gradients of a tower's loss; called inside the tower.

        Args:
            loss: float32 scalar.

        Returns:
            List of (gradient, variable), as of `tf.train.Optimizer.compute_gradients`.
        """
        if self._loss_scale:
            loss = self._loss_scale.scale(loss)
        if self._options.recompute:
            variables = tf.trainable_variables()
            if self._replicas:
                variables = self._replicas.variables(self._current)
            found = recompute.gradients(loss, variables, gradients.PAIRWISE)
            return list(zip(found, variables))
        if self._replicas:
            return self._replicas.compute_gradients(
                self._current, loss, aggregation_method=gradients.PAIRWISE
            )
        return self._optimizer.compute_gradients(loss, aggregation_method=gradients.PAIRWISE)

    def combine_gradients(self, tower_grads, average_gradients, towers, add_regularization=False):
        """Combines the towers' gradients into those of the update.

        Args:
            tower_grads: K lists of N (gradient, variable) pairs.
            average_gradients: function of `tower_grads` that returns one list with the means.
            towers: list of utils.towers.context.Tower.
            add_regularization: whether to add the gradient of `tower.regularization_losses`, which
                does not depend on the batch: once, and not in every tower's loss.

        Returns:
            One list of N (gradient, variable) pairs for each copy of the variables.
        """
        if self._loss_scale and self._accumulators:
            of_all_towers = [pair for grads in tower_grads for pair in grads]
            self._batch_finite = precision.all_finite(of_all_towers)
        if self._accumulators:
            tower_grads = self._accumulators.totals(tower_grads)
        if self._compressed:
            tower_grads = [
                self._on_tower(i, precision.compress, grads) for i, grads in enumerate(tower_grads)
            ]
        if self._replicas:
            copies = collectives.mean_gradients(self._group, self._place, tower_grads)
        else:
            with tf.device(self._place.variable_device(0)):
                if self._compressed:
                    tower_grads = [precision.decompress(grads) for grads in tower_grads]
                copies = [average_gradients(tower_grads)]
        if self._group:
            self._group.check()
        for index, grads in enumerate(copies):
            with tf.device(self._place.variable_device(index)):
                if self._compressed and self._replicas:
                    grads = precision.decompress(grads)
                if self._loss_scale:
                    grads = self._loss_scale.unscale(grads)
                if add_regularization:
                    regularization_loss = tf.add_n(towers[index].regularization_losses)
                    grads = gradients.add_regularization(grads, regularization_loss)
                # Workers that wait for each other clip what they have averaged.
                if self._options.clip_norm and not self._synchronous:
                    grads, norm = self._clipped(grads)
                    if index == 0:
                        self._summarize_norm(norm)
                copies[index] = grads
                if self._place.parameter_servers and not self._synchronous:
                    packed = self._to_servers(copies[index])
                    copies[index] = packed.unpack(packed.pairs)
        self._fetch_together()
        return copies

    def _on_tower(self, index, function, *args):
        """Result of a function that builds ops, on a tower's device."""
        with tf.device(self._place.tower_name(index)):
            return function(*args)

    def build_train_op(self, copies, towers, variable_averages=None, bn_updates="last"):
        """Builds `train_op`, `accumulate_op` and `synchronize`.

        Args:
            copies: what `combine_gradients` returned.
            towers, variable_averages, bn_updates: see utils.towers.train_op.build_train_op.
        """
        if self._options.sync_bn:
            bn_updates = "first"  # all towers have the same statistics
        if self._place.parameter_servers and (self._cluster.is_chief or not self._synchronous):
            self._send_statistics(train_op.updating_towers(towers, bn_updates))
        update_batch_norm = None
        if self._accumulators:
            # Every batch counts for the statistics, those without an update as well.
            update_batch_norm = self._guarded_batch_norm_updates(towers, bn_updates)
            self.accumulate_op = tf.group(
                self._accumulators.add_op, update_batch_norm, name="accumulate_op"
            )

        def update():
            return train_op.build_train_op(
                self._optimizer,
                copies if self._replicas else copies[0],
                self.global_step,
                towers,
                variable_averages,
                bn_updates,
                batch_norm_updates_op=update_batch_norm,
            )

        with tf.device(self._place.variable_device(0)):
            if self._synchronous:
                self.train_op = self._build_sync_train_op(
                    copies[0], towers, variable_averages, bn_updates, update_batch_norm
                )
            elif self._loss_scale:
                self.train_op = self._build_guarded_train_op(copies[0], update)
            else:
                self.train_op = update()
        if self._replicas:
            self._synchronize.append(self._replicas.synchronize_op())
        if self._accumulators:
            with tf.control_dependencies([self.train_op]):
                self.train_op = tf.group(self._accumulators.clear(), name="train_op_and_clear")
            self._synchronize.append(self._accumulators.clear())
        waiting = self._options.accumulate_steps - 1
        self.ops_of_update = [*[self.accumulate_op] * waiting, self.train_op]
        self.synchronize = tf.group(*self._synchronize, name="synchronize")

    def _send_statistics(self, towers):
        """Lets batch-norm statistics of these towers travel in few messages."""
        updates = [
            update
            for tower in towers
            for update in tower.update_ops
            if isinstance(update, averages.MovingAverageUpdate)
        ]
        values = [update.value for update in updates]
        moved = packing.move(
            values, [value.device for value in values], [update.device for update in updates]
        )
        for update, value in zip(updates, moved, strict=True):
            update.value = value

    def overflow_message(self, values, step):
        """What to tell of a step whose update was skipped.

        Args:
            values: dict with what was fetched of `watched`.
            step: number of the step.

        Returns:
            A sentence, or None.
        """
        scale = values.get("overflow", 0.0)
        if not scale:
            return None
        return (
            f"Step {step:06d}: gradients overflow in float16 at loss scale {scale:.0f}; this update"
            " is skipped"
        )

    def _build_guarded_train_op(self, grads, update):
        """The update where all gradients are finite; a step without it is counted all the same."""
        finite = precision.all_finite(grads)
        scale = self._loss_scale.value
        self.watched["overflow"] = tf.where_v2(finite, 0.0, scale)
        self.summaries.append(tf.summary.scalar("float16_loss_scale", scale))
        guarded = self._loss_scale.guarded(finite, update)
        with tf.control_dependencies([guarded]):
            skipped = tf.where_v2(finite, 0.0, 1.0)
            counted = self.global_step.assign_add(
                tf.cast(skipped, self.global_step.dtype), read_value=False
            )
        return tf.group(counted, name="train_op")

    def _guarded_batch_norm_updates(self, towers, bn_updates):
        """Batch-norm updates, where the loss is scaled only of batches that do not overflow."""
        if self._batch_finite is None:
            return train_op.batch_norm_updates(towers, bn_updates)

        def updated():
            with tf.control_dependencies([train_op.batch_norm_updates(towers, bn_updates)]):
                return tf.constant(True)

        return tf.cond(self._batch_finite, updated, lambda: tf.constant(False)).op

    def _build_sync_train_op(self, grads, towers, variable_averages, bn_updates, update_batch_norm):
        """Hands the gradients in and waits for all workers' update; see `cluster_update`.

        The chief alone updates the batch-norm statistics, after that.
        """
        packed = self._to_servers(grads)

        def update(averaged, global_step):
            averaged = packed.unpack(averaged)
            reports = []
            if self._options.clip_norm:
                averaged, norm = self._clipped(averaged)
                reports.append(self._report_norm(norm))
            updated = train_op.build_train_op(
                self._optimizer,
                averaged,
                global_step,
                towers,
                variable_averages,
                batch_norm_updates_op=tf.no_op(),
            )
            return tf.group(updated, *reports)

        self.sync_update = cluster_update.build_sync_update(
            self._cluster, packed.pairs, self.global_step, update, self._options.backup_workers
        )
        with tf.control_dependencies([self.sync_update.train_op]):
            if not self._cluster.is_chief:
                return tf.no_op(name="train_op")
            if update_batch_norm is None:
                update_batch_norm = train_op.batch_norm_updates(towers, bn_updates)
            return tf.group(update_batch_norm, name="train_op")

    def _clipped(self, grads):
        """(gradients scaled down to a global norm of `clip_norm` at most, their norm before)."""
        values, norm = tf.clip_by_global_norm([grad for grad, _ in grads], self._options.clip_norm)
        return list(zip(values, [variable for _, variable in grads])), norm

    def _summarize_norm(self, norm):
        self.summaries.append(tf.summary.scalar("gradient_norm", norm))

    def _report_norm(self, norm):
        """An op that keeps the norm for the summary of the step that follows.

        The thread that makes synchronous updates fetches nothing.
        """
        with tf.device(self._place.step_device):
            kept = tf.get_variable(
                "cluster/gradient_norm",
                [],
                initializer=tf.zeros_initializer(),
                trainable=False,
                collections=[],
                use_resource=True,
            )
        self._synchronize.append(kept.initializer)
        self._summarize_norm(kept.read_value())
        return kept.assign(norm).op
