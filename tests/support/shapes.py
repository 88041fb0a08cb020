"""The shapes of well-known models, for plans on paper: no weight is ever allocated."""

from __future__ import annotations

import torch

from shardstep.plan import ParamSpec


def gpt2_124m() -> list[ParamSpec]:
    """GPT-2 small: 124,439,808 parameters, the output layer tied to the embedding."""
    width, layers = 768, 12
    shapes = {"wte.weight": (50257, width), "wpe.weight": (1024, width)}
    for layer in range(layers):
        shapes |= {
            f"h.{layer}.ln_1.weight": (width,),
            f"h.{layer}.ln_1.bias": (width,),
            f"h.{layer}.attn.c_attn.weight": (width, 3 * width),
            f"h.{layer}.attn.c_attn.bias": (3 * width,),
            f"h.{layer}.attn.c_proj.weight": (width, width),
            f"h.{layer}.attn.c_proj.bias": (width,),
            f"h.{layer}.ln_2.weight": (width,),
            f"h.{layer}.ln_2.bias": (width,),
            f"h.{layer}.mlp.c_fc.weight": (width, 4 * width),
            f"h.{layer}.mlp.c_fc.bias": (4 * width,),
            f"h.{layer}.mlp.c_proj.weight": (4 * width, width),
            f"h.{layer}.mlp.c_proj.bias": (width,),
        }
    shapes |= {"ln_f.weight": (width,), "ln_f.bias": (width,)}
    return [ParamSpec.of(name, shape) for name, shape in shapes.items()]


def llama3_8b() -> list[ParamSpec]:
    """Llama-3 8B: 8,030,261,248 parameters in bfloat16, with grouped-query attention."""
    width, hidden, keys, vocabulary, layers = 4096, 14336, 1024, 128256, 32
    shapes: dict[str, tuple[int, ...]] = {"embed_tokens.weight": (vocabulary, width)}
    for layer in range(layers):
        shapes |= {
            f"layers.{layer}.self_attn.q_proj.weight": (width, width),
            f"layers.{layer}.self_attn.k_proj.weight": (keys, width),
            f"layers.{layer}.self_attn.v_proj.weight": (keys, width),
            f"layers.{layer}.self_attn.o_proj.weight": (width, width),
            f"layers.{layer}.mlp.gate_proj.weight": (hidden, width),
            f"layers.{layer}.mlp.up_proj.weight": (hidden, width),
            f"layers.{layer}.mlp.down_proj.weight": (width, hidden),
            f"layers.{layer}.input_layernorm.weight": (width,),
            f"layers.{layer}.post_attention_layernorm.weight": (width,),
        }
    shapes |= {"norm.weight": (width,), "lm_head.weight": (vocabulary, width)}
    return [ParamSpec.of(name, shape, torch.bfloat16) for name, shape in shapes.items()]
