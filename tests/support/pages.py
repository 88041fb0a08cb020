"""The blocks of code in Markdown pages, and a folder to run their commands in.

A comment on the line before a block says what a test does with it:

- `<!-- run -->`: run this Python block.
- `<!-- run on 2 ranks -->`: run it on two ranks.
- `<!-- file: NAME -->`: write this block to a file, for the commands after it on the page.
- `<!-- install -->`: run these commands in the checkout, with a new folder to install into.
- `<!-- not run: REASON -->`: only check that files, verbs and options exist.

Without a comment, commands are run as written.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
SHELL = ("bash", "console")


class Block(NamedTuple):
    """A fenced block of code, and the comment before it."""

    page: Path
    line: int
    language: str
    code: str
    mark: str

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"

    @property
    def commands(self) -> str:
        """The block as a script: all of it, or the lines after a prompt."""
        if self.language == "console":
            lines = [line[2:] for line in self.code.splitlines() if line.startswith("$ ")]
            assert lines, f"{self}: a console block needs a prompt, '$ '"
            return "\n".join(lines)
        return self.code


def read(page: Path) -> tuple[list[str], list[Block]]:
    """Return the lines of a page outside its blocks, and the blocks."""
    prose: list[str] = []
    blocks: list[Block] = []
    fence = language = mark = ""
    body: list[str] = []
    start = 0
    for number, line in enumerate(page.read_text().splitlines(), start=1):
        opening = re.match(r"\s*(`{3,})\s*([\w-]*)", line)
        if fence:
            if line.strip() == fence:
                code = textwrap.dedent("\n".join(body))
                blocks.append(Block(page, start, language, code, mark))
                fence = mark = ""
            else:
                body.append(line)
        elif opening:
            fence, language = opening.groups()
            body, start = [], number + 1
        else:
            prose.append(line)
            comment = re.fullmatch(r"\s*<!-- (.*) -->\s*", line)
            mark = comment[1] if comment else mark if not line.strip() else ""
    assert not fence, f"{page.relative_to(ROOT)}: the block before line {start} is never closed"
    return prose, blocks


def run_commands(commands: str, folder: Path) -> str:
    """Run a script in `folder`, where the repository's own folders are linked; return its output.

    Raises:
        AssertionError: with the end of its output, if it fails.
    """
    for linked in ("examples", "benchmarks"):
        if not (folder / linked).exists():
            (folder / linked).symlink_to(ROOT / linked)
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    source = os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", commands],
        cwd=folder,
        env={**os.environ, "PATH": path, "PYTHONPATH": source, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, f"{commands}\n{done.stdout[-3000:]}"
    return done.stdout


if __name__ == "__main__":  # python tests/support/pages.py README.md FOLDER: write its files there
    for each in read(Path(sys.argv[1]).resolve())[1]:
        if each.mark.startswith("file: "):
            (Path(sys.argv[2]) / each.mark.removeprefix("file: ")).write_text(each.code)
