"""Evaluates a PointNet++ classifier on the test split of ModelNet40, with votes over rotations.

    python evaluate.py --num_votes 12 --model_path log/model.ckpt

The data are as for train_multi_gpu.py. In --dump_dir are left the log (log_evaluate.txt), a picture
of some clouds with label and prediction (test_clouds.png), and a picture of each misclassified one.
"""

import os
import re
import sys
import tempfile

import numpy as np
import tensorflow.compat.v1 as tf
from absl import app, flags, logging

from data import modelnet, point_files
from nets import pointnet2
from nets.pointnet2 import identify
from nets.pointnet2.inputs import NUM_CLASSES
from utils import draw_clouds, provider
from utils.log_file import LogFile, flags_line
from utils.segmentation_metrics import ClassCounts, shown
from utils.towers import checkpoints, compat, devices, progress

FLAGS = flags.FLAGS
OVERVIEW = "test_clouds.png"
PICTURE = re.compile(r"\d{5}_label_.*_pred_.*\.png")  # of a misclassified cloud
OVERVIEW_PER_CLASS, OVERVIEW_CLOUDS = 2, 20


def define_flags():
    """Defines the original's flags, and below them ours."""
    positive = {"lower_bound": 1}
    flags.DEFINE_integer("gpu", 0, "GPU to use", 0)
    flags.DEFINE_enum(
        "model", "pointnet2_cls_ssg", pointnet2.CLASSIFIERS, "network, a module of nets/pointnet2"
    )
    flags.DEFINE_integer("batch_size", 16, "clouds that are fed at once", **positive)
    flags.DEFINE_integer("num_point", 1024, "points of a cloud that are used", **positive)
    flags.DEFINE_string(
        "model_path", "log/model.ckpt", "checkpoint; without a step, the newest of that name"
    )
    flags.DEFINE_string("dump_dir", "dump", "folder for the log and the pictures")
    flags.DEFINE_boolean("normal", False, "use normals: six channels")
    flags.DEFINE_integer("num_votes", 1, "rotations over which the scores are summed", **positive)

    # ------------------------------- not in the original -------------------------------
    flags.DEFINE_string(
        "data_path",
        "data",
        "folder with modelnet40_ply_hdf5_2048/ or, for --normal, modelnet40_normal_resampled/",
    )
    flags.DEFINE_enum(
        "sampling", "first", point_files.SAMPLINGS, "which --num_point points of a cloud"
    )
    flags.DEFINE_integer(
        "seed", 0, "of random points and of the order of points in a vote", 0, 2**32 - 1
    )
    flags.DEFINE_integer("max_pictures", 40, "pictures of misclassified clouds, at most", 0)
    flags.DEFINE_boolean(
        "as_shipped", False, "pointnet2_cls_msg with the transposed layer of its last repository"
    )


class Classifier:
    """A session with the inference graph and the weights of a checkpoint.

    Args:
        model_path: prefix or folder of a checkpoint.
        place: utils.towers.devices.Devices, the first of which is used.
        model: module of nets.pointnet2.
        num_point: points of a cloud.
        normal: whether clouds have normals.
        as_shipped: of pointnet2_cls_msg.get_model.

    Attributes:
        prefix: of the checkpoint.

    Raises:
        checkpoints.CheckpointError: nothing to restore, in one sentence.
    """

    def __init__(
        self,
        model_path,
        *,
        place,
        model="pointnet2_cls_ssg",
        num_point=1024,
        normal=False,
        as_shipped=False,
    ):
        network, settings = pointnet2.load_network(model, as_shipped)
        found = checkpoints.newest_undamaged(model_path)  # before the graph is built
        identify.check_checkpoint(
            found.prefix, found.shapes, model=model, normal=normal, as_shipped=as_shipped
        )
        with tf.Graph().as_default() as graph, tf.device(place.tower_name(0)):
            self._inputs = network.placeholder_inputs(None, num_point, normal=normal)
            pred, end_points = network.get_model(self._inputs[0], is_training=False, **settings)
            self._outputs = [network.get_loss(pred, self._inputs[1], end_points), pred]
            self._session = tf.Session(graph=graph, config=place.session_config())
            try:
                self.prefix = checkpoints.restore_for_evaluation(
                    self._session,
                    found.prefix,
                    use_moving_averages=False,
                    step_name="batch",
                    describe=identify.describe_checkpoint,
                ).prefix
            except BaseException:
                self._session.close()
                raise
            graph.finalize()

    def __enter__(self):
        return self

    def __exit__(self, *unused):
        self._session.close()

    def classify(self, clouds, labels):
        """Mean loss, and [batch, classes] logits, of [batch, num_point, channels] clouds."""
        return self._session.run(self._outputs, dict(zip(self._inputs, (clouds, labels))))


def vote(classify, clouds, labels, num_votes, rng):
    """Sums the scores over rotations about the up axis.

    For every vote the points come in another order, because farthest point sampling depends on it.

    Args:
        classify: function of (clouds, labels) that returns (loss, [batch, classes] logits).
        clouds: [batch, num_point, 3 or 6].
        labels: [batch] int.
        num_votes: number of rotations, by equal steps.
        rng: numpy.random.RandomState of the orders.

    Returns:
        (loss, scores): loss of the last vote, and the [batch, classes] float64 sums.
    """
    rotate = provider.rotate_point_cloud_by_angle
    if clouds.shape[2] == 6:
        rotate = provider.rotate_point_cloud_by_angle_with_normal
    scores = 0.0
    for vote_idx in range(num_votes):
        shuffled = provider.shuffle_points(clouds, rng=rng)
        loss, logits = classify(rotate(shuffled, vote_idx / num_votes * np.pi * 2), labels)
        scores = scores + np.float64(logits)
    return loss, scores


class Pictures:
    """Pictures of the clouds that were misclassified, and one of some of all.

    Args:
        dump_dir: folder.
        names: of the classes.
        max_pictures: most pictures of misclassified clouds.
    """

    def __init__(self, dump_dir, names, max_pictures):
        self._dump_dir = dump_dir
        self._names = names
        self._left = max_pictures
        self._seen = 0
        self._overview = []  # (class, cloud, title)

    def add(self, clouds, labels, predictions):
        """Draws what is misclassified in a batch, and remembers some for the overview."""
        for cloud, label, prediction in zip(clouds, labels, predictions):
            label_name, predicted_name = self._names[label], self._names[prediction]
            wrong = label != prediction
            shown_before = sum(label == other for other, _, _ in self._overview)
            if shown_before < OVERVIEW_PER_CLASS and len(self._overview) < OVERVIEW_CLOUDS:
                title = f"{'X ' if wrong else ''}{label_name}\npredicted {predicted_name}"
                self._overview.append((label, cloud, title))
            if wrong and self._left > 0:
                self._left -= 1
                name = f"{self._seen:05d}_label_{label_name}_pred_{predicted_name}.png"
                draw_clouds.write_cloud(
                    os.path.join(self._dump_dir, re.sub(r"[^\w.-]", "_", name)),
                    cloud,
                    f"{label_name}, predicted {predicted_name}",
                )
            self._seen += 1

    def finish(self):
        """Writes the overview; returns its path."""
        path = os.path.join(self._dump_dir, OVERVIEW)
        _, clouds, titles = zip(*sorted(self._overview, key=lambda entry: entry[0]))
        draw_clouds.write_grid(path, clouds, titles)
        return path


def eval_one_epoch(classify, dataset, *, num_votes=1, seed=0, log_string=print, pictures=None):
    """Evaluates a data set, every cloud once; the result does not depend on the batches.

    Args:
        classify: see `vote`.
        dataset: of data.modelnet.make_dataset.
        num_votes: see `vote`.
        seed: of the orders of points in the votes, which are the same for every batch.
        log_string: called with a progress line.
        pictures: a Pictures, or None.

    Returns:
        (counts, mean_loss): a ClassCounts, and the mean loss of the last vote over the clouds.

    Raises:
        ValueError: a label is none of the network's, or no cloud can be read.
    """
    counts, loss_sum, batch_idx = ClassCounts(NUM_CLASSES), 0.0, 0
    while dataset.has_next_batch():
        clouds, labels = dataset.next_batch(augment=False)
        modelnet.check_labels(labels, dataset.batch_names, NUM_CLASSES)
        log_string(f"Batch: {batch_idx:03d}, batch size: {len(labels)}")
        rng = np.random.RandomState(seed)
        loss, scores = vote(classify, clouds, labels, num_votes, rng)
        predictions = np.argmax(scores, axis=1)
        counts.add(labels, predictions)
        loss_sum += loss * len(labels)
        if pictures is not None:
            pictures.add(clouds, labels, predictions)
        batch_idx += 1
    return counts, loss_sum / counts.seen.sum()


def evaluate():
    """Evaluates as the flags say."""
    compat.check_tensorflow()
    place = devices.resolve_gpu(FLAGS.gpu)
    for name in ("data_path", "dump_dir"):
        FLAGS[name].value = os.path.expanduser(FLAGS[name].value)
    dataset = modelnet.make_dataset(
        "test",
        data_path=FLAGS.data_path,
        normal=FLAGS.normal,
        num_point=FLAGS.num_point,
        batch_size=FLAGS.batch_size,
        sampling=FLAGS.sampling,
        rng=np.random.RandomState(FLAGS.seed),
    )
    modelnet.check_dataset(dataset, NUM_CLASSES)
    prepare_dump_dir(FLAGS.dump_dir)
    named = modelnet.class_names(dataset)
    names = [*named, *(f"class_{number}" for number in range(len(named), NUM_CLASSES))]
    with Classifier(
        FLAGS.model_path,
        place=place,
        model=FLAGS.model,
        num_point=FLAGS.num_point,
        normal=FLAGS.normal,
        as_shipped=FLAGS.as_shipped,
    ) as classifier:
        log = LogFile(os.path.join(FLAGS.dump_dir, "log_evaluate.txt"))
        log.write(flags_line(FLAGS, "model_path"))
        log.log_string("Model restored.")
        log.log_string(
            f"{classifier.prefix}: {FLAGS.num_votes} vote(s), seed {FLAGS.seed},"
            f" {FLAGS.num_point} points of each cloud (--sampling={FLAGS.sampling}),"
            f" {'with' if FLAGS.normal else 'without'} normals"
        )
        warn_of_other_num_point(classifier.prefix)
        pictures = Pictures(FLAGS.dump_dir, names, FLAGS.max_pictures)
        counts, mean_loss = eval_one_epoch(
            classifier.classify,
            dataset,
            num_votes=FLAGS.num_votes,
            seed=FLAGS.seed,
            log_string=print,
            pictures=pictures,
        )
        log.log_string(f"eval mean loss: {mean_loss:f}")
        log.log_string(f"eval accuracy: {counts.accuracy():f}")
        log.log_string(f"eval avg class acc: {shown(counts.average_class_accuracy())}")
        for name, accuracy, seen in zip(names, counts.class_accuracies(), counts.seen):
            if seen or name in named:
                log.log_string(f"{name:>10s}:\t{f'{accuracy:.3f}' if seen else 'n/a'}")
        print(f"{counts.seen.sum()} clouds; some of them: {pictures.finish()}")


def prepare_dump_dir(dump_dir):
    """Makes the folder of the results.

    Raises:
        ValueError: it cannot be written to.
    """
    if not dump_dir:
        raise ValueError("--dump_dir is empty; a folder is required: pass its name")
    try:
        os.makedirs(dump_dir, exist_ok=True)
        with tempfile.TemporaryFile(dir=dump_dir):
            pass
        earlier = sum(PICTURE.fullmatch(name) is not None for name in os.listdir(dump_dir))
    except OSError as error:
        raise ValueError(
            f"cannot write to --dump_dir={dump_dir}: {error.strerror}; pass a folder that can be"
            " written"
        ) from error
    if earlier:
        logging.warning(
            "%s has %d pictures of earlier evaluations, which stay; pass another --dump_dir to keep"
            " them apart",
            dump_dir,
            earlier,
        )


def warn_of_other_num_point(prefix):
    """Says it if the checkpoint was trained with another number of points."""
    trained = progress.read_progress(prefix)
    num_point = trained.settings.get("num_point") if trained else None
    if num_point not in (None, FLAGS.num_point):
        logging.warning(
            "%s was trained with %d points of a cloud and is evaluated with %d, the %s ones, which"
            " changes the accuracy; --sampling=first, random or farthest chooses them",
            prefix,
            num_point,
            FLAGS.num_point,
            FLAGS.sampling,
        )


def main(argv):
    if len(argv) > 1:
        sys.exit(f"error: unexpected argument {argv[1]}; every flag starts with --")
    try:
        evaluate()
    except KeyboardInterrupt:
        print("stopped before the end; no accuracy", file=sys.stderr)
        sys.exit(130)
    except (ValueError, OSError) as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    define_flags()
    app.run(main)
