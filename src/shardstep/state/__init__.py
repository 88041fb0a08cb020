"""Optimizer state on its way between ranks, and in and out of state dicts.

Reading order: `limits` (what may be claimed) and `tree` (state as text and tensors), `exchange`
(between ranks), `plain` (the dict of `torch.optim`), `follow` (from plan to plan), `outside` (other
programs' dicts) and `gaps` (what a dict lacks).
"""
