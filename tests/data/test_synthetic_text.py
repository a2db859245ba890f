"""The synthetic data set: layout, file format, same bytes for a seed, nothing overwritten."""

import argparse
import dataclasses
import os

import pytest

from data import synthetic_text
from data.synthetic_scenes import SceneOptions

SMALL = ["--num_train", "6", "--num_test", "3", "--image_size", "96x64", "--min_word_height", "12"]
SMALL += ["--max_word_height", "20"]


def _files(folder):
    found = {}
    for parent, _, names in os.walk(folder):
        for name in names:
            with open(os.path.join(parent, name), "rb") as file:
                found[os.path.relpath(os.path.join(parent, name), folder)] = file.read()
    return found


def test_same_arguments_give_the_same_bytes(tmp_path):
    for name in ("a", "b"):
        assert synthetic_text.main(["--output_dir", str(tmp_path / name), *SMALL]) == 0
    assert synthetic_text.main(["--output_dir", str(tmp_path / "c"), *SMALL, "--seed", "1"]) == 0
    first, second, other = (_files(tmp_path / name) for name in "abc")
    assert first == second
    changed = [name for name in first if first[name] != other[name]]
    assert len([name for name in changed if name.endswith(".jpg")]) == 9


def test_a_picture_does_not_depend_on_how_many_there_are(tmp_path):
    options = SceneOptions(width=96, height=64, min_word_height=12, max_word_height=20)
    synthetic_text.make_dataset(str(tmp_path / "few"), 2, 1, options)
    synthetic_text.make_dataset(str(tmp_path / "many"), 5, 3, options)
    few, many = _files(tmp_path / "few"), _files(tmp_path / "many")
    for name in few:
        if name != synthetic_text.MANIFEST:
            assert few[name] == many[name]


def test_layout_and_text_format(tmp_path):
    root = tmp_path / "set"
    options = SceneOptions(width=128, height=96, min_word_height=14, max_word_height=24)
    options = dataclasses.replace(options, dont_care_share=0.3, background_share=0.2)
    assert synthetic_text.make_dataset(str(root), 60, 20, options)
    train, test = root / "train", root / "test"
    numbers = range(1, 61)
    assert {path.name for path in train.iterdir()} == {f"img_{i}.jpg" for i in numbers} | {
        f"gt_img_{i}.txt" for i in numbers
    }
    assert {path.name for path in (test / "images").iterdir()} == {
        f"img_{i}.jpg" for i in range(1, 21)
    }
    assert {path.name for path in (test / "gt").iterdir()} == {
        f"gt_img_{i}.txt" for i in range(1, 21)
    }
    texts = [path.read_bytes() for path in train.glob("*.txt")]
    texts += [path.read_bytes() for path in (test / "gt").iterdir()]
    marked = [text.startswith(b"\xef\xbb\xbf") for text in texts]
    assert any(marked) and not all(marked)
    transcriptions = []
    for text in texts:
        decoded = text.decode("utf-8-sig")
        assert decoded.count("\n") == decoded.count("\r\n")
        for line in decoded.splitlines():
            fields = line.split(",", 8)
            corners = [int(field) for field in fields[:8]]
            assert min(corners) >= 0 and max(corners) < 128
            transcriptions.append(fields[8])
    assert "###" in transcriptions
    assert any("," in text for text in transcriptions)
    assert any(not path.read_text("utf-8-sig").strip() for path in train.glob("*.txt"))
    assert all(path.read_text("utf-8-sig").strip() for path in (test / "gt").iterdir())


def test_its_own_folder_is_left_as_it_is(tmp_path, capsys):
    command = ["--output_dir", str(tmp_path / "set"), *SMALL]
    assert synthetic_text.main(command) == 0
    before = _files(tmp_path / "set")
    stamp = os.stat(tmp_path / "set" / "train" / "img_1.jpg").st_mtime_ns
    assert synthetic_text.main(command) == 0
    assert "already" in capsys.readouterr().out
    assert os.stat(tmp_path / "set" / "train" / "img_1.jpg").st_mtime_ns == stamp
    assert synthetic_text.main([*command, "--seed", "5"]) == 1
    assert str(tmp_path / "set") in capsys.readouterr().err
    assert _files(tmp_path / "set") == before


@pytest.mark.parametrize("manifest", [None, "", "[]", "{}", "not json"])
def test_a_foreign_folder_is_refused(tmp_path, capsys, manifest):
    foreign = tmp_path / "mine"
    foreign.mkdir()
    (foreign / "thesis.txt").write_text("precious")
    if manifest is not None:
        (foreign / synthetic_text.MANIFEST).write_text(manifest)
    before = _files(foreign)
    assert synthetic_text.main(["--output_dir", str(foreign), *SMALL]) == 1
    message = capsys.readouterr().err
    assert message.count("\n") == 1 and str(foreign) in message
    assert _files(foreign) == before
    assert os.listdir(tmp_path) == ["mine"]


def test_an_empty_folder_and_a_trailing_slash_are_fine(tmp_path):
    (tmp_path / "set").mkdir()
    assert synthetic_text.main(["--output_dir", f"{tmp_path / 'set'}{os.sep}", *SMALL]) == 0
    assert os.listdir(tmp_path) == ["set"]
    assert (tmp_path / "set" / "train" / "img_6.jpg").is_file()


def test_nothing_is_left_of_a_run_that_breaks(tmp_path, monkeypatch):
    def broken(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(synthetic_text, "annotation_text", broken)
    assert synthetic_text.main(["--output_dir", str(tmp_path / "set"), *SMALL]) == 1
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    "arguments",
    [
        ["--num_train", "-1"],
        ["--seed", "-1"],
        ["--image_size", "16"],
        ["--max_words", "0"],
        ["--max_words", "100000"],
        ["--image_size", "100000"],
        ["--max_angle", "nan"],
        ["--dont_care_share", "7"],
        ["--background_share", "-3"],
        ["--min_word_height", "40", "--max_word_height", "20"],
        ["--max_word_height", "300"],
        ["--min_contrast", "200"],
    ],
)
def test_wrong_values_give_one_sentence(tmp_path, capsys, arguments):
    assert synthetic_text.main(["--output_dir", str(tmp_path / "set"), *arguments]) == 1
    message = capsys.readouterr().err
    assert message.count("\n") == 1
    assert arguments[-1] in message
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("text, size", [("160", (160, 160)), ("192x128", (192, 128))])
def test_picture_sizes(text, size):
    assert synthetic_text.parse_size(text) == size


@pytest.mark.parametrize("text", ["", "x", "1x2x3", "-5", "wide", "10x"])
def test_wrong_picture_sizes(text):
    with pytest.raises(argparse.ArgumentTypeError, match="picture size"):
        synthetic_text.parse_size(text)
