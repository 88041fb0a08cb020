"""Bad input: every rank raises, within seconds, and the message says what, where and what to do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from bad import SECONDS, SGD, Adam, build, p, sparse
from on_ranks import on_ranks
from ranks import each_raises_on_every_rank
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.optim import ZeroRedundancyOptimizer as Upstream
from torch.nn.parallel import DistributedDataParallel as DDP


def around(module: torch.nn.Module) -> dict[str, Any]:
    """What hands over a DDP wrapper, or what is around one, in place of the module inside."""
    return {"params": module.parameters(), "module": module}


# -------------------------------------------------------------------- ranks that differ

Differing = dict[str, tuple[Callable[[int], Any], str, str]]

#: What rank 0 and rank 1 are given, parameters or arguments; how the message shows each view.
DIFFERENT: Differing = {
    "one parameter less": (
        lambda rank: [p(4), p(5), p(6)][: 3 - rank],
        *(r"'param 2' \(shape \(6,\)", ""),
    ),
    "one parameter more": (
        lambda rank: [p(4), p(5), p(6)][: 2 + rank],
        *("", r"'param 2' \(shape \(6,\)"),
    ),
    "another shape": (
        lambda rank: [p(4), p(5 + rank, 3), p(7 + rank)],
        *(r"'param 1' \(shape \(5, 3\)", r"'param 1' \(shape \(6, 3\)"),
    ),
    "the same number of elements in another shape": (
        lambda rank: [p(4), p(6, 4) if rank else p(4, 6)],
        *(r"'param 1' \(shape \(4, 6\)", r"'param 1' \(shape \(6, 4\)"),
    ),
    "another dtype": (
        lambda rank: [p(4), p(5, dtype=[torch.float32, torch.bfloat16][rank])],
        *("'param 1' .*float32", "'param 1' .*bfloat16"),
    ),
    "another order of named parameters": (
        lambda rank: [("a", p(4)), ("b", p(9)), ("c", p(9))][:: [1, -1][rank]],
        *("'a'", "'c'"),
    ),
    "another memory format": (
        lambda rank: [
            p(4),
            torch.nn.Parameter(
                torch.ones(2, 3, 4, 5).to(
                    memory_format=[torch.contiguous_format, torch.channels_last][rank]
                )
            ),
        ],
        *(r"'param 1' \(shape \(2, 3, 4, 5\)", r"'param 1' .*stride \(60, 1, 15, 3\)"),
    ),
    "a frozen parameter": (
        lambda rank: [p(4), p(5, trainable=rank == 0)],
        *(r"'param 1' \([^)]*\)[^)]*group 0\)", "'param 1' .*frozen"),
    ),
    "another split into groups": (
        lambda rank: [{"params": [p(4), p(5)][: 2 - rank]}, {"params": [p(5), p(6)][1 - rank :]}],
        *(r"'param 1' .*group 0\)", r"'param 1' .*group 1\)"),
    ),
    "one group less": (
        lambda rank: (
            [{"params": [p(4), p(5)]}] if rank else [{"params": [p(4)]}, {"params": [p(5)]}]
        ),
        *("group 1", ""),
    ),
    "another learning rate": (
        lambda rank: {"lr": [0.1, 0.2][rank]},
        *(r"lr=0\.1 in group 0", r"lr=0\.2 in group 0"),
    ),
    "another learning rate in the second group": (
        lambda rank: [{"params": [p(4)]}, {"params": [p(5)], "lr": 0.5 + rank}],
        *(r"lr=0\.5 in group 1", r"lr=1\.5 in group 1"),
    ),
    "another optimizer class": (lambda rank: {"optimizer_class": [SGD, Adam][rank]}, "SGD", "Adam"),
    "another class of a group": (
        lambda rank: [
            {"params": [p(4, 4)], "optimizer_class": [torch.optim.Muon, Adam][rank], "lr": 0.1},
            {"params": [p(5)]},
        ],
        *(r"group 0, whole\)", r"group 0\)"),
    ),
    "another layout": (
        lambda rank: {"params": [p(40, 40), p(9)], "layout": ["sliced", "whole"][rank]},
        *("sliced", "whole"),
    ),
    "another bucket size": (
        lambda rank: {"params": [p(200, 200), p(200, 200)], "bucket_bytes": [1, 2**20][rank]},
        *(r"bucket_bytes=1\b", "bucket_bytes=1048576"),
    ),
}


def arguments(made: Any) -> dict[str, Any]:
    return {"params": [p(4)], **made} if isinstance(made, dict) else {"params": made}


def construct_differing(case: str) -> None:
    build(**arguments(DIFFERENT[case][0](min(1, dist.get_rank()))))


def test_ranks_that_were_given_different_things_all_say_what_differs() -> None:
    match = "rank 0 has .*{}.* where rank 1 has .*{}.*on all ranks"
    cases = [
        (construct_differing, ValueError, match.format(here, there), case)
        for case, (_, here, there) in DIFFERENT.items()
    ]
    for seen in each_raises_on_every_rank(2, cases):
        assert len(set(seen)) == 1, "all ranks say the same"


THERE = r"rank 0 has 'param 1' \(shape \(5,\).* where rank 2 has 'param 1' \(shape \(6,\)"


@on_ranks(3, raises=ValueError, match=THERE, timeout=SECONDS)
def test_the_rank_that_differs_is_named() -> None:
    build([p(4), p(5 + (dist.get_rank() == 2))])


# ------------------------------------------------------------------------ bad everywhere


def functional_class() -> Any:
    from torch.distributed.optim.utils import functional_optim_map

    return functional_optim_map[Adam]


def sharing() -> list[torch.Tensor]:
    memory = torch.ones(100)
    return [p(3), torch.nn.Parameter(memory[:60]), torch.nn.Parameter(memory[59:])]


def wrapper() -> torch.Tensor:
    from torch.testing._internal.two_tensor import TwoTensor

    return torch.nn.Parameter(TwoTensor(torch.ones(4), torch.ones(4)))


Bad = dict[str, tuple[Callable[[], Any], type[Exception], str]]

#: Bad parameters, or arguments, the error, and what its message names.
BAD: Bad = {
    "an empty list": (lambda: [], ValueError, "empty parameter list"),
    "an empty generator": (lambda: iter(()), ValueError, "empty .*read once"),
    "a bare tensor": (lambda: p(4), TypeError, r"single tensor .*pass \[tensor\]"),
    "a module": (
        lambda: torch.nn.Sequential(torch.nn.Linear(4, 4)),
        *(TypeError, r"a module was given; pass its parameters\(\)"),
    ),
    "a number": (lambda: 7, TypeError, "iterable of tensors.* not int"),
    "a list of numbers": (lambda: [1, 2], TypeError, "item 0 is a int"),
    "a number among tensors": (lambda: [p(4), 2], TypeError, "item 1 is a int"),
    "tensors among groups": (lambda: [{"params": [p(4)]}, p(5)], TypeError, "item 0 is a dict"),
    "a group without params": (lambda: [{"lr": 1.0}], ValueError, "group 0 .*'params'"),
    "a number in a group": (lambda: [{"params": [p(4), 3]}], TypeError, "int"),
    "a parameter that is no leaf": (lambda: [p(4) * 2], ValueError, "non-leaf"),
    "a sparse parameter": (lambda: [sparse()], ValueError, "'param 0' is sparse"),
    "a sparse parameter among others": (
        lambda: [p(4), sparse()],
        *(ValueError, "'param 1' is sparse"),
    ),
    "a parameter twice": (
        lambda: [param := p(4), p(5), param],
        *(ValueError, "'param 2' is given twice"),
    ),
    "a parameter in two groups": (
        lambda: [{"params": [param := p(4)]}, {"params": [p(5), param]}],
        *(ValueError, "more than one parameter group|given twice"),
    ),
    "a parameter on the meta device": (
        lambda: [p(3), torch.nn.Parameter(torch.ones(4, device="meta"))],
        *(ValueError, "'param 1' is on the meta device .*materialise"),
    ),
    "parameters that share memory": (
        sharing,
        *(ValueError, "'param 1' and 'param 2' share memory.*give each its own storage"),
    ),
    "a parameter with gaps": (
        lambda: [p(3), torch.nn.Parameter(torch.ones(10)[::2])],
        *(ValueError, r"'param 1' does not fill its memory .*contiguous\(\)"),
    ),
    "a parameter that repeats one element": (
        lambda: [torch.nn.Parameter(torch.ones(1).expand(4))],
        *(ValueError, "'param 0' does not fill its memory"),
    ),
    "a tensor that wraps others": (
        lambda: [p(4), wrapper()],
        *(TypeError, "'param 1' is a TwoTensor.*pass plain tensors"),
    ),
    "a functional optimizer class": (
        lambda: {"optimizer_class": functional_class()},
        *(ValueError, "has to make a torch.optim.Optimizer, but it made a _FunctionalAdam"),
    ),
    "an optimizer in place of its class": (
        lambda: {"optimizer_class": Adam([p(4)])},
        TypeError,
        "optimizer_class must be a class.* not an object of type Adam; pass the class",
    ),
    "the name of a class": (
        lambda: {"optimizer_class": "Adam"},
        *(TypeError, "optimizer_class must be a class.* not an object of type str"),
    ),
    "an optimizer class that couples all parameters": (
        lambda: {"optimizer_class": torch.optim.LBFGS},
        *(ValueError, "LBFGS couples all parameters.*unsharded"),
    ),
    "a module in DDP": (
        lambda: around(DDP(torch.nn.Linear(4, 4))),
        *(ValueError, "module= replaces DDP.* pass the module inside"),
    ),
    "a module with DDP inside": (
        lambda: around(torch.nn.Sequential(DDP(torch.nn.Linear(4, 4)))),
        *(ValueError, "module= replaces DDP.* '0'"),
    ),
    "a learning rate in the place of a process group": (
        lambda: {"process_group": 0.1},
        *(TypeError, "process_group must be a ProcessGroup, not float"),
    ),
    "a mesh in the place of a process group": (
        lambda: {"process_group": init_device_mesh("cpu", (2,))},
        *(TypeError, r"not DeviceMesh; .*get_group\(\)"),
    ),
    "an unknown layout": (
        lambda: {"layout": "slices"},
        *(ValueError, "layout must be 'auto', 'sliced' or 'whole', not 'slices'"),
    ),
    "buckets of no bytes": (
        lambda: {"bucket_bytes": 0},
        *(ValueError, "bucket_bytes must be positive, not 0"),
    ),
    "a negative learning rate": (lambda: {"lr": -1.0}, ValueError, "-1.0"),
    "a negative learning rate of a group's class": (
        lambda: [{"params": [p(4, 4)], "optimizer_class": torch.optim.Muon, "lr": -1.0}],
        *(ValueError, "(?i)learning rate"),
    ),
    "recoverable without a module": (
        lambda: {"recoverable": True},
        *(ValueError, "recoverable=True needs module="),
    ),
    "an option with a letter missing": (
        lambda: {"modul": torch.nn.Linear(2, 2)},
        *(TypeError, "no argument 'modul'; did you mean 'module'"),
    ),
    "a switch in the place of a module": (
        lambda: {"module": True},
        *(TypeError, "module must be a torch.nn.Module, not True"),
    ),
    "bytes in words": (
        lambda: {"bucket_bytes": "25MB"},
        *(TypeError, "bucket_bytes must be an int, not '25MB'"),
    ),
    "an option the class does not have": (lambda: {"beta": 3}, TypeError, "'beta'"),
}

#: What upstream does not have, or takes as it is.
OURS_ALONE = {"layout", "bucket_bytes", "module", "process_group", "recoverable"}

#: Where upstream's type is an accident (it compares type names first) we do as torch.optim does.
UPSTREAM_S_OWN = {"a number in a group": ValueError}


def construct_bad(case: str) -> None:
    build(**arguments(BAD[case][0]()))


def test_bad_input_is_refused_on_every_rank() -> None:
    cases = [(construct_bad, error, match, case) for case, (_, error, match) in BAD.items()]
    for (_, error, *_), seen in zip(cases, each_raises_on_every_rank(2, cases), strict=True):
        assert {kind for kind, _ in seen} == {error.__name__}, "exactly this type"


@on_ranks(2)
def test_the_error_types_are_upstream_s_where_upstream_raises() -> None:
    raised: dict[str, type[Exception]] = {}
    for case, (make, _, _) in BAD.items():
        given = {"optimizer_class": SGD, **arguments(make())}
        if OURS_ALONE & given.keys():
            continue
        if given["optimizer_class"] is SGD:
            given.setdefault("lr", 0.1)
        try:
            Upstream(**given)
        except Exception as error:
            raised[case] = type(error)
    assert len(raised) >= 12, "upstream was expected to refuse most of these"
    assert raised == {case: BAD[case][1] for case in raised} | UPSTREAM_S_OWN


def construct_bad_on_rank_1(case: str) -> None:
    build(**arguments(BAD[case][0]() if dist.get_rank() == 1 else [p(4)]))


ON_ONE_RANK = [
    "an empty list",
    "a bare tensor",
    "a sparse parameter",
    "a parameter on the meta device",
    "a parameter that is no leaf",
    "an unknown layout",
    "a functional optimizer class",
    "a negative learning rate",
    "an option the class does not have",
]


def test_bad_input_on_one_rank_is_its_own_error_there_and_reported_elsewhere() -> None:
    errors = [(BAD[case][1], RuntimeError) for case in ON_ONE_RANK]
    cases = [
        (construct_bad_on_rank_1, either, BAD[case][2], case)
        for case, either in zip(ON_ONE_RANK, errors, strict=True)
    ]
    for (error, _), seen in zip(errors, each_raises_on_every_rank(3, cases), strict=True):
        assert [kind for kind, _ in seen] == ["RuntimeError", error.__name__, "RuntimeError"]
        for rank in (0, 2):
            assert "failed on rank 1, so it fails on every rank" in seen[rank][1]
            assert error.__name__ in seen[rank][1]
