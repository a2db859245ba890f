import hypothesis
import numpy as np
import pytest
import tensorflow.compat.v1 as tf
from hypothesis import strategies as st

from utils.towers import gradients


def variables(*names):
    return [tf.get_variable(name, [3], use_resource=True) for name in names]


@hypothesis.settings(deadline=None, max_examples=15)
@hypothesis.given(num_towers=st.integers(1, 5), seed=st.integers(0, 1000))
def test_add_n_equals_stack_mean(num_towers, seed):
    rng = np.random.RandomState(seed)
    values = rng.standard_normal((num_towers, 2, 3)).astype(np.float32)
    with tf.Graph().as_default(), tf.Session() as session:
        v = variables("a", "b")
        tower_grads = [[(tf.constant(g), x) for g, x in zip(tower, v)] for tower in values]
        working = gradients.average_gradients(tower_grads)
        reference = gradients.stack_mean_gradients(tower_grads)
        assert [x.name for _, x in working] == [x.name for _, x in reference] == ["a:0", "b:0"]
        for (mine, _), (stacked, _) in zip(working, reference):
            np.testing.assert_allclose(*session.run((mine, stacked)), rtol=1e-6, atol=1e-7)
        np.testing.assert_allclose(
            session.run([g for g, _ in working]), values.mean(axis=0), rtol=1e-5, atol=1e-6
        )


def test_none_in_every_tower_stays_none_and_its_variable_unchanged():
    with tf.Graph().as_default(), tf.Session() as session:
        a, unused = variables("a", "unused")
        opt = tf.train.GradientDescentOptimizer(1.0)
        tower_grads = [opt.compute_gradients(tf.reduce_sum(a) * k, [a, unused]) for k in (1.0, 3.0)]
        average = gradients.average_gradients(tower_grads)
        assert average[1] == (None, unused)
        train = opt.apply_gradients(average)
        session.run(tf.global_variables_initializer())
        before = session.run([a, unused])
        session.run(train)
        after = session.run([a, unused])
    np.testing.assert_allclose(after[0], before[0] - 2, rtol=1e-6)
    np.testing.assert_array_equal(after[1], before[1])


def test_none_in_one_tower_counts_as_zero():
    with tf.Graph().as_default(), tf.Session() as session:
        (a,) = variables("a")
        average = gradients.average_gradients([[(tf.constant([2.0, 4.0, 6.0]), a)], [(None, a)]])
        np.testing.assert_allclose(session.run(average[0][0]), [1, 2, 3])


@pytest.mark.parametrize("mixed", [False, True])
def test_sparse_equals_dense(mixed):
    """Towers with an embedding look-up; rows repeat within and between towers."""
    rows = [[0, 2, 2], [2, 1, 0]]
    with tf.Graph().as_default(), tf.Session() as session:
        table = tf.get_variable("table", [4, 2], use_resource=True)
        opt = tf.train.GradientDescentOptimizer(0.5)
        losses = [tf.reduce_sum(tf.square(tf.gather(table, r))) for r in rows]
        sparse = [opt.compute_gradients(loss, [table]) for loss in losses]
        assert all(isinstance(pairs[0][0], tf.IndexedSlices) for pairs in sparse)
        dense = [[(tf.convert_to_tensor(g), v) for g, v in pairs] for pairs in sparse]
        if mixed:
            sparse[0] = dense[0]
        average = gradients.average_gradients(sparse)
        assert isinstance(average[0][0], tf.IndexedSlices) != mixed
        expected = gradients.stack_mean_gradients(dense)
        session.run(tf.global_variables_initializer())
        mine, reference = session.run(
            [tf.convert_to_tensor(average[0][0]), tf.convert_to_tensor(expected[0][0])]
        )
        np.testing.assert_allclose(mine, reference, rtol=1e-6)
        before = session.run(table)
        session.run(opt.apply_gradients(average))
        np.testing.assert_allclose(session.run(table), before - 0.5 * reference, rtol=1e-6)


def test_towers_that_disagree_are_named():
    with tf.Graph().as_default():
        a, b, c = variables("a", "b", "c")
        g = tf.zeros([3])
        with pytest.raises(
            ValueError, match=r"tower 1 .*only tower 0: \['b'\].*only tower 1: \['c'\]"
        ):
            gradients.average_gradients([[(g, a), (g, b)], [(g, a), (g, c)]])
        with pytest.raises(ValueError, match="another order"):
            gradients.average_gradients([[(g, a), (g, b)], [(g, b), (g, a)]])
        with pytest.raises(ValueError, match="no tower"):
            gradients.average_gradients([])


def test_one_tower_adds_no_op():
    with tf.Graph().as_default() as graph:
        a, b = variables("a", "b")
        pairs = [(tf.zeros([3]), a), (tf.zeros([3]), b)]
        before = len(graph.get_operations())
        assert gradients.average_gradients([pairs]) == pairs
        assert len(graph.get_operations()) == before


def test_averaging_takes_the_same_number_of_ops_for_any_number_of_towers():
    def count(num_towers):
        with tf.Graph().as_default() as graph:
            v = variables("a", "b")
            tower_grads = [[(tf.zeros([3]), x) for x in v] for _ in range(num_towers)]
            before = len(graph.get_operations())
            gradients.average_gradients(tower_grads)
            return len(graph.get_operations()) - before

    assert count(2) <= count(3) == count(4) == count(8)


def test_regularization_added_once_equals_its_part_in_every_tower():
    with tf.Graph().as_default(), tf.Session() as session:
        a, b, unused = variables("a", "b", "unused")
        opt = tf.train.GradientDescentOptimizer(1.0)
        regularization = tf.nn.l2_loss(a) + tf.nn.l2_loss(unused)
        losses = [tf.reduce_sum(tf.square(a) * k + b) for k in (1.0, 3.0, 4.0)]
        inside = gradients.average_gradients(
            [opt.compute_gradients(loss + regularization) for loss in losses]
        )
        outside = gradients.add_regularization(
            gradients.average_gradients([opt.compute_gradients(loss) for loss in losses]),
            regularization,
        )
        session.run(tf.global_variables_initializer())
        for (g, v), (h, w) in zip(inside, outside):
            assert v is w
            np.testing.assert_allclose(*session.run((g, h)), rtol=1e-6)
