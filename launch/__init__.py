"""Command line, run files, logging, signals and processes; the only reader of `os.environ`. Knows no protocol.

No module here imports torch or transformers before the command line is known to be valid: `--help` and every mistake
answer at once.
"""
