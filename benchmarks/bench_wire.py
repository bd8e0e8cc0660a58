"""
The wire codec against memcpy: `python benchmarks/bench_wire.py [--quick]`.

One thread; bytes of fp32 per second in both. Goals: bf16 and int4 encode and decode at least as
fast as memcpy. The codec runs as in use, in chunks of 1 MiB; memcpy copies the whole vector at
once, which is its best case.
"""

from __future__ import annotations

import argparse

import numpy as np
from _timing import Run, judge, paired, spread, table, write_results

from diloco.codec import formats, kernels
from diloco.model.fragments import CHUNK

FORMATS = {"fp32": formats.FP32, "bf16": formats.BF16, "int8": formats.INT8, "int4": formats.INT4}
ROUNDS = 15
MUST = {f"{fmt} {what}" for fmt in ("bf16", "int4") for what in ("encode", "decode")}


def variants(source_N: formats.F32, target_N: formats.F32) -> dict[str, Run]:
    """Every operation of every format over all chunks of a vector."""
    runs: dict[str, Run] = {}
    starts = range(0, source_N.size, CHUNK)
    for name, fmt in FORMATS.items():
        payloads = [np.ones(formats.encoded_bytes(fmt, CHUNK), np.uint8) for _ in starts]

        def encode(fmt: int = fmt, payloads: list[formats.U8] = payloads) -> None:
            for start, payload in zip(starts, payloads, strict=True):
                formats.encode(fmt, source_N[start : start + CHUNK], payload)

        def decode(fmt: int = fmt, payloads: list[formats.U8] = payloads) -> None:
            for start, payload in zip(starts, payloads, strict=True):
                formats.decode(fmt, payload, target_N[start : start + CHUNK])

        def accumulate(fmt: int = fmt, payloads: list[formats.U8] = payloads) -> None:
            for start, payload in zip(starts, payloads, strict=True):
                formats.accumulate(fmt, payload, target_N[start : start + CHUNK], 0.5)

        encode()
        runs |= {
            f"{name} encode": encode,
            f"{name} decode": decode,
            f"{name} accumulate": accumulate,
        }
    return runs


def main() -> int:
    """Measure, write results/wire.md, exit 1 if a goal is missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="small and short, no results file")
    quick = parser.parse_args().quick
    elements = CHUNK * (32 if quick else 128)
    source_N = np.random.default_rng(0).standard_normal(elements, dtype=np.float32)
    target_N = np.ones_like(source_N)

    def memcpy() -> None:
        np.copyto(target_N, source_N)

    kernels.warm_up()
    results = paired(variants(source_N, target_N), memcpy, rounds=3 if quick else ROUNDS)
    size = source_N.nbytes / 1e9
    body = table(
        ["operation", "GB/s of fp32", "ratio to memcpy", "lowest … highest", "goal"],
        [
            [
                name,
                size / r.median_seconds,
                r.ratio,
                spread(r.ratios),
                "≥ 1.0" if name in MUST else "",
            ]
            for name, r in results.items()
        ],
    )
    if quick:
        print(body)
    else:
        note = (
            f"{elements * 4 >> 20} MiB of normal values in chunks of 1 MiB, one thread, "
            f"{ROUNDS} rounds, every run between two memcpy of the whole. Decode and accumulate "
            "also sum the squares in float64; encode also checks for NaN and Inf."
        )
        write_results(
            "wire", "Wire codec against memcpy", f"{note}\n\n{body}", packages=("numpy", "numba")
        )
    return judge({name: (results[name].ratio, 1.0) for name in sorted(MUST)})


if __name__ == "__main__":
    raise SystemExit(main())
