"""Every command that the documentation and the examples show runs as it is written there."""

from __future__ import annotations

import re
import shlex
import stat
from pathlib import Path

import pytest
from pages import PAGES, ROOT, SHELL, Block, read, run_commands

from demo.gpt import GPT, GPTConfig
from shardstep.checkpoint import safetensors

BLOCKS = [block for page in PAGES for block in read(page)[1] if block.language in SHELL]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
SCRIPTS = sorted({block.page for block in BLOCKS})


def commands_in(example: Path) -> str:
    """Return the commands that an example's docstring shows."""
    docstring = example.read_text().split('"""')[1]
    return "\n".join(re.findall(r"^    (torchrun .*)", docstring, flags=re.MULTILINE))


def left_out(block: Block) -> bool:
    return re.match(r"not run: \S", block.mark) is not None


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.name)
def test_an_example_is_short_and_names_its_command(example: Path) -> None:
    assert len(example.read_text().splitlines()) < 80
    assert commands_in(example)


@pytest.mark.slow
@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.name)
def test_an_example_runs_by_its_command(example: Path, tmp_path: Path) -> None:
    run_commands(commands_in(example), tmp_path)


@pytest.mark.slow
def test_two_hosts_train_over_localhost(tmp_path: Path) -> None:
    assert "(ranks: 2)" in run_commands("bash examples/two_hosts.sh", tmp_path)


SLURM = """
export SLURM_JOB_ID=7 SLURM_JOB_NAME=job SLURM_JOB_NUM_NODES=2 SLURM_JOB_NODELIST='node[0-1]'
export PATH=$PWD/bin:$PATH
bash examples/slurm.sh --epochs 2
"""
STAND_INS = {
    "scontrol": "#!/bin/sh\nprintf 'localhost\\nlocalhost\\n'\n",
    "srun": '#!/bin/sh\n"$@" & "$@"; status=$?; wait $! && exit $status\n',
}


@pytest.mark.slow
def test_the_slurm_script_starts_a_torchrun_per_node(tmp_path: Path) -> None:
    # There is no cluster here: two local processes are the tasks that srun would start.
    (tmp_path / "bin").mkdir()
    for name, text in STAND_INS.items():
        (tmp_path / "bin" / name).write_text(text)
        (tmp_path / "bin" / name).chmod(stat.S_IRWXU)
    assert "epoch 1" in (out := run_commands(SLURM, tmp_path))
    assert "(ranks: 2)" in out


@pytest.mark.slow
@pytest.mark.parametrize("page", SCRIPTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_the_commands_of_a_page_run_in_order(page: Path, tmp_path: Path) -> None:
    # Readers have a file of weights.
    safetensors.write(tmp_path / "model.safetensors", GPT(GPTConfig(tied=False)).state_dict())
    for block in read(page)[1]:
        if block.mark.startswith("file: "):
            (tmp_path / block.mark.removeprefix("file: ")).write_text(block.code)
        elif block.language in SHELL and block.mark != "install" and not left_out(block):
            run_commands(block.commands, tmp_path)


INSTALL = """
export PIP_TARGET=$PWD/site PIP_NO_DEPS=1 PIP_NO_BUILD_ISOLATION=0 PIP_UPGRADE=1
(
cd {root}
{commands}
)
export PYTHONPATH=$PWD/site PATH=$PWD/site/bin:$PATH
python -c 'import shardstep, sys; sys.exit(not shardstep.__file__.startswith("'$PWD'"))'
torchrun --standalone --nproc-per-node=2 quickstart.py
shardstep --version
shardstep demo --help
"""


@pytest.mark.slow
def test_the_quickstart_runs_as_the_readme_installs_it(tmp_path: Path) -> None:
    # Torch is here already; the wheel goes to a folder without the rest of the checkout.
    blocks = read(ROOT / "README.md")[1]
    (commands,) = (block.commands for block in blocks if block.mark == "install")
    (quickstart,) = (block.code for block in blocks if block.mark == "file: quickstart.py")
    (tmp_path / "quickstart.py").write_text(quickstart)
    assert "loss" in run_commands(INSTALL.format(root=ROOT, commands=commands), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("block", [block for block in BLOCKS if left_out(block)], ids=str)
def test_commands_that_are_not_run_name_files_verbs_and_options_that_exist(
    block: Block, tmp_path: Path
) -> None:
    makefile = (ROOT / "Makefile").read_text()
    for line in block.commands.splitlines():
        program, *words = shlex.split(line, comments=True) or ["", ""]
        if program == "make":
            assert re.search(rf"^{words[0]}:", makefile, flags=re.MULTILINE), line
        elif program:
            assert Path(program).name == "python", f"cannot check: {line}"
            script, *given = words
            known = run_commands(f"python {script} --help", tmp_path)
            options = [word for word in given if word.startswith("--")]
            assert [word for word in options if word not in known] == [], line
