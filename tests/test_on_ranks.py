"""A test on ranks fails if one of them finds something, raises, or should and does not."""

from __future__ import annotations

import pytest
import torch.distributed as dist
from on_ranks import on_ranks
from ranks import RankFailure


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
