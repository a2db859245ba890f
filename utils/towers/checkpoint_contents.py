"""What is in a checkpoint: reading it, comparing it with a graph's variables, saying what it is.

No graph or session is needed. TensorFlow's checkpoint reader verifies the checksums of what it
reads; its various exceptions become one sentence that names the file.
"""

import os
import re
from typing import NamedTuple

import numpy as np
import tensorflow.compat.v1 as tf

from utils.towers import checkpoint_files
from utils.towers.checkpoint_files import CheckpointError

# Collection of the global variables that only some settings have: a checkpoint may lack them.
OPTIONAL_VARIABLES = "optional_variables"
AVERAGE_SUFFIX = "/ExponentialMovingAverage"  # as tf.train.ExponentialMovingAverage names them

# A truncated shard raises IndexError, an unreadable type ValueError, most others OpError.
_READ_ERRORS = (tf.errors.OpError, LookupError, ValueError, NotImplementedError)
_OBJECT_GRAPH = "_CHECKPOINTABLE_OBJECT_GRAPH"
_EXAMPLES = 3


class DamagedCheckpointError(CheckpointError):
    """A file of the checkpoint is truncated or does not match its checksum."""


class CheckpointReader:
    """TensorFlow's checkpoint reader, with errors that name the damaged file.

    Args:
        prefix: path of a V2 checkpoint without extension, or of a V1 file.

    Attributes:
        shapes: {name: list of int}.
        dtypes: {name: tf.DType}.

    Raises:
        DamagedCheckpointError: the index, or the V1 file, cannot be read.
    """

    def __init__(self, prefix):
        self.prefix = prefix
        try:
            self._reader = tf.train.NewCheckpointReader(prefix)
            self.shapes = self._reader.get_variable_to_shape_map()
            self.dtypes = self._reader.get_variable_to_dtype_map()
        except _READ_ERRORS as error:
            file = prefix if os.path.isfile(prefix) else prefix + ".index"
            raise DamagedCheckpointError(f"{file} is damaged: {reason(error)}") from error

    def read(self, name):
        """Value of one tensor as an array.

        Raises:
            DamagedCheckpointError: its file is damaged.
        """
        try:
            return self._reader.get_tensor(name)
        except _READ_ERRORS as error:
            raise DamagedCheckpointError(
                f"{self._data_file(error)} is damaged at variable {name}: {reason(error)}"
            ) from error

    def _data_file(self, error):
        """The data file that an error is about: its name, or `shard N`, stands in the message."""
        shards = checkpoint_files.shard_names(self.prefix)
        if not shards:
            return self.prefix
        number = re.search(r"shard (\d+)", str(error))
        named = [name for name in shards if name in str(error)]
        if number and not named:
            named = shards[int(number[1]) :][:1]
        folder = os.path.dirname(self.prefix)
        return " or ".join(os.path.join(folder, name) for name in named or shards)


class Comparison(NamedTuple):
    """A checkpoint against the variables that are wanted from it: lists of names.

    Attributes:
        found: stored with the variable's shape and type.
        missing: not stored.
        differs: texts `NAME is [64] float32 there and [128] float32 here`.
        unused: stored and not wanted.
    """

    found: list
    missing: list
    differs: list
    unused: list


def compare(reader, wanted):
    """Which of the wanted variables a checkpoint has.

    Args:
        reader: CheckpointReader.
        wanted: {name in the checkpoint: variable}.

    Returns:
        A Comparison.
    """
    result = Comparison([], [], [], sorted(set(reader.shapes) - set(wanted) - {_OBJECT_GRAPH}))
    for name, variable in wanted.items():
        if name not in reader.shapes:
            result.missing.append(name)
            continue
        stored, own = reader.shapes[name], variable.shape.as_list()
        dtype, own_dtype = reader.dtypes[name], variable.dtype.base_dtype
        # Step counters are float32 in some originals and integers in others.
        scalars = stored == own == [] and dtype != tf.string
        if stored == own and (dtype == own_dtype or scalars):
            result.found.append(name)
        else:
            there = f"{stored} {dtype.name}"
            result.differs.append(f"{name} is {there} there and {own} {own_dtype.name} here")
    return result


def slot_names(names, among):
    """Those of `names` that are an optimizer's: `<variable>/Momentum`, `beta1_power`.

    Args:
        names: iterable of names.
        among: all names, in which the slots' variables are looked up.
    """
    known = set(among)
    return {
        name
        for name in names
        if not name.endswith(AVERAGE_SUFFIX)
        and (name.rpartition("/")[0] in known or re.search(r"(^|/)beta[12]_power(_\d+)?$", name))
    }


def explain(reader, wanted, raw, step_name, describe=None):
    """Says what a checkpoint is that does not fit.

    Args:
        reader: CheckpointReader.
        wanted: {name in the checkpoint: variable}, as it was asked for.
        raw: {name: variable}, the same variables under their own names.
        step_name: name of the step counter.
        describe: function of {name in the checkpoint: shape} that says which network it is, or
            returns None.

    Returns:
        One sentence with 'N of M variables found'.
    """
    compared = compare(reader, wanted)
    slots = slot_names(raw, raw)
    network = {
        name: variable
        for name, variable in raw.items()
        if name != step_name and name not in slots and not name.endswith(AVERAGE_SUFFIX)
    }
    fit = compare(reader, network)
    if _OBJECT_GRAPH in reader.shapes:
        return _sentence(
            reader,
            "is an object-based checkpoint (Keras or tf.train.Checkpoint)",
            fit,
            "pass one that tf.train.Saver wrote",
        )
    if fit.missing or fit.differs:
        return _explain_network(reader, fit, describe)
    averages = [name for name in compared.missing if name.endswith(AVERAGE_SUFFIX)]
    if averages:
        few = "only some" if len(averages) < _count_averages(wanted) else "no"
        return _sentence(
            reader,
            f"holds {few} moving averages of the weights, though the weights themselves are there",
            compared,
            "pass use_moving_averages=False to evaluate those, or a checkpoint with averages",
        )
    foreign = slot_names(compared.unused, {*raw, *reader.shapes})
    if foreign or set(compared.missing) & slots:
        stored = slot_names(reader.shapes, reader.shapes)
        return _sentence(
            reader,
            f"was written with another optimizer, it has {_optimizers(stored)} and this training"
            f" {_optimizers(slots)}",
            compared,
            "pass that optimizer, or start a new training from its weights",
        )
    return _sentence(
        reader,
        "holds the weights and not the whole state of a training",
        compared,
        "pass a checkpoint of a training, or start a new one from its weights",
    )


def nonfinite_tensors(prefix):
    """Reads a checkpoint back: names of its tensors that hold NaN or infinity.

    Args:
        prefix: path of the checkpoint without extension.

    Raises:
        DamagedCheckpointError: a file cannot be read back.
    """
    reader = CheckpointReader(prefix)
    names = sorted(name for name, dtype in reader.dtypes.items() if dtype.is_floating)
    return [name for name in names if not _all_finite(reader.read(name))]


def reason(error):
    """What TensorFlow or the system says went wrong, as part of a sentence.

    The message of an op that failed has one line of its own before `[[{{node`, in pages of others.

    Args:
        error: OSError, or an error of TensorFlow.
    """
    text = getattr(error, "strerror", None) or getattr(error, "message", None) or str(error)
    line = re.search(r"^(.+)\n\s*\[\[\{\{node", text, re.MULTILINE)
    text = line[1] if line else text.strip().partition("\n")[0]
    text = re.sub(r"^.*\.tempstate\d+; ", "", text)  # the path of a file that is gone again
    return text.strip().rstrip(".") or type(error).__name__


def _all_finite(value):
    value = np.asarray(value)
    return bool(np.isfinite(value if value.dtype.kind == "f" else value.astype(np.float32)).all())


def _explain_network(reader, fit, describe):
    known = describe(reader.shapes) if describe else None
    if known:
        return _sentence(reader, f"is of {known}", fit, "pass a checkpoint of this network")
    if not fit.missing:
        return _sentence(
            reader,
            "has this network's variables with other shapes",
            fit,
            "pass a checkpoint of the same network and settings",
        )
    found, missing = _scopes(fit.found), _scopes(fit.missing)
    others = _scopes(name for name in fit.unused if "/" in name)
    if fit.found and not fit.differs and not found & missing and others <= found:
        return _sentence(
            reader,
            f"is a bare backbone, it has {', '.join(sorted(found))} and lacks"
            f" {', '.join(sorted(missing))}",
            fit,
            "pass it as the pretrained model to train, or a checkpoint of the whole network",
        )
    slots = slot_names(reader.shapes, reader.shapes)
    own = [n for n in fit.unused if n not in slots and not n.endswith(AVERAGE_SUFFIX)]
    own = ", ".join(own[-_EXAMPLES:]) or "nothing else"  # the first are often counters
    return _sentence(
        reader,
        f"is of another network (it has {own})",
        fit,
        "pass a checkpoint of this network",
    )


def _sentence(reader, what, compared, instead):
    total = len(compared.found) + len(compared.missing) + len(compared.differs)
    text = f"{reader.prefix} {what}: {len(compared.found)} of {total} variables found"
    if compared.differs:
        text += f", {len(compared.differs)} of another shape ({compared.differs[0]})"
    if compared.missing:
        examples = ", ".join(compared.missing[:_EXAMPLES])
        text += f", {len(compared.missing)} missing (such as {examples})"
    return f"{text}; {instead}"


def _scopes(names):
    return {name.split("/")[0] for name in names}


def _count_averages(names):
    return sum(name.endswith(AVERAGE_SUFFIX) for name in names)


def _optimizers(slots):
    """'Adam' for the slots `w/Adam`, `w/Adam_1`, `beta1_power`."""
    leaves = {re.sub(r"_\d+$", "", name.rpartition("/")[2]) for name in slots}
    leaves = {leaf for leaf in leaves if not re.fullmatch(r"beta[12]_power", leaf)}
    return " and ".join(sorted(leaves)) or "no slots"
