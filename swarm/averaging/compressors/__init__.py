"""What is sent of an average, and what is kept back. `interface.py` says what a compressor is; `choice.py` picks the run's."""
