r"""Lloyd-Max scalar codes for rotated vectors (the scalar stage of TurboQuant).

After a random rotation every coordinate of x / \|x\| has the same known density, that of one
coordinate of a uniform unit vector. So the quantizer with the least mean squared error for that
density [1]_ [2]_ can be solved once, offline (`codebook_solver`), and no statistics of the data
are needed [3]_.

A codebook is given on an integer grid: the reconstruction values are step * levels with int8
levels, and the cell boundaries lie halfway between neighbors. With scale = \|x\| * step

    code_i = number of boundaries b with x_i * (1 / scale) > b
    x_i ~ scale * levels[code_i]

That scale is the rule "norm". The other rules replace it once the codes y = levels[code] are known:

    least_squares     <x, y> / <y, y>, the least error for these codes; then the codes are fitted
                      to it once more
    norm_preserving   \|x\| / \|y\|, so that what is decoded has the norm of x
    unbiased          \|x\|^2 / <x, y>, so that what is decoded projects onto x with length \|x\|

A codebook's values are means of their cells, so what they decode to is shorter than x. The last
two rules undo that at the price of a larger squared error. For attention it is worth it: a bias
that all tokens share does not average out, while noise does. Keys keep their norm by default, and
values are unbiased: on two language models this halves the divergence of 2-bit codes.

References
----------
.. [1] S. Lloyd, "Least squares quantization in PCM", IEEE Trans. Inf. Theory 28 (1982).
.. [2] J. Max, "Quantizing for minimum distortion", IRE Trans. Inf. Theory 6 (1960).
.. [3] A. Zandieh et al., "TurboQuant", arXiv:2504.19874, algorithm 1.
"""

from __future__ import annotations

import numpy as np

from kvcodec.reference._numbers import lane_sum, reciprocal, round_scale


def nearest_codes(x: np.ndarray, scale: np.ndarray, boundaries: np.ndarray) -> np.ndarray:
    """The code of each entry of x / scale; a value on a boundary takes the lower code."""
    y = x * reciprocal(scale)[..., None]
    return np.searchsorted(boundaries, y, side="left").astype(np.uint8)


def fitted_scale(
    x: np.ndarray, y: np.ndarray, norm: np.ndarray, scale_rule: str, scale_dtype: str
) -> np.ndarray:
    """The scale that a rule other than "norm" gives to the chosen levels y of float64."""
    projection = lane_sum(x * y, lanes=8)
    energy = lane_sum(y * y, lanes=8)
    nonzero = projection > 0
    if scale_rule == "least_squares":
        best = projection / np.where(nonzero, energy, 1)
    elif scale_rule == "norm_preserving":
        best = norm / np.sqrt(np.where(nonzero, energy, 1))
    else:
        best = norm * norm / np.where(nonzero, projection, 1)
    return round_scale(np.where(nonzero, best, 0).astype(np.float32), scale_dtype)


def quantize_lloyd_max(
    x: np.ndarray,
    levels: np.ndarray,
    boundaries: np.ndarray,
    step: float,
    scale_rule: str,
    scale_dtype: str,
) -> tuple[np.ndarray, np.ndarray]:
    """Codes, uint8 of x's shape, and scales, float32 of x's shape without the last axis."""
    squares = x.astype(np.float64) ** 2
    norm = np.sqrt(lane_sum(squares, lanes=8))
    scale = round_scale((norm * step).astype(np.float32), scale_dtype)
    codes = nearest_codes(x, scale, boundaries)
    if scale_rule == "norm":
        return codes, scale

    y = levels[codes].astype(np.float64)
    scale = fitted_scale(x, y, norm, scale_rule, scale_dtype)
    if scale_rule == "least_squares":
        codes = nearest_codes(x, scale, boundaries)
    return codes, scale


def dequantize_lloyd_max(codes: np.ndarray, levels: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """levels[code] times scale, in float32."""
    return levels[codes].astype(np.float32) * scale[..., None]
