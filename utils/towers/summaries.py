"""Event files for TensorBoard."""

import glob
import os

import tensorflow.compat.v1 as tf
from absl import logging


class SummaryWriter(tf.summary.FileWriter):
    """A FileWriter that begins a new event file where somebody has deleted its own.

    TensorFlow's goes on writing into the deleted file without a word.
    """

    def add_summary(self, summary, global_step=None):
        """Adds a serialized summary, as `FileWriter.add_summary`."""
        self.flush()
        folder = self.get_logdir()
        if not glob.glob(os.path.join(glob.escape(folder), "events.out.tfevents.*")):
            logging.warning("the event file in %s is gone; a new one is begun", folder)
            self.close()
            os.makedirs(folder, exist_ok=True)
            self.reopen()
        super().add_summary(summary, global_step)
