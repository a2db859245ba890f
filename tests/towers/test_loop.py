import os
import pathlib
import signal
import subprocess
import sys
import textwrap

import pytest
import tensorflow.compat.v1 as tf

from utils.towers import context, devices, loop

ROOT = pathlib.Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("values", "tower", "term"),
    [
        ([[1, 2], [3, 4]], None, None),
        ([[1, float("nan")], [3, 4]], 0, "second"),
        ([[1, 2], [float("inf"), float("nan")]], 1, "first"),
        ([[1, 2], [3, -float("inf")]], 1, "second"),
    ],
)
def test_non_finite_loss_is_named(values, tower, term):
    place = devices.Devices("CPU", (0, 1))
    towers = []
    with tf.Graph().as_default(), tf.Session(config=place.session_config()) as session:
        for i in range(2):
            with context.tower_context(place, i) as t:
                for name, value in zip(("first", "second"), values[i]):
                    context.add_loss_term(tf.constant(float(value), name=name))
            towers.append(t)
        position = session.run(loop.first_nonfinite(towers))
    files = ["a.jpg", "b.jpg", "c.jpg", "d.jpg"]
    if tower is None:
        loop.check_finite(position, towers, step=7, files=files)
        return
    own = ["a.jpg, b.jpg", "c.jpg, d.jpg"][tower]
    with pytest.raises(
        loop.NonFiniteLossError, match=f"step 7: {term} of tower {tower} .*batch: {own}[.]"
    ):
        loop.check_finite(position, towers, step=7, files=files)


def test_progress_line(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(loop.time, "time", lambda: now[0])
    progress = loop.Progress(examples_per_step=28)
    for _ in range(10):
        progress.step(waited_seconds=0.125)
    now[0] = 105.0
    assert progress.line(10, 0.0123, 0.1234) == (
        "Step 000010, model loss 0.0123, total loss 0.1234, 0.50 seconds/step,"
        " 56.00 examples/second, 25% waiting for input"
    )
    progress.step(waited_seconds=0.0)
    now[0] = 106.0
    assert "1.00 seconds/step, 28.00 examples/second, 0% waiting" in progress.line(11, 0, 0)


SCRIPT = """
    import sys, time
    from utils.towers import loop

    with loop.StopSignals() as stop:
        stop.at_abort(lambda: print("aborted", flush=True))
        if sys.argv[1] == "build":
            try:
                print("building", flush=True)
                time.sleep(60)
            except loop.StopRequested:
                sys.exit(stop.exit_code)
        stop.defer()
        print("training", flush=True)
        if sys.argv[1] == "step":
            deadline = time.monotonic() + 60
            while not stop.requested and time.monotonic() < deadline:
                time.sleep(0.01)  # a step: must not be broken off
            print("finished", flush=True)
        if sys.argv[1] == "blocked":
            # C code that does not return to Python, as a long session.run
            import ctypes
            libc = ctypes.CDLL(None)
            for _ in range(60):
                libc.usleep(900000)
        if sys.argv[1] == "wait":
            try:
                with stop.interruptible():
                    time.sleep(60)
            except loop.StopRequested:
                print("interrupted", flush=True)
        sys.exit(stop.exit_code)
"""


def start(mode, until):
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(SCRIPT), mode],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    while process.stdout.readline().strip() != until:
        assert process.poll() is None
    return process


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize(
    ("mode", "until", "said"),
    [
        ("build", "building", ""),
        ("step", "training", "finished"),
        ("wait", "training", "interrupted"),
    ],
)
def test_one_signal_stops_cleanly(number, mode, until, said):
    process = start(mode, until)
    os.kill(process.pid, number)
    out, err = process.communicate(timeout=50)
    assert process.returncode == 128 + number
    assert said in out
    assert "Traceback" not in err


def test_second_ctrl_c_exits_at_once_even_inside_c_code():
    process = start("blocked", "training")
    os.kill(process.pid, signal.SIGINT)
    while "Ctrl-C again" not in process.stderr.readline():
        assert process.poll() is None
    os.kill(process.pid, signal.SIGINT)
    out, _ = process.communicate(timeout=50)
    assert process.returncode == 130
    assert "aborted" in out
