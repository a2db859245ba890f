"""Scores of predictions: text detection (ICDAR 2015, incidental scene text).

The arithmetic is that of the competition's script, so that numbers can be compared with published
ones: corners truncated to integers; IoU of polygons, strictly above 0.5; a detection of which more
than half lies in one don't-care region is left out; detections are given to ground truths greedily
in the order of the files, one to one. Corners may run either way round and may be negative or
outside the image, where the script refuses the file.
"""

import numpy as np

from utils.quads import intersection_areas

IOU_THRESHOLD = 0.5
AREA_PRECISION_THRESHOLD = 0.5


def detection_score_of_image(
    gt_polys,
    gt_ignore,
    polys,
    iou_threshold=IOU_THRESHOLD,
    area_precision_threshold=AREA_PRECISION_THRESHOLD,
):
    """Text-detection score of one image.

    Args:
        gt_polys: [g, 4, 2], corners (x, y) of the ground truths in pixels.
        gt_ignore: [g] bool, True for don't care.
        polys: [d, 4, 2], corners of the detections.
        iou_threshold: a match has a larger IoU than this.
        area_precision_threshold: a detection is don't care if a larger part of its area than this
            lies in one don't-care ground truth.

    Returns:
        dict with the competition's names: precision, recall, hmean; pairs (list of
        {'gt': row, 'det': row}); iouMat [g, d] float64; gtDontCare, detDontCare (lists of rows);
        gtCare, detCare, detMatched (counts). Without ground truths that count, recall is 1 and
        precision 1 or, if there are detections that count, 0; without detections precision is 0.

    Raises:
        ValueError: an array of another shape.
    """
    gts = _integer_quads("gt_polys", gt_polys)
    dets = _integer_quads("polys", polys)
    ignore = np.asarray(gt_ignore, bool).reshape(-1)
    if len(ignore) != len(gts):
        raise ValueError(
            f"gt_ignore has {len(ignore)} entries, but one per ground truth is required;"
            f" pass {len(gts)}"
        )
    common = intersection_areas(
        np.repeat(gts, len(dets), axis=0), np.tile(dets, (len(gts), 1))
    ).reshape(len(gts), len(dets))
    gt_areas, det_areas = _shoelace_areas(gts), _shoelace_areas(dets)
    iou = _ratio(common, gt_areas[:, None] + det_areas - common)
    det_ignore = np.any(_ratio(common[ignore], det_areas[None]) > area_precision_threshold, axis=0)

    pairs = []
    free = ~det_ignore
    for gt in np.flatnonzero(~ignore):
        matches = np.flatnonzero(free & (iou[gt] > iou_threshold))
        if len(matches):
            free[matches[0]] = False
            pairs.append({"gt": int(gt), "det": int(matches[0])})

    gt_care = int(np.count_nonzero(~ignore))
    det_care = int(np.count_nonzero(~det_ignore))
    if gt_care == 0:
        recall, precision = 1.0, float(det_care == 0)
    else:
        recall = len(pairs) / gt_care
        precision = len(pairs) / det_care if det_care else 0.0
    return {
        "precision": precision,
        "recall": recall,
        "hmean": _harmonic_mean(precision, recall),
        "pairs": pairs,
        "iouMat": iou,
        "gtDontCare": np.flatnonzero(ignore).tolist(),
        "detDontCare": np.flatnonzero(det_ignore).tolist(),
        "gtCare": gt_care,
        "detCare": det_care,
        "detMatched": len(pairs),
    }


def combine_detection_scores(images):
    """Score over all images: matches, ground truths and detections are summed, then divided.

    Args:
        images: iterable of results of `detection_score_of_image`.

    Returns:
        dict: precision, recall, hmean (0 where there is nothing to divide by), gtCare, detCare,
        detMatched, num_images.
    """
    images = list(images)
    gt_care, det_care, matched = (
        sum(image[key] for image in images) for key in ("gtCare", "detCare", "detMatched")
    )
    precision = matched / det_care if det_care else 0.0
    recall = matched / gt_care if gt_care else 0.0
    return {
        "precision": precision,
        "recall": recall,
        "hmean": _harmonic_mean(precision, recall),
        "gtCare": gt_care,
        "detCare": det_care,
        "detMatched": matched,
        "num_images": len(images),
    }


def detection_score(ground_truths, detections, **thresholds):
    """Text-detection score of a set of images.

    A ground truth without detections counts as an image in which nothing was found; detections
    without a ground truth are listed and not counted.

    Args:
        ground_truths: {name: (polys [g, 4, 2], ignore [g] bool)}.
        detections: {name: polys [d, 4, 2]}.
        **thresholds: as in `detection_score_of_image`.

    Returns:
        dict: that of `combine_detection_scores`, and images ({name: its result}),
        without_detections and without_ground_truth (sorted lists of names).

    Raises:
        ValueError: no name is in both.
    """
    if not ground_truths.keys() & detections.keys():
        raise ValueError(
            f"none of the {len(detections)} results (for instance {_example(detections)}) has a"
            f" ground truth of the same name (for instance {_example(ground_truths)}); pass the"
            " results and ground truths of the same images"
        )
    nothing = np.zeros((0, 4, 2))
    images = {
        name: detection_score_of_image(polys, ignore, detections.get(name, nothing), **thresholds)
        for name, (polys, ignore) in ground_truths.items()
    }
    return {
        **combine_detection_scores(images.values()),
        "images": images,
        "without_detections": sorted(ground_truths.keys() - detections.keys()),
        "without_ground_truth": sorted(detections.keys() - ground_truths.keys()),
    }


def _integer_quads(name, polys):
    polys = np.asarray(polys, np.float64)
    if polys.size and (polys.ndim != 3 or polys.shape[1:] != (4, 2)):
        raise ValueError(
            f"{name} has shape {list(polys.shape)}, but [n, 4, 2] is required; pass four corners"
            " (x, y) per box"
        )
    return np.trunc(polys).reshape(-1, 8)


def _shoelace_areas(quads):
    """Areas as the script has them: the two triangles of a bow-tie cancel."""
    x, y = quads[:, 0::2], quads[:, 1::2]
    return 0.5 * np.abs(np.sum(x * np.roll(y, -1, axis=1) - np.roll(x, -1, axis=1) * y, axis=1))


def _ratio(numerator, denominator):
    """Quotient, 0 where the denominator is 0."""
    denominator = np.broadcast_to(denominator, numerator.shape)
    return np.divide(numerator, denominator, out=np.zeros_like(numerator), where=denominator != 0)


def _harmonic_mean(precision, recall):
    return 2.0 * precision * recall / (precision + recall) if precision + recall else 0.0


def _example(names):
    return sorted(names)[0] if names else "none"
