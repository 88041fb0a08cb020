"""Gradient sources: full gradients (ZeRO-1), or a reducer that shards them (ZeRO-2)."""
