"""Folders, annotations and images of every kind that people have, and what is said about them."""

import json
import os
import pickle
import struct

import cv2
import numpy as np
import pytest
from absl import logging
from hypothesis import example, given, settings
from hypothesis import strategies as st

from data import icdar_files, icdar_formats
from tests.golden_sets import golden_path, samples_path

BOX = "10,10,50,10,50,30,10,30"
CORNERS = [[10, 10], [50, 10], [50, 30], [10, 30]]


def picture(height=48, width=64, seed=0):
    """Smooth random picture: noise would hide small decoding differences."""
    noise = np.random.RandomState(seed).randint(0, 256, (6, 8, 3), np.uint8)
    return cv2.resize(noise, (width, height), interpolation=cv2.INTER_CUBIC)


def encoded(extension, image=None, *parameters):
    ok, data = cv2.imencode(extension, picture() if image is None else image, parameters)
    assert ok
    return data.tobytes()


def write(path, content):
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return str(path)


def folder_of(path, names):
    """Fills a folder with sound pictures and annotations of one word."""
    path.mkdir(exist_ok=True)
    for name in names:
        if name.lower().endswith(".txt"):
            write(path / name, BOX + ",word\n")
        else:
            write(path / name, encoded("." + name.rpartition(".")[2].lower()))
    return path


def parse(tmp_path, content):
    """(polys, tags, [(line, reason)]) of an annotation with this content."""
    reports = []
    path = write(tmp_path / "gt.txt", content)
    polys, tags = icdar_files.load_annotation(path, report=lambda *r: reports.append(r))
    assert polys.dtype == np.float32 and polys.shape[1:] == (4, 2)
    assert tags.dtype == bool and tags.shape == (len(polys),)
    assert all(file == path for file, _, _ in reports)
    return polys, tags, [(line, reason) for _, line, reason in reports]


@pytest.fixture
def warnings(monkeypatch):
    """Messages logged, with an empty memory of earlier ones."""
    monkeypatch.setattr(icdar_formats, "_logged", set())
    messages = []
    monkeypatch.setattr(logging, "warning", lambda text, *args: messages.append(text % args))
    return messages


# ------------------------------------------------------------------------------------- pairing


@pytest.mark.parametrize(
    "image, annotation",
    [
        ("img_1.jpg", "img_1.txt"),
        ("img_1.jpg", "gt_img_1.txt"),
        ("img_1.JPG", "img_1.Txt"),
        ("IMG_1.JpEg", "GT_img_1.TXT"),
        ("a.b.jpg", "a.b.txt"),
        ("a.b.jpg", "gt_a.b.txt"),
        ("img (5).JPG", "img (5).txt"),
        ("a [1]*.png", "a [1]*.txt"),
        (" blank .png", "gt_ blank .txt"),
        ("Straße 道路 é.png", "Straße 道路 é.txt"),
        ("caf\u00e9.png", "gt_cafe\u0301.txt"),  # composed and decomposed accent
    ],
)
@pytest.mark.parametrize("slash", ["", "/"])
def test_pairs(tmp_path, image, annotation, slash):
    folder = str(folder_of(tmp_path / "d", [image, annotation])) + slash
    expected = os.path.join(folder, image), os.path.join(folder, annotation)
    for check_images in (False, True):
        result = icdar_files.scan(folder, check_images=check_images)
        assert result.samples == [expected]
        assert result.problems == []
        assert (result.num_words, result.num_dont_care, result.num_background) == (1, 0, 0)
    assert icdar_files.get_images(folder) == [expected[0]]
    assert icdar_files.annotation_path(expected[0]) == expected[1]
    np.testing.assert_array_equal(icdar_files.read_image(expected[0]).shape, (48, 64, 3))


def test_annotation_without_prefix_and_exact_case_come_first(tmp_path):
    names = ["img_1.jpg", "gt_img_1.txt", "IMG_1.txt", "img_1.TXT"]
    folder = folder_of(tmp_path, names)
    image = str(folder / "img_1.jpg")
    for best in ("IMG_1.txt", "img_1.TXT", "gt_img_1.txt"):
        assert icdar_files.annotation_path(image) == str(folder / best)
        assert icdar_files.scan(folder).samples == [(image, str(folder / best))]
        os.remove(folder / best)
    assert icdar_files.annotation_path(image) is None
    assert icdar_files.annotation_path(str(tmp_path / "gone" / "img_1.jpg")) is None


def test_of_several_spellings_the_first_in_order_is_taken(tmp_path):
    names = ["IMG_1.txt", "IMg_1.txt", "ImG_1.txt", "Img_1.txt", "iMG_1.txt", "imG_1.txt"]
    image = str(folder_of(tmp_path, ["img_1.jpg", *names]) / "img_1.jpg")
    for name in names:
        assert icdar_files.annotation_path(image) == str(tmp_path / name)
        os.remove(tmp_path / name)


def test_annotation_path_in_the_current_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(folder_of(tmp_path, ["img_1.jpg", "GT_img_1.txt"]))
    assert icdar_files.annotation_path("img_1.jpg") == "GT_img_1.txt"


def test_images_are_sorted_and_of_this_folder_only(tmp_path):
    folder_of(tmp_path, ["b.png", "a.JPG", "c.jpeg", "a.txt", "notes.md.txt"])
    folder_of(tmp_path / "sub", ["d.jpg", "d.txt"])
    (tmp_path / "page.tif").write_bytes(b"II*\0")
    expected = [os.path.join(tmp_path, name) for name in ("a.JPG", "b.png", "c.jpeg")]
    assert icdar_files.get_images(tmp_path) == expected


def test_names_that_are_no_image_files(tmp_path, warnings):
    folder = folder_of(tmp_path / "d", ["img_1.jpg", "img_1.txt", "._img_1.jpg"])
    (folder / "folder.jpg").mkdir()
    elsewhere = folder_of(tmp_path / "e", ["target.jpg"])
    (folder / "link.jpg").symlink_to(elsewhere / "target.jpg")
    (folder / "link.txt").symlink_to(folder / "img_1.txt")
    (folder / "nothing.jpg").symlink_to(elsewhere / "nothing.jpg")
    (folder / "loop.jpg").symlink_to(folder / "loop.jpg")
    os.mkfifo(folder / "pipe.jpg")
    usable = [str(folder / "img_1.jpg"), str(folder / "link.jpg")]
    assert icdar_files.get_images(folder) == usable
    result = icdar_files.scan(folder)
    assert [image for image, _ in result.samples] == usable
    ignored = {os.path.basename(p.file): p.reason for p in result.problems}
    assert sorted(ignored) == ["._img_1.jpg", "folder.jpg", "loop.jpg", "nothing.jpg", "pipe.jpg"]
    assert "hidden" in ignored["._img_1.jpg"]
    assert "a folder" in ignored["folder.jpg"]
    assert "link to nothing" in ignored["nothing.jpg"]
    assert len(warnings) == len(ignored)  # get_images and scan together log each once


# ------------------------------------------------------------------------------- empty folders


@pytest.mark.parametrize("slash", ["", "/"])
@pytest.mark.parametrize("find", [icdar_files.get_images, icdar_files.scan])
def test_no_images(tmp_path, monkeypatch, find, slash):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "outer" / "train").mkdir(parents=True)
    folder_of(tmp_path / "texts", ["img_1.txt"])
    (tmp_path / "odd" / "x.jpg").mkdir(parents=True)
    for name, says in {
        "missing": "does not exist",
        "empty": "it is empty",
        "outer": "train and other folders",
        "texts": "img_1.txt and other files",
        "odd": "a folder, not an image",
    }.items():
        with pytest.raises(FileNotFoundError) as caught:
            find(name + slash)
        message = str(caught.value)
        assert f"{tmp_path / name} " in message and says in message
        assert all("." + extension in message for extension in icdar_files.IMAGE_EXTENSIONS)
        assert "\n" not in message


def test_a_file_in_place_of_the_folder(tmp_path):
    path = write(tmp_path / "img_1.txt", BOX)
    with pytest.raises(FileNotFoundError, match="img_1.txt is not a folder"):
        icdar_files.scan(path)


def test_no_image_has_an_annotation(tmp_path):
    folder = folder_of(tmp_path, ["img_1.jpg", "img_2.jpg", "img_3.txt"])
    with pytest.raises(icdar_files.ScanError) as caught:
        icdar_files.scan(folder)
    message = str(caught.value)
    assert "none of the 2 images" in message and str(tmp_path) in message and ".jpeg" in message
    assert "for img_1.jpg that is img_1.txt or gt_img_1.txt" in message
    assert isinstance(caught.value, ValueError)
    assert len(caught.value.result.unlabelled) == 2


def test_few_labelled_among_many_will_do(tmp_path):
    names = [f"img_{i}.jpg" for i in range(8)] + ["img_3.txt"]
    result = icdar_files.scan(folder_of(tmp_path, names))
    assert [os.path.basename(image) for image, _ in result.samples] == ["img_3.jpg"]
    assert len(result.unlabelled) == len(result.problems) == 7
    assert "img_0.txt or gt_img_0.txt" in result.problems[0].reason


# ------------------------------------------------------------------------------ broken samples


def broken_folder(path, num_good):
    names = [f"img_{i}" for i in range(num_good)]
    folder_of(path, [n + ".jpg" for n in names] + [n + ".txt" for n in names])
    bad = {"zero": b"", "cut": encoded(".jpg")[:-20], "text": b"this is not an image\n"}
    for name, content in bad.items():
        write(path / f"{name}.jpg", content)
        write(path / f"{name}.txt", BOX)
    return path


@pytest.mark.parametrize("check_images", [False, True])
def test_three_broken_images(tmp_path, warnings, check_images):
    folder = broken_folder(tmp_path, num_good=3)
    result = icdar_files.scan(folder, check_images=check_images)
    icdar_files.scan(folder, check_images=check_images)
    assert len(result.samples) == 3
    reasons = {os.path.basename(p.file): p.reason for p in result.broken}
    assert "0 bytes" in reasons["zero.jpg"]
    assert "cut off" in reasons["cut.jpg"]
    assert "text file" in reasons["text.jpg"]
    assert len(warnings) == 3
    for name in reasons:
        assert sum(str(folder / name) in warning for warning in warnings) == 1


def test_more_than_half_broken(tmp_path, warnings):
    folder = broken_folder(tmp_path, num_good=2)
    with pytest.raises(icdar_files.ScanError) as caught:
        icdar_files.scan(folder)
    message = str(caught.value)
    assert "only 2 of the 5 images" in message and "3 are broken" in message
    assert str(folder) in message and "cut.jpg" in message and "\n" not in message
    assert warnings == []
    result = icdar_files.scan(folder, strict=False)
    assert result.verdict() == message
    assert len(result.problems) == len(warnings) == 3
    assert len(icdar_files.scan(folder, max_broken=0.6).samples) == 2


def test_annotations_of_which_no_line_can_be_used_are_broken(tmp_path):
    folder = folder_of(tmp_path, ["a.jpg", "b.jpg", "a.txt", "b.txt"])
    write(folder / "b.txt", "10;10;50;10;50;30;10;30;x\n10;10;50;10;50;30;10;30;x\n")
    result = icdar_files.scan(folder)
    assert [os.path.basename(image) for image, _ in result.samples] == ["a.jpg"]
    assert len(result.broken) == 1 and result.broken[0].line == 1
    write(folder / "a.txt", "word\n")
    with pytest.raises(icdar_files.ScanError, match="only 0 of the 2 images.*a.txt:1: expected 8"):
        icdar_files.scan(folder)


def test_thorough_scan_finds_more(tmp_path):
    names = ["a.jpg", "a.txt", "gt_a.txt", "b.jpg", "b.txt", "z.txt", "._b.txt"]
    folder = folder_of(tmp_path, names)
    damaged = bytearray(encoded(".png"))
    damaged[len(damaged) // 2] ^= 0x55
    write(folder / "b.jpg", bytes(damaged))  # its end is in place
    outside = [
        "0,0,9,9,0,0,9,9,flat",
        f"{BOX},in",
        "-9,-9,-1,-9,-1,-1,-9,-1,out",
        "60,1,90,1,90,9,60,9,partly",
    ]
    outside += ["64,1,90,1,90,9,64,9,out"]
    write(folder / "a.txt", "\n".join(outside))
    assert [p.line for p in icdar_files.scan(folder).problems] == [1]
    seen = []
    result = icdar_files.scan(folder, check_images=True, progress=lambda *p: seen.append(p))
    assert seen == [(1, 2), (2, 2)]
    assert len(result.samples) == 1
    found = [(os.path.basename(p.file), p.line) for p in result.problems]
    assert found == [
        ("a.txt", 1),
        ("a.txt", 3),
        ("a.txt", 5),
        ("b.jpg", None),
        ("gt_a.txt", None),
        ("z.txt", None),
    ]
    reasons = [p.reason for p in result.problems][1:]
    assert "64 pixels wide and 48 high" in reasons[0]
    assert "damaged" in reasons[2]
    assert "another annotation" in reasons[3]
    assert "no image of this name" in reasons[4]
    summary = result.summary()
    assert "1 of 2 images" in summary and "1 are broken" in summary and "4 words" in summary


def test_background_and_dont_care_are_counted(tmp_path):
    folder = folder_of(tmp_path, [f"{n}.png" for n in "abcd"])
    write(folder / "a.txt", "")
    write(folder / "b.txt", "\n")
    write(folder / "c.txt", "5,5,5,5,5,5,5,5,word")
    write(folder / "d.txt", f"{BOX},word\n{BOX},###\n{BOX},*\n")
    result = icdar_files.scan(folder)
    assert len(result.samples) == 4
    assert (result.num_background, result.num_words, result.num_dont_care) == (3, 1, 2)


def test_problems_summary():
    problems = [icdar_files.Problem("f.txt", i, f"expected 8 numbers, got {i}") for i in range(4)]
    problems += [icdar_files.Problem("g.jpg", None, "there is no such file")] * 2
    assert icdar_files.problems_summary([]) == ""
    assert icdar_files.problems_summary(problems, None).count("\n") == 5
    lines = icdar_files.problems_summary(problems, 1).split("\n")
    assert lines[0] == "f.txt:0: expected 8 numbers, got 0"
    assert lines[1] == "... and 3 more: expected 8 numbers"
    assert lines[2] == "... and 2 more: there is no such file"


def test_names_that_are_no_unicode_can_be_printed():
    problem = icdar_files.Problem(os.fsdecode(b"caf\xe9.jpg"), None, "reason")
    assert str(problem).encode("utf-8") == b"caf\\udce9.jpg: reason"


def test_errors_survive_pickling():
    error = pickle.loads(pickle.dumps(icdar_files.ImageError("f.jpg", None, "reason")))
    assert isinstance(error, icdar_files.ImageError)
    assert error.problem == icdar_files.Problem("f.jpg", None, "reason")
    assert str(error) == "f.jpg: reason"


# --------------------------------------------------------------------------------- annotations


@pytest.mark.parametrize(
    "content",
    [
        BOX + ",word",
        BOX + ",word\n",
        BOX + ",word\r\n",
        BOX + ",word\r",
        "\n\r\n  \n\t\n" + BOX + ",word\n\n\x1a",
        BOX,
        BOX + ",",
        BOX + ",word,",
        BOX + ',"a, ""b"", c"',
        BOX + ',"unbalanced',
        BOX + ",a,b;c\td'",
        BOX + ",Latin,word",
        "10.0,10.00,5e1,1E1,+50,30.,10,3.0e+01,word",
        " 10 , 10,\t50 ,10 , 50,30,10 ,30 , word ",
        '"10","10","50","10","50","30","10","30","word"',
        '10, "10",50,10,50,30,10,30,"a, b"',
        "\ufeff" + BOX + ",word",
        "\ufeff\ufeff" + BOX + ",word",
        (BOX + ",wörd €").encode("utf-16"),
        b"\xfe\xff" + (BOX + ",word").encode("utf-16-be"),
        BOX.encode() + b",caf\xe9",
        b"\xef\xbb\xbf" + BOX.encode() + b",caf\xe9",
        BOX.encode() + b",dots\x85and\x0cmore\x1c",
    ],
)
def test_forms_of_one_word(tmp_path, content):
    polys, tags, reports = parse(tmp_path, content)
    np.testing.assert_array_equal(polys, [CORNERS])
    np.testing.assert_array_equal(tags, [False])
    assert reports == []


@pytest.mark.parametrize(
    "transcription, dont_care",
    [
        ("###", True),
        ("*", True),
        (' "###" ', True),
        (' "*"', True),
        ("  ### ", True),
        ("Latin,###", True),
        ('Latin,"###"', True),
        ("###,", True),
        ("####", False),
        ("##", False),
        ("**", False),
        ("# 1", False),
        ("5*", False),
        ('"a,*"', False),
        ("*,a", False),
        ("", False),
    ],
)
def test_dont_care(tmp_path, transcription, dont_care):
    _, tags, reports = parse(tmp_path, f"{BOX},{transcription}\n{BOX},word")
    np.testing.assert_array_equal(tags, [dont_care, False])
    assert reports == []


def test_dont_care_behind_quoted_numbers(tmp_path):
    _, tags, _ = parse(tmp_path, '"10","10",50,10,50,30,10,30,"###"\n"10",10,50,10,50,30,10,30')
    np.testing.assert_array_equal(tags, [True, False])


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
def test_problems_are_in_the_order_of_the_lines(tmp_path, end):
    lines = ["bad", "0,0,3,3,6,6,9,9,flat", "bad", f"{BOX},word", "0,0,3,3,6,6,9,9,flat"]
    _, _, reports = parse(tmp_path, end.join(lines))
    assert [line for line, _ in reports] == [1, 2, 3, 5]


def test_numbers_outside_the_image_and_either_orientation_are_kept(tmp_path):
    content = "-5,-3.5,5000,-3,5000,30,-5,30,a\n10,30,50,30,50,10,10,10,anticlockwise\n"
    polys, _, reports = parse(tmp_path, content)
    expected = [
        [[-5, -3.5], [5000, -3], [5000, 30], [-5, 30]],
        [[10, 30], [50, 30], [50, 10], [10, 10]],
    ]
    np.testing.assert_array_equal(polys, np.array(expected, np.float32))
    assert reports == []


BAD_LINES = [
    ("10;10;50;10;50;30;10;30;abc", "semicolons"),
    ('"10,10,50,10,50,30,10,30,abc"', "quotes around the whole line"),
    ("10\t10\t50\t10\t50\t30\t10\t30\tabc", "tabs"),
    ("10 10 50 10 50 30 10 30 abc", "commas between"),
    ('10, 10, 50, 30, "abc"', "four corners"),
    ("10,10,50,10,50,30,10", ""),
    ("10,10,50,10,50,30,10,abc", ""),
    ("10,,50,10,50,30,10,30,abc", ""),
    ("nan,10,50,10,50,30,10,30,abc", "not finite"),
    ("10,10,50,10,inf,30,10,30,abc", "not finite"),
    ("10,10,50,10,-Infinity,30,10,30,###", "not finite"),
    ("10,10,50,10,1e39,30,10,30,abc", "not finite"),  # more than float32 holds
    ("0x10,10,50,10,50,30,10,30,abc", ""),
    ("abc", ""),
    (",,,,,,,,", ""),
    ("<html>", ""),
    ("x" * 200_000 + '"', "..."),
    ('"' + "x" * 200_000, "..."),
]


@pytest.mark.parametrize("line, hint", BAD_LINES, ids=range(len(BAD_LINES)))
def test_bad_lines(tmp_path, warnings, line, hint):
    polys, tags, reports = parse(tmp_path, f"{BOX},a\n{line}\n\n{BOX},###\n")
    np.testing.assert_array_equal(polys, [CORNERS, CORNERS])
    np.testing.assert_array_equal(tags, [False, True])
    assert len(reports) == 1 and reports[0][0] == 2
    assert reports[0][1].startswith("expected 8 numbers separated by commas")
    assert hint in reports[0][1] and len(reports[0][1]) < 200
    path = write(tmp_path / "FILE.txt", line)
    message = "FILE.txt:1: expected 8 numbers separated by commas"
    with pytest.raises(icdar_files.AnnotationError, match=message):
        icdar_files.load_annotation(path)
    assert warnings == []  # each was handed to a callback, or raised


def test_bad_lines_are_logged_once(tmp_path, warnings):
    path = write(tmp_path / "gt.txt", f"{BOX},a\nx\ny\n0,0,9,9,0,0,9,9,flat\n")
    for _ in range(3):
        assert len(icdar_files.load_annotation(path)[0]) == 1
    assert [w.split(": ")[0] for w in warnings] == [f"skipped {path}:{line}" for line in (2, 3, 4)]


@pytest.mark.parametrize(
    "content, lines",
    [
        ("", []),
        ("\n", []),
        ("\ufeff", []),
        (b"\xff\xfe", []),
        ("10,10,10,10,10,10,10,10,x", [1]),
        ("\n10,10,50,10,50,10,10,10,x\n0,0,3,3,6,6,9,9,###", [2, 3]),
    ],
)
def test_no_box_is_background(tmp_path, content, lines):
    polys, tags, reports = parse(tmp_path, content)
    assert polys.shape == (0, 4, 2) and tags.shape == (0,)
    assert reports == [(line, "the box has no area") for line in lines]


@pytest.mark.parametrize(
    "content, reason",
    [
        (encoded(".png"), "not a text file"),
        (b"\xff\xfe" + b"a\0b", "UTF-16"),
        (BOX.encode("utf-16-le"), "zero bytes"),
    ],
)
def test_annotations_that_are_no_text(tmp_path, content, reason):
    with pytest.raises(icdar_files.AnnotationError, match=f"gt.txt: .*{reason}"):
        parse(tmp_path, content)


def test_annotation_that_is_not_there(tmp_path):
    (tmp_path / "folder.txt").mkdir()
    with pytest.raises(icdar_files.AnnotationError, match="none.txt: there is no such file"):
        icdar_files.load_annotation(tmp_path / "none.txt")
    with pytest.raises(icdar_files.AnnotationError, match="folder.txt: not a file"):
        icdar_files.load_annotation(tmp_path / "folder.txt")


NUMBER = st.one_of(
    st.integers(-999, 9999).map(str),
    st.floats().map(repr),
    st.sampled_from(
        ["", "nan", "1e38", "-3e38", "1e400", '"5"', " 7 ", "x", "１", "1_0", "\ufeff3"]
    ),
)
LINE = st.one_of(
    st.builds(
        lambda numbers, text, comma: comma.join([*numbers, text]),
        st.lists(NUMBER, min_size=7, max_size=9),
        st.sampled_from(["###", "*", '"###', '"a,""*"""', ",,", "word", "\x85\u2028"]),
        st.sampled_from([",", ",", ",", ";", "\t"]),
    ),
    st.text(max_size=40),
)


@settings(deadline=None, max_examples=300)
@given(
    st.one_of(
        st.binary(max_size=200),
        st.builds(
            lambda lines, end, code: end.join(lines).encode(code, "ignore"),
            st.lists(LINE, max_size=4),
            st.sampled_from(["\n", "\r\n", "\r"]),
            st.sampled_from(["utf-8", "utf-8-sig", "utf-16", "latin-1"]),
        ),
    )
)
@example(",".join(["3e38"] * 8).encode())
def test_annotation_parser_never_fails_otherwise(tmp_path_factory, content):
    path = tmp_path_factory.getbasetemp() / "fuzz.txt"
    path.write_bytes(content)
    reports = []
    try:
        polys, tags = icdar_files.load_annotation(path, report=lambda *r: reports.append(r))
    except icdar_files.AnnotationError as error:
        assert str(error).startswith(str(path)) and "\n" not in str(error)
        return
    assert polys.dtype == np.float32 and polys.shape == (len(tags), 4, 2)
    assert tags.dtype == bool
    assert np.isfinite(polys).all()
    lines = content.replace(b"\r", b"\n").count(b"\n") + 1
    assert len(polys) + len(reports) <= lines


# -------------------------------------------------------------------------------------- images


def jpeg_with(data, *segments):
    """A JPEG file with segments (marker, content) put in after its start."""
    inserted = b"".join(struct.pack(">BBH", 255, m, len(c) + 2) + c for m, c in segments)
    return data[:2] + inserted + data[2:]


def exif(orientation, thumbnail=b""):
    entry = struct.pack("<HHIHH", 0x0112, 3, 1, orientation, 0)
    return b"Exif\0\0II*\0" + struct.pack("<IH", 8, 1) + entry + bytes(4) + thumbnail


SOUND_IMAGES = {
    "plain.jpg": encoded(".jpg"),
    "progressive.jpg": encoded(".jpg", None, cv2.IMWRITE_JPEG_PROGRESSIVE, 1),
    "restarts.jpg": encoded(".jpg", None, cv2.IMWRITE_JPEG_RST_INTERVAL, 2),
    "grey.jpg": encoded(".jpg", picture()[..., 0]),
    "turned.jpg": jpeg_with(encoded(".jpg"), (0xE1, exif(6))),
    "mirrored.jpg": jpeg_with(encoded(".jpg"), (0xE1, exif(2))),
    "thumbnail.jpg": jpeg_with(encoded(".jpg"), (0xE1, exif(1, encoded(".jpg", picture(8, 8))))),
    "fill_bytes.jpg": encoded(".jpg")[:2] + b"\xff\xff" + encoded(".jpg")[2:],
    "padded.jpg": encoded(".jpg") + bytes(100_000),
    "followed.jpg": encoded(".jpg") + encoded(".jpg", picture(seed=1))[:-30],
    "large.jpg": encoded(".jpg", np.random.RandomState(0).randint(0, 256, (400, 400, 3), np.uint8)),
    "plain.png": encoded(".png"),
    "padded.png": encoded(".png") + b"junk",
    "grey.png": encoded(".png", picture()[..., 0]),
    "alpha.png": encoded(".png", np.dstack([picture(), picture()[..., 0]])),
    "deep.png": encoded(".png", picture().astype(np.uint16) * 257),
    "deep_grey.png": encoded(".png", picture()[..., 0].astype(np.uint16) * 200),
    "png_named.jpg": encoded(".png"),
    "jpeg_named.png": encoded(".jpg"),
    "bmp_named.jpg": encoded(".bmp"),
    "webp_named.jpg": encoded(".webp"),
    "tiff_named.png": encoded(".tiff"),
    "one_pixel.png": encoded(".png", picture(1, 1)),
}


@pytest.mark.parametrize("name", SOUND_IMAGES)
def test_sound_images(tmp_path, name):
    path = write(tmp_path / name, SOUND_IMAGES[name])
    icdar_formats.check_image(path)
    image = icdar_files.read_image(path)
    assert image.dtype == np.uint8 and image.shape[2] == 3
    np.testing.assert_array_equal(image, cv2.imread(path))


def test_exif_orientation_is_applied(tmp_path):
    plain = icdar_files.read_image(write(tmp_path / "a.jpg", SOUND_IMAGES["plain.jpg"]))
    turned = icdar_files.read_image(write(tmp_path / "b.jpg", SOUND_IMAGES["turned.jpg"]))
    np.testing.assert_array_equal(turned, cv2.rotate(plain, cv2.ROTATE_90_CLOCKWISE))


def test_high_bits_are_kept_of_deep_images(tmp_path):
    image = icdar_files.read_image(write(tmp_path / "a.png", SOUND_IMAGES["deep.png"]))
    np.testing.assert_array_equal(image, picture())


GIF = b"GIF89a\x01\x00\x01\x00\x80\x00\x00\x00\x00\x00\xff\xff\xff!\xf9\x04\x01\x00\x00\x00\x00,"
BROKEN_IMAGES = {
    "zero.jpg": (b"", "empty .0 bytes."),
    "cut.jpg": (encoded(".jpg")[:-20], "cut off"),
    "cut_by_two.jpg": (encoded(".jpg")[:-2], "cut off"),
    "cut_and_padded.jpg": (encoded(".jpg")[:-20] + bytes(500), "cut off"),
    "cut_large.jpg": (SOUND_IMAGES["large.jpg"][:-80_000], "cut off"),
    "cut_progressive.jpg": (SOUND_IMAGES["progressive.jpg"][:-20], "cut off"),
    "cut_thumbnail.jpg": (SOUND_IMAGES["thumbnail.jpg"][:-20], "cut off"),
    "cut_in_header.jpg": (SOUND_IMAGES["thumbnail.jpg"][:40], "cut off"),
    "start_only.jpg": (b"\xff\xd8\xff", "cut off"),
    "start_and_end.jpg": (b"\xff\xd8\xff\xd9" + bytes(20), "cut off"),
    "cut.png": (encoded(".png")[:-1], "cut off"),
    "cut_half.png": (encoded(".png")[: len(encoded(".png")) // 2], "cut off"),
    "cut_png_named.jpg": (encoded(".png")[:-20], "cut off"),
    "cut.webp.jpg": (encoded(".webp")[:-20], "not an image that OpenCV can decode"),
    "text.jpg": (b"this is text\n", "text file"),
    "accents.jpg": ("\ufeffé".encode(), "text file"),
    "page.jpg": (b"\n<!DOCTYPE html><html>404</html>", "web page"),
    "lfs.png": (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "git lfs pull"),
    "cut_gif.jpg": (GIF, "not an image"),
    "zeros.jpg": (bytes(1000), "not an image"),
}


@pytest.mark.parametrize("name", BROKEN_IMAGES)
@pytest.mark.parametrize("check", [icdar_files.read_image, icdar_formats.check_image])
def test_broken_images(tmp_path, name, check):
    content, reason = BROKEN_IMAGES[name]
    path = write(tmp_path / name, content)
    with pytest.raises(icdar_files.ImageError, match=f"{name}: .*{reason}") as caught:
        check(path)
    assert caught.value.problem.file == path and caught.value.problem.line is None


def test_damaged_png_and_too_many_pixels(tmp_path):
    data = bytearray(encoded(".png"))
    data[len(data) // 2] ^= 0x55
    with pytest.raises(icdar_files.ImageError, match="damaged"):
        icdar_files.read_image(write(tmp_path / "a.png", bytes(data)))
    data = bytearray(encoded(".bmp"))
    data[18:26] = struct.pack("<ii", 1 << 19, 1 << 19)
    with pytest.raises(icdar_files.ImageError, match="b.png: cannot be decoded"):
        icdar_files.read_image(write(tmp_path / "b.png", bytes(data)))


def test_images_that_are_not_there(tmp_path):
    os.mkfifo(tmp_path / "pipe.jpg")
    for name, reason in {"none.jpg": "no such file", "pipe.jpg": "not a file"}.items():
        with pytest.raises(icdar_files.ImageError, match=f"{name}: .*{reason}"):
            icdar_files.read_image(tmp_path / name)
    with pytest.raises(icdar_files.ImageError, match="not a file"):
        icdar_files.read_image(tmp_path)


@settings(deadline=None, max_examples=150)
@given(st.sampled_from([".jpg", ".png"]), st.integers(0, 10_000), st.binary(max_size=12))
def test_images_fuzz(tmp_path_factory, extension, cut, junk):
    """A file that was cut, with or without junk behind, decodes or gives the one error."""
    data = encoded(extension)
    path = tmp_path_factory.getbasetemp() / f"fuzz{extension}"
    path.write_bytes(data[: cut % len(data)] + junk)
    for check in (icdar_formats.check_image, icdar_files.read_image):
        try:
            check(path)
        except icdar_files.ImageError as error:
            assert error.problem.file == str(path)
        else:
            assert b"\xff\xd9" in junk or b"IEND" in data[: cut % len(data)]


# ----------------------------------------------------------------------- against the original


def test_samples_golden_annotations(tmp_path):
    """Annotation texts of the golden data folder, against what the original parsed from them."""
    files = json.loads(golden_path("east", "augment.json", whole=True).read_text()).get("files")
    if files is None:
        pytest.skip("this golden set has no annotations, which belong to photographs")
    compared = 0
    for entry in files:
        if entry.get("annotation") and entry.get("parsed_polys") is not None:
            polys, tags, _ = parse(tmp_path, entry["annotation"])
            np.testing.assert_array_equal(polys, np.array(entry["parsed_polys"], np.float32))
            np.testing.assert_array_equal(tags, entry["parsed_tags"])
            compared += 1
    assert compared


def test_sample_photographs():
    folder = samples_path()
    result = icdar_files.scan(folder, check_images=True, report=lambda *_: None)
    assert len(result.samples) >= 2 and not result.broken
    for image in result.images:
        np.testing.assert_array_equal(icdar_files.read_image(image), cv2.imread(image))
