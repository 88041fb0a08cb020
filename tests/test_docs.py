"""Tests of the documentation: links resolve, names exist, examples run.

docs/upstream.md must also mention every name of torch's class, and every name of ours in it exists.
"""

from __future__ import annotations

import ast
import doctest
import importlib
import inspect
import json
import re
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from types import ModuleType
from typing import Any

import pytest
from pages import PAGES, ROOT, Block, read
from torch.distributed.algorithms.ddp_comm_hooks import ddp_zero_hook
from torch.distributed.optim import ZeroRedundancyOptimizer as Upstream
from torch.distributed.optim import zero_redundancy_optimizer
from torch.optim import Optimizer
from typer.testing import CliRunner

import shardstep
from shardstep import ZeroRedundancyOptimizer, checkpoint
from shardstep.cli.app import app
from shardstep.cli.plan_inputs import make_job
from shardstep.plan.models import MODELS, model

UPSTREAM_PAGE = ROOT / "docs" / "upstream.md"


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


# ------------------------------------------------------------------------------ reading pages


def links(prose: list[str]) -> Iterator[str]:
    text = re.sub(r"`[^`]*`", "", "\n".join(prose))
    yield from re.findall(r"\]\(\s*<?([^)\s>]+)", text)
    yield from re.findall(r"^\s*\[[^\]]+\]:\s*(\S+)", text, flags=re.MULTILINE)
    yield from re.findall(r"""<(?:a|img|source)\s[^>]*(?:href|src|srcset)=["']([^"']+)""", text)


def anchors(page: Path) -> set[str]:
    """Return the anchors that GitHub makes from a page's headings."""
    headings = [line.lstrip("#") for line in read(page)[0] if re.match(r"#+ ", line)]
    return {re.sub(r"[^\w\- ]", "", each.strip().lower()).replace(" ", "-") for each in headings}


BLOCKS = [block for page in PAGES for block in read(page)[1] if block.language == "python"]


# ---------------------------------------------------------------------------- links and blocks


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_relative_link_resolves(page: Path) -> None:
    broken = []
    for link in links(read(page)[0]):
        if re.match(r"[a-z][a-z0-9+.-]*:", link):
            continue
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        if not target.exists() or (
            anchor and target.suffix == ".md" and anchor not in anchors(target)
        ):
            broken.append(link)
    assert broken == []


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_item_of_a_list_is_one_on_the_site(page: Path) -> None:
    # GitHub starts an item after any line; the site's Markdown needs a blank one after a paragraph.
    markdown = pytest.importorskip("markdown")
    html = markdown.markdown(page.read_text(), extensions=["tables", "pymdownx.superfences"])
    assert re.findall(r"\n- .*", re.sub(r"<pre>.*?</pre>", "", html, flags=re.DOTALL)) == []


@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_every_python_block_is_python(block: Block) -> None:
    ast.parse(block.code, filename=str(block))


@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_blocks_use_only_exported_names(block: Block) -> None:
    # Type checkers know only exported names, even if an import within the package adds others.
    nodes = [node for node in ast.walk(ast.parse(block.code)) if isinstance(node, ast.Attribute)]
    used = {node.attr for node in nodes if ast.unparse(node.value) == "shardstep"}
    assert used <= set(shardstep.__all__)


@pytest.mark.parametrize("block", [block for block in BLOCKS if block.mark == "run"], ids=str)
def test_marked_blocks_run(block: Block, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    # Blank lines shift the code to its place on the page, so tracebacks name the page's lines.
    code = compile("\n" * (block.line - 1) + block.code, str(block.page), "exec")
    exec(code, {"__name__": "__main__"})


def test_some_block_is_run() -> None:
    assert any(block.mark == "run" for block in BLOCKS)


# ------------------------------------------------------------------ the page about torch's class


def attributes(cls: type) -> set[str]:
    """Return the attributes of instances of `cls`: those annotated, and those set in methods."""
    found: set[str] = set()
    for base in cls.__mro__:
        if base.__module__.startswith("shardstep"):
            found |= inspect.get_annotations(base).keys()
            found |= set_on_self(ast.parse(textwrap.dedent(inspect.getsource(base))))
    return found


def set_on_self(tree: ast.AST) -> set[str]:
    return {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Store)
        and isinstance(node.value, ast.Name)
        and node.value.id == "self"
    }


def exists(name: str) -> bool:
    """Return True if a dotted name is a module, an object in one, or an instance attribute."""
    found: Any = shardstep
    first, *rest = name.split(".")
    for position, part in enumerate(rest):
        if isinstance(found, ModuleType) and not hasattr(found, part):
            try:
                importlib.import_module(f"{found.__name__}.{part}")
            except ModuleNotFoundError:
                return False
        if isinstance(found, type) and not hasattr(found, part):
            return position == len(rest) - 1 and part in attributes(found)
        if not hasattr(found, part):
            return False
        found = getattr(found, part)
    return first == "shardstep"


def test_names_of_ours_on_the_page_exist() -> None:
    given = set(re.findall(r"`(shardstep(?:\.\w+)+)[^`]*`", UPSTREAM_PAGE.read_text()))
    assert len(given) > 40, "the pattern finds too few names"
    assert sorted(name for name in given if not exists(name)) == []


@pytest.mark.parametrize(
    "name",
    [
        "shardstep.nothing",
        "shardstep.optimizer.Nothing",
        "shardstep.optimizer.ZeroRedundancyOptimizer.nothing",
        "shardstep.optimizer.ZeroRedundancyOptimizer.rank.nothing",
        "shardstep.comm.Comm.nothing",
    ],
)
def test_a_missing_name_is_noticed(name: str) -> None:
    assert not exists(name)


def names_in(tree: ast.Module) -> set[str]:
    """Return a module's classes, functions, parameters, attributes, enum members and constants."""
    found = set_on_self(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            found.add(node.name)
        if isinstance(node, ast.FunctionDef):
            given = node.args
            every = [*given.posonlyargs, *given.args, *given.kwonlyargs, given.vararg, given.kwarg]
            found |= {each.arg for each in every if each is not None}
        if isinstance(node, ast.ClassDef | ast.Module):
            for part in node.body:
                targets = part.targets if isinstance(part, ast.Assign) else []
                targets = [part.target] if isinstance(part, ast.AnnAssign) else targets
                found |= {each.id for each in targets if isinstance(each, ast.Name)}
    # DDP defines the arguments of the hooks' inner functions.
    return found - {"self", "state", "fut"}


@pytest.mark.parametrize(
    "source",
    [
        Path(inspect.getfile(zero_redundancy_optimizer)),
        Path(inspect.getfile(zero_redundancy_optimizer)).with_suffix(".pyi"),
        Path(inspect.getfile(ddp_zero_hook)),
    ],
    ids=lambda path: path.name,
)
def test_the_page_mentions_every_upstream_name(source: Path) -> None:
    if not source.exists():
        pytest.skip(f"this torch has no {source.name}")
    spans = re.findall(r"`([^`\n]+)`", UPSTREAM_PAGE.read_text())
    mentioned = {word for span in spans for word in re.findall(r"\w+", span)}
    theirs = names_in(ast.parse(source.read_text()))
    assert len(theirs) > 10, "the parser finds too few names"
    assert sorted(theirs - mentioned) == []


def test_the_page_mentions_every_name_that_upstream_lacks() -> None:
    spans = " ".join(re.findall(r"`([^`\n]+)`", UPSTREAM_PAGE.read_text()))
    keywords = inspect.signature(ZeroRedundancyOptimizer).parameters.values()
    ours = {each.name for each in keywords if each.kind is inspect.Parameter.KEYWORD_ONLY}
    ours |= {name for name in vars(ZeroRedundancyOptimizer) if not name.startswith("_")}
    assert sorted(name for name in ours if not re.search(rf"\b{name}\b", spans)) == []


# ------------------------------------------------------------------------ claims of other pages


def messages() -> str:
    """Return all texts of the library, with a dot for each value in them."""
    found = []
    for path in Path(shardstep.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                parts = [n.value if isinstance(n, ast.Constant) else "…" for n in node.values]
                found.append("".join(map(str, parts)))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return "\n".join(found)


def test_every_message_on_the_troubleshooting_page_is_one_of_ours() -> None:
    page = (ROOT / "docs" / "troubleshooting.md").read_text()
    quoted = re.findall(r"^\| `([^`]+)` \|", page, flags=re.MULTILINE)
    assert len(quoted) > 30, "the pattern finds too few messages"
    known = messages()
    assert [each for each in quoted if each not in known] == []


def test_the_api_page_lists_every_public_name() -> None:
    page = (ROOT / "docs" / "api.md").read_text()
    listed = {name.split(".")[-1] for name in re.findall(r"^::: (\S+)", page, flags=re.MULTILINE)}
    public = {*shardstep.__all__, *checkpoint.__all__} - {"checkpoint", "elastic"}
    assert sorted(public - listed) == []


def test_the_memory_table_of_the_readme_is_what_the_plan_says() -> None:
    table = re.findall(
        r"^\| `([\w-]+)`, .*?\| (.*) \|$", (ROOT / "README.md").read_text(), flags=re.MULTILINE
    )
    assert len(table) == 3
    for name, cells in table:
        result = CliRunner().invoke(app, ["plan", "--model", name, "--ranks", "8", "--json"])
        plan = json.loads(result.stdout)["plans"][0]
        methods = ["ddp", "torch_zero", "drop_in", "module", "fsdp2"]
        peaks = [f"{plan[method]['peak'] / 1e9:.2f}" for method in methods]
        assert cells.replace("**", "").split(" | ") == peaks


def test_module_mode_sends_a_quarter_to_a_third_less_than_fsdp2() -> None:
    assert "sends a quarter to a third less" in (ROOT / "README.md").read_text()
    for name in MODELS:
        job, _ = make_job(model(name), "AdamW", [], "own", "auto", "nccl", None)
        for ranks in (2, 64):
            saved = 1 - job.module_mode(ranks).sent / job.fsdp2(ranks).sent
            assert 0.25 < saved < 1 / 3, name


RESULTS = ROOT / "benchmarks" / "results"
CONTESTANTS = {
    "DDP": "ddp",
    "torch ZeRO": "torch-zero",
    "torch ZeRO, bucket views": "torch-zero-view",
    "FSDP2": "fsdp2",
    "FSDP2, `reshard_after_forward=False`": "fsdp2",
    "drop-in, bucket views": "zero1",
    "`module=`": "zero2",
    "`module=`, replayed": "zero2-replayed",
    "`module=`, recoverable": "zero2-recoverable",
    "`hook_with_zero_step`": "hook",
    "`hook_with_zero_step_interleaved`": "hook-interleaved",
    "`register`": "register",
    "inside DDP (`register`)": "register",
}


def rows(page: Path, first: str) -> list[list[str]]:
    """Return the cells of the table whose header starts with `first`, without bold type."""
    table = page.read_text().replace("**", "").partition(f"\n{first}")[2].partition("\n\n")[0]
    return [line.strip("| ").split(" | ") for line in table.splitlines()[2:]]


def test_the_speed_table_of_the_readme_is_the_raw_file_s() -> None:
    raw = json.loads((RESULTS / "hosts-2-1gbit.json").read_text())
    numel = raw["contestants"]["ddp"]["gradient_bytes_per_rank"] / 4
    table = rows(ROOT / "README.md", "| | ms / step |")
    assert len(table) == 7
    for label, *cells in table:
        found = raw["contestants"][CONTESTANTS[label.removeprefix("shardstep ")]]
        ms = found["ms_per_step"]
        assert found["loss_distance_to_ddp"] == 0
        assert cells == [
            f"{ms['median']:.0f}",
            f"{ms['min']:.0f}–{ms['max']:.0f}",
            f"{found['ratio_to_ddp']:.2f}",
            f"{found['sent_psi']:.2f}",
            f"{found['state_bytes_per_rank'] / numel:.0f}",
        ], label


def test_the_table_of_ranks_over_nccl_is_the_raw_files() -> None:
    run: dict[str, Any] = {}
    table = rows(ROOT / "docs" / "benchmarks.md", "| contestant | ms / step |")
    assert len(table) > 15
    for label, *cells in table:
        if file := re.search(r"results/([\w-]+\.json)", label):
            runs = json.loads((RESULTS / file[1]).read_text())["runs"]
            run = runs[0]
        name, _, ranks = label.rpartition(": ")[2].partition(", ")
        if ranks.endswith(" ranks"):
            (run,) = (each for each in runs if f"{each['workload']['world_size']} ranks" == ranks)
        else:
            name = label.rpartition(": ")[2]
        found = run["contestants"][CONTESTANTS[name]]
        ms, ratios = found["ms_per_step"], found["ratio_to_ddp_by_round"]
        form = ".0f" if ms["median"] > 100 else ".1f"
        time, ratio, peak = cells
        assert time == f"{ms['median']:{form}} ({ms['min']:{form}}–{ms['max']:{form}})", label
        spread = f" ({min(ratios):.2f}–{max(ratios):.2f})" if "(" in ratio else ""
        assert ratio == f"{found['ratio_to_ddp']:.2f}{spread}", label
        assert peak == f"{found['peak_bytes'] / 2**30:.2f}", label


def test_the_table_of_steps_on_a_gpu_is_the_raw_file_s() -> None:
    raw = json.loads((RESULTS / "gpu-h200-step.json").read_text())["step"]
    table = rows(ROOT / "docs" / "benchmarks.md", "| `step()` |")
    names = ("adamw", "zero1", "zero1-view", "zero1-replayed", "zero1-view-replayed")
    for (label, *cells), name in zip(table, (*names, "torch-zero", "torch-zero-view"), strict=True):
        host = raw[name]["host_ms"]
        assert cells == [
            f"{raw[name]['ms']['median']:.2f}",
            f"{raw[name]['over_adamw']['median']:.2f}",
            f"{host['median']:.1f} ({host['min']:.1f}–{host['max']:.1f})",
        ], label


def test_smaller_tables_of_the_benchmarks_are_the_raw_files() -> None:
    page = ROOT / "docs" / "benchmarks.md"
    hosts = rows(page, "| hosts, link |")
    assert len(hosts) == 5
    for label, ratio, link in hosts:
        (file,) = re.findall(r"results/([\w-]+\.json)", link)
        found = json.loads((RESULTS / file).read_text())["contestants"]["zero2"]
        assert f"{found['ratio_to_ddp']:.2f}" in ratio, label

    runs = json.loads((RESULTS / "nccl-compile.json").read_text())["runs"]
    compiled = rows(page, "| `torch.compile`")
    for (label, cell), name in zip(compiled, ("zero2", "fsdp2"), strict=True):
        found = runs[0]["contestants"][name]
        ratios = found["ratio_to_ddp_by_round"]
        shown = f"{found['ratio_to_ddp']:.2f} ({min(ratios):.2f}–{max(ratios):.2f})"
        assert cell == shown, label

    seconds = json.loads((RESULTS / "checkpoint.json").read_text())["time"]["seconds"]
    medians = {name: spread["median"] for name, spread in seconds.items()}
    assert [cell for _, cell in rows(page, "| call | seconds |")] == [
        f"{medians['save']:.2f}",
        f"{medians['dcp.save']:.2f}",
        f"{medians['async_save returns'] / medians['save']:.2f} × `save`",
        f"{medians['load']:.2f}",
        f"{medians['dcp.load']:.2f}",
        f"{medians['consolidate_state_dict']:.2f}",
        f"{medians['torch ZeRO consolidate']:.1f} and {medians['torch ZeRO torch.save']:.1f}",
    ]


def test_the_nccl_table_of_the_readme_is_the_raw_files() -> None:
    files = {"17M, 2": "nccl-17m-2", "17M, 4": "nccl-17m-4", "255M, 2": "nccl-255m"}
    for label, *cells in rows(ROOT / "README.md", "| parameters, ranks |"):
        raw = json.loads((RESULTS / f"{files.pop(label)}.json").read_text())
        found = raw["runs"][0]["contestants"]
        ratios = found["zero2"]["ratio_to_ddp_by_round"]
        times = [found[name]["ms_per_step_by_round"] for name in ("zero2", "fsdp2")]
        assert cells == [
            f"{found['zero2']['ratio_to_ddp']:.2f} ({min(ratios):.2f}–{max(ratios):.2f})",
            f"{median(ours / theirs for ours, theirs in zip(*times, strict=True)):.2f}",
            ", ".join(f"{found[k]['peak_bytes'] / 2**30:.2f}" for k in ("zero2", "ddp", "fsdp2")),
        ], label
    assert not files


def test_the_counts_in_the_readme_are_those_of_the_results() -> None:
    readme = " ".join((ROOT / "README.md").read_text().split())
    tests = json.loads((RESULTS / "nccl-tests.json").read_text())
    assert tests["failed"] == 0
    assert f"{tests['passed']} passed, none failed, and {tests['skipped']} were skipped" in readme
    page = (ROOT / "docs" / "optimizers.md").read_text()
    found = re.findall(r"(\d+) \*([^*]+)\*", page)[:4]
    counts = {outcome: int(count) for count, outcome in found}
    exact = counts["exact"] + counts["exact, cannot be saved"]
    assert f"Of the {sum(counts.values())} classes of pytorch-optimizer, {exact} train" in readme
    rest = f"{counts['refused']} are refused, and {counts['not tried']} were not tried"
    assert rest in readme


def test_the_frameworks_page_names_the_pinned_versions() -> None:
    page = (ROOT / "docs" / "frameworks.md").read_text()
    pinned = re.findall(r"^(\w+)==(\S+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    wanted = {"torch", "accelerate", "transformers", "lightning", "peft"}
    missing = [
        " ".join(each) for each in pinned if each[0] in wanted and " ".join(each) not in page
    ]
    assert missing == []


def test_the_design_page_lists_every_room() -> None:
    package = Path(shardstep.__file__).parent
    modules = {path.name for path in package.glob("*.py")} - {"__init__.py"}
    folders = {f"{path.parent.name}/" for path in package.glob("*/__init__.py")}
    page = (ROOT / "docs" / "design.md").read_text()
    assert sorted(name for name in modules | folders if f"`{name}`" not in page) == []


def test_the_contributing_page_lists_every_verb() -> None:
    verbs = set(re.findall(r"^([a-z-]+):.*##", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    listed = re.findall(
        r"^\| `make ([a-z-]+)`", (ROOT / "CONTRIBUTING.md").read_text(), re.MULTILINE
    )
    assert sorted(listed) == sorted(verbs - {"help", "clean"})


# ---------------------------------------------------------------------------------- drop-in

METHODS = ["step", "add_param_group", "load_state_dict", "state_dict", "zero_grad"]
CALLS = [
    *((Upstream, method) for method in [*METHODS, "__init__", "consolidate_state_dict"]),
    *((Optimizer, method) for method in METHODS),
]
VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def shape(function: Callable[..., Any]) -> list[tuple[str, Any, Any]]:
    """Return name, kind and default of each parameter, without the names of variadic ones."""
    return [
        ("*" if each.kind in VARIADIC else each.name, each.kind, each.default)
        for each in inspect.signature(function).parameters.values()
    ]


@pytest.mark.parametrize(("base", "method"), CALLS)
def test_methods_accept_every_upstream_call(base: type, method: str) -> None:
    ours, theirs = shape(getattr(ZeroRedundancyOptimizer, method)), shape(getattr(base, method))
    positional = [each for each in theirs if each[1] not in VARIADIC]
    assert ours[: len(positional)] == positional, "same names, kinds, defaults, in the same order"
    assert [each for each in theirs if each not in ours] == []
    for _, kind, default in ours[len(positional) :]:
        optional = default is not inspect.Parameter.empty
        assert kind in VARIADIC or (kind is inspect.Parameter.KEYWORD_ONLY and optional)


# --------------------------------------------------------------------------------- doctests


def modules_with_examples() -> list[str]:
    return [
        ".".join(path.relative_to(folder).with_suffix("").parts).removesuffix(".__init__")
        for folder in (ROOT / "src", ROOT / "examples")
        for path in sorted(folder.rglob("*.py"))
        if re.search(r"^\s*>>> ", path.read_text(), flags=re.MULTILINE)
    ]


def test_examples_in_docstrings_are_found() -> None:
    expected = {"shardstep.plan.plan", "shardstep.optimizer", "demo.gpt"}
    assert expected <= set(modules_with_examples())


@pytest.mark.parametrize("module", modules_with_examples())
def test_examples_in_docstrings_run(module: str) -> None:
    failed, attempted = doctest.testmod(importlib.import_module(module))
    assert attempted > 0
    assert failed == 0
