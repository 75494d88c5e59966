"""Shared by all tests: float64, fast compilation, eight CPU devices, a fixed Hypothesis profile, shards."""

import gc
import os
import pathlib

# Before JAX starts: the suite compiles thousands of tiny programs and runs each once.
os.environ.setdefault(
    "XLA_FLAGS", "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
)
os.environ.setdefault("JAX_ENABLE_X64", "1")
os.environ.setdefault("JAX_NUM_CPU_DEVICES", "8")  # for `test_devices.py`; the others use the first

# Half of the suite's time goes to the compiler. Programs that it has seen before, in this run or in an earlier one,
# come from here; JAX's key is the program, the flags and the version. `make clean` forgets them.
os.environ.setdefault(
    "JAX_COMPILATION_CACHE_DIR", str(pathlib.Path(__file__).parent.parent / "build" / "compiled")
)
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")

import hypothesis
import jax
import pytest
from shards import (  # noqa: F401  (pytest finds its hooks here)
    pytest_addoption,
    pytest_collection_modifyitems,
    pytest_configure,
    pytest_terminal_summary,
    pytest_testnodedown,
)

hypothesis.settings.register_profile(
    "ci",
    deadline=None,  # the first example of a shape compiles
    derandomize=True,  # the same examples on every machine
    max_examples=200,
    print_blob=True,
    suppress_health_check=[hypothesis.HealthCheck.too_slow, hypothesis.HealthCheck.data_too_large],
)
hypothesis.settings.load_profile("ci")


def pytest_collection_finish():
    """What is there by now stays there: the garbage collector need not look through it again and again."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)


@pytest.fixture(autouse=True, scope="module")
def _forget_compiled_programs():
    """A worker that keeps every program of the suite grows to gigabytes."""
    yield
    jax.clear_caches()
