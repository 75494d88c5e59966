"""Layers that are submersive or isometric by construction, and stay so while they learn."""

from .activations import Abs as Abs
from .activations import LeakyReLU as LeakyReLU
from .activations import MaxMin as MaxMin
from .activations import PReLU as PReLU
from .causal import CausalConv1d as CausalConv1d
from .constraints import bounded as bounded
from .constraints import diagonal as diagonal
from .constraints import lower as lower
from .constraints import orthogonal as orthogonal
from .constraints import pivot_kernel as pivot_kernel
from .constraints import spectral_bound as spectral_bound
from .constraints import stable_taps as stable_taps
from .containers import Sequential as Sequential
from .containers import Stack as Stack
from .conv import Conv1d as Conv1d
from .conv import Conv2d as Conv2d
from .conv import Conv3d as Conv3d
from .conv import pivot_taps as pivot_taps
from .dense import Linear as Linear
from .norm import GroupNorm as GroupNorm
from .patches import Patchify as Patchify
from .pooling import GlobalMax as GlobalMax
from .pooling import GlobalMean as GlobalMean
from .pooling import MaxPool as MaxPool
from .pooling import MeanPool as MeanPool
from .pooling import Unshuffle as Unshuffle
