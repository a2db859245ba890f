"""The layers on inputs small enough to work out by hand."""

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

from nets import layers, resnet_utils


def evaluate(build, variables=None):
    """Runs `build()` in a fresh graph; sets variables by name before."""
    with tf.Graph().as_default() as graph, tf.Session() as session:
        outputs = build()
        session.run(tf.global_variables_initializer())
        for variable in tf.global_variables():
            if variable.op.name in (variables or {}):
                variable.load(np.float32(variables[variable.op.name]), session)
        return session.run(outputs), graph


def names(graph, key):
    return [item.op.name for item in graph.get_collection(key)]


def counting_image(height, width):
    """[1, height, width, 1]: 0, 1, 2, ... row by row."""
    return tf.reshape(tf.range(height * width, dtype=tf.float32), [1, height, width, 1])


# --- batch norm ----------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [[4, 1, 1, 1], [4, 1], [1, 2, 2, 1]])
def test_batch_norm_in_training(shape):
    # batch 1, 3, 5, 7: mean 4, variance 5, with Bessel's correction 20/3
    def build():
        inputs = tf.reshape(tf.constant([1.0, 3.0, 5.0, 7.0]), shape)
        outputs = layers.batch_norm(inputs, decay=0.75, scale=True, epsilon=4.0)
        with tf.control_dependencies([tf.group(*tf.get_collection(tf.GraphKeys.UPDATE_OPS))]):
            moved = [v.read_value() for v in tf.global_variables() if "moving" in v.op.name]
        return outputs, moved

    (outputs, (mean, variance)), graph = evaluate(
        build,
        {
            "BatchNorm/gamma": [6.0],
            "BatchNorm/beta": [1.0],
            "BatchNorm/moving_mean": [8.0],
            "BatchNorm/moving_variance": [4.0],
        },
    )
    assert list(outputs.shape) == shape
    expected = [1 + 6 * x / 3 for x in (-3, -1, 1, 3)]  # standard deviation sqrt(5 + 4)
    np.testing.assert_allclose(outputs.ravel(), expected, 1e-5)
    np.testing.assert_allclose(mean, [0.75 * 8 + 0.25 * 4], 1e-6)
    np.testing.assert_allclose(variance, [0.75 * 4 + 0.25 * 20 / 3], 1e-6)
    assert names(graph, tf.GraphKeys.GLOBAL_VARIABLES) == [
        f"BatchNorm/{name}" for name in ("gamma", "beta", "moving_mean", "moving_variance")
    ]
    assert names(graph, tf.GraphKeys.TRAINABLE_VARIABLES) == ["BatchNorm/gamma", "BatchNorm/beta"]


def test_batch_norm_otherwise_uses_the_moving_statistics_and_leaves_them():
    def build():
        return layers.batch_norm(tf.constant([[2.0], [12.0]]), epsilon=1.0, is_training=False)

    outputs, graph = evaluate(
        build, {"BatchNorm/moving_mean": [2.0], "BatchNorm/moving_variance": [24.0]}
    )
    np.testing.assert_allclose(outputs, [[0.0], [2.0]], 1e-6)
    assert not graph.get_collection(tf.GraphKeys.UPDATE_OPS)
    assert "BatchNorm/gamma" not in names(graph, tf.GraphKeys.GLOBAL_VARIABLES)  # scale=False


def test_batch_norm_refuses_other_ranks():
    with tf.Graph().as_default(), pytest.raises(ValueError, match="needs rank 2 or 4"):
        layers.batch_norm(tf.zeros([2, 3, 4]))


# --- convolutions and pooling --------------------------------------------------------------------


def convolve(function, height, width, **arguments):
    """Convolution with a 3x3 kernel that picks its top left pixel: shows where windows begin."""
    kernel = np.zeros([3, 3, 1, 1])
    kernel[0, 0] = 1

    def build():
        return function(counting_image(height, width), 1, 3, scope="Conv", **arguments)

    outputs, _ = evaluate(build, {"Conv/weights": kernel})
    return outputs[0, :, :, 0]


def test_conv2d_same_pads_alike_on_both_sides():
    even = convolve(resnet_utils.conv2d_same, 4, 4, stride=2)
    np.testing.assert_array_equal(even, [[0, 0], [0, 5]])  # windows begin at pixels -1 and 1
    odd = convolve(resnet_utils.conv2d_same, 5, 5, stride=2)
    np.testing.assert_array_equal(odd, [[0, 0, 0], [0, 6, 8], [0, 16, 18]])
    plain = convolve(layers.conv2d, 4, 4, stride=2)  # TensorFlow's SAME begins at 0 and 2
    np.testing.assert_array_equal(plain, [[0, 2], [8, 10]])


def test_conv2d_same_with_a_rate_spreads_the_kernel():
    outputs = convolve(resnet_utils.conv2d_same, 5, 5, stride=2, rate=2)
    np.testing.assert_array_equal(outputs[1:, 1:], [[0, 2], [10, 12]])  # from pixels -2, 0, 2
    outputs = convolve(resnet_utils.conv2d_same, 4, 4, stride=1, rate=2)
    np.testing.assert_array_equal(outputs[2:, 2:], [[0, 1], [4, 5]])


def test_subsample_and_max_pool():
    def build():
        image = counting_image(3, 4)
        return (
            resnet_utils.subsample(image, 2),
            layers.max_pool2d(image, 2),
            layers.max_pool2d(image, [3, 3], stride=2, padding="SAME"),
        )

    (subsampled, valid, same), _ = evaluate(build)
    np.testing.assert_array_equal(subsampled[0, :, :, 0], [[0, 2], [8, 10]])
    np.testing.assert_array_equal(valid[0, :, :, 0], [[5, 7]])
    np.testing.assert_array_equal(same[0, :, :, 0], [[6, 7], [10, 11]])


def test_conv2d_has_biases_or_a_normalizer():
    def build():
        image = tf.ones([2, 2, 2, 3])
        layers.conv2d(image, 4, [1, 2])
        layers.conv2d(image, 5, 1, normalizer_fn=layers.batch_norm)
        return layers.conv2d(image, 1, 1, biases_initializer=None)

    _, graph = evaluate(build)
    shapes = {v.op.name: v.shape.as_list() for v in graph.get_collection("trainable_variables")}
    assert shapes == {
        "Conv/weights": [1, 2, 3, 4],
        "Conv/biases": [4],
        "Conv_1/weights": [1, 1, 3, 5],
        "Conv_1/BatchNorm/beta": [5],
        "Conv_2/weights": [1, 1, 3, 1],
    }


def test_fully_connected():
    def build():
        return layers.fully_connected(tf.constant([[1.0, 2.0]]), 2)

    outputs, graph = evaluate(
        build,
        {
            "fully_connected/weights": [[1, -1], [10, -10]],
            "fully_connected/biases": [0.5, 0.5],
        },
    )
    np.testing.assert_array_equal(outputs, [[21.5, 0.0]])
    assert names(graph, tf.GraphKeys.MODEL_VARIABLES) == names(graph, "trainable_variables")


# --- regularization, reuse, defaults -------------------------------------------------------------


def test_l2_is_half_the_sum_of_squares_of_the_weights_alone():
    def build():
        regularizer = layers.l2_regularizer(0.5)
        layers.conv2d(tf.zeros([1, 1, 1, 1]), 2, 1, weights_regularizer=regularizer)
        return tf.get_collection(tf.GraphKeys.REGULARIZATION_LOSSES)

    losses, _ = evaluate(build, {"Conv/weights": [[[[3, 4]]]], "Conv/biases": [9, 9]})
    np.testing.assert_allclose(losses, [0.5 * 25 / 2])


def test_l2_scale_zero_is_none_and_negative_is_refused():
    assert layers.l2_regularizer(0.0) is None
    with pytest.raises(ValueError, match="needs a number >= 0"):
        layers.l2_regularizer(-1e-5)


@pytest.mark.parametrize("reuse", [True, tf.AUTO_REUSE])
def test_reuse_adds_no_variable_and_no_regularization_loss(reuse):
    with tf.Graph().as_default() as graph:

        def tower(reuse):
            with tf.variable_scope(tf.get_variable_scope(), reuse=reuse):
                return layers.conv2d(
                    tf.ones([2, 1, 1, 3]),
                    4,
                    1,
                    normalizer_fn=layers.batch_norm,
                    weights_regularizer=layers.l2_regularizer(1.0),
                    scope="conv",
                )

        tower(None)
        keys = [key for key in graph.get_all_collection_keys() if key != tf.GraphKeys.UPDATE_OPS]
        before = {key: len(graph.get_collection(key)) for key in keys}
        tower(reuse)
        assert {key: len(graph.get_collection(key)) for key in keys} == before
        assert before[tf.GraphKeys.REGULARIZATION_LOSSES] == 1
        assert len(graph.get_collection(tf.GraphKeys.UPDATE_OPS)) == 4  # each tower's own two


def test_a_kernel_is_read_once_for_layer_and_regularizer():
    with tf.Graph().as_default() as graph:
        layers.conv2d(tf.ones([1, 1, 1, 1]), 1, 1, weights_regularizer=layers.l2_regularizer(1.0))
        losses = graph.get_collection(tf.GraphKeys.REGULARIZATION_LOSSES)
        (l2,) = [i.op for i in losses[0].op.inputs if i.op.type == "L2Loss"]
        (conv,) = [op for op in graph.get_operations() if op.type == "Conv2D"]
        assert conv.inputs[1] is l2.inputs[0]


def test_arg_scope_nests_and_ends():
    @layers.add_arg_scope
    def layer(a=0, b=0):
        return a, b

    with layers.arg_scope([layer], a=1, b=1):
        with layers.arg_scope([layer], b=2):
            assert layer() == (1, 2)
            assert layer(b=3) == (1, 3)
        assert layer() == (1, 1)
    assert layer() == (0, 0)


def test_arg_scope_refuses_unknown_arguments():
    with pytest.raises(ValueError, match=r"\['wieghts'\] for conv2d"):
        with layers.arg_scope([layers.conv2d], wieghts=1):
            pass


@pytest.mark.parametrize("shape", [[3, 3, 64, 128], [500, 300]])
def test_initial_values_have_slims_distributions(shape):
    fan_in, fan_out = np.prod(shape[:-1]), np.prod(shape[:-2]) * shape[-1]

    def build():
        tf.set_random_seed(7)
        return layers.xavier_initializer(shape), layers.variance_scaling_initializer(shape)

    (uniform, normal), _ = evaluate(build)
    limit, sigma = np.sqrt(6 / (fan_in + fan_out)), np.sqrt(2.6 / fan_in)
    for values, bound, std in (
        (uniform, limit, limit / 3**0.5),
        (normal, 2 * sigma, 0.8796 * sigma),
    ):
        assert 0.999 * bound < np.abs(values).max() <= bound * 1.000001
        np.testing.assert_allclose(values.std(), std, 0.01)
        assert abs(values.mean()) < 5 * std / values.size**0.5
