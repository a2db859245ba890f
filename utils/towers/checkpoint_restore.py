"""Checkpoints into the variables of a session: a whole training, a network to evaluate, a part.

No op is added, so the graph may be finalised: values are read with TensorFlow's checkpoint reader
and fed to the variables' own initializers. Everything is read before the first variable is
assigned, so that a damaged file leaves the session as it was.
"""

import os
from typing import NamedTuple

import tensorflow.compat.v1 as tf
from absl import logging

from utils.towers.checkpoint_contents import (
    AVERAGE_SUFFIX,
    OPTIONAL_VARIABLES,
    CheckpointReader,
    DamagedCheckpointError,
    compare,
    explain,
    slot_names,
)
from utils.towers.checkpoint_files import (
    READER_STATE_SUFFIX,
    CheckpointError,
    candidate_checkpoints,
    checkpoint_step,
)


class Restored(NamedTuple):
    """What a session was restored from.

    Attributes:
        prefix: path of the checkpoint without extension.
        step: its number of training steps; None where neither a variable nor its name has it.
        loaded: number of variables that were set.
    """

    prefix: str
    step: int | None
    loaded: int

    def side_file(self, suffix=READER_STATE_SUFFIX):
        """Path of a file that was saved beside the checkpoint, or None when there is none."""
        path = self.prefix + suffix
        return path if os.path.isfile(path) else None


class LoadReport(NamedTuple):
    """What a partial restore did; `str()` of it is the summary line.

    Attributes:
        prefix: path of the checkpoint.
        loaded: names of the variables that were set.
        missing: names of variables that the checkpoint lacks; they keep their values.
        shape_differs: texts `NAME is [64] float32 there and [128] float32 here`; these keep
            their values too.
        unused: names in the checkpoint that no variable asked for.
    """

    prefix: str
    loaded: list
    missing: list
    shape_differs: list
    unused: list

    def __str__(self):
        total = len(self.loaded) + len(self.missing) + len(self.shape_differs)
        return (
            f"{self.prefix}: {len(self.loaded)} of {total} variables loaded,"
            f" {len(self.missing)} missing in the checkpoint, {len(self.shape_differs)} whose shape"
            f" differs, {len(self.unused)} of the checkpoint not used"
        )


def newest_undamaged(path):
    """Finds a checkpoint, and reads all of it, before a graph is built for it.

    Args:
        path: folder, whose newest undamaged checkpoint is taken (with a warning for each newer
            one), or one checkpoint's prefix.

    Returns:
        A CheckpointReader.

    Raises:
        CheckpointError: no checkpoint, or none undamaged.
    """

    def read(prefix):
        reader = CheckpointReader(prefix)
        for name in reader.shapes:
            reader.read(name)
        return reader

    return _newest_undamaged(path, read)


def restore_training(session, path, variables=None, step_name="global_step", describe=None):
    """Restores every variable, to go on with a training.

    Variables of the collection OPTIONAL_VARIABLES keep their values where the checkpoint lacks
    them, so these have to be initialised.

    Args:
        session: session of the graph; other variables need not be initialised.
        path: folder, whose newest undamaged checkpoint is taken (with a warning for each newer
            one), or one checkpoint's prefix.
        variables: variables, or {name in the checkpoint: variable}; default all global ones.
        step_name: name of the variable that counts the steps.
        describe: see `checkpoint_contents.explain`.

    Returns:
        A Restored.

    Raises:
        CheckpointError: no checkpoint, none undamaged, or one of something else than this
            training (network, optimizer, a backbone alone); no variable has changed then.
    """
    everything = _by_name(session, variables)
    optional = _optional_names(session)

    def restore(prefix):
        reader = CheckpointReader(prefix)
        wanted = {
            name: variable
            for name, variable in everything.items()
            if name in reader.shapes or variable.op.name not in optional
        }
        compared = compare(reader, wanted)
        foreign_slots = slot_names(compared.unused, {*wanted, *reader.shapes})
        if compared.missing or compared.differs or foreign_slots or not compared.found:
            raise CheckpointError(explain(reader, wanted, wanted, step_name, describe))
        _assign(session, wanted, {name: reader.read(name) for name in wanted})
        return Restored(prefix, stored_step(reader, step_name), len(wanted))

    return _newest_undamaged(path, restore)


def restore_for_evaluation(
    session,
    checkpoint_path,
    use_moving_averages=True,
    variables=None,
    step_name="global_step",
    describe=None,
):
    """Restores a network: trainable variables from their moving averages, the rest as it is.

    Args:
        session: session of the inference graph.
        checkpoint_path: folder, or one checkpoint's prefix.
        use_moving_averages: False takes the trainable variables themselves.
        variables: variables of the network; default all global ones. The step is optional.
        step_name: name of the variable that counts the steps.
        describe: see `checkpoint_contents.explain`.

    Returns:
        A Restored.

    Raises:
        CheckpointError: no checkpoint, none undamaged, no averages, or another network; no
            variable has changed then.
    """
    raw = _by_name(session, variables)
    wanted = evaluation_names(raw, session.graph) if use_moving_averages else raw

    def restore(prefix):
        reader = CheckpointReader(prefix)
        names = dict(wanted)
        if step_name not in reader.shapes:
            names.pop(step_name, None)
        compared = compare(reader, names)
        if compared.missing or compared.differs or not compared.found:
            raise CheckpointError(explain(reader, names, raw, step_name, describe))
        _assign(session, names, {name: reader.read(name) for name in names})
        return Restored(prefix, stored_step(reader, step_name), len(names))

    return _newest_undamaged(checkpoint_path, restore)


def evaluation_names(raw, graph):
    """Names as `tf.train.ExponentialMovingAverage.variables_to_restore` maps them.

    Args:
        raw: {variable's name: variable}.
        graph: their graph; what is in its MOVING_AVERAGE_VARIABLES counts as averaged, as do the
            trainable variables.

    Returns:
        {name in the checkpoint: variable}.
    """
    averaged = {v.op.name for v in graph.get_collection(tf.GraphKeys.MOVING_AVERAGE_VARIABLES)}
    return {
        name + AVERAGE_SUFFIX if variable.trainable or name in averaged else name: variable
        for name, variable in raw.items()
    }


def load_pretrained(session, path, variables=None, step_name="global_step"):
    """Sets what a checkpoint has of a network, to start a new training from it.

    The step, the optimizer's slots and OPTIONAL_VARIABLES are not asked for: a fine-tuning starts
    at step 0. A moving average that the checkpoint lacks gets its variable's value, so that it does
    not start at random.

    Args:
        session: session whose variables are initialised.
        path: folder, prefix or V1 file, for example slim's resnet_v1_50.ckpt.
        variables: variables, or {name in the checkpoint: variable}; default all global ones but
            the step, slots, averages and OPTIONAL_VARIABLES.
        step_name: name of the variable that counts the steps.

    Returns:
        A LoadReport, which is logged as well.

    Raises:
        CheckpointError: no checkpoint, none undamaged, or not one variable fits; no variable has
            changed then.
    """
    everything = _by_name(session, None)
    averages = {name: v for name, v in everything.items() if name.endswith(AVERAGE_SUFFIX)}
    if variables is None:
        leave = {step_name, *averages, *slot_names(everything, everything)}
        leave |= _optional_names(session)
        wanted = {name: v for name, v in everything.items() if name not in leave}
    else:
        wanted = _by_name(session, variables)

    def load(prefix):
        reader = CheckpointReader(prefix)
        compared = compare(reader, wanted)
        if not compared.found:
            raise CheckpointError(explain(reader, wanted, wanted, step_name))
        values = {name: reader.read(name) for name in compared.found}
        average_values = {
            wanted[name].op.name + AVERAGE_SUFFIX: value for name, value in values.items()
        }
        average_values |= {name: reader.read(name) for name in compare(reader, averages).found}
        _assign(session, wanted, values)
        _assign(session, averages, {n: average_values[n] for n in averages if n in average_values})
        unused = [name for name in compared.unused if name not in averages]
        return LoadReport(prefix, compared.found, compared.missing, compared.differs, unused)

    report = _newest_undamaged(path, load)
    logging.info("pretrained model %s", report)
    for title, names in (("missing", report.missing), ("shape differs", report.shape_differs)):
        if names:
            logging.info("%s in %s: %s", title, report.prefix, ", ".join(names))
    return report


def _optional_names(session):
    return {v.op.name for v in session.graph.get_collection(OPTIONAL_VARIABLES)}


def _by_name(session, variables):
    if isinstance(variables, dict):
        return variables
    if variables is None:
        variables = session.graph.get_collection(tf.GraphKeys.GLOBAL_VARIABLES)
    return {variable.op.name: variable for variable in variables}


def _newest_undamaged(path, use):
    """Result of `use(prefix)` for the newest checkpoint that is not damaged."""
    candidates = candidate_checkpoints(path)
    damages = []
    for prefix in candidates:
        try:
            return use(prefix)
        except DamagedCheckpointError as error:
            damages.append(str(error))
            if len(damages) < len(candidates):
                logging.warning("%s; trying the next older checkpoint", error)
    raise DamagedCheckpointError(
        f"no undamaged checkpoint in {path}: {'; '.join(damages)}; copy it again or pass another"
    )


def stored_step(reader, step_name="global_step"):
    """Number of training steps of a checkpoint, by its variable or else its name; or None.

    Args:
        reader: CheckpointReader.
        step_name: name of the variable that counts the steps.
    """
    if reader.shapes.get(step_name) == []:
        return int(reader.read(step_name))
    return checkpoint_step(reader.prefix)


def _assign(session, variables, values):
    """Runs the variables' initializers, with the values fed in place of the initial ones."""
    pending = dict(values)
    while pending:  # variables that share one initial value cannot be set in one run
        feed, initializers = {}, []
        for name in list(pending):
            initializer = variables[name].initializer
            initial = initializer.inputs[1].name
            if initial not in feed:
                feed[initial] = pending.pop(name)
                initializers.append(initializer)
        session.run(initializers, feed)
