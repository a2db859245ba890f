"""Draws the training curve of a log file.

    python -m utils.plot_log --log=train.log --output=curve.png

The log is what the training script prints; every line of the form

    Step 000010, model loss 0.0123, total loss 0.1234, 0.50 seconds/step, 56.00 examples/second

gives one point, all other lines are passed over.
"""

import argparse
import os
import re
import sys

import numpy as np

_NUMBER = r"[-+]?(?:\d+\.?\d*(?:[eE][-+]?\d+)?|nan|inf)"
_LINE = re.compile(rf"\bStep (\d+), model loss ({_NUMBER}), total loss ({_NUMBER})")


def read_log(path):
    """Reads the progress lines of a log.

    A run that was restored repeats some steps; the last mention of a step counts.

    Args:
      path: text file; bytes that are no UTF-8 are passed over.

    Returns:
      (steps, model_loss, total_loss): [n] int64, [n] float64, [n] float64, in order of steps.

    Raises:
      FileNotFoundError: no such file.
      ValueError: the file has no progress line.
    """
    if not os.path.isfile(path):
        raise FileNotFoundError(
            f"log {os.path.abspath(path)} is no file; pass the file that the output of a training "
            "run went to"
        )
    losses = {}
    with open(path, encoding="utf-8", errors="replace") as file:
        for line in file:
            found = _LINE.search(line)
            if found:
                losses[int(found[1])] = float(found[2]), float(found[3])
    if not losses:
        raise ValueError(
            f"log {os.path.abspath(path)} has no line like 'Step 000010, model loss 0.0123, total "
            "loss 0.1234'; pass the output of a training run that reached its first progress line"
        )
    steps = np.array(sorted(losses), np.int64)
    model_loss, total_loss = np.array([losses[step] for step in steps], np.float64).T
    return steps, model_loss, total_loss


def smooth(values, half_width):
    """Running mean over up to 2 * half_width + 1 neighbours; non-finite values are left out of it.

    Args:
      values: [n] float64.
      half_width: whole number, 0 for no smoothing.

    Returns:
      [n] float64, NaN where no neighbour is finite.
    """
    window = np.ones(2 * half_width + 1)
    finite = np.isfinite(values)
    # "full" and a slice rather than "same", which returns the window's length if that is longer.
    inside = slice(half_width, half_width + len(values))
    sums = np.convolve(np.where(finite, values, 0.0), window)[inside]
    counts = np.convolve(finite.astype(np.float64), window)[inside]
    return np.divide(sums, counts, out=np.full(len(values), np.nan), where=counts > 0.5)


def plot_log(path, output):
    """Draws model loss and total loss over the steps.

    Args:
      path: log file, see `read_log`.
      output: picture to write (.png); its folder is made if missing.

    Raises:
      FileNotFoundError, ValueError: see `read_log`.
    """
    steps, model_loss, total_loss = read_log(path)
    # Imported here: matplotlib is slow to load, and wants a drawing back end that needs no display.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 6), dpi=100, layout="constrained")
    FigureCanvasAgg(figure)
    upper, lower = figure.subplots(2, 1, sharex=True)
    half_width = len(steps) // 40
    for axes, values, label, colour in (
        (upper, model_loss, "model loss", "tab:blue"),
        (lower, total_loss, "total loss (with weight decay)", "tab:red"),
    ):
        marker = "o" if len(steps) == 1 else None
        axes.plot(steps, values, color=colour, alpha=0.35, linewidth=1, marker=marker)
        axes.plot(steps, smooth(values, half_width), color=colour, linewidth=1.8)
        axes.set_ylabel(label)
        axes.grid(alpha=0.3)
        # Losses fall by orders of magnitude, but in some models one may be zero or negative.
        if np.all(values[np.isfinite(values)] > 0):
            axes.set_yscale("log")
    upper.set_title(os.path.basename(path))
    lower.set_xlabel("step")
    os.makedirs(os.path.dirname(os.path.abspath(output)), exist_ok=True)
    figure.savefig(output)


def main(argv=None):
    """Command line; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m utils.plot_log", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--log", required=True, help="output of a training run")
    parser.add_argument("--output", default="curve.png", help="picture to write")
    args = parser.parse_args(argv)
    try:
        plot_log(args.log, args.output)
    except (OSError, ValueError) as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 1
    print(f"training curve written to {args.output}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
