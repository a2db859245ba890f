import json
import warnings

import numpy as np
import pytest

from tests.golden_sets import golden_path
from utils import segmentation_metrics as metrics

SEG_CLASSES = {"Mug": [0, 1], "Knife": [2, 3], "Cap": [4, 5]}


def golden(name):
    return (
        json.loads(golden_path("pointnet2", f"{name}.json").read_text()),
        np.load(golden_path("pointnet2", f"{name}.npz")),
    )


def seg_classes_of_the_golden_set():
    datasets = json.loads(golden_path("pointnet2", "datasets.json").read_text())
    return datasets["part_seg_classes"]


@pytest.mark.parametrize("name", ["eval_partseg", "eval_partseg_onehot"])
def test_golden_part_segmentation(name):
    expected, arrays = golden(name)
    score = metrics.PartSegmentationScore(seg_classes_of_the_golden_set())
    left = expected["test_items"]
    for labels, logits in zip(arrays["labels"], arrays["logits_sum"]):
        score.add(labels[:left], logits[:left])  # rows after the last item are stale
        left -= len(labels)
    assert left <= 0
    found, values = score.result(), expected["values_rounded_6_digits"]
    assert found.pop("category_miou") == pytest.approx(values["category_miou"], abs=1e-6)
    for key, value in found.items():
        assert value == pytest.approx(values[key], abs=1e-6), key


@pytest.mark.parametrize(
    "epoch, calibrated, class_acc",
    [
        ("eval_one_epoch", "calibrated_acc", "class_acc"),
        ("eval_whole_scene_one_epoch", "calibrated_acc_vox", "class_acc_vox"),
    ],
)
def test_golden_scannet(epoch, calibrated, class_acc):
    expected, arrays = golden("eval_scannet")
    score = metrics.SceneScore()
    names = ("points_fed", "labels", "pred", "smpw")
    for batch in zip(*[arrays[f"{epoch}/{name}"] for name in names]):
        score.add(*batch)
    found, values = score.result(), expected[epoch]["values_rounded_6_digits"]
    for key in ("accuracy", "accuracy_vox", "avg_class_acc", "avg_class_acc_vox", calibrated):
        assert found[key] == pytest.approx(values[key], abs=2e-6), key
    classes = np.stack([found["class_weight_vox"], found[class_acc]], axis=1)
    np.testing.assert_allclose(classes, values["per_class_weight_acc"], rtol=0, atol=1e-6)


def test_golden_voxels():
    _, arrays = golden("eval_scannet")
    first = arrays["eval_one_epoch/points_fed"][0, 0], arrays["eval_one_epoch/labels"][0, 0]
    uvidx, uvlabel, nvox = metrics.surface_voxels(*first, res=0.02)
    np.testing.assert_array_equal(nvox, arrays["voxel/nvox"])
    np.testing.assert_array_equal(uvidx, arrays["voxel/uvidx"])
    np.testing.assert_array_equal(uvlabel, arrays["voxel/label"])


def test_counts_of_classes_and_absent_ones():
    counts = metrics.ClassCounts(4)
    counts.add([0, 0, 1], [0, 1, 1])
    counts.add([[0], [3]], [[0], [2]])
    assert counts.seen.tolist() == [3, 1, 0, 1]
    assert counts.accuracy() == 3 / 5
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        np.testing.assert_array_equal(counts.class_accuracies(), [2 / 3, 1, np.nan, 0])
        assert counts.average_class_accuracy() == pytest.approx((2 / 3 + 1 + 0) / 3)
        assert counts.average_class_accuracy([1, 2, 9, 1]) == pytest.approx((2 / 3 + 2) / 4)
        empty = metrics.ClassCounts(2)
        assert np.isnan([empty.accuracy(), empty.average_class_accuracy()]).all()
    assert [metrics.shown(value) for value in (0.25, float("nan"))] == ["0.250000", "n/a"]


@pytest.mark.parametrize(
    "labels, predictions, message",
    [([2], [0], "labels are 2 to 2"), ([-1], [0], "are -1 to -1"), ([0, 1], [0], "one prediction")],
)
def test_labels_that_cannot_be_counted_are_refused(labels, predictions, message):
    counts = metrics.ClassCounts(2)
    with pytest.raises(ValueError, match=message):
        counts.add(labels, predictions)
    assert counts.seen.tolist() == [0, 0]


def test_part_of_no_category_is_refused():
    score = metrics.PartSegmentationScore({"Mug": [0, 1]})
    with pytest.raises(ValueError, match=r"labels have \[7\]"):
        score.add(np.array([[0, 7]]), np.zeros((1, 2, 2)))


def test_parts_are_predicted_within_the_category_only():
    logits = np.array([[9.0, 0.0, 1.0, 2.0], [9.0, 0.0, 4.0, 3.0]])
    assert metrics.predict_parts(logits, [2, 3]).tolist() == [3, 2]
    assert metrics.predict_parts(logits[None], [3, 2]).tolist() == [[3, 2]]


def test_iou_of_parts_by_hand():
    labels, predictions = np.array([2, 2, 2, 3]), np.array([2, 2, 3, 3])
    assert metrics.part_iou(labels, predictions, [2, 3]) == pytest.approx((2 / 3 + 1 / 2) / 2)
    # part 4 is neither there nor predicted: 1
    assert metrics.part_iou(labels, predictions, [2, 3, 4]) == pytest.approx(
        (2 / 3 + 1 / 2 + 1) / 3
    )
    assert metrics.part_iou(np.array([2, 2]), np.array([3, 3]), [2, 3]) == 0


def test_categories_without_shapes_stay_out_of_the_means():
    score = metrics.PartSegmentationScore(SEG_CLASSES)
    logits = np.eye(6)[[[0, 0, 1, 1], [2, 3, 3, 3]]]
    predictions = score.add(np.array([[0, 0, 1, 1], [2, 2, 3, 3]]), logits)
    assert predictions.tolist() == [[0, 0, 1, 1], [2, 3, 3, 3]]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        result = score.result()
    knife = (1 / 2 + 2 / 3) / 2
    assert result["category_miou"]["Mug"] == 1
    assert result["category_miou"]["Knife"] == pytest.approx(knife)
    assert np.isnan(result["category_miou"]["Cap"])
    assert result["mean_category_miou"] == pytest.approx((1 + knife) / 2)
    assert result["mean_instance_miou"] == pytest.approx((1 + knife) / 2)
    assert result["accuracy"] == 7 / 8
    assert result["avg_class_acc"] == pytest.approx((1 + 1 + 1 / 2 + 1) / 4)


def test_voxels_take_the_label_of_their_first_point():
    points = np.array([[0.0, 0, 0], [0.9, 0, 0], [0.95, 0.1, 0], [2.0, 2, 2], [0.8, 0, 0]])
    labels = np.array([5, 6, 7, 8, 9])
    uvidx, uvlabel, nvox = metrics.surface_voxels(points, labels, res=1.0)
    assert nvox.tolist() == [2, 2, 2]
    assert uvidx.tolist() == [0, 1, 3, 14] and uvlabel.tolist() == [5, 6, 7, 8]
    pairs = metrics.surface_voxels(points, np.stack([labels, -labels], axis=1), res=1.0)[1]
    assert pairs.tolist() == [[5, -5], [6, -6], [7, -7], [8, -8]]


def test_unknown_and_weightless_points_of_a_scene_do_not_count():
    score = metrics.SceneScore(num_classes=4, class_weights=[0.5, 0.25, 0.25])
    points = np.arange(15.0).reshape(1, 5, 3)
    labels, predictions = np.array([[1, 1, 0, 2, 2]]), np.array([[1, 2, 0, 2, 1]])
    score.add(points, labels, predictions, np.array([[1.0, 1, 1, 1, 0]]))
    score.add(points, labels, predictions, np.zeros((1, 5)))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        result = score.result()
    for suffix in ("", "_vox"):  # every point has a voxel of its own
        assert result[f"accuracy{suffix}"] == pytest.approx(2 / 3)
        assert result[f"avg_class_acc{suffix}"] == pytest.approx((1 / 2 + 1) / 2)
        assert result[f"calibrated_acc{suffix}"] == pytest.approx((0.5 / 2 + 0.25) / 0.75)
        np.testing.assert_array_equal(result[f"class_acc{suffix}"], [0.5, 1, np.nan])
        np.testing.assert_allclose(result[f"class_weight{suffix}"], [2 / 3, 1 / 3, 0])
