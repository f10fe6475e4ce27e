"""The life of a stage peer, as a table."""

from __future__ import annotations

from swarm.lifecycle.table import Table

#: waiting: no record lists it yet. syncing: it lacks its stage's state; averages queue for it. serving: it holds the
#: newest version and takes micro-batches. moving: a record lists it at another stage; it keeps its state until it has seen
#: live members at this one. draining: it finishes what it has and takes nothing new.
PEER = Table(
    "peer",
    "waiting",
    {
        ("waiting", "listed_ready"): "serving",
        ("waiting", "listed"): "syncing",
        ("waiting", "drain"): "draining",
        ("syncing", "synced"): "serving",
        ("syncing", "excluded"): "waiting",
        ("syncing", "drain"): "draining",
        ("serving", "excluded"): "waiting",
        ("serving", "fell_behind"): "waiting",
        ("serving", "moved"): "moving",
        ("serving", "drain"): "draining",
        ("moving", "moved"): "moving",
        ("moving", "listed_ready"): "serving",
        ("moving", "listed"): "syncing",
        ("moving", "excluded"): "waiting",
        ("moving", "drain"): "draining",
        ("draining", "excluded"): "draining",
        ("draining", "fell_behind"): "draining",
        ("draining", "drain"): "draining",
        ("draining", "synced"): "draining",
    },
)
