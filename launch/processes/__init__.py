"""How processes are started, watched, told to stop and heard. Knows no protocol."""
