"""Quadrilaterals and lines of EAST's labels (arXiv 1704.03155, section 3.3), many at a time.

Names, argument order and results are those of the functions in EAST's `icdar.py`. Every function
here also takes leading axes, so that one call handles all quadrilaterals of an image.

Corners are [..., 4, 2] float32, (x, y) in pixels, y pointing down; "clockwise" is as seen on the
screen. A line a*x + b*y + c = 0 is [..., 3] float64: (slope, -1, intercept), or (1, 0, -x) where
it is vertical. Points are float32, lines float64 and angles float32 wherever the original's are:
its labels depend on the last bit where two choices are equally good, or where a coordinate that
is about to be truncated lies next to an integer. Where the original finds no intersection and
raises, or divides by zero, the result here is NaN.
"""

import numpy as np

SHRINK_RATIO = 0.3  # by how much of its shorter edge a corner moves along either edge

_NEXT = [1, 2, 3, 0]
_PREVIOUS = [3, 0, 1, 2]
_DIRECTION_TIE = 1e-6  # weight of the downward over the rightward part in `start_corner`

# Degenerate quadrilaterals give NaN or infinity, which the caller looks for.
_quiet = np.errstate(all="ignore")


def polygon_area(poly):
    """Signed area of quadrilaterals: negative for clockwise corners.

    Args:
      poly: [..., 4, 2] float32.

    Returns:
      [...] float32, square pixels.
    """
    x, y = poly[..., 0], poly[..., 1]
    edges = (x[..., _NEXT] - x) * (y[..., _NEXT] + y)
    return edges.sum(axis=-1) / 2


def edge_lengths(poly):
    """Lengths [..., 4] float32 of the edges 0-1, 1-2, 2-3, 3-0 of quadrilaterals [..., 4, 2]."""
    return _norm(poly - poly[..., _NEXT, :])


def shortest_edges(poly):
    """Length [..., 4] float32 of the shorter of the two edges at each corner ("r" in the paper)."""
    lengths = edge_lengths(poly)
    return np.minimum(lengths, lengths[..., _PREVIOUS])


def shrink_poly(poly, r):
    """Moves the corners inwards along both of their edges, the two longer edges first.

    Args:
      poly: [..., 4, 2] float32, clockwise.
      r: [..., 4], the reference length of each corner, see `shortest_edges`.

    Returns:
      A new [..., 4, 2] float32 array.
    """
    poly = np.asarray(poly, np.float32)
    lead = poly.shape[:-2]
    flat = poly.reshape(-1, 4, 2)
    step = SHRINK_RATIO * np.asarray(r, np.float64).reshape(-1, 4)
    lengths = edge_lengths(flat)
    sides_first = ~(lengths[:, 0] + lengths[:, 2] > lengths[:, 3] + lengths[:, 1])
    # A quadrilateral whose sides (3-0, 1-2) come first is the same problem with its corners
    # renumbered 0, 3, 2, 1 and x and y exchanged.
    flat = _transpose(flat, sides_first)
    step = np.where(sides_first[:, None], step[:, [0, 3, 2, 1]], step)
    _move_along(flat, step, ((0, 1), (3, 2)), 0)
    _move_along(flat, step, ((0, 3), (1, 2)), 1)
    return _transpose(flat, sides_first).reshape(lead + (4, 2))


def _transpose(quads, which):
    return np.where(which[:, None, None], quads[:, [0, 3, 2, 1], ::-1], quads)


def _move_along(quads, step, edges, axis):
    """Moves the ends of two edges towards each other, in place.

    `axis` is the one from which the angle is measured; the original measures that of an upright
    edge from the y axis.
    """
    starts, ends = [edge[0] for edge in edges], [edge[1] for edge in edges]
    delta = quads[:, ends] - quads[:, starts]  # [N, 2, 2]
    across, along = delta[..., 1 - axis], delta[..., axis]
    theta = np.arctan2(across, along)
    direction = np.empty(delta.shape)
    # An upright or level edge has to stay so exactly, whichever corner the list starts with.
    direction[..., axis] = np.where(along == 0, 0, np.cos(theta))
    direction[..., 1 - axis] = np.where(across == 0, 0, np.sin(theta))
    quads[:, starts] = quads[:, starts] + step[:, starts, None] * direction
    quads[:, ends] = quads[:, ends] - step[:, ends, None] * direction


def start_corner(poly):
    """Index [...] of the corner whose edge to the next one points most to the right.

    The labels of a quadrilateral that is counted from there do not depend on the corner that its
    annotation happens to start with, also where two parallelograms fit it equally well.
    """
    edges = poly[..., _NEXT, :].astype(np.float64) - poly
    length = np.sqrt((edges**2).sum(axis=-1))
    rightward = edges[..., 0] + _DIRECTION_TIE * edges[..., 1]
    return np.argmax(
        np.divide(rightward, length, out=np.full(length.shape, -2.0), where=length > 0), -1
    )


def roll_corners(poly, first):
    """Quadrilaterals [..., 4, 2] counted from their corner number `first` [...]."""
    index = (np.asarray(first)[..., None] + np.arange(4)) % 4
    return np.take_along_axis(poly, index[..., None], axis=-2)


@_quiet
def point_dist_to_line(p1, p2, p3):
    """Distance [...] of the points p3 [..., 2] from the lines p1 p2; NaN where p1 == p2."""
    edge = p2 - p1
    offset = p1 - p3
    return np.abs(_cross(edge, offset)) / _norm(edge)


@_quiet
def fit_line(p1, p2):
    """The line through two points.

    The original fits it with numpy.polyfit, a least-squares solver even for two points. Corners of
    the parallelograms found with it often lie midway between two float32 numbers, so that the last
    bits of the solver decide which of several equally small ones is taken; hence they are made here
    as NumPy 1.26 made them. See `_solve_scaled`.

    Args:
      p1: their x coordinates, [2, ...] (a pair of numbers or arrays).
      p2: their y coordinates, [2, ...].

    Returns:
      [..., 3] float64: (slope, -1, intercept), or (1, 0, -x) where both x are equal.
    """
    (x0, x1), (y0, y1) = np.asarray(p1, np.float64), np.asarray(p2, np.float64)
    vertical = x0 == x1
    scale_x, scale_1 = np.sqrt(x0 * x0 + x1 * x1), np.sqrt(2.0)
    slope, intercept = _solve_scaled(x0 / scale_x, x1 / scale_x, 1 / scale_1, y0, y1)
    slope, intercept = slope / scale_x, intercept / scale_1
    return np.stack(
        [
            np.where(vertical, 1, slope),
            np.where(vertical, 0.0, -1.0),
            np.where(vertical, -x0, intercept),
        ],
        axis=-1,
    )


def _solve_scaled(u0, u1, one, y0, y1):
    """Solves u0*a + one*b = y0, u1*a + one*b = y1 step by step as LAPACK's DGELSD does.

    That is: a reflection makes the matrix upper triangular, and the singular value decomposition
    of the triangle is applied to the right-hand side. Unlike DGELSD this drops no small singular
    value, so that a nearly upright line stays one.
    """
    # Householder reflection I - tau * (1, v) (1, v)' of the first column.
    larger, smaller = np.maximum(np.abs(u0), np.abs(u1)), np.minimum(np.abs(u0), np.abs(u1))
    f = -np.copysign(larger * np.sqrt(1 + (smaller / larger) ** 2), u0)
    tau = (f - u0) / f
    v = u1 * (1 / (u0 - f))
    untouched = u1 == 0
    f, tau, v = np.where(untouched, u0, f), np.where(untouched, 0, tau), np.where(untouched, 0, v)
    step = -tau * (one + v * one)
    g, h = one + step, one + step * v
    step = -tau * (y0 + v * y1)
    y0, y1 = y0 + step, y1 + step * v
    # The triangle [[f, g], [0, h]], scaled so that its largest element is 1.
    scale = 1 / np.maximum(np.maximum(np.abs(f), np.abs(h)), np.abs(g))
    small, large, (cos_r, sin_r), (cos_l, sin_l) = _triangle_svd(f * scale, g * scale, h * scale)
    z0 = (cos_l * y0 + sin_l * y1) * (1 / np.abs(large))
    z1 = (cos_l * y1 - sin_l * y0) * (1 / np.abs(small))
    z0, z1 = np.where(large < 0, -z0, z0), np.where(small < 0, -z1, z1)
    return (cos_r * z0 - sin_r * z1) * scale, (sin_r * z0 + cos_r * z1) * scale


def _triangle_svd(f, g, h):
    """Singular values and vectors of [[f, g], [0, h]], in the order of operations of DLASV2.

    Returns:
      (smaller, larger value, both with sign; (cosine, sine) of the right rotation, of the left one)
    """
    swap = np.abs(h) > np.abs(f)
    top, bottom = np.where(swap, h, f), np.where(swap, f, h)
    high, low = np.abs(top), np.abs(bottom)
    gap = high - low
    ratio = gap / high
    m = g / top
    t = 2 - ratio
    s = np.sqrt(t * t + m * m)
    r = np.where(ratio == 0, np.abs(m), np.sqrt(ratio * ratio + m * m))
    a = 0.5 * (s + r)
    small, large = low / a, high * a
    t = (m / (s + t) + m / (r + ratio)) * (1 + a)
    norm = np.sqrt(t * t + 4)
    cos_r, sin_r = 2 / norm, t / norm
    cos_l, sin_l = (cos_r + sin_r * m) / a, bottom / top * sin_r / a
    right = np.where(swap, sin_l, cos_r), np.where(swap, cos_l, sin_r)
    left = np.where(swap, sin_r, cos_l), np.where(swap, cos_r, sin_l)
    # The sign belongs to the largest of the three elements.
    sign_f = np.sign(right[0]) * np.sign(left[0]) * np.sign(f)
    sign_g = np.sign(right[1]) * np.sign(left[0]) * np.sign(g)
    sign_h = np.sign(right[1]) * np.sign(left[1]) * np.sign(h)
    sign = np.where(np.abs(g) > high, sign_g, np.where(swap, sign_h, sign_f))
    return (
        np.copysign(small, sign * np.sign(f) * np.sign(h)),
        np.copysign(large, sign),
        right,
        left,
    )


@_quiet
def line_cross_point(line1, line2):
    """Intersection [..., 2] float32 of two lines [..., 3]; NaN where they are parallel."""
    (a1, b1, c1), (a2, b2, c2) = _columns(line1), _columns(line2)
    x = np.where(b1 == 0, -c1, np.where(b2 == 0, -c2, -(c1 - c2) / (a1 - a2)))
    y = np.where(b1 == 0, a2 * x + c2, a1 * x + c1)
    parallel = (b1 == b2) & (a1 == a2)
    return np.where(parallel[..., None], np.nan, np.stack([x, y], axis=-1)).astype(np.float32)


@_quiet
def line_verticle(line, point):
    """The perpendicular [..., 3] of a line [..., 3] through a point [..., 2]."""
    a, b, _ = _columns(line)
    x, y = point[..., 0].astype(np.float64), point[..., 1].astype(np.float64)
    slope = np.where(b == 0, 0.0, -1 / a)
    level = (b != 0) & (a == 0)
    return np.stack(
        [
            np.where(level, 1, slope),
            np.where(level, 0.0, -1.0),
            np.where(level, -x, y - slope * x),
        ],
        axis=-1,
    )


@_quiet
def min_area_parallelogram(poly):
    """The smallest parallelogram around a quadrilateral that keeps two of its edges' directions.

    For each edge there are two candidates: the edge, its parallel through the corner farther from
    it, and one of the neighbouring edges with its parallel. The original takes the first of the
    smallest.

    Args:
      poly: [..., 4, 2] float32, clockwise.

    Returns:
      [..., 4, 2] float32, counted from the corner with the smallest x + y; NaN where no candidate
      has finite corners.
    """
    poly = np.asarray(poly, np.float32)
    turns = (np.arange(4)[:, None] + np.arange(4)) % 4
    p0, p1, p2, p3 = np.moveaxis(poly[..., turns, :], -2, 0)  # each [..., 4 edges, 2]
    edge, backward = _line(np.stack([p0, p0]), np.stack([p1, p3]))
    forward = edge[..., _NEXT, :]  # of each edge the next one
    opposite = _parallel(edge, _farther(p0, p1, p2, p3))

    # The two choices of sides, on a leading axis: parallel to `forward` or to `backward`.
    sides = np.stack([forward, backward])
    far_corner = line_cross_point(sides, opposite)
    far_end = np.stack([far_corner[0], p3])  # the original measures from p3 itself
    farther = _farther(np.stack([p1, p0]), far_end, np.stack([p0, p1]), np.stack([p3, p2]))
    other_sides = _parallel(sides, farther)
    near, far = line_cross_point(other_sides, np.stack([edge, opposite])[:, None])
    candidates = np.stack(
        [
            np.stack([near[0], p1, far_corner[0], far[0]], axis=-2),
            np.stack([p0, near[1], far[1], far_corner[1]], axis=-2),
        ],
        axis=-3,
    ).reshape(poly.shape[:-2] + (8, 4, 2))

    areas = _shoelace(candidates)
    best = np.argmin(np.where(np.isfinite(areas), areas, np.inf), axis=-1)
    found = np.take_along_axis(candidates, best[..., None, None, None], axis=-3)[..., 0, :, :]
    return roll_corners(found, np.argmin(found.sum(axis=-1), axis=-1))


@_quiet
def rectangle_from_parallelogram(poly):
    """The rectangle around a parallelogram that has the direction of its longer edges.

    Args:
      poly: [..., 4, 2] float32, clockwise.

    Returns:
      [..., 4, 2] float32; NaN where the parallelogram is degenerate.
    """
    poly = np.asarray(poly, np.float32)
    p0, p1, p3 = poly[..., 0, :], poly[..., 1, :], poly[..., 3, :]
    width, height = _norm(p0 - p1), _norm(p0 - p3)
    angle = np.arccos(_dot(p1 - p0, p3 - p0) / (width * _norm(p3 - p0)))
    # The corners with an acute angle stay: 0 and 2, or 1 and 3. Counted from one of them, `kept`:
    acute = angle < 0.5 * np.pi
    kept = roll_corners(poly, np.where(acute, 0, 1))
    k0, k1, k2, k3 = (kept[..., i, :] for i in range(4))
    # their rectangle has its other corners at the feet of the perpendiculars from k0 and k2 onto
    # the longer edges, which run from k0 to k1 (`level`) or from k0 to k3.
    level = ((width > height) == acute)[..., None]
    line = _line(np.stack([k0, k2]), np.stack([np.where(level, k1, k3), np.where(level, k3, k1)]))
    foot_k2, foot_k0 = line_cross_point(line, line_verticle(line, np.stack([k2, k0])))
    new_k1 = np.where(level, foot_k2, foot_k0)
    new_k3 = np.where(level, foot_k0, foot_k2)
    return roll_corners(np.stack([k0, new_k1, k2, new_k3], axis=-2), np.where(acute, 0, 3))


@_quiet
def sort_rectangle(poly):
    """Counts the corners of a rectangle from its upper left, and measures its angle.

    Args:
      poly: [..., 4, 2] float32, a clockwise rectangle.

    Returns:
      (rectangle, angle): corners [..., 4, 2] in the order upper left, upper right, lower right,
      lower left, and the angle [...] float64 of the bottom edge in radians, above -pi/4 and up to
      pi/4, positive where the right end is higher.
    """
    poly = np.asarray(poly)
    y = poly[..., 1]
    lowest = np.argmax(y, axis=-1)
    corner = roll_corners(poly, lowest)
    # Two lowest corners: the rectangle is level.
    level = np.count_nonzero(y == corner[..., :1, 1], axis=-1) == 2
    rise = -(corner[..., 0, 1] - corner[..., 3, 1])
    run = corner[..., 0, 0] - corner[..., 3, 0]
    angle = np.arctan(rise / run).astype(np.float64)
    steep = angle / np.pi * 180 > 45
    first = np.where(steep, lowest + 2, lowest + 1)
    first = np.where(level, np.argmin(poly.sum(axis=-1), axis=-1), first)
    angle = np.where(level, 0.0, np.where(steep, -(np.pi / 2 - angle), angle))
    return roll_corners(poly, first), angle


def restore_rectangle_rbox(origin, geometry):
    """Turns distances and angles of pixels back into rectangles.

    As in the original the rectangles whose angle is not negative come before the others: those of
    pixels in the order `np.argsort(geometry[:, 4] < 0, kind="stable")`.

    Args:
      origin: [N, 2], the pixels (x, y).
      geometry: [N, 5] float, per pixel the distances to the top, right, bottom and left edge in
        pixels, and the angle in radians.

    Returns:
      [N, 4, 2] float64: upper left, upper right, lower right, lower left corner.
    """
    origin = np.asarray(origin, np.float64)
    top, right, bottom, left, angle = np.asarray(geometry, np.float64).T
    across = np.stack([np.cos(angle), -np.sin(angle)], axis=-1)[:, None]  # along the top edge
    down = np.stack([np.sin(angle), np.cos(angle)], axis=-1)[:, None]
    right_of_pixel = np.stack([-left, right, right, -left], axis=-1)[..., None]
    below_pixel = np.stack([-top, -top, bottom, bottom], axis=-1)[..., None]
    quads = origin[:, None] + right_of_pixel * across + below_pixel * down
    return np.concatenate([quads[angle >= 0], quads[angle < 0]])


def restore_rectangle(origin, geometry):
    """Same as `restore_rectangle_rbox`; there is no other geometry."""
    return restore_rectangle_rbox(origin, geometry)


def _dot(a, b):
    return a[..., 0] * b[..., 0] + a[..., 1] * b[..., 1]


def _cross(a, b):
    return a[..., 0] * b[..., 1] - a[..., 1] * b[..., 0]


def _norm(vector):
    return np.sqrt(_dot(vector, vector))


def _columns(line):
    line = np.asarray(line, np.float64)
    return line[..., 0], line[..., 1], line[..., 2]


def _line(start, end):
    return fit_line([start[..., 0], end[..., 0]], [start[..., 1], end[..., 1]])


def _parallel(line, point):
    """The parallel of a line through a point."""
    a, b, _ = _columns(line)
    x, y = point[..., 0], point[..., 1]
    return np.stack([a, b, np.where(b == 0, -x, y - a * x)], axis=-1)


def _farther(start, end, point, other):
    """The one of two points that is farther from the line start end; `other` if both are."""
    farther = point_dist_to_line(start, end, point) > point_dist_to_line(start, end, other)
    return np.where(farther[..., None], point, other)


def _shoelace(quads):
    """Areas [...] float64 of quadrilaterals, measured from their first corner."""
    corners = quads.astype(np.float64) - quads[..., :1, :]
    (x, y) = corners[..., 0], corners[..., 1]
    return np.abs((x * (y[..., _PREVIOUS] - y[..., _NEXT])).sum(axis=-1)) / 2
