"""The pictures of scene text: quads tight and apart, contrast, reading order."""

import dataclasses

import cv2
import numpy as np
import pytest

from data import synthetic_scenes
from data.synthetic_scenes import SceneOptions

OPTIONS = SceneOptions(width=192, height=128, max_words=5, dont_care_share=0.3)


@pytest.fixture(scope="module")
def pictures():
    return [synthetic_scenes.make_picture(np.random.RandomState(i), OPTIONS) for i in range(60)]


def _area(quad):
    x, y = quad[:, 0], quad[:, 1]
    return 0.5 * float(np.sum(x * np.roll(y, -1) - np.roll(x, -1) * y))


def _distance_to_sides(points, quad):
    """[n, 4]: signed distance of each point to each side's line, positive inside."""
    start, end = quad, np.roll(quad, -1, axis=0)
    along = end - start
    normal = np.stack([-along[:, 1], along[:, 0]], axis=1)
    normal /= np.linalg.norm(normal, axis=1, keepdims=True)
    return np.einsum("nsk,sk->ns", points[:, None] - start[None], normal)


@pytest.mark.parametrize("seed", range(20))
def test_quad_is_tight_around_the_ink(seed):
    rng = np.random.RandomState(seed)
    _, outline = synthetic_scenes.draw_word(synthetic_scenes._transcription(rng), rng)
    height = rng.uniform(15, 40)
    width = height * outline.shape[1] / outline.shape[0]
    quad = synthetic_scenes.word_quad(width, height, rng.uniform(-40, 40), rng)
    quad = quad - quad.min(axis=0) + 5
    shape = tuple(int(v) for v in np.ceil(quad.max(axis=0))[::-1] + 6)
    ink = synthetic_scenes.warp_mask(outline, quad, shape)
    ys, xs = np.nonzero(ink > 0.05)
    distance = _distance_to_sides(np.stack([xs, ys], axis=1).astype(np.float64), quad)
    assert distance.min() > -1.0  # nothing outside, but half covered pixels
    assert (distance.min(axis=0) < 1.5).all()  # and ink along each side


def test_mask_fills_its_quad_to_the_edges():
    quad = np.array([[9.5, 4.5], [29.5, 4.5], [29.5, 14.5], [9.5, 14.5]], np.float32)
    filled = synthetic_scenes.warp_mask(np.ones((50, 100), np.float32), quad, (24, 40))
    expected = np.zeros((24, 40), np.float32)
    expected[5:15, 10:30] = 1
    inner = np.s_[6:14, 11:29]
    np.testing.assert_allclose(filled[inner], expected[inner], atol=1e-5)
    np.testing.assert_allclose(filled, expected, atol=0.5)
    np.testing.assert_allclose(filled.sum(), expected.sum(), rtol=0.03)


def test_words_lie_inside_and_apart(pictures):
    count = 0
    for image, words in pictures:
        assert image.shape == (128, 192, 3)
        assert image.dtype == np.uint8
        covered = np.zeros(image.shape[:2], np.uint8)
        for word in words:
            count += 1
            assert (word.quad >= 0).all()
            assert (word.quad <= [191, 127]).all()
            mask = np.zeros_like(covered)
            cv2.fillConvexPoly(mask, np.rint(word.quad).astype(np.int32), 1)
            assert not (mask & covered).any()
            covered |= mask
    assert count > len(pictures)


def test_corners_run_clockwise_from_the_upper_left(pictures):
    for _, words in pictures:
        for word in words:
            quad = word.quad
            assert _area(quad) > 0  # clockwise where y points down
            assert cv2.isContourConvex(quad)
            # Rotations stay below 45 degrees, so the first side runs to the right.
            assert quad[1, 0] - quad[0, 0] > abs(quad[1, 1] - quad[0, 1])
            assert quad[3, 1] > quad[0, 1]


def test_readable_and_dont_care_words_differ_in_size(pictures):
    heights = {True: [], False: []}
    for _, words in pictures:
        for word in words:
            sides = np.linalg.norm(word.quad - np.roll(word.quad, -1, axis=0), axis=1)
            heights[word.text == synthetic_scenes.DONT_CARE].append((sides[1] + sides[3]) / 2)
    assert min(len(values) for values in heights.values()) > 10
    assert max(heights[True]) < min(heights[False])
    assert min(heights[False]) > 0.85 * OPTIONS.min_word_height
    assert max(heights[False]) < 1.15 * OPTIONS.max_word_height


@pytest.mark.parametrize("seed", range(30))
def test_colour_keeps_its_distance_from_every_pixel(seed):
    rng = np.random.RandomState(seed)
    centre, spread = rng.uniform(0, 255), rng.uniform(0, 60)
    pixels = np.clip(rng.normal(centre, spread, (200, 3)), 0, 255).astype(np.float32)
    contrast = rng.uniform(20, 100)
    colour = synthetic_scenes.choose_colour(pixels, contrast, rng)
    brightness = pixels @ synthetic_scenes.LUMA
    room = max(brightness.min(), 255 - brightness.max()) - contrast
    if colour is None:
        assert room < 1
        return
    assert room >= 1
    assert (colour >= 0).all() and (colour <= 255).all()
    assert np.abs(brightness - colour @ synthetic_scenes.LUMA).min() >= contrast - 0.01


def test_a_word_stands_out_in_the_picture():
    """Letters against all that lies between and around them: background, board, shadow."""
    options = dataclasses.replace(OPTIONS, min_contrast=80)
    shape = (options.height, options.width)
    for seed in range(30):
        rng = np.random.RandomState(seed)
        image = synthetic_scenes.make_background(rng, *shape)
        letters, _ = synthetic_scenes.draw_word("Word", rng)
        quad = synthetic_scenes.word_quad(90, 36, 10, rng) + np.float32([96, 64])
        synthetic_scenes._write_word(image, (letters, letters), quad, options, rng)
        ink = synthetic_scenes.warp_mask(letters, quad, shape)
        brightness = image @ synthetic_scenes.LUMA
        text = brightness[ink > 0.99]
        gap = brightness[(synthetic_scenes._grown(quad, 1, shape) > 0) & (ink < 0.01)]
        assert text.size and gap.size
        assert np.ptp(text) < 2.6  # what one hundredth of the brightness range may add
        assert np.abs(gap[:, None] - np.median(text)).min() > options.min_contrast - 2.6
