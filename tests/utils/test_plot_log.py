"""The training curve: which lines count, and what happens with a wrong file."""

import cv2
import numpy as np
import pytest

from utils import plot_log

LINE = (
    "Step {:06d}, model loss {:.4f}, total loss {:.4f}, 0.50 seconds/step, 56.00 examples/second\n"
)


def _write(path, points, extra=""):
    path.write_text(extra + "".join(LINE.format(*point) for point in points) + extra)
    return str(path)


def test_progress_lines_are_read_among_others(tmp_path):
    log = _write(
        tmp_path / "train.log", [(0, 0.5, 0.75), (10, 0.25, 0.5)], extra="2 towers\nStep by step\n"
    )
    steps, model_loss, total_loss = plot_log.read_log(log)
    np.testing.assert_array_equal(steps, [0, 10])
    np.testing.assert_array_equal(model_loss, [0.5, 0.25])
    np.testing.assert_array_equal(total_loss, [0.75, 0.5])


def test_a_longer_line_and_other_number_formats_are_read(tmp_path):
    log = tmp_path / "train.log"
    log.write_bytes(
        b"I0101 Step 7, model loss 1e-05, total loss nan, 1 seconds/step, waited 3 %\n\xff\xfe\r\n"
    )
    steps, model_loss, total_loss = plot_log.read_log(str(log))
    assert steps.tolist() == [7]
    assert model_loss[0] == 1e-5
    assert np.isnan(total_loss[0])


def test_the_last_mention_of_a_step_counts(tmp_path):
    log = _write(tmp_path / "train.log", [(10, 0.5, 1), (20, 0.4, 1), (10, 0.3, 1)])
    steps, model_loss, _ = plot_log.read_log(log)
    assert steps.tolist() == [10, 20]
    assert model_loss.tolist() == [0.3, 0.4]


@pytest.mark.parametrize("half_width", [0, 1, 5, 40])
def test_smoothing_is_the_mean_of_the_neighbours(half_width):
    values = np.random.RandomState(0).normal(size=30)
    expected = [
        values[max(0, i - half_width) : i + half_width + 1].mean() for i in range(len(values))
    ]
    np.testing.assert_allclose(plot_log.smooth(values, half_width), expected, atol=1e-12)


def test_smoothing_leaves_out_what_is_not_finite():
    smoothed = plot_log.smooth(np.array([1.0, np.nan, 3.0, np.inf, np.nan]), 1)
    np.testing.assert_array_equal(smoothed, [1.0, 2.0, 3.0, 3.0, np.nan])


@pytest.mark.parametrize("count", [1, 2, 300])
def test_the_curve_is_drawn(tmp_path, count):
    points = [(10 * i, 1 / (1 + i), 2 / (1 + i)) for i in range(count)]
    log = _write(tmp_path / "train.log", points)
    output = tmp_path / "new folder" / "curve.png"
    assert plot_log.main(["--log", log, "--output", str(output)]) == 0
    image = cv2.imread(str(output)).astype(int)
    blue, green, red = image[..., 0], image[..., 1], image[..., 2]
    height = image.shape[0]
    # The model loss is drawn in blue in the upper half, the total loss in red in the lower one.
    assert ((blue - red)[: height // 2] > 60).any()
    assert ((red - np.maximum(blue, green))[height // 2 :] > 60).any()
    assert not ((red - np.maximum(blue, green))[: height // 2] > 60).any()


@pytest.mark.parametrize("content", [None, b"", b"no progress here\n", b"\x00\xff" * 50])
def test_a_wrong_file_gives_one_sentence(tmp_path, capsys, content):
    log = tmp_path / "wrong.log"
    if content is not None:
        log.write_bytes(content)
    output = tmp_path / "curve.png"
    assert plot_log.main(["--log", str(log), "--output", str(output)]) == 1
    message = capsys.readouterr().err
    assert message.count("\n") == 1
    assert str(log) in message
    assert not output.exists()
