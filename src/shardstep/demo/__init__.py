"""A small language model trained twice, with and without sharding, to see the promise kept."""
