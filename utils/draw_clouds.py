"""Pictures of point clouds, for looking at what a classifier gets wrong."""

import numpy as np
from matplotlib.figure import Figure

VIEWS = ((20, 45), (20, 135), (80, 45))  # elevation and azimuth in degrees
_MAX_POINTS = 1024  # of a cloud that are drawn


def write_cloud(path, points, title):
    """Writes a picture of one cloud, seen from three sides.

    Args:
        path: of the PNG file.
        points: [num_point, 3 or more], x, y (up) and z.
        title: text above it.
    """
    figure = Figure(figsize=(3 * len(VIEWS), 3.2))
    figure.suptitle(title)
    for number, view in enumerate(VIEWS, start=1):
        _draw(figure.add_subplot(1, len(VIEWS), number, projection="3d"), points, view)
    figure.savefig(path, dpi=80)


def write_grid(path, clouds, titles, columns=5):
    """Writes a picture of several clouds.

    Args:
        path: of the PNG file.
        clouds: list of [num_point, 3 or more].
        titles: one text a cloud; those that begin with 'X' are red.
        columns: clouds in a row.
    """
    rows = -(-len(clouds) // columns)
    figure = Figure(figsize=(2.4 * columns, 2.6 * rows), layout="tight")
    for number, (points, title) in enumerate(zip(clouds, titles), start=1):
        axes = figure.add_subplot(rows, columns, number, projection="3d")
        axes.set_title(title, fontsize=9, color="red" if title.startswith("X") else "black")
        _draw(axes, points, VIEWS[0])
    figure.savefig(path, dpi=80)


def _draw(axes, points, view):
    step = -(-len(points) // _MAX_POINTS)
    x, y, z = np.asarray(points)[::step, :3].T
    axes.scatter(x, z, y, s=3, c=y, cmap="viridis", linewidths=0)  # the third axis is up here
    axes.view_init(*view)
    axes.set_box_aspect((1, 1, 1))
    axes.set_axis_off()
    reach = max(np.abs(np.asarray(points)[:, :3]).max(), 1e-6)
    for set_limits in (axes.set_xlim, axes.set_ylim, axes.set_zlim):
        set_limits(-reach, reach)
