"""The pixels and quadrilaterals of a training crop of EAST: validation, random crop, resizing.

After `check_and_validate_polys`, `crop_area` and the generator of EAST's `icdar.py`, with the same
arrays and the same random draws.
"""

import math

import cv2
import numpy as np

from utils.geometry import polygon_area


def check_and_validate_polys(polys, tags, im_size):
    """Clips quadrilaterals to the image, makes all clockwise and drops those without area.

    Args:
      polys: [N, 4, 2] float32, corners (x, y) in pixels; clipped in place, as in the original.
      tags: [N] bool.
      im_size: (height, width) in pixels.

    Returns:
      (polys, tags) of the M <= N quadrilaterals of at least one square pixel, in the given order:
      [M, 4, 2] float32, each with the first corner it had, and [M] bool.
    """
    polys, tags, _ = validate_polys(polys, tags, im_size)
    return polys, tags


def crop_area(
    im,
    polys,
    tags,
    crop_background=False,
    max_tries=50,
    *,
    min_crop_side_ratio=0.1,
    rng=None,
):
    """Cuts a random rectangle out of an image whose borders cross no text.

    Args:
      im: [height, width, channels].
      polys: [N, 4, 2] float32, corners (x, y) in pixels.
      tags: [N] bool.
      crop_background: True for a rectangle that may hold no text: the first one large enough is
        taken, with or without text. False: only one with text.
      max_tries: number of rectangles drawn before the whole image is returned.
      min_crop_side_ratio: shortest side, as a part of the image's.
      rng: numpy.random.RandomState; None: NumPy's global one.

    Returns:
      (im, polys, tags): a view of the image, and its quadrilaterals relative to it.
    """
    (top, bottom, left, right), polys, tags = choose_crop(
        im.shape[:2],
        polys,
        tags,
        crop_background,
        max_tries,
        min_crop_side_ratio,
        random_state(rng),
    )
    return im[top:bottom, left:right], polys, tags


def random_state(rng):
    return np.random.mtrand._rand if rng is None else rng


def validate_polys(polys, tags, im_size):
    """As `check_and_validate_polys`; also returns how many were anticlockwise."""
    height, width = im_size
    polys, tags = np.asarray(polys).reshape(-1, 4, 2), np.asarray(tags, bool)
    np.clip(polys[:, :, 0], 0, width - 1, out=polys[:, :, 0])
    np.clip(polys[:, :, 1], 0, height - 1, out=polys[:, :, 1])
    area = polygon_area(polys)
    keep = np.abs(area) >= 1
    turned = (area > 0) & keep
    valid = np.where(turned[:, None, None], polys[:, [0, 3, 2, 1]], polys)[keep]
    return valid, tags[keep], int(turned.sum())


def choose_crop(size, polys, tags, crop_background, max_tries, min_crop_side_ratio, rng):
    """`crop_area` without the pixels.

    Returns:
      ((top, bottom, left, right), polys, tags): pixels, bottom and right exclusive.
    """
    height, width = size
    whole = (0, height, 0, width), polys, tags
    pad_x, pad_y = width // 10, height // 10
    rows = _free(polys[:, :, 1], height, pad_y)
    columns = _free(polys[:, :, 0], width, pad_x)
    if not len(rows) or not len(columns):
        return whole
    low, high = polys.min(axis=1), polys.max(axis=1)  # [N, 2]
    for _ in range(max_tries):
        # randint draws what the original's numpy.random.choice does.
        x = columns[rng.randint(0, len(columns), size=2)] - pad_x
        y = rows[rng.randint(0, len(rows), size=2)] - pad_y
        left, right = (min(max(side, 0), width - 1) for side in sorted(x.tolist()))
        top, bottom = (min(max(side, 0), height - 1) for side in sorted(y.tolist()))
        if (
            right - left < min_crop_side_ratio * width
            or bottom - top < min_crop_side_ratio * height
        ):
            continue
        inside = ((low >= (left, top)) & (high <= (right, bottom))).all(axis=1)
        if inside.any():
            polys = polys[inside] - np.array((left, top), polys.dtype)
        elif crop_background:
            polys = polys[inside]
        else:
            continue
        return (top, bottom + 1, left, right + 1), polys, tags[inside]
    return whole


def _free(coordinates, length, pad):
    """Positions on one axis, shifted by `pad`, that no text covers.

    Args:
      coordinates: [N, 4] of the corners along the axis.
      length: of the image along the axis.
      pad: number of positions before and after the image; they make its borders likelier.
    """
    covered = np.zeros(length + 2 * pad, bool)
    corners = np.round(coordinates).astype(np.int32) + pad
    for start, stop in zip(corners.min(axis=1).tolist(), corners.max(axis=1).tolist()):
        covered[start:stop] = True
    return np.flatnonzero(~covered)


def scaled_crop(image, scale, box, input_size):
    """A crop of the scaled image, padded with black to a square and resized to input_size.

    Equal to the last bit to scaling the whole image, cutting, padding and resizing, as the
    original does, but only what is looked at is computed: OpenCV interpolates a pixel from its
    neighbours, so that a part of the image scaled by a whole number is a part of the scaled image,
    and of the black square a rim that the last resizing can see is enough.

    Args:
      image: [height, width, 3] uint8.
      scale: factor.
      box: (top, bottom, left, right) in the scaled image.
      input_size: side of the result.

    Returns:
      [input_size, input_size, 3] uint8.
    """
    top, bottom, left, right = box
    height, width = bottom - top, right - left
    side = max(height, width, input_size)
    rim = math.ceil(side / input_size) + 2
    padded_height, padded_width = min(side, height + rim), min(side, width + rim)
    whole = round(scale)
    if whole == scale and whole > 1:
        # Two pixels more on each side than the interpolation looks at.
        first_row, first_column = max(0, top // whole - 2), max(0, left // whole - 2)
        part = image[first_row : (bottom - 1) // whole + 3, first_column : (right - 1) // whole + 3]
        scaled_height, scaled_width = part.shape[0] * whole, part.shape[1] * whole
        canvas = np.empty((scaled_height + rim, scaled_width + rim, 3), np.uint8)
        cv2.resize(part, (scaled_width, scaled_height), dst=canvas[:scaled_height, :scaled_width])
        top, left = top - first_row * whole, left - first_column * whole
        padded = canvas[top : top + padded_height, left : left + padded_width]
        padded[height:] = 0
        padded[:, width:] = 0
    else:
        scaled = image if scale == 1 else cv2.resize(image, None, fx=scale, fy=scale)
        padded = np.zeros((padded_height, padded_width, 3), np.uint8)
        padded[:height, :width] = scaled[top:bottom, left:right]
    factor = input_size / side
    resized = padded if side == input_size else cv2.resize(padded, None, fx=factor, fy=factor)
    result = np.zeros((input_size, input_size, 3), np.uint8)
    resized = resized[:input_size, :input_size]
    result[: resized.shape[0], : resized.shape[1]] = resized
    return result
