"""The house keeps its shape: imports go one way, and no file reaches into another object."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import shardstep

PACKAGE = Path(shardstep.__file__).parent

#: Rooms in the order of the walk; a room may import itself and those before it.
ORDER = (
    "precision",
    "plan",
    "comm",
    "params",
    "gradients",
    "gather",
    "local",
    "layouts",
    "state",
    "report",
    "pipeline",
    "modes",
    "optimizer",
    "elastic",
    "checkpoint",
    "integrations",
    "cli",
    "__main__",
)

#: Names of Python and torch that have no public counterpart.
OTHERS_PRIVATE = {
    "_exit",
    "_run_exitfuncs",
    "_has_rebuilt_buckets",
    "_join_config",
    "_divide_by_initial_world_size",
    "_local_tensor",
    "_orig_mod",
    "_is_accelerate_prepared",
    "_execution_engine",
    "_is_profiler_enabled",
    "_get_backend",
    "_optimizer_state_dict_pre_hooks",
    "_optimizer_state_dict_post_hooks",
    "_optimizer_load_state_dict_pre_hooks",
    "_optimizer_load_state_dict_post_hooks",
    "_optimizer_step_pre_hooks",
    "_optimizer_step_post_hooks",
    "_version",
}

MAX_FILE_LINES = 450
MAX_CLASS_LINES = 350

FILES = sorted(PACKAGE.rglob("*.py"))


def room(path: Path) -> str:
    first = path.relative_to(PACKAGE).parts[0]
    return first.removesuffix(".py")


def imports(tree: ast.AST) -> Iterator[str]:
    """Yield the modules of this package that run when the file is imported or used."""
    for_types = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        if id(node) in for_types:
            continue
        if isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_go_one_way(path: Path) -> None:
    own = room(path)
    if own == "__init__":
        return
    rooms = {name.split(".")[1] for name in imports(parse(path)) if name.startswith("shardstep.")}
    assert own in ORDER, f"say where {own} stands in the order of rooms"
    later = {name for name in rooms if name in ORDER and ORDER.index(name) > ORDER.index(own)}
    assert later == set()


def test_the_package_imports_its_public_modules() -> None:
    code = "import shardstep; shardstep.checkpoint.load, shardstep.elastic.init_process_group"
    subprocess.run([sys.executable, "-c", code], check=True)


def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def private_reaches(path: Path) -> list[str]:
    """Return accesses of private attributes of objects that the file does not define."""
    tree = parse(path)
    own = {n.name for n in ast.walk(tree) if isinstance(n, (ast.FunctionDef, ast.ClassDef))}
    own |= {n.attr for n in ast.walk(tree) if isinstance(n, ast.Attribute) and is_self(n.value)}
    own |= {
        n.target.id
        for n in ast.walk(tree)
        if isinstance(n, ast.AnnAssign) and isinstance(n.target, ast.Name)
    }
    return [
        f"{path.relative_to(PACKAGE)}:{node.lineno} {ast.unparse(node)}"
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and node.attr.startswith("_")
        and not node.attr.startswith("__")
        and not is_self(node.value)
        and not ast.unparse(node.value).startswith(("torch", "dist", "aten"))
        and node.attr not in own | OTHERS_PRIVATE
    ]


def is_self(node: ast.AST) -> bool:
    return isinstance(node, ast.Name) and node.id in ("self", "cls")


def test_no_file_reaches_into_another_object() -> None:
    assert [reach for path in FILES for reach in private_reaches(path)] == []


def test_only_comm_calls_collectives() -> None:
    calls = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all", "isend")
    calls += ("irecv", "send", "recv", "barrier", "gather", "scatter", "reduce")
    found = [
        f"{path.relative_to(PACKAGE)}:{node.lineno}"
        for path in FILES
        if room(path) != "comm"
        for node in ast.walk(parse(path))
        if isinstance(node, ast.Attribute)
        and ast.unparse(node.value) in ("dist", "torch.distributed")
        and node.attr.startswith(calls)
    ]
    assert found == []


def test_files_and_classes_stay_short() -> None:
    long = [
        f"{path.relative_to(PACKAGE)}: {count} lines"
        for path in FILES
        if (count := len(path.read_text().splitlines())) > MAX_FILE_LINES
    ]
    for path in FILES:
        for node in ast.walk(parse(path)):
            if isinstance(node, ast.ClassDef) and node.end_lineno is not None:
                count = node.end_lineno - node.lineno + 1
                if count > MAX_CLASS_LINES:
                    long.append(f"class {node.name}: {count} lines")
    assert long == []


@pytest.mark.parametrize(
    ("mode", "max_hops", "max_files"), [("module", 40, 12), ("drop-in", 24, 10)]
)
def test_an_iteration_takes_few_hops(mode: str, max_hops: int, max_files: int) -> None:
    script = Path(__file__).parents[1] / "benchmarks" / "hops.py"
    command = [sys.executable, str(script), "--mode", mode]
    last = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()[
        -1
    ]
    _, hops, files = map(int, re.findall(r"\d+", last))
    assert hops <= max_hops, last
    assert files <= max_files, last


def test_docstrings_begin_with_a_verb_or_a_noun() -> None:
    questions = ("What", "Whether", "Where", "Which", "How", "Who")
    found = [
        f"{path.relative_to(PACKAGE)}: {doc.splitlines()[0]}"
        for path in FILES
        for node in ast.walk(parse(path))
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef))
        and (doc := ast.get_docstring(node))
        and doc.split()[0] in questions
    ]
    assert found == []
