"""A language model whose MLPs are mixtures of experts, with top-2 routing (GShard).

As `gpt`, with eight experts in every block. Experts have room for a quarter more tokens than an even
share; those beyond it are dropped. Tokens compete within their own text, and the load-balancing loss,
added to the loss, is a mean over texts. Variants: those of `gpt`; "tiny" has four experts.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp

from ..tasks import Task
from .base import Network, Wrap, affine, chain, identity, normal, stacked, words
from .gpt import HEAD, VOCABULARY, attention, cross_entropy, init_attention, layer_norm

SIZES = {
    "full": {"depth": 12, "width": 768, "length": 1024, "batch": 16},
    "tiny": {"depth": 3, "width": 16, "length": 8, "batch": 4},
}
EXPERTS = {"full": 8, "tiny": 4}
CHOSEN = 2  # experts of a token
ROOM = 1.25
BALANCE = 0.01  # weight of the load-balancing loss


def experts(x: Any, p: Any) -> tuple[Any, Any]:
    """(the experts' outputs, weighted; the load-balancing loss) for x [batch, length, width]."""
    batch, length, _ = x.shape
    count = p["router"].shape[-1]
    room = math.ceil(ROOM * CHOSEN * length / count)
    scores = jax.nn.softmax(x.astype(p["router"].dtype) @ p["router"])
    gates, chosen = jax.lax.top_k(scores, CHOSEN)  # [batch, length, CHOSEN]
    gates = gates / jnp.sum(gates, -1, keepdims=True)

    # Each expert takes tokens in their order, all first choices before the second ones.
    picks = jax.nn.one_hot(chosen, count, dtype=jnp.int32)
    in_order = picks.swapaxes(1, 2).reshape(batch, CHOSEN * length, count)
    places = jnp.sum((jnp.cumsum(in_order, 1) - in_order) * in_order, -1)
    places = places.reshape(batch, CHOSEN, length).swapaxes(1, 2)
    slots = jax.nn.one_hot(places, room, dtype=x.dtype)  # nothing where there is no room
    dispatch = jnp.einsum("btke,btkr->bter", picks.astype(x.dtype), slots)
    combine = jnp.einsum("btke,btkr,btk->bter", picks.astype(x.dtype), slots, gates.astype(x.dtype))

    y = jnp.einsum("bter,btd->ebrd", dispatch, x)
    y = jax.nn.gelu(jnp.einsum("ebrd,edf->ebrf", y, p["up"].astype(x.dtype)))
    y = jnp.einsum("ebrf,efd->ebrd", y, p["down"].astype(x.dtype))
    y = jnp.einsum("bter,ebrd->btd", combine, y)

    first = jnp.mean(picks[:, :, 0].astype(scores.dtype), 1)
    balance = count * jnp.mean(jnp.sum(first * jnp.mean(scores, 1), -1))
    return y, balance


def block(state: tuple[Any, Any], p: Any, *, head: int) -> tuple[Any, Any]:
    """(x, the load-balancing loss so far) -> the same."""
    x, balance = state
    x = x + attention(x, p, head=head)
    y, own = experts(layer_norm(x, p["norm2"]), p)
    return x + y, balance + own


def init_block(key: Any, width: int, count: int) -> dict[str, Any]:
    own, router, up, down = jax.random.split(key, 4)
    return {
        **init_attention(own, width),
        "norm2": affine(width),
        "router": normal(router, (width, count)),
        "up": normal(up, (count, width, 4 * width), width),
        "down": normal(down, (count, 4 * width, width), 4 * width),
    }


def moe(task: Task) -> Network:
    found, _ = words(task, "scanned", "bfloat16", "tiny")
    size = "tiny" if "tiny" in found else "full"
    scanned, vocabulary, width = "scanned" in found, VOCABULARY[size], task.width
    one = functools.partial(init_block, width=width, count=EXPERTS[size])

    def init(key: Any) -> dict[str, Any]:
        tokens, places, blocks = jax.random.split(key, 3)
        return {
            "tokens": 0.02 * normal(tokens, (vocabulary, width), 1),
            "places": 0.02 * normal(places, (task.length, width), 1),
            "blocks": stacked(one, blocks, task.depth, scan=scanned),
            "norm": affine(width),
        }

    def model(
        params: Any,
        tokens: Any,
        following: Any,
        *,
        wrap: Wrap = identity,
        every: int = 1,
        inner: Wrap = identity,
    ) -> Any:
        x = params["tokens"][tokens] + params["places"]
        state = x.astype(jnp.bfloat16) if "bfloat16" in found else x, jnp.zeros((), x.dtype)
        step = lambda state, p: block(state, p, head=HEAD[size])
        x, balance = chain(step, state, params["blocks"], wrap=wrap, every=every, inner=inner)
        x = layer_norm(x, params["norm"])
        loss = cross_entropy(x @ params["tokens"].T.astype(x.dtype), following)
        return loss + BALANCE * balance / task.depth

    shape = jax.ShapeDtypeStruct((task.batch, task.length), jnp.int32)
    return Network(init, shape, shape, model, task.depth, scanned, classes=vocabulary)
