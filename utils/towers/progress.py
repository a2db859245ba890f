"""A training by epochs: where it is, and its checkpoints, the best one among them."""

import dataclasses
import json
import os

from utils.towers.checkpoints import CheckpointError, CheckpointSaver

SUFFIX = ".progress.json"  # of the file beside each checkpoint
BEST = "best"  # folder of the best checkpoint, in that of the others


@dataclasses.dataclass
class Progress:
    """Where a training is.

    Attributes:
        seed: of weights, dropout and data.
        epoch: number of the epoch in progress.
        trained: whether its training part is over, so that its evaluation is next.
        best_accuracy: best accuracy of an evaluation so far.
        settings: what else an evaluation or a restored training compares with its own.
    """

    seed: int
    epoch: int = 0
    trained: bool = False
    best_accuracy: float = -1.0
    settings: dict = dataclasses.field(default_factory=dict)

    def write(self, path):
        """Writes it as JSON, for `side_files` of CheckpointSaver.save."""
        with open(path, "w", encoding="utf-8") as file:
            json.dump(dataclasses.asdict(self), file)


def read_progress(prefix):
    """Reads the file beside a checkpoint.

    Args:
        prefix: path of the checkpoint without extension.

    Returns:
        A Progress, or None where there is no such file.

    Raises:
        CheckpointError: the file is damaged.
    """
    path = prefix + SUFFIX
    try:
        with open(path, encoding="utf-8") as file:
            return Progress(**json.load(file))
    except FileNotFoundError:
        return None
    except (ValueError, TypeError) as error:
        raise CheckpointError(
            f"{path} is damaged ({error}); it must be as the training wrote it, remove it to count"
            " epochs from 0"
        ) from error


class EpochCheckpoints:
    """Saves checkpoints with their Progress: regular ones, and the one with the best accuracy.

    Args:
        directory: folder; the best checkpoint goes to `best` in it.
        log_string: called with a line for each checkpoint.
        flag: what the messages call the folder.
    """

    def __init__(self, directory, log_string, flag="log_dir"):
        self._log_string = log_string
        self._saver = CheckpointSaver(directory, flag=flag)
        best = os.path.join(directory, BEST)
        self._best_saver = CheckpointSaver(best, max_to_keep=1, flag=flag)
        self._saved = None

    def save(self, session, step, progress, side_files):
        """Saves a regular checkpoint, unless this step has one with this Progress.

        Args:
            session, step, side_files: of CheckpointSaver.save.
            progress: Progress.

        Raises:
            CheckpointError: as CheckpointSaver.save.
        """
        saved = step, dataclasses.asdict(progress)
        if saved != self._saved:
            self._save(self._saver, session, step, progress, side_files)
            self._saved = saved

    def save_if_best(self, accuracy, session, step, progress, side_files):
        """Saves the best checkpoint if `accuracy` is better than all before, and notes it."""
        if accuracy > progress.best_accuracy:
            progress.best_accuracy = accuracy
            self._save(self._best_saver, session, step, progress, side_files)

    def _save(self, saver, session, step, progress, side_files):
        prefix = saver.save(session, step, {**side_files, SUFFIX: progress.write})
        self._log_string(f"Model saved in file: {prefix}")
