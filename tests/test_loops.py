"""The one loop, beside a loop in Python: order, places, what pieces are given and what comes of them."""

import jax.numpy as jnp
import numpy as np
import pytest

from moonwalk.execute.loops import LayerLoop, Level


def drawn(seed):
    """(loop, sizes of levels, whether backward, how many layers)."""
    rng = np.random.default_rng(seed)
    length = int(rng.integers(1, 40))
    sizes = sorted(rng.integers(1, length + 3, size=rng.integers(0, 3)).tolist(), reverse=True)
    count = int(rng.integers(1, length + 1)) if rng.random() < 0.3 else length
    return LayerLoop(length, bool(rng.random() < 0.5)), sizes, bool(rng.random() < 0.5), count


def through(run, state, kept, piece):
    """A level at which nothing happens."""
    return run(state, kept)


def numbered(state, place, kept):
    """The place at every step, and the layer's own number from `kept`."""
    seen, step = state
    return (seen.at[step].set(place), step + 1), place if kept is None else (place, kept)


@pytest.mark.parametrize("seed", range(24))
def test_layers_are_visited_in_order_and_results_are_by_layer(seed):
    loop, sizes, backward, count = drawn(seed)
    start = jnp.full(count, -1, jnp.int32), jnp.int32(0)
    (seen, steps), places = loop.visit(
        numbered,
        start,
        levels=[Level(size, through) for size in sizes],
        count=count,
        backward=backward,
        join=loop.joined,
    )
    order = list(range(count))[:: -1 if loop.reverse != backward else 1]
    assert seen.tolist() == order and int(steps) == count
    np.testing.assert_array_equal(places, np.arange(count))


@pytest.mark.parametrize("seed", range(24))
def test_a_pass_back_is_given_what_the_pass_there_returned(seed):
    """Nested as the pieces are: every layer finds its own."""
    loop, sizes, backward, count = drawn(seed)
    start = jnp.zeros(count, jnp.int32), jnp.int32(0)
    levels = [Level(size, through) for size in sizes]
    _, kept = loop.visit(numbered, start, levels=levels, count=count, backward=backward)
    _, (places, own) = loop.visit(
        numbered, start, kept, levels, count=count, backward=not backward, join=loop.joined
    )
    np.testing.assert_array_equal(places, own)


@pytest.mark.parametrize("seed", range(24))
def test_arrays_stacked_by_layer_are_cut_as_the_pieces_are(seed):
    loop, sizes, backward, count = drawn(seed)
    start = jnp.zeros(count, jnp.int32), jnp.int32(0)
    _, (places, own) = loop.visit(
        lambda state, place, kept: numbered(state, place, kept[0]),
        start,
        [10 * jnp.arange(count)],
        [Level(size, through) for size in sizes],
        count=count,
        backward=backward,
        cut=loop.cut,
        join=loop.joined,
    )
    np.testing.assert_array_equal(10 * np.asarray(places), own)


@pytest.mark.parametrize("seed", range(24))
def test_pieces_cover_the_layers_once(seed):
    loop, sizes, backward, count = drawn(seed)
    if not sizes:
        return
    loops, alone = [], []

    def around(run, state, kept, piece):
        loops.append(piece.looped)
        alone.append(piece.alone)
        here = piece.first + jnp.arange(piece.count)
        return state.at[here].add(1), None

    found, _ = loop.visit(
        None,
        jnp.zeros(count, jnp.int32),
        levels=[Level(sizes[0], around)],
        count=count,
        backward=backward,
    )
    np.testing.assert_array_equal(found, np.ones(count))
    assert alone == [True] if sizes[0] >= count else not any(alone)
    assert loops.count(False) == (1 if sizes[0] >= count or count % sizes[0] else 0)


def test_a_layer_that_no_level_runs_is_an_error():
    with pytest.raises(AssertionError, match="run its pieces itself"):
        LayerLoop(3, False).visit(None, jnp.zeros(()), levels=[])
