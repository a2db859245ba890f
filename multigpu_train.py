"""Trains EAST on one or more GPUs; one tower per entry of --gpu_list.

    CUDA_VISIBLE_DEVICES=0,1 python multigpu_train.py --gpu_list=0,1 --input_size=512 \\
        --batch_size_per_gpu=14 --checkpoint_path=/tmp/east_icdar2015_resnet_v1_50_rbox/ \\
        --text_scale=512 --training_data_path=/data/ocr/icdar2015/ --geometry=RBOX \\
        --learning_rate=0.0001 --num_readers=24 --pretrained_model_path=/tmp/resnet_v1_50.ckpt

Without a GPU the towers run on as many logical CPUs. The data are ICDAR 2015 folders: pictures,
each with a text file beside it (`python -m data.icdar --training_data_path=...` checks a folder).
Evaluation: eval.py.
"""

import contextlib
import functools
import math
import os
import random
import sys
import zlib

import numpy as np
import tensorflow.compat.v1 as tf
from absl import app, flags

from data import data_util, icdar, icdar_files
from nets import east
from utils import flag_checks
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

FLAGS = flags.FLAGS
# Flags that TrainGraph takes under the same names.
GRAPH_FLAGS = (
    *("learning_rate", "decay_steps", "decay_rate", "moving_average_decay", "text_scale"),
    *("bn_decay", "bn_updates"),
)
# What ends a run with one sentence; anything else is a fault of the program and keeps its
# traceback.
STOPPING_ERRORS = (
    ClusterError,
    checkpoints.CheckpointError,
    data_util.ReaderError,
    input_queue.InputError,
    loop.NonFiniteLossError,
)
# (name, dtype, shape, dtype in a queue) of what a step is given; the crops are 8-bit pictures.
INPUT_SPECS = (
    ("input_images", tf.float32, [None, None, None, 3], tf.uint8),
    ("input_score_maps", tf.float32, [None, None, None, 1], None),
    ("input_geo_maps", tf.float32, [None, None, None, 5], None),
    ("input_training_masks", tf.float32, [None, None, None, 1], None),
)
READER_STATE = checkpoints.READER_STATE_SUFFIX  # beside each checkpoint: where the readers were


def define_flags():
    """Defines the original's flags, and below them ours."""
    positive = {"lower_bound": 1}
    flags.DEFINE_integer("input_size", 512, "side of a training crop in pixels", 32)
    flags.DEFINE_integer("batch_size_per_gpu", 14, "crops per tower and step", **positive)
    flags.DEFINE_integer("num_readers", 16, "reader threads or processes, all towers", **positive)
    flags.DEFINE_float("learning_rate", 0.0001, "at step 0; see --decay_steps", 0.0)
    flags.DEFINE_integer("max_steps", 100000, "steps in all, those before --restore included", 0)
    flags.DEFINE_float("moving_average_decay", 0.997, "of the weights that eval.py uses", 0.0, 1.0)
    flags.DEFINE_string("gpu_list", "0", "GPUs separated by commas; one tower each")
    flags.DEFINE_string("checkpoint_path", "/tmp/east_resnet_v1_50_rbox/", "folder to write to")
    flags.DEFINE_boolean("restore", False, "continue from the newest checkpoint of the folder")
    flags.DEFINE_integer("save_checkpoint_steps", 1000, "steps between checkpoints", **positive)
    flags.DEFINE_integer("save_summary_steps", 100, "steps between summaries", **positive)
    flags.DEFINE_string("pretrained_model_path", None, "checkpoint to take initial weights from")

    flags.DEFINE_string("training_data_path", "/data/ocr/icdar2015/", "folder of training data")
    flags.DEFINE_integer("max_image_large_side", 1280, "longer side of a picture, pixels", 32)
    flags.DEFINE_integer("max_text_size", 800, "longest text edge, pixels", **positive)
    flags.DEFINE_integer("min_text_size", 10, "text with a shorter edge is don't care, pixels", 0)
    flags.DEFINE_float(
        "min_crop_side_ratio", 0.1, "shorter side of a crop over the picture's", 0.0, 1.0
    )
    flags.DEFINE_string("geometry", "RBOX", "RBOX: rotated boxes")

    flags.DEFINE_integer("text_scale", 512, "largest distance to a text edge, pixels", **positive)

    # ------------------------------- not in the original -------------------------------
    flags.DEFINE_enum("bn_updates", "last", train_op.BN_UPDATES, "towers that update batch norm")
    flags.DEFINE_float("bn_decay", 0.997, "decay of the batch-norm statistics", 0.0, 1.0)
    flags.DEFINE_integer("decay_steps", 10000, "steps between two decays of the rate", **positive)
    flags.DEFINE_float("decay_rate", 0.94, "factor of each decay of the learning rate", 0.0)
    flags.DEFINE_list("random_scale", ["0.5", "1", "2", "3"], "scales a picture is drawn at")
    flags.DEFINE_float("background_ratio", 3 / 8, "share of crops without text", 0.0, 1.0)
    flags.DEFINE_integer(
        "seed", None, "of weights and data; chosen and printed if not given", 0, 2**32 - 1
    )
    flags.DEFINE_enum("reader", "thread", ["thread", "process"], "what each reader is")
    flags.DEFINE_integer(
        "max_queue_size", 24, "batches that wait in memory, all readers", **positive
    )
    engine_flags.define()


def tower_loss(
    images,
    score_maps,
    geo_maps,
    training_masks,
    reuse_variables=None,
    *,
    text_scale=512,
    batch_norm_decay=0.997,
):
    """The loss of one tower.

    Args:
        images: [batch, height, width, 3] float32 RGB, 0 to 255.
        score_maps: [batch, height/4, width/4, 1] float32, 1 where there is text.
        geo_maps: [batch, height/4, width/4, 5] float32, distances in pixels and angle in radians.
        training_masks: [batch, height/4, width/4, 1] float32, 0 where a pixel does not count.
        reuse_variables: None in the first tower, True in the others.
        text_scale: largest distance that the network can express, in pixels.
        batch_norm_decay: decay of the moving statistics.

    Returns:
        Scalars (total_loss, model_loss), with and without regularization.
    """
    with tf.variable_scope(tf.get_variable_scope(), reuse=reuse_variables):
        f_score, f_geometry = east.model(
            images, is_training=True, text_scale=text_scale, batch_norm_decay=batch_norm_decay
        )
    terms = east.loss_terms(score_maps, f_score, geo_maps, f_geometry, training_masks)
    model_loss = east.weighted_loss(terms)
    total_loss = tf.add(model_loss, regularization_loss(), name="loss_terms/total_loss")
    for term in [*terms.values(), total_loss]:
        context.add_loss_term(term)

    if reuse_variables is None:
        tf.summary.image("input", images)
        tf.summary.image("score_map", score_maps)
        tf.summary.image("score_map_pred", f_score * 255)
        tf.summary.image("geo_map_0", geo_maps[:, :, :, 0:1])
        tf.summary.image("geo_map_0_pred", f_geometry[:, :, :, 0:1])
        tf.summary.image("training_masks", training_masks)
        tf.summary.scalar("model_loss", model_loss)
        tf.summary.scalar("total_loss", total_loss)
    return total_loss, model_loss


def regularization_loss():
    """The L2 loss of the kernels, which only the first tower's variables registered."""
    return tf.add_n(tf.get_collection(tf.GraphKeys.REGULARIZATION_LOSSES))


def average_gradients(tower_grads):
    """Mean over the towers of each variable's gradient: K x N x 2 -> N x 2 (gradient, variable)."""
    return gradients.average_gradients(tower_grads)


class TrainGraph:
    """The training graph: inputs, towers, and what a step runs.

    Args:
        place: utils.towers.devices.Devices.
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
        options=engine_flags.DEFAULTS,
        cluster=None,
        queue_capacity=2,
        rate_factor=1,
        learning_rate=0.0001,
        decay_steps=10000,
        decay_rate=0.94,
        moving_average_decay=0.997,
        text_scale=512,
        bn_decay=0.997,
        bn_updates="last",
    ):
        with tf.device(place.host):
            self.inputs = input_queue.training_inputs(
                options.input, place, INPUT_SPECS, queue_capacity
            )
            (
                self.input_images,
                self.input_score_maps,
                self.input_geo_maps,
                self.input_training_masks,
            ) = self.inputs.tensors
            # Splits of the batch, one per tower.
            slices, _ = self.inputs.split(feeding.split_equally)

            with tf.device(place.step_device):
                self.global_step = tf.get_variable(
                    "global_step",
                    [],
                    initializer=tf.constant_initializer(0),
                    trainable=False,
                    use_resource=True,
                )
            self.learning_rate = schedules.scale_learning_rate(
                tf.train.exponential_decay(
                    learning_rate, self.global_step, decay_steps, decay_rate, staircase=True
                ),
                self.global_step,
                factor=rate_factor,
                warmup_steps=options.warmup_steps,
            )
            self.engine = engine = Engine(
                place,
                options,
                lambda: tf.train.AdamOptimizer(self.learning_rate),
                self.global_step,
                self.inputs.whole(1),
                cluster,
            )

        towers, tower_grads, total_losses, model_losses = [], [], [], []
        reuse_variables = None
        for i in range(place.num_towers):
            with engine.tower(i) as tower:
                total_loss, model_loss = tower_loss(
                    *slices[i],
                    reuse_variables,
                    text_scale=text_scale,
                    batch_norm_decay=bn_decay,
                )
                reuse_variables = True
                tower_grads.append(engine.compute_gradients(model_loss))
            towers.append(tower)
            total_losses.append(total_loss)
            model_losses.append(model_loss)

        with tf.device(place.host):
            # The regularization is the same in every tower: its gradient is added once.
            copies = engine.combine_gradients(
                tower_grads, average_gradients, towers, add_regularization=True
            )
            self.grads = copies[0]
            variable_averages = tf.train.ExponentialMovingAverage(
                moving_average_decay, self.global_step
            )
            engine.build_train_op(copies, towers, variable_averages, bn_updates)
            self.train_op = engine.train_op
            # The regularization is in every tower's total loss, so it is in the mean once.
            self.total_loss = gradients.add_in_order(total_losses) * (1.0 / place.num_towers)
            self.model_loss = gradients.add_in_order(model_losses) * (1.0 / place.num_towers)
            self.nonfinite = loop.first_nonfinite(towers)
            self.summary_op = tf.summary.merge(
                [
                    *towers[0].summaries,
                    *engine.summaries,
                    tf.summary.scalar("learning_rate", self.learning_rate),
                ]
            )
        self.towers = towers

    @staticmethod
    def arrays(batch):
        """The arrays of a batch as the generator yields it, in the order of INPUT_SPECS."""
        images, _, score_maps, geo_maps, training_masks = batch
        return images, score_maps, geo_maps, training_masks

    def feed(self, batch):
        """feed_dict of a batch as the generator yields it."""
        return self.inputs.feed(self.arrays(batch))


def check_flags():
    """Checks what no graph is needed for.

    Returns:
        Tuple (place, options, cluster, scan): the towers' Devices, the EngineOptions, the Cluster
        or None, and what data.icdar_files.scan found, None in a parameter server.

    Raises:
        ValueError, OSError: a flag or the data can't be used; one sentence.
    """
    compat.check_tensorflow()
    options = engine_flags.options_from_flags(FLAGS)
    cluster = cluster_of(options)
    if cluster and cluster.is_parameter_server:
        return None, options, cluster, None
    if FLAGS.input_size % 32:
        below = FLAGS.input_size // 32 * 32
        raise ValueError(
            f"--input_size={FLAGS.input_size} is not a multiple of 32; use {below} or {below + 32}"
        )
    if FLAGS.geometry != "RBOX":
        raise ValueError(
            f"--geometry={FLAGS.geometry} has no labels, as in the original; use --geometry=RBOX"
        )
    if not FLAGS.learning_rate > 0:
        raise ValueError(f"--learning_rate={FLAGS.learning_rate} must be above 0; use 0.0001")
    for name in ("gpu_list", "clip_norm"):
        flag_checks.check_finite(FLAGS, name)
    try:
        scales = [float(scale) for scale in FLAGS.random_scale]
    except ValueError:
        scales = []
    if not all(0 < scale < math.inf for scale in scales or [0]):
        raise ValueError(
            f"--random_scale={','.join(FLAGS.random_scale)} must be positive numbers separated by"
            " commas; use 0.5,1,2,3"
        )
    place = devices.resolve_devices(FLAGS.gpu_list)
    options, place = engine_flags.settle(options, place, cluster, FLAGS)
    FLAGS.training_data_path = os.path.expanduser(FLAGS.training_data_path)
    return place, options, cluster, icdar_files.scan(FLAGS.training_data_path, check_images=False)


def reader_settings(place, scan):
    """What the batches of a seed depend on: saved beside a checkpoint and compared on --restore."""
    names = "\n".join(os.path.basename(image) for image in scan.images)
    return {
        "input_size": FLAGS.input_size,
        "batch_size": FLAGS.batch_size_per_gpu * place.num_towers,
        "background_ratio": FLAGS.background_ratio,
        "random_scale": [float(scale) for scale in FLAGS.random_scale],
        "max_image_large_side": FLAGS.max_image_large_side,
        "max_text_size": FLAGS.max_text_size,
        "min_text_size": FLAGS.min_text_size,
        "min_crop_side_ratio": FLAGS.min_crop_side_ratio,
        "images": f"{len(scan.images)} (checksum {zlib.crc32(names.encode(errors='replace'))})",
    }


def batch_shapes(place):
    """Shapes of a batch of all towers, in the order of INPUT_SPECS."""
    maps = [FLAGS.batch_size_per_gpu * place.num_towers, *[FLAGS.input_size // 4] * 2]
    images = [maps[0], FLAGS.input_size, FLAGS.input_size, 3]
    return [images, [*maps, 1], [*maps, 5], [*maps, 1]]


def make_readers(scan, seed, settings, prefix, *, queued=False, cluster=None):
    """--num_readers readers, each with its own seed; after a restore, where they were."""
    states = None
    if prefix is not None:
        states = data_util.state_to_continue(prefix + READER_STATE, FLAGS.num_readers, settings)
    keywords = {name: value for name, value in settings.items() if name != "images"}
    if cluster:  # every worker reads its own part of the pictures
        keywords |= {"worker": cluster.task, "num_workers": cluster.num_workers}
    if queued:  # the pictures as they travel
        keywords["image_dtype"] = np.uint8
    if FLAGS.reader == "process":  # each has a cache of its own
        keywords["cache_bytes"] = icdar.CACHE_BYTES // FLAGS.num_readers
    return data_util.GeneratorEnqueuer(
        functools.partial(icdar.make_reader, seed=seed, image_list=scan.images, **keywords),
        num_readers=FLAGS.num_readers,
        max_queue_size=FLAGS.max_queue_size,
        reader=FLAGS.reader,
        states=states,
    )


def prepare(scan, cluster):
    """The folder of the checkpoints, and where to go on.

    Returns:
        Tuple (directory, found): a PreparedDirectory, None in a worker that is not the chief; and
        the checkpoint to go on from, or None.

    Raises:
        ValueError, OSError: one sentence.
    """
    directory = None
    if cluster is None or cluster.is_chief:
        directory = checkpoints.prepare_checkpoint_directory(
            FLAGS.checkpoint_path,
            FLAGS.restore,
            FLAGS.pretrained_model_path,
            protected=[
                FLAGS.training_data_path,
                *{os.path.dirname(image) for image in scan.images},
                os.path.dirname(os.path.abspath(__file__)),
            ],
            flag="--checkpoint_path",
        )
    found = None
    if FLAGS.restore:
        path = directory.path if directory else FLAGS.checkpoint_path
        found = checkpoints.newest_undamaged(path)
    return directory, found


def train(stop):
    """Trains until --max_steps or a signal."""
    try:
        place, options, cluster, scan = check_flags()
        if cluster and cluster.is_parameter_server:
            cluster_server.serve(cluster, timeout_seconds=options.cluster_timeout)
            return
        bytes_per_batch = input_queue.batch_bytes(INPUT_SPECS, batch_shapes(place))
        queue_capacity = input_queue.queue_capacity(options, bytes_per_batch)
        directory, found = prepare(scan, cluster)
    except (ValueError, OSError) as error:
        sys.exit(f"error: {error}")
    done = (checkpoints.stored_step(found) if found else None) or 0
    if done >= FLAGS.max_steps:
        print(f"nothing to do: step {done} is already at --max_steps={FLAGS.max_steps}")
        return
    seed = random.SystemRandom().randrange(2**31) if FLAGS.seed is None else FLAGS.seed
    print(scan.summary())
    print(place.describe(FLAGS.batch_size_per_gpu), f"; seed {seed}", sep="", flush=True)

    all_towers = place.num_towers * (cluster.num_workers if cluster else 1)
    with tf.Graph().as_default() as graph:
        tf.set_random_seed(seed)
        net = TrainGraph(
            place,
            options=options,
            cluster=cluster,
            queue_capacity=queue_capacity,
            rate_factor=options.learning_rate_factor(FLAGS.batch_size_per_gpu, all_towers),
            **{name: FLAGS[name].value for name in GRAPH_FLAGS},
        )
        if options.input == "queue":
            print(net.inputs.describe(bytes_per_batch), flush=True)
        saver = None
        if directory:
            with tf.device(place.host):
                saver = checkpoints.CheckpointSaver(directory.path, flag="--checkpoint_path")
        init = tf.global_variables_initializer()
        settings = reader_settings(place, scan)
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
                max_steps=FLAGS.max_steps,
                **settings,
                **{name: FLAGS[name].value for name in GRAPH_FLAGS},
            ),
        )
        graph.finalize()

        def initialise(sess):
            """Initial values or those of a checkpoint; again where parameter servers lost them."""
            sess.run(init)
            if found is not None or tf.train.latest_checkpoint(directory.path):
                restored = checkpoints.restore_training(sess, directory.path)
                print(f"continue training from previous checkpoint {restored.prefix}", flush=True)
            elif directory.pretrained_model_path:
                checkpoints.load_pretrained(sess, directory.pretrained_model_path)  # logs a report

        def train_from(found):
            """Trains with the data that follow a checkpoint, or from their beginning."""
            with make_readers(
                scan,
                seed,
                settings,
                found.prefix if found else None,
                queued=options.input == "queue",
                cluster=cluster,
            ) as readers:
                stop.at_abort(readers.stop)
                session.defer_signals()
                source = input_sources.make_source(
                    net.inputs,
                    session.session,
                    lambda: (readers.get(), readers.get_state()),
                    arrays=net.arrays,
                    keep=lambda batch: batch[1],  # the names of its pictures
                    stop_readers=readers.stop,
                )
                with source:
                    run_steps(session, net, saver, writer, source, settings)

        with session.started(initialise):
            writer = summaries.SummaryWriter(directory.path, graph) if directory else None
            cluster_session.train_and_rewind(session, train_from, found, FLAGS.checkpoint_path)
            if writer:
                writer.close()


def run_steps(session, net, saver, summary_writer, source, settings):
    """The training loop: one `session.run` a batch, to --max_steps or a signal.

    Where there are several workers the chief alone has a saver and a summary_writer.
    """
    updates = net.engine.ops_of_update
    progress = loop.Progress(examples_per_step=settings["batch_size"] * len(updates))
    step = saved_step = session.step
    state = None
    print_due, summary_due = loop.Every(10, step), loop.Every(FLAGS.save_summary_steps, step)
    save_due = loop.Every(FLAGS.save_checkpoint_steps, step + 1)

    def save():
        write_state = functools.partial(data_util.save_reader_state, state=state, settings=settings)
        side_files = {READER_STATE: write_state}
        prefix = session.until_done(
            lambda: saver.save(session.session, session.current_step(), side_files=side_files)
        )
        print(f"saved {prefix}", flush=True)

    while step < FLAGS.max_steps and not session.should_stop():
        losses = []
        with_summary = summary_writer is not None and summary_due.due(step)
        try:
            for op in updates:
                # What has begun ends: the batch-norm statistics have the batches before already.
                with contextlib.nullcontext() if losses else session.interruptible():
                    feed, names, next_state = source.get()
                fetches = {"losses": (net.model_loss, net.total_loss), "nonfinite": net.nonfinite}
                if op is net.train_op:
                    fetches |= net.engine.watched
                    if with_summary:
                        fetches["summary"] = net.summary_op
                values, _ = session.run_step([fetches, op], feed)
                loop.check_finite(values["nonfinite"], net.towers, step=step, files=names)
                losses.append(values["losses"])
        except loop.StopRequested:
            break
        except (data_util.ReaderError, input_queue.InputError):  # the weights are good
            if saver and step > saved_step:
                save()
            raise
        state = next_state
        progress.step(source.wait_seconds())

        if print_due.due(step):
            print(progress.line(step, *np.mean(losses, axis=0)), flush=True)
        if message := net.engine.overflow_message(values, step):
            print(message, flush=True)
        if with_summary:
            summary_writer.add_summary(values["summary"], global_step=step)
        step = session.step
        if saver and save_due.due(step) and step < FLAGS.max_steps:
            save()
            saved_step = step
    if saver and step > saved_step:
        save()


def main(argv):
    if len(argv) > 1:
        sys.exit(f"error: unexpected argument {argv[1]}; every flag starts with --")
    loop.run_script(train, STOPPING_ERRORS)


if __name__ == "__main__":
    define_flags()
    app.run(main)
