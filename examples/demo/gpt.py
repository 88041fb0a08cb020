"""A compact GPT, for the demo and the benchmarks."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class GPTConfig:
    """The shape of a `GPT`.

    Attributes:
        vocab_size: number of tokens; 256 for bytes.
        block_size: length of the longest sequence.
        n_layer: number of transformer blocks.
        n_head: attention heads per block; divides `n_embd`.
        n_embd: width of the residual stream.
        tied: whether the output head shares the token embedding's weight.
    """

    vocab_size: int = 256
    block_size: int = 128
    n_layer: int = 4
    n_head: int = 4
    n_embd: int = 128
    tied: bool = True


GPT_17M = GPTConfig(vocab_size=4096, block_size=128, n_layer=8, n_head=6, n_embd=384, tied=False)
"""The model of the benchmarks: 17.4 million parameters."""


class GPT(nn.Module):
    """A decoder-only transformer with pre-norm blocks and learned positions.

    The initial weights depend on torch's global random state.

    Example:
        >>> model = GPT(GPTConfig(n_layer=1))
        >>> tokens = torch.zeros(2, 16, dtype=torch.long)
        >>> logits, loss = model(tokens, targets=tokens)
        >>> tuple(logits.shape)
        (2, 16, 256)
    """

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.tok = nn.Embedding(config.vocab_size, config.n_embd)
        self.pos = nn.Embedding(config.block_size, config.n_embd)
        self.blocks = nn.ModuleList(_Block(config) for _ in range(config.n_layer))
        self.norm = nn.LayerNorm(config.n_embd)
        self.head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        self.apply(_init_weights)
        # Each block adds twice to the residual stream: keep its variance independent of depth.
        for name, parameter in self.named_parameters():
            if name.endswith("out.weight"):
                nn.init.normal_(parameter, std=0.02 * (2 * config.n_layer) ** -0.5)
        if config.tied:
            self.head.weight = self.tok.weight

    def forward(self, idx: Tensor, targets: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """Return logits `(batch, time, vocab_size)`, and the mean cross-entropy with `targets`."""
        x = self.tok(idx) + self.pos(torch.arange(idx.shape[1], device=idx.device))
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        if targets is None:
            return logits, None
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten())


class _Block(nn.Module):
    """Causal self-attention and an MLP, each added to the residual stream."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        width = config.n_embd
        self.n_head = config.n_head
        self.attention_norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.attention_out = nn.Linear(width, width)
        self.mlp_norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.mlp_out = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        qkv = self.qkv(self.attention_norm(x)).unflatten(-1, (3, self.n_head, -1))
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # each batch, head, time, dim
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.attention_out(y.transpose(1, 2).flatten(2))
        x = x + self.mlp_out(F.gelu(self.up(self.mlp_norm(x))))
        return x


def _init_weights(module: nn.Module) -> None:
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)
