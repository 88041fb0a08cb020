"""The parameters of well-known models, as functions of their architecture."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from shardstep.plan.spec import ParamSpec

Shapes = dict[str, tuple[int, ...]]


def gpt2(width: int, layers: int, vocabulary: int = 50257, context: int = 1024) -> Shapes:
    """Return the parameters of a GPT-2; its output layer is tied to the embedding."""
    shapes: Shapes = {"wte.weight": (vocabulary, width), "wpe.weight": (context, width)}
    block = {
        "ln_1": (width,),
        "attn.c_attn": (width, 3 * width),
        "attn.c_proj": (width, width),
        "ln_2": (width,),
        "mlp.c_fc": (width, 4 * width),
        "mlp.c_proj": (4 * width, width),
    }
    modules = {f"h.{n}.{name}": shape for n in range(layers) for name, shape in block.items()}
    for name, shape in (modules | {"ln_f": (width,)}).items():
        shapes |= {f"{name}.weight": shape, f"{name}.bias": shape[-1:]}
    return shapes


def llama(
    width: int,
    layers: int,
    hidden: int,
    keys: int,
    vocabulary: int = 128256,
    experts: int = 0,
    tied: bool = False,
) -> Shapes:
    """Return the parameters of a Llama; `keys` is the width of all key heads together.

    With `experts`, the feed-forward layers are those of a Mixtral.
    """
    shapes: Shapes = {"embed_tokens.weight": (vocabulary, width)}
    mlp = {"gate_proj": (hidden, width), "up_proj": (hidden, width), "down_proj": (width, hidden)}
    for layer in range(layers):
        block = f"layers.{layer}"
        for name, rows in {"q": width, "k": keys, "v": keys, "o": width}.items():
            shapes[f"{block}.self_attn.{name}_proj.weight"] = (rows, width)
        if experts:
            shapes[f"{block}.mlp.gate.weight"] = (experts, width)
        for expert in range(experts or 1):
            inside = f"experts.{expert}." if experts else ""
            for name, shape in mlp.items():
                shapes[f"{block}.mlp.{inside}{name}.weight"] = shape
        shapes[f"{block}.input_layernorm.weight"] = (width,)
        shapes[f"{block}.post_attention_layernorm.weight"] = (width,)
    shapes["norm.weight"] = (width,)
    if not tied:
        shapes["lm_head.weight"] = (vocabulary, width)
    return shapes


def resnet(blocks: tuple[int, ...] = (3, 4, 6, 3), classes: int = 1000) -> Shapes:
    """Return the parameters of a ResNet with bottleneck blocks."""
    shapes: Shapes = {}

    def convolve(name: str, norm: str, outputs: int, inputs: int, size: int) -> None:
        shapes[f"{name}.weight"] = (outputs, inputs, size, size)
        shapes.update({f"{norm}.weight": (outputs,), f"{norm}.bias": (outputs,)})

    convolve("conv1", "bn1", 64, 3, 7)
    inputs = 64
    for stage, depth in enumerate(blocks):
        width = 64 * 2**stage
        for number in range(depth):
            block = f"layer{stage + 1}.{number}"
            convolve(f"{block}.conv1", f"{block}.bn1", width, inputs, 1)
            convolve(f"{block}.conv2", f"{block}.bn2", width, width, 3)
            convolve(f"{block}.conv3", f"{block}.bn3", 4 * width, width, 1)
            if number == 0:
                convolve(f"{block}.downsample.0", f"{block}.downsample.1", 4 * width, inputs, 1)
            inputs = 4 * width
    return shapes | {"fc.weight": (classes, inputs), "fc.bias": (classes,)}


MODELS: dict[str, tuple[torch.dtype, Callable[[], Shapes]]] = {
    "gpt2-124m": (torch.float32, partial(gpt2, 768, 12)),
    "gpt2-355m": (torch.float32, partial(gpt2, 1024, 24)),
    "gpt2-774m": (torch.float32, partial(gpt2, 1280, 36)),
    "gpt2-1.5b": (torch.float32, partial(gpt2, 1600, 48)),
    "llama3-1b": (torch.bfloat16, partial(llama, 2048, 16, 8192, 512, tied=True)),
    "llama3-8b": (torch.bfloat16, partial(llama, 4096, 32, 14336, 1024)),
    "llama3-70b": (torch.bfloat16, partial(llama, 8192, 80, 28672, 1024)),
    "llama3-405b": (torch.bfloat16, partial(llama, 16384, 126, 53248, 1024)),
    "mixtral-8x7b": (
        torch.bfloat16,
        partial(llama, 4096, 32, 14336, 1024, vocabulary=32000, experts=8),
    ),
    "resnet50": (torch.float32, resnet),
}
"""Known models: the dtype that they are usually trained in, and their shapes."""


def model(name: str) -> list[ParamSpec]:
    """Return the parameters of a known model."""
    dtype, shapes = MODELS[name]
    return [ParamSpec.of(param, shape, dtype) for param, shape in shapes().items()]
