import numpy as np
import pytest
import tensorflow.compat.v1 as tf

from utils.towers import feeding


@pytest.mark.parametrize("batch, num_towers", [(6, 2), (7, 2), (5, 3), (4, 4), (9, 4), (3, 1)])
def test_slices_are_nearly_equal_and_their_weighted_means_give_that_of_the_batch(batch, num_towers):
    values = np.random.RandomState(batch).standard_normal([batch, 3]).astype(np.float32)
    with tf.Graph().as_default(), tf.Session() as session:
        points = tf.placeholder(tf.float32, [None, 3])
        labels = tf.placeholder(tf.int32, [None])
        slices, weights = feeding.split_evenly([points, labels], num_towers)
        assert all(pair[0].shape.as_list() == [None, 3] for pair in slices)
        slices, weights = session.run([slices, weights], {points: values, labels: np.arange(batch)})
    sizes = [len(label) for _, label in slices]
    assert sizes == feeding.split_sizes(batch, num_towers)
    assert max(sizes) - min(sizes) <= 1
    np.testing.assert_array_equal(np.concatenate([p for p, _ in slices]), values)
    np.testing.assert_array_equal(np.concatenate([n for _, n in slices]), np.arange(batch))
    mean = np.mean([w * p.mean(axis=0) for w, (p, _) in zip(weights, slices)], axis=0)
    np.testing.assert_allclose(mean, values.mean(axis=0), atol=1e-6)
    if batch % num_towers == 0:
        assert weights == [1.0] * num_towers


@pytest.mark.parametrize(
    "batch_size, num_towers, instead", [(30, 4, "28 or 32"), (1, 4, "use 4$"), (0, 1, "use 1$")]
)
def test_batches_that_cannot_be_split(batch_size, num_towers, instead):
    with pytest.raises(
        ValueError, match=f"batch_size {batch_size} .*{num_towers} towers.*{instead}"
    ):
        feeding.check_batch_size(batch_size, num_towers)
    feeding.check_batch_size(32, num_towers)


def test_few_samples_per_tower_are_warned_of(caplog):
    feeding.check_batch_size(6, 2)
    assert "3 sample(s) per tower are too few for batch norm" in caplog.text
    assert "a batch_size of 8 or more" in caplog.text
    caplog.clear()
    feeding.check_batch_size(8, 2)
    assert not caplog.text
