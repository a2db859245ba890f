import json

import numpy as np
import pytest

from tests.golden_sets import golden_path
from utils import metrics


def _box(left, top, right, bottom):
    return [[left, top], [right, top], [right, bottom], [left, bottom]]


def _score(gts, ignore, dets, **thresholds):
    return metrics.detection_score_of_image(gts, ignore, dets, **thresholds)


@pytest.fixture(scope="module")
def golden():
    return json.loads(golden_path("dbnet", "metric.json").read_text())


@pytest.fixture(scope="module")
def results(golden):
    found = {}
    for case in golden["cases"]:
        dets = np.array(case["pred_boxes"], float).reshape(-1, 4, 2)
        dets = dets[np.array(case["score_filtered_pred_index"], int)]
        gts = np.array(case["gt_polys"], float).reshape(-1, 4, 2)
        found[case["case"]] = _score(gts, case["ignore"], dets)
    return found


def test_golden_score_of_each_image(golden, results):
    for case in golden["cases"]:
        result = results[case["case"]]
        # The script refuses images without ground truths; there Shapely's evaluator stands in.
        expected = case.get("official", case["polygon_iou"])
        for key in ("precision", "recall", "hmean"):
            assert result[key] == pytest.approx(expected[key], abs=1e-9), (case["name"], key)
        for key in ("pairs", "gtDontCare", "detDontCare"):
            assert result[key] == expected[key], (case["name"], key)
        if result["iouMat"].size:
            np.testing.assert_allclose(result["iouMat"], expected["iouMat"], atol=1e-9)


def test_golden_combined_score(golden, results):
    for cases in ("official_over_cases", "repo_script_reordered_over_cases"):
        combined = metrics.combine_detection_scores(
            results[case] for case in golden["combined"][cases]
        )
        for key, value in golden["combined"]["official"].items():
            assert combined[key] == pytest.approx(value, abs=1e-9)


def test_by_hand():
    gts = [_box(0, 0, 10, 10), _box(20, 0, 30, 10), _box(40, 0, 50, 10)]
    dets = [
        _box(0, 0, 10, 8),  # IoU 0.8 with the first
        _box(0, 0, 10, 10),  # better, but the first is taken
        _box(20, 5, 30, 15),  # IoU 1/3 with the second
        _box(38, 0, 48, 10),  # 0.8 of it in the third, which is don't care
    ]
    result = _score(gts, [False, False, True], dets)
    assert result["pairs"] == [{"gt": 0, "det": 0}]
    assert result["detDontCare"] == [3]
    assert (result["gtCare"], result["detCare"], result["detMatched"]) == (2, 3, 1)
    assert (result["precision"], result["recall"]) == (1 / 3, 1 / 2)
    assert result["hmean"] == pytest.approx(0.4)
    np.testing.assert_allclose(result["iouMat"][0], [0.8, 1.0, 0.0, 0.0])
    assert result["iouMat"][1, 2] == pytest.approx(1 / 3)


def test_thresholds_are_strict():
    assert _score([_box(0, 0, 10, 10)], [False], [_box(0, 0, 10, 5)])["detMatched"] == 0
    assert _score([_box(0, 0, 10, 10)], [False], [_box(0, 0, 10, 6)])["detMatched"] == 1
    assert _score([_box(0, 0, 10, 10)], [True], [_box(0, 5, 10, 15)])["detDontCare"] == []
    assert _score([_box(0, 0, 10, 10)], [True], [_box(0, 4, 10, 14)])["detDontCare"] == [0]


@pytest.mark.parametrize(
    ("gts", "ignore", "dets", "precision", "recall", "hmean"),
    [
        ([], [], [], 1, 1, 1),
        ([], [], [_box(0, 0, 9, 9)], 0, 1, 0),
        ([_box(0, 0, 9, 9)], [False], [], 0, 0, 0),
        ([_box(0, 0, 9, 9)], [True], [], 1, 1, 1),
        ([_box(0, 0, 9, 9)], [True], [_box(0, 0, 9, 9)], 1, 1, 1),
        ([_box(0, 0, 9, 9)], [True], [_box(50, 0, 59, 9)], 0, 1, 0),
    ],
)
def test_nothing_on_one_side(gts, ignore, dets, precision, recall, hmean):
    result = _score(gts, ignore, dets)
    assert (result["precision"], result["recall"], result["hmean"]) == (precision, recall, hmean)


def test_corners_run_either_way_and_may_lie_outside_the_image():
    gt = np.array(_box(-30, -20, 50, 40))
    for det in (gt[::-1], np.roll(gt, 2, axis=0), gt.astype(np.float32) + 0.9 * np.sign(gt)):
        assert _score([gt], [False], [det])["iouMat"] == pytest.approx(1.0)


def test_boxes_without_area_match_nothing():
    point = [[5, 5]] * 4
    result = _score([_box(0, 0, 10, 10), point], [True, False], [point, point])
    assert (result["detMatched"], result["detCare"]) == (0, 2)
    assert not result["iouMat"].any()


def test_a_set_of_images():
    gts = {
        "a": (np.array([_box(0, 0, 10, 10)]), np.array([False])),
        "b": (np.array([_box(0, 0, 10, 10)]), np.array([False])),
        "empty": (np.zeros((0, 4, 2)), np.zeros(0, bool)),
    }
    dets = {
        "a": np.array([_box(0, 0, 10, 10)]),
        "empty": np.array([_box(0, 0, 10, 10)]),
        "stranger": np.array([_box(0, 0, 10, 10)]),
    }
    score = metrics.detection_score(gts, dets)
    assert (score["gtCare"], score["detCare"], score["detMatched"]) == (2, 2, 1)
    assert (score["precision"], score["recall"], score["hmean"]) == (0.5, 0.5, 0.5)
    assert score["without_detections"] == ["b"]
    assert score["without_ground_truth"] == ["stranger"]
    assert score["images"]["a"]["hmean"] == 1


def test_nothing_to_divide_by():
    score = metrics.combine_detection_scores([])
    assert (score["precision"], score["recall"], score["hmean"]) == (0, 0, 0)


def test_names_that_never_meet_are_an_error():
    gts = {"img_1": (np.zeros((0, 4, 2)), np.zeros(0, bool))}
    with pytest.raises(ValueError, match="picture.*img_1"):
        metrics.detection_score(gts, {"picture": np.zeros((0, 4, 2))})


def test_wrong_shapes_are_named():
    with pytest.raises(ValueError, match=r"polys has shape \[1, 8\]"):
        _score([], [], np.zeros((1, 8)))
    with pytest.raises(ValueError, match="gt_ignore has 2"):
        _score([_box(0, 0, 1, 1)], [True, False], [])
