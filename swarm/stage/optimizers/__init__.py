"""How parameters are updated. `interface.py` says what an optimizer is; `choice.py` picks the run's."""
