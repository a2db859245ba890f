"""The check of a folder before a training."""

import pathlib
import subprocess
import sys

import cv2
import numpy as np
import pytest

from data import icdar

ROOT = pathlib.Path(__file__).resolve().parents[2]
QUAD = "20,20,120,20,120,60,20,60"


def _write_samples(folder, annotations):
    folder.mkdir(exist_ok=True)
    for number, text in enumerate(annotations, 1):
        cv2.imwrite(str(folder / f"img_{number}.png"), np.full((160, 240, 3), 90, np.uint8))
        if text is not None:
            (folder / f"img_{number}.txt").write_text(text)


def test_the_check_lists_problems_and_draws_samples(tmp_path, capsys):
    data = tmp_path / "data"
    _write_samples(data, [QUAD + ",word", QUAD + ",###", "1,2,3\n" + QUAD, None])
    (data / "broken.jpg").write_text("text")
    picture = tmp_path / "made" / "check.png"
    code = icdar.main(
        [
            f"--training_data_path={data}",
            f"--picture={picture}",
            "--num_samples=3",
            "--input_size=128",
        ]
    )
    printed = capsys.readouterr().out
    assert code == 0
    assert "img_3.txt:1" in printed and "broken.jpg" in printed and "img_4" in printed
    assert "3 of 5 images can be used" in printed
    drawn = cv2.imread(str(picture))
    assert drawn.shape == (3 * 128, 4 * 128, 3)
    assert (drawn[:, 128:] > 128).any()


@pytest.mark.parametrize("problem", ["missing folder", "broken images"])
def test_the_check_fails_where_nothing_can_be_trained(tmp_path, capsys, problem):
    if problem == "broken images":
        for number in range(3):
            (tmp_path / f"{number}.jpg").write_text("text")
            (tmp_path / f"{number}.txt").write_text(QUAD)
        path = tmp_path
    else:
        path = tmp_path / "no"
    assert icdar.main([f"--training_data_path={path}", "--picture="]) == 1
    assert str(path) in capsys.readouterr().err


@pytest.mark.parametrize("texts", [[QUAD], ["", ""]])
def test_the_check_draws_what_there_is(tmp_path, texts):
    _write_samples(tmp_path, texts)
    picture = tmp_path / "check.jpg"
    arguments = [f"--training_data_path={tmp_path}", f"--picture={picture}", "--input_size=64"]
    assert icdar.main(arguments) == 0
    assert cv2.imread(str(picture)).shape == (64 * len(texts), 4 * 64, 3)


def test_the_check_refuses_a_picture_of_no_kind(tmp_path, capsys):
    _write_samples(tmp_path, [QUAD])
    arguments = [f"--training_data_path={tmp_path}", f"--picture={tmp_path / 'check'}"]
    assert icdar.main(arguments + ["--input_size=64"]) == 1
    assert "pass --picture=FILE.png" in capsys.readouterr().err


def test_the_check_runs_as_a_module(tmp_path):
    command = [sys.executable, "-m", "data.icdar", f"--training_data_path={tmp_path}"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 1
    assert "holds no images" in result.stderr and "Traceback" not in result.stderr
