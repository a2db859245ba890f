"""Locality-aware non-maximum suppression of quadrangles (EAST, section 3.6), without compiled code.

`merge_quadrangle_n9` gives the numbers of the original's C++ extension `lanms`. What explains them:

- Coordinates are multiplied by 10,000 in float32 and truncated to integers, on which all geometry
  happens.
- Overlap is the area of the intersection over the area of the union under the even-odd rule, so
  that a bow-tie counts its two triangles; the union counts as at least one unit. Ratio and
  threshold are float32.
- Merging two boxes is a score-weighted mean in float32 with a truncation to integers after every
  step; scores add up. The corners of the two are paired as they come or backwards, whichever lies
  closer. The original means to try every start corner as well, but measures other pairings than it
  applies (`_paired_with`), so boxes that start at different corners average to nonsense; ours are
  equal to it.
- A box is only ever merged into the one before it, so the order of the rows matters.
"""

import struct
from operator import itemgetter

import numpy as np

from utils.quads import even_odd_areas, intersection_areas

PRECISION = 10000  # integer units per pixel
_MAX_COORDINATE = (
    2.0**62
)  # of the integer coordinates; the original's polygon library has the same limit
_PAIRS_PER_BLOCK = 1 << 17  # bounds the memory of one batch of overlaps
_ROUND8 = struct.Struct("8f")
_ROUND1 = struct.Struct("f")
_SMALLEST_SCORE = float(np.float32(1e-8))
_BACKWARDS_FROM_3 = itemgetter(6, 7, 4, 5, 2, 3, 0, 1)
_BACKWARDS_FROM_0 = itemgetter(0, 1, 6, 7, 4, 5, 2, 3)


def merge_quadrangle_n9(boxes, thres=0.3):
    """Locality-aware NMS: merges neighbouring rows, then suppresses overlapping results.

    Equal scores are kept in the order of the rows.

    Args:
        boxes: [n, 9] float32, x and y of four corners in pixels, then the score; rows in raster
            order.
        thres: two boxes that overlap (IoU) by more than this are one; float.

    Returns:
        [m, 9] float32 by falling score, the score being the sum over the merged rows; an empty
        array of shape [0] where there are no boxes, as in the original.

    Raises:
        ValueError: boxes of another shape, or with values that are not finite.
    """
    if len(boxes) == 0:
        return np.array([], dtype=np.float32)
    boxes = np.asarray(boxes, dtype=np.float32)
    if boxes.ndim != 2 or boxes.shape[1] != 9:
        raise ValueError(
            f"boxes has shape {list(boxes.shape)}, but [n, 9] is required; pass x and y of four"
            " corners and the score"
        )
    with np.errstate(over="ignore", invalid="ignore"):
        scaled = np.trunc(boxes[:, :8] * np.float32(PRECISION))
        usable = np.all(np.abs(scaled) < _MAX_COORDINATE, axis=1) & np.isfinite(boxes[:, 8])
    if not usable.all():
        raise ValueError(
            f"{np.count_nonzero(~usable)} of {len(boxes)} boxes are not finite or too large,"
            " but finite numbers are required; drop those rows first"
        )
    thres = float(np.float32(thres))
    quads, scores = _merge_neighbours(scaled, boxes[:, 8], thres)
    kept = standard_nms(quads, scores, thres)
    result = np.empty((len(kept), 9), np.float32)
    result[:, :8] = quads[kept].astype(np.float32) / np.float32(PRECISION)
    result[:, 8] = scores[kept]
    return result


# ---------------------------------------------------------------- merging of neighbouring rows


def _merge_neighbours(scaled, scores, thres):
    """First pass: merges every row into the last result where the two overlap by more than `thres`.

    Args:
        scaled: [n, 8] float32, integers.
        scores: [n] float32.
        thres: float.

    Returns:
        ([m, 8] float64 integers, [m] float32 scores).
    """
    rows = scaled.astype(np.float64)
    weighted = (scaled * scores[:, None]).tolist()  # float32 products
    quads, sums = [], []
    last = None
    for quad, score, product in zip(rows.tolist(), scores.tolist(), weighted):
        current = _Shape(quad)
        if last is not None and _overlap_of_shapes(current, last) > thres:
            quads[-1], sums[-1] = _weighted_merge(quads[-1], sums[-1], quad, score, product)
            last = _Shape(quads[-1])
        else:
            quads.append(quad)
            sums.append(score)
            last = current
    return np.array(quads, np.float64), np.array(sums, np.float32)


def _weighted_merge(first, first_score, second, second_score, second_product):
    """Score-weighted mean of two quads in the original's float32 steps.

    Args:
        first, second: 8 numbers (integers) each.
        first_score, second_score: floats with float32 values.
        second_product: 8 floats, `second` times its score in float32.

    Returns:
        (8 numbers, score).
    """
    total = _truncate8(_float8([x * first_score for x in _float8(first)]))
    total = _float8(total)
    inverse = _float1(1.0 / max(_SMALLEST_SCORE, first_score))
    reference = _truncate8(_float8([x * inverse for x in total]))
    reorder = _paired_with(reference, second)
    if reorder is not None:
        second_product = reorder(second_product)
    total = _truncate8(_float8([a + b for a, b in zip(total, second_product)]))
    score = _float1(first_score + second_score)
    inverse = _float1(1.0 / max(_SMALLEST_SCORE, score))
    return _truncate8(_float8([x * inverse for x in _float8(total)])), score


def _paired_with(reference, quad):
    """How the original pairs the corners of `quad` with those of `reference` to average them.

    It measures three pairings, and where it finds the third one closest it applies another: from
    corner 0 backwards.

    Args:
        reference, quad: 8 numbers each.

    Returns:
        None for the corners as they come, else the function that reorders 8 numbers.
    """
    r0, s0, r1, s1, r2, s2, r3, s3 = reference
    x0, y0, x1, y1, x2, y2, x3, y3 = quad
    same = (r0 - x0) ** 2 + (s0 - y0) ** 2 + (r1 - x1) ** 2 + (s1 - y1) ** 2
    same += (r2 - x2) ** 2 + (s2 - y2) ** 2 + (r3 - x3) ** 2 + (s3 - y3) ** 2
    from_3 = (r0 - x3) ** 2 + (s0 - y3) ** 2 + (r1 - x2) ** 2 + (s1 - y2) ** 2
    from_3 += (r2 - x1) ** 2 + (s2 - y1) ** 2 + (r3 - x0) ** 2 + (s3 - y0) ** 2
    from_1 = (r0 - x1) ** 2 + (s0 - y1) ** 2 + (r1 - x0) ** 2 + (s1 - y0) ** 2
    from_1 += (r2 - x3) ** 2 + (s2 - y3) ** 2 + (r3 - x2) ** 2 + (s3 - y2) ** 2
    if from_1 < same and from_1 < from_3:
        return _BACKWARDS_FROM_0
    return _BACKWARDS_FROM_3 if from_3 < same else None


def _float8(values):
    """Rounds to float32: float64 sums, products, ratios of float32 then are float32 arithmetic."""
    return _ROUND8.unpack(_ROUND8.pack(*values))


def _float1(value):
    return _ROUND1.unpack(_ROUND1.pack(value))[0]


def _truncate8(values):
    return [float(int(v)) for v in values]


# ---------------------------------------------------------------- overlap, one pair at a time


class _Shape:
    """A quad with what every overlap needs.

    Attributes:
        bounds: (left, top, right, bottom).
        corners: four (x, y) in positive orientation, or None where it is not strictly convex.
        area: even-odd area.
        quad: the 8 numbers.
    """

    __slots__ = ("area", "bounds", "corners", "quad")

    def __init__(self, quad):
        x0, y0, x1, y1, x2, y2, x3, y3 = self.quad = quad
        self.bounds = (
            min(x0, x1, x2, x3),
            min(y0, y1, y2, y3),
            max(x0, x1, x2, x3),
            max(y0, y1, y2, y3),
        )
        turn0 = (x1 - x0) * (y2 - y1) - (y1 - y0) * (x2 - x1)
        turn1 = (x2 - x1) * (y3 - y2) - (y2 - y1) * (x3 - x2)
        turn2 = (x3 - x2) * (y0 - y3) - (y3 - y2) * (x0 - x3)
        turn3 = (x0 - x3) * (y1 - y0) - (y0 - y3) * (x1 - x0)
        area = 0.5 * ((x2 - x0) * (y3 - y1) - (y2 - y0) * (x3 - x1))
        if turn0 > 0 and turn1 > 0 and turn2 > 0 and turn3 > 0:
            self.corners = ((x0, y0), (x1, y1), (x2, y2), (x3, y3))
            self.area = area
        elif turn0 < 0 and turn1 < 0 and turn2 < 0 and turn3 < 0:
            self.corners = ((x3, y3), (x2, y2), (x1, y1), (x0, y0))
            self.area = -area
        else:
            self.corners = None
            self.area = float(even_odd_areas([quad])[0])


def _overlap_of_shapes(a, b):
    """IoU of two `_Shape`, as a float32 value."""
    if (
        a.bounds[2] <= b.bounds[0]
        or b.bounds[2] <= a.bounds[0]
        or a.bounds[3] <= b.bounds[1]
        or b.bounds[3] <= a.bounds[1]
    ):
        return 0.0
    if a.corners and b.corners:
        intersection = _clipped_area(a.corners, b.corners)
    else:
        intersection = float(intersection_areas([a.quad], [b.quad])[0])
    union = max(_float1(a.area + b.area - intersection), 1.0)
    return _float1(_float1(intersection) / union)


def _clipped_area(subject, clip):
    """Common area of two convex polygons in positive orientation (Sutherland-Hodgman)."""
    points = subject
    ax, ay = clip[-1]
    for bx, by in clip:
        ex, ey = bx - ax, by - ay
        kept = []
        px, py = points[-1]
        p_side = ex * (py - ay) - ey * (px - ax)
        for qx, qy in points:
            q_side = ex * (qy - ay) - ey * (qx - ax)
            if (p_side < 0) != (q_side < 0):
                t = p_side / (p_side - q_side)
                kept.append((px + t * (qx - px), py + t * (qy - py)))
            if q_side >= 0:
                kept.append((qx, qy))
            px, py, p_side = qx, qy, q_side
        if not kept:
            return 0.0
        points = kept
        ax, ay = bx, by
    ox, oy = points[0]  # near the polygon, so that nothing cancels
    area = 0.0
    px = py = 0.0
    for x, y in points[1:]:
        x -= ox
        y -= oy
        area += px * y - py * x
        px, py = x, y
    return max(0.5 * area, 0.0)


# ---------------------------------------------------------------- suppression, many pairs at a time


def standard_nms(quads, scores, thres):
    """Keeps the best box, drops what overlaps it by more than `thres`, and so on.

    Args:
        quads: [n, 8] float64, x and y of four corners.
        scores: [n].
        thres: float.

    Returns:
        int array of the kept rows, by falling score.
    """
    order = np.argsort(-np.asarray(scores, np.float64), kind="stable")
    quads = quads[order]
    corners = quads.reshape(-1, 4, 2)
    low, high = corners.min(axis=1), corners.max(axis=1)
    areas = even_odd_areas(quads)
    alive = np.arange(len(quads))
    kept = []
    while len(alive):
        # The best boxes against everything below them, as many at once as the memory bound allows.
        rows = min(len(alive), max(1, _PAIRS_PER_BLOCK // len(alive)))
        first, second = _possible_pairs(alive[:rows], alive, low, high, areas, thres)
        hit = overlaps(quads[first], quads[second], areas[first], areas[second]) > thres
        dropped = np.zeros(len(quads), bool)
        ends = np.searchsorted(first[hit], alive[:rows], side="right")
        victims = second[hit]
        start = 0
        for box, end in zip(alive[:rows], ends):
            if not dropped[box]:
                kept.append(box)
                dropped[victims[start:end]] = True
            start = end
        rest = alive[rows:]
        alive = rest[~dropped[rest]]
    return order[kept]


def _possible_pairs(best, alive, low, high, areas, thres):
    """Pairs (i of best, j > i of alive) whose bounds allow an overlap of more than `thres`."""
    touch = alive > best[:, None]
    if thres >= 0:
        for axis in (0, 1):
            touch &= low[alive, axis] < high[best, axis, None]
            touch &= high[alive, axis] > low[best, axis, None]
    i, j = np.nonzero(touch)
    i, j = best[i], alive[j]
    common = np.prod(
        np.maximum(np.minimum(high[i], high[j]) - np.maximum(low[i], low[j]), 0.0), axis=1
    )
    common = np.minimum(common, np.minimum(areas[i], areas[j]))
    # A hundredth of a percent of room for the rounding to float32.
    possible = common * 1.0001 >= thres * np.maximum(areas[i] + areas[j] - common, 1.0)
    return i[possible], j[possible]


def overlaps(a, b, areas_a=None, areas_b=None):
    """Intersection over union under the even-odd rule, for pairs of quads of any kind.

    Args:
        a, b: [n, 8], x and y of four corners.
        areas_a, areas_b: [n] even-odd areas where the caller has them.

    Returns:
        [n] float32.
    """
    areas_a = even_odd_areas(a) if areas_a is None else areas_a
    areas_b = even_odd_areas(b) if areas_b is None else areas_b
    intersection = intersection_areas(a, b)
    union = np.maximum((areas_a + areas_b - intersection).astype(np.float32), np.float32(1))
    return intersection.astype(np.float32) / union
