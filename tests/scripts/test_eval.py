"""eval.py without a network: what it makes of score maps, and what it reads and writes."""

import json
import logging
import os
import re
import zipfile

import cv2
import numpy as np
import pytest

import eval as east_eval
from data import icdar_results
from tests.golden_sets import golden_path
from utils import nms
from utils.geometry import restore_rectangle


@pytest.fixture(scope="module")
def golden():
    return np.load(golden_path("east", "nms.npz"))


def _detections(golden):
    return sorted({key.split("/")[0] for key in golden.files if key.startswith("detect")})


def _detect(golden, case, **options):
    score, geo = golden[f"{case}/score_map"], golden[f"{case}/geo_map"]
    return east_eval.detect(score[None, :, :, None], geo[None], {}, **options)[0]


class WordDetector:
    """Finds one upright word in every picture, in pixels of the resized picture.

    The word covers the map pixels x 4 to 11 and y 3 to 6, its box is (8.5, 4.5) to (56.5, 36.5).
    """

    def __init__(self):
        self.shapes = []

    def maps(self, im):
        self.shapes.append(im.shape)
        height, width = im.shape[0] // 4, im.shape[1] // 4
        score, geo = np.zeros((height, width), np.float32), np.zeros((height, width, 5), np.float32)
        x, y = np.meshgrid(np.arange(width) * 4.0, np.arange(height) * 4.0)
        score[3:7, 4:12] = 0.95
        geo[..., :4] = np.stack([y - 4.5, 56.5 - x, 36.5 - y, x - 8.5], axis=-1)
        return score[None, :, :, None], geo[None]


class BlindDetector:
    """Finds nothing."""

    def maps(self, im):
        height, width = im.shape[0] // 4, im.shape[1] // 4
        return np.zeros((1, height, width, 1), np.float32), np.zeros((1, height, width, 5))


WORD_LINE = "8,4,56,4,56,36,8,36"


@pytest.fixture
def pictures(tmp_path):
    folder = tmp_path / "pictures"
    (folder / "more").mkdir(parents=True)
    image = np.full((64, 96, 3), 128, np.uint8)
    for name in ("img_1.jpg", "a.b.PNG", "more/img (2).JPEG"):
        (folder / name).write_bytes(cv2.imencode(".png", image)[1].tobytes())
    return folder


def _evaluate(images, detector, output_dir, **options):
    files = icdar_results.OutputFiles(output_dir, images)
    return east_eval.evaluate_folder(images, detector, files, **options)


# ------------------------------------------------------------------------------ detection


def test_golden_restore(golden):
    for case in sorted({key.split("/")[0] for key in golden.files if key.startswith("restore")}):
        quads = restore_rectangle(golden[f"{case}/origin"], golden[f"{case}/geometry"])
        np.testing.assert_allclose(quads, golden[f"{case}/quads"], rtol=0, atol=1e-3)


def test_golden_detect_with_the_scores_in_the_original_order(golden):
    for case in _detections(golden):
        boxes = _detect(golden, case, scores_in_raster_order=True)
        expected = golden[f"{case}/boxes_stable_order"]
        if len(expected) == 0:
            assert boxes is None
            continue
        assert boxes.shape == expected.shape
        np.testing.assert_allclose(boxes[:, :8], expected[:, :8], rtol=0, atol=1e-3, err_msg=case)
        np.testing.assert_allclose(boxes[:, 8], expected[:, 8], rtol=1e-4, err_msg=case)


def test_golden_detect_with_each_box_its_own_score(golden):
    """The original's boxes in its order; where angles have both signs the weights differ."""
    for case in _detections(golden):
        expected = golden[f"{case}/boxes_stable_order"]
        if len(expected) == 0:
            assert _detect(golden, case) is None
            continue
        score, geo = golden[f"{case}/score_map"], golden[f"{case}/geo_map"]
        y, x = np.nonzero(score > 0.8)
        rows = golden[f"{case}/boxes_before_nms_stable_order"].copy()
        first_negative = np.argsort(geo[y, x, 4] < 0, kind="stable")
        rows[:, 8] = score[y, x][first_negative]
        merged = nms.merge_quadrangle_n9(rows, 0.2)
        boxes = _detect(golden, case)
        np.testing.assert_allclose(boxes[:, :8], merged[:, :8], rtol=0, atol=1e-3, err_msg=case)
        if np.all(geo[y, x, 4] >= 0):
            np.testing.assert_allclose(boxes[:, :8], expected[:, :8], rtol=0, atol=1e-3)


def test_golden_sort_poly(golden):
    for given, expected in zip(golden["sort_poly/in"], golden["sort_poly/out"]):
        np.testing.assert_array_equal(east_eval.sort_poly(given), expected)
    for case in _detections(golden):
        boxes = golden[f"{case}/boxes"][:, :8].reshape(-1, 4, 2).astype(np.int32)
        if len(boxes):
            result = [east_eval.sort_poly(box) for box in boxes]
            np.testing.assert_array_equal(result, golden[f"{case}/sorted_int"])


def test_golden_resize_image(golden):
    for h, w, new_h, new_w, ratio_h, ratio_w in golden["resize_image/h_w_newh_neww_ratioh_ratiow"]:
        resized, ratios = east_eval.resize_image(np.zeros((int(h), int(w), 3), np.uint8))
        assert resized.shape == (new_h, new_w, 3)
        assert ratios == pytest.approx((ratio_h, ratio_w), rel=1e-12)
    resized, _ = east_eval.resize_image(golden["resize_image/example_in"])
    difference = resized.astype(int) - golden["resize_image/example_out"]
    assert np.abs(difference).max() <= 2


def test_a_box_is_weighted_with_the_score_of_its_own_pixel():
    score, geo = np.zeros((16, 16), np.float32), np.zeros((16, 16, 5), np.float32)
    score[4, 4], score[4, 5] = 1.0, 0.82
    geo[4, 4] = [16, 32, 16, 16, -1e-3]  # comes second: its angle is negative
    geo[4, 5] = [12, 28, 12, 20, 1e-3]
    own, _ = east_eval.detect(score, geo, {}, box_thresh=0.0)
    original, _ = east_eval.detect(score, geo, {}, box_thresh=0.0, scores_in_raster_order=True)
    assert own[0, 1] == pytest.approx(-(16 * 1.0 + 12 * 0.82) / 1.82 + 16, abs=0.05)
    assert original[0, 1] == pytest.approx(-(16 * 0.82 + 12 * 1.0) / 1.82 + 16, abs=0.05)


def test_mean_score_equals_that_of_a_full_mask():
    rng = np.random.RandomState(0)
    score = rng.uniform(size=(40, 50)).astype(np.float32)
    for _ in range(200):
        quad = rng.uniform(-60, 260, (4, 2)).astype(np.float32)
        mask = np.zeros(score.shape, np.uint8)
        cv2.fillPoly(mask, [quad.astype(np.int32) // 4], 1)
        expected = cv2.mean(score, mask)[0]
        assert east_eval._mean_score(score, quad) == pytest.approx(expected, abs=1e-9)


def test_boxes_below_the_mean_score_are_dropped_and_thresholds_are_strict():
    detector = WordDetector()
    score, geo = detector.maps(np.zeros((64, 96, 3)))
    assert len(east_eval.detect(score, geo, {})[0]) == 1
    assert len(east_eval.detect(score, geo, {}, box_thresh=0.99)[0]) == 0
    exactly = float(np.float32(0.95))
    assert east_eval.detect(score, geo, {}, score_map_thresh=exactly)[0] is None


def test_a_score_map_of_ones_is_capped_and_the_log_says_so(caplog):
    rng = np.random.RandomState(0)
    score = np.ones((1, 512, 512, 1), np.float32)
    geo = np.concatenate(
        [rng.uniform(0, 60, (1, 512, 512, 4)), rng.uniform(-0.7, 0.7, (1, 512, 512, 1))], axis=-1
    ).astype(np.float32)
    lines = []
    with caplog.at_level(logging.WARNING, logger="absl"):
        boxes, _ = east_eval.detect(score, geo, {}, max_candidates=2000, report=lines.append)
    assert 0 < len(boxes) <= 2000
    assert lines == ["2000 text boxes before nms"]
    assert "262144 text pixels are more than max_candidates" in caplog.text
    assert "2000" in caplog.text


def test_the_cap_keeps_the_best_candidates_in_raster_order():
    score = np.zeros((4, 4), np.float32)
    score[0, 1], score[2, 0], score[2, 3], score[3, 3] = 0.9, 0.85, 0.99, 0.95
    best = east_eval._best_candidates(np.argwhere(score > 0.8), score, 3)
    np.testing.assert_array_equal(best, [[0, 1], [2, 3], [3, 3]])


def test_boxes_are_scaled_back_sorted_and_small_ones_left_out():
    boxes = np.array(
        [
            [50, 10, 50, 20, 10, 20, 10, 10, 1],  # begins at its upper right corner
            [0, 0, 20, 0, 20, 2.4, 0, 2.4, 1],  # 4.8 high in the picture
        ],
        np.float32,
    )
    quads = east_eval.boxes_in_picture(boxes, ratio_h=0.5, ratio_w=1.0)
    np.testing.assert_array_equal(quads, [[[10, 20], [50, 20], [50, 40], [10, 40]]])
    assert east_eval.boxes_in_picture(None, 1, 1).shape == (0, 4, 2)


# ------------------------------------------------------------------------------ folders


def test_images_are_found_in_folders_in_any_case(pictures, capsys):
    (pictures / "notes.txt").write_text("")
    (pictures / "._img_1.jpg").write_text("")
    expected = [str(pictures / n) for n in ("a.b.PNG", "img_1.jpg", "more/img (2).JPEG")]
    assert east_eval.get_images(str(pictures)) == expected
    assert capsys.readouterr().out == "Find 3 images\n"
    assert len(east_eval.get_images(f"{pictures}/", leave_out=[f"{pictures}/more/"])) == 2
    drawn = pictures / icdar_results.DRAWN_FOLDER / "img_1.jpg"  # of an earlier run
    drawn.parent.mkdir()
    drawn.write_text("")
    assert east_eval.get_images(str(pictures)) == expected
    assert east_eval.get_images(str(drawn.parent)) == [str(drawn)]


def test_folders_without_pictures_and_names_that_collide(pictures, tmp_path):
    for folder, what in ((tmp_path / "none", "is not a folder"), (tmp_path, "has no pictures")):
        for path in pictures.rglob("*.*"):
            if folder == tmp_path:
                path.unlink()
        with pytest.raises(FileNotFoundError, match=f"{re.escape(str(folder))} {what}.*jpg"):
            east_eval.get_images(str(folder))
    (pictures / "x.jpg").write_text("")
    (pictures / "more" / "x.png").write_text("")
    with pytest.raises(ValueError, match=r"both get the result file x\.txt"):
        east_eval.get_images(str(pictures))


def test_files_and_lines_of_an_evaluation(pictures, tmp_path, capsys):
    images = east_eval.get_images(str(pictures))
    detector = WordDetector()
    found = _evaluate(images, detector, tmp_path / "out")
    assert sorted(found) == images
    written = sorted(os.listdir(tmp_path / "out"))
    assert written == [
        "a.b.PNG",
        "a.b.txt",
        "img (2).JPEG",
        "img (2).txt",
        "img_1.jpg",
        "img_1.txt",
    ]
    assert (tmp_path / "out" / "img_1.txt").read_bytes() == f"{WORD_LINE}\r\n".encode()
    assert detector.shapes[0] == (64, 96, 3)
    drawn = cv2.imread(str(tmp_path / "out" / "a.b.PNG"))
    assert drawn[4, 30].tolist() == [255, 255, 0] and drawn[20, 30].tolist() == [128] * 3
    lines = capsys.readouterr().out.splitlines()[1:]
    assert len(lines) == 3 * 3  # plain lines, no progress bar
    assert lines[0] == "32 text boxes before nms"
    assert re.fullmatch(r".*/a\.b\.PNG : net \d+ms, restore \d+ms, nms \d+ms", lines[1])
    assert re.fullmatch(r"\[timing\] \d+\.\d+(e-\d+)?", lines[2])


def test_inputs_stay_as_they_are_when_the_output_folder_is_theirs(pictures):
    before = {path: path.read_bytes() for path in pictures.rglob("*.*")}
    images = east_eval.get_images(str(pictures))
    _evaluate(images, WordDetector(), pictures)
    assert {path: path.read_bytes() for path in before} == before
    assert len(os.listdir(pictures / icdar_results.DRAWN_FOLDER)) == 3
    assert (pictures / "img_1.txt").read_bytes() == f"{WORD_LINE}\r\n".encode()


def test_nothing_found_gives_an_empty_file(pictures, tmp_path):
    found = _evaluate([str(pictures / "img_1.jpg")], BlindDetector(), tmp_path, write_images=False)
    assert [len(quads) for quads in found.values()] == [0]
    assert (tmp_path / "img_1.txt").read_bytes() == b""
    assert not (tmp_path / "img_1.jpg").exists()


def test_unreadable_images_are_named_and_skipped(pictures, tmp_path, capsys):
    (pictures / "cut.png").write_bytes((pictures / "img_1.jpg").read_bytes()[:-20])
    (pictures / "empty.jpg").write_bytes(b"")
    (pictures / "words.jpg").write_text("no image")
    images = east_eval.get_images(str(pictures))
    found = _evaluate(images, WordDetector(), tmp_path / "out")
    assert len(found) == 3
    out = capsys.readouterr().out
    for name in ("cut.png", "empty.jpg", "words.jpg"):
        assert len(re.findall(rf"skipped: .*{re.escape(name)}: ", out)) == 1
        assert not (tmp_path / "out" / (os.path.splitext(name)[0] + ".txt")).exists()
    assert "3 of 6 images could not be read" in out
    with pytest.raises(ValueError, match="none of the 1 images could be read"):
        _evaluate([str(pictures / "empty.jpg")], WordDetector(), tmp_path / "out")


def test_larger_pictures_are_scaled(tmp_path):
    path = tmp_path / "large.png"
    cv2.imwrite(str(path), np.zeros((100, 400, 3), np.uint8))
    detector = WordDetector()
    _evaluate([str(path)], detector, tmp_path / "out", max_side_len=160)
    assert detector.shapes == [(32, 160, 3)]


# ------------------------------------------------------------------------------ score


@pytest.mark.parametrize("zipped", [False, True])
def test_existing_result_files_are_scored(tmp_path, capsys, zipped):
    results, truths = tmp_path / "results", tmp_path / "truths"
    results.mkdir()
    truths.mkdir()
    (results / "res_img_1.txt").write_text(f"{WORD_LINE}\r\n-9,-9,9,-9,9,9,-9,9\r\n")
    (results / "img_3.txt").write_text(WORD_LINE)
    # Anticlockwise, with a byte-order mark.
    truth = "\ufeff8,36,56,36,56,4,8,4,a, word\r\n"
    (truths / "gt_img_1.txt").write_text(truth, encoding="utf-8")
    (truths / "gt_img_2.txt").write_text(truth, encoding="utf-8")
    paths = {"results": results, "truths": truths}
    if zipped:
        for name, folder in paths.items():
            paths[name] = tmp_path / f"{name}.zip"
            with zipfile.ZipFile(paths[name], "w") as stream:
                for file in folder.iterdir():
                    stream.write(file, f"inside/{file.name}")
    detections = icdar_results.load_boxes(paths["results"])
    score = east_eval.metrics.detection_score(
        icdar_results.load_boxes(paths["truths"]), {k: v[0] for k, v in detections.items()}
    )
    east_eval.print_score(score, tmp_path / "out")
    out = capsys.readouterr().out
    assert "precision 0.5000, recall 0.5000, hmean 0.5000 (2 images" in out
    assert "unmatched: img_2: ground truth without a result" in out
    assert "unmatched: img_3: result without a ground truth" in out
    written = json.loads((tmp_path / "out" / "icdar_score.json").read_text())
    assert (written["precision"], written["recall"], written["hmean"]) == (0.5, 0.5, 0.5)
    assert written["images"]["img_1"]["pairs"] == [{"gt": 0, "det": 0}]
