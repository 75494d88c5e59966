"""The truth for linear layers, in NumPy, written from their definitions: no JAX."""

import itertools

import numpy as np


def conv_vjp(h_out, kernel, sizes, strides, lows, dilations):
    """h[i] = Σ_{(i', j): s·i' + r·j - p = i} w[j] h'[i'].

    h_out: [N, n'…, g, m'], kernel: [k…, g, m, m']; returns h: [N, n…, g, m].
    """
    d = len(sizes)
    h = np.zeros((h_out.shape[0], *sizes, *kernel.shape[d : d + 2]))
    outs = h_out.shape[1 : 1 + d]
    for window in itertools.product(*map(range, outs)):
        for tap in itertools.product(*map(range, kernel.shape[:d])):
            place = tuple(
                s * i + r * j - p
                for i, j, s, p, r in zip(window, tap, strides, lows, dilations, strict=True)
            )
            if all(0 <= i < n for i, n in zip(place, sizes, strict=True)):
                h[(slice(None), *place)] += np.einsum(
                    "ngo,gmo->ngm", h_out[(slice(None), *window)], kernel[tap]
                )
    return h
