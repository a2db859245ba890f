"""multigpu_train.py as a user runs it: a process of its own, on small pictures."""

import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import textwrap

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

from data import data_util, synthetic_text

ROOT = pathlib.Path(__file__).resolve().parents[2]
TIMEOUT = 600


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data") / "pictures"
    synthetic_text.main([f"--output_dir={folder}", "--num_train=10", "--num_test=1"])
    return folder / "train"


def command(data, checkpoint_path, *flags):
    return [
        sys.executable,
        str(ROOT / "multigpu_train.py"),
        "--gpu_list=0,1",
        "--input_size=64",
        "--batch_size_per_gpu=2",
        "--num_readers=2",
        "--seed=3",
        "--random_scale=0.5,1",
        f"--training_data_path={data}",
        f"--checkpoint_path={checkpoint_path}",
        *flags,
    ]


def environment():
    return {**os.environ, "CUDA_VISIBLE_DEVICES": "", "TF_CPP_MIN_LOG_LEVEL": "2"}


def train(data, checkpoint_path, *flags, cwd):
    """Runs to the end; returns (exit code, stdout, stderr)."""
    done = subprocess.run(
        command(data, checkpoint_path, *flags),
        cwd=cwd,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
    )
    return done.returncode, done.stdout, done.stderr


def tensors(prefix):
    reader = tf.train.load_checkpoint(str(prefix))
    return {name: reader.get_tensor(name) for name in reader.get_variable_to_shape_map()}


def test_stopping_and_restoring_changes_nothing(data, tmp_path):
    """4 steps equal 2 steps, the folder moved, and 2 more: bit for bit, the data's order too."""
    code, out, err = train(data, tmp_path / "whole", "--max_steps=4", cwd=tmp_path)
    assert code == 0, err
    assert "2 tower(s) on /cpu:0, /cpu:1" in out
    assert "batch 2 per tower, 4 in all" in out
    assert "Step 000000, model loss " in out

    code, _, err = train(data, tmp_path / "half", "--max_steps=2", cwd=tmp_path)
    assert code == 0, err
    shutil.move(tmp_path / "half", tmp_path / "moved")
    code, out, err = train(data, "moved/", "--max_steps=4", "--restore", cwd=tmp_path)
    assert code == 0, err
    assert "starts anew" not in err

    whole, halves = (
        tensors(tmp_path / "whole/model.ckpt-4"),
        tensors(tmp_path / "moved/model.ckpt-4"),
    )
    assert whole.keys() == halves.keys()
    different = [name for name in whole if not np.array_equal(whole[name], halves[name])]
    assert not different
    assert whole["global_step"] == 4
    states = [
        data_util.load_reader_state(tmp_path / name / "model.ckpt-4.readers.npz")
        for name in ("whole", "moved")
    ]
    np.testing.assert_equal(*states)


def test_sigterm_saves_and_ends_and_an_old_folder_is_never_wiped(data, tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "precious").write_text("years of work")
    process = subprocess.Popen(
        command(data, folder, "--max_steps=100000", "--reader=process"),
        cwd=tmp_path,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    for line in process.stdout:
        if line.startswith("Step 000000"):
            break
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=TIMEOUT)
    assert process.returncode == 128 + signal.SIGTERM, err
    assert "Traceback" not in err
    prefix = out.strip().splitlines()[-1].removeprefix("saved ")
    step = int(prefix.rpartition("-")[2])
    assert tensors(prefix)["global_step"] == step >= 1
    state = data_util.load_reader_state(f"{prefix}.readers.npz")
    assert sum(state["batches"]) == step  # of the batches read ahead, only those trained on count
    with pytest.raises(ProcessLookupError):
        os.killpg(process.pid, 0)  # no reader process is left
    (aside,) = (path for path in tmp_path.iterdir() if path.name.startswith("run."))
    assert (aside / "precious").read_text() == "years of work"


def test_nan_stops_before_anything_is_saved(data, tmp_path):
    """One NaN in a geometry map of the second step, second tower."""
    script = """
        import sys
        from absl import app
        import multigpu_train
        from data import icdar

        make_reader = icdar.make_reader

        def poisoned(reader_index, **keywords):
            for batch in make_reader(reader_index, **keywords):
                if reader_index == 1:
                    batch[2][3][:] = 1  # all text, all of it counts
                    batch[4][3][:] = 1
                    batch[3][3][5, 5, 2] = float("nan")
                yield batch

        icdar.make_reader = poisoned
        multigpu_train.define_flags()
        app.run(multigpu_train.main)
    """
    flags = command(data, tmp_path / "run", "--max_steps=9", "--save_checkpoint_steps=1")[2:]
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script), *flags],
        cwd=ROOT,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
    )
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert "step 1: " in last and "geometry_AABB of tower 1 is not finite" in last
    assert str(data) in last
    saved = sorted(path.name for path in (tmp_path / "run").glob("model.ckpt-*.index"))
    assert saved == ["model.ckpt-1.index"]
    assert all(
        np.isfinite(value).all() for value in tensors(tmp_path / "run/model.ckpt-1").values()
    )


def test_wrong_flags_end_in_one_sentence_before_a_graph_is_built(data, tmp_path):
    """All in one process, because importing TensorFlow takes longest."""
    (tmp_path / "empty").mkdir()
    (tmp_path / "a_file").write_text("")
    cases = {
        "--training_data_path=/no/such/dir/": "/no/such/dir",
        f"--training_data_path={tmp_path / 'empty'}": "jpg",
        "--input_size=100": "--input_size=100 is not a multiple of 32; use 96 or 128",
        "--geometry=QUAD": "--geometry=QUAD has no labels",
        "--gpu_list=0,x": "--gpu_list=0,x",
        "--gpu_list=1,1": "--gpu_list=1,1",
        "--random_scale=0": "--random_scale=0",
        "--random_scale=1,nan": "--random_scale=1,nan must be positive numbers",
        "--learning_rate=0": "--learning_rate=0",
        "--learning_rate=inf": "--learning_rate=inf is not a finite number",
        f"--checkpoint_path={tmp_path / 'a_file'}": "a_file",
        f"--checkpoint_path={data}": f"--checkpoint_path {data}",
        "--restore": "to restore from",
        f"--restore --checkpoint_path={tmp_path / 'empty'}": "no checkpoint in",
        "--pretrained_model_path=/no/such/file": "/no/such/file",
    }
    script = """
        import json, sys
        from absl import flags
        import multigpu_train
        import tensorflow.compat.v1 as tf
        from utils.towers import loop

        multigpu_train.define_flags()
        multigpu_train.TrainGraph = None  # nobody gets that far
        said = {}
        with loop.StopSignals() as stop:
            for case in json.loads(sys.stdin.read()):
                flags.FLAGS.unparse_flags()
                flags.FLAGS([*sys.argv, *case.split()])
                try:
                    multigpu_train.train(stop)
                    said[case] = "nothing"
                except SystemExit as error:
                    said[case] = error.code
                for name, default in [("restore", False), ("pretrained_model_path", None),
                                      ("geometry", "RBOX"), ("learning_rate", 1e-4)]:
                    flags.FLAGS[name].value = default
        json.dump(said, sys.stdout)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script), *command(data, tmp_path / "new")[2:]],
        cwd=ROOT,
        env=environment(),
        input=json.dumps(list(cases)),
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
    )
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    for case, part in cases.items():
        assert said[case].startswith("error: "), (case, said[case])
        assert part in said[case], (case, said[case])
        assert "\n" not in said[case]
