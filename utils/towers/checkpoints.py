"""Checkpoints of every port: saving, going on with a training, evaluating, starting from weights.

    # training, before the graph is finalised
    place = checkpoints.prepare_checkpoint_directory(
        FLAGS.checkpoint_path, FLAGS.restore, FLAGS.pretrained_model_path,
        protected=[FLAGS.training_data_path])
    saver = checkpoints.CheckpointSaver(place.path)
    graph.finalize()
    session.run(init)
    if FLAGS.restore:
        restored = checkpoints.restore_training(session, place.path)
        reader_state = restored.side_file()          # a path, or None
    elif place.pretrained_model_path:
        print(checkpoints.load_pretrained(session, place.pretrained_model_path))
    saver.save(session, step, {".readers.npz": lambda path: save_reader_state(path, state)})

    # evaluation
    checkpoints.restore_for_evaluation(session, FLAGS.checkpoint_path, FLAGS.use_moving_averages)

Only the constructor of CheckpointSaver adds ops. This module has the saver, and the public names
of the modules around it: `checkpoint_files`, `checkpoint_contents`, `checkpoint_restore`.
"""

import contextlib
import errno
import filecmp
import os
import re
import shutil

import tensorflow.compat.v1 as tf
from absl import logging

from utils.towers import checkpoint_files
from utils.towers.checkpoint_contents import DamagedCheckpointError, nonfinite_tensors, reason
from utils.towers.checkpoint_files import (
    READER_STATE_SUFFIX,
    STATE_FILE,
    CheckpointError,
    PreparedDirectory,
    candidate_checkpoints,
    checkpoint_step,
    prepare_checkpoint_directory,
)
from utils.towers.checkpoint_restore import (
    LoadReport,
    Restored,
    evaluation_names,
    load_pretrained,
    newest_undamaged,
    restore_for_evaluation,
    restore_training,
    stored_step,
)

__all__ = [
    "READER_STATE_SUFFIX",
    "CheckpointError",
    "CheckpointSaver",
    "DamagedCheckpointError",
    "LoadReport",
    "PreparedDirectory",
    "Restored",
    "candidate_checkpoints",
    "checkpoint_step",
    "evaluation_names",
    "load_pretrained",
    "newest_undamaged",
    "prepare_checkpoint_directory",
    "restore_for_evaluation",
    "restore_training",
    "stored_step",
]

_SCRATCH = ".saving"  # sub-folder in which a checkpoint is written before it is moved into place
_NAMES_SHOWN = 5


class CheckpointSaver:
    """Writes `model.ckpt-<step>` so that whatever happens, and when, a checkpoint remains.

    A checkpoint is written into a sub-folder, read back, and moved into place file by file, the
    index last: without an index it is none. The state file, with relative paths, follows, and
    the oldest checkpoints go after that. Of an earlier run, only checkpoints that have the side
    files of `save` are known to be ours, and take part in the rotation.

    Args:
        directory: folder; made again, with a warning, when it has gone.
        variables: what to save; default the global variables of the current graph, so make the
            saver when all are there and before the graph is finalised.
        max_to_keep: number of checkpoints to keep; 0 or None keeps all.
        basename: first part of the names.
        flag: what the messages call the folder.
    """

    def __init__(
        self,
        directory,
        variables=None,
        max_to_keep=5,
        basename="model.ckpt",
        flag="checkpoint_path",
    ):
        self._directory = checkpoint_files.clean_path(directory)
        self._scratch = os.path.join(self._directory, _SCRATCH)
        self._saver = tf.train.Saver(variables, max_to_keep=max_to_keep)
        self._graph = tf.get_default_graph()
        self._max_to_keep = max_to_keep
        self._basename = basename
        self._flag = flag
        self._made = os.path.isdir(self._directory)
        self._kept = None  # names of our checkpoints, oldest first; known from the first save on
        self._meta_graph = None

    def save(self, session, step, side_files=None):
        """Saves the variables.

        Args:
            session: session of the saver's graph.
            step: number of training steps, the end of the name.
            side_files: {suffix: function that writes the file at the path it is given}, for what
                belongs to the checkpoint and is no variable, such as '.readers.npz'.

        Returns:
            Prefix of the checkpoint.

        Raises:
            CheckpointError: a variable holds NaN or infinity, or the files cannot be written (with
                the reason). Nothing of this checkpoint is left then, older ones are untouched.
        """
        side_files = side_files or {}
        name = f"{self._basename}-{int(step)}"
        prefix = os.path.join(self._directory, name)
        try:
            self._make_directory()
            self._find_ours(side_files)
            self._write(session, name, side_files)
            self._publish(name, side_files)
        except (OSError, tf.errors.OpError, DamagedCheckpointError) as error:
            raise CheckpointError(
                f"cannot save checkpoint {prefix}: {reason(error)}; older checkpoints are"
                f" untouched, make room or pass another {self._flag}"
            ) from error
        finally:
            shutil.rmtree(self._scratch, ignore_errors=True)  # what is left goes at the next save
        self._rotate(side_files)
        return prefix

    def _make_directory(self):
        if self._made and not os.path.isdir(self._directory):
            logging.warning("%s has gone; it is made again", self._directory)
        os.makedirs(self._directory, exist_ok=True)
        self._made = True
        if os.path.lexists(self._scratch):  # of a run that was killed while saving
            shutil.rmtree(self._scratch)

    def _find_ours(self, side_files):
        """First save: an earlier run's checkpoints, and what a killed run left half moved."""
        if self._kept is not None:
            return
        pattern = re.compile(re.escape(self._basename) + r"-\d+")
        found = []
        for entry in os.listdir(self._directory):
            for suffix in side_files:
                name = entry.removesuffix(suffix)
                if name == entry or not pattern.fullmatch(name):
                    continue
                prefix = os.path.join(self._directory, name)
                if os.path.isfile(prefix + ".index"):
                    found.append((os.path.getmtime(prefix + ".index"), checkpoint_step(name), name))
                else:
                    _remove(prefix, side_files)
        self._kept = [name for _, _, name in sorted(set(found))]

    def _write(self, session, name, side_files):
        os.mkdir(self._scratch)
        prefix = os.path.join(self._scratch, name)
        with self._graph.as_default():  # the Saver looks at the current graph, or at eager mode
            self._saver.save(session, prefix, write_meta_graph=False, write_state=False)
        bad = nonfinite_tensors(prefix)
        if bad:
            more = f" and {len(bad) - _NAMES_SHOWN} more" if len(bad) > _NAMES_SHOWN else ""
            raise CheckpointError(
                f"checkpoint {name} is not saved: {', '.join(bad[:_NAMES_SHOWN])}{more} hold NaN or"
                " infinity; older checkpoints are untouched, restore one and lower the learning"
                " rate or check the data"
            )
        if self._meta_graph is None or self._meta_graph[0] != self._graph.version:
            with self._graph.as_default():
                meta_graph = self._saver.export_meta_graph()
            self._meta_graph = self._graph.version, meta_graph.SerializeToString()
        with open(prefix + ".meta", "wb") as file:
            file.write(self._meta_graph[1])
        for suffix, write in side_files.items():
            write(prefix + suffix)
        kept = [other for other in self._kept if other != name and self._exists(other)] + [name]
        listed = kept[-self._max_to_keep :] if self._max_to_keep else kept
        state = tf.train.generate_checkpoint_state_proto(self._directory, name, listed)
        with open(os.path.join(self._scratch, STATE_FILE), "w", encoding="utf-8") as file:
            file.write(str(state))
        for entry in os.listdir(self._scratch):
            _flush(os.path.join(self._scratch, entry))
        self._kept = kept

    def _publish(self, name, side_files):
        """Moves the files into place, the index last; an old index of this name goes first."""
        order = [name + suffix for suffix in side_files] + [name + ".meta"]
        weights = checkpoint_files.shard_names(os.path.join(self._scratch, name))
        weights.append(name + ".index")
        if not all(self._same(entry) for entry in weights):
            order += weights
            _remove_if_there(os.path.join(self._directory, name + ".index"))
        moved, complete = [], False
        try:
            for entry in order:
                os.replace(os.path.join(self._scratch, entry), os.path.join(self._directory, entry))
                moved.append(entry)
            complete = True
        finally:
            if not complete and not self._exists(name):
                for entry in moved:
                    _remove_if_there(os.path.join(self._directory, entry))
        _flush(self._directory)
        os.replace(
            os.path.join(self._scratch, STATE_FILE), os.path.join(self._directory, STATE_FILE)
        )
        _flush(self._directory)

    def _same(self, entry):
        """Whether a file is in place already, as after saving a step twice."""
        old = os.path.join(self._directory, entry)
        new = os.path.join(self._scratch, entry)
        return os.path.isfile(old) and filecmp.cmp(old, new, shallow=False)

    def _rotate(self, side_files):
        while self._max_to_keep and len(self._kept) > self._max_to_keep:
            prefix = os.path.join(self._directory, self._kept.pop(0))
            try:
                _remove(prefix, side_files)
            except OSError as error:
                logging.warning("cannot remove old checkpoint %s: %s", prefix, error.strerror)

    def _exists(self, name):
        return os.path.isfile(os.path.join(self._directory, name + ".index"))


def _remove(prefix, suffixes):
    for path in checkpoint_files.checkpoint_files(prefix, suffixes):
        _remove_if_there(path)


def _remove_if_there(path):
    with contextlib.suppress(FileNotFoundError):
        os.remove(path)


def _flush(path):
    """Onto the disk, so that a power cut does not leave an index without its data."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno != errno.EINVAL:  # a file system that cannot flush a folder
            raise
    finally:
        os.close(descriptor)
