"""Pipeline-parallel swarm training over unreliable, unequal machines.

Layers, each importing only those before it:
base, wire, lifecycle, policy, net, stage, averaging, feed, peer.
"""
