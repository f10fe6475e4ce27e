"""Pure state: transition tables, ledgers, claims, seals and the commit record. No I/O, no clock, no torch."""
