"""The whole swarm on one machine: its plan, its processes, what the terminal shows."""
