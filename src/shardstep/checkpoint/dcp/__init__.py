"""Support for `torch.distributed.checkpoint`.

Reading order: `stateful` (the wrapper `Sharded`), `survey` (the structure of the state on all
ranks), `placeholder` (one sharded tensor), `portable` (nested state).
"""
