"""Names, errors, time and configuration. Knows nothing of torch, sockets or the protocol."""
