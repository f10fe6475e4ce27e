"""Contacts kept between two lives of a node, as JSON: a file that is only a hint, bounded and read with suspicion.

Must not know the DHT. Whatever is wrong with the file, the node starts without it.
"""

from __future__ import annotations

import ipaddress
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from swarm.base.errors import StorageError
from swarm.base.ids import Address
from swarm.base.replace_file import replace_file

MAX_CONTACTS = 64
_MAX_FILE_BYTES = 16384


class ContactFile:
    """Keeps addresses in `path`."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def load(self) -> list[Address]:
        """What was saved last; empty if nothing was, or nothing that makes sense."""
        try:
            with self._path.open("rb") as file:
                fields = json.loads(file.read(_MAX_FILE_BYTES))
            return [_address(entry) for entry in fields["contacts"][:MAX_CONTACTS]]
        except (OSError, ValueError, TypeError, KeyError, RecursionError):
            return []

    def save(self, contacts: Sequence[Address]) -> None:
        """Replace the file as a whole; the first `MAX_CONTACTS` that are no names of hosts are kept. A crash may lose it, and
        may not tear it.

        Raises:
            StorageError: it cannot be written.
        """
        fields = {"contacts": [list(address) for address in contacts if _is_number(address.host)][:MAX_CONTACTS]}
        try:  # the node's loop does not wait for a busy disk: this is a hint, written twice a minute
            replace_file(self._path, json.dumps(fields).encode(), durable=False)
        except OSError as error:
            raise StorageError(f"contacts cannot be kept in {self._path}: {error.strerror}") from None


def _is_number(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _address(entry: Any) -> Address:
    host, port = entry
    if type(port) is not int or not 0 < port < 65536:
        raise ValueError("port")
    return Address(str(ipaddress.ip_address(host)), port)
