"""What every measurement needs: a figure with its bar, and times of variants taken in turn."""

import contextlib
import dataclasses
import gc
import math
import operator
import socket
import time

import numpy as np

COMPARISONS = {"<=": operator.le, "<": operator.lt, ">=": operator.ge}


@dataclasses.dataclass(frozen=True)
class Figure:
    """One measured figure.

    Attributes:
        name: as in `python bench.py --list`.
        value: the measured number; NaN where there was nothing to measure.
        unit: for example 'ms CPU', or 'ratio'.
        comparison: '<=', '<' or '>=': how the value should relate to the bar; None without one.
        bar: number, or None.
        detail: further numbers and words that explain the value.
    """

    name: str
    value: float
    unit: str
    comparison: str | None = None
    bar: float | None = None
    detail: dict = dataclasses.field(default_factory=dict)

    def record(self):
        """The figure as a dict of JSON values; `pass`: whether it meets its bar, if any."""
        value = float(self.value)
        found = math.isfinite(value)
        passes = None
        if self.bar is not None:
            passes = found and bool(COMPARISONS[self.comparison](value, self.bar))
        return {
            "name": self.name,
            "value": float(f"{value:.4g}") if found else None,
            "unit": self.unit,
            "bar": self.bar,
            "comparison": self.comparison,
            "pass": passes,
            **({"detail": self.detail} if self.detail else {}),
        }


def interleave(variants, *, rounds=30, warm_up=5, clock=time.process_time, seed=0):
    """Times variants in turn, so that what disturbs the machine disturbs all of them.

    Args:
        variants: dict name -> function without arguments.
        rounds: measured rounds; in each one every variant runs once, in a random order.
        warm_up: rounds before them that are not measured.
        clock: what to measure; the default is the CPU time of all threads of this process.
        seed: of the order.

    Returns:
        Dict name -> [rounds] float64, seconds.
    """
    rng = np.random.RandomState(seed)
    names = list(variants)
    seconds = {name: [] for name in names}
    collecting = gc.isenabled()
    gc.disable()  # a collection would count for whichever variant it happens in
    try:
        for number in range(warm_up + rounds):
            for name in rng.permutation(names):
                start = clock()
                variants[name]()
                elapsed = clock() - start
                if number >= warm_up:
                    seconds[name].append(elapsed)
            gc.collect()
    finally:
        if collecting:
            gc.enable()
    return {name: np.array(values) for name, values in seconds.items()}


def ratio_figure(name, numerator, denominator, comparison=None, bar=None, **detail):
    """Figure of the median of per-round ratios, with the spread of the rounds as detail.

    Args:
        name: of the figure.
        numerator, denominator: [rounds] seconds.
        comparison, bar: see Figure.
        **detail: further details.
    """
    ratios = numerator / denominator
    low, high = np.percentile(ratios, [10, 90])
    detail = {
        "rounds": len(ratios),
        "p10_p90": [round(low, 3), round(high, 3)],
        "ms": [round(np.median(x) * 1e3, 2) for x in (numerator, denominator)],
        **detail,
    }
    return Figure(name, np.median(ratios), "ratio", comparison, bar, detail)


def free_addresses(count):
    """Loopback addresses, 'host:port', whose ports nobody had a moment ago."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [f"127.0.0.1:{each.getsockname()[1]}" for each in sockets]
