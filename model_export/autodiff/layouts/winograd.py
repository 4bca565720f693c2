"""Fast small convolutions: the Cook-Toom / Winograd construction in one dimension, with exact arithmetic.

A filter of r taps applied to give m neighbouring outputs needs m + r - 1 multiplications instead of m * r:
y = inverse @ ((kernel @ w) * (tile @ x)). In two dimensions the transforms act on one axis after the other. The
matrices come from evaluating polynomials at a few points; which points decides the rounding error. See Lavin and Gray,
"Fast Algorithms for Convolutional Neural Networks", 2016.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cache

import numpy as np

Matrix = np.ndarray

# Evaluation points by number of multiplications; infinity is always one more. The six-point set was chosen for its
# small rounding error, about 1e-6 relative in float32.
POINTS: dict[int, Sequence[Fraction]] = {
    3: [Fraction(0), Fraction(-1)],
    4: [Fraction(0), Fraction(1), Fraction(-1)],
    6: [Fraction(0), Fraction(3, 4), Fraction(-3, 4), Fraction(3, 2), Fraction(-3, 2)],
}


@dataclass(frozen=True)
class Bilinear:
    """y = inverse @ ((kernel @ w) * (tile @ x)) for one tile of a one-dimensional filter."""

    inverse: Matrix  # [outputs, products]
    kernel: Matrix  # [products, taps]
    tile: Matrix  # [products, inputs]


@cache
def correlation(outputs: int, taps: int) -> Bilinear:
    """y[i] = sum_j x[i + j] w[j] for `outputs` values of i."""
    points = POINTS[outputs + taps - 1]
    inverse = _powers(points, outputs).T
    kernel = _powers(points, taps)
    tile = _inverted(_powers(points, outputs + taps - 1)).T
    return _balanced(*(matrix.astype(np.float64) for matrix in (inverse, kernel, tile)))


def strided_correlation(outputs: int) -> Bilinear:
    """y[i] = sum_j x[2i + j] w[j], three taps: the even ones are a correlation of two taps, the odd one is direct."""
    even = correlation(outputs, 2)
    products = 2 * outputs + 1
    inverse, kernel = np.zeros((outputs, products)), np.zeros((products, 3))
    tile = np.zeros((products, 2 * outputs + 1))
    tile[: outputs + 1, 0::2] = even.tile
    kernel[: outputs + 1, 0::2] = even.kernel
    inverse[:, : outputs + 1] = even.inverse
    for i in range(outputs):
        tile[outputs + 1 + i, 2 * i + 1] = kernel[outputs + 1 + i, 1] = inverse[i, outputs + 1 + i] = 1.0
    return Bilinear(inverse, kernel, tile)


def strided_adjoint(outputs: int) -> Bilinear:
    """The input gradient of the strided filter with one element of padding.

    dx[2k] = dy[k] w[1], dx[2k + 1] = dy[k] w[2] + dy[k + 1] w[0]; a tile of outputs + 1 gives 2 * outputs values.
    """
    odd = correlation(outputs, 2)
    products = 2 * outputs + 1
    inverse, kernel = np.zeros((2 * outputs, products)), np.zeros((products, 3))
    tile = np.zeros((products, outputs + 1))
    tile[: outputs + 1] = odd.tile
    kernel[: outputs + 1, [2, 0]] = odd.kernel
    inverse[1::2, : outputs + 1] = odd.inverse
    for i in range(outputs):
        tile[outputs + 1 + i, i] = kernel[outputs + 1 + i, 1] = inverse[2 * i, outputs + 1 + i] = 1.0
    return Bilinear(inverse, kernel, tile)


def _powers(points: Sequence[Fraction], count: int) -> Matrix:
    """Row i: powers of point i; the last row is the point at infinity."""
    rows = [[point**power for power in range(count)] for point in points]
    rows.append([Fraction(int(power == count - 1)) for power in range(count)])
    return np.array(rows, dtype=object)


def _inverted(matrix: Matrix) -> Matrix:
    """Gauss-Jordan elimination on fractions."""
    size = len(matrix)
    rows = [[*matrix[i], *(Fraction(int(i == j)) for j in range(size))] for i in range(size)]
    for column in range(size):
        pivot = next(row for row in range(column, size) if rows[row][column])
        rows[column], rows[pivot] = rows[pivot], rows[column]
        rows[column] = [value / rows[column][column] for value in rows[column]]
        for row in range(size):
            if row != column:
                factor = rows[row][column]
                rows[row] = [a - factor * b for a, b in zip(rows[row], rows[column], strict=True)]
    return np.array([row[size:] for row in rows], dtype=object)


def _balanced(inverse: Matrix, kernel: Matrix, tile: Matrix) -> Bilinear:
    """Give the transforms of filter and tile unit scale (by powers of two: exact); the inverse takes the rest."""
    for i in range(len(tile)):
        for matrix in (kernel, tile):
            scale = 2.0 ** np.round(np.log2(np.linalg.norm(matrix[i])))
            matrix[i] /= scale
            inverse[:, i] *= scale
    return Bilinear(inverse, kernel, tile)
