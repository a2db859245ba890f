"""Result files of text detection, and sets of them or of ground truths: a folder or a .zip file.

The file of image `img_1` may be named `img_1.txt`, `res_img_1.txt` or `gt_img_1.txt`; archives may
have their files inside folders.
"""

import json
import lzma
import os
import re
import tempfile
import unicodedata
import zipfile
import zlib

import cv2

from data.icdar_formats import FileError, Problem, load_annotation, tell

WRITTEN = ".result_files.json"  # list of our result files, in a folder that has pictures too
DRAWN_FOLDER = "with_boxes"  # for drawn pictures that would overwrite the pictures themselves
_BOX_COLOUR = (255, 255, 0)  # blue, green, red
_PREFIXES = ("res_", "gt_")
_RESULT_FILE = re.compile(rb"(-?\d+(,-?\d+){7}\r\n)*")


def image_name(path):
    """'img_1' for img_1.txt, res_img_1.txt, gt_img_1.txt (and for img_1.jpg), in any folder."""
    # macOS archives spell accents in two characters, pictures from elsewhere in one.
    stem = unicodedata.normalize("NFC", os.path.splitext(os.path.basename(path))[0])
    while stem.lower().startswith(_PREFIXES):
        stem = stem.split("_", 1)[1]
    return stem


def by_image_name(paths):
    """Files by the name of the image they belong to.

    Args:
        paths: of result files, ground truths or pictures.

    Returns:
        {image name: path}, in the order of the names of the files.

    Raises:
        ValueError: two files belong to the same image.
    """
    found = {}
    for path in sorted(paths, key=os.path.basename):
        name = image_name(path)
        if name in found:
            raise ValueError(
                f"{os.path.basename(found[name])} and {os.path.basename(path)} both belong to image"
                f" {name}, but one file per image is required; remove one of them"
            )
        found[name] = path
    return found


def load_boxes(path, *, report=None):
    """Reads the boxes of a set of text files.

    Args:
        path: folder (those inside it are not searched) or .zip file.
        report: as in `load_annotation`.

    Returns:
        {image name: (polys [n, 4, 2] float32, don't care [n] bool)}.

    Raises:
        FileNotFoundError: the path does not exist or has no text file.
        ValueError: neither folder nor .zip file, a file that cannot be read, or two files for the
            same image.
    """
    shown = os.path.abspath(path)
    if not os.path.exists(path):
        raise FileNotFoundError(f"{shown} does not exist; pass a folder or .zip of text files")
    with tempfile.TemporaryDirectory() as unpacked:
        if os.path.isdir(path):
            files = [os.path.join(path, name) for name in os.listdir(path)]
        else:
            files = _unpack(path, unpacked)
        files = [file for file in files if _is_text(file) and os.path.isfile(file)]
        if not files:
            raise FileNotFoundError(
                f"{shown} has no .txt file; pass a folder or .zip with one text file per image"
            )
        return {
            name: _load(file, file.replace(unpacked, shown, 1), report)
            for name, file in by_image_name(files).items()
        }


def _load(file, shown, report):
    """`load_annotation`; messages name a file of an archive as `shown`."""

    def report_shown(_, line, reason):
        tell([Problem(shown, line, reason)], report)

    try:
        return load_annotation(file, report=report_shown)
    except FileError as error:
        raise type(error)(shown, error.problem.line, error.problem.reason) from error


def _is_text(path):
    name = os.path.basename(path)
    return name.lower().endswith(".txt") and not name.startswith(".")


def _unpack(path, folder):
    """Unpacks the text files of an archive into `folder`, each into a folder of its own."""
    files = []
    try:
        with zipfile.ZipFile(path) as archive:
            for entry in archive.infolist():
                if entry.is_dir() or "__MACOSX" in entry.filename or not _is_text(entry.filename):
                    continue
                # Of `entry.filename` only the last part: the rest may point out of the folder.
                name = os.path.basename(entry.filename.replace("\\", "/"))
                files.append(os.path.join(folder, str(len(files)), name))
                os.mkdir(os.path.dirname(files[-1]))
                with open(files[-1], "wb") as stream:
                    stream.write(archive.read(entry))
    # Encrypted, packed in a way that Python does not know (both RuntimeError), damaged, cut off.
    except (RuntimeError, zipfile.BadZipFile, zlib.error, lzma.LZMAError, EOFError) as error:
        raise ValueError(
            f"{os.path.abspath(path)} cannot be read as a .zip file ({error}); pass a folder of"
            " text files or a .zip of them"
        ) from error
    return files


def write_boxes(path, quads):
    """Writes a result file: one box a line, 8 integers, CRLF as the competition has it.

    Args:
        path: file.
        quads: [n, 4, 2] int, corners (x, y) in pixels.
    """
    lines = [",".join(str(value) for value in quad.ravel()) + "\r\n" for quad in quads]
    with open(path, "w", newline="") as stream:
        stream.writelines(lines)


def _is_result(path):
    """Whether a file is as `write_boxes` makes it: an annotation has a transcription as well."""
    with open(path, "rb") as stream:
        return _RESULT_FILE.fullmatch(stream.read()) is not None


def write_drawn(path, image, quads):
    """Writes a picture with boxes drawn, in the format that the name asks for.

    Args:
        path: file.
        image: [height, width, 3] uint8, BGR.
        quads: [n, 4, 2] int32, corners (x, y) in pixels.

    Raises:
        OSError: it cannot be written.
    """
    drawn = cv2.polylines(image.copy(), list(quads.reshape(-1, 4, 1, 2)), True, _BOX_COLOUR, 1)
    done, data = cv2.imencode(os.path.splitext(path)[1], drawn)
    if not done:
        raise OSError(f"OpenCV cannot encode {path}; leave out the drawn pictures")
    data.tofile(path)  # unlike cv2.imwrite it takes any name on any system


class OutputFiles:
    """Where the results of each picture go, such that no input is overwritten.

    Drawn pictures keep the names of the pictures. Where the output folder holds the pictures
    themselves, or is searched for them, they go into a folder inside it, and only result files of
    an earlier run are written again.

    Args:
        output_dir: folder; need not exist.
        images: paths of the pictures.
        gt_path: folder or archive of ground truths, or None.
        searched: folder in which the pictures were found, also in folders inside it, or None.

    Raises:
        ValueError: a result file would overwrite a file that may be an annotation.
    """

    def __init__(self, output_dir, images, gt_path=None, searched=None):
        self._folder = os.path.abspath(output_dir)
        real = os.path.realpath(output_dir)
        folders = {os.path.dirname(image) for image in images} | ({searched} - {None})
        beside_images = real in set(map(os.path.realpath, folders))
        self._drawn = os.path.join(self._folder, DRAWN_FOLDER) if beside_images else self._folder
        self._images = images if beside_images else []
        written = self._written()
        among_truths = gt_path is not None and os.path.realpath(gt_path) == real
        if beside_images or among_truths:
            for image in images:
                path = self.result(image)
                ours = os.path.basename(path) in written and _is_result(path)
                if os.path.exists(path) and (among_truths or not ours):
                    raise ValueError(
                        f"{path} lies among the inputs and may be an annotation, so"
                        " it is not overwritten; pass another --output_dir or remove it"
                    )

    def make_folders(self, with_drawn):
        """Makes the folder for result files and, if asked for, that for drawn pictures."""
        os.makedirs(self._drawn if with_drawn else self._folder, exist_ok=True)
        names = {os.path.basename(self.result(image)) for image in self._images}
        if names:
            with open(os.path.join(self._folder, WRITTEN), "w", encoding="utf-8") as stream:
                json.dump(sorted(names | self._written()), stream)

    def _written(self):
        """Names of the result files that earlier runs wrote beside the pictures."""
        try:
            with open(os.path.join(self._folder, WRITTEN), encoding="utf-8") as stream:
                return set(json.load(stream))
        except (OSError, ValueError, TypeError):  # none, or not one of ours
            return set()

    def result(self, image):
        """Path of the result file of a picture."""
        return os.path.join(self._folder, os.path.splitext(os.path.basename(image))[0] + ".txt")

    def drawn(self, image):
        """Path of the drawn picture."""
        return os.path.join(self._drawn, os.path.basename(image))
