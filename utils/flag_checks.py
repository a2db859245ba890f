"""Checks of flags that absl's own bounds let through."""

import math

SMALLEST, LARGEST = 1.2e-38, 3.4e38  # of float32


def own_flags(flag_values, name):
    """Flags of the script that defines the flag `name`, as a list of absl.flags.Flag."""
    return flag_values.flags_by_module_dict()[flag_values.find_module_defining_flag(name)]


def check_finite(flag_values, name):
    """Refuses NaN and what float32 cannot hold in every flag of a module: NaN is within all bounds.

    Args:
        flag_values: absl.flags.FLAGS.
        name: of one of the module's flags.

    Raises:
        ValueError: with the flag.
    """
    for flag in own_flags(flag_values, name):
        if not isinstance(flag.value, float):
            continue
        use = f"use {flag.default} for example"
        if not math.isfinite(flag.value):
            raise ValueError(f"--{flag.name}={flag.value} is not a finite number; {use}")
        if flag.value and not SMALLEST <= abs(flag.value) <= LARGEST:
            raise ValueError(f"--{flag.name}={flag.value} is no number of 32 bits; {use}")
