"""bench.py: what it prints and when it fails; and that the things it compares do the same work."""

import importlib
import json
import os
import pathlib
import subprocess
import sys

import numpy as np
import pytest

import bench
from benchmarks import data_figures, measure, reference_labels, tower_figures
from benchmarks.groups import ALL_GROUPS
from benchmarks.reference_net import logical_cpus, make_step, plain_graph, tower_graph
from data import icdar

ROOT = pathlib.Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    "value, comparison, passes",
    [
        (1.0, "<=", True),
        (1.1, "<=", False),
        (1.0, "<", False),
        (1.0, ">=", True),
        (0.9, ">=", False),
    ],
)
def test_a_figure_is_compared_with_its_bar(value, comparison, passes):
    record = measure.Figure("name", value, "ratio", comparison, 1.0).record()
    assert record == {
        "name": "name",
        "value": value,
        "unit": "ratio",
        "bar": 1.0,
        "comparison": comparison,
        "pass": passes,
    }


def test_a_figure_may_have_no_bar():
    record = measure.Figure("name", 2.0, "ratio").record()
    assert record["bar"] is None and record["pass"] is None and record["value"] == 2.0


@pytest.mark.parametrize("comparison", measure.COMPARISONS)
def test_a_value_that_is_no_number_never_passes(comparison):
    record = measure.Figure("name", float("nan"), "ratio", comparison, 1.0).record()
    assert record["value"] is None and record["pass"] is False
    json.dumps(record, allow_nan=False)


def test_interleaved_variants_take_turns():
    now, calls = [0.0], []

    def variant(name, seconds):
        def run():
            calls.append(name)
            now[0] += seconds

        return run

    variants = {"slow": variant("slow", 3.0), "fast": variant("fast", 2.0)}
    seconds = measure.interleave(variants, rounds=4, warm_up=2, clock=lambda: now[0])
    assert seconds["slow"].tolist() == [3.0] * 4 and seconds["fast"].tolist() == [2.0] * 4
    rounds = [set(calls[i : i + 2]) for i in range(0, len(calls), 2)]
    assert rounds == [{"slow", "fast"}] * 6


def test_a_ratio_is_the_median_over_the_rounds():
    numerator, denominator = np.array([2.0, 8.0, 3.0]), np.array([1.0, 1.0, 1.0])
    assert measure.ratio_figure("name", numerator, denominator, "<=", 1).value == 3.0


def test_groups_and_figures_are_chosen_by_name():
    assert set(bench.select("", bench.GROUPS)) == set(bench.GROUPS)
    chosen = bench.select("labels,tower_overhead_k2", bench.GROUPS)
    assert chosen == {"labels": ["label_maps_512_30_quads"], "towers": ["tower_overhead_k2"]}
    with pytest.raises(ValueError, match="no_such_figure.*--list"):
        bench.select("labels,no_such_figure", bench.GROUPS)


def test_figures_have_names_of_their_own_and_functions_that_exist():
    names = [name for group in ALL_GROUPS.values() for name in group.figures]
    assert len(set(names)) == len(names)
    for group in ALL_GROUPS.values():
        module, function = group.function.split(".")
        assert callable(getattr(importlib.import_module(f"benchmarks.{module}"), function))


def test_a_missed_bar_is_printed_and_a_missing_figure_is_an_error(monkeypatch, capsys):
    def measured(name, unused_logical_cpus):
        missed = [figure for figure in bench.GROUPS[name].figures if figure != "lanms_3000"]
        return {figure: json.dumps({"name": figure, "pass": False}) for figure in missed}, 0

    monkeypatch.setattr(bench, "measure_in_child", measured)
    assert bench.main(["--only", "labels"]) == 0
    assert json.loads(capsys.readouterr().out) == {"name": "label_maps_512_30_quads", "pass": False}
    assert bench.main(["--only", "lanms,labels"]) == 1
    captured = capsys.readouterr()
    assert len(captured.out.splitlines()) == 1 and "lanms_3000 was not measured" in captured.err


def run_bench(*arguments, check=True):
    command = [sys.executable, str(ROOT / "bench.py"), *arguments]
    return subprocess.run(command, check=check, capture_output=True, text=True, cwd=os.sep)


def test_command_line():
    listed = run_bench("--list").stdout.splitlines()
    assert len(listed) == len(bench.GROUPS) and "lanms: lanms_3000" in listed
    wrong = run_bench("--only", "nonsense", check=False)
    assert wrong.returncode == 2 and "nonsense" in wrong.stderr
    (line,) = run_bench("--only", "labels").stdout.splitlines()
    record = json.loads(line)
    assert record["name"] == "label_maps_512_30_quads" and record["value"] > 0


# --- what is compared ----------------------------------------------------------------------------


@pytest.mark.parametrize("stride", [1, 4])
def test_point_by_point_labels_are_those_of_the_generator(stride):
    polys = data_figures.random_quads(8, 128, np.random.RandomState(1))
    polys[0, :, 1] = polys[0, :, 1].mean() + np.array([-4, -4, 4, 4])  # lower than min_text_size
    tags = np.arange(8) == 3
    found = icdar.generate_rbox((128, 160), polys, tags, 10, stride)
    expected = reference_labels.generate_rbox((128, 160), polys, tags, 10, stride)
    for array, reference, tolerance in zip(found, expected, (0, 1e-3, 0)):
        assert array.shape == reference.shape
        np.testing.assert_allclose(array, reference, rtol=0, atol=tolerance)
    assert found[0].sum() > 200 // stride**2 and not found[2].all()


def test_boxes_for_the_suppression_are_as_many_words_as_asked_for():
    boxes = data_figures.detected_boxes(words=7, pixels=20)
    assert boxes.shape == (140, 9) and boxes.dtype == np.float32
    assert len(data_figures.nms.merge_quadrangle_n9(boxes, 0.2)) == 7


def test_towers_and_the_split_plain_graph_make_the_same_steps():
    towers = make_step(tower_graph(logical_cpus(2)))
    plain = make_step(plain_graph(2))
    losses = [(towers()[1], plain()[1]) for _ in range(4)]
    found, expected = np.transpose(losses)
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    assert expected[0] > expected[-1]


def test_ops_grow_linearly_with_the_towers():
    (figure,) = tower_figures.ops_linear_in_k()
    ops = figure.detail["ops_k1_to_k4"]
    assert figure.record()["pass"] and sorted(set(ops)) == ops
