"""One stage's tensors: parameters, gradients, optimizer, compute thread and snapshots. No network."""
