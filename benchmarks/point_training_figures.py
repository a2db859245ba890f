"""Figures of PointNet++'s training script, with its real network `pointnet2_cls_ssg`."""

import contextlib
import os
import sys
import tempfile

import numpy as np
import tensorflow.compat.v1 as tf
from absl import flags

import train_multi_gpu
from benchmarks import needed_ops
from benchmarks.cloud_figures import shape_clouds
from benchmarks.measure import Figure, interleave, ratio_figure
from benchmarks.tower_figures import one_thread
from data import synthetic_shapes
from utils import pointnet_util
from utils.towers import devices, loop

CLOUDS, POINTS = 16, 1024


def two_towers(suffix=""):
    """CPU time of a step with 2 towers over that with 1 tower, same total batch.

    Args:
        suffix: of the figure's name.

    Returns:
        List of one Figure.
    """
    limited = one_thread()
    points = shape_clouds(CLOUDS, POINTS)
    with contextlib.ExitStack() as sessions:
        steps = {towers: _make_step(towers, points, limited, sessions) for towers in (1, 2)}
        seconds = interleave(steps, rounds=8, warm_up=2)
    name, shape = f"pointnet2_two_towers{suffix}", list(points.shape)
    return [ratio_figure(name, seconds[2], seconds[1], "<=", 1.10, clouds=shape)]


def share():
    """CPU time of sampling and grouping over that of a training step, one tower.

    The numerator is a graph of its own that does nothing else: the network's calls of
    `sample_and_group` and `sample_and_group_all` on the same clouds, and the gradients by the
    features that the step takes through them.

    Returns:
        List of one Figure.
    """
    limited = one_thread()
    points = shape_clouds(CLOUDS, POINTS)
    with contextlib.ExitStack() as sessions:
        variants = {
            "step": _make_step(1, points, limited, sessions),
            "grouping": _make_grouping(points, limited, sessions),
        }
        seconds = interleave(variants, rounds=8, warm_up=2)
    return [
        ratio_figure(
            "sampling_and_grouping_share",
            seconds["grouping"],
            seconds["step"],
            "<=",
            0.25,
            clouds=list(points.shape),
        )
    ]


def ops():
    """Ops that a further tower adds, and ops that nothing needs.

    The first is the largest number that one tower more adds, for up to three towers, over that of
    the graph with one. The second counts in the graph of the script with two towers, and what is
    needed is observed: two runs of an epoch with evaluation, summaries and checkpoints, the second
    one restored. See `needed_ops.made_in_vain` for what counts; the rest is in the detail.

    Returns:
        List of two Figure.
    """
    numbers, of_tower = [], None
    for num_towers in (1, 2, 3):
        with tf.Graph().as_default() as graph:
            _train_graph(num_towers)
        names = [op.name for op in graph.get_operations()]
        numbers.append(len(names))
        if num_towers == 1:  # its scopes of training and evaluation
            of_tower = sum(name.startswith("model_0") for name in names)
    added = np.diff(numbers)
    detail = {"ops_k1_to_k3": numbers, "in_the_scopes_of_a_tower": of_tower}
    runs = _observe_training()
    graph = list(runs)[-1]
    needed = needed_ops.needed(graph, set().union(*runs.values()))
    in_vain, beside = needed_ops.made_in_vain(graph, needed)
    return [
        Figure("pointnet2_ops_of_a_tower", added.max() / numbers[0], "ratio", "<=", 1, detail),
        Figure(
            "pointnet2_ops_in_vain",
            in_vain.total(),
            "ops",
            "<=",
            0,
            {
                "ops": len(graph.get_operations()),
                "made_at": dict(in_vain),
                "made_by_tensorflow_beside_needed_ones": dict(beside.most_common()),
            },
        ),
    ]


def _observe_training():
    """Trains an epoch on two towers and, restored, another; see `needed_ops.observed_runs`."""
    with (
        tempfile.TemporaryDirectory() as folder,
        contextlib.redirect_stdout(sys.stderr),
        needed_ops.observed_runs() as runs,
    ):
        data = os.path.join(folder, "data")
        options = synthetic_shapes.ShapeOptions(points=64)
        synthetic_shapes.make_dataset(data, num_train=16, num_test=4, options=options)
        train_multi_gpu.define_flags()
        for epochs in (1, 2):
            settings = {
                "num_gpus": 2,
                "num_point": 64,
                "batch_size": 8,
                "data_path": data,
                "log_dir": os.path.join(folder, "log"),
                "max_epoch": epochs,
                "restore": epochs > 1,
            }
            flags.FLAGS(["bench.py", *(f"--{name}={value}" for name, value in settings.items())])
            with loop.StopSignals() as stop:
                train_multi_gpu.train(stop)
    return runs


def _make_step(num_towers, points, limited, sessions):
    """Builds the training graph; returns a function that makes one step as the script does."""
    place = devices.Devices("CPU", tuple(range(num_towers)))
    with tf.Graph().as_default() as graph:
        tf.set_random_seed(0)
        net = _train_graph(num_towers)
        initialize = tf.global_variables_initializer()
        graph.finalize()
        session = sessions.enter_context(tf.Session(config=limited(place.session_config())))
    session.run(initialize)
    fetches = [net.summary_op, net.loss, net.pred, net.nonfinite, net.train_op]
    feed = net.feed({"points": points, "labels": np.arange(len(points), dtype=np.int32)})
    return lambda: session.run(fetches, feed)


def _train_graph(num_towers):
    place = devices.Devices("CPU", tuple(range(num_towers)))
    return train_multi_gpu.TrainGraph(place, num_point=POINTS, batch_size=CLOUDS)


def _make_grouping(points, limited, sessions):
    """Function that samples and groups as one step does; see `share`."""
    with tf.Graph().as_default():
        tf.set_random_seed(0)
        clouds = tf.placeholder(tf.float32, points.shape)
        # Features and gradients are variables, so that nothing is fed or folded.
        l1_points, l2_points = _variable([CLOUDS, 512, 128]), _variable([CLOUDS, 128, 256])
        l1_xyz, l1_groups, _, _ = pointnet_util.sample_and_group(512, 0.2, 32, clouds, None)
        l2_xyz, l2_groups, _, _ = pointnet_util.sample_and_group(128, 0.4, 64, l1_xyz, l1_points)
        _, l3_groups, _, _ = pointnet_util.sample_and_group_all(l2_xyz, l2_points)
        upstream = [_variable(groups.shape) for groups in (l2_groups, l3_groups)]
        grads = tf.gradients([l2_groups, l3_groups], [l1_points, l2_points], upstream)
        # One element of each is fetched, for which all of it has to be there.
        fetches = [tf.reshape(tensor, [-1])[-1] for tensor in (l1_groups, l2_groups, l3_groups)]
        fetches += [tf.reshape(grad, [-1])[-1] for grad in grads]
        session = sessions.enter_context(tf.Session(config=limited(tf.ConfigProto())))
        session.run(tf.global_variables_initializer())
        call = session.make_callable(fetches, [clouds])
    return lambda: call(points)


def _variable(shape):
    initial = tf.random_uniform(shape, -1, 1)
    return tf.Variable(initial, trainable=False, use_resource=True).read_value()
