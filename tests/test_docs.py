"""The documents keep their word: the README's examples run and print what they say; links lead somewhere."""

import ast
import os
import pathlib
import re
import subprocess
import sys

import jax
import pytest

from moonwalk import compat

ROOT = pathlib.Path(__file__).parent.parent
DOCUMENTS = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")]


def blocks(text, language):
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize(
    ("page", "count"),
    [("README.md", 7), pytest.param("docs/transformer.md", 2, marks=pytest.mark.slow)],
)
def test_the_examples_of_a_page(tmp_path, page, count):
    text = (ROOT / page).read_text()
    code, expected = blocks(text, "python"), blocks(text, "text")
    assert len(code) == len(expected) == count
    # block after block in one namespace, as a reader would paste them
    (tmp_path / "run.py").write_text(
        f"space = {{}}\nfor block in {code!r}:\n    exec(compile(block, 'example.py', 'exec'), space)\n"
    )
    env = {k: v for k, v in os.environ.items() if k != "JAX_ENABLE_X64"}
    done = subprocess.run(
        [sys.executable, "run.py"], cwd=tmp_path, env=env, capture_output=True, text=True
    )
    found, said = done.stdout, "".join(expected)
    if compat.version_tuple(jax.__version__) < (0, 11):  # pages have the figures of newer compilers
        sizes = r"([\d.]+) MiB"
        for a, b in zip(re.findall(sizes, found), re.findall(sizes, said), strict=True):
            assert abs(float(a) - float(b)) <= float(b) / 4
        found, said = (re.sub(sizes, "MiB", text) for text in (found, said))
    assert found == said, done.stderr


@pytest.mark.slow
def test_the_walk_by_hand():
    done = subprocess.run(
        [sys.executable, ROOT / "examples" / "by_hand.py"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    errors = [float(e) for e in re.findall(r"\d+e-\d+", done.stdout)]
    assert len(errors) == 10
    assert max(errors) <= 1e-10
    assert "reason:" in done.stdout


@pytest.mark.slow  # the README begins with the same
def test_the_demo_of_the_engine():
    env = {k: v for k, v in os.environ.items() if k != "JAX_ENABLE_X64"}
    done = subprocess.run(
        [sys.executable, ROOT / "examples" / "engine.py"], env=env, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    backprop, moonwalk = (float(m) for m in re.findall(r"([\d.]+) MiB of temporaries", done.stdout))
    assert moonwalk <= backprop / 8
    errors = [float(e) for e in re.findall(r"\d+e-\d+", done.stdout)]
    assert len(errors) == 2
    assert max(errors) <= 1e-4


def example(name, *arguments, cwd=ROOT):
    """What an example prints, in float32 and as a user's compiler makes it."""
    env = {k: v for k, v in os.environ.items() if k not in ("JAX_ENABLE_X64", "XLA_FLAGS")}
    command = [sys.executable, ROOT / "examples" / name, *arguments]
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_the_demo(tmp_path):
    text = example("demo.py", "--steps", "40", "--batch", "64", "--depth", "16", cwd=tmp_path)
    backprop, moonwalk = (float(m) for m in re.findall(r"([\d.]+) MiB", text))
    assert moonwalk <= backprop / 4
    off = [float(e) for e in re.findall(r"\d+e-\d+", text)]
    assert len(off) == 4 and max(off) <= 1e-4
    losses = [float(m) for m in re.findall(r"│ (?:backprop|moonwalk) │ ([\d.]+)", text)]
    assert len(losses) == 2 and max(losses) < 2.2
    assert (tmp_path / "build" / "demo.png").read_bytes()[:4] == b"\x89PNG"


@pytest.mark.slow
def test_the_example_of_flax():
    pytest.importorskip("flax.nnx")
    text = example("flax_nnx.py", "--steps", "40", "--depth", "4")
    assert int(re.search(r"(\d+) blocks walked", text)[1]) > 5
    errors = [float(e) for e in re.findall(r"\d+e-\d+", text)]
    assert len(errors) == 3 and max(errors) <= 1e-4
    first, last = (float(m) for m in re.findall(r"loss ([\d.]+)", text))
    assert last < first - 0.3


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda d: d.name)
def test_links_lead_somewhere(document):
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", document.read_text()):
        if not target.startswith("http"):
            assert (document.parent / target).exists(), target


def test_architecture_names_every_module():
    text = (ROOT / "ARCHITECTURE.md").read_text()
    source = ROOT / "src" / "moonwalk"
    for path in (*source.glob("*.py"), *source.glob("nn/*.py"), *source.glob("models/*.py")):
        assert f"`{path.stem}`" in text, path.stem


def test_architecture_says_what_modules_import():
    text = (ROOT / "ARCHITECTURE.md").read_text()
    table = text[text.index("## Where things are") :].split("\n## ")[0]
    rows = re.findall(r"^\| `(\w+)` \|.*\| ([^|]+) \|$", table, re.MULTILINE)
    exact = {name: cell for name, cell in rows if not re.search("below|all of it", cell)}
    assert len(exact) > 20
    for name, cell in exact.items():
        tree = ast.parse((ROOT / "src" / "moonwalk" / f"{name}.py").read_text())
        nodes = [n for n in ast.walk(tree) if isinstance(n, ast.ImportFrom) and n.level]
        found = {m for n in nodes for m in ([n.module] if n.module else [a.name for a in n.names])}
        assert found == set(re.findall(r"\w+", cell)), name


def test_the_readme_names_the_commands():
    text = (ROOT / "README.md").read_text()
    makefile = (ROOT / "Makefile").read_text()
    for command in ("demo", "test", "bench-engine", "bench-variants"):
        assert f"make {command}" in text
        assert re.search(rf"^{command}:", makefile, re.MULTILINE)
