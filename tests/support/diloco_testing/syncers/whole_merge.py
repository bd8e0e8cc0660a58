"""The merge of a tensor in one piece: the reference for the streaming merge."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from diloco_syncer.merging.blend import blend

F32 = npt.NDArray[np.float32]


def merge_slot(deltas_MN: F32, weights_M: Sequence[float], *, radial: bool) -> F32:
    """
    The outer gradient of one tensor from whole deltas.

    Args:
        deltas_MN: old global value minus each learner's value, fp32, in the order of names.
        weights_M: non-negative; members with 0 are left out.
        radial: False: plain average.

    Returns:
        Δ, shape (N,), fp32; zeros if no weight is positive.
    """
    rows = [row for row, weight in enumerate(weights_M) if weight > 0]
    if not rows:
        return np.zeros(deltas_MN.shape[1], np.float32)
    v_MN = deltas_MN[rows]
    norms = [float(np.linalg.norm(v_N.astype(np.float64))) for v_N in v_MN]
    how = blend(norms, [weights_M[row] for row in rows], radial=radial)
    u_N: F32 = (how.factors[:, None] * v_MN).sum(0)
    scale = how.scale(float(np.linalg.norm(u_N.astype(np.float64))))
    if scale is None:
        mean_N: F32 = (how.shares[:, None] * v_MN).sum(0)
        return mean_N
    return u_N * np.float32(scale)
