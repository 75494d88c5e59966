"""`python -m zoo --seeds 0:10000 --shard 3/8 --out zoo.json`: networks by seed, a summary, and every failing seed."""

import argparse
import collections
import contextlib
import dataclasses
import gc
import json
import signal
import sys
import time

import jax

from .judge import Outcome, Reference, judge, methods_for
from .networks import Network

FAILURES = ("wrong", "crash")
REPORTED = (*FAILURES, "inexact", "loud", "undecided", "timeout")


class Timeout(BaseException):
    """Not an Exception: nobody on the way may take it for an error of the network."""


@contextlib.contextmanager
def time_limit(seconds):
    def ring(*_):
        raise Timeout

    before = signal.signal(signal.SIGPROF, ring)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


@dataclasses.dataclass
class Record:
    """What became of a network."""

    seed: int
    skipped: str = ""  # JAX itself cannot differentiate it
    outcomes: list = dataclasses.field(default_factory=list)
    listing: str = ""
    seconds: float = 0.0  # of processor time


def examine(seed, methods=None, limit=60.0, drop=frozenset(), most=None):
    """A record of one network, by the methods that its seed picks (at most so many), or by these."""
    record, begin = Record(seed), time.process_time()
    now = "JAX"
    try:
        with time_limit(limit):
            try:
                network = Network(seed, drop)
            except Exception as error:  # a kind of layer that does not take what it says it takes
                record.outcomes.append(Outcome("zoo", "crash", f"{type(error).__name__}: {error}"[:300]))
                return record
            record.listing = str(network)
            try:
                ref = Reference(network)
            except Exception as error:
                record.skipped = f"{type(error).__name__}: {error}"[:200]
                return record
            for now in methods or methods_for(network)[:most]:
                start = time.process_time()
                outcome = judge(ref, now)
                outcome.seconds = time.process_time() - start
                record.outcomes.append(outcome)
    except Timeout:
        record.outcomes.append(Outcome(now, "timeout", f"{limit:g} s"))
    finally:
        record.seconds = time.process_time() - begin
    return record


def shrink(seed, method, verdict, limit=60.0):
    """The same failure with as few layers as greedy dropping finds."""
    drop = frozenset()
    candidates = [(i,) for i in range(Network(seed).settings.depth)]
    for place in [*candidates, *candidates[::-1]]:
        if place in drop:
            continue
        tried = examine(seed, [method], limit, drop | {place})
        if any(o.verdict == verdict for o in tried.outcomes):
            drop |= {place}
    return Network(seed, drop)


def summary(records, seconds):
    """Counts by method and verdict, as text."""
    table = collections.defaultdict(collections.Counter)
    for r in records:
        for o in r.outcomes:
            table[o.method][o.verdict] += 1
    verdicts = [
        "right",
        "wrong",
        "crash",
        "inexact",
        "loud",
        "refused",
        "overflow",
        "undecided",
        "timeout",
    ]
    total = collections.Counter()
    for row in table.values():
        total.update(row)
    walked = collections.Counter(o.method for r in records for o in r.outcomes if o.walked)
    walked["all"] = sum(walked.values())
    lines = [f"{'':24}" + "".join(f"{v:>10}" for v in (*verdicts, "walked"))]
    for name, row in [*sorted(table.items()), ("all", total)]:
        lines.append(
            f"{name:24}" + "".join(f"{n:>10}" for n in (*(row[v] for v in verdicts), walked[name]))
        )
    skipped = sum(bool(r.skipped) for r in records)
    lines.append(
        f"{len(records)} networks ({skipped} that JAX itself cannot differentiate), {sum(total.values())} comparisons, "
        f"{seconds:.0f} s, {seconds / max(len(records), 1):.2f} s a network"
    )
    return "\n".join(lines)


def seeds_of(text):
    """'0:100', '3,5,9' or '7'."""
    if ":" in text:
        first, last = text.split(":")
        return range(int(first), int(last))
    return [int(s) for s in text.split(",")]


def main(argv=None):
    parser = argparse.ArgumentParser("zoo", description=__doc__)
    parser.add_argument("--seeds", default="0:100", help="0:100, or 3,5,9")
    parser.add_argument("--shard", default="1/1", help="3/8: the third of eight parts of the seeds")
    parser.add_argument("--out", help="a JSON file for every outcome")
    parser.add_argument(
        "--limit", type=float, default=60.0, help="seconds of processor time for a network"
    )
    parser.add_argument("--budget", type=float, default=float("inf"), help="the same for all of them")
    parser.add_argument("--method", action="append", help="instead of those that the seeds pick")
    parser.add_argument("--show", action="store_true", help="print the networks")
    parser.add_argument("--shrink", action="store_true", help="drop layers from failing networks")
    options = parser.parse_args(argv)
    part, parts = map(int, options.shard.split("/"))
    seeds = list(seeds_of(options.seeds))[part - 1 :: parts]
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)
    records, begin = [], time.process_time()
    for n, seed in enumerate(seeds):
        if time.process_time() - begin > options.budget:
            break
        record = examine(seed, options.method, options.limit)
        records.append(record)
        bad = [o for o in record.outcomes if o.verdict in REPORTED]
        if options.show:
            print(record.listing, *record.outcomes, record.skipped, sep="\n", flush=True)
        elif bad:
            print(
                f"\n{record.listing}",
                *(f"  {o.verdict.upper()} {o.method}: {o.detail} ({o.error:.1e})" for o in bad),
                sep="\n",
                flush=True,
            )
        if options.shrink:
            for o in bad[:1]:
                print("shrunk:", shrink(seed, o.method, o.verdict, options.limit), sep="\n", flush=True)
        if n % 400 == 399:
            jax.clear_caches()
        if options.out and (n % 50 == 49 or seed == seeds[-1]):
            save(options.out, records)
    print("\n" + summary(records, time.process_time() - begin))
    for verdict in REPORTED:
        found = sorted({r.seed for r in records for o in r.outcomes if o.verdict == verdict})
        if found:
            print(f"{verdict}: {' '.join(map(str, found))}")
    if options.out:
        save(options.out, records)
    return int(any(o.verdict in FAILURES for r in records for o in r.outcomes))


def save(path, records):
    with open(path, "w") as file:
        json.dump([dataclasses.asdict(r) for r in records], file)


if __name__ == "__main__":
    sys.exit(main())
