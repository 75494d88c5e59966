"""The report: what is in the file, and what a real browser makes of it."""

import html.parser
import json
import os
import re
import shutil
import subprocess

import pytest
import samples

from moonwalk.lab.bench import charts, report
from moonwalk.lab.bench.tasks import Table

TABLES = {
    "table1": [
        Table(
            "Growth exponents",
            ("method", "measured", "verdict"),
            [
                ["backprop", 1.02, "as the paper"],
                ["forward", 3.1, "less: it is <sparse>"],
                ["x", None, "more"],
            ],
            notes=("Slopes over the largest sizes.",),
        )
    ],
    "fig2": [Table("At the largest depth", ("method", "verdict"), [["moonwalk", "WRONG"]])],
}
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")


@pytest.fixture(scope="module")
def text():
    return report.render(samples.results(), TABLES)


def own(text):
    """The page without Plotly's script."""
    start, end = text.index("<script>"), text.index('<script type="application/json"')
    return text[:start] + text[end:]


def test_the_header_says_where_it_was_measured(text):
    for name in ("device", "jax", "jaxlib", "commit", "python", "date"):
        assert f"<dt>{name}</dt><dd>{samples.HEADER[name]}</dd>" in text


def test_versions_that_differ_stand_at_their_experiments():
    one, two = samples.depth(), samples.batch()
    two["header"] = two["header"] | {"commit": "fed4321"}
    text = own(report.render([one, two], {}))
    assert "<dt>commit</dt>" not in text
    assert "commit abc1234" in text and "commit fed4321" in text


def test_tables_and_notes(text):
    assert '<td class="good">as the paper</td>' in text
    assert '<td class="fair">less: it is &lt;sparse&gt;</td>' in text
    assert '<td class="poor">more</td>' in text
    assert '<td class="none number">–</td>' in text
    assert "Slopes over the largest sizes." in text


def test_wrong_gradients_stand_out(text):
    assert '<td class="bad">WRONG</td>' in text
    assert "9 measurements have a wrong gradient" in text
    for name, count in (("fig2", 5), ("fig3", 3), ("pareto", 1)):
        assert f'<a href="#{name}">{name}</a> ({count})' in text
    plots = json.loads(re.search(r'id="plots">(.*?)</script>', text, re.DOTALL)[1])
    rings = [
        t
        for p in plots
        for t in p["data"]
        if t.get("marker", {}).get("line", {}).get("color") == charts.WRONG
    ]
    assert len(rings) >= 9


def test_right_gradients_are_not_warned_of():
    result = samples.depth()
    text = own(report.render([result], {}))
    assert "a wrong gradient" not in text


def test_from_files(tmp_path):
    """With the tables that the experiments themselves make."""
    files = []
    for result in (samples.fig2(), samples.depth()):
        files.append(tmp_path / f"{result['experiment']}.json")
        files[-1].write_text(json.dumps(result))
    path = report.write(files, tmp_path)
    assert path == tmp_path / "report.html"
    text = own(path.read_text(encoding="utf-8"))
    assert "<h3>pyramid, as printed, slope 0.01</h3>" in text
    assert '<td class="bad">WRONG</td>' in text and '<td class="good">exact</td>' in text
    assert "the largest depth within 22.4 GiB" in text


def test_out_of_memory_is_said(text):
    assert "out of memory: it did not fit" in text


def test_infinite_errors_are_drawn_as_wrong_and_break_nothing():
    result = samples.fig2()
    result["records"][2]["gradient_error"] = float("nan")
    result["records"][5]["gradient_error"] = float("inf")
    text = own(report.render([result], {}))
    assert '<td class="number">nan</td>' in text and '<td class="number">inf</td>' in text
    json.loads(re.search(r'id="plots">(.*?)</script>', text, re.DOTALL)[1])


def test_the_page_asks_for_nothing(text):
    class Links(html.parser.HTMLParser):
        found = ()

        def handle_starttag(self, tag, attrs):
            self.found += tuple(v for k, v in attrs if k in ("src", "href", "action", "data"))
            assert tag not in ("link", "iframe", "img", "object")

    links = Links()
    links.feed(text)
    assert links.found and all(v.startswith("#") for v in links.found)
    assert "default-src 'none'" in text  # and a browser holds the scripts to it
    assert not re.search(r"https?:|url\(|@import", own(text))


def browser():
    given = os.environ.get("CHROMIUM")
    return given or next(filter(None, map(shutil.which, BROWSERS)), None)


@pytest.mark.skipif(browser() is None, reason="no Chromium: name one in CHROMIUM")
def test_in_a_browser(text, tmp_path):
    """All plots are there, drawn, nothing was complained of, nothing was asked of a network."""
    page = tmp_path / "report.html"
    page.write_text(text, encoding="utf-8")
    command = [
        *(browser(), "--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr"),
        *(
            f"--user-data-dir={tmp_path / 'profile'}",
            "--virtual-time-budget=20000",
            "--window-size=1300,1000",
        ),
        *("--disable-background-networking", "--host-resolver-rules=MAP * ~NOTFOUND"),
        *("--dump-dom", page.as_uri()),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    complaints = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    assert not complaints
    body = re.sub(r"<script.*?</script>", "", done.stdout, flags=re.DOTALL)
    panels = [p for r in samples.results() for p in charts.chart(r).panels]
    pieces = re.split(r'id="plot-\d+"', body)[1:]
    assert len(pieces) == len(panels)
    for piece, panel in zip(pieces, panels, strict=True):
        assert 'class="main-svg"' in piece, panel.title
        assert panel.title in piece
        drawn = len(re.findall(r'<g class="(?:trace scatter|trace bars)', piece))
        assert drawn >= len(panel.series), panel.title
    assert body.count("<table") == 2 + len(samples.results())
    assert body.count('<td class="bad">') >= 9
