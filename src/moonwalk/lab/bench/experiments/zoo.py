"""The networks that people train: Moonwalk beside `jax.checkpoint` by hand and smaller batches.

"jax-checkpoint-block" has `jax.checkpoint` around every block, and "jax-checkpoint-dots" the same with
`dots_with_no_batch_dims_saveable` as its policy; "accumulate-4" takes four micro-batches one after the
other; "moonwalk-within-25" is a plan within a budget (`methods.planned`). A GPU gets full sizes, in
bfloat16 where a network has that variant; a CPU gets sizes that it runs in seconds. Batch normalisation
of a micro-batch has other statistics, so the gradient of ResNet by accumulation is another one and is
not checked.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .. import networks
from ..judgement import verdict
from ..tasks import Record, Request, Table, Task
from . import common

TITLE = "Networks that people train: Moonwalk beside jax.checkpoint by hand and accumulation"
BY_HAND = "jax-checkpoint-block"
PARTS = (2, 4, 8)
WITHIN = ("gpt", "resnet", "unet", "vit")  # also measured within budgets
SHARES = (25, 50, 75)  # per cent of the way from the least memory to backpropagation's
# The variants of each network, and whether it has one that computes in bfloat16.
KINDS: dict[str, tuple[tuple[str, ...], bool]] = {
    "resnet": (("",), True),
    "gpt": (("", "scanned"), True),
    "unet": (("",), True),
    "vit": (("",), True),
    "mixer": (("",), True),
    "moe": (("",), True),
    "seq2seq": (("",), True),
    "recurrent": (("", "gru"), True),
    "lru": (("",), False),
    "graphnet": (("",), False),
    "fno": (("",), False),
    "pinn": (("",), False),
}
# On a CPU most networks are "tiny" (few classes, words, heads, …) but deeper and wider than that size.
_SMALL: dict[str, tuple[str, dict[str, int]]] = {
    "resnet": ("", {"depth": 16, "width": 8, "length": 64, "batch": 16}),
    "gpt": ("tiny", {"depth": 12, "width": 64, "length": 256, "batch": 8}),
    "unet": ("tiny", {"depth": 7, "width": 32, "length": 32, "batch": 8}),
    "vit": ("tiny", {"depth": 6, "width": 64, "length": 32, "batch": 32}),
    "mixer": ("tiny", {"depth": 12, "width": 64, "length": 32, "batch": 32}),
    "moe": ("tiny", {"depth": 6, "width": 64, "length": 128, "batch": 8}),
    "seq2seq": ("tiny", {"depth": 4, "width": 64, "length": 128, "batch": 8}),
    "recurrent": ("tiny", {"depth": 2, "width": 64, "length": 256, "batch": 32}),
    "lru": ("tiny", {"depth": 6, "width": 32, "length": 512, "batch": 8}),
    "graphnet": ("tiny", {"depth": 8, "width": 32, "length": 512, "batch": 8}),
    "fno": ("tiny", {"depth": 4, "width": 16, "length": 64, "batch": 8}),
    "pinn": ("tiny", {"depth": 6, "width": 64, "length": 0, "batch": 2**12}),
}


def tasks(request: Request) -> list[Task]:
    found = []
    for network, (variants, has_bfloat16) in KINDS.items():
        if request.quick:
            word, sizes = "tiny", networks.SIZES[network]["tiny"]
        elif request.on_gpu:
            word, sizes = "bfloat16" if has_bfloat16 else "", networks.SIZES[network]["full"]
        else:
            word, sizes = _SMALL[network]
        for variant in variants:
            named = ", ".join(filter(None, (variant, word)))
            methods = _methods(sizes["batch"])
            if network in WITHIN and not variant:
                methods += [f"moonwalk-within-{share}" for share in SHARES]
            found += [_task(request, network, named, method, sizes) for method in methods]
    return found


def _methods(batch: int) -> list[str]:
    parts = [f"accumulate-{n}" for n in PARTS if batch % n == 0]
    return ["backprop", BY_HAND, "jax-checkpoint-dots", *parts, "moonwalk"]


def _task(request: Request, network: str, variant: str, method: str, sizes: Any) -> Task:
    is_another = network == "resnet" and method.startswith("accumulate")
    settings = common.settings(request, reference=None if is_another else "same", repeats=3)
    settings |= {"plan": "summary"} if method.startswith("moonwalk") else {}
    return Task("zoo", network, method, variant, settings=settings, **sizes)


COLUMNS = (
    "method",
    "gradient",
    "temporaries, bytes",
    "memory by hand = 1",
    "seconds",
    "time by hand = 1",
    "predicted memory / compiled",
    "budget, bytes",
)


def summary(records: Sequence[Record]) -> list[Table]:
    groups: dict[str, list[Record]] = {}
    for record in records:
        task = record["task"]
        groups.setdefault(", ".join(filter(None, (task["network"], task["variant"]))), []).append(record)
    note = f"By hand: {BY_HAND}. Predicted: `moonwalk.plan(...).peak_bytes`."
    return [Table(name, COLUMNS, _rows(group, records), (note,)) for name, group in groups.items()]


def _rows(group: Sequence[Record], records: Sequence[Record]) -> list[list[Any]]:
    by_hand: Any = next((r for r in group if r["task"]["method"] == BY_HAND), {})
    rows = []
    for record in group:
        used, took = record["temp_bytes"], _time(record)
        rows.append(
            [
                record["task"]["method"],
                verdict(record, records),
                used,
                _ratio(used, by_hand.get("temp_bytes")),
                took,
                _ratio(took, _time(by_hand)),
                _ratio(record["extra"].get("predicted_bytes"), used),
                record["extra"].get("budget_bytes"),
            ]
        )
    return rows


def _time(record: Any) -> float | None:
    return (record.get("seconds") or {}).get("median")


def _ratio(one: float | None, other: float | None) -> float | None:
    return one / other if one is not None and other else None
