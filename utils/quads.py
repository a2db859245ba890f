"""Areas of quadrangles and of what they have in common, many at a time and of any kind.

Quads count by the even-odd rule, as in the polygon libraries of the originals: a bow-tie is its two
triangles, a repeated corner or a line has no area.
"""

import numpy as np


def intersection_areas(a, b):
    """Area of what two quads have in common under the even-odd rule.

    Args:
        a, b: [n, 8], x and y of four corners in any order: convex, bow-tie, degenerate.

    Returns:
        [n] float64.
    """
    a = np.asarray(a, np.float64).reshape(-1, 8)
    b = np.asarray(b, np.float64).reshape(-1, 8)
    turn_a, turn_b = _turning(a), _turning(b)
    convex = (turn_a != 0) & (turn_b != 0)
    areas = np.empty(len(a))
    areas[convex] = _in_chunks(
        _convex_intersections,
        _anticlockwise(a[convex], turn_a[convex]),
        _anticlockwise(b[convex], turn_b[convex]),
    )
    areas[~convex] = _even_odd_intersections(a[~convex], b[~convex])
    return areas


def even_odd_areas(quads):
    """Area of quads under the even-odd rule: a bow-tie counts both triangles.

    Args:
        quads: [n, 8], x and y of four corners.

    Returns:
        [n] float64.
    """
    quads = np.asarray(quads, np.float64).reshape(-1, 8)
    corners = quads.reshape(-1, 4, 2)
    areas = 0.5 * np.abs(_cross(corners[:, 2] - corners[:, 0], corners[:, 3] - corners[:, 1]))
    other = _turning(quads) == 0
    areas[other] = _even_odd_intersections(quads[other], quads[other])
    return areas


def _cross(u, v):
    return u[..., 0] * v[..., 1] - u[..., 1] * v[..., 0]


def _turning(quads):
    """+1 or -1 for strictly convex quads (their orientation), 0 for all others."""
    corners = quads.reshape(-1, 4, 2)
    edges = np.roll(corners, -1, axis=1) - corners
    turns = _cross(edges, np.roll(edges, -1, axis=1))
    return np.all(turns > 0, axis=1).astype(int) - np.all(turns < 0, axis=1)


def _anticlockwise(quads, turning):
    corners = quads.reshape(-1, 4, 2)
    return np.where((turning > 0)[:, None, None], corners, corners[:, ::-1])


def _convex_intersections(a, b):
    """Intersection area of convex quads in positive orientation, by Green's theorem.

    The border of the intersection is the parts of a's edges inside b and of b's edges inside a.

    Args:
        a, b: [n, 4, 2].

    Returns:
        [n] float64.
    """
    middle = 0.5 * (a.mean(axis=1, keepdims=True) + b.mean(axis=1, keepdims=True))
    area = _border_integral(a, b, middle, shared=True) + _border_integral(
        b, a, middle, shared=False
    )
    return np.maximum(0.5 * area, 0.0)


def _border_integral(a, b, origin, shared):
    """Sum of cross(start, end) over the parts of a's edges inside b.

    Args:
        a, b: [n, 4, 2].
        origin: [n, 1, 2], where the cross products are taken from.
        shared: whether a part that lies on an edge of b with the same direction counts; to be
            counted once it must count for one of the two.

    Returns:
        [n].
    """
    edge = np.roll(a, -1, axis=1) - a
    line = (np.roll(b, -1, axis=1) - b)[:, None]  # [n, 1, 4, 2]
    start_side = _cross(
        line, a[:, :, None] - b[:, None]
    )  # [n, edge of a, line of b], >= 0 is inside
    slope = _cross(line, edge[:, :, None])  # change of the side along the edge
    parallel = slope == 0
    with np.errstate(divide="ignore", invalid="ignore"):
        crossing = -start_side / slope
    enter = np.where(slope > 0, crossing, -np.inf).max(axis=2)
    leave = np.where(slope < 0, crossing, np.inf).min(axis=2)
    same_direction = np.sum(line * edge[:, :, None], axis=3) > 0
    outside = parallel & ((start_side < 0) | ((start_side == 0) & ~(shared & same_direction)))
    enter = np.clip(enter, 0.0, 1.0)
    leave = np.clip(leave, 0.0, 1.0)
    counts = (leave > enter) & ~outside.any(axis=2)
    start = a - origin
    # cross(start + s * edge, start + t * edge) = (t - s) * cross(start, edge)
    return np.sum(np.where(counts, (leave - enter) * _cross(start, edge), 0.0), axis=1)


def _even_odd_intersections(a, b):
    """Intersection area of arbitrary quads under the even-odd rule; `a` and `b` are [n, 8]."""
    return _in_chunks(_slab_areas, a.reshape(-1, 4, 2), b.reshape(-1, 4, 2))


def _in_chunks(function, a, b, size=1024):
    """`function(a, b)` in pieces that stay in the processor's cache."""
    areas = np.empty(len(a))
    for begin in range(0, len(a), size):
        part = slice(begin, begin + size)
        areas[part] = function(a[part], b[part])
    return areas


def _slab_areas(a, b):
    """Intersection area of arbitrary quads under the even-odd rule, by horizontal slabs.

    Between two neighbouring heights of corners and crossings no two edges cross, so the order
    of the edges in the middle of the slab and their distances there give the exact area.

    Args:
        a, b: [n, 4, 2].

    Returns:
        [n] float64.
    """
    start = np.concatenate([a, b], axis=1)  # [n, 8 edges, 2]
    end = np.concatenate([np.roll(a, -1, axis=1), np.roll(b, -1, axis=1)], axis=1)
    edge = end - start
    i, j = np.triu_indices(8, 1)
    between = start[:, j] - start[:, i]
    slope = _cross(edge[:, i], edge[:, j])
    with np.errstate(divide="ignore", invalid="ignore"):
        s = _cross(between, edge[:, j]) / slope
        t = _cross(between, edge[:, i]) / slope
        y = start[:, i, 1] + s * edge[:, i, 1]
    crosses = (slope != 0) & (s >= 0) & (s <= 1) & (t >= 0) & (t <= 1)
    y = np.where(crosses, y, start[:, :1, 1])  # a height that is in the list anyway
    heights = np.sort(np.concatenate([start[:, :, 1], y], axis=1), axis=1)  # [n, 36]
    thickness = np.diff(heights, axis=1)
    middle = 0.5 * (heights[:, 1:] + heights[:, :-1])[:, :, None]  # [n, 35, 1]
    y0, y1 = start[:, None, :, 1], end[:, None, :, 1]
    spans = (np.minimum(y0, y1) < middle) & (middle < np.maximum(y0, y1))  # [n, 35, 8]
    with np.errstate(divide="ignore", invalid="ignore"):
        x = start[:, None, :, 0] + (middle - y0) * (edge[:, None, :, 0] / (y1 - y0))
    x = np.where(spans, x, np.inf)
    order = np.argsort(x, axis=2)
    x = np.take_along_axis(x, order, axis=2)
    spans = np.take_along_axis(spans, order, axis=2)
    of_a = spans & (order < 4)
    inside_a = np.cumsum(of_a, axis=2) % 2
    inside_b = np.cumsum(spans & ~of_a, axis=2) % 2
    inside = (inside_a & inside_b)[:, :, :-1] > 0
    x = np.where(np.isfinite(x), x, 0.0)
    widths = np.sum(np.where(inside, np.diff(x, axis=2), 0.0), axis=2)
    return np.sum(widths * thickness, axis=1)
