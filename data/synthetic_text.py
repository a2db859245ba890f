"""Makes a small data set of synthetic scene text in the folder layout of ICDAR 2015.

    python -m data.synthetic_text --output_dir demo/data --num_train 1500 --num_test 60 --seed 0

writes

    OUTPUT_DIR/train/img_1.jpg      OUTPUT_DIR/train/gt_img_1.txt    (for --training_data_path)
    OUTPUT_DIR/test/images/img_1.jpg                                 (for --test_data_path)
    OUTPUT_DIR/test/gt/gt_img_1.txt                                  (for --gt_path)
    OUTPUT_DIR/synthetic_text.json                                   (the parameters)

A text file has one line a word, `x1,y1,x2,y2,x3,y3,x4,y4,transcription`: corners clockwise from
the upper left corner of the word as it is read, `###` for words that are too small and blurred to
count. As in the official files, lines end with CRLF, some files begin with a byte order mark and
some transcriptions hold commas.
"""

import argparse
import dataclasses
import os
import sys

import cv2
import numpy as np

from data.synthetic_folder import check_seed, write_folder
from data.synthetic_scenes import SceneOptions, make_picture

FORMAT_VERSION = 1  # raise it when the same parameters would give other pictures
MANIFEST = "synthetic_text.json"


def annotation_text(words, byte_order_mark):
    """Formats words as the text of an ICDAR 2015 file.

    Args:
      words: list of Word.
      byte_order_mark: whether the file begins with U+FEFF.

    Returns:
      The text, lines ended by CRLF; corners rounded to whole pixels.
    """
    lines = []
    for word in words:
        corners = ",".join(str(int(c)) for c in np.rint(word.quad).ravel())
        lines.append(f"{corners},{word.text}\r\n")
    return ("\ufeff" if byte_order_mark else "") + "".join(lines)


def _write_split(image_dir, text_dir, count, split, options, seed):
    os.makedirs(image_dir, exist_ok=True)
    os.makedirs(text_dir, exist_ok=True)
    for number in range(1, count + 1):
        # A picture depends on its own number only, not on how many there are.
        rng = np.random.RandomState([seed, split, number])
        with_words = split == 1 or rng.rand() >= options.background_share
        image, words = make_picture(rng, options, with_words)
        quality = int(rng.randint(80, 96))
        done, encoded = cv2.imencode(".jpg", image, [cv2.IMWRITE_JPEG_QUALITY, quality])
        if not done:
            raise RuntimeError(f"OpenCV could not encode picture {number} as JPEG")
        with open(os.path.join(image_dir, f"img_{number}.jpg"), "wb") as file:
            file.write(encoded.tobytes())
        text = annotation_text(words, byte_order_mark=rng.rand() < 0.5)
        with open(os.path.join(text_dir, f"gt_img_{number}.txt"), "wb") as file:
            file.write(text.encode("utf-8"))


def make_dataset(output_dir, num_train, num_test, options=None, seed=0):
    """Writes a data set; the same arguments give the same bytes.

    Args:
      output_dir: folder to make; it appears only once it is complete.
      num_train, num_test: numbers of pictures.
      options: SceneOptions.
      seed: whole number from 0 to 2**32 - 1.

    Returns:
      True if it was written, False if the folder already holds the data set of these arguments.

    Raises:
      ValueError: arguments out of range, or the folder holds something else.
    """
    options = options or SceneOptions()
    _check(num_train, num_test, options, seed)
    parameters = {
        "format_version": FORMAT_VERSION,
        "num_train": num_train,
        "num_test": num_test,
        "seed": seed,
        **dataclasses.asdict(options),
    }

    def write(folder):
        train, test = os.path.join(folder, "train"), os.path.join(folder, "test")
        _write_split(train, train, num_train, 0, options, seed)
        _write_split(
            os.path.join(test, "images"), os.path.join(test, "gt"), num_test, 1, options, seed
        )

    return write_folder(output_dir, MANIFEST, parameters, write)


def _check(num_train, num_test, options, seed):
    for name, value in (("num_train", num_train), ("num_test", num_test)):
        if value < 0:
            raise ValueError(f"{name} is {value}; it must not be negative, pass 0 for no pictures")
    check_seed(seed)
    if not 32 <= min(options.width, options.height) <= max(options.width, options.height) <= 8192:
        raise ValueError(
            f"image_size is {options.width}x{options.height}; both sides must lie within 32 and "
            "8192 pixels, pass 160x160"
        )
    if not 4 <= options.min_word_height <= options.max_word_height <= options.height // 2:
        raise ValueError(
            f"word heights {options.min_word_height} to {options.max_word_height} do not suit "
            f"pictures {options.height} pixels high; they must be ordered and lie within 4 and "
            f"{options.height // 2}, pass for example 16 and 32 with 160x160"
        )
    ranges = {
        "max_words": (1, 1000, 4),
        "max_angle": (0, 90, 20),
        "dont_care_share": (0, 1, 0.12),
        "background_share": (0, 1, 0.05),
    }
    for name, (low, high, instead) in ranges.items():
        value = getattr(options, name)
        if not low <= value <= high:  # NaN is in no range
            raise ValueError(
                f"{name} is {value}; it must lie within {low} and {high}, pass {instead}"
            )
    # The plate behind a word may have any brightness, and the text must still find room beside it.
    if not 0 <= options.min_contrast <= 100:
        raise ValueError(
            f"min_contrast is {options.min_contrast}; it must lie within 0 and 100, pass 70"
        )


def parse_size(text):
    """'192x128' -> (192, 128), width first; '160' -> (160, 160)."""
    parts = text.lower().split("x")
    if len(parts) > 2 or not all(part.isdecimal() for part in parts):
        raise argparse.ArgumentTypeError(
            f"{text!r} is no picture size; pass SIDE or WIDTHxHEIGHT in pixels, as 160 or 192x128"
        )
    return int(parts[0]), int(parts[-1])


def main(argv=None):
    """Command line; returns the exit code."""
    defaults = SceneOptions()
    parser = argparse.ArgumentParser(
        prog="python -m data.synthetic_text", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--output_dir", required=True, help="folder to make")
    parser.add_argument("--num_train", type=int, default=1500, help="training pictures")
    parser.add_argument("--num_test", type=int, default=60, help="test pictures")
    parser.add_argument(
        "--image_size",
        type=parse_size,
        default=(defaults.width, defaults.height),
        help="SIDE or WIDTHxHEIGHT in pixels",
    )
    parser.add_argument("--seed", type=int, default=0)
    for name in ("max_words", "min_word_height", "max_word_height"):
        parser.add_argument(f"--{name}", type=int, default=getattr(defaults, name))
    for name in ("max_angle", "min_contrast", "dont_care_share", "background_share"):
        parser.add_argument(f"--{name}", type=float, default=getattr(defaults, name))
    args = parser.parse_args(argv)
    names = [f.name for f in dataclasses.fields(SceneOptions) if f.name not in ("width", "height")]
    options = SceneOptions(
        width=args.image_size[0],
        height=args.image_size[1],
        **{name: getattr(args, name) for name in names},
    )
    try:
        written = make_dataset(args.output_dir, args.num_train, args.num_test, options, args.seed)
    except (OSError, ValueError) as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 1
    counts = f"{args.num_train} training and {args.num_test} test pictures"
    if written:
        print(f"{counts} written to {args.output_dir}")
    else:
        print(f"{args.output_dir} already holds these {counts}; left as it is")
    return 0


if __name__ == "__main__":
    sys.exit(main())
