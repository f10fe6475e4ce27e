"""The side of who serves a stage: micro-batches, steps, averages, membership, state transfer."""
