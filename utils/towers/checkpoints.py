"""Checkpoints of every port: where they lie, what is in them, how they are written.

    # training, before the graph is finalised
    place = checkpoints.prepare_checkpoint_directory(
        FLAGS.checkpoint_path, FLAGS.restore, FLAGS.pretrained_model_path, protected=[FLAGS.training_data_path])
    saver = checkpoints.CheckpointSaver(place.path)          # adds the save ops
    graph.finalize()
    session.run(init)
    if FLAGS.restore:
        restored = checkpoints.restore_training(session, place.path)      # .step, .prefix, .side_file('.readers.npz')
    elif place.pretrained_model_path:
        checkpoints.load_pretrained(session, place.pretrained_model_path)
    saver.save(session, step, side_files={'.readers.npz': lambda path: save_reader_state(path, state)})

    # evaluation
    restored = checkpoints.restore_for_evaluation(
        session, FLAGS.checkpoint_path, use_moving_averages=FLAGS.use_moving_averages)

No function but the constructor of CheckpointSaver adds an op: values are read with TensorFlow's checkpoint reader,
all of them before the first is assigned, and fed to the variables' own initializers.
"""


class CheckpointError(ValueError):
    """What is wrong with a checkpoint or its folder, in one sentence."""


def prepare_checkpoint_directory(
    checkpoint_path, restore, pretrained_model_path=None, protected=()
):
    """-> PreparedDirectory(path, pretrained_model_path, moved_to); raises CheckpointError."""
    raise NotImplementedError


def candidate_checkpoints(path):
    """-> list of prefixes of complete checkpoints, newest first; raises CheckpointError when there is none."""
    raise NotImplementedError


def restore_training(session, path, variables=None):
    """-> Restored(prefix, step, loaded) with .side_file(suffix) -> path or None; raises CheckpointError."""
    raise NotImplementedError


def restore_for_evaluation(session, checkpoint_path, use_moving_averages=True, variables=None):
    """-> Restored(prefix, step, loaded); raises CheckpointError."""
    raise NotImplementedError


def load_pretrained(session, path, variables=None):
    """-> LoadReport(prefix, loaded, missing, shape_differs, unused), lists of names; raises CheckpointError."""
    raise NotImplementedError


class CheckpointSaver:
    """Writes `model.ckpt-<step>` with the names of `variables` only. Make it before the graph is finalised."""

    def __init__(self, directory, variables=None, max_to_keep=5, basename="model.ckpt"):
        raise NotImplementedError

    def save(self, session, step, side_files=None):
        """-> prefix; raises CheckpointError (nothing of this step is left, older checkpoints intact)."""
        raise NotImplementedError
