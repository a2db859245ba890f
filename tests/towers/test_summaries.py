import shutil

import tensorflow.compat.v1 as tf

from utils.towers import summaries


def steps(folder):
    return [
        event.step
        for path in sorted(folder.glob("events.out.tfevents.*"))
        for event in tf.train.summary_iterator(str(path))
        if event.HasField("summary")
    ]


def test_a_deleted_folder_gets_a_new_event_file(tmp_path):
    folder = tmp_path / "run[1]"
    with tf.Graph().as_default():
        summary = tf.Summary(value=[tf.Summary.Value(tag="loss", simple_value=1.0)])
        writer = summaries.SummaryWriter(str(folder))
        for step in (1, 2):
            writer.add_summary(summary.SerializeToString(), step)
        writer.flush()
        assert steps(folder) == [1, 2]
        shutil.rmtree(folder)
        for step in (3, 4):
            writer.add_summary(summary.SerializeToString(), step)
        writer.close()
    assert steps(folder) == [3, 4]
