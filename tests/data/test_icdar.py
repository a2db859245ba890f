"""The generator of training batches: the original's batches, odd folders, continuing exactly."""

import collections
import functools
import hashlib
import json
import logging
import pathlib
import pickle
import shutil

import cv2
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data import icdar
from data.data_util import GeneratorEnqueuer, load_reader_state, save_reader_state
from data.icdar import IcdarGenerator
from data.icdar_crops import scaled_crop
from data.sample_cache import SampleCache
from tests.golden_sets import golden_path, samples_path

QUAD = "20,20,120,20,120,60,20,60"


def _write_folder(folder, annotations, size=(160, 240), seed=0):
    """Writes an image of noise for each annotation text (None: no file): img_1.png, ..."""
    rng = np.random.RandomState(seed)
    for number, text in enumerate(annotations, 1):
        image = cv2.resize(rng.randint(0, 256, (20, 30, 3)).astype(np.uint8), size[::-1])
        cv2.imwrite(str(folder / f"img_{number}.png"), image)
        if text is not None:
            (folder / f"img_{number}.txt").write_text(text)
    return folder


@pytest.fixture
def folder(tmp_path):
    """Six images with one to three words each."""
    words = [QUAD + ",word", "140,90,220,95,218,130,138,125,###", "130,20,200,30,195,60,125,50,x"]
    texts = ["\n".join(words[: 1 + number % 3]) + "\n" for number in range(6)]
    return _write_folder(tmp_path, texts)


def _names(batch):
    return [pathlib.Path(path).name for path in batch[1]]


def _assert_equal_batches(first, second):
    assert first[1] == second[1]
    for column in (0, 2, 3, 4):
        np.testing.assert_array_equal(first[column], second[column])


# --------------------------------------------------------------------------- the original's batches


@pytest.fixture(scope="module")
def golden(tmp_path_factory):
    """The described folder, laid out, and its batches: (facts, arrays, folder)."""
    facts = json.loads(golden_path("east", "augment.json", whole=True).read_text())
    if "generator" not in facts:
        pytest.skip("this golden set has no batches, which are made from photographs")
    samples = samples_path()
    folder = tmp_path_factory.mktemp("golden")
    for file in facts["files"]:
        shutil.copy(samples / file["copy_of"], folder / file["name"])
        if file["annotation"] is not None:
            (folder / file["name"]).with_suffix(".txt").write_text(file["annotation"])
    with np.load(golden_path("east", "augment.npz", whole=True)) as data:
        return facts, {name: data[name] for name in data.files}, folder


def test_golden_batches(golden):
    facts, arrays, folder = golden
    runs = collections.defaultdict(list)
    for batch in facts["generator"]:
        runs[batch["input_size"], batch["batch_size"], batch["numpy_seed"]].append(batch)
    for (input_size, batch_size, seed), batches in runs.items():
        rng = np.random.RandomState(seed)
        generator = IcdarGenerator(
            folder,
            input_size=input_size,
            batch_size=batch_size,
            rng=rng,
            empty_annotations="skip",
        )
        for facts_of_batch in sorted(batches, key=lambda batch: batch["batch"]):
            _compare_golden_batch(next(generator), facts_of_batch, arrays)
            if facts_of_batch["next_randint_after_last_batch"] is not None:
                expected = facts_of_batch["next_randint_after_last_batch"]
                assert rng.randint(0, 2**31 - 1) == expected


def _compare_golden_batch(batch, facts, arrays):
    assert _names(batch) == facts["files"]
    images, _, score_maps, geo_maps, training_masks = (
        column if i == 1 else np.array(column) for i, column in enumerate(batch)
    )
    pixels = images.astype(np.uint8)
    np.testing.assert_array_equal(pixels, images)
    key = facts["key"]
    if hashlib.sha1(pixels.tobytes()).hexdigest() != facts["images_sha1"]:
        # Another OpenCV may decode a JPEG file a little differently.
        np.testing.assert_allclose(images.mean(axis=(1, 2, 3)), facts["image_mean"], atol=2)
        assert cv2.__version__ != "4.11.0"
    if key + "images" in arrays:
        np.testing.assert_allclose(images, arrays[key + "images"].astype(int), atol=2)
    np.testing.assert_array_equal(score_maps, arrays[key + "score_maps"])
    np.testing.assert_array_equal(training_masks, arrays[key + "training_masks"])
    sums = geo_maps.sum(axis=(1, 2), dtype=np.float64)
    np.testing.assert_allclose(sums, facts["geo_sum"], rtol=1e-4, atol=1e-2)
    if key + "geo_maps" in arrays:
        expected = arrays[key + "geo_maps"]
        np.testing.assert_allclose(geo_maps[..., :4], expected[..., :4], rtol=0, atol=1e-3)
        np.testing.assert_allclose(geo_maps[..., 4], expected[..., 4], rtol=0, atol=1e-5)


def _scale_cut_pad_resize(image, scale, box, input_size):
    """What the original does, step by step."""
    top, bottom, left, right = box
    crop = cv2.resize(image, None, fx=scale, fy=scale)[top:bottom, left:right]
    side = max(crop.shape[0], crop.shape[1], input_size)
    square = np.zeros((side, side, 3), np.uint8)
    square[: crop.shape[0], : crop.shape[1]] = crop
    return cv2.resize(square, (input_size, input_size))


@settings(deadline=None, max_examples=80)
@given(
    st.integers(0, 2**31 - 1),
    st.sampled_from([0.5, 1.0, 2.0, 3.0, 4.0, 0.7, 1.3]),
    st.sampled_from([32, 64, 96]),
)
def test_scaled_crop_equals_scaling_the_whole_image(seed, scale, input_size):
    rng = np.random.RandomState(seed)
    height, width = rng.randint(20, 160, 2)
    image = rng.randint(0, 256, (height, width, 3)).astype(np.uint8)
    scaled = cv2.resize(image, None, fx=scale, fy=scale)
    top, bottom = np.sort(rng.choice(scaled.shape[0] + 1, 2, replace=False)).tolist()
    left, right = np.sort(rng.choice(scaled.shape[1] + 1, 2, replace=False)).tolist()
    if rng.rand() < 0.3:  # the whole image
        (bottom, right), top, left = scaled.shape[:2], 0, 0
    box = top, bottom, left, right
    before = image.copy()
    np.testing.assert_array_equal(
        scaled_crop(image, scale, box, input_size),
        _scale_cut_pad_resize(image, scale, box, input_size),
    )
    np.testing.assert_array_equal(image, before)


def test_form_of_a_batch(folder):
    images, names, score_maps, geo_maps, training_masks = next(
        IcdarGenerator(folder, input_size=64, batch_size=3, seed=0)
    )
    for column, shape in (
        (images, (64, 64, 3)),
        (score_maps, (16, 16, 1)),
        (geo_maps, (16, 16, 5)),
        (training_masks, (16, 16, 1)),
    ):
        assert [array.shape for array in column] == [shape] * 3
        assert {array.dtype for array in column} == {np.dtype(np.float32)}
    assert all(isinstance(name, str) and pathlib.Path(name).is_file() for name in names)


def test_images_may_stay_small(folder):
    keywords = {"input_size": 64, "batch_size": 2, "seed": 0}
    small = next(IcdarGenerator(folder, image_dtype=np.uint8, **keywords))
    assert small[0][0].dtype == np.uint8
    _assert_equal_batches(small, next(IcdarGenerator(folder, **keywords)))


def test_generator_has_the_originals_arguments(folder):
    made = icdar.generator(64, 2, 0.5, np.array([1, 2.0]), training_data_path=folder, seed=3)
    expected = IcdarGenerator(
        folder, input_size=64, batch_size=2, background_ratio=0.5, random_scale=[1, 2.0], seed=3
    )
    _assert_equal_batches(next(made), next(expected))
    with pytest.raises(ValueError, match="vis=True"):
        icdar.generator(vis=True, training_data_path=folder)


def test_background_only_and_text_only(folder):
    keywords = {"input_size": 64, "batch_size": 4, "seed": 0}
    background = next(IcdarGenerator(folder, background_ratio=1, **keywords))
    assert not np.any(background[2]) and np.all(background[4])
    text = next(IcdarGenerator(folder, background_ratio=0, random_scale=[2], **keywords))
    assert all(score_map.any() for score_map in text[2])


# ------------------------------------------------------------------------------------ odd folders


@pytest.mark.parametrize("how", ["folder", "generator"])
def test_quad_is_refused_before_anything_is_read(how, tmp_path):
    missing = tmp_path / "missing"
    make = IcdarGenerator if how == "folder" else icdar.generator
    with pytest.raises(ValueError, match=r"geometry 'QUAD' has no labels.*pass RBOX"):
        make(training_data_path=missing, geometry="QUAD")


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"batch_size": 0}, "batch_size is 0"),
        ({"input_size": -32}, "input_size is -32"),
        ({"random_scale": []}, "random_scale"),
        ({"random_scale": [1, -1]}, "random_scale"),
        ({"empty_annotations": "drop"}, "empty_annotations is 'drop'"),
        ({"seed": 1, "rng": np.random.RandomState(1)}, "seed and rng"),
        ({"image_list": []}, "image_list is empty"),
    ],
)
def test_arguments_out_of_range(folder, keywords, message):
    with pytest.raises(ValueError, match=message):
        IcdarGenerator(folder, **keywords)
    with pytest.raises(ValueError, match="neither training_data_path nor image_list"):
        IcdarGenerator()


def test_a_missing_or_empty_folder(tmp_path):
    for path in (tmp_path / "no", tmp_path):
        with pytest.raises(FileNotFoundError, match=str(path)):
            IcdarGenerator(path)


@pytest.mark.parametrize("text", ["", "\n\n", "10,10,10,10,10,10,10,10,a\n"])
def test_images_without_a_quadrilateral_are_background(tmp_path, text):
    _write_folder(tmp_path, [text, text, QUAD])
    generator = IcdarGenerator(tmp_path, input_size=64, batch_size=2, seed=0)
    batches = [next(generator) for _ in range(12)]
    names = {name for batch in batches for name in _names(batch)}
    assert names == {"img_1.png", "img_2.png", "img_3.png"}
    for batch in batches:
        for name, score_map in zip(_names(batch), batch[2]):
            assert name == "img_3.png" or not score_map.any()


def test_blank_annotations_can_be_skipped(tmp_path):
    _write_folder(tmp_path, ["", QUAD, "\n"])
    generator = IcdarGenerator(
        tmp_path, input_size=64, batch_size=1, seed=0, empty_annotations="skip"
    )
    assert {name for _ in range(8) for name in _names(next(generator))} == {"img_2.png"}


def test_too_few_images_repeat_within_a_batch(tmp_path, caplog):
    _write_folder(tmp_path, [QUAD, QUAD])
    with caplog.at_level(logging.WARNING):
        generator = IcdarGenerator(tmp_path, input_size=64, batch_size=14, seed=0)
        batches = [next(generator) for _ in range(3)]
    assert [len(batch[0]) for batch in batches] == [14] * 3
    (warning,) = [r.getMessage() for r in caplog.records if str(tmp_path) in r.getMessage()]
    assert "2 usable images" in warning and "batch of 14" in warning


def test_images_that_hardly_ever_fill_a_batch(tmp_path):
    """Enough images, but a scarce background: after ten epochs they repeat within a batch."""
    whole = "0,0,239,0,239,159,0,159"
    _write_folder(tmp_path, [whole] * 5 + [QUAD])
    generator = IcdarGenerator(
        tmp_path, input_size=64, batch_size=6, seed=0, background_ratio=1, random_scale=[1]
    )
    assert set(_names(next(generator))) == {"img_6.png"}


def test_broken_files_are_named_once_and_skipped(tmp_path, caplog):
    _write_folder(tmp_path, [QUAD] * 6)
    (tmp_path / "img_1.png").write_bytes(b"")
    data = (tmp_path / "img_2.png").read_bytes()
    (tmp_path / "img_2.png").write_bytes(data[:-20])
    (tmp_path / "img_3.png").write_text("not an image")
    with caplog.at_level(logging.WARNING):
        generator = IcdarGenerator(tmp_path, input_size=64, batch_size=2, seed=0)
        names = {name for _ in range(12) for name in _names(next(generator))}
    assert names == {"img_4.png", "img_5.png", "img_6.png"}
    for number in (1, 2, 3):
        path = str(tmp_path / f"img_{number}.png")
        assert sum(path in record.getMessage() for record in caplog.records) == 1
    (tmp_path / "img_4.txt").write_text("these,are,not,numbers\n")
    generator = IcdarGenerator(tmp_path, input_size=64, batch_size=2, seed=0)
    with pytest.raises(ValueError, match=r"the 6 images in .*: 4 are broken"):
        [next(generator) for _ in range(12)]


def test_a_broken_file_uses_no_random_numbers(tmp_path):
    _write_folder(tmp_path, [QUAD] * 3)
    (tmp_path / "img_2.png").write_bytes(b"broken")
    (tmp_path / "img_3.txt").unlink()
    runs = []
    for spare in ("img_2.png", "img_3.png"):
        images = [str(tmp_path / name) for name in (spare, "img_1.png", "img_1.png")]
        rng = np.random.RandomState(3)
        generator = IcdarGenerator(image_list=images, input_size=64, batch_size=1, rng=rng)
        runs.append([next(generator) for _ in range(4)] + [rng.randint(1 << 30)])
    assert runs[0][-1] == runs[1][-1]
    for first, second in zip(runs[0][:-1], runs[1][:-1]):
        _assert_equal_batches(first, second)


@pytest.mark.parametrize("text", [None, "10;10;50;10;50;30;10;30;abc\n"])
def test_nothing_to_train_on_is_an_error_with_counts(tmp_path, text):
    _write_folder(tmp_path, [text] * 3)
    kind = "3 have no annotation file" if text is None else r"2 are broken .*img_\d.txt:1"
    with pytest.raises(ValueError, match=kind):
        next(IcdarGenerator(tmp_path, input_size=64, batch_size=2, seed=0))


def test_images_that_never_give_a_sample_are_an_error(tmp_path):
    _write_folder(tmp_path, [""] * 3)
    generator = IcdarGenerator(tmp_path, input_size=64, batch_size=2, seed=0, background_ratio=0)
    with pytest.raises(ValueError, match="no image gave a training sample.*3 could be read"):
        next(generator)


def test_few_labelled_images_among_many_others(tmp_path):
    """Only images that could give a sample count as tries without one."""
    _write_folder(tmp_path, [QUAD] + [None] * 99)
    generator = IcdarGenerator(tmp_path, input_size=64, batch_size=14, seed=0)
    for _ in range(3):
        assert set(_names(next(generator))) == {"img_1.png"}


def test_pictures_one_pixel_wide_or_high(tmp_path):
    """At half their size nothing is left of them: they give no sample then."""
    for number, size in enumerate([(1, 1), (1, 300), (300, 1)]):
        folder = tmp_path / str(number)
        folder.mkdir()
        _write_folder(folder, [QUAD, ""], size)
        generator = IcdarGenerator(folder, input_size=64, batch_size=8, seed=0)
        assert np.shape(next(generator)[0]) == (8, 64, 64, 3)


def test_one_line_about_anticlockwise_quadrilaterals(tmp_path, caplog):
    anticlockwise = "20,20,20,60,120,60,120,20,word"
    _write_folder(tmp_path, [anticlockwise + "\n" + QUAD] * 3)
    with caplog.at_level(logging.INFO):
        for _ in range(2):
            generator = IcdarGenerator(tmp_path, input_size=64, batch_size=1, seed=0)
            [next(generator) for _ in range(8)]
    lines = [r.getMessage() for r in caplog.records if "anticlockwise" in r.getMessage()]
    assert len(lines) == 1 and lines[0].startswith("3 quadrilaterals")


def test_the_numbering_of_corners_makes_no_difference_to_batches(tmp_path):
    corners = np.array([[20, 20], [120, 26], [118, 62], [18, 56]])
    batches = []
    for number, order in enumerate(([0, 1, 2, 3], [2, 3, 0, 1], [3, 2, 1, 0])):
        (tmp_path / str(number)).mkdir()
        text = ",".join(str(value) for value in corners[order].ravel())
        folder = _write_folder(tmp_path / str(number), [text] * 4)
        generator = IcdarGenerator(folder, input_size=64, batch_size=4, seed=0)
        batches.append([next(generator) for _ in range(4)])
    for other in batches[1:]:
        for first, second in zip(batches[0], other):
            assert _names(first) == _names(second)
            for column in (0, 2, 3, 4):
                np.testing.assert_array_equal(first[column], second[column])


# ------------------------------------------------------------------------------ states, readers


@pytest.mark.parametrize("batch_size", [2, 4, 13])
def test_a_state_continues_exactly(folder, batch_size):
    """Within an epoch, at its end, and where the images do not fill a batch."""
    keywords = {"input_size": 64, "batch_size": batch_size}
    generator = IcdarGenerator(folder, seed=1, **keywords)
    states, batches = [generator.get_state()], []
    for _ in range(7):
        batches.append(next(generator))
        states.append(generator.get_state())
    for number, state in enumerate(states[:-1]):
        resumed = IcdarGenerator(folder, seed=99, **keywords)
        resumed.set_state(state)
        for expected in batches[number:]:
            _assert_equal_batches(next(resumed), expected)


def test_readers_continue_from_a_file(folder, tmp_path):
    make = functools.partial(
        icdar.make_reader, seed=5, training_data_path=folder, input_size=64, batch_size=3
    )
    with GeneratorEnqueuer(make, num_readers=2) as readers:
        for _ in range(3):
            readers.get()
        save_reader_state(tmp_path / "state.npz", readers.get_state())
        expected = [readers.get() for _ in range(3)]
    states = load_reader_state(tmp_path / "state.npz")
    with GeneratorEnqueuer(make, num_readers=2, states=states) as readers:
        for batch in expected:
            _assert_equal_batches(readers.get(), batch)


def test_a_state_of_other_images_is_refused(folder, tmp_path):
    state = IcdarGenerator(folder, seed=1).get_state()
    other = tmp_path / "other"
    other.mkdir()
    _write_folder(other, [QUAD] * 2)
    with pytest.raises(ValueError, match="of 6 images, not of the 2"):
        IcdarGenerator(other, seed=1).set_state(state)


def test_readers_draw_different_numbers_and_can_be_sent_to_a_process(folder):
    make = pickle.loads(
        pickle.dumps(
            functools.partial(
                icdar.make_reader,
                seed=5,
                training_data_path=str(folder),
                input_size=64,
                batch_size=3,
            )
        )
    )
    first, again, second = next(make(0)), next(make(0)), next(make(1))
    _assert_equal_batches(first, again)
    assert not np.array_equal(first[0], second[0])


@pytest.mark.parametrize("reader", ["thread", "process"])
def test_get_batch_takes_turns_between_its_readers(folder, reader):
    keywords = {
        "training_data_path": str(folder),
        "input_size": 64,
        "batch_size": 2,
        "seed": 5,
    }
    batches = icdar.get_batch(2, max_queue_size=4, reader=reader, **keywords)
    made = [next(batches) for _ in range(4)]
    batches.close()
    readers = [icdar.make_reader(index, **keywords) for index in range(2)]
    for number, batch in enumerate(made):
        _assert_equal_batches(batch, next(readers[number % 2]))


# ------------------------------------------------------------------------------------- the cache


def test_the_cache_is_bounded_and_notices_changes(tmp_path):
    _write_folder(tmp_path, [QUAD] * 3, size=(100, 100))
    paths = [
        (str(tmp_path / f"img_{number}.png"), str(tmp_path / f"img_{number}.txt"))
        for number in (1, 2, 3)
    ]
    cache = SampleCache(2 * 100 * 100 * 3)
    first = [cache.load(*pair)[0] for pair in paths]
    assert cache.load(*paths[2])[0] is first[2]
    assert cache.load(*paths[0])[0] is not first[0]  # the oldest had to go
    with pytest.raises(ValueError, match="read-only"):
        first[0][0, 0] = 0
    pathlib.Path(paths[2][1]).write_text(QUAD + "\n" + QUAD + "\n")
    assert len(cache.load(*paths[2])[1]) == 2
    cache.set_limit(0)
    again = cache.load(*paths[2])[0]
    assert cache.load(*paths[2])[0] is not again
