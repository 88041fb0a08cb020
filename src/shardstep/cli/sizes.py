"""Numbers of bytes, from and to text."""

from __future__ import annotations

import math


def parse_nbytes(text: str) -> int:
    """Return the number of bytes that a text such as `5GB`, `500MB` or `2GiB` means.

    Raises:
        ValueError: if it is none.

    Example:
        >>> parse_nbytes("5GB"), parse_nbytes("2 KiB")
        (5000000000, 2048)
    """
    units = {"": 1, "B": 1}
    for power, letter in enumerate("KMGT", start=1):
        units |= {f"{letter}B": 1000**power, f"{letter}IB": 1024**power}
    number = text.strip().rstrip("BIKMGTbikmgt ")
    unit = text.strip()[len(number) :].strip().upper()
    try:
        nbytes = float(number) * units[unit]
    except (ValueError, KeyError):
        nbytes = 0
    if not 1 <= nbytes < math.inf:
        raise ValueError(f"{text!r} is not a number of bytes such as 5GB")
    return int(nbytes)


def show_nbytes(nbytes: int) -> str:
    """Return a number of bytes in the largest unit that leaves at least 1.

    Example:
        >>> show_nbytes(999), show_nbytes(1_234_567)
        ('999 B', '1.2 MB')
    """
    if nbytes < 1000:
        return f"{nbytes} B"
    power = min(int(math.log10(nbytes)) // 3, 4)
    return f"{nbytes / 1000**power:.1f} {'kMGT'[power - 1]}B"
