"""The demo of `shardstep demo`: a small GPT, its text, and the training runs it compares."""
