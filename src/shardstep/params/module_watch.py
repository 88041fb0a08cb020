"""Notices parameters that a module was given after its optimizer was constructed."""

from __future__ import annotations

from collections.abc import Sequence
from operator import is_

import torch


class ModuleWatch:
    """The parameters and submodules of a module, remembered to see when they change.

    A look at an unchanged module compares identities only, without walking through it.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        self._module = module
        self._remember()

    def _remember(self) -> None:
        parts = [vars(part) for part in self._module.modules()]
        # Scripted modules keep them elsewhere, and cannot be changed.
        found = [part.get(key) for part in parts for key in ("_parameters", "_modules")]
        self._tables = [table for table in found if type(table) is dict]
        entries = [(table, *item) for table in self._tables for item in table.items()]
        self._in = [table for table, _, _ in entries]
        self._names = [name for _, name, _ in entries]
        self._values = [value for _, _, value in entries]

    def _unchanged(self) -> bool:
        now = map(dict.get, self._in, self._names)
        return sum(map(len, self._tables)) == len(self._values) and all(map(is_, now, self._values))

    def check(self, params: Sequence[torch.Tensor]) -> None:
        """Raise if a parameter that trains was put into the module and is not among `params`.

        Raises:
            ValueError: naming the parameter.
        """
        if self._unchanged():
            return
        known = set(map(id, params))
        for name, param in self._module.named_parameters():
            # torch.func.functional_call puts plain tensors in for the time of a call.
            trains = param.requires_grad and isinstance(param, torch.nn.Parameter)
            if trains and id(param) not in known:
                raise ValueError(
                    f"parameter {name!r} was put into the module after the optimizer was "
                    "constructed, so it would never be stepped; construct the optimizer after it, "
                    "pass it to add_param_group(), or freeze it"
                )
        self._remember()
