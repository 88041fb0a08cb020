"""Checkpoints in one process, without ranks: summarise, verify, reshard, export and import."""
