"""Measures what the README claims: one JSON line a figure.

    python bench.py                          all figures
    python bench.py --only generator,towers  these groups or figures
    python bench.py --list                   groups and their figures

A line has name, value, unit, bar, comparison (how the value should relate to the bar), pass, and
detail; bar and pass are null for a figure without a bar. A figure that misses its bar is a line
like any other. The exit code is 1 only where something could not be measured. Figures of CPU time
are ratios taken in turn in one process; those of wall time (in their unit) need a machine that does
nothing else.
"""

import argparse
import dataclasses
import importlib
import json
import os
import subprocess
import sys

EIGEN = {"TF_ENABLE_ONEDNN_OPTS": "0"}
ONEDNN = {"TF_ENABLE_ONEDNN_OPTS": "1"}


@dataclasses.dataclass(frozen=True)
class Group:
    """Figures that are measured together, in a process of their own.

    Attributes:
        function: 'module.function' in the package `benchmarks`; returns a list of Figure.
        figures: their names, in this order.
        arguments: keyword arguments of the function.
        environment: variables of the process's environment.
    """

    function: str
    figures: tuple[str, ...]
    arguments: dict = dataclasses.field(default_factory=dict)
    environment: dict = dataclasses.field(default_factory=dict)


# TensorFlow's oneDNN kernels have a fixed cost a call, which towers pay K times; so engine figures
# are taken with the kernels that cost in proportion to the batch, and with oneDNN beside them.
GROUPS = {
    "generator": Group(
        "data_figures.generator", ("generator_512_many_words", "generator_512_many_words_uncached")
    ),
    "labels": Group("data_figures.label_maps", ("label_maps_512_30_quads",)),
    "readers": Group(
        "data_figures.readers",
        (
            "readers_two_threads",
            "readers_two_processes",
            "readers_two_threads_uncached",
            "readers_two_processes_uncached",
        ),
    ),
    "lanms": Group("data_figures.lanms", ("lanms_3000",)),
    "towers": Group(
        "tower_figures.tower_overhead",
        ("tower_overhead_k1", "tower_overhead_k2", "tower_overhead_k4"),
        environment=EIGEN,
    ),
    "towers_onednn": Group(
        "tower_figures.tower_overhead",
        ("tower_overhead_k1_onednn", "tower_overhead_k2_onednn", "tower_overhead_k4_onednn"),
        {"suffix": "_onednn"},
        ONEDNN,
    ),
    "equality": Group(
        "strategy_figures.equality",
        ("equality_k2", "equality_k4", "equality_sync_bn_k2", "equality_sync_bn_k4"),
        environment=EIGEN,
    ),
    "mirrored": Group(
        "strategy_figures.mirrored",
        (
            "mirrored_strategy_k2_time",
            "mirrored_strategy_k2_ops",
            "mirrored_strategy_k4_time",
            "mirrored_strategy_k4_ops",
        ),
        environment=EIGEN,
    ),
    "mirrored_onednn": Group(
        "strategy_figures.mirrored",
        ("mirrored_strategy_k2_onednn_time", "mirrored_strategy_k4_onednn_time"),
        {"suffix": "_onednn"},
        ONEDNN,
    ),
    "averaging": Group("tower_figures.averaging", ("average_gradients_k2", "average_gradients_k4")),
    "ops": Group("tower_figures.ops_linear_in_k", ("ops_linear_in_k",)),
    "build": Group("tower_figures.build_time", ("build_time_linear_in_k",)),
    "update_modes": Group(
        "tower_figures.update_modes", ("replicated_k2", "sync_bn_k2"), environment=EIGEN
    ),
    "east": Group(
        "east_figures.two_towers", ("east_two_towers", "east_two_towers_batch_8"), environment=EIGEN
    ),
    "east_onednn": Group(
        "east_figures.two_towers",
        ("east_two_towers_onednn", "east_two_towers_batch_8_onednn"),
        {"suffix": "_onednn"},
        ONEDNN,
    ),
    "input": Group(
        "input_figures.overlap",
        ("input_overlap_half", "input_overlap_nine_tenths"),
        environment=EIGEN,
    ),
    "input_waiting": Group("input_figures.waiting", ("input_waiting_share",), environment=EIGEN),
    "steps": Group("east_figures.fetches", ("runs_per_step", "bytes_fetched_per_step")),
    "summaries": Group("script_figures.summary_cost", ("summaries_every_100",), environment=EIGEN),
    "summaries_onednn": Group(
        "script_figures.summary_cost",
        ("summaries_every_100_onednn",),
        {"suffix": "_onednn"},
        ONEDNN,
    ),
    "finalised_east": Group("script_figures.finalised_east", ("graph_finalised_east",)),
    "finalised_pointnet2": Group(
        "script_figures.finalised_pointnet2", ("graph_finalised_pointnet2",)
    ),
    "memory": Group("process_figures.memory", ("resident_memory_k4", "resident_memory_steps")),
    "reader_start": Group("process_figures.reader_start", ("reader_start", "reader_memory")),
    "points": Group(
        "point_figures.speed", ("fps_1024_to_512", "ball_query_1024_to_512", "three_nn_1024_to_512")
    ),
    "points_memory": Group(
        "point_figures.memory",
        (
            "fps_1024_to_512_memory",
            "ball_query_1024_to_512_memory",
            "three_nn_1024_to_512_memory",
        ),
    ),
    "points_share": Group("point_training_figures.share", ("sampling_and_grouping_share",)),
    "points_towers": Group(
        "point_training_figures.two_towers", ("pointnet2_two_towers",), environment=EIGEN
    ),
    "points_towers_onednn": Group(
        "point_training_figures.two_towers",
        ("pointnet2_two_towers_onednn",),
        {"suffix": "_onednn"},
        ONEDNN,
    ),
    "points_ops": Group(
        "point_training_figures.ops", ("pointnet2_ops_of_a_tower", "pointnet2_ops_in_vain")
    ),
    "augmentation": Group("cloud_figures.augmentation", ("augmentation_32_clouds",)),
}


def select(only):
    """Which groups to measure and which of their figures to print.

    Args:
        only: names of groups or figures separated by commas; '' for all.

    Returns:
        Dict group name -> list of figure names.

    Raises:
        ValueError: a name is neither a group's nor a figure's.
    """
    wanted = [name for name in only.split(",") if name]
    known = {*GROUPS, *(figure for group in GROUPS.values() for figure in group.figures)}
    unknown = [name for name in wanted if name not in known]
    if unknown:
        raise ValueError(f"{', '.join(unknown)}: no such figure; --list names all of them")
    chosen = {
        name: [f for f in group.figures if not wanted or name in wanted or f in wanted]
        for name, group in GROUPS.items()
    }
    return {name: figures for name, figures in chosen.items() if figures}


def measure_in_child(name):
    """Measures a group in a process of its own: fresh thread pools, kernels as asked for.

    Returns:
        (dict figure name -> JSON line, exit code of the process).
    """
    environment = {
        "TF_CPP_MIN_LOG_LEVEL": "2",
        **os.environ,
        "CUDA_VISIBLE_DEVICES": "",
        **GROUPS[name].environment,
    }
    command = [sys.executable, os.path.abspath(__file__), "--child", name]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True)
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    return {json.loads(line)["name"]: line for line in lines}, done.returncode


def measure_here(name):
    """Measures a group in this process and prints its lines."""
    group = GROUPS[name]
    module, function = group.function.split(".")
    measure = getattr(importlib.import_module(f"benchmarks.{module}"), function)
    for figure in measure(**group.arguments):
        print(json.dumps(figure.record()), flush=True)


def main(argv=None):
    """Measures and prints; see the module's text.

    Returns:
        Exit code: 1 where a figure could not be measured, whatever the figures are.
    """
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", default="", help="groups or figures separated by commas")
    parser.add_argument("--list", action="store_true", help="print the names and end")
    parser.add_argument("--child", choices=GROUPS, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.child:
        measure_here(args.child)
        return 0
    try:
        chosen = select(args.only)
    except ValueError as error:
        parser.error(str(error))
    if args.list:
        for name, figures in chosen.items():
            print(f"{name}: {', '.join(figures)}")
        return 0
    exit_code = 0
    for name, figures in chosen.items():
        lines, child_code = measure_in_child(name)
        for figure in figures:
            if figure in lines:
                print(lines[figure], flush=True)
            else:
                exit_code = 1
                print(f"{figure} was not measured: {name} ended with {child_code}", file=sys.stderr)
    return exit_code


if __name__ == "__main__":
    sys.exit(main())
