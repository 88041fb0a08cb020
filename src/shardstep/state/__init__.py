"""Optimizer state on its way between ranks, and in and out of state dicts.

Reading order: `tree` (state as text and tensors), `exchange` (between ranks), `replan`
(from plan to plan), `torch_dict` and `named_dict` (the formats), `state_dict` and `view`.
"""
