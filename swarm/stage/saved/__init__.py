"""A stage's state on disk: checkpoints, whole ones, forks."""
