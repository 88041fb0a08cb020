"""Hooks of mkdocs: the README is the first page, and links out of `docs/` lead to copies.

On GitHub every link of a page is relative to the page. The site has only `docs/`, so a linked file
outside of it is copied to `source/`, and the link is rewritten.
"""

from __future__ import annotations

import os
import posixpath
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import typer
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from typer.cli import get_docs_for_click
from typer.main import get_command

ROOT = Path(__file__).parents[1]
LINK = re.compile(r"(\]\(|src=\")([^)#\"\s]+)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the README as the first page, and the files that pages link to."""
    files.append(File.generated(config, "index.md", content=(ROOT / "README.md").read_text()))
    for page in [*files.documentation_pages()]:
        for _, link in LINK.findall(page.content_string):
            target = _outside(page.src_uri, link)
            if target and _copy(target) not in files.src_uris:
                source = str(ROOT / target)
                files.append(File.generated(config, _copy(target), abs_src_path=source))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Rewrite links out of `docs/`, and add the commands' options to their page."""

    def moved(match: re.Match[str]) -> str:
        target = _outside(page.file.src_uri, match[2])
        inside = match[2].removeprefix("docs/") if page.file.src_uri == "index.md" else match[2]
        return match[1] + (_copy(target) if target else inside)

    markdown = LINK.sub(moved, markdown).replace("](source/README.md.txt", "](index.md")
    return markdown + _commands() if page.file.src_uri == "command-line.md" else markdown


def _outside(page: str, link: str) -> str | None:
    """Return the path in the repository that a link leads to, if it leads out of `docs/`."""
    folder = "" if page == "index.md" else "docs"
    path = posixpath.normpath(posixpath.join(folder, link))
    outside = ":" not in link and not path.startswith("docs/")
    return path if outside and (ROOT / path).is_file() else None


def _copy(target: str) -> str:
    # A copied page would be built as one, with links that lead nowhere.
    return f"source/{target}" + (".txt" if target.endswith((".md", ".py", ".sh")) else "")


def _commands() -> str:
    """Return the options of all commands; the demo and the benchmark read their own."""
    os.environ["TERMINAL_WIDTH"] = "80"
    sys.path.insert(0, str(ROOT / "examples"))
    from demo.command import app as demo_app
    from shardstep.cli.app import app

    text = _command_docs(app, "shardstep", 1)
    demo = _command_docs(demo_app, "shardstep demo", 2)
    command = [sys.executable, str(ROOT / "benchmarks" / "hosts.py"), "--help"]
    named = os.environ | {"SHARDSTEP_PROG": "shardstep bench", "COLUMNS": "88"}
    told = subprocess.run(command, env=named, check=True, capture_output=True, text=True).stdout
    bench = f"### `shardstep bench`\n\n```text\n{told}```\n"
    for name, options in (("demo", demo), ("bench", bench)):
        section = re.compile(rf"### `shardstep {name}`\n.*?(?=\n### )", re.DOTALL)
        text, found = section.subn(lambda _, options=options: options, text)
        assert found == 1, name
    # A list of cut-off first sentences, before the sections with the whole ones.
    return "\n" + re.sub(r"\*\*Commands\*\*:\n\n(\*.*\n)+", "", text)


def _command_docs(app: typer.Typer, name: str, indent: int) -> str:
    command = get_command(app)
    context = typer.Context(command, info_name=name)
    return get_docs_for_click(obj=command, ctx=context, name=name, indent=indent)
