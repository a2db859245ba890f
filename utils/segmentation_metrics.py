"""Scores of point-cloud predictions: classes of clouds, parts of shapes, ScanNet scenes.

The arithmetic is that of the evaluation loops of charlesq34/pointnet2, except for classes without
samples: these have no accuracy (NaN here, shown as n/a) and stay out of every mean, where the
originals divide by zero or count them as wrong.
"""

import numpy as np

# Shares of the classes 1 to 20 in ScanNet, by which scannet/train.py weights their accuracies.
SCANNET_CLASS_WEIGHTS = (
    *(0.388, 0.357, 0.038, 0.033, 0.017, 0.02, 0.016, 0.025, 0.002, 0.002),
    *(0.002, 0.007, 0.006, 0.022, 0.004, 0.0004, 0.003, 0.002, 0.024, 0.029),
)


class ClassCounts:
    """Counts samples and right predictions of each class.

    Args:
        num_classes: number of classes.

    Attributes:
        seen: [num_classes] int64, samples of each class.
        correct: [num_classes] int64, those of them that were predicted right.
    """

    def __init__(self, num_classes):
        self.seen = np.zeros(num_classes, np.int64)
        self.correct = np.zeros(num_classes, np.int64)

    def add(self, labels, predictions):
        """Counts a batch.

        Args:
            labels: int array of any shape, 0 to num_classes - 1.
            predictions: int array of the same shape.

        Raises:
            ValueError: the shapes differ, or a label is none of the classes.
        """
        if np.shape(labels) != np.shape(predictions):
            raise ValueError(
                f"labels have the shape {np.shape(labels)} and predictions"
                f" {np.shape(predictions)}; pass one prediction a label"
            )
        labels, predictions = np.ravel(labels), np.ravel(predictions)
        number = len(self.seen)
        if labels.size and not 0 <= labels.min() <= labels.max() < number:
            raise ValueError(
                f"labels are {labels.min()} to {labels.max()}; pass 0 to {number - 1}, as there are"
                f" {number} classes"
            )
        self.seen += np.bincount(labels, minlength=number)
        self.correct += np.bincount(labels[labels == predictions], minlength=number)

    def accuracy(self):
        """Share of all samples that was predicted right; NaN without samples."""
        return _ratio(self.correct.sum(), self.seen.sum()).item()

    def class_accuracies(self):
        """[num_classes] float64, NaN for classes without samples."""
        return _ratio(self.correct, self.seen)

    def average_class_accuracy(self, weights=None):
        """Mean of the accuracies of the classes that have samples; NaN if none has.

        Args:
            weights: [num_classes], of the classes; default equal.
        """
        return _mean_of_present(self.class_accuracies(), weights)


def shown(value):
    """A score as text, with six digits as in the original's log; n/a for NaN."""
    return "n/a" if np.isnan(value) else f"{value:f}"


# --- parts of shapes ------------------------------------------------------------------------------


def predict_parts(logits, category_parts):
    """Best part of each point among those of the shape's category.

    Args:
        logits: [..., num_point, num_parts] scores, summed over votes or not.
        category_parts: list of int, the parts of the category.

    Returns:
        [..., num_point] int64 part numbers.
    """
    parts = np.asarray(category_parts)
    return parts[np.argmax(logits[..., parts], axis=-1)]


def part_iou(labels, predictions, category_parts):
    """Mean IoU of one shape over the parts of its category.

    A part that is neither there nor predicted counts as 1, as in the ShapeNet benchmark.

    Args:
        labels: [num_point] int.
        predictions: [num_point] int.
        category_parts: list of int, the parts of the category.

    Returns:
        float.
    """
    parts = np.asarray(category_parts)[:, None]
    is_part, is_predicted = labels == parts, predictions == parts  # [parts, num_point]
    union = np.count_nonzero(is_part | is_predicted, axis=1)
    common = np.count_nonzero(is_part & is_predicted, axis=1)
    return float(np.mean(np.where(union == 0, 1.0, common / np.maximum(union, 1))))


class PartSegmentationScore:
    """Part-segmentation score of part_seg/evaluate.py.

    Args:
        seg_classes: {category: list of its part numbers}; every part belongs to one category.
    """

    def __init__(self, seg_classes):
        self._seg_classes = seg_classes
        self._category = {
            part: category for category, parts in seg_classes.items() for part in parts
        }
        self._ious = {category: [] for category in seg_classes}
        self._counts = ClassCounts(1 + max(self._category))

    def add(self, labels, logits):
        """Counts a batch of shapes; a shape's category is that of its first point.

        Args:
            labels: [batch, num_point] int part numbers.
            logits: [batch, num_point, num_parts] scores.

        Returns:
            [batch, num_point] int64, the predicted parts.

        Raises:
            ValueError: a label is no part of any category.
        """
        unknown = set(np.unique(labels).tolist()) - self._category.keys()
        if unknown:
            raise ValueError(f"labels have {sorted(unknown)}; pass parts of the categories only")
        predictions = np.empty(np.shape(labels), np.int64)
        for i, (label, logit) in enumerate(zip(labels, logits)):
            category = self._category[int(label[0])]
            parts = self._seg_classes[category]
            predictions[i] = predict_parts(logit, parts)
            self._ious[category].append(part_iou(label, predictions[i], parts))
        self._counts.add(labels, predictions)
        return predictions

    def result(self):
        """dict: accuracy and avg_class_acc of points, category_miou ({category: mean IoU, NaN for
        categories without shapes}), mean_category_miou, mean_instance_miou."""
        category_miou = {
            category: _mean_of_present(np.array(ious, np.float64))
            for category, ious in self._ious.items()
        }
        instances = [iou for ious in self._ious.values() for iou in ious]
        return {
            "accuracy": self._counts.accuracy(),
            "avg_class_acc": self._counts.average_class_accuracy(),
            "category_miou": category_miou,
            "mean_category_miou": _mean_of_present(np.array(list(category_miou.values()))),
            "mean_instance_miou": _mean_of_present(np.array(instances, np.float64)),
        }


# --- scenes ---------------------------------------------------------------------------------------


def surface_voxels(points, labels, res=0.0484):
    """One point of every voxel that has any: the first in the order of the points.

    Args:
        points: [num_point, 3] coordinates.
        labels: [num_point] or [num_point, columns].
        res: side of a voxel, in the unit of the coordinates.

    Returns:
        uvidx: [voxels] float64, numbers of the voxels, ascending.
        uvlabel: [voxels] or [voxels, columns], the labels of their points.
        nvox: [3] float64, number of voxels along each axis.
    """
    if len(points) == 0:
        return np.zeros(0), labels[:0], np.zeros(3)
    low = np.min(points, axis=0)
    nvox = np.ceil((np.max(points, axis=0) - low) / res)
    x, y, z = np.ceil((points - low) / res).T
    # As in the original, in which the last voxel of a row has the number of the next row's first.
    uvidx, first = np.unique(x + y * nvox[0] + z * nvox[0] * nvox[1], return_index=True)
    return uvidx, labels[first], nvox


class SceneScore:
    """Accuracies of scannet/train.py over points and over voxels; class 0, unknown, is left out.

    Args:
        num_classes: number of classes, with the unknown one.
        class_weights: [num_classes - 1], for the calibrated accuracies.
        res: side of a voxel in metres.
    """

    def __init__(self, num_classes=21, class_weights=SCANNET_CLASS_WEIGHTS, res=0.02):
        self._class_weights = np.asarray(class_weights)
        self._res = res
        self._points = ClassCounts(num_classes - 1)
        self._voxels = ClassCounts(num_classes - 1)

    def add(self, points, labels, predictions, weights):
        """Counts a batch of scenes.

        Args:
            points: [batch, num_point, 3] coordinates in metres, as the network saw them.
            labels: [batch, num_point] int.
            predictions: [batch, num_point] int.
            weights: [batch, num_point]; points with weight 0 do not count.
        """
        for cloud, label, prediction, weight in zip(points, labels, predictions, weights):
            pairs = np.stack([label, prediction], axis=1)[weight > 0]
            _, voxel_pairs, _ = surface_voxels(cloud[weight > 0], pairs, self._res)
            for counts, found in ((self._points, pairs), (self._voxels, voxel_pairs)):
                known = found[found[:, 0] > 0]
                counts.add(known[:, 0] - 1, known[:, 1] - 1)

    def result(self):
        """dict, each entry over points and, with the suffix _vox, over voxels: accuracy,
        avg_class_acc, calibrated_acc (classes weighted), class_acc ([num_classes - 1]),
        class_weight ([num_classes - 1], shares of the classes)."""
        result = {}
        for suffix, counts in (("", self._points), ("_vox", self._voxels)):
            result |= {
                f"accuracy{suffix}": counts.accuracy(),
                f"avg_class_acc{suffix}": counts.average_class_accuracy(),
                f"calibrated_acc{suffix}": counts.average_class_accuracy(self._class_weights),
                f"class_acc{suffix}": counts.class_accuracies(),
                f"class_weight{suffix}": _ratio(counts.seen, counts.seen.sum()),
            }
        return result


def _ratio(numerator, denominator):
    """Quotient, NaN where the denominator is 0."""
    numerator, denominator = np.broadcast_arrays(np.float64(numerator), np.float64(denominator))
    return np.divide(
        numerator, denominator, out=np.full(numerator.shape, np.nan), where=denominator != 0
    )


def _mean_of_present(values, weights=None):
    """Mean of the values that are not NaN; NaN if there are none."""
    present = ~np.isnan(values)
    if not present.any():
        return float("nan")
    weights = None if weights is None else np.asarray(weights)[present]
    return float(np.average(values[present], weights=weights))
