"""Tiny models of the kinds that people train, and one way to train and save all of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import transformers as hf
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_model
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from frameworks.cells import compare
from shardstep import ZeroRedundancyOptimizer

Batch = Mapping[str, torch.Tensor]


def tokens() -> Batch:
    ids = torch.randint(2, 64, (2, 12))
    return {"input_ids": ids, "labels": ids}


def pixels() -> Batch:
    return {"pixel_values": torch.randn(2, 3, 32, 32), "labels": torch.randint(0, 3, (2,))}


SMALL = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
SMALL["num_attention_heads"] = 2
WORDS = {**SMALL, "vocab_size": 64}
LLAMA = hf.LlamaConfig(**WORDS, num_key_value_heads=1)
GPT2 = hf.GPT2Config(vocab_size=64, n_positions=16, n_embd=32, n_layer=2, n_head=2)
BERT = hf.BertConfig(**WORDS, max_position_embeddings=16)
SIZES = {"vocab_size": 64, "d_model": 32, "d_kv": 16, "d_ff": 48, "num_layers": 2, "num_heads": 2}
T5 = hf.T5Config(**SIZES, tie_word_embeddings=True, decoder_start_token_id=0)
VIT = hf.ViTConfig(**SMALL, image_size=32, patch_size=8, num_labels=3)
RESNET = hf.ResNetConfig(
    embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic", num_labels=3
)
MIXTRAL = hf.MixtralConfig(**WORDS, num_key_value_heads=1, num_local_experts=4)


def lora() -> nn.Module:
    options = LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj", "v_proj"], r=4)
    return get_peft_model(hf.LlamaForCausalLM(LLAMA), options)


class Kind(NamedTuple):
    """A model and what it is trained on."""

    make: Callable[[], nn.Module]
    batch: Callable[[], Batch] = tokens
    generates: bool = True
    checkpoints: bool = True


ZOO = {
    "GPT-2": Kind(lambda: hf.GPT2LMHeadModel(GPT2)),
    "Llama": Kind(lambda: hf.LlamaForCausalLM(LLAMA)),
    "BERT, pooler unused": Kind(lambda: hf.BertModel(BERT), generates=False),
    "T5, tied": Kind(lambda: hf.T5ForConditionalGeneration(T5)),
    "ViT": Kind(lambda: hf.ViTForImageClassification(VIT), pixels, generates=False),
    "ResNet": Kind(
        lambda: hf.ResNetForImageClassification(RESNET), pixels, generates=False, checkpoints=False
    ),
    "Mixtral": Kind(lambda: hf.MixtralForCausalLM(MIXTRAL)),
    "LoRA": Kind(lora),
}


def loss_of(model: nn.Module, batch: Batch) -> torch.Tensor:
    if isinstance(getattr(model, "module", model), hf.BertModel):
        return model(input_ids=batch["input_ids"]).last_hidden_state.square().mean()
    return model(**batch).loss


def trained(kind: Kind, way: str, folder: Path) -> dict[str, Any]:
    """Train, generate in between, save right after the last step; return all that can differ."""
    torch.manual_seed(5)
    model = kind.make()
    if kind.checkpoints:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    torch.manual_seed(5 + dist.get_rank())
    called: nn.Module = model
    if way != "module":
        called = DistributedDataParallel(model, find_unused_parameters=True)
    params = [param for param in model.parameters() if param.requires_grad]
    if way == "plain":
        opt: torch.optim.Optimizer = torch.optim.AdamW(params, lr=0.01)
    else:
        given = model if way == "module" else None
        opt = ZeroRedundancyOptimizer(params, torch.optim.AdamW, module=given, lr=0.01)
    losses, generated = [], None
    for step in range(3):
        loss = loss_of(called, kind.batch())
        loss.backward()
        opt.step()
        opt.zero_grad()
        losses.append(loss.detach())
        if step == 1 and kind.generates:
            model.eval()
            start = torch.full((1, 3), 7 + dist.get_rank())
            generated = model.generate(input_ids=start, max_new_tokens=4, do_sample=False)
            model.train()
    if dist.get_rank():  # only the first rank saves, at once, and waits for nobody
        return {"losses": losses, "generated": generated}
    model.save_pretrained(folder / way)
    save_model(model, str(folder / way / "saved.safetensors"))
    files = {path.name: load_file(path) for path in sorted((folder / way).glob("*.safetensors"))}
    return {"losses": losses, "generated": generated, "files": files}


def differences(names: list[str], folder: Path) -> dict[str, str]:
    """Train each model under DDP and sharded, and compare."""
    found = {}
    for name in names:
        plain = trained(ZOO[name], "plain", folder / name)
        for way in ("drop-in", "module"):
            found[f"{name}, {way}"] = compare(trained(ZOO[name], way, folder / name), plain)
    return found
