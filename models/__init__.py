"""Stage modules: what the engine in `swarm/` trains. Imports `swarm.base`, `swarm.stage` and `swarm.feed` only."""
