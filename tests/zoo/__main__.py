"""`python -m zoo`, with tests/ on the path."""

import os
import sys

# Before JAX starts, as for the tests: many tiny programs, each compiled quickly.
os.environ.setdefault(
    "XLA_FLAGS", "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
)
os.environ.setdefault("JAX_ENABLE_X64", "1")

from .runner import main

sys.exit(main())
