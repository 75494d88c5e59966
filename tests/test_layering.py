"""Imports point one way, and only `_jax` looks behind JAX's public names."""

import ast
import pathlib

import pytest

import moonwalk

ROOT = pathlib.Path(moonwalk.__file__).parent
FILES = {str(path.relative_to(ROOT)): path for path in sorted(ROOT.rglob("*.py"))}

# A folder imports from the lines above its own; what stands on one line does not know of one another.
LAYERS = """
    _jax errors settings
    trace
    rules
    operator network
    execute
    segments
    planning
    gradient
    preview
    fused
    nn
    models
    lab
"""
LINES = [line.split() for line in LAYERS.split("\n") if line.strip()]
RANK = {name: i for i, line in enumerate(LINES) for name in line}

# What JAX does not promise to keep.
UNSTABLE = ("jax._src", "jax.core", "jax.extend", "jax.interpreters", "jaxlib")


def imports(source, inside=()):
    """(line, module) of every import of a file in the package's folder `inside`, in functions, too.

    `from m import a` is `m.a`: whether that is a module or a name in one, the prefixes tell all.
    """
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            package = ["moonwalk", *inside]
            base = package[: len(package) - node.level + 1] if node.level else []
            base += node.module.split(".") if node.module else []
            yield from ((node.lineno, ".".join([*base, alias.name])) for alias in node.names)


def is_within(module, packages):
    return any(module == p or module.startswith(p + ".") for p in packages)


def against_the_layers(path, source):
    """Imports of the file of this path, relative to the package, that point the wrong way."""
    *inside, file = pathlib.PurePath(path).parts
    own = inside[0] if inside else file.removesuffix(".py")
    for line, module in imports(source, inside):
        if not is_within(module, ["moonwalk"]):
            continue
        name = [*module.split("."), "__init__"][1]  # the package itself has all of it
        if name != own and (name not in RANK or RANK[name] >= RANK[own]):
            yield f"{path}:{line}: {own} imports {module}"


def behind_jax(path, source):
    """Uses of what JAX does not promise to keep."""
    yield from (f"{path}:{n}: {m}" for n, m in imports(source) if is_within(m, UNSTABLE))
    for node in ast.walk(ast.parse(source)):
        # `jax.core.Tracer` after `import jax`, and names given to importlib
        if isinstance(node, ast.Attribute) and is_within(ast.unparse(node), UNSTABLE):
            yield f"{path}:{node.lineno}: {ast.unparse(node)}"
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and "jax._src" in node.value:
            yield f"{path}:{node.lineno}: {node.value!r}"


def test_every_module_has_a_layer():
    found = {pathlib.PurePath(path).parts[0].removesuffix(".py") for path in FILES}
    assert found - {"__init__"} == set(RANK)


def test_imports_point_one_way():
    files = {path: file.read_text() for path, file in FILES.items() if path != "__init__.py"}
    assert not [wrong for path, source in files.items() for wrong in against_the_layers(path, source)]


def test_only_one_module_looks_behind_jax():
    """No exceptions: what another module needs of it, `_jax` hands on under its own name."""
    files = {path: file.read_text() for path, file in FILES.items() if path != "_jax.py"}
    assert not [use for path, source in files.items() for use in behind_jax(path, source)]


WRONG = [
    "from ..planning import search",
    "from .. import planning",
    "from ..planning.search import best",
    "import moonwalk.planning",
    "import moonwalk.planning.search as s",
    "from moonwalk import planning",
    "from moonwalk.planning import search",
    "import moonwalk",
    "from moonwalk import vijp",
    "def f():\n    from ..planning import search",
    "def f():\n    import moonwalk.planning",
    "from .. import network",  # its neighbour
]


@pytest.mark.parametrize("source", WRONG)
def test_the_wrong_way_is_seen(source):
    (found,) = against_the_layers("operator/vijp.py", source)
    assert found.startswith(f"operator/vijp.py:{source.count(chr(10)) + 1}: operator imports moonwalk")


@pytest.mark.parametrize(
    "source",
    [
        "from ..rules import chain",
        "from .. import _jax",
        "from . import other",
        "from .other import name",
        "import moonwalk.trace.graph",
        "def f():\n    from moonwalk.rules import chain",
        "import jax\nfrom jax import lax",
    ],
)
def test_the_right_way_is_fine(source):
    assert not [*against_the_layers("operator/vijp.py", source)]


@pytest.mark.parametrize(
    "source",
    [
        "import jax._src.core",
        "from jax._src import core",
        "from jax import core",
        "from jax.core import Tracer",
        "from jax.extend import source_info_util",
        "from jax.interpreters import ad",
        "def f():\n    from jax.extend.core import Literal",
        "import importlib\nimportlib.import_module('jax._src.core')",
        "import jax\ndef f(x):\n    return isinstance(x, jax.core.Tracer)",
    ],
)
def test_a_look_behind_jax_is_seen(source):
    assert [*behind_jax("operator/vijp.py", source)]
    assert not [
        *behind_jax("operator/vijp.py", "import jax\nfrom jax import lax\nx = jax.numpy.ones(3)")
    ]
