"""Augmentations beyond the golden cases."""

import numpy as np
import pytest

from tests.cloud_files import staged_augmentation
from utils import provider


@pytest.fixture
def rng():
    return np.random.RandomState(5)


@pytest.mark.parametrize("channels", [3, 6])
@pytest.mark.parametrize("clouds, points", [(1, 1), (3, 7), (5, 2001), (32, 1024), (0, 8)])
def test_augmentation_in_one_go_is_that_in_steps(clouds, points, channels):
    batch = np.random.RandomState(0).uniform(-1, 1, (clouds, points, channels)).astype("f")
    first, second = np.random.RandomState(9), np.random.RandomState(9)
    for rng in (first, second):
        rng.randn(1)  # leaves the second variate of a pair to the next caller
    before = batch.copy()
    result = provider.augment_batch(batch, rng=first)
    np.testing.assert_array_equal(batch, before)
    expected = staged_augmentation(batch, second)
    assert result.dtype == expected.dtype == np.float32
    np.testing.assert_allclose(result, expected, atol=1e-6)
    assert first.randn() == second.randn()


def test_noise_is_clipped_normal_variates_of_the_same_draws():
    first, second = np.random.RandomState(1), np.random.RandomState(1)
    noise = provider._clipped_noise((7, 5003), 0.3, 0.5, first)
    expected = np.clip(0.3 * second.randn(7, 5003), -0.5, 0.5)
    np.testing.assert_allclose(noise, expected, atol=1e-6)
    assert (np.abs(noise) == 0.5).any()
    assert first.uniform() == second.uniform()


def test_default_numbers_are_numpy_s_global_ones():
    batch = np.ones((2, 3, 3), np.float32)
    np.random.seed(3)
    result = provider.rotate_point_cloud(batch)
    expected = provider.rotate_point_cloud(batch, rng=np.random.RandomState(3))
    np.testing.assert_array_equal(result, expected)
    np.random.seed(3)
    assert not np.array_equal(result[0], result[1])  # each cloud has its own angle


def test_rotations_keep_lengths_and_the_up_axis(rng):
    batch = rng.uniform(-1, 1, (4, 9, 6))
    norms = [np.linalg.norm(batch[..., part], axis=2) for part in (slice(3), slice(3, 6))]
    turned = provider.rotate_point_cloud_with_normal(batch.copy(), rng=rng)
    np.testing.assert_allclose(turned[..., [1, 4]], batch[..., [1, 4]])
    little = provider.rotate_perturbation_point_cloud_with_normal(batch, rng=rng)
    for result in (turned, little):
        for norm, part in zip(norms, (slice(3), slice(3, 6))):
            np.testing.assert_allclose(np.linalg.norm(result[..., part], axis=2), norm, rtol=1e-5)
    assert np.abs(little - batch).max() < 0.6


def test_angle_turns_about_the_second_axis():
    turned = provider.rotate_point_cloud_by_angle(np.array([[[1.0, 2.0, 0.0]]]), np.pi / 2)
    np.testing.assert_allclose(turned, [[[0, 2, 1]]], atol=1e-6)


@pytest.mark.parametrize(
    "function, channels, other",
    [
        (provider.rotate_point_cloud, 6, "rotate_point_cloud_with_normal"),
        (provider.rotate_point_cloud_with_normal, 3, "rotate_point_cloud"),
        (provider.augment_batch, 4, "3 channels"),
    ],
)
def test_wrong_number_of_channels_is_refused(function, channels, other):
    with pytest.raises(ValueError, match=other):
        function(np.zeros((2, 5, channels)))


def test_jitter_without_clip_is_refused():
    with pytest.raises(ValueError, match="clip is 0"):
        provider.jitter_point_cloud(np.zeros((1, 2, 3)), clip=0)


def test_list_of_files_in_all_shapes(tmp_path):
    path = tmp_path / "train_files.txt"
    path.write_bytes(b"\xef\xbb\xbfdata\\a\\1.h5\r\n\r\n  data/a/2.h5 \r\n\n\tdata/a b/3.h5")
    assert provider.getDataFiles(path) == ["data/a/1.h5", "data/a/2.h5", "data/a b/3.h5"]
