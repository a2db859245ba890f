"""Checks of flags that absl's own bounds let through."""

import math


def own_flags(flag_values, name):
    """Flags of the script that defines the flag `name`, as a list of absl.flags.Flag."""
    return flag_values.flags_by_module_dict()[flag_values.find_module_defining_flag(name)]


def check_finite(flag_values, name):
    """Refuses NaN and infinity in every flag of a script: NaN lies within all bounds.

    Args:
        flag_values: absl.flags.FLAGS.
        name: of one of the script's flags.

    Raises:
        ValueError: with the flag.
    """
    for flag in own_flags(flag_values, name):
        if isinstance(flag.value, float) and not math.isfinite(flag.value):
            raise ValueError(
                f"--{flag.name}={flag.value} is not a finite number; use {flag.default} for example"
            )
