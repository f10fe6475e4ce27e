"""The trainer's side: leases, wiring, round trips of micro-batches, evaluation, reports."""
