"""Pure decisions `(snapshot, now) -> (decision, reason)`. No I/O, no clock, no global randomness."""
