"""A picture of training samples with their label maps drawn, to look at before a training."""

import cv2
import numpy as np

from utils.geometry import restore_rectangle

_GREEN, _RED, _BLUE = (0, 255, 0), (0, 0, 255), (255, 128, 0)  # blue first, as OpenCV has it


def draw_samples(batch):
    """Draws a batch, one row a sample: image with rectangles, score, distance to top, mask.

    The rectangles are restored from a few text pixels of the geometry map, so they lie around
    the words only if the labels are right. What is masked in training is tinted red.

    Args:
      batch: as `data.icdar.IcdarGenerator` returns it.

    Returns:
      [rows, columns, 3] uint8, blue first.
    """
    images, _, score_maps, geo_maps, training_masks = batch
    rows = [
        _draw_sample(np.asarray(image, np.uint8), score[:, :, 0] > 0, geo, mask[:, :, 0] > 0)
        for image, score, geo, mask in zip(images, score_maps, geo_maps, training_masks)
    ]
    return np.concatenate(rows)


def _draw_sample(image, text, geo_map, used):
    side = image.shape[0]
    picture = cv2.cvtColor(image, cv2.COLOR_RGB2BGR)
    masked = ~_enlarge(used, side)
    picture[masked] = picture[masked] // 2 + np.uint8(_RED) // 2
    for corners in _rectangles(text, geo_map, side // text.shape[0]):
        cv2.polylines(picture, [corners], True, _GREEN, 2)
        cv2.circle(picture, corners[0], 4, _BLUE, -1)
    top = geo_map[:, :, 0] / max(geo_map[:, :, 0].max(), 1)
    panels = [_enlarge(panel, side) for panel in (text * 255, top * 255, used * 255)]
    gray = [cv2.cvtColor(panel.astype(np.uint8), cv2.COLOR_GRAY2BGR) for panel in panels]
    return np.concatenate([picture] + gray, axis=1)


def _rectangles(text, geo_map, stride):
    """The rectangle of the middle pixel of every connected piece of text: [N, 4, 2] int32."""
    number, pieces = cv2.connectedComponents(text.astype(np.uint8))
    middles = []
    for piece in range(1, number):
        y, x = np.nonzero(pieces == piece)
        middles.append((y[len(y) // 2], x[len(x) // 2]))
    y, x = np.array(middles, np.int64).reshape(-1, 2).T
    corners = restore_rectangle(np.stack([x, y], axis=1) * stride, geo_map[y, x])
    return np.round(corners).astype(np.int32)


def _enlarge(panel, side):
    panel = np.asarray(panel)
    size = (side, side)
    enlarged = cv2.resize(panel.astype(np.float32), size, interpolation=cv2.INTER_NEAREST)
    return enlarged.astype(panel.dtype)
