"""Slow and plain versions of what `shardstep` does, for its tests to compare with."""
