"""Compiles `point_loops.cc` and calls its loops with the arguments of `nets.pointnet2.ops`."""

import ctypes
import os
import pathlib
import shutil
import subprocess

import numpy as np

SOURCE = pathlib.Path(__file__).with_suffix(".cc")


class NoCompilerError(RuntimeError):
    """The loops can't be compiled; the message says why."""


class Loops:
    """The compiled loops, one thread each.

    Args:
        folder: existing folder, where the library is put.

    Raises:
        NoCompilerError: there is no g++, or it failed.
    """

    def __init__(self, folder):
        compiler = shutil.which("g++")
        if compiler is None:
            raise NoCompilerError(
                "no g++ was found to compile the loops that the ops are compared with; install it"
            )
        library = os.path.join(folder, "point_loops.so")
        command = [compiler, "-O2", "-shared", "-fPIC", "-o", library, str(SOURCE)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise NoCompilerError(f"g++ could not compile {SOURCE.name}: {done.stderr.strip()}")
        self._library = ctypes.CDLL(library)

    def farthest_point_sample(self, npoint, points):
        """[clouds, npoint] int32 of [clouds, N, 3] float32."""
        clouds, number, _ = points.shape
        nearest = np.empty(number, np.float32)
        picked = np.empty((clouds, npoint), np.int32)
        self._library.farthest_point_sample(
            clouds, number, npoint, *_pointers(points, nearest, picked)
        )
        return picked

    def query_ball_point(self, radius, nsample, points, queries):
        """(idx [clouds, M, nsample], pts_cnt [clouds, M]) int32."""
        clouds, asked, _ = queries.shape
        idx = np.empty((clouds, asked, nsample), np.int32)
        pts_cnt = np.empty((clouds, asked), np.int32)
        sizes = clouds, points.shape[1], asked, ctypes.c_float(radius), nsample
        self._library.query_ball_point(*sizes, *_pointers(points, queries, idx, pts_cnt))
        return idx, pts_cnt

    def three_nn(self, points, known):
        """(dist float32, idx int32), both [clouds, n, 3]."""
        dist = np.empty(points.shape, np.float32)
        idx = np.empty(points.shape, np.int32)
        self._library.three_nn(
            *points.shape[:2], known.shape[1], *_pointers(points, known, dist, idx)
        )
        return dist, idx


def _pointers(*arrays):
    for array in arrays:
        assert array.flags.c_contiguous and array.itemsize == 4
    return [array.ctypes.data_as(ctypes.c_void_p) for array in arrays]
