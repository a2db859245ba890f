"""EAST's label maps: which pixels are text, and where the rectangle around them is.

After `generate_rbox` of EAST's `icdar.py`, whose maps these are; it goes through the pixels of a
text one by one, here all pixels of all texts are one array operation.
"""

import cv2
import numpy as np

from utils import geometry


def generate_rbox(im_size, polys, tags, min_text_size=10, stride=1):
    """Score map, geometry map and training mask of one image (arXiv 1704.03155, section 3.3).

    Pixels of the shrunk quadrilaterals are text; where two overlap, the later one counts. A
    quadrilateral without a rectangle around it (two corners in one place, crossing edges that
    leave no area) is taken out of the training like a don't-care region and is no text.

    Args:
      im_size: (height, width) of the image in pixels.
      polys: [N, 4, 2] float32, clockwise corners (x, y) in pixels, any first corner.
      tags: [N] bool, True for don't-care regions, which are text but masked.
      min_text_size: quadrilaterals with a side shorter than this many pixels are masked.
      stride: of the maps; 4 gives what the network is trained on, `maps[::4, ::4]`.

    Returns:
      (score_map, geo_map, training_mask) with height and width divided by stride, rounded up:
      score_map [height, width] uint8, 1 for text;
      geo_map [height, width, 5] float32, for text the distances in pixels to the top, right,
      bottom and left edge of its rectangle and the angle in radians;
      training_mask [height, width] uint8, 0 where the loss does not count.
    """
    height, width = im_size
    text_index = np.zeros((height, width), np.int32)  # 1 + the number of the text at a pixel
    training_mask = np.ones((height, width), np.uint8)
    polys, tags = _finite(polys, tags)
    if len(polys):
        polys = geometry.roll_corners(polys, geometry.start_corner(polys))
        lengths = geometry.edge_lengths(polys)
        shrunk = geometry.shrink_poly(polys, geometry.shortest_edges(polys)).astype(np.int32)
        parallelograms = geometry.min_area_parallelogram(polys)
        rectangles = geometry.rectangle_from_parallelogram(parallelograms)
        rectangles, angles = geometry.sort_rectangle(rectangles)
        edges = geometry.edge_lengths(rectangles)  # NaN or infinite where a corner is
        fits = ((edges > 0) & np.isfinite(edges)).all(axis=1) & np.isfinite(angles)
        masked = (lengths.min(axis=1) < min_text_size) | tags | ~fits
        for index in np.flatnonzero(fits):
            cv2.fillPoly(text_index, shrunk[index : index + 1], int(index) + 1)
        for corners in polys[masked].astype(np.int32):
            cv2.fillPoly(training_mask, corners[None], 0)
    text_index = text_index[::stride, ::stride]
    geo_map = np.zeros(text_index.shape + (5,), np.float32)
    if len(polys):
        _fill_geo_map(geo_map, text_index, rectangles, angles, stride)
    score_map = (text_index > 0).view(np.uint8)
    return score_map, geo_map, np.ascontiguousarray(training_mask[::stride, ::stride])


def _finite(polys, tags):
    polys = np.asarray(polys, np.float32).reshape(-1, 4, 2)
    tags = np.asarray(tags, bool).reshape(-1)
    keep = np.isfinite(polys).all(axis=(1, 2))
    return polys[keep], tags[keep]


def _fill_geo_map(geo_map, text_index, rectangles, angles, stride):
    """Writes the distances and the angle of every text pixel into geo_map [height, width, 5].

    The distance of a pixel from an edge is |edge x (corner - pixel)| / |edge|. Of this cross
    product one term depends on the row alone and one on the column alone, so both are made for
    each text's rows and columns and looked up for its pixels.
    """
    height, width = text_index.shape
    pixels = np.flatnonzero(text_index)
    text = text_index.reshape(-1)[pixels] - 1
    y, x = np.divmod(pixels, width)
    corners = rectangles[:, None]  # [N, 1, 4, 2]
    edges = rectangles[:, [1, 2, 3, 0]] - rectangles
    rows = np.arange(0, height * stride, stride, dtype=np.float32)[:, None]
    columns = np.arange(0, width * stride, stride, dtype=np.float32)[:, None]
    by_row = edges[:, None, :, 0] * (corners[..., 1] - rows)  # [N, height, 4]
    by_column = edges[:, None, :, 1] * (corners[..., 0] - columns)  # [N, width, 4]
    distances = by_row.reshape(-1, 4).take(text * height + y, axis=0)
    distances -= by_column.reshape(-1, 4).take(text * width + x, axis=0)
    np.abs(distances, out=distances)
    distances /= geometry.edge_lengths(rectangles).take(text, axis=0)
    flat = geo_map.reshape(-1, 5)
    flat[pixels, :4] = distances
    flat[pixels, 4] = angles.astype(np.float32).take(text)
