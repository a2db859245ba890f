"""Figures of PointNet++'s searches: CPU time against loops in C++, and memory."""

import contextlib
import math
import multiprocessing
import os
import resource
import tempfile

import tensorflow.compat.v1 as tf

from benchmarks.cloud_figures import shape_clouds
from benchmarks.measure import Figure, interleave, ratio_figure
from benchmarks.point_loops import Loops, NoCompilerError
from benchmarks.tower_figures import one_thread
from nets.pointnet2 import ops

CLOUDS, POINTS, SAMPLES, RADIUS, NEIGHBOURS = 16, 1024, 512, 0.2, 32
SPEED_BARS = {"fps_1024_to_512": 2, "ball_query_1024_to_512": 2, "three_nn_1024_to_512": 5}
MEMORY_BAR = 300  # MB


def speed():
    """CPU time of the three searches over that of single-thread loops in C++, for 16 clouds.

    The clouds are made-up shapes in the unit sphere; queries and known points are half of their
    points. One thread for both sides; feeding and fetching count for the ops.

    Returns:
        List of Figure. Without a C++ compiler they have no value, and the detail says why.
    """
    limited = one_thread()
    points, queries = _inputs()
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as sessions:
        try:
            loops = Loops(folder)
        except NoCompilerError as error:
            return [
                Figure(name, math.nan, "ratio", "<=", bar, {"not_measured": str(error)})
                for name, bar in SPEED_BARS.items()
            ]
        variants = {
            "fps_1024_to_512 loop": lambda: loops.farthest_point_sample(SAMPLES, points),
            "ball_query_1024_to_512 loop": lambda: loops.query_ball_point(
                RADIUS, NEIGHBOURS, points, queries
            ),
            "three_nn_1024_to_512 loop": lambda: loops.three_nn(points, queries),
        }
        for name in SPEED_BARS:
            variants[name] = _make_runner(name, limited, sessions)
        seconds = interleave(variants)
    return [
        ratio_figure(name, seconds[name], seconds[f"{name} loop"], "<=", bar)
        for name, bar in SPEED_BARS.items()
    ]


def memory():
    """Growth of the resident memory by each search, each in a process of its own.

    The value is the process's highest resident memory after some runs of the op, less what was
    resident before the first of them, with TensorFlow, the inputs and an open session: it includes
    what XLA takes for compiling.

    Returns:
        List of Figure.
    """
    figures = []
    for name in SPEED_BARS:
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            before, after = pool.apply(_resident_megabytes, (name,))
        detail = {"resident_before": round(before, 1), "highest_after": round(after, 1)}
        figures.append(Figure(f"{name}_memory", after - before, "MB", "<", MEMORY_BAR, detail))
    return figures


def _inputs():
    """Points [16, 1024, 3] and queries [16, 512, 3]."""
    points = shape_clouds(CLOUDS, POINTS)
    return points, points[:, :SAMPLES].copy()


def _make_runner(name, limited, sessions):
    """Function that runs one of the searches; the session is closed with `sessions`."""
    points, queries = _inputs()
    with tf.Graph().as_default():
        fed = tf.placeholder(tf.float32, points.shape)
        asked = tf.placeholder(tf.float32, queries.shape)
        feeds, values = [fed, asked], [points, queries]
        if name == "fps_1024_to_512":
            feeds, values = [fed], [points]
            found = ops.farthest_point_sample(SAMPLES, fed)
        elif name == "ball_query_1024_to_512":
            found = ops.query_ball_point(RADIUS, NEIGHBOURS, fed, asked)
        else:
            found = ops.three_nn(fed, asked)
        session = sessions.enter_context(tf.Session(config=limited(tf.ConfigProto())))
        call = session.make_callable(found, feeds)
    return lambda: call(*values)


def _resident_megabytes(name):
    """(before, highest after) three runs of a search, for a process that does nothing else."""
    with contextlib.ExitStack() as sessions:
        run = _make_runner(name, one_thread(), sessions)
        with open("/proc/self/statm", encoding="ascii") as file:
            before = int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        for _ in range(3):
            run()
        after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return before / 1e6, after / 1e6
