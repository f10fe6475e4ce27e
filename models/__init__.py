"""Stage modules: what the engine in `swarm/` trains. Of `swarm` it imports `base`, `policy`, `stage` and `feed` only."""
