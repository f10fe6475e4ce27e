"""From options and files to what a run is, on this machine. Knows no role's behaviour."""
