"""Measures what the README claims: one JSON line a figure.

    python bench.py                          all figures
    python bench.py --only generator,towers  these groups or figures
    python bench.py --list                   groups and their figures
    python bench.py --gpu                    figures of the GPUs of this machine

A line has name, value, unit, bar, comparison (how the value should relate to the bar), pass, and
detail; bar and pass are null for a figure without a bar. A figure that misses its bar is a line
like any other. The exit code is 1 only where something could not be measured. Figures of CPU time
are ratios taken in turn in one process; those of wall time (in their unit) need a machine that does
nothing else.

With --gpu a figure that needs more devices than there are has the value null and says why in its
detail. Without any GPU one sentence says so, and the exit code is 3.
"""

import argparse
import importlib
import json
import os
import subprocess
import sys

from benchmarks.groups import ALL_GROUPS, GPU_GROUPS, GROUPS

NO_GPU = 3  # exit code
CHILD_SECONDS = 1800  # after which a group that hangs is given up


def select(only, groups):
    """Which groups to measure and which of their figures to print.

    Args:
        only: names of groups or figures separated by commas; '' for all.
        groups: dict name -> Group.

    Returns:
        Dict group name -> list of figure names.

    Raises:
        ValueError: a name is neither a group's nor a figure's.
    """
    wanted = [name for name in only.split(",") if name]
    known = {*groups, *(figure for group in groups.values() for figure in group.figures)}
    unknown = [name for name in wanted if name not in known]
    if unknown:
        raise ValueError(f"{', '.join(unknown)}: no such figure; --list names all of them")
    chosen = {
        name: [f for f in group.figures if not wanted or name in wanted or f in wanted]
        for name, group in groups.items()
    }
    return {name: figures for name, figures in chosen.items() if figures}


def measure_in_child(name, logical_cpus=0):
    """Measures a group in a process of its own: fresh thread pools, kernels as asked for.

    Args:
        name: of the group.
        logical_cpus: see `main`.

    Returns:
        (dict figure name -> JSON line, what the process ended with: exit code or a sentence).
    """
    group = ALL_GROUPS[name]
    environment = {"TF_CPP_MIN_LOG_LEVEL": "2", **os.environ, **group.environment}
    if not group.on_devices or logical_cpus:
        environment["CUDA_VISIBLE_DEVICES"] = ""
    command = [sys.executable, os.path.abspath(__file__), "--child", name]
    command += ["--logical_cpus", str(logical_cpus)]
    try:
        done = subprocess.run(
            command, env=environment, stdout=subprocess.PIPE, text=True, timeout=CHILD_SECONDS
        )
        output, ended = done.stdout, done.returncode
    except subprocess.TimeoutExpired as error:
        output, ended = (error.stdout or b"").decode(), f"no result after {CHILD_SECONDS} s"
    lines = [line for line in output.splitlines() if line.startswith("{")]
    return {json.loads(line)["name"]: line for line in lines}, ended


def measure_here(name, logical_cpus=0):
    """Measures a group in this process and prints its lines.

    Returns:
        Exit code: NO_GPU where a group that needs a GPU finds none.
    """
    group = ALL_GROUPS[name]
    module, function = group.function.split(".")
    measure = getattr(importlib.import_module(f"benchmarks.{module}"), function)
    arguments = group.arguments
    if group.on_devices:
        gpu_figures = importlib.import_module("benchmarks.gpu_figures")
        place = gpu_figures.find_place(logical_cpus)
        if place is None:
            return NO_GPU
        arguments = {**arguments, "place": place}
    for figure in measure(**arguments):
        print(json.dumps(figure.record()), flush=True)
    return 0


def main(argv=None):
    """Measures and prints; see the module's text.

    Returns:
        Exit code: 1 where a figure could not be measured, whatever the figures are.
    """
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", default="", help="groups or figures separated by commas")
    parser.add_argument("--list", action="store_true", help="print the names and end")
    parser.add_argument("--gpu", action="store_true", help="figures of this machine's GPUs")
    parser.add_argument("--child", choices=ALL_GROUPS, help=argparse.SUPPRESS)
    # With --gpu: so many logical CPUs instead of GPUs, to see that all of it runs.
    parser.add_argument("--logical_cpus", type=int, default=0, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.child:
        return measure_here(args.child, args.logical_cpus)
    try:
        chosen = select(args.only, GPU_GROUPS if args.gpu else GROUPS)
    except ValueError as error:
        parser.error(str(error))
    if args.list:
        for name, figures in chosen.items():
            print(f"{name}: {', '.join(figures)}")
        return 0
    exit_code = 0
    for name, figures in chosen.items():
        lines, ended = measure_in_child(name, args.logical_cpus)
        if args.gpu and ended == NO_GPU:
            print(
                "nothing was measured: --gpu needs a GPU and TensorFlow finds none; check the"
                " driver, CUDA_VISIBLE_DEVICES and that tensorflow[and-cuda] is installed, or"
                " measure without --gpu",
                file=sys.stderr,
            )
            return NO_GPU
        for figure in figures:
            if figure in lines:
                print(lines[figure], flush=True)
            else:
                exit_code = 1
                print(f"{figure} was not measured: {name} ended with {ended}", file=sys.stderr)
    return exit_code


if __name__ == "__main__":
    sys.exit(main())
