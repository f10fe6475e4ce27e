"""The life of one micro-batch request at one stage peer, as a table."""

from __future__ import annotations

from swarm.lifecycle.table import Table

#: downstream: the next stage (or, at the last stage, the loss) holds the outputs. accumulated and passed both answer
#: the caller with the input gradient; only the former put the parameters' gradient into the accumulator.
MICRO_BATCH = Table(
    "micro-batch",
    "received",
    {
        ("received", "forward"): "forward",
        ("forward", "sent"): "downstream",
        ("downstream", "gradient"): "backward",
        ("backward", "accumulate"): "accumulated",
        ("backward", "pass"): "passed",
        ("forward", "evaluated"): "evaluated",
        ("downstream", "evaluated"): "evaluated",
        ("received", "fail"): "failed",
        ("forward", "fail"): "failed",
        ("downstream", "fail"): "failed",
        ("backward", "fail"): "failed",
        ("received", "cancel"): "cancelled",
        ("forward", "cancel"): "cancelled",
        ("downstream", "cancel"): "cancelled",
        ("backward", "cancel"): "cancelled",
    },
)
