"""Where the readers of a run stand, and the file that keeps it beside a checkpoint.

A state is a dict with one entry a reader in each list:

    next_reader  int, reader of the next batch
    batches      list of int, batches handed out
    ended        list of bool, whether the generator has ended
    readers      list of the generators' own states (flat dicts), None before the first batch
"""

import json
import os
import zipfile
import zlib

import numpy as np
from absl import logging

_FORMAT = "reader-state-1"


def initial_state(num_readers):
    """State before the first batch."""
    return {
        "next_reader": 0,
        "batches": [0] * num_readers,
        "ended": [False] * num_readers,
        "readers": [None] * num_readers,
    }


def advanced_state(state, index, *, generator_state=None, handed_out=0, ended=False):
    """State after a batch or the end of reader `index`; the given one stays as it is."""

    def replaced(values, value):
        return [*values[:index], value, *values[index + 1 :]]

    return {
        "next_reader": (index + 1) % len(state["readers"]),
        "batches": replaced(state["batches"], state["batches"][index] + handed_out),
        "ended": replaced(state["ended"], state["ended"][index] or ended),
        "readers": replaced(state["readers"], generator_state) if handed_out else state["readers"],
    }


def check_state(state, num_readers):
    """Raises ValueError unless `num_readers` readers can go on from `state`."""
    known = len(state["readers"])
    if known != num_readers:
        raise ValueError(
            f"num_readers is {num_readers} but the reader state is of {known}, and the order of "
            f"batches depends on it; pass num_readers={known} or start without a state"
        )
    for index, generator_state in enumerate(state["readers"]):
        if generator_state is None and state["batches"][index] and not state["ended"][index]:
            raise ValueError(
                f"the state of reader {index} is empty because its generator has no get_state(); "
                "going on needs get_state() and set_state(); start without a state"
            )


def save_reader_state(path, state, settings=None):
    """Writes a state as one .npz file, whole or not at all, without pickle.

    Args:
      path: of the file; an older one is replaced.
      state: from `GeneratorEnqueuer.get_state()`; its generators' states must be flat dicts of
        arrays, numbers, bools and strings.
      settings: dict (of what JSON can hold) that the order of the batches depends on besides; see
        `load_matching_state`.

    Raises:
      ValueError: a value is of another type.
      OSError: the file cannot be written; an older one is untouched.
    """
    arrays = {
        "format": _FORMAT,
        "next_reader": state["next_reader"],
        "batches": np.array(state["batches"], np.int64),
        "ended": np.array(state["ended"], bool),
        "has_state": np.array([reader is not None for reader in state["readers"]], bool),
        "settings": json.dumps(settings or {}),
    }
    for index, reader in enumerate(state["readers"]):
        for name, value in (reader or {}).items():
            arrays[f"reader{index}/{name}"] = value
    for name, value in arrays.items():
        arrays[name] = np.asarray(value)
        if arrays[name].dtype.kind not in "biufU":
            raise ValueError(
                f"{name} of the reader state is a {type(value).__name__}; only arrays, numbers, "
                "bools and strings can be saved; let get_state() of the generator return these"
            )
    # A damaged directory of the archive can lose members without a word: this list tells.
    arrays["names"] = np.array(sorted(arrays))
    temporary = f"{path}.{os.getpid()}.tmp"
    try:
        with open(temporary, "wb") as file:
            np.savez(file, **arrays)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        if os.path.exists(temporary):
            os.remove(temporary)
        raise


def load_matching_state(path, num_readers, settings):
    """Reads a state for `num_readers` readers with `settings`.

    Returns:
      A dict for `GeneratorEnqueuer(states=...)`.

    Raises:
      FileNotFoundError, ValueError: as `load_reader_state`; also where the number of readers or
        the settings differ from those it was saved with, named in the message.
    """
    state, saved = _load(path)
    check_state(state, num_readers)
    different = [
        f"{name} {saved.get(name)} -> {settings.get(name)}"
        for name in sorted(saved.keys() | settings.keys())
        if saved.get(name) != settings.get(name)
    ]
    if different:
        raise ValueError(f"the readers' settings have changed: {', '.join(different)}")
    return state


def state_to_continue(path, num_readers, settings):
    """`load_matching_state`, or None with a warning where the data have to start anew."""
    try:
        return load_matching_state(path, num_readers, settings)
    except (ValueError, OSError) as error:
        logging.warning("the order of the data starts anew: %s", error)
        return None


def load_reader_state(path):
    """Reads what `save_reader_state` wrote, but for the settings.

    Args:
      path: of the file.

    Returns:
      A dict for `GeneratorEnqueuer(states=...)`. Scalars come back as int, float, bool or str,
      lists as arrays.

    Raises:
      FileNotFoundError: there is no such file.
      ValueError: the file is damaged, or something else.
    """
    return _load(path)[0]


def _load(path):
    """(state, settings) of a file."""
    try:
        with np.load(path, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
        if arrays["format"] != _FORMAT:
            raise ValueError(f"its format is {arrays['format']}, not {_FORMAT}")
        lost = set(arrays["names"].tolist()) ^ (set(arrays) - {"names"})
        if lost:
            raise ValueError(f"these parts do not match its list: {', '.join(sorted(lost))}")
        readers = [{} if has_state else None for has_state in arrays["has_state"]]
        for key, value in arrays.items():
            reader, separator, name = key.partition("/")
            if separator:
                index = int(reader.removeprefix("reader"))
                readers[index][name] = value if value.ndim else value.item()
        state = {
            "next_reader": arrays["next_reader"].item(),
            "batches": arrays["batches"].tolist(),
            "ended": arrays["ended"].tolist(),
            "readers": readers,
        }
        return state, json.loads(arrays["settings"].item())
    except FileNotFoundError:
        raise
    # What zipfile and numpy raise over damaged bytes and files of other kinds.
    except (
        zipfile.BadZipFile,
        zlib.error,
        EOFError,
        IndexError,
        KeyError,
        OSError,
        RuntimeError,
        TypeError,
        ValueError,
    ) as error:
        raise ValueError(
            f"{path} is not a complete reader state ({type(error).__name__}: {error}); it must be "
            "as save_reader_state wrote it; remove it to start the data from the beginning"
        ) from error
