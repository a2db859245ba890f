"""Figure of the augmentation of clouds; made-up clouds for this and others. Without TensorFlow."""

import functools

import numpy as np

from benchmarks import reference_augmentation
from benchmarks.measure import interleave, ratio_figure
from data import synthetic_shapes
from utils import provider

CLOUDS, POINTS = 32, 1024


def augmentation():
    """Clouds per CPU second of `provider.augment_batch` over those of an obvious loop.

    Batches of 32 clouds with 1024 points. Both draw the same random numbers. The detail has how
    many clouds a second NumPy draws them for, in the form that takes least time: that much nothing
    can save.

    Returns:
        List of one Figure.
    """
    batch = shape_clouds(CLOUDS, POINTS)
    ours, loop, draws = (np.random.RandomState(0) for _ in range(3))
    seconds = interleave(
        {
            "ours": lambda: provider.augment_batch(batch, rng=ours),
            "loop": lambda: reference_augmentation.augment_batch(batch, loop),
        },
        rounds=200,
    )
    # The noise takes 4 / pi uniform numbers for each normal variate.
    draw = functools.partial(draws.random_sample, int(batch.size * 4 / np.pi))
    seconds |= interleave({"draws": draw}, rounds=50)
    per_second = {name: int(CLOUDS / np.median(values)) for name, values in seconds.items()}
    return [
        ratio_figure(
            "augmentation_32_clouds",
            seconds["loop"],
            seconds["ours"],
            ">=",
            3,
            clouds_per_cpu_second=per_second["ours"],
            loop=per_second["loop"],
            draws_alone=per_second["draws"],
        )
    ]


def shape_clouds(count, num_point):
    """Made-up shapes in the unit sphere, [count, num_point, 3] float32."""
    rng = np.random.RandomState(0)
    options = synthetic_shapes.ShapeOptions(points=num_point)
    labels = np.arange(count) % len(synthetic_shapes.SHAPES)
    return np.stack([synthetic_shapes.make_cloud(label, options, rng) for label in labels])
