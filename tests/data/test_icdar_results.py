import os
import zipfile

import cv2
import numpy as np
import pytest

from data import icdar_results

BOX = np.array([[[1, 2], [30, 2], [30, 20], [1, 20]]], np.int32)
LINE = "1,2,30,2,30,20,1,20"


def _folder(path, files):
    path.mkdir(exist_ok=True)
    for name, text in files.items():
        (path / name).write_bytes(text.encode())
    return path


@pytest.mark.parametrize(
    "name", ["img_1.txt", "res_img_1.txt", "gt_img_1.txt", "GT_img_1.TXT", "gt_res_img_1.txt"]
)
def test_names_of_one_image(tmp_path, name):
    assert list(icdar_results.load_boxes(_folder(tmp_path / "set", {name: LINE}))) == ["img_1"]


def test_names_with_dots_blanks_and_either_spelling_of_accents():
    assert icdar_results.image_name("x/gt_a.b (5).txt") == icdar_results.image_name("a.b (5).JPG")
    assert icdar_results.image_name("e\u0301.jpg") == icdar_results.image_name("res_\u00e9.txt")


def test_folder_and_archives_read_alike(tmp_path):
    files = {
        "gt_img_1.txt": f"\ufeff{LINE},a, b\r\n-5,-5,9,-5,9,9,-5,9,###\r\n",
        "gt_img_2.txt": "",
        ".hidden.txt": "no boxes",
        "notes.md": "no boxes",
    }
    loose = _folder(tmp_path / "loose", files)
    expected = icdar_results.load_boxes(loose)
    assert list(expected) == ["img_1", "img_2"]
    np.testing.assert_array_equal(expected["img_1"][0][0], BOX[0])
    np.testing.assert_array_equal(expected["img_1"][0][1, 0], [-5, -5])
    np.testing.assert_array_equal(expected["img_1"][1], [False, True])
    assert expected["img_2"][0].shape == (0, 4, 2)
    for inside in ("", "folder/", "deep/er/", "../../"):
        archive = tmp_path / "set.zip"
        with zipfile.ZipFile(archive, "w") as stream:
            for name, text in files.items():
                stream.writestr(inside + name, text)
            stream.writestr("__MACOSX/._gt_img_1.txt", "junk")
        boxes = icdar_results.load_boxes(archive)
        assert list(boxes) == list(expected)
        for name in boxes:
            np.testing.assert_array_equal(boxes[name][0], expected[name][0])
            np.testing.assert_array_equal(boxes[name][1], expected[name][1])
    assert sorted(os.listdir(tmp_path)) == ["loose", "set.zip"]


def test_sets_that_cannot_be_read(tmp_path):
    with pytest.raises(FileNotFoundError, match="does not exist"):
        icdar_results.load_boxes(tmp_path / "none")
    with pytest.raises(FileNotFoundError, match=r"no \.txt file"):
        icdar_results.load_boxes(_folder(tmp_path / "empty", {"a.md": ""}))
    with pytest.raises(ValueError, match=r"a\.zip cannot be read as a \.zip file"):
        icdar_results.load_boxes(_folder(tmp_path / "bad", {"a.zip": "text"}) / "a.zip")
    archive = tmp_path / "damaged.zip"
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as stream:
        stream.writestr("img_1.txt", LINE * 100)
    start = 30 + len("img_1.txt")  # of the packed data, behind the local header
    packed = archive.read_bytes()
    archive.write_bytes(packed[:start] + b"\xff" * 8 + packed[start + 8 :])
    with pytest.raises(ValueError, match=r"damaged\.zip cannot be read as a \.zip file"):
        icdar_results.load_boxes(archive)
    with pytest.raises(ValueError, match="gt_img_1.txt and img_1.txt both belong"):
        two = {"img_1.txt": LINE, "gt_img_1.txt": LINE}
        icdar_results.load_boxes(_folder(tmp_path / "two", two))
    with pytest.raises(ValueError, match=r"img_1\.txt:1: expected 8 numbers"):
        icdar_results.load_boxes(_folder(tmp_path / "words", {"img_1.txt": "some words"}))


def test_result_file_is_that_of_the_competition_and_reads_back(tmp_path):
    path = tmp_path / "img_1.txt"
    icdar_results.write_boxes(path, np.concatenate([BOX, -BOX]))
    assert path.read_bytes() == f"{LINE}\r\n-1,-2,-30,-2,-30,-20,-1,-20\r\n".encode()
    polys, tags = icdar_results.load_boxes(tmp_path)["img_1"]
    np.testing.assert_array_equal(polys, np.concatenate([BOX, -BOX]))
    assert not tags.any()
    icdar_results.write_boxes(path, BOX[:0])
    assert path.read_bytes() == b""


def test_drawn_picture(tmp_path):
    image = np.full((30, 40, 3), 9, np.uint8)
    path = tmp_path / "\u00fc.PNG"
    icdar_results.write_drawn(path, image, BOX)
    drawn = cv2.imdecode(np.fromfile(path, np.uint8), cv2.IMREAD_COLOR)
    assert drawn[2, 5].tolist() == [255, 255, 0]
    assert drawn[10, 10].tolist() == [9, 9, 9]
    assert (image == 9).all()


def test_outputs_never_overwrite_inputs(tmp_path):
    pictures = _folder(tmp_path / "pictures", {"a.jpg": "", "b.jpg": ""})
    images = [str(pictures / "a.jpg"), str(pictures / "b.jpg")]
    apart = icdar_results.OutputFiles(tmp_path / "out", images)
    assert apart.drawn(images[0]) == str(tmp_path / "out" / "a.jpg")
    assert apart.result(images[0]) == str(tmp_path / "out" / "a.txt")

    beside = icdar_results.OutputFiles(f"{pictures}/", images)
    beside.make_folders(with_drawn=True)
    assert beside.drawn(images[1]) == str(pictures / icdar_results.DRAWN_FOLDER / "b.jpg")
    assert os.path.isdir(os.path.dirname(beside.drawn(images[1])))
    assert beside.result(images[1]) == str(pictures / "b.txt")

    icdar_results.write_boxes(pictures / "a.txt", BOX)  # of an earlier run, which listed them
    icdar_results.write_boxes(pictures / "b.txt", BOX[:0])
    icdar_results.OutputFiles(pictures, images)
    (pictures / "c.jpg").write_text("")
    icdar_results.write_boxes(pictures / "c.txt", BOX)  # could as well be an annotation
    with pytest.raises(ValueError, match=r"c\.txt lies among the inputs"):
        icdar_results.OutputFiles(pictures, [*images, str(pictures / "c.jpg")])
    with pytest.raises(ValueError, match=r"a\.txt lies among the inputs"):
        icdar_results.OutputFiles(pictures, images, gt_path=pictures)

    (pictures / "b.txt").write_text(LINE)
    link = tmp_path / "link"
    link.symlink_to(pictures)
    for folder in (pictures, link):
        with pytest.raises(ValueError, match=r"b\.txt lies among the inputs.*--output_dir"):
            icdar_results.OutputFiles(folder, images)
    # The pictures lie in a folder inside: one drawn outside would be a second picture of its name.
    above = icdar_results.OutputFiles(tmp_path, images, searched=f"{tmp_path}/")
    assert above.drawn(images[0]) == str(tmp_path / icdar_results.DRAWN_FOLDER / "a.jpg")

    truths = _folder(tmp_path / "truths", {"a.txt": LINE})
    with pytest.raises(ValueError, match=r"a\.txt lies among the inputs"):
        icdar_results.OutputFiles(truths, images, gt_path=truths)


def test_problems_in_an_archive_name_the_archive(tmp_path):
    path = tmp_path / "results.zip"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("inner/img_1.txt", LINE + "\n1,2,3\n")
        archive.writestr("inner/img_2.txt", "1,2,3\n")
    said = []
    with pytest.raises(ValueError, match=r"results\.zip/1/img_2\.txt:1: expected 8 numbers"):
        icdar_results.load_boxes(path, report=lambda *problem: said.append(problem))
    assert said[0][:2] == (f"{path}/0/img_1.txt", 2)
