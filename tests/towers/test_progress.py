import pytest
import tensorflow.compat.v1 as tf

from utils.towers import checkpoints, progress


def test_progress_is_written_and_read(tmp_path):
    where = progress.Progress(7, epoch=3, trained=True, best_accuracy=0.5, settings={"batch": 8})
    where.write(tmp_path / f"model.ckpt-1{progress.SUFFIX}")
    assert progress.read_progress(str(tmp_path / "model.ckpt-1")) == where
    assert progress.read_progress(str(tmp_path / "model.ckpt-2")) is None


@pytest.mark.parametrize("content", ["", "{", '{"unknown": 1}', "[1, 2]", "3"])
def test_damaged_file_is_named(tmp_path, content):
    path = tmp_path / f"model.ckpt-1{progress.SUFFIX}"
    path.write_text(content)
    with pytest.raises(checkpoints.CheckpointError, match="model.ckpt-1.progress.json is damaged"):
        progress.read_progress(str(tmp_path / "model.ckpt-1"))


def test_regular_and_best_checkpoints(tmp_path):
    lines, side_files = [], {".side": lambda path: open(path, "w").close()}
    with tf.Graph().as_default(), tf.Session() as session:
        variable = tf.get_variable("v", [], use_resource=True)
        savers = progress.EpochCheckpoints(tmp_path, lines.append)
        session.run(variable.initializer)
        where = progress.Progress(seed=1)
        for step, accuracy in ((1, 0.2), (2, 0.1), (3, 0.2), (4, 0.3)):
            where.epoch = step
            savers.save_if_best(accuracy, session, step, where, side_files)
        savers.save(session, 4, where, side_files)
        savers.save(session, 4, where, side_files)  # nothing new
        where.trained = True
        savers.save(session, 4, where, side_files)
    (best,) = checkpoints.candidate_checkpoints(tmp_path / progress.BEST)
    assert best.endswith("model.ckpt-4")  # only the best is kept
    assert progress.read_progress(best).best_accuracy == 0.3
    (regular,) = checkpoints.candidate_checkpoints(tmp_path / "model.ckpt")
    assert progress.read_progress(regular).trained
    saved = [line.removeprefix("Model saved in file: ") for line in lines]
    assert saved == [str(tmp_path / "best/model.ckpt-1"), best, regular, regular]
