"""The optimizer as a `Stateful` of `torch.distributed.checkpoint`.

Reading order: `stand_in` (a tensor that lies divided), `portable` (nested state) and `stateful`.
"""
