"""Optimizer state on its way between ranks, and in and out of plain state dicts."""
