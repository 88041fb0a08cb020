"""The way tests start their ranks: values, failures and hangs all come back to the test."""

import inspect
import os
import random
import re
import threading
import time
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from on_ranks import on_ranks
from ranks import (
    GRACE,
    RankFailure,
    each_raises_on_every_rank,
    end_idle_processes,
    raises_on_every_rank,
    run_ranks,
)

import shardstep
from shardstep import ZeroRedundancyOptimizer

#: Seconds for ranks that are meant to hang, once the server that they are forked from has started.
HANG = 8.0


@pytest.fixture(autouse=True, scope="module")
def started() -> None:
    run_ranks(sum_of_ranks, 2)


def sum_of_ranks() -> float:
    value = torch.tensor(float(dist.get_rank()))
    dist.all_reduce(value)
    return value.item()


def echo(*args: Any, **kwargs: Any) -> tuple[int, Any, Any]:
    return dist.get_rank(), args, kwargs


def divide(by: int) -> float:
    return 1 / by


def divide_by_rank() -> float:
    return divide(dist.get_rank())


def sleep_on(rank: int) -> None:
    if dist.get_rank() == rank:
        time.sleep(1000)


def wait_for_nobody() -> None:
    if dist.get_rank() == 0:
        dist.all_reduce(torch.ones(1))
    else:
        time.sleep(1000)


def fail_while_others_wait() -> None:
    if dist.get_rank() == 1:
        raise KeyError("the cause")
    dist.all_reduce(torch.ones(1))


def die_on(rank: int, code: int) -> None:
    if dist.get_rank() == rank:
        os._exit(code)


def leave_a_thread() -> None:
    threading.Thread(target=time.sleep, args=(1000,)).start()


def refuse() -> None:
    raise ValueError(f"rank {dist.get_rank()} refuses")


def return_a_lambda() -> Any:
    return lambda: None


def settings() -> tuple[int, str | None, int]:
    return torch.get_num_threads(), os.environ.get("OMP_NUM_THREADS"), os.getpid()


CALLS: list[str | None] = []


def leave(trace: str | None) -> tuple[int, Any]:
    """Change what ``trace`` names, or else what is restored, and return what was found."""
    found = [*CALLS], warnings.filters[:], random.random(), torch.rand(1).item()
    CALLS.append(trace)
    match trace:
        case "environment":
            os.environ["TRACE"] = "left"
        case "folder":
            os.chdir("/")
        case "thread":
            threading.Thread(target=time.sleep, args=(1000,), daemon=True).start()
        case "dtype":
            torch.set_default_dtype(torch.float64)
        case "compiled":
            torch.compile(torch.neg, backend="eager")(torch.ones(1))
        case "patch":
            shardstep.optimizer.connect = None  # type: ignore[assignment]
        case "patched method":
            ZeroRedundancyOptimizer.zero_grad = None  # type: ignore[assignment,method-assign]
        case "module in a cache":
            torch.kept = torch.nn.Linear(1, 1)  # type: ignore[attr-defined]
        case None:
            warnings.simplefilter("error")
    return os.getpid(), found


TRACES = ["environment", "folder", "thread", "dtype", "compiled"]
TRACES += ["patch", "patched method", "module in a cache"]


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_all_reduce_spans_exactly_the_ranks_asked_for(world_size: int) -> None:
    total = world_size * (world_size - 1) / 2
    assert run_ranks(sum_of_ranks, world_size) == [total] * world_size


def test_values_come_back_in_rank_order_with_the_arguments_given() -> None:
    outcomes = run_ranks(echo, 3, 1, "two", three={"four": [5]})
    assert outcomes == [(rank, (1, "two"), {"three": {"four": [5]}}) for rank in range(3)]


def test_tensors_travel_bit_for_bit_both_ways() -> None:
    bits = torch.tensor([0x7FC00001, -0x80000000, 0x00000001, 0x3DCCCCCD, 0x7F800000])
    single = bits.to(torch.int32).view(torch.float32)  # NaN with payload, -0.0, denormal, 0.1, inf
    half = torch.randn(1000, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    for _, (back_single, back_half), _ in run_ranks(echo, 2, single, half):
        assert torch.equal(back_single.view(torch.int32), single.view(torch.int32))
        assert torch.equal(back_half.view(torch.int16), half.view(torch.int16))


def test_views_of_one_storage_come_back_as_views_of_one_storage() -> None:
    flat = torch.arange(6.0)
    [(_, (whole, part), _)] = run_ranks(echo, 1, flat, flat[2:4])
    part.zero_()
    assert whole.tolist() == [0, 1, 0, 0, 4, 5]


def test_every_rank_is_a_process_with_one_thread_which_is_new_on_demand() -> None:
    outcomes = run_ranks(settings, 2) + run_ranks(settings, 2, fresh=True)
    assert {outcome[:2] for outcome in outcomes} == {(1, "1")}
    assert len({pid for *_, pid in outcomes} | {os.getpid()}) == 5


def test_processes_are_used_again_by_any_number_of_ranks() -> None:
    four = {pid for *_, pid in run_ranks(settings, 4)}
    assert {pid for *_, pid in run_ranks(settings, 2) + run_ranks(settings, 3)} <= four


@pytest.mark.parametrize("trace", TRACES)
def test_a_process_in_which_a_call_left_a_trace_is_not_used_again(trace: str) -> None:
    [(pid, _)] = run_ranks(leave, 1, trace)
    [(another, _)] = run_ranks(leave, 1, None)
    assert another != pid


def test_globals_of_test_modules_warnings_and_seeds_are_as_new_in_every_call() -> None:
    pids, seen = zip(*(run_ranks(leave, 1, None)[0] for _ in range(2)), strict=True)
    assert pids[0] == pids[1]
    assert seen[0] == seen[1]


@pytest.mark.slow
def test_nothing_is_left_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    end_idle_processes()
    before = os.listdir("/proc/self/fd")
    pids = [pid for *_, pid in run_ranks(settings, 2)]
    with pytest.raises(RankFailure):
        run_ranks(divide_by_rank, 2)
    with pytest.raises(RankFailure):
        run_ranks(sleep_on, 2, 1, timeout=HANG)
    end_idle_processes()
    assert os.listdir("/proc/self/fd") == before
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
    assert list(tmp_path.glob("ranks-*")) == []


def test_failure_of_one_rank_is_reported_with_its_rank_and_traceback() -> None:
    with pytest.raises(RankFailure) as failure:
        run_ranks(divide_by_rank, 2)
    message = str(failure.value)
    assert message.startswith("1 of 2 ranks failed in divide_by_rank")
    assert re.search(r"---- rank 0 raised:\nTraceback(.|\n)*return 1 / by", message)
    assert message.endswith("division by zero")


def test_every_failed_rank_is_reported_the_cause_before_its_effects() -> None:
    started = time.monotonic()
    with pytest.raises(RankFailure) as failure:
        run_ranks(fail_while_others_wait, 3)
    message = str(failure.value)
    sections = re.findall(r"---- rank (\d) raised", message)
    assert sections[0] == "1"
    assert sorted(sections) == ["0", "1", "2"]
    assert "KeyError: 'the cause'" in message
    assert time.monotonic() - started < 60, "not by the timeout"


def test_value_that_cannot_be_pickled_is_a_failure_of_its_rank() -> None:
    with pytest.raises(RankFailure, match=r"rank 0 raised(.|\n)*pickle"):
        run_ranks(return_a_lambda, 1)


@pytest.mark.parametrize("code", [0, 3])
def test_rank_that_dies_silently_is_reported(code: int) -> None:
    with pytest.raises(RankFailure, match=f"rank 1 died with exit code {code}"):
        run_ranks(die_on, 2, 1, code)


@pytest.mark.slow
def test_hang_is_reported_within_the_timeout_with_its_rank_and_stack() -> None:
    started = time.monotonic()
    with pytest.raises(RankFailure) as failure:
        run_ranks(sleep_on, 2, 1, timeout=HANG)
    assert time.monotonic() - started < 60
    message = str(failure.value)
    assert message.startswith("1 of 2 ranks failed in sleep_on")
    assert re.search(r"rank 1 was still running:(.|\n)*test_ranks.py.* in sleep_on", message)
    assert "rank 0" not in message


@pytest.mark.slow
def test_collective_that_hangs_gives_up_before_the_ranks_do() -> None:
    started = time.monotonic()
    with pytest.raises(RankFailure) as failure:
        run_ranks(wait_for_nobody, 2, timeout=HANG)
    assert time.monotonic() - started < 60
    message = str(failure.value)
    assert re.search(r"rank 0 raised:(.|\n)*in wait_for_nobody(.|\n)*RuntimeError", message)
    assert re.search(r"rank 1 was still running:(.|\n)*in wait_for_nobody", message)


@pytest.mark.slow
def test_rank_that_returns_but_does_not_exit_is_a_failure() -> None:
    with pytest.raises(RankFailure, match="rank 0 returned but did not exit"):
        run_ranks(leave_a_thread, 1, timeout=HANG)


def test_function_that_the_ranks_cannot_import_is_refused_with_the_remedy() -> None:
    with pytest.raises(TypeError, match="module-level"):
        run_ranks(lambda: None, 2)


def test_default_timeout_ends_the_ranks_before_pytest_ends_the_test(
    pytestconfig: pytest.Config,
) -> None:
    default = inspect.signature(run_ranks).parameters["timeout"].default
    assert default + GRACE < float(pytestconfig.getini("timeout"))


def test_raises_on_every_rank_returns_types_and_messages_in_rank_order() -> None:
    raised = raises_on_every_rank(refuse, 3, ValueError, match=r"rank \d refuses")
    assert raised == [("ValueError", f"rank {rank} refuses") for rank in range(3)]


def test_each_raises_on_every_rank_goes_on_once_all_have_raised() -> None:
    cases = [(refuse, ValueError, r"rank \d refuses"), (divide, ZeroDivisionError, None, 0)]
    raised = each_raises_on_every_rank(2, cases)
    assert raised[0] == [("ValueError", f"rank {rank} refuses") for rank in range(2)]
    assert raised[1] == [("ZeroDivisionError", "division by zero")] * 2
    with pytest.raises(RankFailure, match=r"rank 0 raised(.|\n)*divide returned 1\.0"):
        each_raises_on_every_rank(1, [*cases, (divide, ZeroDivisionError, None, 1)])


def test_raises_on_every_rank_fails_if_a_rank_returns() -> None:
    with pytest.raises(RankFailure, match=r"rank 1 raised(.|\n)*divide_by_rank returned 1\.0"):
        raises_on_every_rank(divide_by_rank, 2, ZeroDivisionError)


@pytest.mark.parametrize(("exception", "match"), [(TypeError, None), (ValueError, "accepts")])
def test_raises_on_every_rank_fails_on_another_error(exception: Any, match: Any) -> None:
    with pytest.raises(RankFailure, match="ValueError: rank 0 refuses"):
        raises_on_every_rank(refuse, 1, exception, match=match)


@pytest.mark.slow
def test_raises_on_every_rank_is_not_satisfied_by_a_connection_that_a_peer_closed() -> None:
    # Rank 1 raises LookupError, ranks 0 and 2 wait for it: its exit would make them RuntimeErrors.
    with pytest.raises(RankFailure, match="Timed out"):
        raises_on_every_rank(
            fail_while_others_wait,
            3,
            (LookupError, RuntimeError),
            match="cause|peer",
            timeout=HANG,
        )


def test_partial_of_a_module_level_function_runs() -> None:
    assert run_ranks(partial(echo, 1), 1) == [(0, (1,), {})]


@on_ranks(1, 2)
def finds(what: str) -> list[str]:
    if what == "nothing" or dist.get_rank() == 0:
        return []
    assert what != "an error"
    return [what]


@on_ranks(2, raises=ValueError, match="wanted")
def raises(message: str) -> None:
    if dist.get_rank() == 0 or message != "nothing":
        raise ValueError("wanted" if dist.get_rank() == 0 else message)


@pytest.mark.slow
def test_findings_errors_and_missing_errors_fail() -> None:
    finds("nothing", world_size=2)
    raises("wanted")
    with pytest.raises(AssertionError):
        finds("a finding", world_size=2)
    for fails, message in ((finds, "an error"), (raises, "nothing"), (raises, "other")):
        with pytest.raises(RankFailure):
            fails(message, **({"world_size": 2} if fails is finds else {}))
