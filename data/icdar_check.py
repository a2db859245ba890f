"""The check of a folder before a training: `python -m data.icdar --training_data_path=...`.

It lists all problems at once, and draws training samples with their label maps.
"""

import argparse
import os
import sys

import cv2
import numpy as np

from data import icdar
from data.icdar_files import problems_summary, scan
from utils.geometry import restore_rectangle

_GREEN, _RED, _BLUE = (0, 255, 0), (0, 0, 255), (255, 128, 0)  # blue first, as OpenCV has it


def main(argv=None):
    """Lists all problems of a folder and writes a picture of some samples.

    Returns:
      Exit code: 0 where the folder can be trained on, else 1.
    """
    parser = argparse.ArgumentParser(
        prog="python -m data.icdar",
        description="Checks a folder of images and annotations before a training.",
    )
    parser.add_argument("--training_data_path", required=True, help="folder of the images")
    parser.add_argument(
        "--picture",
        default="icdar_check.png",
        help="file to draw samples with their label maps into; empty: none",
    )
    parser.add_argument("--num_samples", type=int, default=4, help="number of samples drawn")
    parser.add_argument("--input_size", type=int, default=512, help="side of a sample in pixels")
    parser.add_argument("--seed", type=int, default=0, help="of the random crops")
    parser.add_argument(
        "--max_listed", type=int, default=1000, help="problems with a line of their own"
    )
    args = parser.parse_args(argv)
    try:
        found = scan(args.training_data_path, check_images=True, strict=False, report=_say_nothing)
    except FileNotFoundError as error:
        print(error, file=sys.stderr)
        return 1
    if found.problems:
        print(problems_summary(found.problems, args.max_listed))
    print(found.summary())
    verdict = found.verdict()
    if verdict is not None:
        print(verdict, file=sys.stderr)
        return 1
    if not args.picture:
        return 0
    images = [image for image, _ in found.samples]
    try:
        batch = next(
            icdar.IcdarGenerator(
                args.training_data_path,
                image_list=images,
                input_size=args.input_size,
                batch_size=min(args.num_samples, len(images)),
                background_ratio=0 if found.num_words + found.num_dont_care else 1,
                seed=args.seed,
            )
        )
        _write_picture(args.picture, draw_samples(batch))
    except (ValueError, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    print(
        f"{len(batch[0])} samples with score map, distance to the top edge and training mask are "
        f"drawn in {os.path.abspath(args.picture)}"
    )
    return 0


def _say_nothing(file, line, reason):
    """For `scan`: its problems are printed together."""


def _write_picture(path, picture):
    os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
    try:
        written = cv2.imwrite(path, picture)
    except cv2.error as error:
        raise ValueError(f"{path} names no kind of picture; pass --picture=FILE.png") from error
    if not written:
        raise OSError(f"the picture could not be written to {path}; pass another --picture")


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
