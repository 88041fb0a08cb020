"""Parameters as the optimizer shards them: validation, storage, this rank's pieces, masters."""
