import json

import pytest
import tensorflow.compat.v1 as tf

from tests.golden_sets import golden_path
from utils.towers import schedules


def test_golden_schedules():
    """Every row of every case: learning rate and batch-norm decay before the step."""
    cases = json.loads(golden_path("pointnet2", "schedule.json").read_text())
    checked = 0
    for case in cases.values():
        for name in ("bn_decay_clip", "bn_decay_decay_rate", "bn_init_decay"):
            assert case[name] == getattr(schedules, name.upper())
        with tf.Graph().as_default():
            batch = tf.placeholder(tf.float32, [])
            learning_rate = schedules.get_learning_rate(
                batch,
                learning_rate=case["base_learning_rate"],
                batch_size=case["batch_size"],
                decay_step=case["decay_step"],
                decay_rate=case["decay_rate"],
            )
            bn_decay = schedules.get_bn_decay(
                batch, batch_size=case["batch_size"], decay_step=case["decay_step"]
            )
            with tf.Session() as session:
                for row in case["rows"]:
                    found = session.run([learning_rate, bn_decay], {batch: row["step"]})
                    expected = [row["learning_rate"], row["bn_decay"]]
                    assert found == pytest.approx(expected, rel=1e-6), row["step"]
                    checked += 1
    assert checked


def test_both_schedules_stop_at_their_limits():
    with tf.Graph().as_default(), tf.Session() as session:
        rate = schedules.get_learning_rate(
            1e6, learning_rate=1.0, batch_size=1, decay_step=1, decay_rate=0.5
        )
        decay = schedules.get_bn_decay(1e6, batch_size=1, decay_step=1)
        assert session.run([rate, decay]) == pytest.approx([1e-5, 0.99])
