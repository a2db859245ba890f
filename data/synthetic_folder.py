"""The folder of a made-up data set: complete or not there, and never over somebody's files."""

import json
import os
import shutil
import tempfile


def check_seed(seed):
    """Raises a ValueError for a seed that NumPy does not take."""
    if not 0 <= seed < 2**32:
        raise ValueError(f"seed is {seed}; it must lie within 0 and 2**32 - 1, pass 0 for example")


def write_folder(output_dir, manifest, parameters, write):
    """Makes a folder, unless it already holds the data set of the same parameters.

    Args:
      output_dir: folder to make; it appears only once it is complete.
      manifest: name of the file in it that keeps the parameters.
      parameters: dict of what JSON can hold.
      write: called with a folder to fill.

    Returns:
      True if it was written, False if it was there.

    Raises:
      ValueError: the folder holds something else.
    """
    output_dir = os.path.abspath(output_dir)
    if os.path.isfile(output_dir):
        raise ValueError(f"output_dir {output_dir} is a file; pass the name of a folder")
    if os.path.isdir(output_dir) and os.listdir(output_dir):
        if _read(os.path.join(output_dir, manifest)) == parameters:
            return False
        raise ValueError(
            f"{output_dir} is not empty and does not hold the data set of these parameters; it is "
            "left as it is, pass another output_dir or remove it"
        )
    parent, name = os.path.split(output_dir)
    os.makedirs(parent, exist_ok=True)
    unfinished = tempfile.mkdtemp(prefix=f"{name}.unfinished-", dir=parent)
    try:
        os.chmod(unfinished, 0o755)  # mkdtemp makes private folders
        write(unfinished)
        with open(os.path.join(unfinished, manifest), "w", encoding="utf-8") as file:
            json.dump(parameters, file, indent=2)
            file.write("\n")
        if os.path.isdir(output_dir):
            os.rmdir(output_dir)
        os.rename(unfinished, output_dir)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return True


def _read(path):
    """Parameters in a manifest, or None."""
    if not os.path.isfile(path):
        return None
    try:
        with open(path, encoding="utf-8") as file:
            return json.load(file)
    except ValueError:  # not ours, or damaged: either way not the data set asked for
        return None
