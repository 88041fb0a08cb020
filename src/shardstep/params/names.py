"""Names of parameters: without the prefixes of wrappers, and listed in messages."""

from __future__ import annotations

from collections.abc import Iterable

import torch

_INSIDE = ("_orig_mod.", "_checkpoint_wrapped_module.", "_fsdp_wrapped_module.")
"""Prefixes that torch.compile, activation checkpointing and FSDP add, at any depth."""


def names_in(module: torch.nn.Module) -> dict[int, str]:
    """Return the name of each parameter of `module`, by the parameter's id."""
    return {id(param): name for name, param in module.named_parameters()}


def unwrapped(model: torch.nn.Module) -> torch.nn.Module:
    """Return the user's module inside DDP and torch.compile."""
    from torch.nn.parallel import DistributedDataParallel

    while True:
        wrapper = "module" if isinstance(model, DistributedDataParallel) else "_orig_mod"
        inner = getattr(model, wrapper, None)
        if not isinstance(inner, torch.nn.Module):
            return model
        model = inner


def unwrapped_name(name: str) -> str:
    """Return a name without the prefixes of wrapped submodules."""
    for wrapper in _INSIDE:
        name = name.replace(wrapper, "")
    return name


def strip_wrapper_prefixes(names: Iterable[str], ddp: bool = True) -> list[str]:
    """Return the names of all parameters without wrappers' prefixes. DDP's is on all or none."""
    found = [unwrapped_name(name) for name in names]
    if ddp and all(name.startswith("module.") for name in found):
        found = [name.removeprefix("module.") for name in found]
    return found


def shorten_list(names: Iterable[str]) -> str:
    """Return the first few names, for a message."""
    listed = list(names)
    shown = ", ".join(map(repr, listed[:5]))
    return shown if len(listed) <= 5 else f"{shown} and {len(listed) - 5} more"
