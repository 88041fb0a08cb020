"""The model, the optimizer and the precision that `shardstep plan` is asked about."""

from __future__ import annotations

import ast
import difflib
import importlib
import sys
from collections.abc import Sequence
from contextlib import redirect_stdout
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, Literal

import torch

from shardstep.checkpoint.offline.imports import weight_files
from shardstep.checkpoint.safetensors import File
from shardstep.layouts.choose import Layouts
from shardstep.layouts.cost import slice_state, tensor_state
from shardstep.layouts.recipe import OptimizerRecipe
from shardstep.local.multi_class import CLASS_KEY
from shardstep.plan import ParamSpec, StateSize, default_bucket_bytes
from shardstep.plan.methods import Job, block_of
from shardstep.plan.plan import MIN_BUCKET_BYTES
from shardstep.precision import MixedPrecision

Precision = Literal["own", "fp32", "bf16", "bf16-stochastic", "bf16-only"]
"""Dtype of the parameters, and masters."""

_DTYPES = {"own": None, "fp32": torch.float32}  # of the parameters, if not bf16

_POLICIES = {
    "bf16-stochastic": MixedPrecision(master_dtype=None, stochastic_rounding=True),
    "bf16-only": MixedPrecision(master_dtype=None),
}


def import_model(path: str) -> list[ParamSpec]:
    """Return the parameters of the module that a factory makes on the meta device."""
    factory = _import(path, "--import")
    try:
        with torch.device("meta"), redirect_stdout(sys.stderr):  # stdout is for the plan alone
            module = factory()
            if not isinstance(module, torch.nn.Module):
                raise TypeError(f"expected a torch.nn.Module, got {type(module)}")
            return [
                replace(
                    ParamSpec.of(name, tuple(param.shape), param.dtype),
                    stride=param.stride(),
                    trainable=param.requires_grad,
                )
                for name, param in module.named_parameters()
            ]
    except Exception as error:  # of the user's code
        raise ValueError(
            f"--import {path} failed on the meta device ({type(error).__name__}: {error}); "
            "expected a function without arguments that returns a torch.nn.Module"
        ) from error


def read_model(path: Path) -> list[ParamSpec]:
    """Return the floating-point tensors of safetensors: a file, an index, or a folder."""
    specs: list[ParamSpec] = []
    for file in weight_files(path)[0]:
        with File(file) as opened:
            specs += [
                ParamSpec.of(name, entry.shape, entry.dtype)
                for name, entry in opened.entries.items()
                if entry.dtype.is_floating_point
            ]
    return specs


def make_job(
    specs: Sequence[ParamSpec],
    optimizer: str,
    options: Sequence[str],
    precision: Precision,
    layout: str,
    backend: str,
    bucket_bytes: int | None,
) -> tuple[Job, list[str]]:
    """Find layouts and state by trying the class. Return also a line per group with the reason.

    `Muon+AdamW` means Muon for the matrices of the blocks, and AdamW for all other parameters.
    """
    if not specs:
        raise ValueError("the model has no floating-point parameters")
    classes = [_optimizer_class(name) for name in optimizer.split("+")]
    if len(classes) > 2:
        raise ValueError(f"--optimizer {optimizer}: expected one class, or two joined by +")
    defaults = dict(map(_option, options))
    specs = [
        replace(
            spec,
            dtype=(_is_real(spec) and _DTYPES.get(precision, torch.bfloat16)) or spec.dtype,
            group=int(len(classes) > 1 and not _is_block_matrix(spec)),
        )
        for spec in specs
    ]
    if len(classes) > 1 and all(spec.group == 1 for spec in specs):
        raise ValueError(
            f"--optimizer {optimizer}: the model has no matrix in a numbered block, such as "
            "'blocks.0.up.weight', for the first class; name one class only"
        )
    specs.sort(key=lambda spec: spec.group)
    groups: list[dict[str, Any]] = [{"params": []} for _ in classes]
    for spec in specs:
        param = torch.empty(spec.shape, dtype=spec.dtype, device="meta")
        groups[spec.group]["params"].append(torch.nn.Parameter(param, spec.trainable))
    if len(classes) > 1:
        groups[0][CLASS_KEY] = classes[0]
    policy = _POLICIES.get(precision, MixedPrecision())
    layouts = Layouts(layout, OptimizerRecipe(classes[-1], defaults), 2, policy)

    @cache
    def state_size(group: int, whole: tuple[int, ...] | None, dtype: torch.dtype) -> StateSize:
        recipe = layouts.choices[group].recipe
        return slice_state(recipe, dtype) if whole is None else tensor_state(recipe, whole, dtype)

    sizes = []
    try:
        specs = layouts.apply(groups, specs)
        for spec in specs:
            whole = spec.shape if spec.layout == "whole" else None
            dtype = policy.step_dtype(spec.dtype)
            sizes.append(state_size(spec.group, whole, dtype) if spec.trainable else StateSize())
    except Exception as error:  # of the class
        given = " ".join([f"--optimizer {optimizer}", *(f"--option {each}" for each in options)])
        text = [key for key, value in defaults.items() if isinstance(value, str)]
        remedy = f"; read as text: {', '.join(text)}" if text else ""
        if optimizer == "Muon" and any(map(_is_block_matrix, specs)):
            remedy += "; try --optimizer Muon+AdamW"
        raise ValueError(f"{given}: {error}{remedy}") from error
    bucket_bytes = bucket_bytes or default_bucket_bytes(specs, MIN_BUCKET_BYTES[backend])
    return Job(specs, policy, sizes, bucket_bytes), layouts.explain(groups)


def _is_real(spec: ParamSpec) -> bool:
    return spec.dtype.is_floating_point and spec.dtype.itemsize > 1


def _is_block_matrix(spec: ParamSpec) -> bool:
    return len(spec.shape) == 2 and bool(block_of(spec.name))


def _optimizer_class(name: str) -> Any:
    named = "." in name or ":" in name
    found = _import(name, "--optimizer") if named else getattr(torch.optim, name, None)
    if isinstance(found, type) and issubclass(found, torch.optim.Optimizer):
        return found
    if not named:
        known = {each.lower(): each for each in vars(torch.optim) if each[0].isupper()}
        near = difflib.get_close_matches(name.lower(), known, n=1, cutoff=0.75)
        meant = f"Did you mean {known[near[0]]}? " if near else ""
        raise ValueError(
            f"--optimizer {name}: torch.optim has no such class. {meant}Name any other class with "
            "its module, such as package.module.Class"
        )
    if isinstance(found, type) or not callable(found):
        raise ValueError(f"--optimizer {name}: expected a torch.optim.Optimizer, got {found!r}")
    return found  # a function that makes one


def _import(path: str, option: str) -> Any:
    module, colon, name = path.partition(":")
    if not colon:
        module, _, name = path.rpartition(".")
    if not (module and name):
        raise ValueError(f"{option} {path}: expected package.module:name")
    sys.path.insert(0, "")  # as `python -m` does
    try:
        found: Any = importlib.import_module(module)
        for part in name.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"{option} {path}: {error}") from error
    finally:
        sys.path.remove("")
    return found


def _option(text: str) -> tuple[str, Any]:
    key, equals, value = text.partition("=")
    if not equals:
        raise ValueError(f"--option {text}: expected name=value, such as momentum=0.9")
    try:
        return key, ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return key, value
