"""Draws pictures of synthetic scene text: backgrounds, clutter and words whose quads are known.

All random draws come from the numpy.random.RandomState that is passed in. Pictures have OpenCV's
order of channels; points are (x, y) in pixels, whose centres are the whole numbers.
"""

import dataclasses

import cv2
import numpy as np

DONT_CARE = "###"  # the transcription of words that do not count
SUPERSAMPLING = 3  # words are warped this many times larger and averaged down
GLYPH_HEIGHT = 72  # pixels, height of capitals when a word is first drawn
LUMA = np.array([0.114, 0.587, 0.299], np.float32)  # weights of blue, green, red (ITU-R BT.601)

FONTS = (
    cv2.FONT_HERSHEY_SIMPLEX,
    cv2.FONT_HERSHEY_DUPLEX,
    cv2.FONT_HERSHEY_COMPLEX,
    cv2.FONT_HERSHEY_TRIPLEX,
    cv2.FONT_HERSHEY_PLAIN,
    cv2.FONT_HERSHEY_COMPLEX | cv2.FONT_ITALIC,
    cv2.FONT_HERSHEY_SIMPLEX | cv2.FONT_ITALIC,
)
WORDS = """
open closed exit sale hotel coffee street market bread fresh garden station parking bakery press
museum pizza north south river bridge library school bank post taxi tower music books flowers police
studio island corner window summer winter danger caution private welcome ticket platform
"""


@dataclasses.dataclass(frozen=True)
class SceneOptions:
    """What a picture looks like; lengths in pixels, angles in degrees.

    Attributes:
      width, height: size of the pictures.
      max_words: most words in a picture (as many as fit, at least one is tried).
      min_word_height, max_word_height: range of the heights of words that count.
      max_angle: largest rotation of a word.
      min_contrast: least difference of brightness (0 to 255) between a word and what is behind it.
      dont_care_share: share of the words that are made unreadable and marked `###`.
      background_share: share of the training pictures without any word.
    """

    width: int = 160
    height: int = 160
    max_words: int = 4
    min_word_height: int = 18
    max_word_height: int = 36
    max_angle: float = 20.0
    min_contrast: float = 70.0
    dont_care_share: float = 0.12
    background_share: float = 0.05


@dataclasses.dataclass
class Word:
    """A word in a picture.

    Attributes:
      quad: [4, 2] float32, corners (x, y) in pixels, clockwise from the word's upper left one.
      text: the transcription, `###` if the word does not count.
    """

    quad: np.ndarray
    text: str


# -----------------------------------------------------------------------------------------------
# Backgrounds
# -----------------------------------------------------------------------------------------------


def _colour(rng):
    return rng.uniform(15, 240, 3).astype(np.float32)


def _gradient(rng, height, width):
    angle = rng.uniform(0, 2 * np.pi)
    ys, xs = np.mgrid[0:height, 0:width].astype(np.float32)
    along = np.cos(angle) * xs / width + np.sin(angle) * ys / height
    along = (along - along.min()) / (np.ptp(along) + 1e-6)
    first, second = _colour(rng), _colour(rng)
    return first + along[..., None] * (second - first) * rng.uniform(0.2, 1.0)


def _clouds(rng, height, width):
    """Smooth noise: coarse random grids, enlarged and summed."""
    image = np.zeros((height, width, 3), np.float32)
    for cells, strength in ((3, 45), (8, 20), (24, 10)):
        grid = rng.normal(0, strength, (cells, cells, 1)) + rng.normal(
            0, strength / 3, (cells, cells, 3)
        )
        grid = grid.astype(np.float32)
        image += cv2.resize(grid, (width, height), interpolation=cv2.INTER_CUBIC)
    return image + _colour(rng)


def _stripes(rng, height, width):
    """Planks, tiles or corrugated metal: one or two periodic waves across the picture."""
    ys, xs = np.mgrid[0:height, 0:width].astype(np.float32)
    image = np.zeros((height, width), np.float32)
    base = rng.uniform(0, np.pi)
    for direction in (base, base + np.pi / 2)[: rng.randint(1, 3)]:
        position = np.cos(direction) * xs + np.sin(direction) * ys
        wave = np.sin(2 * np.pi * position / rng.uniform(8, 48) + rng.uniform(0, 2 * np.pi))
        image += np.sign(wave) if rng.rand() < 0.5 else wave
    return _colour(rng) + image[..., None] * rng.uniform(5, 28) * rng.uniform(0.6, 1.0, 3)


def _clutter(rng, image):
    """Draws shapes, lines and circles that are no text."""
    height, width = image.shape[:2]
    for _ in range(rng.randint(0, 9)):
        colour = tuple(float(c) for c in _colour(rng))
        centre = rng.uniform(0, 1, 2) * (width, height)
        radius = rng.uniform(0.05, 0.35) * min(height, width)
        kind = rng.randint(4)
        if kind == 0:
            turns = np.sort(rng.uniform(0, 2 * np.pi, rng.randint(3, 6)))
            points = centre + radius * np.stack([np.cos(turns), np.sin(turns)], axis=1)
            cv2.fillPoly(image, [points.astype(np.int32)], colour, cv2.LINE_AA)
        elif kind == 1:
            outline = -1 if rng.rand() < 0.5 else int(rng.randint(1, 5))
            cv2.circle(image, _point(centre), int(radius), colour, outline, cv2.LINE_AA)
        elif kind == 2:
            end = rng.uniform(0, 1, 2) * (width, height)
            cv2.line(
                image, _point(centre), _point(end), colour, int(rng.randint(1, 8)), cv2.LINE_AA
            )
        else:
            corner = centre + radius * rng.uniform(0.3, 1.5, 2)
            cv2.rectangle(image, _point(centre), _point(corner), colour, -1)


def _point(xy):
    return int(xy[0]), int(xy[1])


def make_background(rng, height, width):
    """Draws a picture without text.

    Args:
      rng: numpy.random.RandomState.
      height, width: size in pixels.

    Returns:
      [height, width, 3] float32, blue, green, red within 0 to 255.
    """
    kind = rng.randint(3)
    image = (_gradient, _clouds, _stripes)[kind](rng, height, width)
    image = np.ascontiguousarray(image, np.float32)
    if rng.rand() < 0.7:
        _clutter(rng, image)
    if rng.rand() < 0.5:
        image = cv2.GaussianBlur(image, (0, 0), rng.uniform(0.6, 2.5))
    return np.clip(image, 0, 255)


# -----------------------------------------------------------------------------------------------
# Words
# -----------------------------------------------------------------------------------------------


def _transcription(rng):
    kind = rng.rand()
    if kind < 0.65:
        words = WORDS.split()
        text = words[rng.randint(len(words))]
        return (text.upper(), text.upper(), text.capitalize(), text)[rng.randint(4)]
    if kind < 0.8:
        letters = "ABCDEFGHIJKLMNOPRSTUVWXYZ"
        return "".join(letters[i] for i in rng.randint(0, len(letters), rng.randint(3, 8)))
    if kind < 0.9:
        return str(rng.randint(100, 1000000))
    return f"{rng.randint(1, 100)},{rng.randint(0, 100):02d}"  # a price: a comma in the text


def draw_word(text, rng):
    """Draws a word large, upright and tightly cropped.

    Args:
      text: what to write.
      rng: numpy.random.RandomState, draws font, thickness and outline.

    Returns:
      (letters, outline): two [h, w] float32 masks within 0 to 1; `outline` holds the letters too
      and touches all four borders; it equals `letters` where the word has no outline.
    """
    font = FONTS[rng.randint(len(FONTS))]
    thickness = int(rng.randint(5, 13))
    scale = cv2.getFontScaleFromHeight(font & ~cv2.FONT_ITALIC, GLYPH_HEIGHT, thickness)
    (width, height), below = cv2.getTextSize(text, font, scale, thickness)
    border = GLYPH_HEIGHT  # italic faces and thick strokes reach beyond the stated size
    canvas = np.zeros((height + below + 2 * border, width + 2 * border), np.uint8)
    origin = (border, border + height)
    cv2.putText(canvas, text, origin, font, scale, 255, thickness, cv2.LINE_AA)
    outline = canvas
    if rng.rand() < 0.25:
        reach = int(rng.randint(3, 8))
        kernel = cv2.getStructuringElement(cv2.MORPH_ELLIPSE, (2 * reach + 1, 2 * reach + 1))
        outline = cv2.dilate(canvas, kernel)
    x, y, w, h = cv2.boundingRect((outline > 127).astype(np.uint8))
    window = np.s_[y : y + h, x : x + w]
    return canvas[window].astype(np.float32) / 255, outline[window].astype(np.float32) / 255


def word_quad(width, height, angle, rng):
    """A rotated rectangle seen in a slight perspective, centred on the origin.

    Args:
      width, height: of the word, in pixels.
      angle: rotation in degrees, clockwise on the screen.
      rng: numpy.random.RandomState, draws the perspective.

    Returns:
      [4, 2] float32, corners clockwise from the upper left one.
    """
    corners = np.array([[-1, -1], [1, -1], [1, 1], [-1, 1]], np.float32) * (width / 2, height / 2)
    # One end of the word is farther away, and so lower; the rest is a small share of the height.
    taper = rng.uniform(-0.12, 0.12)
    corners[[0, 3], 1] *= 1 - taper
    corners[[1, 2], 1] *= 1 + taper
    corners += rng.uniform(-0.06, 0.06, (4, 2)) * height
    turn = np.deg2rad(angle)
    rotation = np.array([[np.cos(turn), np.sin(turn)], [-np.sin(turn), np.cos(turn)]])
    return (corners @ rotation).astype(np.float32)


def warp_mask(mask, quad, shape):
    """Fits a mask into a quad, with anti-aliasing.

    The mask's outer edges (not its outer pixels' centres) come to lie on the quad's sides, so that
    the quad is exactly as tight in the picture as the mask's borders are.

    Args:
      mask: [h, w] float32 within 0 to 1.
      quad: [4, 2] float32, corners (x, y) in picture pixels, whose centres are the whole numbers.
      shape: (height, width) of the picture.

    Returns:
      [height, width] float32 within 0 to 1.
    """
    height, width = mask.shape
    source = np.array([[0, 0], [width, 0], [width, height], [0, height]], np.float32) - 0.5
    low = np.maximum(np.floor(quad.min(axis=0)).astype(int) - 1, 0)
    high = np.minimum(np.ceil(quad.max(axis=0)).astype(int) + 2, (shape[1], shape[0]))
    size = high - low
    target = (quad - low + 0.5) * SUPERSAMPLING - 0.5
    matrix = cv2.getPerspectiveTransform(source, target.astype(np.float32))
    large = cv2.warpPerspective(mask, matrix, tuple(int(s) for s in size * SUPERSAMPLING))
    result = np.zeros(shape, np.float32)
    result[low[1] : high[1], low[0] : high[0]] = cv2.resize(
        large, tuple(int(s) for s in size), interpolation=cv2.INTER_AREA
    )
    return result


def choose_colour(background, min_contrast, rng):
    """Draws a text colour that stands out against every pixel behind the word.

    Args:
      background: [n, 3] float32, the pixels behind the word.
      min_contrast: least difference of brightness, 0 to 255.
      rng: numpy.random.RandomState.

    Returns:
      [3] float32, or None if the background has such different pixels that no colour does.
    """
    brightness = background @ LUMA
    choices = [  # ranges of brightness that are free on the dark and on the bright side
        (0.0, brightness.min() - min_contrast),
        (brightness.max() + min_contrast, 255.0),
    ]
    choices = [(low, high) for low, high in choices if high - low >= 1]
    if not choices:
        return None
    low, high = choices[rng.randint(len(choices))]
    wanted = rng.uniform(low, high)
    colour = _colour(rng)
    # Moving towards black or white until the brightness is right keeps all channels within range.
    own = colour @ LUMA
    if own > wanted:
        return (colour * (wanted / own)).astype(np.float32)
    return (255 - (255 - colour) * ((255 - wanted) / (255 - own))).astype(np.float32)


def _paint(image, mask, colour):
    image += mask[..., None] * (colour - image)


def _grown(quad, margin, shape):
    """[height, width] uint8: 1 inside the quad and up to `margin` pixels around it."""
    area = np.zeros(shape, np.uint8)
    cv2.fillConvexPoly(area, np.rint(quad).astype(np.int32), 1)
    if margin > 0:
        kernel = np.ones((2 * margin + 1, 2 * margin + 1), np.uint8)
        area = cv2.dilate(area, kernel)
    return area


def _write_word(image, masks, quad, options, rng):
    """Paints one word into the picture, on a board where nothing else gives contrast."""
    shape = image.shape[:2]
    letters, outline = (warp_mask(mask, quad, shape) for mask in masks)
    around = _grown(quad, 2, shape)
    if rng.rand() < 0.2:
        colour = None
    else:
        colour = choose_colour(image[around > 0], options.min_contrast, rng)
    if colour is None:
        board = _colour(rng)
        plate = cv2.GaussianBlur(_grown(quad, 3, shape).astype(np.float32), (3, 3), 0)
        plate[around > 0] = 1
        _paint(image, plate, board)
        colour = choose_colour(image[around > 0], options.min_contrast, rng)
    # Shadow and outline lie on the background's side of the letters' brightness, far from it.
    behind = image[around > 0] @ LUMA
    edge = np.float32(0 if colour @ LUMA > behind.mean() else 255)
    if rng.rand() < 0.25:
        shift = np.float32([[1, 0, rng.uniform(0.7, 2)], [0, 1, rng.uniform(0.7, 2)]])
        shadow = cv2.warpAffine(outline, shift, (shape[1], shape[0]))
        _paint(image, shadow * 0.6, edge)
    if not np.array_equal(masks[0], masks[1]):
        _paint(image, outline, edge)
    _paint(image, letters, colour)


def _find_place(quad, occupied, margin, rng):
    """Moves a quad centred on the origin to a free place; None if ten tries find none."""
    height, width = occupied.shape
    low, high = -quad.min(axis=0) + 1, np.array([width, height]) - 2 - quad.max(axis=0)
    if (high <= low).any():
        return None
    for _ in range(10):
        placed = quad + rng.uniform(low, high).astype(np.float32)
        if not (_grown(placed, margin, occupied.shape) & occupied).any():
            return placed
    return None


def make_picture(rng, options, with_words=True):
    """Makes one picture.

    Args:
      rng: numpy.random.RandomState.
      options: SceneOptions.
      with_words: False for a picture without text.

    Returns:
      (image, words): [height, width, 3] uint8 in OpenCV's channel order, and a list of Word.
    """
    shape = (options.height, options.width)
    image = make_background(rng, *shape)
    occupied = np.zeros(shape, np.uint8)
    words = []
    for _ in range(rng.randint(1, options.max_words + 1) if with_words else 0):
        text = _transcription(rng)
        readable = rng.rand() >= options.dont_care_share
        masks = draw_word(text, rng)
        if readable:
            height = rng.uniform(options.min_word_height, options.max_word_height)
        else:
            height = rng.uniform(0.3, 0.45) * options.min_word_height
        aspect = masks[1].shape[1] / masks[1].shape[0] * rng.uniform(0.85, 1.2)
        # Rather a smaller word than none where a long one would not fit into the picture.
        longest = 0.85 * options.width
        if height * aspect > longest:
            height = max(longest / aspect, options.min_word_height if readable else 0)
        angle = np.clip(rng.normal(0, options.max_angle / 2), -options.max_angle, options.max_angle)
        quad = word_quad(height * aspect, height, angle, rng)
        quad = _find_place(quad, occupied, 4, rng)
        if quad is None:
            continue
        occupied |= _grown(quad, 0, shape)
        _write_word(image, masks, quad, options, rng)
        if not readable:
            area = _grown(quad, 2, shape) > 0
            image[area] = cv2.GaussianBlur(image, (0, 0), rng.uniform(0.8, 1.5))[area]
        words.append(Word(quad, text if readable else DONT_CARE))
    if rng.rand() < 0.2:
        image = cv2.GaussianBlur(image, (0, 0), rng.uniform(0.4, 0.7))
    image += rng.normal(0, rng.uniform(0, 6), image.shape)
    return np.clip(np.rint(image), 0, 255).astype(np.uint8), words
