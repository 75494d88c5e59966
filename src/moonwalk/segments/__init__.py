"""Ways to differentiate consecutive nodes: store or recompute, walk, loop, invert."""
