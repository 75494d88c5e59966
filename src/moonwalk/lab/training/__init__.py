"""Training classifiers with any of the methods: one loop for the command line, the examples and scripts.

Needs JAX, Equinox and optax alone; checkpoints need orbax, pictures Matplotlib.
"""

from .augment import crop as crop
from .augment import flip as flip
from .augment import flip_and_crop as flip_and_crop
from .checkpoints import Checkpoints as Checkpoints
from .curves import Log as Log
from .curves import plot as plot
from .curves import read_csv as read_csv
from .curves import write_csv as write_csv
from .loop import Result as Result
from .loop import fit as fit
from .names import METHODS as METHODS
from .names import OPTIMIZERS as OPTIMIZERS
from .names import SCHEDULES as SCHEDULES
from .names import method as method
from .names import nearest as nearest
from .names import optimizer as optimizer
from .records import Record as Record
from .stepping import cross_entropy as cross_entropy
