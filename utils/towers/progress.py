"""Where a training by epochs is: a small JSON file beside each checkpoint."""

import dataclasses
import json

from utils.towers.checkpoint_files import CheckpointError

SUFFIX = ".progress.json"


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
