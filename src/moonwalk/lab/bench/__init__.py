"""Every method of the paper, measured side by side: `moonwalk bench`, `python -m moonwalk.lab.bench`."""

from .tasks import Record as Record
from .tasks import Request as Request
from .tasks import Table as Table
from .tasks import Task as Task
