import cv2
import numpy as np
import pytest

from utils import draw_clouds


def test_one_cloud_from_three_sides(tmp_path):
    points = np.random.RandomState(0).standard_normal([3000, 6])
    draw_clouds.write_cloud(tmp_path / "cloud.png", points, "cone, predicted cube")
    picture = cv2.imread(str(tmp_path / "cloud.png"))
    height, width, _ = picture.shape
    for side in range(3):
        part = picture[height // 4 :, side * width // 3 : (side + 1) * width // 3]
        assert (part < 250).any()


@pytest.mark.parametrize("count", [1, 5, 6])
def test_wrong_ones_are_red_in_the_grid(tmp_path, count):
    clouds = [np.zeros([4, 3])] * count  # all points in one place
    titles = ["X cone\npredicted cube"] + ["cone\npredicted cone"] * (count - 1)
    draw_clouds.write_grid(tmp_path / "grid.png", clouds, titles)
    picture = cv2.imread(str(tmp_path / "grid.png")).astype(int)
    blue, green, red = np.moveaxis(picture, 2, 0)
    assert ((red > 200) & (blue < 100) & (green < 100)).any()
