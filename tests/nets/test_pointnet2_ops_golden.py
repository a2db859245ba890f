"""Point-cloud ops against the numbers of the original's compiled ops."""

import re

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

from nets.pointnet2 import ops
from tests.golden_sets import golden_path
from tests.point_ops import fed, run, value_and_gradient

XLA = [True, False]


@pytest.fixture(scope="module")
def golden():
    with np.load(golden_path("pointnet2", "ops.npz")) as arrays:
        return dict(arrays)


@pytest.mark.parametrize("jit", XLA)
@pytest.mark.parametrize("case", ["a", "lattice", "exhaust", "big", "dup"])
def test_golden_farthest_point_sample(golden, case, jit):
    wanted = golden[f"fps_{case}_idx"]
    picked = run(
        lambda inp: ops.farthest_point_sample(wanted.shape[1], inp, jit_compile=jit),
        golden[f"fps_{case}_xyz"],
    )
    np.testing.assert_array_equal(picked, wanted)


@pytest.mark.parametrize("jit", XLA)
def test_golden_query_ball_point(golden, jit):
    cases = [re.fullmatch(r"qb_r(.+)_ns(\d+)_idx", key) for key in golden]
    cases = [(key[1], float(key[1]), int(key[2])) for key in cases if key]
    assert cases
    with tf.Graph().as_default(), tf.Session() as session:
        xyz1, xyz2 = fed(golden["qb_xyz1"], [2]), fed(golden["qb_xyz2"], [2])
        feed = {xyz1: golden["qb_xyz1"], xyz2: golden["qb_xyz2"]}
        for text, radius, nsample in cases:
            balls = ops.query_ball_point(radius, nsample, xyz1, xyz2, jit_compile=jit)
            idx, count = session.run(balls, feed)
            wanted = golden[f"qb_r{text}_ns{nsample}_cnt"]
            np.testing.assert_array_equal(count, wanted)
            assert not idx[wanted == 0].any()
            np.testing.assert_array_equal(
                idx[wanted > 0], golden[f"qb_r{text}_ns{nsample}_idx"][wanted > 0]
            )


@pytest.mark.parametrize("jit", XLA)
def test_golden_query_ball_point_on_the_boundary(golden, jit):
    nsample = golden["qbb_idx"].shape[2]
    idx, count = run(
        lambda a, b: ops.query_ball_point(0.5, nsample, a, b, jit_compile=jit),
        golden["qbb_xyz1"],
        golden["qbb_xyz2"],
    )
    full = golden["qbb_cnt"] > 0
    np.testing.assert_array_equal(count, golden["qbb_cnt"])
    np.testing.assert_array_equal(idx[full], golden["qbb_idx"][full])


@pytest.mark.parametrize("jit", XLA)
def test_golden_select_top_k(golden, jit):
    cases = [int(key[6:-4]) for key in golden if re.fullmatch(r"topk_k\d+_idx", key)]
    assert cases
    for k in cases:
        index, values = run(
            lambda dist, k=k: ops.select_top_k(k, dist, jit_compile=jit), golden["topk_dist"]
        )
        np.testing.assert_array_equal(index, golden[f"topk_k{k}_idx"])
        np.testing.assert_array_equal(values, golden[f"topk_k{k}_val"])


@pytest.mark.parametrize("jit", XLA)
def test_golden_knn_point(golden, jit):
    grid = golden["fps_lattice_xyz"]
    for case, xyz1, xyz2 in (
        ("knn", golden["knn_xyz1"], golden["knn_xyz2"]),
        ("knn_lattice", grid, grid[:, : golden["knn_lattice_idx"].shape[1]]),
    ):
        k = golden[f"{case}_idx"].shape[2]
        values, index = run(lambda a, b, k=k: ops.knn_point(k, a, b, jit_compile=jit), xyz1, xyz2)
        np.testing.assert_array_equal(index, golden[f"{case}_idx"])
        np.testing.assert_allclose(values, golden[f"{case}_val"], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("jit", XLA)
@pytest.mark.parametrize("case", ["a", "m1", "m2", "lattice"])
def test_golden_three_nn(golden, case, jit):
    distances, index = run(
        lambda a, b: ops.three_nn(a, b, jit_compile=jit),
        golden[f"tnn_{case}_xyz1"],
        golden[f"tnn_{case}_xyz2"],
    )
    np.testing.assert_array_equal(index, golden[f"tnn_{case}_idx"])
    np.testing.assert_allclose(distances, golden[f"tnn_{case}_dist"], rtol=1e-6, atol=1e-6)


def test_golden_gather_point(golden):
    value, gradient = value_and_gradient(
        ops.gather_point,
        golden["fps_a_xyz"],
        golden["gather_idx"],
        upstream=golden["gather_grad_out"],
    )
    np.testing.assert_array_equal(value, golden["gather_out"])
    np.testing.assert_allclose(gradient, golden["gather_grad_inp"], rtol=1e-6, atol=1e-6)


def test_golden_group_point(golden):
    value, gradient = value_and_gradient(
        ops.group_point,
        golden["group_points"],
        golden["group_idx"].astype(np.int32),
        upstream=golden["group_grad_out"],
    )
    np.testing.assert_array_equal(value, golden["group_out"])
    np.testing.assert_allclose(gradient, golden["group_grad_points"], rtol=1e-6, atol=1e-6)


def test_golden_three_interpolate(golden):
    points = golden["tint_points"]
    value, gradient = value_and_gradient(
        ops.three_interpolate,
        points,
        golden["tint_idx"],
        golden["tint_weight"],
        upstream=golden["tint_grad_out"],
    )
    np.testing.assert_allclose(value, golden["tint_out"], rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(gradient, golden["tint_grad_points"], rtol=1e-6, atol=1e-6)
    for case, idx, known in (
        ("fp", golden["tnn_a_idx"], points),
        ("fp_m1", golden["tnn_m1_idx"], points[:, :1]),
    ):
        value = run(ops.three_interpolate, known, idx, golden[f"{case}_weight"])
        np.testing.assert_allclose(value, golden[f"{case}_interp"], rtol=1e-6, atol=1e-6)


def test_golden_prob_sample(golden):
    drawn = run(ops.prob_sample, golden["prob_p"], golden["prob_r"])
    off = np.abs(drawn - golden["prob_idx"])
    assert off[2, 2:52].max() <= 1  # these stand on the rounding of the running sum
    off[2, 2:52] = 0
    assert not off.any()
    drawn = run(ops.prob_sample, golden["prob_big_p"], golden["prob_big_r"])
    np.testing.assert_array_equal(drawn, golden["prob_big_idx"])
