"""Where the golden numbers lie.

`GOLDEN_DIR` (default `tests/golden`) holds one sub-folder a port. A set in the repository leaves
out what was made from photographs that are not ours to publish; the tests that need those files
skip unless `GOLDEN_DIR` names a full set.
"""

import os
import pathlib

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent
SHARED = (
    ROOT.parent / "shared"
)  # full sets and sample photographs, where somebody keeps them beside the project


def golden_dir(port):
    """Folder of one port's golden set."""
    return pathlib.Path(os.environ.get("GOLDEN_DIR", ROOT / "tests" / "golden")) / port


def golden_path(port, name, whole=False):
    """Path of one golden file; skips the calling test where the set lacks it.

    With `whole`, the file as it lies in a full set, if `GOLDEN_DIR` names none and one is beside
    the project: the copy in the repository leaves out what was made from photographs.
    """
    path = golden_dir(port) / name
    if whole and "GOLDEN_DIR" not in os.environ and (SHARED / "golden" / port / name).is_file():
        path = SHARED / "golden" / port / name
    if not path.is_file():
        pytest.skip(f"{path} is not part of this golden set")
    return path


def samples_path():
    """Folder of the labelled ICDAR sample photographs; skips where there is none."""
    path = pathlib.Path(os.environ.get("SAMPLES_DIR", SHARED / "samples" / "icdar"))
    if not path.is_dir():
        pytest.skip(f"no sample photographs at {path}")
    return path
