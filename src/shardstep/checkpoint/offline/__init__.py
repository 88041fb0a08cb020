"""Checkpoints in one process, without ranks: as plain dicts, looked at, cut anew, and from outside.

Reading order: `dicts` and `summary`; `reshard`; `export` and `scratch`; `importing` and `foreign`.
"""
