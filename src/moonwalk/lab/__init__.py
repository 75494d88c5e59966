"""Data, training, bench and command line. Imports the library, never the other way."""
