"""The single files of an ICDAR 2015 folder, images and annotations, in the shapes people have them.

An annotation has one quadrilateral a line,

    x1,y1,x2,y2,x3,y3,x4,y4,transcription

with corners in pixels; the transcription `###` or `*` marks a region that is neither text nor
background ("don't care").

Whatever cannot be used becomes a `Problem` (file, line, reason), which is logged once in a process,
however often the file is read again.
"""

import collections
import csv
import dataclasses
import io
import os
import threading

import cv2
import numpy as np
from absl import logging

_FORMAT_TEXT = "expected 8 numbers separated by commas"
_LARGEST = float(np.finfo(np.float32).max)
_BLANKS = " \t\v\f\x1a\xa0\ufeff"  # with DOS's end-of-file, no-break space, byte-order mark
_NO_AREA = 1e-6  # square pixels; far above the rounding of a zero area, far below any region
_TAIL = 1 << 16  # bytes at the end of a JPEG file that are searched first for its end marker

_logged = set()
_logged_lock = threading.Lock()


@dataclasses.dataclass(frozen=True)
class Problem:
    """Why a file, or one line of it, cannot be used; `line` counts from 1, None: the whole file."""

    file: str
    line: int | None
    reason: str

    def __str__(self):
        place = self.file if self.line is None else f"{self.file}:{self.line}"
        return f"{printable(place)}: {self.reason}"


class FileError(ValueError):
    """A file that cannot be used; `problem` says which, where and why."""

    def __init__(self, file, line, reason):
        super().__init__(file, line, reason)  # all three, so that the error can be pickled
        self.problem = Problem(os.fspath(file), line, reason)

    def __str__(self):
        return str(self.problem)


class ImageError(FileError):
    """An image file that cannot be used."""


class AnnotationError(FileError):
    """An annotation file of which no line can be used."""


def load_annotation(path, *, report=None):
    """Reads the quadrilaterals of one annotation file.

    UTF-8 with or without byte-order mark, UTF-16 with one, Latin-1 as the last resort; any line
    ends. Blank lines are skipped, and so, with a report, are lines that are not
    `8 numbers[,transcription]` and quadrilaterals without area. Numbers may be negative, outside
    the image or have decimals; the transcription may be missing (a word like any other), quoted,
    and hold commas. As in the original its last comma-separated field decides about "don't care".

    Args:
      path: annotation file.
      report: called with (file, line, reason) for each line left out; None logs each once.

    Returns:
      (polys, tags): corners [N, 4, 2] float32 as (x, y) in pixels, in the file's order, and [N]
      bool, True for "don't care". N is 0 for an empty file.

    Raises:
      AnnotationError: the file cannot be read, or has lines and none of them is of the form above
        (to take its image for background would be wrong).
    """
    polys, tags, _, problems = parse_annotation(path)
    tell(problems, report)
    return polys, tags


def read_image(path):
    """Reads an image as `cv2.imread(path)` does: 8 bits, 3 channels, turned as its EXIF data say.

    What the file holds decides, not its extension. Unlike `cv2.imread` it takes any file name on
    any system, and refuses a file that ends too early instead of making up the missing part.

    Returns:
      [height, width, 3] uint8, channels in the order blue, green, red.

    Raises:
      ImageError: not there, empty, cut off, or not an image.
    """
    data = _read_file(path, ImageError)
    defect = _defect(io.BytesIO(data), len(data))
    if defect:
        raise ImageError(path, None, defect)
    return _decode(path, data)


def check_image(path):
    """Looks at size, kind and end of an image file, without decoding a JPEG or PNG.

    Finds, in some 30 microseconds a file, what an interrupted download or a full disk leaves
    behind; damage in the middle of a file shows only in `read_image`.

    Raises:
      ImageError: as `read_image`.
    """
    try:
        with open(path, "rb") as stream:
            defect = _defect(stream, os.fstat(stream.fileno()).st_size)
            # Anything but JPEG and PNG is too rare for decoding it to take long.
            rest = None if defect or _container(stream) else _read_all(stream)
    except OSError as error:
        raise ImageError(path, None, f"cannot be read ({error.strerror or error})") from error
    if defect:
        raise ImageError(path, None, defect)
    if rest is not None:
        _decode(path, rest)


def problems_summary(problems, limit=50):
    """A printable list of problems, one a line: the first ones, then how many more of each kind.

    Args:
      problems: list of `Problem`.
      limit: number of problems with a line of their own; None lists all.

    Returns:
      A string without a final line end; empty for no problems.
    """
    shown = problems if limit is None else problems[:limit]
    kinds = collections.Counter(_kind(p.reason) for p in problems[len(shown) :])
    lines = [str(p) for p in shown]
    lines += [f"... and {number} more: {kind}" for kind, number in kinds.most_common()]
    return "\n".join(lines)


def warn_once(problem):
    """Logs a problem unless this process has logged the same one before."""
    with _logged_lock:
        if problem in _logged:
            return
        _logged.add(problem)
    logging.warning("skipped %s", problem)


def tell(problems, report=None):
    """Hands each problem to `report(file, line, reason)`; logs it once where that is None."""
    for problem in problems:
        if report is None:
            warn_once(problem)
        else:
            report(problem.file, problem.line, problem.reason)


def printable(text):
    """A path as a string that every stream can print.

    A name that is not valid in the file system's encoding reaches us with lone surrogates.
    """
    return os.fspath(text).encode("utf-8", "backslashreplace").decode("utf-8")


def _kind(reason):
    """The part of a reason that problems of the same kind share."""
    return reason.partition(",")[0].partition(":")[0]


def _read_all(stream):
    stream.seek(0)
    return stream.read()


def _read_file(path, error_class):
    if not os.path.isfile(path):  # also keeps us from waiting for ever at a named pipe
        reason = "not a file" if os.path.exists(path) else "there is no such file"
        raise error_class(path, None, reason)
    try:
        with open(path, "rb") as stream:
            return stream.read()
    except OSError as error:
        raise error_class(path, None, f"cannot be read ({error.strerror or error})") from error


# -------------------------------------------------------------------------------------- images


def _decode(path, data):
    try:
        # From memory, because OpenCV cannot open every file name on every system.
        image = cv2.imdecode(np.frombuffer(data, np.uint8), cv2.IMREAD_COLOR)
    except cv2.error as error:  # for instance more pixels than OpenCV's limit
        raise ImageError(path, None, f"cannot be decoded ({error.err})") from error
    if image is None:
        raise ImageError(path, None, _what_instead(data))
    return image


def _container(stream):
    stream.seek(0)
    start = stream.read(8)
    if start.startswith(b"\xff\xd8\xff"):
        return "JPEG"
    return "PNG" if start == b"\x89PNG\r\n\x1a\n" else None


def _defect(stream, size):
    """What an image file lacks as seen without decoding it: a reason, or None."""
    if not size:
        return "the file is empty (0 bytes)"
    container = _container(stream)
    if container == "JPEG" and not _jpeg_ends(stream, size):
        return f"cut off, its {size} bytes do not reach the end of the JPEG data"
    if container == "PNG" and not _png_ends(stream, size):
        return f"cut off, its {size} bytes do not reach the end of the PNG data"
    return None


def _jpeg_ends(stream, size):
    """Whether an end marker follows the start of the picture's data; more bytes may follow it.

    The segments before the first scan are stepped over, because a thumbnail in one of them has an
    end marker too.
    """
    position = 2
    while position + 4 <= size:
        stream.seek(position)
        head = stream.read(4)
        marker = head[1]
        if head[0] != 0xFF or marker == 0xDA:  # a stray byte, or the start of a scan
            break
        fill_byte = marker == 0xFF
        position += 1 if fill_byte else 2 + int.from_bytes(head[2:], "big")
    for start in (max(position, size - _TAIL), position):
        stream.seek(start)
        if b"\xff\xd9" in stream.read():
            return True
    return False


def _png_ends(stream, size):
    position = 8
    while position + 12 <= size:
        stream.seek(position)
        head = stream.read(8)
        position += 12 + int.from_bytes(head[:4], "big")
        if head[4:] == b"IEND":
            return True
    return False


def _what_instead(data):
    """Describes a file that no decoder takes."""
    start = data[:200].lstrip(b"\xef\xbb\xbf \t\r\n")
    if start.startswith(b"version https://git-lfs"):
        return "not an image but a Git LFS pointer; fetch the file itself with `git lfs pull`"
    if start.startswith((b"\xff\xd8\xff", b"\x89PNG")):
        return "the image data are damaged"
    if not any(byte < 9 for byte in start):
        kind = "web page or XML" if start.startswith(b"<") else "text"
        return f"not an image but a {kind} file"
    return "not an image that OpenCV can decode"


# --------------------------------------------------------------------------------- annotations


def parse_annotation(path):
    """Reads an annotation as `load_annotation` does, and tells the line numbers.

    Returns:
      (polys [N, 4, 2] float32, tags [N] bool, list of N line numbers, list of `Problem`).

    Raises:
      AnnotationError: as `load_annotation`.
    """
    text = _decode_text(path, _read_file(path, AnnotationError))
    rows, tags, numbers, problems = [], [], [], []
    # Not splitlines(): it also splits at characters that are part of a Latin-1 transcription.
    lines = text.replace("\r\n", "\n").replace("\r", "\n").split("\n")
    for number, line in enumerate(lines, 1):
        fields = line.split(",", 8)
        try:
            row = [float(field) for field in fields[:8]]
        except ValueError:
            row = ()
        if len(row) != 8 or not _is_finite(row):
            line = line.strip(_BLANKS)
            if not line:
                continue
            row, fields, reason = _parse_unusual_line(line)
            if reason:
                problems.append(Problem(os.fspath(path), number, reason))
                continue
        rows.append(row)
        tags.append(len(fields) > 8 and _is_dont_care(fields[8]))
        numbers.append(number)
    if problems and not rows:
        first, count = problems[0], len(problems)
        others = f" (none of the {count} lines can be used)" if count > 1 else ""
        raise AnnotationError(path, first.line, first.reason + others)
    polys = np.array(rows, np.float64).reshape(-1, 4, 2)
    tags = np.array(tags, bool)
    keep = np.abs(_areas(polys)) >= _NO_AREA
    if not keep.all():
        for i in np.flatnonzero(~keep):
            problems.append(Problem(os.fspath(path), numbers[i], "the box has no area"))
        problems.sort(key=lambda problem: problem.line)
        numbers = [numbers[i] for i in np.flatnonzero(keep)]
        polys, tags = polys[keep], tags[keep]
    return polys.astype(np.float32), tags, numbers, problems


def _decode_text(path, data):
    if data.startswith((b"\xff\xfe", b"\xfe\xff")):
        try:
            return data.decode("utf-16")
        except UnicodeDecodeError as error:
            reason = "starts like UTF-16 text but is none; save it as UTF-8"
            raise AnnotationError(path, None, reason) from error
    if b"\0" in data:
        reason = "not a text file, it has zero bytes; save it as UTF-8"
        raise AnnotationError(path, None, reason)
    data = data.removeprefix(b"\xef\xbb\xbf")
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        return data.decode("latin-1")


def _is_finite(row):
    # One comparison for all eight: the sum is NaN or infinite where one of them is.
    return sum(map(abs, row)) < _LARGEST


def _parse_unusual_line(line):
    """(8 numbers, fields, None) where the numbers are quoted, else (None, None, reason)."""
    fields = [field.strip(_BLANKS) for field in _csv_fields(line)]
    row = []
    for field in fields[:8]:
        try:
            row.append(float(field))
        except ValueError:
            break
    if len(row) == 8:
        if _is_finite(row):
            return row, fields[:8] + fields[8:][-1:], None
        return None, None, f"{_FORMAT_TEXT}, got one that is not finite in {_excerpt(line)}"
    hint = ""
    if len(fields) == 1 and '"' in line:
        hint = "; take away the quotes around the whole line"
    elif line.count(";") >= 7:
        hint = "; write commas in place of semicolons"
    elif line.count("\t") >= 7:
        hint = "; write commas in place of tabs"
    elif len(fields) < 8 <= len(line.split()):
        hint = "; write commas between the numbers"
    elif len(row) == 4:
        hint = "; write all four corners of the rectangle"
    return None, None, f"{_FORMAT_TEXT}, got {_excerpt(line)}{hint}"


def _is_dont_care(transcription):
    """Whether the last comma-separated field of a transcription is `###` or `*`, quoted or not."""
    text = transcription.strip("," + _BLANKS)
    if not text.endswith(("#", "*", '"')):
        return False
    return _csv_fields(text)[-1].strip(_BLANKS) in ("###", "*")


def _csv_fields(text):
    try:
        return next(csv.reader([text], skipinitialspace=True))
    except csv.Error:  # a field longer than the module's limit
        return text.split(",")


def _excerpt(line):
    return ascii(line if len(line) <= 60 else line[:57] + "...")


def _areas(polys):
    """Signed areas [N] of quadrilaterals [N, 4, 2] in square pixels (shoelace formula)."""
    x, y = polys[..., 0], polys[..., 1]
    return 0.5 * (x * np.roll(y, -1, axis=1) - np.roll(x, -1, axis=1) * y).sum(axis=1)
