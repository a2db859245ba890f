"""ICDAR 2015 folders as people have them: which images have annotations, and what cannot be used.

An image `img_1.jpg` and its annotation `img_1.txt` (or, as the official download names it,
`gt_img_1.txt`) lie side by side in one folder; the annotation's format stands in
`data/icdar_formats.py`. `scan` goes through a folder before the training starts and says all that
is wrong with it at once; it, `get_images` and `annotation_path` are the only places that know how
files are named.
"""

import dataclasses
import os
import unicodedata

import numpy as np

from data.icdar_formats import (
    AnnotationError,
    FileError,
    ImageError,
    Problem,
    check_image,
    load_annotation,
    parse_annotation,
    printable,
    problems_summary,
    read_image,
    tell,
    warn_once,
)

__all__ = [
    "AnnotationError",
    "FileError",
    "IMAGE_EXTENSIONS",
    "ImageError",
    "MAX_BROKEN",
    "Problem",
    "ScanError",
    "ScanResult",
    "annotation_path",
    "get_images",
    "load_annotation",
    "problems_summary",
    "read_image",
    "scan",
    "warn_once",
]

IMAGE_EXTENSIONS = ("jpg", "png", "jpeg")  # compared without regard to case
MAX_BROKEN = 0.5  # a larger share of broken samples ends a run instead of shrinking the data set

_LOOKED_FOR = ", ".join("." + e for e in IMAGE_EXTENSIONS) + ", upper or lower case"


class ScanError(ValueError):
    """A folder with nothing, or too little, to train on; `result` is its `ScanResult`."""

    def __init__(self, message, result):
        super().__init__(message, result)
        self.result = result

    def __str__(self):
        return self.args[0]


@dataclasses.dataclass
class ScanResult:
    """What `scan` found in a folder.

    Attributes:
      folder: absolute path.
      images: paths of all images found, sorted.
      samples: list of (image path, annotation path) that can be used, in the order of the images.
      problems: list of every `Problem`, those of one image together, in the order of the images.
      unlabelled: paths of sound images without an annotation file.
      broken: list of `Problem`, one for each image that cannot be used although it ought to:
        either the image or its annotation file is at fault.
      num_background: usable samples without any quadrilateral; they serve as background.
      num_words, num_dont_care: quadrilaterals of either kind in the usable samples.
    """

    folder: str
    images: list
    samples: list = dataclasses.field(default_factory=list)
    problems: list = dataclasses.field(default_factory=list)
    unlabelled: list = dataclasses.field(default_factory=list)
    broken: list = dataclasses.field(default_factory=list)
    num_background: int = 0
    num_words: int = 0
    num_dont_care: int = 0

    def summary(self):
        """The counts in one line."""
        return (
            f"{printable(self.folder)}: {len(self.samples)} of {len(self.images)} images can be "
            f"used ({self.num_background} as background only), {len(self.unlabelled)} have no "
            f"annotation file, {len(self.broken)} are broken; {self.num_words} words, "
            f"{self.num_dont_care} don't-care regions; {len(self.problems)} problems"
        )

    def verdict(self, max_broken=MAX_BROKEN):
        """One sentence that says why the folder is no use for training, or None where it is.

        Images without an annotation file do not count as broken: a few labelled images among many
        others are a common way to start.
        """
        where = f"images in training_data_path {printable(self.folder)} ({_LOOKED_FOR})"
        if not self.samples and not self.broken:
            example = os.path.basename(self.unlabelled[0])
            return (
                f"none of the {len(self.images)} {where} has an annotation file; put one beside "
                f"each image, for {printable(example)} that is {_wanted_text(example)}"
            )
        if self.samples and len(self.broken) <= max_broken * len(self.samples + self.broken):
            return None
        return (
            f"only {len(self.samples)} of the {len(self.images)} {where} can be used: "
            f"{len(self.broken)} are broken, {len(self.unlabelled)} have no annotation file; "
            f"mend or remove the broken ones, the first is {self.broken[0]}"
        )


def get_images(training_data_path, *, report=None):
    """Finds the image files of one folder; folders inside it are not searched.

    Hidden files (`._img_1.jpg` of macOS), folders named like images and links to nothing are left
    out; links to files are followed.

    Args:
      training_data_path: folder, with or without a trailing slash.
      report: called with (file, None, reason) for each name left out; None logs each once.

    Returns:
      Sorted list of paths, each `training_data_path` joined with a file name.

    Raises:
      FileNotFoundError: the folder does not exist or has no image.
    """
    images, ignored, _ = _list_folder(training_data_path)
    tell(ignored, report)
    return images


def annotation_path(image_path):
    """Path of the annotation beside an image, or None where there is none.

    For `img_1.jpg` that is `img_1.txt`, else `gt_img_1.txt`: where both exist the one without
    prefix wins. Upper and lower case are not told apart, but an exact match is preferred to
    another spelling.
    """
    folder, name = os.path.split(os.fspath(image_path))
    exact = os.path.join(folder, _stem(name) + ".txt")
    if os.path.isfile(exact):
        return exact
    if not os.path.isdir(folder or "."):
        return None
    found = _AnnotationNames(os.listdir(folder or ".")).find(name)
    return None if found is None else os.path.join(folder, found)


def scan(
    training_data_path,
    *,
    check_images=False,
    strict=True,
    max_broken=MAX_BROKEN,
    report=None,
    progress=None,
):
    """Pairs the images of a folder with their annotations and finds all that cannot be used.

    Every annotation is parsed. The quick form looks at size, kind and end of each image, which
    finds what an interrupted download or a full disk leaves behind; the thorough form decodes it,
    and also names boxes that lie outside their image and annotation files that belong to none.

    Args:
      training_data_path: folder, with or without a trailing slash.
      check_images: True for the thorough form (a check before the training), False for the quick
        one (at its start).
      strict: raise where nothing or too little is left; False leaves that to
        `ScanResult.verdict`.
      max_broken: largest share of broken samples, of all but the unlabelled ones, that will do.
      report: called with (file, line, reason) for each problem; None logs each once.
      progress: called with (images done, images in all) after each image.

    Returns:
      A `ScanResult`.

    Raises:
      FileNotFoundError: the folder does not exist or has no image.
      ScanError: `strict`, and no image can be used or more than `max_broken` are broken.
    """
    images, ignored, other_names = _list_folder(training_data_path)
    names = _AnnotationNames(other_names)
    result = ScanResult(os.path.abspath(training_data_path), images, problems=ignored)
    used = set()
    for done, image in enumerate(images, 1):
        annotation = names.find(os.path.basename(image))
        if annotation is not None:
            used.add(annotation)
            annotation = os.path.join(training_data_path, annotation)
        _scan_sample(result, image, annotation, check_images)
        if progress is not None:
            progress(done, len(images))
    if check_images:
        result.problems += _spare_annotations(training_data_path, images, names.exact - used)
    verdict = result.verdict(max_broken)
    if strict and verdict is not None:
        # Its problems are not logged: they would bury the sentence that matters.
        raise ScanError(verdict, result)
    tell(result.problems, report)
    return result


def _scan_sample(result, image, annotation, check_images):
    """Adds one image to the samples, problems and counts of `result`."""
    try:
        size = read_image(image).shape[:2] if check_images else check_image(image)
        if annotation is None:
            result.unlabelled.append(image)
            reason = f"no annotation file, {_wanted_text(os.path.basename(image))} is not there"
            result.problems.append(Problem(image, None, reason))
            return
        polys, tags, lines, problems = parse_annotation(annotation)
    except FileError as error:
        result.broken.append(error.problem)
        result.problems.append(error.problem)
        return
    result.problems += problems
    if check_images:
        result.problems += _outside(annotation, polys, lines, size)
    result.samples.append((image, annotation))
    result.num_background += len(polys) == 0
    result.num_dont_care += int(tags.sum())
    result.num_words += len(tags) - int(tags.sum())


def _outside(annotation, polys, lines, size):
    """Problems of the quadrilaterals that have no point inside an image of (height, width)."""
    height, width = size
    low, high = polys.min(axis=1), polys.max(axis=1)  # [N, 2]
    outside = (high <= 0).any(axis=1) | (low >= (width - 1, height - 1)).any(axis=1)
    reason = f"the box lies outside its image, which is {width} pixels wide and {height} high"
    return [Problem(annotation, lines[i], reason) for i in np.flatnonzero(outside)]


def _spare_annotations(folder, images, spare):
    """Problems of the annotation files in `spare`, names that `scan` gave to no image."""
    stems = {_fold(_stem(os.path.basename(image))) for image in images}
    problems = []
    for name in sorted(spare):
        stem = _fold(_stem(name))
        if stem in stems or stem.removeprefix("gt_") in stems:
            reason = "not used, the image has another annotation file, which comes first"
        else:
            reason = "not used, there is no image of this name"
        problems.append(Problem(os.path.join(folder, name), None, reason))
    return problems


class _AnnotationNames:
    """Finds the annotation of an image among the file names of its folder."""

    def __init__(self, names):
        self.exact = {n for n in names if _extension(n) == "txt" and not n.startswith(".")}
        self._folded = {_fold(name): name for name in sorted(self.exact, reverse=True)}

    def find(self, image_name):
        stem = _stem(image_name)
        for wanted in (f"{stem}.txt", f"gt_{stem}.txt"):
            found = wanted if wanted in self.exact else self._folded.get(_fold(wanted))
            if found is not None:
                return found
        return None


def _list_folder(folder):
    """(paths of the images, Problems of names left out, names of the other files), each sorted."""
    shown = printable(os.path.abspath(folder))
    if not os.path.isdir(folder):
        fault = "is not a folder" if os.path.exists(folder) else "does not exist"
        raise FileNotFoundError(
            f"training_data_path {shown} {fault}; pass a folder that holds images "
            f"({_LOOKED_FOR}) and their annotation files"
        )
    images, ignored, others = [], [], []
    for name in sorted(os.listdir(folder)):
        path = os.path.join(folder, name)
        if _extension(name) not in IMAGE_EXTENSIONS:
            others.append(name)
        elif name.startswith("."):
            ignored.append(Problem(path, None, "a hidden file, not taken for an image"))
        elif os.path.isfile(path):
            images.append(path)
        else:
            reason = "a folder" if os.path.isdir(path) else "not a file, or a link to nothing"
            ignored.append(Problem(path, None, f"{reason}, not an image"))
    if not images:
        raise FileNotFoundError(
            f"training_data_path {shown} holds no images ({_LOOKED_FOR}): "
            f"{_contents(folder, others, ignored)}; pass the folder that holds the images itself"
        )
    return images, ignored, others


def _contents(folder, others, ignored):
    """What a folder without images holds instead."""
    if ignored:
        return f"{len(ignored)} such names are no images, the first is {ignored[0]}"
    folders = [name for name in others if os.path.isdir(os.path.join(folder, name))]
    if folders:
        return f"{printable(folders[0])} and other folders in it are not searched"
    return f"{printable(others[0])} and other files in it are not" if others else "it is empty"


def _wanted_text(image_name):
    stem = printable(_stem(image_name))
    return f"{stem}.txt or gt_{stem}.txt"


def _stem(name):
    return os.path.splitext(name)[0]


def _extension(name):
    return os.path.splitext(name)[1][1:].lower()


def _fold(name):
    # Also equates composed and decomposed accents: archives made on macOS hold the latter.
    return name.lower() if name.isascii() else unicodedata.normalize("NFC", name).casefold()
