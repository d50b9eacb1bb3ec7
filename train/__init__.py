"""The training loop, its engine, checkpoints and progress."""
