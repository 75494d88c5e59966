"""Charts are what is drawn, figures how: pictures that exist, lines that end where memory did."""

import xml.etree.ElementTree as ET

import pytest
import samples
from marks import some

from moonwalk.lab.bench import charts, figures, judgement


@pytest.mark.filterwarnings("error::UserWarning")  # such as that there is no room for the axes
@pytest.mark.parametrize("name", some([r["experiment"] for r in samples.results()], ["fig3", "vijp"]))
def test_a_png_and_an_svg(tmp_path, name):
    result = getattr(samples, name)()
    png, svg = figures.draw(result["experiment"], result, tmp_path)
    assert png.name == f"{result['experiment']}.png" and png.read_bytes()[:4] == b"\x89PNG"
    words = " ".join(ET.parse(svg).getroot().itertext()).split()
    drawn = " ".join(words)  # titles are broken into lines
    for panel in charts.chart(result).panels:
        assert panel.title in drawn
    assert "Sample Device, JAX 0.0.1, commit abc1234, quick sizes" in drawn


def test_nothing_to_draw(tmp_path):
    assert figures.draw("fig2", samples.result("fig2", []), tmp_path) == []
    assert list(tmp_path.iterdir()) == []


def test_the_same_picture_is_the_same_file(tmp_path):
    first, second = (figures.draw("depth", samples.depth(), tmp_path / n)[1].read_bytes() for n in "ab")
    assert first == second


def test_lines_end_where_memory_did():
    row = charts.chart(samples.fig2()).rows[0]
    memory = row.panels[0]
    backprop = next(s for s in memory.series if s.name == "backprop")
    assert [p.x for p in backprop.points] == [2, 4, 6]
    assert backprop.end == (8, pytest.approx(7.2), "oom")
    assert memory.y == "GiB"
    error = row.panels[-1]
    assert all(s.end is None for s in error.series)


def test_wrong_points_are_marked():
    row = charts.chart(samples.fig2()).rows[1]
    for panel in row.panels:
        moonwalk = next(s for s in panel.series if s.name == "moonwalk")
        assert [p.wrong for p in moonwalk.points] == [False, True, True, True]
        assert not any(p.wrong for s in panel.series if s is not moonwalk for p in s.points)


def test_variants_at_one_depth_share_bars():
    row = charts.chart(samples.fig2()).rows[2]
    assert row.title == "other variants, 8 layers"
    assert {p.kind for p in row.panels} == {"bars"}
    assert row.panels[0].series[0].name == "lower, slope 0.1: moonwalk-as-printed"


def test_no_error_at_all_is_drawn_at_the_bottom():
    result = samples.fig2()
    for record in result["records"]:
        record["gradient_error"] = 0.0 if record["status"] == "ok" else None
    panel = charts.chart(result).rows[0].panels[-1]
    assert {p.y for s in panel.series for p in s.points} == {1e-9}
    assert "0 drawn at 1e-09" in panel.y


def test_the_largest_that_fits():
    result = samples.depth()
    result["records"].append(samples.record("depth", "backprop", 90, status="oom", network="isometric"))
    result["records"].append(samples.record("depth", "backprop", 20, network="isometric"))
    (panel,) = charts.chart(result).rows[0].panels
    bars = {s.name: s for s in panel.series}
    assert bars["backprop"].points[0].y == 40 and charts.bar_label(bars["backprop"]) == "40"
    assert charts.bar_label(bars["moonwalk"]) == "1,100"
    assert charts.bar_label(bars["moonwalk-checkpoint"]) == "4,096 or more"  # the search ended there
    assert panel.title == "largest depth within 22.4 GiB"


def test_accuracy_is_the_mean_of_seeds():
    (row,) = charts.chart(samples.fig4()).rows
    assert row.title == "residual_cnn on Sample-MNIST"
    free = row.panels[0].series[0]
    assert free.name == "free pivot" and len(free.points) == 8
    last = free.points[-1]
    assert (last.low, last.y, last.high) == pytest.approx((88.25, 88.45, 88.65))


def test_methods_look_alike_in_families_and_differ_within():
    looks = [charts.style_of(m) for m in ("checkpoint", "checkpoint-sqrt", "checkpoint-block")]
    assert len({s.colour for s in looks}) == 1 and len({s.dash for s in looks}) == 3
    assert charts.style_of("accumulate-16") == charts.STYLES["accumulate"]
    assert charts.style_of("moonwalk-fragment-16-aligned") == charts.STYLES["moonwalk-fragment-16"]
    assert charts.style_of("moonwalk-fragment-12") == charts.STYLES["moonwalk-fragment"]
    assert len({(s.colour, s.dash) for s in charts.STYLES.values()}) == len(charts.STYLES)


def test_units():
    assert charts.unit_of("temp_bytes", 3 * 2**30) == (2**30, "GiB")
    assert charts.unit_of("temp_bytes", 100) == (2**10, "KiB")
    assert charts.unit_of("seconds", 0.02) == (1e-3, "ms")


# --- judgement ----------------------------------------------------------------------------------------


def judged(error, *others, method="moonwalk", **more):
    record = samples.record("fig2", method, error=error, **more)
    return judgement.verdict(record, [record, *others])


def test_a_gradient_is_judged_beside_backpropagation():
    assert judged(1e-3) == "exact"
    assert judged(0.01) == "inexact"
    assert judged(0.05) == "WRONG"
    backprop = samples.record("fig2", "backprop", error=0.035)  # TF32 against float32
    assert judged(0.05, backprop) == "exact"
    assert judged(0.5, backprop) == "WRONG"
    elsewhere = samples.record("fig2", "backprop", error=0.035, variant="another")
    assert judged(0.05, elsewhere) == "WRONG"
    smaller = samples.record("fig2", "jax-checkpoint-sqrt", 2, error=0.035)
    assert judged(0.05, smaller) == "exact"  # none at these sizes
    assert judged(0.05, smaller, samples.record("fig2", "backprop", error=1e-6)) == "WRONG"


@pytest.mark.parametrize("method", ["checkpoint", "checkpoint-sqrt", "moonwalk", "reversible"])
def test_no_method_of_the_library_is_judged_by_its_own_error(method):
    others = [samples.record("fig2", m, error=0.05) for m in ("checkpoint-block", "moonwalk-checkpoint")]
    backprop = samples.record("fig2", "backprop", error=1e-6)
    assert judged(0.05, *others, method=method) == "WRONG"
    assert judged(0.05, *others, backprop, method=method) == "WRONG"


def test_what_cannot_be_judged():
    assert judged(float("nan")) == "not finite"
    assert judged(None) == "unchecked"
    assert judged(1e3, method="projected-forward") == "estimate"
    assert judged(1.0, status="oom") == "oom"
