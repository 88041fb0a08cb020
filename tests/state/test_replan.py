"""State moves to another plan with its parameters."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from shardstep.comm import SoloComm
from shardstep.plan import ParamSpec, ShardPlan
from shardstep.state.replan import move_states


@pytest.mark.parametrize("options", [{}, {"fused": True}, {"capturable": True}])
def test_state_goes_with_a_parameter_that_leaves_the_cpu(options: dict[str, Any]) -> None:
    specs = [ParamSpec.of(name, shape) for name, shape in (("weight", (3, 4)), ("scale", ()))]
    before = ShardPlan.make(specs, 1)
    after = ShardPlan.make([replace(spec, device="meta#0") for spec in specs], 1)
    states = {
        number: {"step": torch.tensor(2.0), "exp_avg": torch.ones(spec.shape)}
        for number, spec in enumerate(specs)
    }
    params = [torch.empty(spec.shape, device="meta") for spec in specs]
    for state in move_states(SoloComm(), before, after, states, params, [options]).values():
        assert state["exp_avg"].device.type == "meta"
        assert state["step"].device.type == ("meta" if options else "cpu")
