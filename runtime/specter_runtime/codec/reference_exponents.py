"""The definition of coded experts without a base, in plain numpy; see `reference`.

Sign and mantissa of a weight are kept as they are. Three neighbouring exponents of each group are
common: the plane says which of them a weight has, or that it has none. Then its level says which of
the exponents in AROUND it has, as far from the highest of the three, or that it is an escape.
"""

from __future__ import annotations

import numpy as np
from torch import Tensor

from specter_runtime.codec.coding import FORMATS, Format, format_of
from specter_runtime.codec.reference import (
    Bits,
    Ints,
    assembled,
    patterns,
    read_parts,
    read_stream,
    to_weight,
    told,
)
from specter_runtime.codec.stream import HEADER_BYTES, Header

COMMON = 3
"""Exponents told by the plane, and the plane's word for none of them."""
AROUND = np.array([-3, -4, 1, -5, 2, -6, -7, 0])
"""The exponent of each level, from the highest common one; the last level is the escape."""
ESCAPE = len(AROUND) - 1
_LOWEST_TOP = COMMON - 1


def encode(weight: Tensor, header: Header) -> bytes:
    """The refinement of `weight` [rows, in]; `header` gives everything but the size."""
    form = format_of(weight)
    every = patterns(weight)
    exponents = _exponents(every, form)
    tops = _tops(exponents.reshape(weight.shape), header.group_size, form)
    difference = exponents - _of_weights(tops, header)
    is_open = (difference > 0) | (difference <= -COMMON)
    matches = difference[:, None] == AROUND[:ESCAPE]
    levels = np.where(matches.any(1), matches.argmax(1), ESCAPE)
    in_plane = np.where(is_open, COMMON, -difference) | _sign_mantissa(every, form) << 2
    stream, owners = told(levels, is_open, exponents, _exponent_bits(form), header.levels)
    stored = tops.astype(np.uint8).tobytes()
    return assembled(header, stored + bytes(-len(stored) % 8), in_plane, stream, owners)


def expand(refinement: bytes, header: Header) -> Tensor:
    """The weights [rows, in] of a refinement that is whole."""
    form = FORMATS[header.weight_type]
    groups = header.rows * -(-header.width // header.group_size)
    begin = HEADER_BYTES + 4 * (-(-header.rows * header.width // 1024) + 1)
    stored = np.frombuffer(refinement[begin : begin + groups], np.uint8).astype(np.int64)
    tops = _of_weights(stored.reshape(header.rows, -1), header)
    in_plane, stream = read_parts(refinement, header, groups + -groups % 8)
    is_open: Bits = in_plane % 4 == COMMON
    levels, escaped = read_stream(stream, is_open, _exponent_bits(form), header.levels)
    exponents = tops + np.where(is_open, AROUND[levels], -(in_plane % 4))
    exponents = np.where(escaped >= 0, escaped, exponents)
    sign, mantissa = in_plane >> (form.mantissa_bits + 2), in_plane >> 2
    every = sign << form.magnitude_bits | exponents << form.mantissa_bits
    return to_weight(every | mantissa % 2**form.mantissa_bits, header)


def _tops(exponents: Ints, group_size: int, form: Format) -> Ints:
    """The highest common exponent of each group, [rows, groups]: most weights, then the lowest."""
    highest = 2 ** _exponent_bits(form) - 1
    starts = range(0, exponents.shape[1], group_size)
    tops = np.zeros((len(exponents), len(starts)), np.int64)
    for group, start in enumerate(starts):
        for row, members in enumerate(exponents[:, start : start + group_size]):
            numbers = np.bincount(members, minlength=highest + 1)
            held = numbers[2:] + numbers[1:-1] + numbers[:-2]
            tops[row, group] = _LOWEST_TOP + held.argmax()
    return tops


def _of_weights(tops: Ints, header: Header) -> Ints:
    return np.repeat(tops, header.group_size, 1)[:, : header.width].ravel()


def _exponent_bits(form: Format) -> int:
    return form.magnitude_bits - form.mantissa_bits


def _exponents(every: Ints, form: Format) -> Ints:
    exponents: Ints = (every >> form.mantissa_bits) % 2 ** _exponent_bits(form)
    return exponents


def _sign_mantissa(every: Ints, form: Format) -> Ints:
    sign: Ints = every >> form.magnitude_bits << form.mantissa_bits
    mantissa: Ints = every % 2**form.mantissa_bits
    return sign | mantissa
