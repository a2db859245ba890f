"""EAST's label maps point by point, from their definition: slow and simple.

Independent of `data.icdar_labels` in how the maps are made (only the rectangle around a
quadrilateral comes from the same module): `bench.py` measures against it, tests may compare with
it.
"""

import warnings

import cv2
import numpy as np

from utils import geometry


def generate_rbox(im_size, polys, tags, min_text_size=10, stride=1):
    """Same arguments and results as `data.icdar_labels.generate_rbox`.

    The maps are made at full size and then thinned out, as the original does.
    """
    with warnings.catch_warnings():
        # NumPy 2 warns of `cross` in the plane at every call.
        warnings.simplefilter("ignore", DeprecationWarning)
        maps = _full_size_maps(im_size, polys, tags, min_text_size)
    return tuple(array[::stride, ::stride] for array in maps)


def _full_size_maps(im_size, polys, tags, min_text_size):
    height, width = im_size
    text_number = np.zeros((height, width), np.int32)
    score_map = np.zeros((height, width), np.uint8)
    geo_map = np.zeros((height, width, 5), np.float32)
    training_mask = np.ones((height, width), np.uint8)
    for number, (poly, tag) in enumerate(zip(polys, tags), start=1):
        poly = geometry.roll_corners(poly, geometry.start_corner(poly))
        edges = [np.linalg.norm(poly[i] - poly[i - 1]) for i in range(4)]
        shortest = np.array(
            [min(edges[i], edges[(i + 1) % 4]) for i in range(4)]
        )  # of the two edges that meet at a corner
        shrunk = geometry.shrink_poly(poly, shortest).astype(np.int32)[np.newaxis]
        cv2.fillPoly(score_map, shrunk, 1)
        cv2.fillPoly(text_number, shrunk, number)
        if tag or min(edges) < min_text_size:
            cv2.fillPoly(training_mask, poly.astype(np.int32)[np.newaxis], 0)
        parallelogram = geometry.min_area_parallelogram(poly)
        rectangle = geometry.rectangle_from_parallelogram(parallelogram)
        rectangle, angle = geometry.sort_rectangle(rectangle)
        for y, x in np.argwhere(text_number == number):
            pixel = np.array([x, y], np.float32)
            for side in range(4):  # top, right, bottom, left
                start, end = rectangle[side], rectangle[(side + 1) % 4]
                geo_map[y, x, side] = distance_to_line(pixel, start, end)
            geo_map[y, x, 4] = angle
    return score_map, geo_map, training_mask


def distance_to_line(point, start, end):
    """Distance of a point [2] from the line through start [2] and end [2].

    The area of the parallelogram that they span, over the length of its base; per pixel and edge
    one `cross` and two `norm` of NumPy, as many as a profile of the original shows.
    """
    return np.linalg.norm(np.cross(end - start, start - point)) / np.linalg.norm(end - start)
