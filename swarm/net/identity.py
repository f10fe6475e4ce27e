"""A peer's stable identity: its Ed25519 key and the sequence numbers of its records. Owns the identity file.

Must not know the DHT or the run. The file is private (mode 0600) and is only ever replaced as a whole.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import random
from collections.abc import Iterator
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from swarm.base.errors import ConfigError, StorageError
from swarm.base.ids import PeerId, peer_id_of
from swarm.base.replace_file import replace_file
from swarm.wire.peer_records import PeerRecord, SignedRecord, sign_record

#: Sequence numbers reserved by one write of the file; a restart skips what is left of the block.
SEQUENCE_BLOCK = 1024
_MAX_FILE_BYTES = 4096


class Identity:
    """An Ed25519 key with a counter that never goes back, over restarts too if it has a file.

    Args:
        private_key: signs records and proves the peer id.
        path: where the counter is kept; None keeps it in memory only.
        sequence: first number to hand out.
    """

    def __init__(self, private_key: Ed25519PrivateKey, path: Path | None = None, *, sequence: int = 0) -> None:
        self.private_key = private_key
        self.public_key: bytes = private_key.public_key().public_bytes_raw()
        self.peer_id: PeerId = peer_id_of(self.public_key)
        self._path = path
        self._next = sequence
        #: Invariant: every number handed out is below `_reserved`, and `_reserved` is durable before it is handed out.
        self._reserved = sequence

    @classmethod
    def ephemeral(cls, rng: random.Random) -> Identity:
        """An identity without a file, determined by `rng`: for simulations and tests."""
        return cls(Ed25519PrivateKey.from_private_bytes(rng.randbytes(32)))

    @classmethod
    def load_or_create(cls, path: Path) -> Identity:
        """The identity in `path`, or a new one written there.

        Raises:
            ConfigError: the file is unreadable or corrupt, or cannot be created.
        """
        try:
            with path.open("rb") as file:
                data = file.read(_MAX_FILE_BYTES + 1)
        except FileNotFoundError:
            return cls._create(path)
        except OSError as error:
            raise ConfigError(
                f"identity file {path} cannot be read ({error.strerror}); make it readable, or move it away to become a new peer"
            ) from None
        try:
            return cls._parse(data, path)
        except (ValueError, TypeError, KeyError, RecursionError):
            raise ConfigError(
                f"identity file {path} is corrupt; restore it from a copy, or move it away to become a new peer"
            ) from None

    @classmethod
    def _create(cls, path: Path) -> Identity:
        identity = cls(Ed25519PrivateKey.generate(), path)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            identity._reserve()
        except (OSError, StorageError) as error:
            text = error.strerror if isinstance(error, OSError) else error
            raise ConfigError(f"identity file {path} cannot be created ({text}); choose another --state-dir") from None
        return identity

    @classmethod
    def _parse(cls, data: bytes, path: Path) -> Identity:
        if len(data) > _MAX_FILE_BYTES:
            raise ValueError("too long")
        fields = json.loads(data)
        sequence = fields["sequence"]
        if type(sequence) is not int or not 0 <= sequence < 2**62:
            raise ValueError("sequence")
        return cls(Ed25519PrivateKey.from_private_bytes(bytes.fromhex(fields["private_key"])), path, sequence=sequence)

    def sign_record(self, key: str, record: PeerRecord) -> SignedRecord:
        """Sign `record` for `key`; see `wire.peer_records.sign_record`."""
        return sign_record(self.private_key, key, record)

    def next_sequence(self) -> int:
        """A number higher than any that this identity handed out before, in this process or an earlier one.

        Raises:
            StorageError: if the file cannot be written, once per `SEQUENCE_BLOCK` numbers at most.
        """
        if self._path is not None and self._next >= self._reserved:
            self._reserve()
        number = self._next
        self._next += 1
        return number

    def _reserve(self) -> None:
        """Reserve a block that no process reserved before, this one or another that uses the same file."""
        assert self._path is not None
        try:
            with _locked(self._path) as content:
                with contextlib.suppress(ValueError, TypeError, KeyError, RecursionError):
                    self._next = max(self._next, self._parse(content, self._path)._next)
                reserved = self._next + SEQUENCE_BLOCK
                fields = {"private_key": self.private_key.private_bytes_raw().hex(), "sequence": reserved}
                replace_file(self._path, json.dumps(fields).encode(), mode=0o600)
        except OSError as error:
            raise StorageError(f"identity file {self._path} cannot be written: {error.strerror}") from None
        self._reserved = reserved


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[bytes]:
    """Keep others from replacing `path` meanwhile; gives its content, empty if it does not exist yet.

    The lock is on the file itself, so that it leaves nothing behind; whoever gets it for a replaced file tries again.
    """
    while True:
        try:
            file = path.open("rb")
        except FileNotFoundError:
            yield b""
            return
        with file:
            fcntl.flock(file, fcntl.LOCK_EX)
            try:
                replaced = os.stat(path).st_ino != os.fstat(file.fileno()).st_ino
            except FileNotFoundError:
                replaced = True
            if not replaced:
                yield file.read(_MAX_FILE_BYTES + 1)
                return
