"""Bad input: every rank raises, within seconds, and the message says what, where and what to do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import raises_on_every_rank, run_ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.optim import ZeroRedundancyOptimizer as Upstream
from torch.nn.parallel import DistributedDataParallel as DDP

from shardstep import ZeroRedundancyOptimizer
from shardstep.comm import SoloComm
from shardstep.comm.consensus import run_on_all_ranks

#: Enough for ranks to start on a busy machine; a hang is reported long before pytest's timeout.
SECONDS = 20.0

SGD, Adam = torch.optim.SGD, torch.optim.Adam


def p(*shape: int, dtype: torch.dtype = torch.float32, trainable: bool = True) -> torch.Tensor:
    return torch.nn.Parameter(torch.ones(shape, dtype=dtype), requires_grad=trainable)


def build(params: Any, optimizer_class: Any = SGD, **options: Any) -> ZeroRedundancyOptimizer:
    if optimizer_class is SGD:
        options.setdefault("lr", 0.1)
    return ZeroRedundancyOptimizer(params, optimizer_class, **options)


def around(module: torch.nn.Module) -> dict[str, Any]:
    """What hands over a DDP wrapper, or what is around one, in place of the module inside."""
    return {"params": module.parameters(), "module": module}


# -------------------------------------------------------------------- ranks that differ

Differing = dict[str, tuple[Callable[[int], dict[str, Any]], str, str]]

#: What rank 0 and rank 1 are given, and how the message shows each view.
DIFFERENT: Differing = {
    "one parameter less": (
        lambda rank: {"params": [p(4), p(5), p(6)][: 3 - rank]},
        r"'param 2' \(shape \(6,\)",
        "",
    ),
    "one parameter more": (
        lambda rank: {"params": [p(4), p(5), p(6)][: 2 + rank]},
        "",
        r"'param 2' \(shape \(6,\)",
    ),
    "another shape": (
        lambda rank: {"params": [p(4), p(5 + rank, 3), p(7 + rank)]},
        r"'param 1' \(shape \(5, 3\)",
        r"'param 1' \(shape \(6, 3\)",
    ),
    "the same number of elements in another shape": (
        lambda rank: {"params": [p(4), p(6, 4) if rank else p(4, 6)]},
        r"'param 1' \(shape \(4, 6\)",
        r"'param 1' \(shape \(6, 4\)",
    ),
    "another dtype": (
        lambda rank: {"params": [p(4), p(5, dtype=[torch.float32, torch.bfloat16][rank])]},
        "'param 1' .*float32",
        "'param 1' .*bfloat16",
    ),
    "another order of named parameters": (
        lambda rank: {"params": [("a", p(4)), ("b", p(9)), ("c", p(9))][:: [1, -1][rank]]},
        "'a'",
        "'c'",
    ),
    "another memory format": (
        lambda rank: {
            "params": [
                p(4),
                torch.nn.Parameter(
                    torch.ones(2, 3, 4, 5).to(
                        memory_format=[torch.contiguous_format, torch.channels_last][rank]
                    )
                ),
            ]
        },
        r"'param 1' \(shape \(2, 3, 4, 5\)",
        r"'param 1' .*stride \(60, 1, 15, 3\)",
    ),
    "a frozen parameter": (
        lambda rank: {"params": [p(4), p(5, trainable=rank == 0)]},
        r"'param 1' \([^)]*\)[^)]*group 0\)",
        "'param 1' .*frozen",
    ),
    "another split into groups": (
        lambda rank: {
            "params": [{"params": [p(4), p(5)][: 2 - rank]}, {"params": [p(5), p(6)][1 - rank :]}]
        },
        r"'param 1' .*group 0\)",
        r"'param 1' .*group 1\)",
    ),
    "one group less": (
        lambda rank: {
            "params": [{"params": [p(4), p(5)]}]
            if rank
            else [{"params": [p(4)]}, {"params": [p(5)]}]
        },
        "group 1",
        "",
    ),
    "another learning rate": (
        lambda rank: {"params": [p(4)], "lr": [0.1, 0.2][rank]},
        r"options of group 0: .*lr=0\.1",
        r"options of group 0: .*lr=0\.2",
    ),
    "another learning rate in the second group": (
        lambda rank: {"params": [{"params": [p(4)]}, {"params": [p(5)], "lr": 0.5 + rank}]},
        r"options of group 1: .*lr=0\.5",
        r"options of group 1: .*lr=1\.5",
    ),
    "another optimizer class": (
        lambda rank: {"params": [p(4)], "optimizer_class": [SGD, Adam][rank]},
        "SGD",
        "Adam",
    ),
    "another layout": (
        lambda rank: {"params": [p(40, 40), p(9)], "layout": ["sliced", "whole"][rank]},
        "sliced",
        "whole",
    ),
    "another bucket size": (
        lambda rank: {"params": [p(200, 200), p(200, 200)], "bucket_bytes": [1, 2**20][rank]},
        r"bucket_bytes=1\b",
        "bucket_bytes=1048576",
    ),
}


def construct_differing(case: str) -> None:
    build(**DIFFERENT[case][0](min(1, dist.get_rank())))


@pytest.mark.parametrize("case", DIFFERENT)
def test_ranks_that_were_given_different_things_all_say_what_differs(case: str) -> None:
    _, here, there = DIFFERENT[case]
    seen = raises_on_every_rank(
        construct_differing,
        2,
        ValueError,
        case,
        match=f"rank 0 has .*{here}.* where rank 1 has .*{there}.*on all ranks",
        timeout=SECONDS,
    )
    assert len(set(seen)) == 1, "all ranks say the same"


def construct_with_one_that_differs(which: int) -> None:
    build([p(4), p(5 + (dist.get_rank() == which))])


def test_the_rank_that_differs_is_named() -> None:
    raises_on_every_rank(
        construct_with_one_that_differs,
        3,
        ValueError,
        2,
        match=r"rank 0 has 'param 1' \(shape \(5,\).* where rank 2 has 'param 1' \(shape \(6,\)",
        timeout=SECONDS,
    )


# ------------------------------------------------------------------------ bad everywhere


def functional_class() -> Any:
    from torch.distributed.optim.utils import functional_optim_map

    return functional_optim_map[Adam]


def sharing() -> list[torch.Tensor]:
    memory = torch.ones(100)
    return [p(3), torch.nn.Parameter(memory[:60]), torch.nn.Parameter(memory[59:])]


def twice() -> list[torch.Tensor]:
    param = p(4)
    return [param, p(5), param]


def twice_across_groups() -> list[dict[str, Any]]:
    param = p(4)
    return [{"params": [param]}, {"params": [p(5), param]}]


def wrapper() -> torch.Tensor:
    from torch.testing._internal.two_tensor import TwoTensor

    return torch.nn.Parameter(TwoTensor(torch.ones(4), torch.ones(4)))


def sparse() -> torch.Tensor:
    return torch.eye(3).to_sparse().requires_grad_()


Bad = dict[str, tuple[Callable[[], dict[str, Any]], type[Exception], str]]

#: Bad parameters and options, the error, and what its message names.
BAD: Bad = {
    "an empty list": (lambda: {"params": []}, ValueError, "empty parameter list"),
    "an empty generator": (lambda: {"params": iter(())}, ValueError, "empty .*read once"),
    "a bare tensor": (lambda: {"params": p(4)}, TypeError, r"single tensor .*pass \[tensor\]"),
    "a module": (
        lambda: {"params": torch.nn.Sequential(torch.nn.Linear(4, 4))},
        TypeError,
        r"a module was given; pass its parameters\(\)",
    ),
    "a number": (lambda: {"params": 7}, TypeError, "iterable of tensors.* not a int"),
    "a list of numbers": (lambda: {"params": [1, 2]}, TypeError, "item 0 is a int"),
    "a number among tensors": (lambda: {"params": [p(4), 2]}, TypeError, "item 1 is a int"),
    "tensors among groups": (
        lambda: {"params": [{"params": [p(4)]}, p(5)]},
        TypeError,
        "item 0 is a dict",
    ),
    "a group without params": (lambda: {"params": [{"lr": 1.0}]}, ValueError, "group 0 .*'params'"),
    "a number in a group": (lambda: {"params": [{"params": [p(4), 3]}]}, TypeError, "int"),
    "a parameter that is no leaf": (lambda: {"params": [p(4) * 2]}, ValueError, "non-leaf"),
    "a sparse parameter": (lambda: {"params": [sparse()]}, ValueError, "'param 0' is sparse"),
    "a sparse parameter among others": (
        lambda: {"params": [p(4), sparse()]},
        ValueError,
        "'param 1' is sparse",
    ),
    "a parameter twice": (lambda: {"params": twice()}, ValueError, "'param 2' is given twice"),
    "a parameter in two groups": (
        lambda: {"params": twice_across_groups()},
        ValueError,
        "more than one parameter group|given twice",
    ),
    "a parameter on the meta device": (
        lambda: {"params": [p(3), torch.nn.Parameter(torch.ones(4, device="meta"))]},
        ValueError,
        "'param 1' is on the meta device .*materialise",
    ),
    "parameters that share memory": (
        lambda: {"params": sharing()},
        ValueError,
        "'param 1' and 'param 2' share memory.*storage of their own",
    ),
    "a parameter with gaps": (
        lambda: {"params": [p(3), torch.nn.Parameter(torch.ones(10)[::2])]},
        ValueError,
        r"'param 1' does not fill its memory .*contiguous\(\)",
    ),
    "a parameter that repeats one element": (
        lambda: {"params": [torch.nn.Parameter(torch.ones(1).expand(4))]},
        ValueError,
        "'param 0' does not fill its memory",
    ),
    "a tensor that wraps others": (
        lambda: {"params": [p(4), wrapper()]},
        TypeError,
        "'param 1' is a TwoTensor.*pass plain tensors",
    ),
    "a functional optimizer class": (
        lambda: {"params": [p(4)], "optimizer_class": functional_class()},
        ValueError,
        "has to make a torch.optim.Optimizer, but it made a _FunctionalAdam",
    ),
    "an optimizer in place of its class": (
        lambda: {"params": [p(4)], "optimizer_class": Adam([p(4)])},
        TypeError,
        "optimizer_class has to be a class.* not an object of type Adam; pass the class",
    ),
    "the name of a class": (
        lambda: {"params": [p(4)], "optimizer_class": "Adam"},
        TypeError,
        "optimizer_class has to be a class.* not an object of type str",
    ),
    "an optimizer class that couples all parameters": (
        lambda: {"params": [p(4)], "optimizer_class": torch.optim.LBFGS},
        ValueError,
        "LBFGS couples all parameters.*unsharded",
    ),
    "a module in DDP": (
        lambda: around(DDP(torch.nn.Linear(4, 4))),
        ValueError,
        "module= replaces DDP.* pass the module inside",
    ),
    "a module with DDP inside": (
        lambda: around(torch.nn.Sequential(DDP(torch.nn.Linear(4, 4)))),
        ValueError,
        "module= replaces DDP.* '0'",
    ),
    "a learning rate in the place of a process group": (
        lambda: {"params": [p(4)], "process_group": 0.1},
        TypeError,
        "process_group has to be a ProcessGroup, not a float",
    ),
    "a mesh in the place of a process group": (
        lambda: {"params": [p(4)], "process_group": init_device_mesh("cpu", (2,))},
        TypeError,
        r"not a DeviceMesh; .*get_group\(\)",
    ),
    "an unknown layout": (
        lambda: {"params": [p(4)], "layout": "slices"},
        ValueError,
        "layout must be 'auto', 'sliced' or 'whole', not 'slices'",
    ),
    "buckets of no bytes": (
        lambda: {"params": [p(4)], "bucket_bytes": 0},
        ValueError,
        "bucket_bytes has to be positive, not 0",
    ),
    "a negative learning rate": (lambda: {"params": [p(4)], "lr": -1.0}, ValueError, "-1.0"),
    "an option the class does not have": (
        lambda: {"params": [p(4)], "beta": 3},
        TypeError,
        "'beta'",
    ),
}

#: What upstream does not have, or takes as it is.
OURS_ALONE = {"layout", "bucket_bytes", "module", "process_group"}

#: Where upstream's type is an accident (it compares type names first) we do as torch.optim does.
UPSTREAM_S_OWN = {"a number in a group": ValueError}


def construct_bad(case: str) -> None:
    build(**BAD[case][0]())


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_refused_on_every_rank(case: str) -> None:
    _, error, message = BAD[case]
    seen = raises_on_every_rank(construct_bad, 2, error, case, match=message, timeout=SECONDS)
    assert {kind for kind, _ in seen} == {error.__name__}, "exactly this type"


def upstream_types() -> dict[str, type[Exception]]:
    raised: dict[str, type[Exception]] = {}
    for case, (make, _, _) in BAD.items():
        arguments = {"optimizer_class": SGD, **make()}
        if OURS_ALONE & arguments.keys():
            continue
        if arguments["optimizer_class"] is SGD:
            arguments.setdefault("lr", 0.1)
        try:
            Upstream(**arguments)
        except Exception as error:
            raised[case] = type(error)
    return raised


def test_the_error_types_are_upstream_s_where_upstream_raises() -> None:
    for raised in run_ranks(upstream_types, 2):
        assert len(raised) >= 12, "upstream was expected to refuse most of these"
        assert raised == {case: BAD[case][1] for case in raised} | UPSTREAM_S_OWN


def construct_bad_on_rank_1(case: str) -> None:
    build(**BAD[case][0]() if dist.get_rank() == 1 else {"params": [p(4)]})


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


@pytest.mark.parametrize("case", ON_ONE_RANK)
def test_bad_input_on_one_rank_is_its_own_error_there_and_reported_elsewhere(case: str) -> None:
    _, error, message = BAD[case]
    seen = raises_on_every_rank(
        construct_bad_on_rank_1, 3, (error, RuntimeError), case, match=message, timeout=SECONDS
    )
    assert [kind for kind, _ in seen] == ["RuntimeError", error.__name__, "RuntimeError"]
    for rank in (0, 2):
        assert "failed on rank 1, so it fails on every rank" in seen[rank][1]
        assert error.__name__ in seen[rank][1]


# -------------------------------------------------------------------------- adding a group

BAD_GROUPS: dict[str, tuple[Callable[[list[torch.Tensor]], dict[str, Any]], type[Exception]]] = {
    "something that is no tensor": (lambda params: {"params": [p(4), 3]}, TypeError),
    "a sparse parameter": (lambda params: {"params": [sparse()]}, ValueError),
    "a parameter it has already": (lambda params: {"params": [params[0]]}, ValueError),
    "memory it has already": (
        lambda params: {"params": [torch.nn.Parameter(params[0].detach())]},
        ValueError,
    ),
    "a set, which has no order": (lambda params: {"params": {p(4), p(5)}}, TypeError),
}


def take_step(params: list[torch.Tensor], optimizer: torch.optim.Optimizer, step: int) -> None:
    for index, param in enumerate(params):
        generator = torch.Generator().manual_seed(100 * step + index)
        param.grad = torch.rand(param.shape, generator=generator)
    optimizer.step()


def add_bad_group(case: str, where: str, view: bool) -> tuple[str, str]:
    """Adds a bad group, then goes on as if nothing had been; returns the error."""
    params, plain = ([p(30, 30), p(9)] for _ in range(2))
    opt = build(params, Adam, parameters_as_bucket_view=view, lr=0.1)
    reference = Adam(plain, lr=0.1)
    take_step(params, opt, 0)
    take_step(plain, reference, 0)
    before = opt.plan.fingerprint, [param.data_ptr() for param in params]
    rank = dist.get_rank()
    group: dict[str, Any] = {"params": [p(4)]}
    if case == "another shape":
        group = {"params": [p(4 + rank)]}
    elif where == "everywhere" or rank == 1:
        group = BAD_GROUPS[case][0](params)
    try:
        opt.add_param_group(group)
    except Exception as error:
        seen = type(error).__name__, str(error)
    else:
        raise AssertionError("the group was taken")
    assert (opt.plan.fingerprint, [param.data_ptr() for param in params]) == before
    assert [len(group["params"]) for group in opt.param_groups] == [2]
    assert len(opt.optim.param_groups) == 1
    # The next step, a good group and the step after that all work, with the right numbers.
    for optimizer, held in ((opt, params), (reference, plain)):
        take_step(held, optimizer, 1)
        held.append(p(200))
        optimizer.add_param_group({"params": [held[-1]], "lr": 0.5})
        take_step(held, optimizer, 2)
    for param, expected in zip(params, plain, strict=True):
        assert torch.equal(param, expected)
    return seen


@pytest.mark.parametrize("case", BAD_GROUPS)
@pytest.mark.parametrize("where", ["everywhere", "on rank 1"])
@pytest.mark.parametrize("view", [False, True])
def test_a_bad_group_is_refused_on_every_rank_and_changes_nothing(
    case: str, where: str, view: bool
) -> None:
    error = BAD_GROUPS[case][1]
    seen = run_ranks(add_bad_group, 2, case, where, view, timeout=SECONDS)
    elsewhere = error.__name__ if where == "everywhere" else "RuntimeError"
    assert [kind for kind, _ in seen] == [elsewhere, error.__name__]
    if where == "on rank 1":
        assert "add_param_group failed on rank 1" in seen[0][1]


def test_groups_that_differ_between_ranks_are_refused_and_change_nothing() -> None:
    for kind, message in run_ranks(add_bad_group, 2, "another shape", "", False, timeout=SECONDS):
        assert kind == "ValueError"
        assert "rank 0 has 'param 2' (shape (4,)" in message
        assert "rank 1 has 'param 2' (shape (5,)" in message


# ------------------------------------------------------------------------------- the state


def stepped() -> ZeroRedundancyOptimizer:
    params = [p(30, 30), p(9)]
    opt = build(params, Adam, lr=0.1)
    take_step(params, opt, 0)
    return opt


def consolidate(to: list[int]) -> None:
    opt = stepped()
    try:
        opt.consolidate_state_dict(to=to[dist.get_rank()])
    except Exception:
        opt.consolidate_state_dict(to=0)  # nobody is left waiting: the next call works
        assert dist.get_rank() or len(opt.state_dict()["state"]) == 2
        raise


@pytest.mark.parametrize("to", [7, 2, -1])
def test_consolidating_to_a_rank_that_is_not_there_is_refused(to: int) -> None:
    message = f"to={to} is not a rank of this group of 2 ranks"
    raises_on_every_rank(consolidate, 2, ValueError, [to, to], match=message, timeout=SECONDS)


def test_consolidating_to_different_ranks_is_refused() -> None:
    message = "consolidate_state_dict .*rank 0 has to=0 where rank 1 has to=1"
    raises_on_every_rank(consolidate, 2, ValueError, [0, 1], match=message, timeout=SECONDS)


def test_consolidating_to_a_missing_rank_on_one_rank_is_refused_on_all() -> None:
    seen = raises_on_every_rank(
        consolidate, 2, (ValueError, RuntimeError), [0, 7], match="to=7", timeout=SECONDS
    )
    assert [kind for kind, _ in seen] == ["RuntimeError", "ValueError"]
    assert "failed on rank 1" in seen[0][1]


def ask_for_state(consolidated_to: int | None) -> list[tuple[str, str]]:
    """What ours and upstream raise for `state_dict()`; rank `consolidated_to` gets the state."""
    ours = stepped()
    params = [p(30, 30), p(9)]
    theirs = Upstream(params, Adam, lr=0.1)
    take_step(params, theirs, 0)
    seen = []
    for opt in (ours, theirs):
        if consolidated_to is not None:
            opt.consolidate_state_dict(to=consolidated_to)
        try:
            opt.state_dict()
            seen.append(("", ""))
        except Exception as error:
            seen.append((type(error).__name__, str(error)))
    return seen


@pytest.mark.parametrize("consolidated_to", [None, 1])
def test_state_dict_without_consolidating_says_what_to_call_and_where(
    consolidated_to: int | None,
) -> None:
    for rank, (ours, theirs) in enumerate(run_ranks(ask_for_state, 2, consolidated_to)):
        assert ours[0] == theirs[0] == ("" if rank == consolidated_to else "RuntimeError")
        if rank != consolidated_to:
            assert f"consolidate_state_dict(to={rank}) on all 2 ranks" in ours[1]
            assert f"state_dict() on rank {rank}" in ours[1]


# ------------------------------------------------------------------------- sparse gradients


def step_on_sparse_gradient(layout: str) -> None:
    torch.manual_seed(0)
    table = torch.nn.Embedding(100, 8, sparse=True)
    twin = torch.nn.Embedding(100, 8, sparse=True)
    twin.load_state_dict(table.state_dict())
    opt = build(table.named_parameters(), SGD, layout=layout, lr=0.5)
    plain = SGD(twin.parameters(), lr=0.5)
    rows = torch.tensor([3, 50, 3, 99])
    for module in (table, twin):
        module(rows).pow(2).sum().backward()
    assert table.weight.grad is not None
    assert table.weight.grad.is_sparse
    try:
        opt.step()
        plain.step()
    except ValueError:
        # The optimizer is as it was: a dense gradient is taken the next time.
        assert torch.equal(table.weight, twin.weight)
        for module in (table, twin):
            assert module.weight.grad is not None
            module.weight.grad = module.weight.grad.to_dense()
        opt.step()
        plain.step()
        assert torch.equal(table.weight, twin.weight)
        raise
    assert torch.equal(table.weight, twin.weight)


def test_a_sparse_gradient_of_a_sliced_parameter_is_refused_on_every_rank() -> None:
    raises_on_every_rank(
        step_on_sparse_gradient,
        3,
        ValueError,
        "sliced",
        match="'weight' has a sparse gradient.*layout=\"whole\"",
        timeout=SECONDS,
    )


def test_a_sparse_gradient_of_a_whole_parameter_is_taken() -> None:
    run_ranks(step_on_sparse_gradient, 3, "whole", timeout=SECONDS)


# --------------------------------------------------------- ranks that have nothing to update


class AsksTheFirst(SGD):
    """Cannot do without parameters."""

    def step(self, closure: Any = None) -> Any:
        self.where = next(p for group in self.param_groups for p in group["params"]).device
        return super().step(closure)


class WantsClosure(SGD):
    def step(self, closure: Any = None) -> Any:
        if closure is None:
            raise ValueError("a closure, please")
        return super().step(closure)


def one_step(cls: Any, **options: Any) -> list[float]:
    params = [p(50), p(9, 9)]
    opt = ZeroRedundancyOptimizer(params, cls, lr=0.5, **options)
    for param in params:
        param.grad = torch.ones_like(param)
    opt.step(lambda: 0.0)
    return torch.cat([param.detach().flatten() for param in params]).unique().tolist()


@pytest.mark.parametrize("layout", ["auto", "sliced", "whole"])
def test_a_class_that_cannot_do_without_parameters_is_refused_where_a_rank_has_none(
    layout: str,
) -> None:
    assert run_ranks(one_step, 2, AsksTheFirst, layout=layout) == [[0.5]] * 2
    match = "owns no parameters, and AsksTheFirst cannot step without any"
    raises_on_every_rank(
        one_step,
        5,
        (ValueError, RuntimeError),
        AsksTheFirst,
        layout=layout,
        match=match,
        timeout=SECONDS,
    )


def test_a_class_that_can_do_without_them_is_not() -> None:
    assert run_ranks(one_step, 5, SGD) == [[0.5]] * 5
    assert run_ranks(one_step, 5, WantsClosure) == [[0.5]] * 5
    groups = run_ranks(step_of_two_classes, 5)
    assert groups == [groups[0]] * 5


def step_of_two_classes() -> list[float]:
    params = [p(50), p(9, 9)]
    groups = [{"params": params[:1], "optimizer_class": Adam, "lr": 0.5}, {"params": params[1:]}]
    opt = ZeroRedundancyOptimizer(groups, SGD, lr=0.5)
    for param in params:
        param.grad = torch.ones_like(param)
    opt.step()
    return torch.cat([param.detach().flatten() for param in params]).unique().tolist()


def wrap_in_ddp_afterwards() -> None:
    module = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    optimizer = build(module.parameters(), module=module)
    wrapped = DDP(module)
    for _ in range(2):
        wrapped(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def test_ddp_around_a_module_of_an_optimizer_is_refused_and_named() -> None:
    raises_on_every_rank(wrap_in_ddp_afterwards, 2, RuntimeError, match="with module=, do not wrap")


def test_a_rank_of_torchrun_s_without_a_process_group_is_told_to_make_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # It would train alone, and so would each of the others, without a word.
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(RuntimeError, match=r"2 ranks.*init_process_group\(\) first"):
        build([p(4)])
    monkeypatch.setenv("WORLD_SIZE", "1")
    build([p(4)])


def test_a_name_that_is_not_known_is_answered_with_one_that_is() -> None:
    module = torch.nn.Linear(4, 4)
    optimizer = build(module.parameters())
    for ask in (optimizer.full_grad, optimizer.full_state, optimizer.full_master):
        with pytest.raises(ValueError, match=r"'weight' is not .*called 'param 0'; names are"):
            ask("weight")


class Alone(SoloComm):
    """A rank that the others have left, or have never followed, to a meeting."""

    def all_gather_bytes(self, payload: bytes) -> list[bytes]:
        raise RuntimeError("shardstep: rank 0: comparing notes with the other ranks failed: late")


def test_a_call_that_other_ranks_do_not_make_is_named_when_they_do_not_come() -> None:
    with pytest.raises(RuntimeError, match=r"late .*saving a checkpoint has to be .*every rank"):
        run_on_all_ranks(Alone(), "saving a checkpoint", lambda: None)


def test_state_that_is_assigned_is_refused_with_the_way_to_set_it() -> None:
    weight = p(4)
    optimizer: Any = build([weight])
    with pytest.raises(TypeError, match=r"sharded across ranks; set it with load_state_dict\(\)"):
        optimizer.state[weight] = {}
