"""The networks that are measured: losses of (params, x, target), shapes, and an initialiser.

Parameters are the layers' weights themselves, declared where they have a structure, so that what is
measured is the gradient and not a parametrisation. Losses are means over the examples of a batch.

- `dense`, `skips` (`dense.py`): dense layers, scanned or in a loop, free or orthogonal.
- `pyramid`, `signal`, `isometric` (`paper.py`): the paper's networks, and circular convolutions.
- What people train, in plain JAX, each in the module of its name (`unet`: `diffusion.py`):
  `resnet`, `vit`, `mixer`, `unet` on images; `gpt`, `moe`, `seq2seq`, `recurrent`, `lru` on texts;
  `graphnet`, `fno`, `pinn` in the sciences.
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
from .fno import SIZES as _FNO
from .fno import fno
from .gpt import SIZES as _GPT
from .gpt import gpt
from .graphnet import SIZES as _GRAPHNET
from .graphnet import graphnet
from .lru import SIZES as _LRU
from .lru import lru
from .mixer import SIZES as _MIXER
from .mixer import mixer
from .moe import SIZES as _MOE
from .moe import moe
from .paper import isometric, pyramid, signal
from .pinn import SIZES as _PINN
from .pinn import pinn
from .recurrent import SIZES as _RECURRENT
from .recurrent import recurrent
from .resnet import SIZES as _RESNET
from .resnet import resnet
from .reversible import reversible
from .seq2seq import SIZES as _SEQ2SEQ
from .seq2seq import seq2seq
from .vit import SIZES as _VIT
from .vit import vit

NETWORKS: dict[str, Callable[[Task], Network]] = {
    "dense": dense,
    "skips": skips,
    "pyramid": pyramid,
    "signal": signal,
    "isometric": isometric,
    "resnet": resnet,
    "gpt": gpt,
    "unet": unet,
    "vit": vit,
    "mixer": mixer,
    "moe": moe,
    "seq2seq": seq2seq,
    "recurrent": recurrent,
    "lru": lru,
    "graphnet": graphnet,
    "fno": fno,
    "pinn": pinn,
    "reversible": reversible,
}
SIZES: dict[str, dict[str, dict[str, int]]] = {
    "resnet": _RESNET,
    "gpt": _GPT,
    "unet": _UNET,
    "vit": _VIT,
    "mixer": _MIXER,
    "moe": _MOE,
    "seq2seq": _SEQ2SEQ,
    "recurrent": _RECURRENT,
    "lru": _LRU,
    "graphnet": _GRAPHNET,
    "fno": _FNO,
    "pinn": _PINN,
}
"""Sizes of a `Task` for what people train: "full", and "tiny" with the variant of that name."""


def make(task: Task) -> Network:
    """The network that a task names."""
    if task.network not in NETWORKS:
        raise ValueError(nearest("network", task.network, NETWORKS))
    return NETWORKS[task.network](task)


def source() -> str:
    """The source text of all networks, a key for cached arguments and references."""
    return "".join(path.read_text() for path in sorted(Path(__file__).parent.glob("*.py")))
