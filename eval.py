"""Finds text in pictures with a trained EAST, and scores the result.

    python eval.py --test_data_path=/tmp/images/ --gpu_list=0 \\
        --checkpoint_path=/tmp/east_icdar2015_resnet_v1_50_rbox/ --output_dir=/tmp/results/ \\
        --gt_path=/tmp/ground_truth/

For every NAME.jpg a NAME.txt is written, one box a line (x1,y1,...,x4,y4 in pixels), and the
picture with the boxes drawn. With --gt_path the ICDAR 2015 score is printed and written to
icdar_score.json; with --results_path as well, existing result files are scored without a network.
"""

import collections
import json
import os
import sys
import time

import cv2
import numpy as np
import tensorflow.compat.v1 as tf
from absl import app, flags, logging
from tqdm import tqdm

from data import icdar_files, icdar_formats, icdar_results
from nets import east
from utils import metrics, nms
from utils.geometry import restore_rectangle
from utils.towers import checkpoints, devices

FLAGS = flags.FLAGS
MAX_CANDIDATES = 15000  # pixels that go into the NMS
MIN_EDGE = 5  # pixels; boxes with a shorter edge are not written
SCORE_FILE = "icdar_score.json"


def define_flags():
    """Defines the original's flags, and below them ours."""
    flags.DEFINE_string(
        "test_data_path",
        "/tmp/ch4_test_images/images/",
        "folder of pictures, searched with all folders in it",
    )
    flags.DEFINE_string("gpu_list", "0", "GPU to run on; of several the first is used")
    flags.DEFINE_string(
        "checkpoint_path", "/tmp/east_icdar2015_resnet_v1_50_rbox/", "folder, or one checkpoint"
    )
    flags.DEFINE_string(
        "output_dir", "/tmp/ch4_test_images/images/", "folder for result files and drawn pictures"
    )
    flags.DEFINE_boolean("no_write_images", False, "do not write pictures with the boxes drawn")
    flags.DEFINE_integer("text_scale", 512, "as in training, pixels", lower_bound=1)

    # ------------------------------- not in the original -------------------------------
    flags.DEFINE_string("gt_path", None, "folder or .zip of ground truths; prints the ICDAR score")
    flags.DEFINE_string(
        "results_path", None, "folder or .zip of result files to score instead of running a network"
    )
    flags.DEFINE_integer(
        "max_side_len", 2400, "larger pictures are scaled to this longer side, pixels", 32
    )
    flags.DEFINE_float("score_map_thresh", 0.8, "least score of a text pixel", 0.0, 1.0)
    flags.DEFINE_float("box_thresh", 0.1, "least mean score inside a box", 0.0, 1.0)
    flags.DEFINE_float("nms_thres", 0.2, "boxes with a larger IoU are one", 0.0, 1.0)
    flags.DEFINE_integer(
        "max_candidates", MAX_CANDIDATES, "most text pixels per picture, the best ones", 1
    )
    flags.DEFINE_boolean(
        "use_moving_averages", True, "restore the averaged weights; False: the weights themselves"
    )


def get_images(test_data_path, *, leave_out=()):
    """Finds the pictures in a folder and in all folders inside it.

    Args:
        test_data_path: folder. Drawn pictures of earlier runs, in `with_boxes/`, are left out.
        leave_out: other folders inside it that are not searched.

    Returns:
        Sorted list of paths.

    Raises:
        FileNotFoundError: the folder does not exist or has no picture.
        ValueError: two pictures have the same name, so that their result files would, too.
    """
    leave_out = {os.path.realpath(folder) for folder in leave_out}
    by_name = collections.defaultdict(list)
    for folder, subfolders, names in os.walk(test_data_path):
        subfolders[:] = [
            s
            for s in subfolders
            if s != icdar_results.DRAWN_FOLDER
            and os.path.realpath(os.path.join(folder, s)) not in leave_out
        ]
        for name in names:
            stem, extension = os.path.splitext(name)
            if extension[1:].lower() in icdar_files.IMAGE_EXTENSIONS and not name.startswith("."):
                by_name[stem].append(os.path.join(folder, name))
    shown = os.path.abspath(test_data_path)
    if not by_name:
        what = "has no pictures" if os.path.isdir(shown) else "is not a folder"
        extensions = ", ".join("." + e for e in icdar_files.IMAGE_EXTENSIONS)
        raise FileNotFoundError(
            f"--test_data_path={shown} {what}; pass a folder with {extensions} files"
        )
    for stem, paths in by_name.items():
        if len(paths) > 1:
            raise ValueError(
                f"{paths[0]} and {paths[1]} would both get the result file {stem}.txt; rename one"
                " of them or evaluate their folders one after the other"
            )
    images = sorted(paths[0] for paths in by_name.values())
    print(f"Find {len(images)} images")
    return images


def resize_image(im, max_side_len=2400):
    """Scales a picture to sides that are multiples of 32 pixels, as the network needs them.

    As in the original a side that is no multiple loses 32 to 63 pixels, but never ends below 32.

    Args:
        im: [height, width, 3].
        max_side_len: the longer side is at most this, in pixels.

    Returns:
        (picture, (ratio_h, ratio_w)), the ratios being new side over old side.
    """
    height, width = im.shape[:2]
    longer = max(height, width)
    ratio = max_side_len / float(longer) if longer > max_side_len else 1.0
    resize_h, resize_w = (_network_side(int(side * ratio)) for side in (height, width))
    im = cv2.resize(im, (resize_w, resize_h))
    return im, (resize_h / float(height), resize_w / float(width))


def _network_side(side):
    return max(32, side if side % 32 == 0 else (side // 32 - 1) * 32)


def detect(
    score_map,
    geo_map,
    timer,
    score_map_thresh=0.8,
    box_thresh=0.1,
    nms_thres=0.2,
    *,
    max_candidates=MAX_CANDIDATES,
    scores_in_raster_order=False,
    report=print,
):
    """Turns the network's maps into boxes.

    Args:
        score_map: [1, h, w, 1] or [h, w] float32, probability of text per map pixel.
        geo_map: [1, h, w, 5] or [h, w, 5] float32, distances in picture pixels and angle.
        timer: dict; 'restore' and 'nms' are set to seconds.
        score_map_thresh: a pixel with a higher score gives a box.
        box_thresh: boxes in which the mean score is not higher are dropped.
        nms_thres: boxes with a larger IoU are one.
        max_candidates: of more pixels than this the ones with the best scores go into the NMS; the
            original has no limit.
        scores_in_raster_order: the original merges first the boxes with angles >= 0 and then the
            others, but leaves the scores in the order of the pixels, so that a box may be weighted
            with the score of another. True does so, too; False gives every box its own score.
        report: called with a progress line.

    Returns:
        (boxes, timer): boxes [n, 9] float32, four corners (x, y) in pixels of the resized picture
        and the mean score inside the box; None where no pixel is above the threshold.
    """
    if score_map.ndim == 4:
        score_map = score_map[0, :, :, 0]
        geo_map = geo_map[0]
    xy_text = np.argwhere(score_map > score_map_thresh)  # [n, 2] (y, x), row by row
    start = time.time()
    xy_text = _best_candidates(xy_text, score_map, max_candidates)
    scores = score_map[xy_text[:, 0], xy_text[:, 1]]
    geometry = geo_map[xy_text[:, 0], xy_text[:, 1]]
    quads = restore_rectangle(xy_text[:, ::-1] * 4, geometry)
    if not scores_in_raster_order:
        scores = scores[np.argsort(geometry[:, 4] < 0, kind="stable")]
    report(f"{len(quads)} text boxes before nms")
    boxes = np.concatenate([quads.reshape(-1, 8), scores[:, None]], axis=1).astype(np.float32)
    timer["restore"] = time.time() - start

    start = time.time()
    boxes = nms.merge_quadrangle_n9(boxes, nms_thres)
    timer["nms"] = time.time() - start
    if len(boxes) == 0:
        return None, timer
    # The paper has no such filter; it is the original's.
    boxes[:, 8] = [_mean_score(score_map, box[:8].reshape(4, 2)) for box in boxes]
    return boxes[boxes[:, 8] > box_thresh], timer


def _best_candidates(xy_text, score_map, max_candidates):
    """The `max_candidates` pixels with the best scores, still row by row."""
    if len(xy_text) <= max_candidates:
        return xy_text
    logging.warning(
        "%d text pixels are more than max_candidates; only the %d with the best scores are used."
        " So many are found by a network that is hardly trained, or in a very large picture",
        len(xy_text),
        max_candidates,
    )
    scores = score_map[xy_text[:, 0], xy_text[:, 1]]
    best = np.argsort(-scores, kind="stable")[:max_candidates]
    return xy_text[np.sort(best)]


def _mean_score(score_map, quad):
    """Mean of the score map inside a box, which is given in picture pixels."""
    corners = quad.astype(np.int32) // 4
    left, top = np.maximum(corners.min(axis=0), 0)
    right, bottom = np.minimum(corners.max(axis=0) + 1, score_map.shape[::-1])
    if left >= right or top >= bottom:
        return 0.0
    mask = np.zeros((bottom - top, right - left), np.uint8)
    cv2.fillPoly(mask, [corners - np.array([left, top], np.int32)], 1)
    return cv2.mean(score_map[top:bottom, left:right], mask)[0]


def sort_poly(p):
    """Puts the corners of a box into the order of the result files: upper left first, clockwise.

    Args:
        p: [4, 2], corners (x, y) in order around the box.

    Returns:
        [4, 2], beginning at the corner with the least x + y, then the one along the long edge.
    """
    p = np.roll(p, -int(np.argmin(np.sum(p, axis=1))), axis=0)
    if abs(p[0, 0] - p[1, 0]) > abs(p[0, 1] - p[1, 1]):
        return p
    return p[[0, 3, 2, 1]]


def boxes_in_picture(boxes, ratio_h, ratio_w):
    """Boxes as they are written: in pixels of the picture, without the small ones.

    Args:
        boxes: [n, 9] float32 of `detect`, or None.
        ratio_h, ratio_w: of `resize_image`.

    Returns:
        [m, 4, 2] int32, corners in the order of `sort_poly`.
    """
    if boxes is None:
        return np.zeros((0, 4, 2), np.int32)
    quads = boxes[:, :8].reshape(-1, 4, 2) / np.array([ratio_w, ratio_h], np.float32)
    quads = np.array([sort_poly(quad) for quad in quads.astype(np.int32)], np.int32)
    quads = quads.reshape(-1, 4, 2)
    edges = np.linalg.norm(quads[:, [0, 3]] - quads[:, [1, 0]], axis=2)
    return quads[np.all(edges >= MIN_EDGE, axis=1)]


class Detector:
    """A session with the inference graph and the weights of a checkpoint.

    Args:
        checkpoint_path: folder or prefix of a checkpoint.
        gpu_list: the first GPU of this list is used; without GPUs the CPU.
        text_scale: as in training, pixels.
        use_moving_averages: whether to restore the averages of the weights.

    Raises:
        checkpoints.CheckpointError: nothing to restore, in one sentence.
    """

    def __init__(self, checkpoint_path, *, gpu_list="0", text_scale=512, use_moving_averages=True):
        place = devices.resolve_devices(gpu_list)
        checkpoints.candidate_checkpoints(checkpoint_path)  # raises before the graph is built
        with tf.Graph().as_default() as graph, tf.device(place.tower_name(0)):
            self._images = tf.placeholder(tf.float32, [None, None, None, 3], name="input_images")
            self._outputs = east.model(self._images, is_training=False, text_scale=text_scale)
            self._session = tf.Session(graph=graph, config=place.session_config())
            try:
                restored = checkpoints.restore_for_evaluation(
                    self._session, checkpoint_path, use_moving_averages=use_moving_averages
                )
            except BaseException:
                self._session.close()
                raise
            graph.finalize()
        print(f"Restore from {restored.prefix}")

    def __enter__(self):
        return self

    def __exit__(self, *unused):
        self._session.close()

    def maps(self, im):
        """Score and geometry map, [1, h/4, w/4, 1] and [..., 5], of an RGB picture [h, w, 3]."""
        return self._session.run(self._outputs, {self._images: im[None]})


def evaluate_image(detector, im, *, name, max_side_len=2400, report=print, **thresholds):
    """Finds the text of one picture and reports the original's two timing lines.

    Args:
        detector: a Detector.
        im: [height, width, 3] uint8, BGR.
        name: of the picture, for the lines.
        max_side_len: see `resize_image`.
        report: called with each line.
        **thresholds: of `detect`.

    Returns:
        [n, 4, 2] int32, see `boxes_in_picture`.
    """
    start_time = time.time()
    resized, (ratio_h, ratio_w) = resize_image(im[:, :, ::-1], max_side_len)
    timer = {"net": 0.0, "restore": 0.0, "nms": 0.0}
    start = time.time()
    score, geometry = detector.maps(resized)
    timer["net"] = time.time() - start
    boxes, timer = detect(score, geometry, timer, report=report, **thresholds)
    net, restore, nms_time = (timer[part] * 1000 for part in ("net", "restore", "nms"))
    report(f"{name} : net {net:.0f}ms, restore {restore:.0f}ms, nms {nms_time:.0f}ms")
    quads = boxes_in_picture(boxes, ratio_h, ratio_w)
    report(f"[timing] {time.time() - start_time}")
    return quads


def print_score(score, output_dir):
    """Prints an ICDAR score with what is missing, and writes it to SCORE_FILE.

    Args:
        score: of `metrics.detection_score`.
        output_dir: folder.
    """
    for key, what in (
        ("without_detections", "ground truth without a result, counted as nothing found"),
        ("without_ground_truth", "result without a ground truth, not counted"),
    ):
        for name in score[key]:
            print(f"unmatched: {name}: {what}")
    print(
        "ICDAR 2015 detection score: precision {precision:.4f}, recall {recall:.4f},"
        " hmean {hmean:.4f} ({num_images} images, {detMatched} matches, {gtCare} ground truths,"
        " {detCare} detections)".format(**score)
    )
    images = {
        name: {key: value for key, value in result.items() if key != "iouMat"}
        for name, result in score["images"].items()
    }
    os.makedirs(output_dir, exist_ok=True)
    path = os.path.join(output_dir, SCORE_FILE)
    with open(path, "w", encoding="utf-8") as stream:
        json.dump(
            {**score, "iou_threshold": metrics.IOU_THRESHOLD, "images": images}, stream, indent=1
        )
    print(f"written to {path}")


def evaluate_folder(images, detector, files, *, write_images=True, **options):
    """Evaluates pictures and writes their files; unreadable ones are named and skipped.

    Args:
        images: paths of the pictures.
        detector: a Detector.
        files: an icdar_results.OutputFiles.
        write_images: whether to write pictures with the boxes drawn.
        **options: of `evaluate_image`.

    Returns:
        {path: boxes [n, 4, 2] int32} of the pictures that could be read.

    Raises:
        ValueError: none could be read.
    """
    found = {}
    files.make_folders(write_images)
    with tqdm(images, unit="image", disable=not sys.stderr.isatty()) as progress:

        def report(line):
            progress.write(line)
            sys.stdout.flush()

        for image in progress:
            try:
                im = icdar_formats.read_image(image)
            except icdar_formats.ImageError as error:
                report(f"skipped: {error}")
                continue
            found[image] = evaluate_image(detector, im, name=image, report=report, **options)
            icdar_results.write_boxes(files.result(image), found[image])
            if write_images:
                icdar_results.write_drawn(files.drawn(image), im, found[image])
    if len(found) < len(images):
        print(f"{len(images) - len(found)} of {len(images)} images could not be read")
    if not found:
        raise ValueError(f"none of the {len(images)} images could be read; pass sound ones")
    return found


def run():
    """Evaluates or scores as the flags say."""
    for name in ("test_data_path", "output_dir", "gt_path", "results_path"):
        if FLAGS[name].value is not None:
            FLAGS[name].value = os.path.expanduser(FLAGS[name].value)
    if FLAGS.results_path is not None:
        if FLAGS.gt_path is None:
            raise ValueError("--results_path needs ground truths to score it; pass --gt_path too")
        results = icdar_results.load_boxes(FLAGS.results_path)
        detections = {name: polys for name, (polys, _) in results.items()}
        ground_truths = icdar_results.load_boxes(FLAGS.gt_path)
        print_score(metrics.detection_score(ground_truths, detections), FLAGS.output_dir)
        return

    leave_out = []
    if os.path.realpath(FLAGS.output_dir) != os.path.realpath(FLAGS.test_data_path):
        leave_out.append(FLAGS.output_dir)
    images = get_images(FLAGS.test_data_path, leave_out=leave_out)
    ground_truths = icdar_results.load_boxes(FLAGS.gt_path) if FLAGS.gt_path else None
    files = icdar_results.OutputFiles(
        FLAGS.output_dir, images, FLAGS.gt_path, searched=FLAGS.test_data_path
    )
    with Detector(
        FLAGS.checkpoint_path,
        gpu_list=FLAGS.gpu_list,
        text_scale=FLAGS.text_scale,
        use_moving_averages=FLAGS.use_moving_averages,
    ) as detector:
        found = evaluate_folder(
            images,
            detector,
            files,
            write_images=not FLAGS.no_write_images,
            max_side_len=FLAGS.max_side_len,
            score_map_thresh=FLAGS.score_map_thresh,
            box_thresh=FLAGS.box_thresh,
            nms_thres=FLAGS.nms_thres,
            max_candidates=FLAGS.max_candidates,
        )
    if ground_truths is not None:
        detections = {
            name: found[path] for name, path in icdar_results.by_image_name(found).items()
        }
        print_score(metrics.detection_score(ground_truths, detections), FLAGS.output_dir)


def main(argv):
    if len(argv) > 1:
        raise app.UsageError(f"unexpected argument {argv[1]}; every flag starts with --")
    try:
        run()
    except KeyboardInterrupt:
        print("stopped; pictures without a result file were not evaluated", file=sys.stderr)
        sys.exit(130)
    except (ValueError, OSError) as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    define_flags()
    app.run(main)
