"""A whole swarm in one process and in virtual time, faults, and what must hold meanwhile."""
