"""
Prints a digest of merges and of the codec, for a test that runs it with the machine code of two CPUs:
`python -m diloco_testing.syncers.merge_digest`.
"""

from __future__ import annotations

import hashlib

import numpy as np

from diloco.codec import formats
from diloco_syncer.core.outer import OuterOptimizer
from diloco_testing.syncers.merging import fragment_of, merge_of, upload, values_of

OUTER = OuterOptimizer(learning_rate=0.7, momentum=0.9, nesterov=True)
FORMATS = (formats.FP32, formats.BF16, formats.INT8, formats.INT4)


def digests() -> dict[str, str]:
    """By name of the case."""
    fragment = fragment_of(40_000, 7, 1000, 129, average=[2])
    theta_N, momentum_N = values_of(fragment, 90), values_of(fragment, 91, 0.1)
    found = {}
    for fmt in FORMATS:
        uploads = [
            upload(fragment, f"eu/{m}", values_of(fragment, m, 0.01), weight=1 + m, fmt=fmt)
            for m in range(6)
        ]
        for name in ("Average", "Radial"):
            for members in (1, 3, 6):
                digest = hashlib.sha256()
                mine = uploads[:members]
                running = merge_of(
                    fragment, [u.contribution for u in mine], theta_N=theta_N,
                    momentum_N=momentum_N, merge=name, outer=OUTER, down=formats.BF16,
                )  # fmt: skip
                for given in mine:
                    digest.update(np.float64(given.contribution.norms).tobytes())
                    for index, payload in enumerate(given.chunks):
                        digest.update(payload)
                        running.add(given.contribution.learner, index, memoryview(payload))
                result = running.result()
                digest.update(result.theta_N.tobytes() + result.momentum_N.tobytes())
                digest.update(np.float64(result.delta_norm).tobytes())
                found[f"{name} of {members} in format {fmt}"] = digest.hexdigest()[:16]
    return found


if __name__ == "__main__":
    for name, digest in digests().items():
        print(name, digest, sep=": ")
