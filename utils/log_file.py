"""A log that goes to the screen and to a file, as the originals' `log_string`."""


class LogFile:
    """Prints lines and writes them to a file, at once.

    Args:
        path: of the text file.
        append: whether to keep what is in it.
    """

    def __init__(self, path, append=False):
        self._file = open(path, "a" if append else "w", encoding="utf-8")  # noqa: SIM115

    def log_string(self, out_str):
        """Prints one line and writes it to the file."""
        self.write(out_str)
        print(out_str, flush=True)

    def write(self, out_str):
        """Writes one line to the file alone."""
        self._file.write(out_str + "\n")
        self._file.flush()

    def __enter__(self):
        return self

    def __exit__(self, *unused_exception):
        self._file.close()


def flags_line(flag_values, name):
    """One line with the flags of a script and their values, as the originals log them.

    Args:
        flag_values: absl.flags.FLAGS.
        name: of one of the script's flags.
    """
    own = flag_values.flags_by_module_dict()[flag_values.find_module_defining_flag(name)]
    return "Namespace(" + ", ".join(f"{flag.name}={flag.value!r}" for flag in own) + ")"
