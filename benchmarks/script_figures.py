"""Figures of the training scripts as they run: summaries and the graph, observed from outside."""

import contextlib
import os
import sys
import tempfile
import unittest.mock

import numpy as np
import tensorflow.compat.v1 as tf
from absl import flags

import multigpu_train
import train_multi_gpu
from benchmarks import east_figures
from benchmarks.measure import Figure, interleave
from benchmarks.reference_net import logical_cpus, one_thread
from data import synthetic_scenes, synthetic_shapes, synthetic_text
from utils.towers import loop, summaries

SUMMARY_STEPS = 100


def summary_cost(suffix=""):
    """CPU time of 100 steps of EAST with one summary over that of 100 steps without, one tower.

    Computed from the median of the ratios of a step with its summary, which is written to a file as
    the script does, and one without: 1 + (that ratio - 1) / 100.

    Args:
        suffix: of the figure's name.

    Returns:
        List of one Figure.
    """
    limited = one_thread()
    place = logical_cpus(1)
    batch_size = 4
    with tempfile.TemporaryDirectory() as folder, tf.Graph().as_default() as graph:
        tf.set_random_seed(0)
        net = multigpu_train.TrainGraph(place)
        initialize = tf.global_variables_initializer()
        graph.finalize()
        feed = net.feed(east_figures.made_up_batch(batch_size))
        fetches = [net.model_loss, net.total_loss, net.nonfinite, net.train_op]
        writer = summaries.SummaryWriter(folder, graph)
        with tf.Session(config=limited(place.session_config())) as session:
            session.run([initialize, net.engine.synchronize])

            def with_summary():
                *_, summary = session.run([*fetches, net.summary_op], feed)
                writer.add_summary(summary, 0)

            seconds = interleave(
                {"plain": lambda: session.run(fetches, feed), "summary": with_summary},
                rounds=12,
                warm_up=2,
            )
        writer.close()
    ratio = float(np.median(seconds["summary"] / seconds["plain"]))
    value = 1 + (ratio - 1) / SUMMARY_STEPS
    detail = {
        "one_step": round(ratio, 3),
        "ms": [round(np.median(seconds[name]) * 1e3, 1) for name in ("summary", "plain")],
        "images": [batch_size, *[east_figures.SIDE] * 2],
    }
    return [Figure(f"summaries_every_100{suffix}", value, "ratio", "<=", 1.02, detail)]


def finalised_east():
    """Whether EAST's graph is finalised in every training step: 1 or 0.

    A graph that is not may grow with every step. Observed at `Session.run`, in a training of some
    steps with summaries and checkpoints.

    Returns:
        List of one Figure.
    """
    with tempfile.TemporaryDirectory() as folder:
        options = synthetic_scenes.SceneOptions(width=96, height=96)
        data = os.path.join(folder, "data")
        synthetic_text.make_dataset(data, num_train=8, num_test=1, options=options)
        settings = {
            "training_data_path": os.path.join(data, "train"),
            "checkpoint_path": os.path.join(folder, "checkpoints"),
            "input_size": 64,
            "batch_size_per_gpu": 1,
            "num_readers": 1,
            "gpu_list": "0,1",
            "max_steps": 4,
            "save_summary_steps": 2,
            "save_checkpoint_steps": 2,
        }
        return [_finalised("graph_finalised_east", multigpu_train, settings)]


def finalised_pointnet2():
    """As `finalised_east`, for PointNet++ with two towers and an evaluation.

    Returns:
        List of one Figure.
    """
    with tempfile.TemporaryDirectory() as folder:
        data = os.path.join(folder, "data")
        options = synthetic_shapes.ShapeOptions(points=64)
        synthetic_shapes.make_dataset(data, num_train=16, num_test=4, options=options)
        settings = {
            "num_gpus": 2,
            "num_point": 64,
            "batch_size": 8,
            "data_path": data,
            "log_dir": os.path.join(folder, "log"),
            "max_epoch": 2,
        }
        return [_finalised("graph_finalised_pointnet2", train_multi_gpu, settings)]


def _finalised(name, script, settings):
    """Trains with a script and observes its graph.

    Args:
        name: of the figure.
        script: module of the script.
        settings: dict of flags.

    Returns:
        Figure.
    """
    finalised = []
    run = tf.Session.run

    def observed(session, fetches, *args, **keywords):
        names = [getattr(fetch, "name", "") for fetch in tf.nest.flatten(fetches)]
        if "train_op" in names:
            finalised.append(session.graph.finalized)
        return run(session, fetches, *args, **keywords)

    script.define_flags()
    flags.FLAGS(["bench.py", *(f"--{flag}={value}" for flag, value in settings.items())])
    with (
        unittest.mock.patch.object(tf.Session, "run", observed),
        contextlib.redirect_stdout(sys.stderr),
        loop.StopSignals() as stop,
    ):
        script.train(stop)
    value = float(all(finalised)) if finalised else np.nan
    return Figure(name, value, "1 or 0", ">=", 1, {"training_steps": len(finalised)})
