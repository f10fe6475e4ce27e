"""Data: tokenisation, datasets, and which samples a ticket names. numpy only: no torch, no network."""
