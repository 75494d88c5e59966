"""Hand-made results in the format of `moonwalk.lab.bench`: nobody measured them, they only look as measured ones do."""

from __future__ import annotations

GIB = 2**30
HEADER = {
    "device": "Sample Device",
    "platform": "gpu",
    "jax": "0.0.1",
    "jaxlib": "0.0.2",
    "moonwalk": "0.1.0",
    "commit": "abc1234",
    "python": "3.11.0",
    "date": "2026-01-02T03:04:05",
    "quick": True,
    "settings": {},
}


def record(
    experiment,
    method,
    depth=4,
    *,
    gib=1.0,
    seconds=0.01,
    error=1e-6,
    status="ok",
    network="pyramid",
    variant="",
    batch=128,
    extra=None,
    **settings,
):
    ok = status == "ok"
    return {
        "task": {
            "experiment": experiment,
            "network": network,
            "variant": variant,
            "method": method,
            "depth": depth,
            "width": 128,
            "length": 256,
            "batch": batch,
            "precision": "default",
            "settings": settings,
        },
        "status": status,
        "message": "" if ok else "it did not fit",
        "temp_bytes": int(gib * GIB) if ok else None,
        "argument_bytes": 1000 if ok else None,
        "output_bytes": 1000 if ok else None,
        "peak_bytes": int(1.2 * gib * GIB) if ok else None,
        "seconds": {"median": seconds, "low": 0.95 * seconds, "high": 1.1 * seconds, "runs": 5}
        if ok
        else None,
        "compile_seconds": 1.0 if ok else None,
        "gradient_error": error if ok else None,
        "reference": "backprop, float64",
        "parameters": 1000,
        "extra": extra or {},
    }


def result(name, records):
    return {"experiment": name, "header": HEADER | {"experiment": name}, "records": records}


def fig2():
    records = []
    for variant, wrong in (("identity, slope 0.25", False), ("as printed, slope 0.01", True)):
        for depth in (2, 4, 6, 8):
            records += [
                record("fig2", "backprop", depth, gib=1.2 * depth, seconds=2e-3 * depth, variant=variant)
                if depth < 8
                else record("fig2", "backprop", depth, status="oom", variant=variant),
                record(
                    "fig2",
                    "checkpoint-sqrt",
                    depth,
                    gib=1.1 * depth**0.5,
                    seconds=2.6e-3 * depth,
                    variant=variant,
                ),
                record(
                    "fig2",
                    "moonwalk",
                    depth,
                    gib=1 + 0.1 * depth,
                    seconds=2.2e-3 * depth,
                    error=1e-3 * 60.0 ** (depth - 2) if wrong else 2e-6,
                    variant=variant,
                ),
            ]
    for slope in (0.1, 0.3):
        for method, error in (("moonwalk-as-printed", 0.02 / slope**4), ("moonwalk", 1e-6)):
            records.append(record("fig2", method, 8, error=error, variant=f"lower, slope {slope}"))
    return result("fig2", records)


def fig3():
    records = []
    for depth in (5, 10, 20):
        for method, gib in (
            ("backprop", 0.5),
            ("checkpoint-block", 0.26),
            ("accumulate-8", 0.1),
            ("moonwalk-fragment-4", 0.2),
            ("moonwalk-fragment-8", 0.12),
            ("moonwalk-fragment-16-aligned", 0.1),
        ):
            bad = method.endswith("aligned")
            records.append(
                record(
                    "fig3",
                    method,
                    depth,
                    gib=gib * depth,
                    seconds=1.5e-3 * depth / gib**0.3,
                    error=10.0**depth if bad else 3e-4,
                    network="signal",
                    variant="slope 0.3",
                )
            )
    return result("fig3", records)


def fig4():
    records = []
    for pivot, best in (("free", 0.92), ("lower", 0.91), ("diagonal", 0.915)):
        for seed in (0, 1, 2):
            curve = [[e, best - 0.3 / e + 0.002 * seed] for e in range(1, 9)]
            extra = {
                "data": "Sample-MNIST",
                "axis": "epoch",
                "curve": curve,
                "test_accuracy": curve[-1][1],
            }
            records.append(
                record(
                    "fig4",
                    "backprop",
                    10,
                    error=None,
                    network="residual_cnn",
                    variant=pivot,
                    extra=extra,
                    seed=seed,
                )
            )
    return result("fig4", records)


def _searched(name, over, sizes, most):
    """A search, and what it found, run."""
    records = []
    for method, size in sizes.items():
        kinds = {"network": "isometric", "limit_bytes": 24 * 10**9}
        asked = {"over": over, "step": 4, "most": most}
        at = {"depth": size} if over == "depth" else {"depth": 32, "batch": size}
        extra = {"largest": size, "most": most}
        records.append(
            record(name, method, **at | {over: 0}, error=None, extra=extra, search=asked, **kinds)
        )
        records.append(record(name, method, **at, **kinds))
    return result(name, records)


def depth():
    sizes = {"backprop": 40, "checkpoint-block": 80, "checkpoint-sqrt": 600, "moonwalk": 1100}
    return _searched("depth", "depth", sizes | {"moonwalk-checkpoint": 4096}, 4096)


def batch():
    return _searched("batch", "batch", {"backprop": 64, "checkpoint": 300, "moonwalk": 1000}, 4096)


def pareto():
    places = {
        "backprop": (20, 0.15),
        "checkpoint-block": (8, 0.2),
        "checkpoint-sqrt": (5.6, 0.2),
        "checkpoint-recursive": (4.0, 0.31),
        "accumulate-8": (2.6, 0.18),
        "moonwalk": (1.55, 0.217),
        "moonwalk-checkpoint": (1.2, 0.27),
        "moonwalk-fragment-16": (1.0, 0.25),
    }
    records = [
        record("pareto", m, 64, gib=g, seconds=s, error=7.0 if "16" in m else 1e-5, network="isometric")
        for m, (g, s) in places.items()
    ]
    return result("pareto", records)


def vijp():
    def case(name, rule, ratio, error=1e-7):
        spread = lambda m: {"median": m, "low": 0.9 * m, "high": 1.1 * m, "runs": 9}
        return {
            "name": name,
            "rule": rule,
            "vjp": spread(2e-3),
            "vijp": spread(2e-3 * ratio),
            "error": error,
            "tolerance": 1e-4,
        }

    cases = [
        case("dense, orthogonal", "dense", 0.98),
        case("convolution, diagonal pivot", "convolution", 0.4),
        case("convolution, stride 1, span 8", "fragment", 1.7),
        case("causal convolution", "elimination", 14.0),
        case("an unlucky one", "dense", 1.02, error=0.3),
    ]
    return result("vijp", [record("vijp", "vijp", network="rules", extra={"cases": cases})])


ORDERS = {  # of memory and of time in the depth
    "backprop": (1, 1),
    "checkpoint": (0.5, 1),
    "forward": (0, 2),
    "projected-forward": (0.6, 1),
    "reversible": (0, 1),
    "pure-forward-per-example": (0, 1),
    "moonwalk": (0.9, 1),
    "moonwalk-checkpoint": (0.4, 1.5),
}


def table1():
    records = []
    for i, (method, (memory, time)) in enumerate(ORDERS.items()):
        in_depth = {"depth": (memory, time), "parameters": (0, 1)}
        points = []
        for axis in ("depth", "width", "parameters", "batch"):
            kept, grown = in_depth.get(axis, (1, 1 if axis == "batch" else 2))
            for size in (4, 8, 16):
                low = 1e-3 * (i + 1) * size**grown
                points.append(
                    {
                        "axis": axis,
                        "size": size,
                        "temp_bytes": int((i + 2) * 2**20 * size**kept),
                        "seconds": {"median": 1.1 * low, "low": low, "high": 2 * low, "runs": 3},
                    }
                )
        extra = {
            "points": points,
            "variance": 0.0,
            "forward": "forward" in method,
            "submersive": method != "reversible",
            "submersive_why": "off by 1e-07",
        }
        if method == "projected-forward":
            extra |= {"variance": 34.0, "variance_parameters": 32, "variance_keys": 400, "bias": 0.3}
        found = record("table1", method, network="growing", extra=extra, measure="growth")
        if method in ("projected-forward", "forward"):
            found["gradient_error"] = 150.0 if method == "projected-forward" else 1e-7
        records.append(found)
    kept = {
        "network": "dense",
        "variant": "abs",
        "depth": 64,
        "m_x_bytes": 2**20,
        "m_theta_bytes": 2**25,
    }
    networks = [kept | {"backprop_bytes": b} for b in (2**25, 5 * 2**19, 2**20)]
    records.append(
        record("table1", "moonwalk", network="all", extra={"networks": networks}, measure="residuals")
    )
    crossing = [
        {"axis": axis, "x": x, "method": method, "temp_bytes": size}
        for axis, method, sizes in (
            ("depth", "moonwalk-as-printed", {1024: 2, 16384: 32}),
            ("depth", "checkpoint", {1024: 4, 16384: 16}),
            ("ratio", "moonwalk-as-printed", {4.0: 1, 16.0: 1}),
            ("ratio", "checkpoint", {4.0: 2, 16.0: 2}),
        )
        for x, size in sizes.items()
    ]
    records.append(
        record("table1", "moonwalk-as-printed", 64, extra={"crossing": crossing}, measure="crossovers")
    )
    return result("table1", records)


def engine():
    methods = {"backprop": 4.0, "jax-checkpoint-8": 1.5, "moonwalk": 0.5}
    records = [
        record("engine", m, 64, gib=gib, network="dense", variant="abs") for m, gib in methods.items()
    ]
    return result("engine", records)


def times(seconds):
    return {"median": seconds, "low": 0.9 * seconds, "high": 1.2 * seconds, "runs": 3}


def lowering():
    ways = {"jax": 1.0, "moonwalk": 9.0, "planned": 5.0}
    extra = {
        "ways": {w: {"seconds": times(s), "traces": 1} for w, s in ways.items()},
        "plan_seconds": 4.0,
    }
    return result("lowering", [record("lowering", "value_and_grad", 12, network="gpt", extra=extra)])


def certificates():
    took = {"backprop": 0.08, "ignore": 0.09, "nan": 0.092, "raise": 0.092}
    extra = {"programs": {p: {"seconds": times(s), "temp_bytes": GIB} for p, s in took.items()}}
    return result("certificates", [record("certificates", "moonwalk", 64, network="dense", extra=extra)])


def results():
    found = [table1(), fig2(), fig3(), fig4(), depth(), batch(), vijp(), pareto()]
    return [*found, engine(), certificates(), lowering()]
