"""Parameter groups of a GPT: matrices for Muon, the rest for AdamW."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn, optim

MUON = {"lr": 0.02, "weight_decay": 0.1}
ADAMW = {"lr": 0.003, "betas": (0.8, 0.95)}


def is_hidden(name: str, param: torch.Tensor) -> bool:
    """Whether Muon is to update it: matrices that are not embeddings."""
    return param.dim() == 2 and "emb" not in name and "head" not in name


def divided(module: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    named = list(module.named_parameters())
    hidden = [param for name, param in named if is_hidden(name, param)]
    rest = [param for name, param in named if not is_hidden(name, param)]
    assert hidden
    assert rest
    return hidden, rest


def groups_of(module: nn.Module) -> list[dict[str, Any]]:
    hidden, rest = divided(module)
    return [{"params": hidden, "optimizer_class": optim.Muon, **MUON}, {"params": rest}]
