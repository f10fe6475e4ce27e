"""Doubles of the network and of time, and whole swarms in virtual time. Nothing in the product imports it."""
