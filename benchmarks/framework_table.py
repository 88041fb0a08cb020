"""Compares training frameworks with and without sharding, and writes the table of the results.

    PYTHONPATH=tests/support python benchmarks/framework_table.py --out docs/frameworks.md

Every cell is *equal*, to the bit, or says what differs from plain DDP. The runs are at two ranks
over Gloo, and at one rank to resume at another number. tests/support/frameworks has the runs.
"""

from __future__ import annotations

import argparse
import re
import tempfile
from importlib.metadata import version
from pathlib import Path

from frameworks.table import FRAMEWORKS, header, lines, rows_of

PACKAGES = ("torch", "accelerate", "transformers", "lightning")
PLACE = re.compile(r"(?<=<!-- table -->\n).*(?=<!-- end of table -->)", re.DOTALL)


def table() -> str:
    found = header()
    for name in FRAMEWORKS:
        with tempfile.TemporaryDirectory() as folder:
            found += lines(name, rows_of(name, Path(folder)))
    versions = ", ".join(f"{name} {version(name)}" for name in PACKAGES)
    return "\n".join([*found, "", f"With {versions}; 2 ranks over Gloo on the CPU.", ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="a page with a place for the table")
    out = parser.parse_args().out
    text = table()
    print(text)
    if out is not None:
        out.write_text(PLACE.sub(lambda _: text, out.read_text()))


if __name__ == "__main__":
    main()
