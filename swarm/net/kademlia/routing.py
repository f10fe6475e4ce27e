"""Which nodes this one knows: kademlia's buckets, addresses that follow their node, patience for lost datagrams.

Owns contacts and their health. Must not know records or datagrams; only the RPC protocol tells it who answered.
"""

from __future__ import annotations

import functools
import heapq
import ipaddress
import math
from collections.abc import Callable
from typing import Any

from kademlia.node import Node
from kademlia.routing import RoutingTable

NODE_ID_BYTES = 20


class Contact(Node):
    """A node that has answered us at this address."""

    def __init__(self, node_id: bytes, ip: str, port: int, *, now: float) -> None:
        super().__init__(node_id, ip, port)
        self.seen_at = now
        #: Requests in a row that it left unanswered; requests that ran at the same time count once.
        self.misses = 0
        self.missed_at = -math.inf


class LiveRoutingTable(RoutingTable):
    """Buckets of contacts that answered. A node's newest proven address replaces its old one.

    Args:
        now: this node's monotonic clock in seconds.
        max_misses: a contact is dropped after so many unanswered requests in a row.
    """

    def __init__(self, protocol: Any, ksize: int, node: Node, *, now: Callable[[], float], max_misses: int) -> None:
        super().__init__(protocol, ksize, node)
        self._now = now
        self._max_misses = max_misses

    def contacts(self) -> list[Contact]:
        """All but those that wait for room."""
        return [contact for bucket in self.buckets for contact in bucket.nodes.values()]

    def contact(self, node_id: bytes) -> Contact | None:
        """The contact with this id; it may be one that waits for room in a full bucket."""
        bucket = self.buckets[self.get_bucket_for(Node(node_id))]
        found: Contact | None = bucket[node_id] or bucket.replacement_nodes.get(node_id)
        return found

    def heard_from(self, node_id: bytes, ip: str, port: int) -> Contact | None:
        """Note that `node_id` answered from this address; returns its contact if it is new or has moved here."""
        known = self.contact(node_id)
        if known is not None and (known.ip, known.port) == (ip, port):
            known.misses, known.seen_at = 0, self._now()
            return None
        if node_id == self.node.id:
            return None
        contact = Contact(node_id, ip, port, now=self._now())
        self.buckets[self.get_bucket_for(contact)].replacement_nodes.pop(node_id, None)
        self.add_contact(contact)
        return contact

    def suspect(self, node: Node) -> None:
        """Note that `node` is silent, before its request has failed: others are asked first, and it is probed soon."""
        known = self.contact(node.id) if node.id else None
        if known is not None and known.same_home_as(node) and not known.misses:
            known.misses = 1
            known.missed_at = self._now()

    def missed(self, node: Node, started_at: float) -> bool:
        """Note that a request to `node`, sent at `started_at`, got no answer; True if that was one too many."""
        known = self.contact(node.id)
        if known is None or not known.same_home_as(node) or started_at < max(known.missed_at, known.seen_at):
            return False
        known.misses += 1
        known.missed_at = self._now()
        if known.misses < self._max_misses:
            return False
        self.remove_contact(known)
        return True

    def add_contact(self, node: Contact) -> None:
        """Add or replace. In a full bucket a silent contact gives way; only this node's own bucket is split."""
        while True:
            index = self.get_bucket_for(node)
            bucket = self.buckets[index]
            if bucket.add_node(node):
                return
            silent = next((contact for contact in bucket.get_nodes() if contact.misses), None)
            if silent is not None:
                bucket.remove_node(silent)  # promotes `node`, the newest replacement
                return
            if not bucket.has_in_range(self.node) or bucket.range[0] == bucket.range[1]:
                return
            self.split_bucket(index)

    def get_bucket_for(self, node: Node) -> int:
        """Index of the bucket whose range, ends included, has the node."""
        return next(index for index, bucket in enumerate(self.buckets) if node.long_id <= bucket.range[1])

    def find_neighbors(self, node: Node, k: int | None = None, exclude: Node | None = None) -> list[Contact]:
        """The `k` contacts nearest to `node`, from all buckets; silent ones only if there is no other."""
        contacts = [
            contact
            for contact in self.contacts()
            if contact.id != node.id and (exclude is None or not contact.same_home_as(exclude))
        ]
        return heapq.nsmallest(
            k or self.ksize, [contact for contact in contacts if not contact.misses] or contacts, key=node.distance_to
        )


@functools.lru_cache(maxsize=16384)
def plausible_for(ip: str, other_ip: str) -> bool:
    """Whether `other_ip` can be expected to reach `ip`: nobody is told of loopback or private addresses from afar."""
    address, other = ipaddress.ip_address(ip), ipaddress.ip_address(other_ip)
    if address.is_unspecified or address.is_multicast:
        return False
    if address.is_loopback:
        return other.is_loopback
    return not (address.is_private and other.is_global)
