"""What the bytes of `encode_octaves` say, for tests."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def decode_octaves(octaves_BO: NDArray[np.uint8]) -> NDArray[np.float64]:
    """Shares of the block's energy by octave: entry `o` covers magnitudes in `(largest / 2^(o+1), largest / 2^o]`.

    The last octave also holds everything below it. Shares are within 10 % and sum to one where there is any energy.
    """
    share_BO = np.where(octaves_BO > 0, np.exp2((octaves_BO.astype(np.float64) - 240.0) / 4.0), 0.0)
    total_B1 = share_BO.sum(axis=-1, keepdims=True)
    normalized_BO: NDArray[np.float64] = np.divide(share_BO, total_B1, out=np.zeros_like(share_BO), where=total_B1 > 0)
    return normalized_BO
