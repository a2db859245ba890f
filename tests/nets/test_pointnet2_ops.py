"""Point-cloud ops against brute force in NumPy and cases done by hand; towers, memory, errors."""

import os
import pathlib
import re
import subprocess
import sys

import hypothesis
import numpy as np
import pytest
import tensorflow.compat.v1 as tf
from hypothesis import strategies as st

from nets.pointnet2 import ops
from tests.golden_sets import ROOT
from tests.point_ops import (
    brute_ball,
    brute_farthest,
    brute_selection_sort,
    brute_three,
    lattice,
    run,
    squared_distances,
    value_and_gradient,
)
from utils.towers.devices import Devices

XLA = [True, False]


# --- by hand --------------------------------------------------------------------------------------


@pytest.mark.parametrize("jit", XLA)
def test_farthest_points_of_four(jit):
    points = np.float32([[[0, 0, 0], [1, 0, 0], [0, 2, 0], [5, 0, 0]]])
    picked = run(lambda inp: ops.farthest_point_sample(3, inp, jit_compile=jit), points)
    assert picked.tolist() == [[0, 3, 2]]


@pytest.mark.parametrize("jit", XLA)
def test_empty_balls_point_at_the_first_point(jit):
    points = np.zeros((1, 5, 3), np.float32)
    queries = points[:, :2] + np.float32([100, 0, 0])
    queries[0, 1] = 0.5  # sqrt(0.75) from all of the points
    idx, count = run(
        lambda a, b: ops.query_ball_point(1, 4, a, b, jit_compile=jit), points, queries
    )
    assert count.tolist() == [[0, 4]]
    assert idx.tolist() == [[[0, 0, 0, 0], [0, 1, 2, 3]]]


def test_gradients_through_empty_balls_and_missing_neighbours_are_finite():
    with tf.Graph().as_default(), tf.Session() as session:
        xyz = tf.placeholder(tf.float32, [None, None, 3])
        far = xyz + 100.0
        idx, _ = ops.query_ball_point(1.0, 4, xyz, far)
        grouped = ops.group_point(xyz, idx)
        dist, nearest = ops.three_nn(far, xyz)
        filled = ops.three_interpolate(xyz, nearest, 1.0 / tf.maximum(dist, 1e-10))
        loss = tf.reduce_sum(grouped**2) + tf.reduce_sum(filled**2)
        gradient = session.run(tf.gradients(loss, xyz)[0], {xyz: np.ones((2, 1, 3))})
    assert np.isfinite(gradient).all() and gradient.all()


@pytest.mark.parametrize("jit", XLA)
@pytest.mark.parametrize("number", [1, 32])
def test_more_samples_than_points(number, jit):
    points = np.random.RandomState(number).rand(2, number, 3).astype(np.float32)
    picked = run(lambda inp: ops.farthest_point_sample(40, inp, jit_compile=jit), points)
    for row in picked:
        assert sorted(row[:number]) == list(range(number))
        assert not row[number:].any()
    idx, count = run(lambda inp: ops.query_ball_point(10.0, 40, inp, inp, jit_compile=jit), points)
    assert (count == number).all()
    assert (idx == np.pad(np.arange(number), (0, 40 - number))).all()
    values, index = run(lambda inp: ops.knn_point(40, inp, inp, jit_compile=jit), points)
    assert np.isinf(values[:, :, number:]).all() and not index[:, :, number:].any()
    assert (index[:, :, 0] == np.arange(number)).all()


@pytest.mark.parametrize("jit", XLA)
def test_coordinates_that_are_not_numbers_give_indices_in_range(jit):
    points = np.full((1, 600, 3), np.nan, np.float32)
    picked = run(lambda inp: ops.farthest_point_sample(5, inp, jit_compile=jit), points)
    balls, count = run(lambda inp: ops.query_ball_point(1, 3, inp, inp, jit_compile=jit), points)
    index = run(lambda inp: ops.knn_point(3, inp, inp, jit_compile=jit), points)[1]
    nearest = run(lambda inp: ops.three_nn(inp, inp, jit_compile=jit), points)[1]
    assert not count.any()
    for found in (picked, balls, index, nearest):
        assert found.min() >= 0 and found.max() < 600


@pytest.mark.parametrize("jit", XLA)
def test_selection_sort_by_hand(jit):
    values = np.float32([[[5, 5, 1], [np.inf, np.inf, 1]]])
    index, ordered = run(lambda dist: ops.select_top_k(9, dist, jit_compile=jit), values)
    # The first swap puts the first value behind its equal; infinities stay where they are.
    assert index.tolist() == [[[2, 1, 0], [2, 1, 0]]]
    np.testing.assert_array_equal(ordered, [[[1, 5, 5], [1, np.inf, np.inf]]])


def test_prob_sample_by_hand():
    weights = np.float32([[0, 1, 0, 2, 1], [3, 0, 0, 0, 0]])
    uniform = np.float32([[0, 0.25, 0.5, 0.75, 0.76, 1]] * 2)
    drawn = run(ops.prob_sample, weights, uniform)
    assert drawn.tolist() == [[0, 1, 3, 3, 4, 4], [0] * 6]


def test_repeated_indices_add_their_gradients():
    points = np.arange(12, dtype=np.float32).reshape(2, 2, 3)
    idx = np.int32([[1, 1, 0], [1, 1, 1]])
    upstream = np.arange(18, dtype=np.float32).reshape(2, 3, 3)
    value, gradient = value_and_gradient(ops.gather_point, points, idx, upstream=upstream)
    np.testing.assert_array_equal(value, [points[0][[1, 1, 0]], points[1][[1, 1, 1]]])
    wanted = [[upstream[0, 2], upstream[0, :2].sum(0)], [[0, 0, 0], upstream[1].sum(0)]]
    np.testing.assert_array_equal(gradient, wanted)


@pytest.mark.parametrize("radius", [1e-21, 1e-20, 3e-20, 1e-5, 0.1, 0.2, 0.3, 0.7, 5.0, 1e18, 1e30])
def test_comparing_squares_says_the_same_as_comparing_roots(radius):
    with np.errstate(over="ignore", under="ignore"):
        around = np.float32(radius) ** 2
        values = [around]
        for direction in (0, np.inf):
            value = around
            for _ in range(50):
                value = np.nextafter(value, np.float32(direction))
                values.append(value)
        values = np.float32([*values, 0, 1, np.finfo(np.float32).max])
    wanted = np.maximum(np.sqrt(values), np.float32(1e-20)) < np.float32(radius)
    np.testing.assert_array_equal(values < ops.squared_radius(radius), wanted)


# --- against brute force --------------------------------------------------------------------------

SIZES = st.sampled_from([1, 2, 5, 33])  # few, since each compiles its own program


@pytest.fixture(scope="module", params=XLA, ids=["xla", "kernels"])
def searches(request):
    """Function of clouds and queries that runs the searches in one session."""
    jit = request.param
    with tf.Graph().as_default() as graph:
        xyz1, xyz2 = (tf.placeholder(tf.float32, [None, None, 3]) for _ in range(2))
        outputs = {
            "fps": ops.farthest_point_sample(12, xyz1, jit_compile=jit),
            "ball": ops.query_ball_point(0.75, 7, xyz1, xyz2, jit_compile=jit),
            "knn": ops.knn_point(4, xyz1, xyz2, jit_compile=jit),
            "three": ops.three_nn(xyz2, xyz1, jit_compile=jit),
        }
        graph.finalize()
        with tf.Session() as session:

            def search(points, queries, names=tuple(outputs)):
                fetches = {name: outputs[name] for name in names}
                return session.run(fetches, {xyz1: points, xyz2: queries})

            yield search


@hypothesis.settings(
    max_examples=40,
    deadline=None,
    suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture],
)
@hypothesis.given(seed=st.integers(0, 2**32 - 1), number=SIZES, side=st.integers(1, 6))
def test_searches_agree_with_brute_force(searches, seed, number, side):
    rng = np.random.RandomState(seed)
    points, queries = lattice(rng, 2, number, side=side), lattice(rng, 2, 5, side=side + 3)
    found = searches(points, queries)
    for cloud, (mine, asked) in enumerate(zip(points, queries)):
        np.testing.assert_array_equal(found["fps"][cloud], brute_farthest(12, mine))
        for got, wanted in zip(found["ball"], brute_ball(0.75, 7, mine, asked)):
            np.testing.assert_array_equal(got[cloud], wanted)
        for got, wanted in zip(found["three"], brute_three(asked, mine)):
            np.testing.assert_array_equal(got[cloud], wanted)
        for row, distances in enumerate(squared_distances(asked, mine)):
            index, values = brute_selection_sort(4, distances)
            kept = min(4, number)
            np.testing.assert_array_equal(found["knn"][1][cloud, row, :kept], index[:kept])
            np.testing.assert_array_equal(found["knn"][0][cloud, row, :kept], values[:kept])


@pytest.mark.parametrize("number", [512, 513, 1600])
def test_farthest_ties_follow_the_threads(searches, number):
    points = lattice(np.random.RandomState(number), 2, number, side=3)
    picked = searches(points, points[:, :1], ["fps"])["fps"]
    np.testing.assert_array_equal(picked, [brute_farthest(12, cloud) for cloud in points])


# --- graph ----------------------------------------------------------------------------------------


def build_all(points):
    """Every op on [batch, N, 3] points, with a gradient through those that have one."""
    picked = ops.farthest_point_sample(16, points)
    centres = ops.gather_point(points, picked)
    idx, count = ops.query_ball_point(0.5, 8, points, centres)
    grouped = ops.group_point(points, idx)
    values, nearest = ops.knn_point(4, points, centres)
    sorted_idx, _ = ops.select_top_k(2, values)
    dist, three = ops.three_nn(points, centres)
    filled = ops.three_interpolate(centres, three, dist)
    drawn = ops.prob_sample(points[:, :, 0], points[:, :4, 1])
    loss = tf.reduce_sum(grouped**2) + tf.reduce_sum(filled**2)
    gradient = tf.gradients(loss, points)[0]
    return picked, count, idx, nearest, sorted_idx, dist, three, filled, drawn, gradient


def test_towers_run_every_op_on_their_own_device_and_agree():
    devices = Devices("CPU", (0, 1, 2))
    clouds = np.random.RandomState(3).rand(2, 600, 3).astype(np.float32)
    with tf.Graph().as_default() as graph:
        inp = tf.placeholder(tf.float32, [None, 600, 3])
        towers, sizes = [], []
        for tower in range(3):
            with tf.device(devices.tower_device(tower)), tf.name_scope(f"tower_{tower}"):
                before = len(graph.get_operations())
                towers.append(build_all(tf.identity(inp)))
                sizes.append(len(graph.get_operations()) - before)
        assert sizes[1] == sizes[0] and sizes[2] == sizes[0]
        graph.finalize()
        with tf.Session(config=devices.session_config()) as session:
            record = tf.RunMetadata()
            options = tf.RunOptions(trace_level=tf.RunOptions.FULL_TRACE)
            results = session.run(towers, {inp: clouds}, options, record)
            again = session.run(towers, {inp: clouds})
    ran = {
        (node.node_name.split("/")[0], device.device[-5:])
        for device in record.step_stats.dev_stats
        for node in device.node_stats
        if "PartitionedCall" in node.node_name
    }
    assert ran == {(f"tower_{tower}", f"CPU:{tower}") for tower in range(3)}
    for result in (*results[1:], *again):
        for got, wanted in zip(result, results[0]):
            np.testing.assert_array_equal(got, wanted)


def test_batch_may_change_between_runs_and_static_sizes_are_kept():
    clouds = np.random.RandomState(4).rand(3, 20, 3).astype(np.float32)
    with tf.Graph().as_default(), tf.Session() as session:
        inp = tf.placeholder(tf.float32, [None, 20, 3])
        picked = ops.farthest_point_sample(6, inp)
        idx, count = ops.query_ball_point(0.5, 8, inp, ops.gather_point(inp, picked))
        dist, three = ops.three_nn(inp, inp)
        assert picked.shape.as_list() == [None, 6]
        assert idx.shape.as_list() == [None, 6, 8] and count.shape.as_list() == [None, 6]
        assert ops.group_point(inp, idx).shape.as_list() == [None, 6, 8, 3]
        assert dist.shape.as_list() == three.shape.as_list() == [None, 20, 3]
        assert ops.three_interpolate(inp, three, dist).shape.as_list() == [None, 20, 3]
        whole = session.run((picked, idx, three), {inp: clouds})
        for size in (1, 2):
            part = session.run((picked, idx, three), {inp: clouds[:size]})
            for got, wanted in zip(part, whole):
                np.testing.assert_array_equal(got, wanted[:size])


def test_searches_are_constants_to_gradients():
    with tf.Graph().as_default():
        xyz = tf.placeholder(tf.float32, [2, 8, 3])
        outputs = [ops.three_nn(xyz, xyz)[0], ops.knn_point(2, xyz, xyz)[0]]
        outputs.append(ops.select_top_k(2, xyz)[1])
        assert [tf.gradients(output, xyz)[0] for output in outputs] == [None] * 3


def test_gradients_agree_with_differences():
    rng = np.random.RandomState(5)
    points = rng.rand(2, 4, 3).astype(np.float32)
    idx = rng.randint(0, 4, (2, 5, 3)).astype(np.int32)
    weight = rng.rand(2, 5, 3).astype(np.float32)
    with tf.Graph().as_default(), tf.Session():
        inp = tf.constant(points)
        for value, shape in (
            (ops.group_point(inp, idx), [2, 5, 3, 3]),
            (ops.gather_point(inp, idx[:, :, 0]), [2, 5, 3]),
            (ops.three_interpolate(inp, idx, weight), [2, 5, 3]),
        ):
            assert tf.test.compute_gradient_error(inp, [2, 4, 3], value, shape, delta=0.1) < 1e-4


def test_no_tensor_holds_a_coordinate_for_every_pair():
    batch, number, queries = 4, 256, 128
    clouds = np.random.RandomState(6).rand(batch, number, 3).astype(np.float32)
    with tf.Graph().as_default(), tf.Session() as session:
        xyz1, xyz2 = (tf.placeholder(tf.float32, [None, None, 3]) for _ in range(2))
        outputs = [
            ops.farthest_point_sample(queries, xyz1, jit_compile=False),
            ops.query_ball_point(9.0, 16, xyz1, xyz2, jit_compile=False),
            ops.three_nn(xyz1, xyz2, jit_compile=False),
            ops.knn_point(4, xyz1, xyz2, jit_compile=False),
        ]
        record = tf.RunMetadata()
        options = tf.RunOptions(trace_level=tf.RunOptions.FULL_TRACE)
        session.run(outputs, {xyz1: clouds, xyz2: clouds[:, :queries]}, options, record)
    largest = max(
        memory.peak_bytes
        for device in record.step_stats.dev_stats
        for node in device.node_stats
        for memory in node.memory
    )
    assert batch * number * queries <= largest <= 4 * batch * number * queries


MEASURE_MEMORY = """
import re
import numpy as np
import tensorflow.compat.v1 as tf
from nets.pointnet2 import ops

def memory(field):
    return int(re.search(field + r":\\s+(\\d+) kB", open("/proc/self/status").read())[1]) / 1024

clouds = np.random.RandomState(7).rand(16, 1024, 3).astype(np.float32)
with tf.Graph().as_default(), tf.Session() as session:
    xyz1, xyz2 = (tf.placeholder(tf.float32, [None, None, 3]) for _ in range(2))
    outputs = [
        ops.farthest_point_sample(512, xyz1),
        ops.query_ball_point(9.0, 32, xyz1, xyz2),
        ops.three_nn(xyz1, xyz2),
        ops.knn_point(4, xyz1, xyz2),
    ]
    session.run(outputs, {xyz1: clouds[:1, :9], xyz2: clouds[:1, :9]})  # loads the compiler
    before = memory("VmRSS")
    for output in outputs:
        session.run(output, {xyz1: clouds, xyz2: clouds[:, :512]})
    print("peak", memory("VmHWM") - before)
"""


@pytest.mark.skipif(not pathlib.Path("/proc/self/status").exists(), reason="no peak of the memory")
def test_compiled_searches_take_less_than_300_megabytes():
    # In its own process, because memory that earlier work left to the allocator isn't seen here.
    done = subprocess.run(
        [sys.executable, "-c", MEASURE_MEMORY],
        env=dict(os.environ, PYTHONPATH=str(ROOT), TF_CPP_MIN_LOG_LEVEL="3"),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert 0 < float(re.search("peak (.+)", done.stdout)[1]) < 300


# --- refused arguments ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "call, text",
    [
        (lambda x: ops.farthest_point_sample(0, x), "npoint=0; pass"),
        (lambda x: ops.farthest_point_sample(2.5, x), "npoint=2.5; pass"),
        (lambda x: ops.query_ball_point(0, 4, x, x), "radius=0; pass"),
        (lambda x: ops.query_ball_point(-1.0, 4, x, x), "radius=-1.0; pass"),
        (lambda x: ops.query_ball_point(float("nan"), 4, x, x), "radius=nan; pass"),
        (lambda x: ops.query_ball_point(0.1, 0, x, x), "nsample=0; pass"),
        (lambda x: ops.select_top_k(-1, x), "k=-1; pass"),
        (lambda x: ops.knn_point(0, x, x), "k=0; pass"),
        (lambda x: ops.knn_point(1, x, x[:, :, :2]), "points of 3 and queries of 2"),
        (lambda x: ops.farthest_point_sample(2, x[0]), r"shape \(8, 3\); pass float32 \[batch"),
        (lambda x: ops.farthest_point_sample(2, x[:, :, :2]), r"shape \(2, 8, 2\); pass"),
        (lambda x: ops.farthest_point_sample(2, x[:, :0]), "at least one entry"),
        (lambda x: ops.farthest_point_sample(2, tf.cast(x, tf.float64)), "type float64"),
        (lambda x: ops.query_ball_point(0.1, 4, x, x[0]), "xyz2 of"),
        (lambda x: ops.three_nn(x[0], x), "xyz1 of"),
        (lambda x: ops.gather_point(x, x), "idx of"),
        (lambda x: ops.group_point(x, tf.zeros([2, 8], tf.int32)), "idx of"),
        (lambda x: ops.group_point(x, tf.zeros([2, 8, 1], tf.int64)), "type int64"),
        (lambda x: ops.three_interpolate(x, tf.zeros([2, 4, 2], tf.int32), x), "idx of"),
        (lambda x: ops.prob_sample(x, x), "inp of"),
        (lambda x: ops.farthest_point_sample(2, tf.placeholder(tf.float32)), "unknown"),
    ],
)
def test_wrong_arguments_get_one_sentence(call, text):
    with tf.Graph().as_default():
        inp = tf.zeros([2, 8, 3])
        with pytest.raises(ValueError, match=text) as error:
            call(inp)
    assert "\n" not in str(error.value)
