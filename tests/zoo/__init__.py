"""Networks drawn from a seed, and what every method makes of them.

`kinds` is the table of layers, `networks` draws a network from a seed, `interpreter` evaluates traced
programs without compiling them, `judge` compares a method with `jax.value_and_grad`, `damage` breaks the
weights that a plan relies on, and `runner` (`python -m zoo`) goes through seeds and sums up.
"""
