"""Trains a PointNet++ classifier of point clouds on one or more GPUs.

    CUDA_VISIBLE_DEVICES=0,1 python train_multi_gpu.py --num_gpus 2 --model pointnet2_cls_ssg \\
        --log_dir log --batch_size 32

Without a GPU the towers run on as many logical CPUs. The data are ModelNet40's, in --data_path:
modelnet40_ply_hdf5_2048/ or, with --normal, modelnet40_normal_resampled/. After each epoch the test
split is evaluated. Evaluation of a checkpoint, with votes: evaluate.py.
"""

import contextlib
import dataclasses
import datetime
import functools
import itertools
import os
import random
import shutil
import sys
import time

import numpy as np
import tensorflow.compat.v1 as tf
from absl import app, flags, logging

from data import data_util, modelnet
from nets import pointnet2
from nets.pointnet2 import identify
from nets.pointnet2.inputs import NUM_CLASSES
from utils import flag_checks, tf_util
from utils.log_file import LogFile, flags_line
from utils.segmentation_metrics import ClassCounts, shown
from utils.towers import (
    checkpoints,
    cluster_server,
    cluster_session,
    compat,
    context,
    devices,
    engine_flags,
    feeding,
    gradients,
    input_queue,
    input_sources,
    loop,
    schedules,
    summaries,
    train_op,
)
from utils.towers.cluster import ClusterError, cluster_of
from utils.towers.engine import Engine
from utils.towers.progress import EpochCheckpoints, Progress, read_progress

FLAGS = flags.FLAGS
# Flags that TrainGraph takes under the same names.
GRAPH_FLAGS = (
    *("model", "num_point", "batch_size", "learning_rate", "momentum", "optimizer", "decay_step"),
    *("decay_rate", "normal", "bn_updates", "as_shipped"),
)
# What ends a run with one sentence; anything else is a fault of the program and keeps its
# traceback.
STOPPING_ERRORS = (
    ClusterError,
    checkpoints.CheckpointError,
    data_util.ReaderError,
    input_queue.InputError,
    loop.NonFiniteLossError,
    modelnet.BatchError,
    OSError,
)
DATA_ERRORS = (data_util.ReaderError, input_queue.InputError, modelnet.BatchError)
READER_STATE = checkpoints.READER_STATE_SUFFIX  # beside each checkpoint: where the readers were


def define_flags():
    """Defines the original's flags, and below them ours."""
    positive = {"lower_bound": 1}
    flags.DEFINE_integer("num_gpus", 1, "number of GPUs; one tower each", **positive)
    flags.DEFINE_enum(
        "model", "pointnet2_cls_ssg", pointnet2.CLASSIFIERS, "network, a module of nets/pointnet2"
    )
    # absl has a flag of this name, which means nothing here.
    flags.DEFINE_string(
        "log_dir", "log", "folder for log, checkpoints, summaries", allow_override=True
    )
    flags.DEFINE_integer("num_point", 1024, "points of a cloud that are used", **positive)
    flags.DEFINE_integer("max_epoch", 251, "epochs in all, those before --restore included", 0)
    flags.DEFINE_integer("batch_size", 32, "clouds a step, in all; split over the towers")
    flags.DEFINE_float("learning_rate", 0.001, "at the start; see --decay_step")
    flags.DEFINE_float("momentum", 0.9, "of the optimizer momentum", 0.0)
    flags.DEFINE_enum("optimizer", "adam", ["adam", "momentum"], "adam or momentum")
    flags.DEFINE_integer(
        "decay_step", 200000, "clouds between two decays of learning rate and bn_decay", **positive
    )
    flags.DEFINE_float("decay_rate", 0.7, "factor of each decay of the learning rate", 0.0)
    flags.DEFINE_boolean("normal", False, "use normals: six channels")

    # ------------------------------- not in the original -------------------------------
    flags.DEFINE_string(
        "data_path",
        "data",
        "folder with modelnet40_ply_hdf5_2048/ or, for --normal, modelnet40_normal_resampled/",
    )
    flags.DEFINE_boolean("restore", False, "continue from the newest checkpoint of --log_dir")
    flags.DEFINE_integer(
        "seed", None, "of weights, dropout and data; chosen if not given", 0, 2**31 - 1
    )
    flags.DEFINE_integer("num_readers", 2, "readers of training data, all towers", **positive)
    flags.DEFINE_enum("reader", "thread", ["thread", "process"], "what each reader is")
    flags.DEFINE_integer(
        "max_queue_size", 8, "batches that wait in memory, all readers", **positive
    )
    flags.DEFINE_integer("save_epochs", 10, "epochs between checkpoints", **positive)
    flags.DEFINE_enum(
        "bn_updates", "in_order", train_op.BN_UPDATES, "towers that update batch norm"
    )
    flags.DEFINE_boolean(
        "as_shipped", False, "pointnet2_cls_msg with the transposed layer of its last repository"
    )
    engine_flags.define()


def tower_loss(
    pointclouds, labels, *, network, is_training, bn_decay=None, reuse_variables=None, **settings
):
    """The loss of one tower.

    Args:
        pointclouds: [batch, num_point, 3 or 6] float32.
        labels: [batch] int32.
        network: module with get_model and get_loss.
        is_training: bool.
        bn_decay: decay of the moving statistics, scalar; training only.
        reuse_variables: None in the first tower, True in the others.
        **settings: further arguments of get_model.

    Returns:
        (total_loss, pred): scalar, and [batch, classes] float32 logits.
    """
    with tf.variable_scope(tf.get_variable_scope(), reuse=reuse_variables):
        pred, end_points = network.get_model(
            pointclouds, is_training=is_training, bn_decay=bn_decay, **settings
        )
    network.get_loss(pred, labels, end_points)
    losses = tf.get_collection(tf.GraphKeys.LOSSES, tf.get_default_graph().get_name_scope() + "/")
    total_loss = tf.add_n(losses, name="total_loss")
    context.add_loss_term(total_loss)
    return total_loss, pred


def average_gradients(tower_grads):
    """Mean over the towers of each variable's gradient: K x N x 2 -> N x 2 (gradient, variable)."""
    return gradients.average_gradients(tower_grads)


class TrainGraph:
    """The training graph: inputs, towers, what a step and what an evaluation runs.

    A batch is split into slices whose sizes differ by at most one, and each tower's loss counts by
    its share, so that loss and gradients are means over the batch whatever its size.

    Args:
        place: utils.towers.devices.Devices.
        seed: of the dropout masks.
        options: utils.towers.engine_flags.EngineOptions.
        cluster: utils.towers.cluster.Cluster, or None for one process.
        queue_capacity: batches in the queue of --input=queue.
        rate_factor: factor of the learning rate, see engine_flags.
        The other keywords are the flags of the same names.
    """

    def __init__(
        self,
        place,
        *,
        model="pointnet2_cls_ssg",
        num_point=1024,
        batch_size=32,
        learning_rate=0.001,
        momentum=0.9,
        optimizer="adam",
        decay_step=200000,
        decay_rate=0.7,
        normal=False,
        bn_updates="in_order",
        as_shipped=False,
        seed=0,
        options=engine_flags.DEFAULTS,
        cluster=None,
        queue_capacity=2,
        rate_factor=1,
    ):
        network, settings = pointnet2.load_network(model, as_shipped)
        self.network = network
        with tf.device(place.host):
            specs = input_queue.specs_of(
                lambda: network.placeholder_inputs(None, num_point, normal=normal)
            )
            self.inputs = input_queue.training_inputs(options.input, place, specs, queue_capacity)
            self.pointclouds_pl, self.labels_pl = self.inputs.tensors
            with tf.device(place.step_device):
                self.batch = tf.get_variable(
                    "batch",
                    [],
                    initializer=tf.constant_initializer(0),
                    trainable=False,
                    use_resource=True,
                )
            # Read once, because the step changes it: all below use the value before the step.
            step = self.batch.read_value()
            clouds = batch_size * options.accumulate_steps * num_workers(cluster)  # of an update
            self.bn_decay = schedules.get_bn_decay(step, batch_size=clouds, decay_step=decay_step)
            self.learning_rate = schedules.scale_learning_rate(
                schedules.get_learning_rate(
                    step,
                    learning_rate=learning_rate,
                    batch_size=clouds,
                    decay_step=decay_step,
                    decay_rate=decay_rate,
                ),
                step,
                factor=rate_factor,
                warmup_steps=options.warmup_steps,
            )

            def make_optimizer():
                if optimizer == "momentum":
                    return tf.train.MomentumOptimizer(self.learning_rate, momentum=momentum)
                return tf.train.AdamOptimizer(self.learning_rate)

            self.engine = engine = Engine(
                place, options, make_optimizer, self.batch, self.inputs.whole(1), cluster
            )
            slices, weights = self.inputs.split(feeding.split_evenly)

        towers, tower_grads, losses, preds = [], [], [], []
        reuse_variables = None
        for i in range(place.num_towers):
            with engine.tower(i) as tower:
                total_loss, pred = tower_loss(
                    *slices[i],
                    network=network,
                    is_training=True,
                    bn_decay=self.bn_decay,
                    reuse_variables=reuse_variables,
                    dropout_seed=tf_util.dropout_seed(seed, step, engine.random_stream(i)),
                    **settings,
                )
                reuse_variables = True
                total_loss *= weights[i]
                tower_grads.append(engine.compute_gradients(total_loss))
            towers.append(tower)
            losses.append(total_loss)
            preds.append(pred)

        eval_towers, eval_losses, eval_preds = [], [], []
        for i in range(place.num_towers):
            with engine.tower(i, training=False) as tower:
                total_loss, pred = tower_loss(
                    *self.inputs.fed_slices[i],
                    network=network,
                    is_training=False,
                    reuse_variables=True,
                    **settings,
                )
                eval_losses.append(total_loss * self.inputs.fed_weights[i])
            eval_towers.append(tower)
            eval_preds.append(pred)

        with tf.device(place.host):
            grads = engine.combine_gradients(tower_grads, average_gradients, towers)
            engine.build_train_op(grads, towers, bn_updates=bn_updates)
            self.train_op = engine.train_op
            share = 1.0 / place.num_towers
            self.loss = gradients.add_in_order(losses) * share
            self.pred = tf.concat(preds, 0)
            self.eval_loss = gradients.add_in_order(eval_losses) * share
            self.eval_pred = tf.concat(eval_preds, 0)
            self.nonfinite = loop.first_nonfinite(towers)
            schedule_summaries = [
                tf.summary.scalar("bn_decay", self.bn_decay),
                tf.summary.scalar("learning_rate", self.learning_rate),
            ]
            self.summary_op = self._summary(
                "accuracy",
                self.pred,
                self.inputs.whole(1),
                towers,
                [*schedule_summaries, *engine.summaries],
            )
            self.eval_summary_op = self._summary(
                "eval_accuracy", self.eval_pred, self.labels_pl, eval_towers
            )
        self.towers = towers

    @staticmethod
    def _summary(name, pred, labels, towers, others=()):
        """Serialized summary of the towers' losses and the accuracy of the batch."""
        correct = tf.equal(tf.argmax(pred, 1, output_type=tf.int32), labels)
        accuracy = tf.reduce_mean(tf.cast(correct, tf.float32))
        of_towers = [summary for tower in towers for summary in tower.summaries]
        return tf.summary.merge([*of_towers, *others, tf.summary.scalar(name, accuracy)])

    def feed(self, batch):
        """feed_dict of a batch of data.modelnet.SharedBatches."""
        return self.inputs.feed(self.arrays(batch))

    @staticmethod
    def arrays(batch):
        """The arrays of a batch of data.modelnet.SharedBatches, in the order of the inputs."""
        return batch["points"], batch["labels"]


@dataclasses.dataclass(frozen=True)
class Data:
    """The data sets of a training.

    Attributes:
        make_datasets: {split: function of rng= that makes the data set}.
        folders: that they lie in.
        training: text that is the same for the same training clouds.
    """

    make_datasets: dict
    folders: list
    training: str


def check_flags():
    """Checks what no graph is needed for.

    Returns:
        Tuple (place, options, cluster, data): the towers' Devices, the EngineOptions, the Cluster
        or None, and the Data, None in a parameter server.

    Raises:
        ValueError, OSError: a flag or the data can't be used; one sentence.
    """
    compat.check_tensorflow()
    options = engine_flags.options_from_flags(FLAGS)
    cluster = cluster_of(options)
    if cluster and cluster.is_parameter_server:
        return None, options, cluster, None
    place = devices.resolve_num_gpus(FLAGS.num_gpus)
    options, place = engine_flags.settle(options, place, cluster, FLAGS)
    feeding.check_batch_size(FLAGS.batch_size, place.num_towers)
    if not FLAGS.learning_rate > 0:
        raise ValueError(f"--learning_rate={FLAGS.learning_rate} must be above 0; use 0.001")
    for name in ("num_gpus", "clip_norm"):
        flag_checks.check_finite(FLAGS, name)
    pointnet2.load_network(FLAGS.model, FLAGS.as_shipped)  # raises if they do not fit
    FLAGS.data_path = os.path.expanduser(FLAGS.data_path)
    make_datasets = {
        split: functools.partial(
            modelnet.make_dataset,
            split,
            data_path=FLAGS.data_path,
            normal=FLAGS.normal,
            num_point=FLAGS.num_point,
            # Workers divide each training batch among them; the chief alone evaluates.
            batch_size=FLAGS.batch_size * workers,
        )
        for split, workers in (("train", num_workers(cluster)), ("test", 1))
    }
    folders, contents = [], {}
    for split, make_dataset in make_datasets.items():
        dataset = make_dataset(rng=np.random.RandomState(0))
        contents[split] = modelnet.check_dataset(dataset, NUM_CLASSES)
        folders += modelnet.folders(dataset)
    clouds, checksum = contents["train"]
    batches = -(-clouds // (FLAGS.batch_size * num_workers(cluster)))
    if options.accumulate_steps > batches:
        raise ValueError(
            f"--accumulate_steps={options.accumulate_steps} batches are more than the {batches} of"
            f" an epoch of {clouds} clouds; pass {batches} or less"
        )
    return (
        place,
        options,
        cluster,
        Data(make_datasets, folders, f"{clouds} clouds, checksum {checksum}"),
    )


def num_workers(cluster):
    """Number of workers of a cluster, or 1 without one."""
    return cluster.num_workers if cluster else 1


def reader_settings():
    """What the batches of a seed depend on: saved beside a checkpoint and compared on --restore."""
    return {name: FLAGS[name].value for name in ("batch_size", "num_point", "normal")}


def train(stop):
    """Trains until --max_epoch or a signal."""
    found = progress = directory = None
    try:
        place, options, cluster, data = check_flags()
        if cluster and cluster.is_parameter_server:
            cluster_server.serve(cluster, timeout_seconds=options.cluster_timeout)
            return
        bytes_per_batch = 4 * FLAGS.batch_size * (FLAGS.num_point * (6 if FLAGS.normal else 3) + 1)
        queue_capacity = input_queue.queue_capacity(options, bytes_per_batch)
        if cluster is None or cluster.is_chief:
            directory = checkpoints.prepare_checkpoint_directory(
                FLAGS.log_dir,
                FLAGS.restore,
                protected=[
                    FLAGS.data_path,
                    *data.folders,
                    os.path.dirname(os.path.abspath(__file__)),
                ],
                flag="--log_dir",
            )
        if FLAGS.restore:
            found = checkpoints.newest_undamaged(directory.path if directory else FLAGS.log_dir)
            identify.check_checkpoint(
                found.prefix,
                found.shapes,
                model=FLAGS.model,
                normal=FLAGS.normal,
                as_shipped=FLAGS.as_shipped,
            )
            progress = read_progress(found.prefix)
    except (ValueError, OSError) as error:
        sys.exit(f"error: {error}")
    done = progress.epoch if progress else 0
    if done >= FLAGS.max_epoch:
        print(f"nothing to do: {done} epochs are done, as --max_epoch={FLAGS.max_epoch} asks for")
        return
    seed = FLAGS.seed
    if seed is None:
        seed = progress.seed if progress else random.SystemRandom().randrange(2**31)
    elif progress and progress.seed != seed:
        logging.warning(
            "--seed=%d, but the training was begun with seed %d: its dropout differs from now on,"
            " the order of its data goes on as it was; without --seed it goes on exactly",
            seed,
            progress.seed,
        )

    log_path = os.path.join(directory.path, "log_train.txt") if directory else os.devnull
    log = LogFile(log_path, append=FLAGS.restore)
    with tf.Graph().as_default() as graph:
        log.write(flags_line(FLAGS, "num_gpus", "variable_update"))
        log.log_string(f"pid: {os.getpid()}")
        log.log_string(place.describe(FLAGS.batch_size // place.num_towers))
        log.log_string(
            f"seed {seed}; {'with' if FLAGS.normal else 'without'} normals; augmentation: turn"
            " about the up axis, small turns, scale, shift, jitter, order of points"
        )
        tf.set_random_seed(seed)
        net = TrainGraph(
            place,
            seed=seed,
            options=options,
            cluster=cluster,
            queue_capacity=queue_capacity,
            rate_factor=options.learning_rate_factor(
                FLAGS.batch_size // place.num_towers, place.num_towers * num_workers(cluster)
            ),
            **{name: FLAGS[name].value for name in GRAPH_FLAGS},
        )
        if options.input == "queue":
            log.log_string(net.inputs.describe(bytes_per_batch))
        savers = None
        if directory:
            with tf.device(place.host):
                savers = EpochCheckpoints(directory.path, log.log_string, "--log_dir")
        init = tf.global_variables_initializer()
        session = cluster_session.make_session(
            cluster,
            place,
            net.engine,
            init,
            stop,
            options.cluster_timeout,
            engine_flags.settings_of_worker(
                options,
                place,
                seed,
                max_epoch=FLAGS.max_epoch,
                training_data=data.training,
                **{name: FLAGS[name].value for name in GRAPH_FLAGS},
            ),
        )
        graph.finalize()
        if directory:
            for file in (net.network.__file__, __file__):  # as the original does
                shutil.copy(file, directory.path)

        def initialise(sess):
            """Initial values or those of a checkpoint; again where parameter servers lost them."""
            sess.run(init)
            if found is not None or tf.train.latest_checkpoint(directory.path):
                restored = checkpoints.restore_training(
                    sess, directory.path, step_name="batch", describe=identify.describe_checkpoint
                )
                log.log_string(f"Model restored from file: {restored.prefix}")

        def train_from(found):
            """Trains with the data that follow a checkpoint, or from their beginning."""
            progress = read_progress(found.prefix) if found else Progress(seed)
            if progress is None:
                logging.warning("nothing tells the epoch: counting from 0")
                progress = Progress(seed)
            progress.seed, progress.settings = seed, reader_settings()
            states = None
            if found is not None:
                path = found.prefix + READER_STATE
                states = data_util.state_to_continue(path, FLAGS.num_readers, reader_settings())
                progress.trained = progress.trained and states is not None
            reader_options = {
                "seed": seed,
                "reader": FLAGS.reader,
                "max_queue_size": FLAGS.max_queue_size,
            }
            towers = place.num_towers
            with contextlib.ExitStack() as opened:
                test_batches = None
                if directory:  # the chief alone evaluates
                    test_readers = opened.enter_context(
                        modelnet.make_readers(
                            data.make_datasets["test"], augment=False, **reader_options
                        )
                    )
                    test_batches = modelnet.SharedBatches(test_readers, towers, NUM_CLASSES)
                    stop.at_abort(test_readers.stop)
                train_readers = opened.enter_context(
                    modelnet.make_readers(
                        data.make_datasets["train"],
                        augment=True,
                        num_readers=FLAGS.num_readers,
                        states=states,
                        worker=cluster.task if cluster else 0,
                        num_workers=num_workers(cluster),
                        **reader_options,
                    )
                )
                stop.at_abort(train_readers.stop)
                session.defer_signals()
                smallest = min(2, FLAGS.batch_size // towers) * towers
                source = opened.enter_context(
                    input_sources.make_source(
                        net.inputs,
                        session.session,
                        modelnet.SharedBatches(train_readers, smallest, NUM_CLASSES).get,
                        arrays=net.arrays,
                        keep=lambda batch: {**batch, "points": None},
                        stop_readers=train_readers.stop,
                    )
                )
                run_epochs(
                    Run(
                        session,
                        net,
                        savers,
                        log,
                        progress,
                        source=source,
                        test_batches=test_batches,
                        train_writer=writers.get("train"),
                        test_writer=writers.get("test"),
                        state=train_readers.get_state(),
                        first_step=session.step,
                    )
                )

        with session.started(initialise), contextlib.ExitStack() as opened_writers:
            writers = {}
            if directory:  # the chief alone writes summaries
                writers = {
                    split: opened_writers.enter_context(
                        summaries.SummaryWriter(os.path.join(directory.path, split), graph)
                    )
                    for split in ("train", "test")
                }
            cluster_session.train_and_rewind(session, train_from, found, FLAGS.log_dir)


@dataclasses.dataclass
class Run:
    """What the training loop works with.

    Attributes:
        state: of the readers, after the last batch that was trained on.
        first_step: number of training steps when this run began.
        The others as in `train`; None in a worker that is not the chief: savers, test_batches and
        the writers.
    """

    session: cluster_session.LocalSession
    net: TrainGraph
    savers: EpochCheckpoints | None
    log: LogFile
    progress: Progress
    source: input_sources.FeedSource
    test_batches: modelnet.SharedBatches | None
    train_writer: summaries.SummaryWriter | None
    test_writer: summaries.SummaryWriter | None
    state: dict
    first_step: int

    def checkpoint(self):
        """Arguments of EpochCheckpoints.save."""
        write_state = functools.partial(
            data_util.save_reader_state, state=self.state, settings=reader_settings()
        )
        step = self.session.current_step()
        return self.session.session, step, self.progress, {READER_STATE: write_state}

    def save_if_best(self, accuracy):
        """Saves the best checkpoint so far once more, in the chief."""
        self.session.until_done(lambda: self.savers.save_if_best(accuracy, *self.checkpoint()))

    def save(self):
        """Saves a checkpoint, in the chief."""
        if self.savers:
            self.session.until_done(lambda: self.savers.save(*self.checkpoint()))


def run_epochs(run):
    """The training loop: epochs, each with its evaluation, until --max_epoch or a signal."""
    progress = run.progress
    try:
        while progress.epoch < FLAGS.max_epoch:
            run.log.log_string(f"**** EPOCH {progress.epoch:03d} ****")
            train_one_epoch(run)
            accuracy = eval_one_epoch(run) if run.savers else None
            epoch, progress.epoch, progress.trained = progress.epoch, progress.epoch + 1, False
            if run.savers:
                run.save_if_best(accuracy)
            if epoch % FLAGS.save_epochs == 0:
                run.save()
    except loop.StopRequested:
        run.log.log_string(f"stopped in epoch {progress.epoch:03d}")
    except DATA_ERRORS:  # the weights are good
        if run.session.step > run.first_step:
            run.save()
        raise
    run.save()


def train_one_epoch(run):
    """One `session.run` a batch, to the end of the epoch."""
    net, log = run.net, run.log
    updates = itertools.cycle(net.engine.ops_of_update)
    log.log_string(str(datetime.datetime.now()))
    total_correct = total_seen = batch_idx = 0
    loss_sum = 0.0
    clouds, waited, start = 0, 0.0, time.time()
    op = net.train_op
    while not run.progress.trained:
        # An update that has begun is not left: the batch-norm statistics have its first batches.
        begins = op is net.train_op
        if begins and run.session.should_stop():
            raise loop.StopRequested
        with run.session.interruptible() if begins else contextlib.nullcontext():
            feed, batch, state = run.source.get()
        waited += run.source.wait_seconds()
        op = net.train_op if batch["last"] else next(updates)
        step = run.session.step
        fetches = {"loss": net.loss, "pred": net.pred, "nonfinite": net.nonfinite}
        if op is net.train_op:
            fetches |= net.engine.watched
            if run.train_writer:
                fetches["summary"] = net.summary_op
        values, _ = run.session.run_step([fetches, op], feed)
        loop.check_finite(values["nonfinite"], net.towers, step=step, files=batch["names"])
        if op is net.train_op:
            if message := net.engine.overflow_message(values, step):
                log.log_string(message)
            if run.train_writer:
                run.train_writer.add_summary(values["summary"], step)
            run.state, run.progress.trained = state, batch["last"]

        pred_val = values["pred"]
        total_correct += np.sum(np.argmax(pred_val, 1) == batch["labels"])
        total_seen += len(batch["labels"])
        clouds += len(batch["labels"])
        loss_sum += values["loss"]
        batch_idx += 1
        if batch_idx % 50 == 0:
            log.log_string(f" ---- batch: {batch_idx:03d} ----")
            log.log_string(f"mean loss: {loss_sum / 50:f}")
            log.log_string(f"accuracy: {total_correct / total_seen:f}")
            total_correct = total_seen = 0
            loss_sum = 0.0
    seconds = max(time.time() - start, 1e-9)
    log.log_string(
        f"trained on {clouds} clouds in {batch_idx} batches, {clouds / seconds:.1f} clouds/second,"
        f" {100 * waited / seconds:.0f}% waiting for input"
    )


def eval_one_epoch(run):
    """Evaluates the test split, every cloud once; returns its accuracy."""
    net, log = run.net, run.log
    log.log_string(str(datetime.datetime.now()))
    log.log_string(f"---- EPOCH {run.progress.epoch:03d} EVALUATION ----")
    counts, loss_sum = ClassCounts(NUM_CLASSES), 0.0
    fetches = [net.eval_summary_op, net.eval_loss, net.eval_pred]
    last = False
    while not last:
        with run.session.interruptible():
            batch, _ = run.test_batches.get()
        feed = net.feed(batch)
        summary, loss_val, pred_val = run.session.until_done(
            lambda feed=feed: run.session.run(fetches, feed)
        )
        run.test_writer.add_summary(summary, run.session.step)
        counts.add(batch["labels"], np.argmax(pred_val, 1))
        loss_sum += loss_val * len(batch["labels"])
        last = batch["last"]
    if not np.isfinite(loss_sum):
        raise loop.NonFiniteLossError(
            f"the loss of the evaluation of epoch {run.progress.epoch} is not finite; the weights"
            " of this epoch were not saved. Lower the learning rate, or look at the test clouds"
        )
    log.log_string(f"eval mean loss: {loss_sum / counts.seen.sum():f}")
    log.log_string(f"eval accuracy: {counts.accuracy():f}")
    log.log_string(f"eval avg class acc: {shown(counts.average_class_accuracy())}")
    return counts.accuracy()


def main(argv):
    if len(argv) > 1:
        sys.exit(f"error: unexpected argument {argv[1]}; every flag starts with --")
    loop.run_script(train, STOPPING_ERRORS)


if __name__ == "__main__":
    define_flags()
    app.run(main)
