"""The networks that are measured: losses of (params, x, target), shapes, and an initialiser.

Parameters are the layers' weights themselves, declared where they have a structure, so that what is
measured is the gradient and not a parametrisation. Losses are means over the examples of a batch.

- `dense`, `skips` (`dense.py`): dense layers, scanned or in a loop, free or orthogonal.
- `pyramid`, `signal`, `isometric` (`paper.py`): the paper's networks, and circular convolutions.
- `resnet` (`resnet.py`), `gpt` (`gpt.py`), `unet` (`diffusion.py`): what people train, in plain JAX.
- `reversible` (`reversible.py`): a vision transformer of reversible couplings.

Every network can have `jax.checkpoint` around runs of its layers (`Network.by_hand`), which is what a
user would write instead.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from ...training.names import nearest
from ..tasks import Task
from .base import Network as Network
from .dense import dense, skips
from .diffusion import SIZES as _UNET
from .diffusion import unet
from .gpt import SIZES as _GPT
from .gpt import gpt
from .paper import isometric, pyramid, signal
from .resnet import SIZES as _RESNET
from .resnet import resnet
from .reversible import reversible

NETWORKS: dict[str, Callable[[Task], Network]] = {
    "dense": dense,
    "skips": skips,
    "pyramid": pyramid,
    "signal": signal,
    "isometric": isometric,
    "resnet": resnet,
    "gpt": gpt,
    "unet": unet,
    "reversible": reversible,
}
SIZES: dict[str, dict[str, dict[str, int]]] = {"resnet": _RESNET, "gpt": _GPT, "unet": _UNET}
"""Sizes of a `Task` for what people train: "full", and "tiny" with the variant of that name."""


def make(task: Task) -> Network:
    """The network that a task names."""
    if task.network not in NETWORKS:
        raise ValueError(nearest("network", task.network, NETWORKS))
    return NETWORKS[task.network](task)


def source() -> str:
    """The source text of all networks, a key for cached arguments and references."""
    return "".join(path.read_text() for path in sorted(Path(__file__).parent.glob("*.py")))
