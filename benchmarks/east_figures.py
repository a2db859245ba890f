"""Figures of EAST's training script, with its real network at small inputs."""

import contextlib
import os
import sys
import tempfile
import unittest.mock

import numpy as np
import tensorflow.compat.v1 as tf
from absl import flags

import multigpu_train
from benchmarks.measure import Figure, interleave, ratio_figure
from benchmarks.reference_net import one_thread
from data import synthetic_scenes, synthetic_text
from utils.towers import devices, loop

SIDE = 128
BATCHES = {"": 4, "_batch_8": 8}  # suffix of the figure -> images of a step


def two_towers(suffix=""):
    """CPU time of a step of EAST with 2 towers over that with 1 tower, same total batch.

    Two batch sizes, because much of what a second tower costs does not depend on the batch: its
    gradients of 24 million weights are written, added and scaled as well.

    Args:
        suffix: of the figures' names.

    Returns:
        List of Figure.
    """
    limited = one_thread()
    figures = []
    for batch_suffix, batch_size in BATCHES.items():
        with contextlib.ExitStack() as sessions:
            steps = {
                num_towers: _make_step(num_towers, batch_size, limited, sessions)
                for num_towers in (1, 2)
            }
            seconds = interleave(steps, rounds=12, warm_up=2)
        name = f"east_two_towers{batch_suffix}{suffix}"
        images = [batch_size, SIDE, SIDE]
        figures.append(ratio_figure(name, seconds[2], seconds[1], "<=", 1.05, images=images))
    return figures


def _make_step(num_towers, batch_size, limited, sessions):
    """Builds EAST's training graph; returns a function that makes one ordinary step."""
    place = devices.Devices("CPU", tuple(range(num_towers)))
    with tf.Graph().as_default() as graph:
        tf.set_random_seed(0)
        net = multigpu_train.TrainGraph(place)
        initialize = tf.global_variables_initializer()
        graph.finalize()
        session = tf.Session(config=limited(place.session_config()))
    sessions.callback(session.close)
    session.run(initialize)
    fetches = [net.model_loss, net.total_loss, net.nonfinite, net.train_op]
    feed = net.feed(made_up_batch(batch_size))
    return lambda: session.run(fetches, feed)


def made_up_batch(batch_size, side=SIDE, dtype=np.float32):
    """A batch as EAST's generator yields it, of noise.

    Args:
        batch_size: images.
        side: of an image, pixels.
        dtype: of the images.

    Returns:
        [images, names, score maps, geometry maps, training masks].
    """
    rng = np.random.RandomState(0)
    maps = [batch_size, side // 4, side // 4]
    return [
        rng.randint(0, 256, [batch_size, side, side, 3]).astype(dtype),
        [],
        rng.randint(0, 2, [*maps, 1]).astype(np.float32),
        rng.uniform(0, 20, [*maps, 5]).astype(np.float32),
        np.ones([*maps, 1], np.float32),
    ]


def fetches():
    """What a step of the training script runs and fetches, observed at `Session.run`.

    A real training of some steps with summaries and a checkpoint on the way. Runs per step: all
    runs from the first training step to the last, but for those that save, over the steps asked
    for; a summary that needs a run of its own or trains once more makes it larger than 1. Bytes:
    the most that a step without a summary brings back.

    Returns:
        List of two Figure.
    """
    steps = 6
    runs = _observe_training(max_steps=steps, save_summary_steps=3, save_checkpoint_steps=4)
    trained = [index for index, run in enumerate(runs) if run["trains"]]
    between = runs[trained[0] : trained[-1] + 1]
    saves = [run for run in between if all(name.startswith("save") for name in run["fetches"])]
    ordinary = [run["bytes"] for run in between if run["trains"] and not run["text"]]
    detail = {"steps": steps, "training_runs": len(trained), "runs_that_save": len(saves)}
    runs_per_step = (len(between) - len(saves)) / steps
    return [
        Figure("runs_per_step", runs_per_step, "session.run", "<=", 1, detail),
        Figure("bytes_fetched_per_step", max(ordinary), "bytes", "<=", 64),
    ]


def _observe_training(**settings):
    """Trains on made-up pictures and records every `Session.run`.

    Args:
        **settings: flags of multigpu_train.py.

    Returns:
        List of dicts: fetches (names), trains (whether it makes a training step), text (whether it
        fetches a string, such as a summary), bytes (size of the numbers fetched).
    """
    runs = []
    run = tf.Session.run

    def observed(session, fetches, *args, **keywords):
        values = run(session, fetches, *args, **keywords)
        names = [getattr(fetch, "name", str(fetch)) for fetch in tf.nest.flatten(fetches)]
        found = [value for value in tf.nest.flatten(values) if value is not None]
        numbers = [np.asarray(value) for value in found if not isinstance(value, bytes)]
        runs.append(
            {
                "fetches": names,
                "trains": "train_op" in names,
                "text": len(numbers) < len(found),
                "bytes": sum(array.nbytes for array in numbers),
            }
        )
        return values

    with tempfile.TemporaryDirectory() as folder:
        options = synthetic_scenes.SceneOptions(width=96, height=96)
        data = os.path.join(folder, "data")
        synthetic_text.make_dataset(data, num_train=8, num_test=1, options=options)
        settings = {
            "training_data_path": os.path.join(data, "train"),
            "checkpoint_path": os.path.join(folder, "checkpoints"),
            "input_size": 64,
            "batch_size_per_gpu": 2,
            "num_readers": 1,
            "gpu_list": "0",
            **settings,
        }
        multigpu_train.define_flags()
        flags.FLAGS(["bench.py", *(f"--{name}={value}" for name, value in settings.items())])
        with (
            unittest.mock.patch.object(tf.Session, "run", observed),
            contextlib.redirect_stdout(sys.stderr),
            loop.StopSignals() as stop,
        ):
            multigpu_train.train(stop)
    return runs
