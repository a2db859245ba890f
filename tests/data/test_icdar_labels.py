"""Label maps: the original's numbers, any numbering of the corners, and odd quadrilaterals."""

import json

import cv2
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from data.icdar import check_and_validate_polys, crop_area, generate_rbox
from tests.golden_sets import golden_path
from utils import geometry

SIZE = (160, 224)
ODD_QUADS = {
    "double corner": [[10, 10], [10, 10], [50, 30], [10, 30]],
    "two double corners": [[10, 10], [10, 10], [50, 30], [50, 30]],
    "upright edges": [[20, 20], [90, 24], [90, 60], [20, 56]],
    "bow-tie": [[20, 20], [100, 60], [100, 20], [20, 60]],
    "lopsided bow-tie": [[20, 20], [100, 90], [100, 20], [20, 60]],
    "one point": [[30, 30], [30, 30], [30, 30], [30, 30]],
    "a line": [[10, 10], [30, 30], [50, 50], [70, 70]],
    "dart": [[20, 20], [60, 40], [100, 20], [60, 90]],
    "slope one beside an upright edge": [[50, 50], [80, 80], [80, 110], [50, 90]],
    "nearly upright": [[50, 50], [80.000008, 50], [80, 90], [50.000004, 90]],
    "outside": [[-300, -40], [900, -40], [900, 500], [-300, 500]],
}


def test_golden_label_maps():
    compared = 0
    with np.load(golden_path("east", "rbox.npz")) as data:
        golden = {name: data[name] for name in data.files}
    facts = json.loads(golden_path("east", "rbox.json").read_text())
    for case, score_map in enumerate(golden["score_map"]):
        if facts["status"][case] != "ok" or facts["nan_values_per_case"][case]:
            continue  # the original fails or divides by zero; ours masks such a quadrilateral
        chosen = golden["case_index"] == case
        maps = generate_rbox(
            score_map.shape,
            golden["polys"][chosen],
            golden["tags"][chosen],
            min_text_size=facts["min_text_size"],
        )
        np.testing.assert_array_equal(maps[0], score_map, err_msg=f"case {case}")
        np.testing.assert_array_equal(maps[2], golden["training_mask"][case])
        geo_map = golden["geo_map"][case]
        np.testing.assert_allclose(maps[1][..., :4], geo_map[..., :4], rtol=0, atol=1e-3)
        np.testing.assert_allclose(maps[1][..., 4], geo_map[..., 4], rtol=0, atol=1e-5)
        compared += 1
    assert compared


def test_golden_validation():
    cases = json.loads(golden_path("east", "augment.json").read_text())["validate"]
    with np.load(golden_path("east", "augment.npz")) as golden:
        for number, case in enumerate(cases):
            name = f"validate{number}/"
            polys = golden[name + "polys_in"].copy()
            out, tags = check_and_validate_polys(
                polys, golden[name + "tags_in"], (case["h"], case["w"])
            )
            np.testing.assert_allclose(polys, golden[name + "polys_in_after_call"], atol=1e-4)
            assert len(out) == case["n_out"]
            np.testing.assert_allclose(out, golden[name + "polys_out"].reshape(-1, 4, 2), atol=1e-4)
            np.testing.assert_array_equal(tags, golden[name + "tags_out"])


def test_golden_crops():
    cases = json.loads(golden_path("east", "augment.json").read_text())["crop"]
    with np.load(golden_path("east", "augment.npz")) as golden:
        for number, case in enumerate(cases):
            name = f"crop{number}/"
            image = np.stack(np.mgrid[: case["h"], : case["w"]], axis=-1)  # each pixel says where
            rng = np.random.RandomState(case["numpy_seed"])
            crop, polys, tags = crop_area(
                image,
                golden[name + "polys_in"].reshape(-1, 4, 2),
                golden[name + "tags_in"].astype(bool),
                crop_background=case["crop_background"],
                rng=rng,
            )
            assert crop[0, 0].tolist() == [case["ymin"], case["xmin"]]
            assert crop[-1, -1].tolist() == [case["ymax_inclusive"], case["xmax_inclusive"]]
            assert rng.randint(0, 2**31 - 1) == case["next_randint_after"]
            assert len(polys) == case["n_out"]
            np.testing.assert_allclose(
                polys, golden[name + "polys_out"].reshape(-1, 4, 2), atol=1e-4
            )
            np.testing.assert_array_equal(tags, golden[name + "tags_out"].astype(bool))


def test_crop_area_draws_from_numpys_global_generator_by_default():
    image = np.zeros((100, 200, 3), np.uint8)
    none = np.zeros((0, 4, 2), np.float32), np.zeros(0, bool)
    np.random.seed(4)
    crop, _, _ = crop_area(image, *none, crop_background=True)
    again, _, _ = crop_area(image, *none, crop_background=True, rng=np.random.RandomState(4))
    assert crop.shape == again.shape != image.shape


def test_a_level_box_by_hand():
    quad = np.array([[[20, 10], [60, 10], [60, 30], [20, 30]]], np.float32)
    score_map, geo_map, training_mask = generate_rbox((50, 80), quad, [False])
    # Shrunk by 0.3 x 20 on each side: columns 26 to 54, rows 16 to 24.
    expected = np.zeros((50, 80), np.uint8)
    expected[16:25, 26:55] = 1
    np.testing.assert_array_equal(score_map, expected)
    np.testing.assert_allclose(geo_map[18, 40], [8, 20, 12, 20, 0], atol=1e-5)
    assert not geo_map[expected == 0].any()
    assert training_mask.all()


def test_small_and_dont_care_quadrilaterals_are_masked():
    small = [[10, 10], [60, 10], [60, 18], [10, 18]]
    ignored = [[10, 40], [60, 40], [60, 70], [10, 70]]
    word = [[10, 90], [60, 90], [60, 120], [10, 120]]
    polys = np.array([small, ignored, word], np.float32)
    score_map, _, training_mask = generate_rbox(SIZE, polys, [False, True, False])
    expected = np.ones(SIZE, np.uint8)
    expected[10:19, 10:61] = expected[40:71, 10:61] = 0
    np.testing.assert_array_equal(training_mask, expected)
    assert score_map[14, 30] and score_map[55, 30] and score_map[105, 30]
    _, _, training_mask = generate_rbox(SIZE, polys, [False, True, False], min_text_size=8)
    assert training_mask[14, 30] == 1


def test_the_later_of_two_overlapping_texts_counts():
    lower = [[20, 20], [120, 20], [120, 100], [20, 100]]
    upper = [[60, 40], [160, 40], [160, 120], [60, 120]]
    alone = generate_rbox(SIZE, np.array([upper], np.float32), [False])
    score_map, geo_map, _ = generate_rbox(SIZE, np.array([lower, upper], np.float32), [False] * 2)
    inside = alone[0] == 1
    np.testing.assert_array_equal(geo_map[inside], alone[1][inside])
    assert score_map.sum() > inside.sum()


def test_more_than_255_texts_in_one_image():
    x, y = np.meshgrid(np.arange(20) * 30 + 4, np.arange(20) * 20 + 4)
    corners = np.stack([x.ravel(), y.ravel()], axis=-1)[:, None]
    polys = (corners + np.array([[0, 0], [24, 0], [24, 14], [0, 14]])).astype(np.float32)
    tags = np.zeros(len(polys), bool)
    score_map, geo_map, _ = generate_rbox((420, 620), polys, tags)
    for number in (0, 254, 255, 256, 399):
        left, top = corners[number, 0]
        assert score_map[top + 7, left + 12] == 1
        np.testing.assert_allclose(geo_map[top + 7, left + 12], [7, 12, 7, 12, 0], atol=1e-4)
    assert len(polys) == cv2.connectedComponents(score_map)[0] - 1


@pytest.mark.parametrize("stride", [2, 4])
@pytest.mark.parametrize("size", [(160, 224), (161, 227)])
def test_a_stride_gives_every_nth_pixel(size, stride):
    polys, tags = _random_quads(np.random.RandomState(1), 12)
    full = generate_rbox(size, polys, tags)
    strided = generate_rbox(size, polys, tags, stride=stride)
    for part, whole in zip(strided, full):
        np.testing.assert_array_equal(part, whole[::stride, ::stride])
        assert part.dtype == whole.dtype


def test_nothing_to_draw():
    score_map, geo_map, training_mask = generate_rbox(
        (8, 12), np.zeros((0, 4, 2), np.float32), np.zeros(0, bool)
    )
    assert not score_map.any() and not geo_map.any() and training_mask.all()
    polys, tags = check_and_validate_polys(np.zeros((0, 4, 2), np.float32), np.zeros(0, bool), SIZE)
    assert polys.shape == (0, 4, 2) and tags.shape == (0,)


# ----------------------------------------------------------- any numbering, odd quadrilaterals


def _numberings(quad):
    for corners in (quad, quad[::-1]):
        for first in range(4):
            yield np.roll(corners, first, axis=0)


def _maps(quad):
    polys, tags = check_and_validate_polys(np.array([quad], np.float32), np.zeros(1, bool), SIZE)
    return generate_rbox(SIZE, polys, tags)


@pytest.mark.parametrize(
    "quad",
    [
        [[20, 20], [90, 20], [90, 50], [20, 50]],  # level
        [[20, 20], [40, 20], [40, 100], [20, 100]],  # upright
        [[87, 55], [104, 56], [100, 105], [83, 104]],
        [[5, 3], [65, 9], [63, 29], [3, 23]],  # next to the corner of the image
        [[80, 30], [110, 60], [80, 90], [50, 60]],  # at 45 degrees
        [[40, 60], [80, 60], [90, 90], [30, 90]],  # symmetric trapezium: two equal parallelograms
        [[60, 20], [80, 40], [60, 90], [40, 40]],  # symmetric kite
        [[50, 40], [82, 64], [70, 80], [38, 56]],  # sides of 40 and 20 at whole pixels
        [[30, 40], [90, 31], [95, 63], [28, 75]],
    ],
)
def test_every_numbering_of_the_corners_gives_equal_maps(quad):
    expected = _maps(np.array(quad))
    assert expected[0].any()
    for corners in _numberings(np.array(quad)):
        for made, wanted in zip(_maps(corners), expected):
            np.testing.assert_allclose(made, wanted, rtol=0, atol=1e-3)


@settings(deadline=None, max_examples=100)
@given(st.integers(0, 2**31 - 1))
def test_every_numbering_of_random_corners_gives_equal_maps(seed):
    (quad,), _ = _random_quads(np.random.RandomState(seed), 1)
    quad = np.round(quad)
    expected = _maps(quad)
    for corners in _numberings(quad):
        for made, wanted in zip(_maps(corners), expected):
            np.testing.assert_array_equal(made, wanted)


def _assert_sound(polys, tags):
    polys, tags = check_and_validate_polys(np.array(polys, np.float32), np.array(tags), SIZE)
    score_map, geo_map, training_mask = generate_rbox(SIZE, polys, tags)
    assert np.isfinite(geo_map).all()
    assert (geo_map[score_map == 1][:, :4] >= 0).all()
    assert (np.abs(geo_map[..., 4]) <= np.pi / 2).all()
    assert not geo_map[score_map == 0].any()
    assert set(np.unique(score_map)) <= {0, 1} and set(np.unique(training_mask)) <= {0, 1}
    return score_map, geo_map, training_mask


@pytest.mark.parametrize("quad", ODD_QUADS.values(), ids=ODD_QUADS.keys())
def test_odd_quadrilaterals_give_finite_maps_or_are_masked(quad):
    for corners in _numberings(np.array(quad, np.float32)):
        _assert_sound([corners], [False])


def test_a_thousand_random_quadrilaterals_give_finite_maps():
    rng = np.random.RandomState(11)
    for _ in range(100):
        quads = rng.uniform(-40, 260, (10, 4, 2))
        kind = rng.randint(4)
        if kind == 1:
            quads = np.round(quads / 20) * 20  # many equal coordinates
        elif kind == 2:
            quads[:, 1] = quads[:, 0] + rng.choice([0, 1e-6, 1e-3], (10, 2))
        elif kind == 3:
            quads = quads[:, :1] + rng.uniform(-2, 2, (10, 4, 2))
        _assert_sound(quads, rng.rand(10) < 0.2)


_corner = st.one_of(st.integers(-5, 30), st.floats(-50, 300, width=32))


@settings(deadline=None, max_examples=200)
@given(st.lists(st.tuples(_corner, _corner), min_size=4, max_size=4))
@example([(10, 10), (10, 10), (50, 30), (10, 30)])
@example([(0, 0), (0, 0), (1, 2), (0, 2)])
def test_any_four_corners_give_finite_maps(corners):
    _assert_sound([corners], [False])


def test_a_quadrilateral_without_a_rectangle_is_dont_care():
    line = np.array([ODD_QUADS["a line"]], np.float32)
    score_map, geo_map, training_mask = generate_rbox(SIZE, line, [False])
    assert not score_map.any() and not geo_map.any()
    assert not training_mask[30, 30]
    nowhere = np.full((1, 4, 2), np.nan, np.float32)
    score_map, geo_map, _ = generate_rbox(SIZE, nowhere, [False])
    assert not score_map.any() and not geo_map.any()


def _random_quads(rng, number):
    """[number, 4, 2] float32 in an image of SIZE, near rectangles at any angle, and tags."""
    angle = rng.uniform(-np.pi, np.pi, (number, 1))
    half = rng.uniform(12, 28, (2, number, 1))
    across = np.concatenate([np.cos(angle), np.sin(angle)], axis=1) * half[0]
    down = np.concatenate([-np.sin(angle), np.cos(angle)], axis=1) * half[1]
    center = rng.uniform((50, 50), (170, 110), (number, 2))
    quads = center[:, None] + np.stack(
        [-across - down, across - down, across + down, down - across], axis=1
    )
    quads += rng.uniform(-3, 3, quads.shape)
    assert (geometry.polygon_area(quads) < 0).all()
    return quads.astype(np.float32), rng.rand(number) < 0.2
