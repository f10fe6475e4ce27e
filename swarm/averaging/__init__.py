"""How the peers of one stage turn their gradient sums into one average, and hand state to newcomers."""
