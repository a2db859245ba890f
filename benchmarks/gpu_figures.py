"""Figures of real devices, for `bench.py --gpu`; every function takes the Devices.

On logical CPUs everything runs as well, at small sizes, to show that it does: times mean nothing.
"""

import dataclasses
import math
import time

import numpy as np
import tensorflow.compat.v1 as tf

from benchmarks import input_figures, strategy_figures, tower_figures, traces
from benchmarks.east_devices import INPUTS, examples_per_second, running, size_for
from benchmarks.measure import Figure, interleave, ratio_figure
from benchmarks.reference_net import all_threads, make_step, plain_graph, tower_graph
from utils.towers import devices, engine_flags

MODES = {  # ways to keep variables
    "cpu": engine_flags.DEFAULTS,
    "gpu": engine_flags.EngineOptions(local_parameter_device="gpu"),
    "replicated": engine_flags.EngineOptions(variable_update="replicated"),
}
TRACED_STEPS, TRACED_INPUTS = 5, ("constant", "staged")
WALL = {"clock": time.perf_counter}


def first_towers(place, num_towers):
    """The Devices of the first towers."""
    return dataclasses.replace(place, indices=place.indices[:num_towers])


def dividing_towers(place):
    """The Devices of the first towers, as many as divide the reference net's batch."""
    return first_towers(place, max(k for k in (1, 2, 4, 8) if k <= place.num_towers))


def equality(place):
    """As `strategy_figures.equality`, for all devices, without TensorFloat-32.

    Returns:
        List of Figure.
    """
    tf.config.experimental.enable_tensor_float_32_execution(False)
    place = dividing_towers(place)
    numbers = (place.num_towers,)
    figures = strategy_figures.equality(lambda k: first_towers(place, k), numbers)
    return _renamed(figures, place)


def overhead(place):
    """Wall time of a step of one tower over that of the plain graph on the same device.

    Returns:
        List of one Figure.
    """
    one = first_towers(place, 1)
    seconds = interleave(
        {"plain": make_step(plain_graph()), "towers": make_step(tower_graph(one))}, **WALL
    )
    figure = ratio_figure(
        "tower_overhead", seconds["towers"], seconds["plain"], "<=", tower_figures.OVERHEAD_BARS[1]
    )
    return _renamed([figure], one)


def mirrored(place):
    """As `strategy_figures.mirrored`, for all devices, in wall time.

    Returns:
        List of Figure.
    """
    place = dividing_towers(place)
    numbers = (place.num_towers,)
    figures = strategy_figures.mirrored(
        "", lambda k: first_towers(place, k), numbers, all_threads, **WALL
    )
    return _renamed(figures, place)


def averaging(place):
    """As `tower_figures.averaging`, on the device that TensorFlow prefers, in wall time.

    Returns:
        List of Figure.
    """
    return _renamed(tower_figures.averaging(**WALL), first_towers(place, 1))


def overlap(place):
    """As `input_figures.overlap`, for all devices.

    Returns:
        List of Figure.
    """
    place = dividing_towers(place)
    rounds = 15 if place.kind == "GPU" else 1
    return _renamed(input_figures.overlap(rounds, place, all_threads), place)


def placement(place):
    """What of a step of EAST was not on the device that it should be on, in every update mode.

    Convolutions, batch norm and their gradients belong on the towers' devices, trainable variables
    and their copies where the flags put them. Taken from the graphs that TensorFlow ran.

    Returns:
        List of two Figure.
    """
    ops, variables, checked = [], [], {}
    for mode, options in MODES.items():
        metadata = tf.RunMetadata()
        with running(place, options=options) as training:
            training.step(tf.RunOptions(output_partition_graphs=True), metadata)
        graphs = metadata.partition_graphs
        misplaced, counts = traces.misplaced_ops(graphs, training.place)
        ops += [f"{mode}: {op}" for op in misplaced]
        checked[mode] = counts
        misplaced, number = traces.misplaced_variables(graphs, training.graph, training.place)
        variables += [f"{mode}: {variable}" for variable in misplaced]
        checked[f"variables_{mode}"] = number
    nothing = min(min(checked[mode].values()) for mode in MODES) == 0
    return _renamed(
        [
            Figure(
                "placement_ops",
                math.nan if nothing else len(ops),
                "misplaced ops",
                "<=",
                0,
                {**{mode: checked[mode] for mode in MODES}, "first": ops[:5]},
            ),
            Figure(
                "placement_variables",
                len(variables),
                "misplaced variables",
                "<=",
                0,
                {
                    **{mode: checked[f"variables_{mode}"] for mode in MODES},
                    "first": variables[:5],
                },
            ),
        ],
        place,
    )


def throughput(place):
    """Images a second of EAST on all devices, by where the batches come from.

    Batches are at hand: what is measured is the way into the graph and onto the devices.

    Returns:
        List of Figure, which have no bar.
    """
    rates = {source: examples_per_second(place, source) for source in INPUTS}
    size = size_for(place)
    return _renamed(
        [
            Figure(
                f"examples_per_second_{source}",
                rate,
                "examples/s",
                detail={
                    "of_constant": round(rate / rates["constant"], 3),
                    "images": [size.batch * place.num_towers, size.side, size.side],
                },
            )
            for source, rate in rates.items()
        ],
        place,
    )


def idle(place):
    """Share of a step of EAST in which a device ran nothing, for constant and for staged batches.

    The mean over the devices, and of some steps the median, from TensorFlow's trace, which itself
    slows the host down: an upper bound.

    Returns:
        List of Figure, which have no bar and no value where the trace lacks a device.
    """
    figures = []
    for source in TRACED_INPUTS:
        shares = []
        with running(place, source) as training:
            for _ in range(size_for(place).settle):
                training.step()
            for _ in range(TRACED_STEPS):
                metadata = tf.RunMetadata()
                training.step(tf.RunOptions(trace_level=tf.RunOptions.FULL_TRACE), metadata)
                of_devices = [
                    traces.idle_share(metadata.step_stats, place.tower_name(i))
                    for i in range(place.num_towers)
                ]
                if None not in of_devices:
                    shares.append(np.mean(of_devices))
        detail = {"steps": len(shares)}
        if not shares:
            detail["not_measured"] = "the trace has no kernels of the devices"
        value = np.median(shares) if shares else math.nan
        figures.append(Figure(f"idle_share_{source}", value, "share of a step", detail=detail))
    return _renamed(figures, place)


def scaling(place):
    """Images a second of EAST on all devices over as many times those of one, by update mode.

    The same batch a device, constant input. One device counts with the mode that is fastest on it.

    Returns:
        List of Figure, which have no bar and no value where there is one device.
    """
    if place.num_towers == 1:
        why = {"not_measured": "there is one device; scaling needs two or more"}
        figures = [
            Figure(f"scaling_{mode}", math.nan, "share of linear", detail=why) for mode in MODES
        ]
        return _renamed(figures, place)
    one = first_towers(place, 1)
    alone = {mode: examples_per_second(one, options=options) for mode, options in MODES.items()}
    figures = []
    for mode, options in MODES.items():
        rate = examples_per_second(place, options=options)
        detail = {"examples_per_second": [round(alone[mode], 1), round(rate, 1)]}
        share = rate / (place.num_towers * max(alone.values()))
        figures.append(Figure(f"scaling_{mode}", share, "share of linear", detail=detail))
    return _renamed(figures, place)


def find_place(logical_cpus=0):
    """The devices to measure on.

    Args:
        logical_cpus: so many of them instead of GPUs.

    Returns:
        Devices with all GPUs, or None where there is none.
    """
    if logical_cpus:
        return devices.Devices("CPU", tuple(range(logical_cpus)))
    found = len(tf.config.list_physical_devices("GPU"))
    return devices.Devices("GPU", tuple(range(found))) if found else None


def _renamed(figures, place):
    """The figures with 'gpu_' before their names, and the devices in their details.

    Names lose the number of towers, which depends on the machine.
    """
    suffix = f"_k{place.num_towers}"
    names = [place.tower_name(i) for i in range(place.num_towers)]
    return [
        dataclasses.replace(
            figure,
            name=f"gpu_{figure.name.replace(suffix, '')}",
            detail={**figure.detail, "devices": names},
        )
        for figure in figures
    ]
