"""From a network and a method to the segments it is differentiated by, and the report of it."""
