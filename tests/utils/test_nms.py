import itertools
import subprocess
import sys

import numpy as np
import pytest

from tests.golden_sets import golden_path
from utils import nms


def _rectangles(rng, count, size=200.0):
    """Rotated rectangles [count, 8], float32 pixels."""
    centre = rng.uniform(0, size, (count, 1, 2))
    half = rng.uniform(3, 40, (count, 1, 2)) * [[-1, -1], [1, -1], [1, 1], [-1, 1]]
    angle = rng.uniform(-0.7, 0.7, count)
    turn = np.array([[np.cos(angle), np.sin(angle)], [-np.sin(angle), np.cos(angle)]]).transpose(
        2, 0, 1
    )
    return (centre + half @ turn).reshape(-1, 8)


def test_golden_lanms():
    golden = np.load(golden_path("east", "nms.npz"))
    cases = [k for k in golden.files if k.startswith("nms/") and "/lanms_" in k]
    assert cases
    for case in cases:
        boxes = golden[case.rpartition("/")[0] + "/in"]
        result = nms.merge_quadrangle_n9(boxes, float(case.rpartition("_")[2]))
        expected = golden[case]
        assert result.shape == expected.shape and result.dtype == np.float32, case
        np.testing.assert_allclose(result[:, :8], expected[:, :8], rtol=0, atol=1e-3, err_msg=case)
        np.testing.assert_allclose(result[:, 8], expected[:, 8], rtol=1e-4, err_msg=case)


def test_golden_merge_before_and_after_detection():
    """The rows of every golden detection, in the order in which the original had them."""
    golden = np.load(golden_path("east", "nms.npz"))
    for case in sorted({k.split("/")[0] for k in golden.files if k.startswith("detect")}):
        for suffix in ("", "_stable_order"):
            result = nms.merge_quadrangle_n9(golden[f"{case}/boxes_before_nms{suffix}"], 0.2)
            expected = golden[f"{case}/boxes{suffix}"][:, :8]
            assert len(result) == len(expected)
            if len(expected):
                np.testing.assert_allclose(result[:, :8], expected, rtol=0, atol=1e-3, err_msg=case)


def test_golden_empty():
    result = nms.merge_quadrangle_n9(np.zeros((0, 9), np.float32), 0.2)
    assert result.shape == (0,) and result.dtype == np.float32


def test_merge_is_the_score_weighted_mean():
    boxes = np.array(
        [[0, 0, 100, 0, 100, 20, 0, 20, 0.75], [4, 0, 104, 0, 104, 24, 4, 24, 0.25]], np.float32
    )
    result = nms.merge_quadrangle_n9(boxes, 0.3)
    np.testing.assert_array_equal(result, [[1, 0, 101, 0, 101, 21, 1, 21, 1.0]])


def test_mirrored_corners_are_paired_backwards():
    first = [0, 0, 100, 0, 100, 20, 0, 20]
    backwards = [0, 20, 100, 20, 100, 0, 0, 0]
    result = nms.merge_quadrangle_n9(np.array([first + [0.5], backwards + [0.5]], np.float32), 0.3)
    np.testing.assert_array_equal(result, [first + [1.0]])


def test_only_the_row_before_is_merged_and_the_best_is_kept():
    a, b = [0, 0, 10, 0, 10, 10, 0, 10], [50, 0, 60, 0, 60, 10, 50, 10]
    result = nms.merge_quadrangle_n9(np.array([a + [0.8], b + [0.7], a + [0.9]], np.float32), 0.3)
    np.testing.assert_array_equal(result, np.array([a + [0.9], b + [0.7]], np.float32))


def test_an_overlap_equal_to_the_threshold_does_not_merge():
    a, b = [0, 0, 10, 0, 10, 10, 0, 10], [5, 0, 15, 0, 15, 10, 5, 10]  # IoU 1/3
    boxes = np.array([a + [0.8], b + [0.7]], np.float32)
    assert len(nms.merge_quadrangle_n9(boxes, np.float32(50) / np.float32(150))) == 2
    assert len(nms.merge_quadrangle_n9(boxes, 0.3333)) == 1


def test_equal_scores_keep_the_order_of_the_rows():
    boxes = np.array([[x, 0, x + 10, 0, x + 10, 10, x, 10, 1.0] for x in (200, 0, 100)], np.float32)
    np.testing.assert_array_equal(nms.merge_quadrangle_n9(boxes, 0.2), boxes)


def test_suppression_equals_the_pairwise_definition_beyond_one_block(monkeypatch):
    rng = np.random.RandomState(3)
    quads, scores = _rectangles(rng, 150) * nms.PRECISION, rng.uniform(0.8, 1, 150)
    pairs = np.array(list(itertools.product(range(150), repeat=2)))
    overlap = nms.overlaps(quads[pairs[:, 0]], quads[pairs[:, 1]]).reshape(150, 150)
    for thres in (0.0, 0.1, 0.5):
        kept = []
        for box in np.argsort(-scores):
            if not any(overlap[box, other] > thres for other in kept):
                kept.append(box)
        for pairs_per_block in (1, 1000, 1 << 20):
            monkeypatch.setattr(nms, "_PAIRS_PER_BLOCK", pairs_per_block)
            np.testing.assert_array_equal(nms.standard_nms(quads, scores, thres), kept)


def test_one_pair_at_a_time_gives_the_overlap_of_many():
    rng = np.random.RandomState(0)
    a = rng.randint(0, 6, (500, 8)).astype(float)
    b = rng.randint(0, 6, (500, 8)).astype(float)
    b[:100] = a[:100]
    single = [
        nms._overlap_of_shapes(nms._Shape(p), nms._Shape(q)) for p, q in zip(a.tolist(), b.tolist())
    ]
    np.testing.assert_allclose(single, nms.overlaps(a, b), atol=1e-6)


@pytest.mark.parametrize("value", [np.nan, np.inf, 1e30])
def test_values_that_are_not_finite_are_named(value):
    boxes = np.ones((3, 9), np.float32)
    boxes[1, 2] = value
    with pytest.raises(ValueError, match="1 of 3 boxes"):
        nms.merge_quadrangle_n9(boxes, 0.2)


def test_another_shape_is_named():
    with pytest.raises(ValueError, match=r"\[5, 8\]"):
        nms.merge_quadrangle_n9(np.ones((5, 8), np.float32), 0.2)


def test_import_builds_nothing_and_needs_no_compiler():
    code = (
        "import os, sys; os.environ['PATH'] = ''; import utils.nms;"
        " print('tensorflow' in sys.modules)"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "False"
