"""Point-cloud ops of PointNet++ in plain TensorFlow: sampling, neighbourhoods, interpolation.

Names, argument order and results are those of the compiled ops of the original (tf_ops/sampling,
tf_ops/grouping and tf_ops/3d_interpolation of charlesq34/pointnet2), equal indices included where
points tie. Nothing has to be compiled by hand.

The searches run as XLA programs inside the surrounding graph, on the device in force where they are
called: `farthest_point_sample`, `query_ball_point`, `select_top_k`, `knn_point` and `three_nn` take
`jit_compile`, None (default) for XLA where TensorFlow has it, False for ordinary kernels and
`tf.while_loop` on a device that XLA can't serve (same indices, several times slower). XLA compiles
once per device and set of shapes, at the first step that meets them; a fraction of a second each.

Distances are sums of squared differences in float32: |a|^2 + |b|^2 - 2ab loses the digits that
decide between near neighbours. As in the original, gradients flow through `gather_point`,
`group_point` and `three_interpolate` to the points only; all other results are constants to them.
Results repeat exactly; on a GPU the sums of these gradients do so only under
`tf.config.experimental.enable_op_determinism`.
"""

import numpy as np
import tensorflow.compat.v1 as tf

from nets.pointnet2.op_support import (
    FEATURES,
    count_argument,
    search_program,
    sum_by_index,
    take,
    tensor_argument,
)

FPS_THREADS = 512  # of the original's kernel, where they decide ties
FPS_FAR = np.float32(1e38)  # distance to the samples before there is one
WORD = 32  # bits


def _squared_distances(queries, points):
    """[batch, M, N] float32 squared distances of [batch, M, C] to [batch, N, C]."""
    return tf.add_n(
        [
            tf.math.squared_difference(query[:, :, tf.newaxis], point[:, tf.newaxis, :])
            for query, point in zip(tf.unstack(queries, axis=2), tf.unstack(points, axis=2))
        ]
    )


def _squared_distances_to(centre, coordinates):
    """[batch, N] float32 squared distances of [batch, C] to C x [batch, N] coordinates."""
    return tf.add_n(
        [
            tf.math.squared_difference(values, centre[:, axis, tf.newaxis])
            for axis, values in enumerate(coordinates)
        ]
    )


# --- sampling -------------------------------------------------------------------------------------


def farthest_point_sample(npoint, inp, *, jit_compile=None):
    """Picks points one after the other, each the farthest from those picked before.

    Starts with point 0. Of equally far points the one with the smallest index modulo 512 wins, then
    the smallest index: the order in which the 512 threads of the original's kernel compare. When
    every point (or a duplicate of it) is taken, index 0 repeats; so it does for npoint > N.

    Args:
        npoint: number of points to pick.
        inp: [batch, N, 3] float32 coordinates.
        jit_compile: see the module.

    Returns:
        [batch, npoint] int32 indices into N.

    Raises:
        ValueError: npoint below 1, or `inp` of another type or rank.
    """
    npoint = count_argument("farthest_point_sample", "npoint", npoint)
    inp = tensor_argument("farthest_point_sample", "inp", inp, ("batch", "N", 3))

    def sample(inp):
        batch, number = tf.unstack(tf.shape(inp)[:2])
        coordinates = tf.unstack(inp, num=3, axis=2)  # 3 x [batch, N]
        rounds = (number + FPS_THREADS - 1) // FPS_THREADS
        index = tf.range(number)
        order = (index % FPS_THREADS * rounds + index // FPS_THREADS)[tf.newaxis]

        def pick(step, last, nearest, picked):
            centre = tf.gather(inp, last, batch_dims=1)  # [batch, 3]
            nearest = tf.minimum(nearest, _squared_distances_to(centre, coordinates))
            farthest = tf.reduce_max(nearest, axis=1, keepdims=True)
            # Two plain reductions: XLA turns them into vector code, which it doesn't for argmax.
            first = tf.reduce_min(
                tf.where_v2(tf.equal(nearest, farthest), order, tf.int32.max), axis=1
            )
            found = first % rounds * FPS_THREADS + first // rounds
            found = tf.minimum(found, number - 1)  # coordinates that aren't numbers equal nothing
            picked = tf.tensor_scatter_nd_update(picked, [[step]], found[tf.newaxis])
            return step + 1, found, nearest, picked

        start = (
            tf.constant(1),
            tf.zeros([batch], tf.int32),
            tf.fill([batch, number], FPS_FAR),
            tf.zeros([npoint, batch], tf.int32),
        )
        picked = tf.while_loop(lambda step, *_: step < npoint, pick, start)[-1]
        return tf.transpose(picked)

    with tf.name_scope("farthest_point_sample"):
        picked = search_program(sample, [inp], jit_compile)
        picked.set_shape([inp.shape[0], npoint])
        return picked


def gather_point(inp, idx):
    """Points by their indices; the gradient of a point is the sum over where it was taken.

    Args:
        inp: [batch, N, 3] float32.
        idx: [batch, npoint] int32 indices into N.

    Returns:
        [batch, npoint, 3] float32.

    Raises:
        ValueError: an argument of another type or rank.
    """
    inp = tensor_argument("gather_point", "inp", inp, ("batch", "N", 3))
    idx = tensor_argument("gather_point", "idx", idx, ("batch", "npoint"), tf.int32)
    with tf.name_scope("gather_point"):
        return take(inp, idx)


def prob_sample(inp, inpr):
    """Draws categories in proportion to their weights, from given uniform numbers.

    Args:
        inp: [batch, categories] float32 weights, not negative; their sum need not be 1.
        inpr: [batch, npoints] float32 uniform numbers in [0, 1].

    Returns:
        [batch, npoints] int32: the first category at which the running sum of the weights reaches
        `inpr` times the whole sum.

    Raises:
        ValueError: an argument of another type or rank.
    """
    inp = tensor_argument("prob_sample", "inp", inp, ("batch", "categories"))
    inpr = tensor_argument("prob_sample", "inpr", inpr, ("batch", "npoints"))
    with tf.name_scope("prob_sample"):
        reached = tf.cumsum(tf.stop_gradient(inp), axis=1)
        wanted = tf.stop_gradient(inpr) * reached[:, -1:]
        return tf.minimum(tf.searchsorted(reached, wanted), tf.shape(inp)[1] - 1)


# --- grouping -------------------------------------------------------------------------------------


def squared_radius(radius):
    """The float32 t for which d2 < t says the same as max(sqrt(d2), 1e-20) < radius in float32."""
    with np.errstate(over="ignore", under="ignore"):
        radius = np.float32(radius)
        if radius <= np.float32(1e-20):
            return np.float32(0)
        bound = radius * radius
        while np.sqrt(bound) < radius:
            bound = np.nextafter(bound, np.float32(np.inf))
        while np.sqrt(np.nextafter(bound, np.float32(0))) >= radius:
            bound = np.nextafter(bound, np.float32(0))
    return bound


def _pack_bits(mask):
    """[..., N] bool as [..., ceil(N / 32)] int32, the first entry in the lowest bit."""
    lead, number = tf.shape(mask)[:-1], tf.shape(mask)[-1]
    words = (number + WORD - 1) // WORD
    mask = tf.pad(mask, [[0, 0]] * (mask.shape.rank - 1) + [[0, words * WORD - number]])
    bits = tf.reshape(tf.cast(mask, tf.int32), tf.concat([lead, [words, WORD]], axis=0))
    return tf.reduce_sum(
        bits * (np.uint32(1) << np.arange(WORD, dtype=np.uint32)).view(np.int32), -1
    )


def _population_count(words):
    return tf.cast(tf.raw_ops.PopulationCount(x=words), tf.int32)


def _position_of_bit(words, rank):
    """Position of the set bit that has `rank` set bits below it; anything if there is none."""
    position = tf.zeros_like(words)
    width = WORD // 2
    while width:
        low = tf.bitwise.bitwise_and(words, (1 << width) - 1)
        below = _population_count(low)
        upper = rank >= below
        rank = tf.where_v2(upper, rank - below, rank)
        position = tf.where_v2(upper, position + width, position)
        words = tf.where_v2(upper, tf.bitwise.right_shift(words, width), low)
        width //= 2
    return position


def query_ball_point(radius, nsample, xyz1, xyz2, *, jit_compile=None):
    """The first `nsample` points, by index, nearer than `radius` to each query.

    A ball with fewer points repeats its first one; an empty ball has index 0 and count 0.

    The [batch, M, N] answers are kept as one bit each; the n-th point of a ball is then found in
    the running count of set bits. Time and memory don't depend on how full the balls are.

    Args:
        radius: of the ball, in the unit of the coordinates; points at this very distance are out.
        nsample: number of points of a group.
        xyz1: [batch, N, 3] float32 points.
        xyz2: [batch, M, 3] float32 queries.
        jit_compile: see the module.

    Returns:
        idx: [batch, M, nsample] int32 indices into N.
        pts_cnt: [batch, M] int32, how many of them are different points: 0 to nsample.

    Raises:
        ValueError: radius not positive, nsample below 1, or a tensor of another type or rank.
    """
    nsample = count_argument("query_ball_point", "nsample", nsample)
    if not radius > 0:
        raise ValueError(f"query_ball_point got radius={radius}; pass a number above 0")
    xyz1 = tensor_argument("query_ball_point", "xyz1", xyz1, ("batch", "N", 3))
    xyz2 = tensor_argument("query_ball_point", "xyz2", xyz2, ("batch", "M", 3))

    def search(xyz1, xyz2):
        words = _pack_bits(_squared_distances(xyz2, xyz1) < squared_radius(radius))
        upto = tf.cumsum(_population_count(words), axis=2)  # [batch, M, words]
        total = upto[:, :, -1]
        slot = tf.range(nsample)
        # A slot's word is the first one up to which there are more set bits than the slot's number.
        before = upto[:, :, tf.newaxis, :] <= slot[:, tf.newaxis]  # [batch, M, nsample, words]
        word = tf.reduce_sum(tf.cast(before, tf.int32), axis=3)
        word = tf.minimum(word, tf.shape(words)[2] - 1)
        rank = slot - tf.reduce_max(tf.where_v2(before, upto[:, :, tf.newaxis, :], 0), axis=3)
        bits = tf.gather(words, word, batch_dims=2)
        found = word * WORD + _position_of_bit(bits, rank)  # [batch, M, nsample]
        first = tf.where_v2(total > 0, found[:, :, 0], 0)
        idx = tf.where_v2(slot < total[:, :, tf.newaxis], found, first[:, :, tf.newaxis])
        return idx, tf.minimum(total, nsample)

    with tf.name_scope("query_ball_point"):
        idx, pts_cnt = search_program(search, [xyz1, xyz2], jit_compile)
        pts_cnt.set_shape(xyz2.shape[:2])
        idx.set_shape([*xyz2.shape[:2], nsample])
        return idx, pts_cnt


def group_point(points, idx):
    """Features of the points of each group; a point's gradient is the sum over its groups.

    Args:
        points: [batch, N, C] float32, bfloat16 or float16.
        idx: [batch, M, nsample] int32 indices into N.

    Returns:
        [batch, M, nsample, C] of the type of `points`.

    Raises:
        ValueError: an argument of another type or rank.
    """
    points = tensor_argument("group_point", "points", points, ("batch", "N", "C"), others=FEATURES)
    idx = tensor_argument("group_point", "idx", idx, ("batch", "M", "nsample"), tf.int32)
    with tf.name_scope("group_point"):
        return take(points, idx)


def _selection_sort(k, dist):
    """See `select_top_k`."""
    number = tf.shape(dist)[2]
    place = tf.range(number)

    def select(step, index, dist):
        left = tf.where_v2(place < step, np.float32(np.inf), dist)
        smallest = tf.reduce_min(left, axis=2, keepdims=True)  # [batch, M, 1]
        found = tf.reduce_min(
            tf.where_v2(tf.equal(left, smallest), place, number), axis=2, keepdims=True
        )
        found = tf.clip_by_value(found, step, number - 1)  # nothing finite is left: no swap
        here, there = tf.equal(place, step), tf.equal(place, found)

        def swap(values):
            at_step = values[:, :, step, tf.newaxis]
            at_found = tf.gather(values, found, batch_dims=2)
            return tf.where_v2(here, at_found, tf.where_v2(there, at_step, values))

        return step + 1, swap(index), swap(dist)

    steps = tf.minimum(k, number)
    index = tf.broadcast_to(place, tf.shape(dist))
    return tf.while_loop(lambda step, *_: step < steps, select, (0, index, dist))[1:]


def select_top_k(k, dist, *, jit_compile=None):
    """The k smallest values of each row in front, by k steps of selection sort.

    Step i swaps the smallest of the values from place i on, the first among equals, with the one at
    place i. The swaps decide the order of what is left, and of equal values that they moved.

    Args:
        k: number of steps; all N if there are fewer values.
        dist: [batch, M, N] float32.
        jit_compile: see the module.

    Returns:
        idx: [batch, M, N] int32, where each value of `dist_out` stood.
        dist_out: [batch, M, N] float32.

    Raises:
        ValueError: k below 1, or `dist` of another type or rank.
    """
    k = count_argument("select_top_k", "k", k)
    dist = tensor_argument("select_top_k", "dist", dist, ("batch", "M", "N"))
    with tf.name_scope("select_top_k"):
        idx, dist_out = search_program(lambda dist: _selection_sort(k, dist), [dist], jit_compile)
        idx.set_shape(dist.shape)
        dist_out.set_shape(dist.shape)
        return idx, dist_out


def knn_point(k, xyz1, xyz2, *, jit_compile=None):
    """The k nearest points of each query, nearest first; ties as in `select_top_k`.

    Args:
        k: number of neighbours. Those beyond the N points have distance infinity and index 0.
        xyz1: [batch, N, C] float32 points.
        xyz2: [batch, M, C] float32 queries.
        jit_compile: see the module.

    Returns:
        val: [batch, M, k] float32 squared distances.
        idx: [batch, M, k] int32 indices into N.

    Raises:
        ValueError: k below 1, a tensor of another type or rank, or C not known or not the same.
    """
    k = count_argument("knn_point", "k", k)
    xyz1 = tensor_argument("knn_point", "xyz1", xyz1, ("batch", "N", "C"))
    xyz2 = tensor_argument("knn_point", "xyz2", xyz2, ("batch", "M", "C"))
    if xyz1.shape[2] is None or xyz1.shape[2] != xyz2.shape[2]:
        raise ValueError(
            f"knn_point got points of {xyz1.shape[2]} and queries of {xyz2.shape[2]} coordinates;"
            " pass tensors whose last axes have the same known size"
        )

    def search(xyz1, xyz2):
        idx, dist = _selection_sort(k, _squared_distances(xyz2, xyz1))
        missing = [[0, 0], [0, 0], [0, tf.maximum(k - tf.shape(dist)[2], 0)]]
        val = tf.pad(dist[:, :, :k], missing, constant_values=np.inf)
        return val, tf.pad(idx[:, :, :k], missing)

    with tf.name_scope("knn_point"):
        val, idx = search_program(search, [xyz1, xyz2], jit_compile)
        val.set_shape([*xyz2.shape[:2], k])
        idx.set_shape([*xyz2.shape[:2], k])
        return val, idx


# --- interpolation --------------------------------------------------------------------------------


def three_nn(xyz1, xyz2, *, jit_compile=None):
    """The three nearest known points of each point; of equally near ones the smaller index first.

    Args:
        xyz1: [batch, n, 3] float32 points.
        xyz2: [batch, m, 3] float32 known points. Neighbours that don't exist because m < 3 have
            distance infinity and index 0.
        jit_compile: see the module.

    Returns:
        dist: [batch, n, 3] float32 squared distances, ascending.
        idx: [batch, n, 3] int32 indices into m.

    Raises:
        ValueError: a tensor of another type or rank.
    """
    xyz1 = tensor_argument("three_nn", "xyz1", xyz1, ("batch", "n", 3))
    xyz2 = tensor_argument("three_nn", "xyz2", xyz2, ("batch", "m", 3))

    def search(xyz1, xyz2):
        shape, known = tf.shape(xyz1)[:2], tf.shape(xyz2)[1]
        coordinates = tf.unstack(xyz1, num=3, axis=2)  # 3 x [batch, n]

        def compare(step, dist, idx):
            point = xyz2[:, step, :]  # [batch, 3]
            new = _squared_distances_to(point, coordinates)
            nearer = [new < old for old in dist]

            def insert(value, best):
                return (
                    tf.where_v2(nearer[0], value, best[0]),
                    tf.where_v2(nearer[0], best[0], tf.where_v2(nearer[1], value, best[1])),
                    tf.where_v2(nearer[1], best[1], tf.where_v2(nearer[2], value, best[2])),
                )

            return step + 1, insert(new, dist), insert(step, idx)

        start = (0, (tf.fill(shape, np.float32(np.inf)),) * 3, (tf.zeros(shape, tf.int32),) * 3)
        _, dist, idx = tf.while_loop(lambda step, *_: step < known, compare, start)
        return tf.stack(dist, axis=2), tf.stack(idx, axis=2)

    with tf.name_scope("three_nn"):
        dist, idx = search_program(search, [xyz1, xyz2], jit_compile)
        dist.set_shape([*xyz1.shape[:2], 3])
        idx.set_shape([*xyz1.shape[:2], 3])
        return dist, idx


def three_interpolate(points, idx, weight):
    """Sums of three points' features; the gradient goes to `points` only.

    Args:
        points: [batch, m, C] float32, bfloat16 or float16.
        idx: [batch, n, 3] int32 indices into m.
        weight: [batch, n, 3] float32.

    Returns:
        [batch, n, C] of the type of `points`.

    Raises:
        ValueError: an argument of another type or rank.
    """
    points = tensor_argument(
        "three_interpolate", "points", points, ("batch", "m", "C"), others=FEATURES
    )
    idx = tensor_argument("three_interpolate", "idx", idx, ("batch", "n", 3), tf.int32)
    weight = tensor_argument("three_interpolate", "weight", weight, ("batch", "n", 3))
    weight = tf.cast(tf.stop_gradient(weight)[:, :, :, tf.newaxis], points.dtype)

    @tf.custom_gradient
    def interpolate(points):
        # Neighbour by neighbour, so that no [batch, n, 3, C] is held.
        shares = [tf.gather(points, idx[:, :, k], batch_dims=1) * weight[:, :, k] for k in range(3)]

        def gradient(upstream):
            return sum_by_index(weight * upstream[:, :, tf.newaxis, :], idx, points)

        return tf.add_n(shares), gradient

    with tf.name_scope("three_interpolate"):
        return interpolate(points)
