"""A log that goes to the screen and to a file, as the originals' `log_string`."""

import os


class LogFile:
    """Prints lines and writes them to a file, at once; the file is made again if it is deleted.

    Args:
        path: of the text file.
        append: whether to keep what is in it.

    Raises:
        OSError: it cannot be written; also from the methods.
    """

    def __init__(self, path, append=False):
        self._path = os.path.abspath(path)
        if not append:
            with open(self._path, "w", encoding="utf-8"):
                pass

    def log_string(self, out_str):
        """Prints one line and writes it to the file."""
        self.write(out_str)
        print(out_str, flush=True)

    def write(self, out_str):
        """Writes one line to the file alone."""
        os.makedirs(os.path.dirname(self._path), exist_ok=True)
        with open(self._path, "a", encoding="utf-8") as file:
            file.write(out_str + "\n")


def flags_line(flag_values, *names):
    """One line with the flags of a script and their values, as the originals log them.

    Args:
        flag_values: absl.flags.FLAGS.
        *names: a flag of each module whose flags to show, the script's first.
    """
    modules = flag_values.flags_by_module_dict()
    own = [f for name in names for f in modules[flag_values.find_module_defining_flag(name)]]
    return "Namespace(" + ", ".join(f"{flag.name}={flag.value!r}" for flag in own) + ")"
