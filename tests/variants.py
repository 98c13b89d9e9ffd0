"""Arguments with which the laws try a class, beside the axes; ``{}`` alone unless it stands here.

A callable is called with the number of axes. Classes that stand in ``AXES`` have those only.
"""

from mmpos import coordinates, frequencies

AXES: dict[str, tuple[int, ...]] = {
    # additive
    # rotary
    # bias
    "FIREBias": (1,),
}

ARGUMENTS: dict[str, list[dict]] = {
    # additive
    "SinusoidalEncoding": [
        {},
        {"layout": "half", "endpoint": True, "split": lambda axes: axes * (24 // axes - 1,)},
        {
            "layout": "half_per_axis",
            "order": lambda axes: range(axes)[::-1],
            "split": lambda axes: axes * (24 // axes + 1,),
        },
    ],
    "LearnedEncoding": [
        {},
        {"coordinates": lambda axes: coordinates.Index()},
    ],
    "FactorizedEncoding": [
        {},
        {"combine": "concat", "coordinates": lambda axes: coordinates.Index()},
        {"combine": "product"},
    ],
    "FourierEncoding": [
        {},
        {"seed": 3, "hidden": 0},
        {"seed": 3, "features": 30, "hidden": 20},
    ],
    # rotary
    "RotaryEncoding": [
        {},
        {"layout": "half", "rotary_dim": 12, "trailing": True},
        {
            "extension": lambda axes: (
                frequencies.YaRN(factor=4, original_length=64, attention_factor=1.0),
                *[None] * (axes - 1),
            )
        },
    ],
    "MixedRotaryEncoding": [
        {},
        {"heads": 3, "layout": "half"},
        {"heads": 3, "init": "axial", "base": 100.0},
    ],
    "MRoPE": [
        {},
        {"interleaved": False, "layout": "half", "rotary_dim": 12},
    ],
    "XPosEncoding": [{}, {"center": 300.0, "scale_base": 256.0}],
    "XDRoPE": [{}, {"base": 100.0}],
    # bias
    "ALiBi": [
        {},
        {"axis_scale": lambda axes: range(1, axes + 1), "distance": "l1"},
        {"learned": True, "distance": "linf", "slopes": (0.5, 0.0625, 0.1)},
        {"right_slopes": lambda axes: (0.25, 1.0, 0.125) if axes == 1 else None},
    ],
    "ClippedRelativeBias": [{}, {"distance": lambda axes: range(3, axes + 3)}],
    "T5Bias": [
        {},
        {"buckets": lambda axes: range(7, axes + 7), "max_distance": 90, "bidirectional": False},
    ],
    "RelativePositionBias": [{}, {"key_grid": lambda axes: (2, 6, 800)[-axes:]}],
    "LogCPB": [
        {"std": 0.5, "window": lambda axes: (9, 5, 7)[:axes]},
        {"std": 0.5, "form": "cr", "hidden": 48},
    ],
    "KerpleBias": [{}, {"form": "power", "distance": "l1"}],
    "FIREBias": [{}, {"threshold": 64.0, "hidden": 5}],
    # content
    "ShawBias": [
        {"head_dim": 16, "std": 0.5},
        {"head_dim": 16, "std": 0.5, "distance": (3, 1), "values": False},
        {"head_dim": 16, "std": 0.5, "distance": 5, "clip": False},
    ],
    "TransformerXLBias": [
        {"head_dim": 16, "std": 0.2},
        {"head_dim": 16, "std": 0.2, "dim": 24, "base": 100.0, "layout": "interleaved"},
    ],
    "DisentangledBias": [
        {"head_dim": 16, "std": 0.3, "span": 24},
        {
            "head_dim": 16,
            "std": 0.3,
            "span": 8,
            "max_distance": 40,
            "dim": 20,
            "norm_eps": 1e-7,
            "constants": (True, True),
        },
        {"head_dim": 16, "std": 0.3, "span": 24, "parts": ("p2c",)},
    ],
}
