"""From a network and a method to a plan: the segments that differentiate it, and a printable report."""
