"""The command line, `moonwalk`."""

from .entry import main as main
