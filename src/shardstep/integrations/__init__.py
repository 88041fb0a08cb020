"""Adapters for training frameworks. Each module needs the package that it is named after.

`accelerate`, `lightning` and `trainer` (of Hugging Face Transformers). `import shardstep` imports
none of them.
"""
