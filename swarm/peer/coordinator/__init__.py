"""The coordinator's side: elections, leases, leaders of stages, who is listed next, lineage."""
