"""Numbers with units on the command line."""

from __future__ import annotations

import re

import typer

_BYTES = re.compile(r"([\d.]+)\s*(?:([KMGT])(I?))?B?")
_BITS = re.compile(r"([\d.]+)\s*([KMGT])?BITS?(?:/S)?")


def parse_nbytes(text: str) -> int:
    """Return the number of bytes that a text such as `5GB`, `500MB` or `2 GiB` means."""
    return _parse(_BYTES, text, "a number of bytes, such as 5GB")


def parse_rate(text: str) -> int:
    """Return the bits per second that a text such as `100gbit` or `250 Mbit/s` means."""
    return _parse(_BITS, text, "a rate, such as 100gbit")


def _parse(pattern: re.Pattern[str], text: str, meant: str) -> int:
    match = pattern.fullmatch(str(text).strip().upper())
    try:
        number, letter, *binary = match.groups() if match else ("", None)
        value = int(float(number) * (1024 if any(binary) else 1000) ** " KMGT".index(letter or " "))
    except (ValueError, OverflowError):
        value = 0
    if value < 1:
        raise typer.BadParameter(f"expected {meant}, not {text!r}")
    return value
