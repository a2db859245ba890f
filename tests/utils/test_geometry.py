"""Quadrilaterals and lines: the original's numbers, and what must hold for any quadrilateral."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.golden_sets import golden_path
from utils import geometry


@pytest.fixture(scope="module")
def rbox():
    with np.load(golden_path("east", "rbox.npz")) as data:
        return {name: data[name] for name in data.files}


def test_golden_shortest_edges_and_shrunk_quadrilaterals(rbox):
    r = geometry.shortest_edges(rbox["polys"])
    np.testing.assert_allclose(r, rbox["r"], atol=1e-3)
    shrunk = geometry.shrink_poly(rbox["polys"], r)
    np.testing.assert_allclose(shrunk, rbox["shrunk"], atol=1e-3)
    np.testing.assert_array_equal(shrunk.astype(np.int32), rbox["shrunk"].astype(np.int32))


def test_golden_rectangles(rbox):
    known = np.isfinite(rbox["rectangle"]).all(axis=(1, 2))
    rectangles = geometry.rectangle_from_parallelogram(rbox["polys"])
    np.testing.assert_allclose(rectangles[known], rbox["rectangle"][known], atol=1e-3)


def test_golden_sorted_rectangles(rbox):
    known = np.isfinite(rbox["rectangle"]).all(axis=(1, 2))
    rectangles, angles = geometry.sort_rectangle(rbox["rectangle"][known])
    np.testing.assert_allclose(rectangles, rbox["sorted_rectangle"][known], atol=1e-3)
    np.testing.assert_allclose(angles, rbox["angle"][known], atol=1e-5)


def test_golden_restored_rectangles():
    with np.load(golden_path("east", "nms.npz")) as data:
        names = sorted({name.split("/")[0] for name in data.files if name.startswith("restore")})
        assert names
        for name in names:
            quads = geometry.restore_rectangle(data[name + "/origin"], data[name + "/geometry"])
            np.testing.assert_allclose(quads, data[name + "/quads"], atol=1e-3)


def test_one_quadrilateral_gives_the_same_as_many():
    polys = _rectangles(np.random.RandomState(0), 7).astype(np.float32)
    polys += np.random.RandomState(1).uniform(-3, 3, polys.shape).astype(np.float32)
    together = geometry.min_area_parallelogram(polys.reshape(7, 1, 4, 2))
    for number, poly in enumerate(polys):
        np.testing.assert_array_equal(together[number, 0], geometry.min_area_parallelogram(poly))
        np.testing.assert_array_equal(
            geometry.shrink_poly(polys, geometry.shortest_edges(polys))[number],
            geometry.shrink_poly(poly, geometry.shortest_edges(poly)),
        )
        assert geometry.polygon_area(poly) == geometry.polygon_area(polys)[number]


def test_shrink_poly_leaves_its_argument_alone():
    poly = np.array([[0, 0], [100, 0], [100, 20], [0, 20]], np.float32)
    shrunk = geometry.shrink_poly(poly, [20, 20, 20, 20])
    np.testing.assert_allclose(shrunk, [[6, 6], [94, 6], [94, 14], [6, 14]], atol=1e-5)
    assert poly[0, 0] == 0


@pytest.mark.parametrize(
    ("points", "line"),
    [
        (((0, 1), (2, 5)), (2, -1, 1)),  # y = 2x + 1 through (0, 1) and (2, 5)
        (((3, 7), (3, 9)), (1, 0, -3)),  # upright
        (((1, 4), (5, 4)), (0, -1, 4)),  # level
    ],
)
def test_fit_line(points, line):
    (x0, y0), (x1, y1) = points
    np.testing.assert_allclose(geometry.fit_line([x0, x1], [y0, y1]), line, atol=1e-12)


def test_fit_line_agrees_with_least_squares():
    rng = np.random.RandomState(3)
    x, y = rng.uniform(0, 1000, (2, 2, 300)).astype(np.float32)
    expected = np.array([np.polyfit(x[:, i], y[:, i], 1) for i in range(x.shape[1])])
    lines = geometry.fit_line(x, y)
    np.testing.assert_allclose(lines[:, 0], expected[:, 0], rtol=1e-8)
    np.testing.assert_allclose(lines[:, 2], expected[:, 1], rtol=1e-7, atol=1e-7)


def test_a_nearly_upright_line_stays_upright():
    x = np.array([100, np.nextafter(np.float32(100), np.float32(101))], np.float32)
    slope, _, intercept = geometry.fit_line(x, np.array([10, 90], np.float32))
    assert abs(slope) > 1e6
    assert slope * np.float64(x[0]) + intercept == pytest.approx(10, abs=1e-4)


def test_line_cross_point():
    level, upright, rising = (0, -1, 4), (1, 0, -3), (2, -1, 1)
    np.testing.assert_allclose(geometry.line_cross_point(level, upright), (3, 4))
    np.testing.assert_allclose(geometry.line_cross_point(upright, rising), (3, 7))
    np.testing.assert_allclose(geometry.line_cross_point(rising, level), (1.5, 4))
    # The original takes an upright line (1, 0, .) and one of slope 1 for parallel.
    np.testing.assert_allclose(geometry.line_cross_point(upright, (1, -1, 0)), (3, 3))
    for line in (level, upright, rising):
        parallel = (line[0], line[1], line[2] + 5)
        assert np.isnan(geometry.line_cross_point(line, parallel)).all()


@pytest.mark.parametrize("line", [(0, -1, 4), (1, 0, -3), (2, -1, 1), (-0.25, -1, 8)])
def test_line_verticle_is_a_right_angle_through_the_point(line):
    point = np.array([5, 6], np.float32)
    a, b, c = geometry.line_verticle(line, point)
    assert a * line[0] + b * line[1] == pytest.approx(0)
    assert a * point[0] + b * point[1] + c == pytest.approx(0)


def test_polygon_area_is_negative_clockwise():
    clockwise = np.array([[0, 0], [4, 0], [4, 3], [0, 3]], np.float32)
    assert geometry.polygon_area(clockwise) == -12
    assert geometry.polygon_area(clockwise[::-1]) == 12


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 2**31 - 1))
def test_rectangles_come_back_from_their_distances(seed):
    rng = np.random.RandomState(seed)
    rectangles, angles = geometry.sort_rectangle(_rectangles(rng, 20))
    pixels = rectangles.mean(axis=1)
    edges = np.roll(rectangles, -1, axis=1) - rectangles
    distances = geometry.point_dist_to_line(
        rectangles, rectangles + edges, np.repeat(pixels[:, None], 4, axis=1)
    )
    restored = geometry.restore_rectangle(pixels, np.column_stack([distances, angles]))
    order = np.argsort(angles < 0, kind="stable")
    np.testing.assert_allclose(restored, rectangles[order], atol=1e-6)
    assert (np.abs(angles) <= np.pi / 4 + 1e-6).all()


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 2**31 - 1))
def test_the_parallelogram_holds_the_quadrilateral_and_its_rectangle_holds_it(seed):
    rng = np.random.RandomState(seed)
    quads = (_rectangles(rng, 20) + rng.uniform(-4, 4, (20, 4, 2))).astype(np.float32)
    parallelograms = geometry.min_area_parallelogram(quads)
    rectangles = geometry.rectangle_from_parallelogram(parallelograms)
    assert np.isfinite(rectangles).all()
    for outer, inner in ((parallelograms, quads), (rectangles, parallelograms)):
        edges = (np.roll(outer, -1, axis=1) - outer)[:, :, None]
        offsets = inner[:, None] - outer[:, :, None]
        inside = edges[..., 0] * offsets[..., 1] - edges[..., 1] * offsets[..., 0]
        assert (inside / np.linalg.norm(edges, axis=-1) > -0.05).all()


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 2**31 - 1), st.integers(1, 3))
def test_shrinking_does_not_depend_on_the_first_corner(seed, first):
    rng = np.random.RandomState(seed)
    quads = (_rectangles(rng, 20) + rng.uniform(-4, 4, (20, 4, 2))).astype(np.float32)
    shrunk = geometry.shrink_poly(quads, geometry.shortest_edges(quads))
    turned = np.roll(quads, -first, axis=1)
    shrunk_turned = geometry.shrink_poly(turned, geometry.shortest_edges(turned))
    clear = np.abs(_long_side_excess(quads)) > 1e-3
    np.testing.assert_allclose(
        shrunk_turned[clear], np.roll(shrunk, -first, axis=1)[clear], atol=1e-3
    )


def test_the_start_corner_is_the_same_for_every_numbering():
    rng = np.random.RandomState(5)
    quads = (_rectangles(rng, 200) + rng.uniform(-4, 4, (200, 4, 2))).astype(np.float32)
    expected = geometry.roll_corners(quads, geometry.start_corner(quads))
    for first in range(1, 4):
        turned = np.roll(quads, -first, axis=1)
        rolled = geometry.roll_corners(turned, geometry.start_corner(turned))
        np.testing.assert_array_equal(rolled, expected)


def _long_side_excess(quads):
    lengths = geometry.edge_lengths(quads)
    return lengths[:, 0] + lengths[:, 2] - lengths[:, 1] - lengths[:, 3]


def _rectangles(rng, number):
    """[number, 4, 2] float64: clockwise, 20 to 90 pixels long, at any angle."""
    angle = rng.uniform(-np.pi, np.pi, (number, 1))
    half = rng.uniform(10, 45, (2, number, 1))
    across = np.concatenate([np.cos(angle), np.sin(angle)], axis=1) * half[0]
    down = np.concatenate([-np.sin(angle), np.cos(angle)], axis=1) * half[1]
    center = rng.uniform(100, 900, (number, 2))
    return center[:, None] + np.stack(
        [-across - down, across - down, across + down, down - across], axis=1
    )
