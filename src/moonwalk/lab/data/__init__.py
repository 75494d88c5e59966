"""Data sets as NumPy arrays, and batches that depend only on a seed and a step.

Nothing is downloaded: MNIST-1D is generated, the others are read from files that the user names.
"""

from . import cifar as cifar
from . import fashion as fashion
from .batching import batches as batches
from .batching import indices as indices
from .cifar import cifar10 as cifar10
from .dataset import Dataset as Dataset
from .fashion import fashion_mnist as fashion_mnist
from .images import image_folder as image_folder
from .npz import load as load
from .npz import save as save
from .signals import mnist1d as mnist1d
