"""Support for `torch.distributed.checkpoint`.

Reading order: `stateful` (the wrapper `Sharded`), `placeholder` (one sharded tensor), `portable`
(nested state).
"""
