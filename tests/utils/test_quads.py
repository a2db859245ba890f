import numpy as np
import pytest

from utils import quads


def _point_in(quad, x, y):
    """Even-odd rule for a grid of points, edge by edge."""
    inside = np.zeros(x.shape, bool)
    corners = quad.reshape(4, 2)
    for (x0, y0), (x1, y1) in zip(corners, np.roll(corners, -1, axis=0)):
        if y0 != y1:
            inside ^= ((y0 > y) != (y1 > y)) & (x < (x1 - x0) * (y - y0) / (y1 - y0) + x0)
    return inside


def test_intersection_by_hand():
    square = [0, 0, 4, 0, 4, 4, 0, 4]
    bow_tie = [0, 0, 4, 4, 4, 0, 0, 4]  # two triangles that meet in the middle, 4 each
    dart = [0, 0, 4, 2, 0, 4, 2, 2]  # non-convex
    point, line = [1, 1] * 4, [0, 0, 4, 4, 0, 0, 4, 4]
    outside = [4, 0, 8, 0, 8, 4, 4, 4]  # shares an edge
    b = [square, square[::-1], bow_tie, dart, point, line, outside, [2, 2, 6, 2, 6, 6, 2, 6]]
    a = [square] * len(b)
    np.testing.assert_allclose(quads.intersection_areas(a, b), [16, 16, 8, 4, 0, 0, 0, 4])
    np.testing.assert_allclose(quads.even_odd_areas([bow_tie, dart, point, line]), [8, 4, 0, 0])
    np.testing.assert_allclose(quads.intersection_areas([bow_tie], [dart]), [4 / 3])


def test_both_ways_to_intersect_agree_where_corners_and_edges_coincide():
    rng = np.random.RandomState(0)
    a = rng.randint(0, 6, (4000, 8)).astype(float)
    b = rng.randint(0, 6, (4000, 8)).astype(float)
    b[:1000] = np.roll(a[:1000].reshape(-1, 4, 2), 1, axis=1).reshape(-1, 8)
    slabs = quads._even_odd_intersections(a, b)
    np.testing.assert_allclose(quads.intersection_areas(a, b), slabs, atol=1e-12)
    grid = (np.arange(300) + 0.5) / 50
    x, y = np.meshgrid(grid, grid)
    for p, q, area in zip(a[2000:2060], b[2000:2060], slabs[2000:2060]):
        counted = np.count_nonzero(_point_in(p, x, y) & _point_in(q, x, y)) / 2500
        assert counted == pytest.approx(area, abs=0.1)
