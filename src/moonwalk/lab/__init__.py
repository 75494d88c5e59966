"""Data, training, bench and command line. It uses the library, which never imports it."""
