"""What the figures of PointNet++ compare does the same work, and who is blamed for unneeded ops."""

import shutil
import sys

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import train_multi_gpu
from benchmarks import cloud_figures, needed_ops, point_figures, point_loops, reference_augmentation
from nets.pointnet2 import ops
from tests import point_ops
from utils import provider
from utils.towers import devices


@pytest.fixture(scope="module")
def loops(tmp_path_factory):
    try:
        return point_loops.Loops(tmp_path_factory.mktemp("loops"))
    except point_loops.NoCompilerError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def clouds():
    """Made-up shapes with empty balls and with full ones, and a lattice with many ties."""
    shapes = cloud_figures.shape_clouds(3, 700)
    return np.concatenate([shapes, point_ops.lattice(np.random.RandomState(0), 1, 700)])


def test_loops_give_what_the_ops_give(loops, clouds):
    queries = clouds[:, :90] + np.float32([0.05, 0, 0])
    picked = loops.farthest_point_sample(600, clouds)
    np.testing.assert_array_equal(
        picked, point_ops.run(lambda points: ops.farthest_point_sample(600, points), clouds)
    )
    for radius, nsample in ((0.2, 32), (0.06, 3)):
        found = point_ops.run(
            lambda *points, r=radius, n=nsample: ops.query_ball_point(r, n, *points),
            clouds,
            queries,
        )
        idx, pts_cnt = loops.query_ball_point(radius, nsample, clouds, queries)
        np.testing.assert_array_equal(idx, found[0])
        np.testing.assert_array_equal(pts_cnt, found[1])
    dist, idx = loops.three_nn(clouds, queries)
    found = point_ops.run(ops.three_nn, clouds, queries)
    np.testing.assert_allclose(dist, found[0], rtol=1e-6, atol=1e-7)
    np.testing.assert_array_equal(idx, found[1])


def test_without_a_compiler_the_figures_say_so(monkeypatch, tmp_path):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    monkeypatch.setattr(point_figures, "one_thread", lambda: None)
    records = [figure.record() for figure in point_figures.speed()]
    assert [record["name"] for record in records] == list(point_figures.SPEED_BARS)
    for record in records:
        assert record["value"] is None and not record["pass"]
        assert "g++" in record["detail"]["not_measured"]
    monkeypatch.setattr(shutil, "which", lambda name: sys.executable)
    with pytest.raises(point_loops.NoCompilerError, match="could not compile point_loops.cc"):
        point_loops.Loops(tmp_path)


def test_the_loop_over_clouds_augments_as_ours_does():
    batch = cloud_figures.shape_clouds(5, 999)
    first, second = np.random.RandomState(3), np.random.RandomState(3)
    found = provider.augment_batch(batch, rng=first)
    expected = reference_augmentation.augment_batch(batch, second)
    assert found.dtype == expected.dtype
    np.testing.assert_allclose(found, expected, atol=1e-6)
    assert first.uniform() == second.uniform()


def test_ops_that_nothing_needs_are_found_where_they_were_made():
    with tf.Graph().as_default() as graph, tf.Session() as session:
        source = tf.placeholder_with_default(np.ones(4, np.float32), [4], name="source")
        with tf.control_dependencies([tf.negative(source, name="waited_for")]):
            result = tf.add(source, source, name="result")
        tf.square(result, name="alone")
        for tower in ("one", "other"):
            with tf.name_scope(tower):
                (tf.exp(source, name="exp"), tf.add(result, source, name="total"))
        with needed_ops.observed_runs() as runs:
            session.run({"first": result, "more": ["one/total:0"]})
    assert dict(runs) == {graph: {"result", "one/total"}}
    found = needed_ops.needed(graph, runs[graph])
    assert {op.name for op in found} == {"source/input", "source", "waited_for", "result"} | {
        "one/total"
    }
    in_vain, beside = needed_ops.made_in_vain(graph, found)
    # In one tower the sum, made in the same line as the exponential, is needed.
    assert beside == {"Exp": 1}
    assert sorted(in_vain.values()) == [1, 2]
    assert all(place.startswith("tests/scripts/test_bench_points.py:") for place in in_vain)


def test_the_training_graph_has_no_op_made_in_vain():
    place = devices.Devices("CPU", (0, 1))
    with tf.Graph().as_default() as graph:
        net = train_multi_gpu.TrainGraph(place, num_point=64, batch_size=8)
        run = [net.summary_op, net.loss, net.pred, net.nonfinite, net.train_op]
        run += [net.eval_summary_op, net.eval_loss, net.eval_pred, net.engine.synchronize]
        run += [tf.global_variables_initializer()]
    names = {getattr(element, "op", element).name for element in run}
    in_vain, _ = needed_ops.made_in_vain(graph, needed_ops.needed(graph, names))
    assert dict(in_vain) == {}
