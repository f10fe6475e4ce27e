"""A peer's identity: stable, private, and with sequence numbers that never go back."""

from __future__ import annotations

import itertools
import json
import os
import random
import stat

import pytest

from swarm.base.errors import ConfigError, StorageError
from swarm.net.identity import SEQUENCE_BLOCK, Identity
from swarm.wire.peer_records import PeerRecord, verify_record


def test_an_identity_survives_a_restart(tmp_path):
    path = tmp_path / "state" / "identity.json"
    first = Identity.load_or_create(path)
    second = Identity.load_or_create(path)
    assert second.peer_id == first.peer_id
    assert second.public_key == first.public_key
    assert Identity.load_or_create(tmp_path / "other.json").peer_id != first.peer_id


def test_sequences_rise_over_restarts_too(tmp_path):
    path = tmp_path / "identity.json"
    seen: list[int] = []
    for life in range(4):
        identity = Identity.load_or_create(path)
        seen += [identity.next_sequence() for _ in range(SEQUENCE_BLOCK if life == 2 else 3)]
    assert all(earlier < later for earlier, later in itertools.pairwise(seen))


def test_a_number_is_reserved_on_disk_before_it_is_handed_out(tmp_path):
    path = tmp_path / "identity.json"
    identity = Identity.load_or_create(path)
    for _ in range(2 * SEQUENCE_BLOCK + 1):
        assert identity.next_sequence() < json.loads(path.read_text())["sequence"]


def test_most_numbers_cost_no_write(tmp_path):
    path = tmp_path / "identity.json"
    identity = Identity.load_or_create(path)
    inode = path.stat().st_ino
    for _ in range(SEQUENCE_BLOCK - 1):
        identity.next_sequence()
    assert path.stat().st_ino == inode


def test_the_file_is_private_and_no_other_is_left(tmp_path):
    path = tmp_path / "identity.json"
    Identity.load_or_create(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert os.listdir(tmp_path) == ["identity.json"]


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{}",
        b"[]",
        b"\xff\xfe",
        b"[" * 3000,
        b"x" * 9000,
        b'{"private_key": "00", "sequence": 1}',
        b'{"private_key": 5, "sequence": 1}',
        json.dumps({"private_key": "0" * 64, "sequence": -1}).encode(),
        json.dumps({"private_key": "0" * 64, "sequence": "1"}).encode(),
        json.dumps({"private_key": "0" * 64}).encode(),
    ],
)
def test_a_corrupt_file_is_one_line_that_says_what_to_do(tmp_path, content):
    path = tmp_path / "identity.json"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"corrupt.*move it away") as caught:
        Identity.load_or_create(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)
    assert path.read_bytes() == content, "a file that we do not understand is not ours to replace"


def test_an_unreadable_file_is_one_line_that_says_what_to_do(tmp_path):
    with pytest.raises(ConfigError, match=r"cannot be read \(Is a directory\)"):
        Identity.load_or_create(tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"cannot be (read|created) \(Not a directory\)"):
        Identity.load_or_create(tmp_path / "file" / "identity.json")


def test_a_failed_write_hands_out_no_number_and_keeps_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "identity.json"
    identity = Identity.load_or_create(path)
    used = [identity.next_sequence() for _ in range(SEQUENCE_BLOCK)]
    before = path.read_bytes()

    def full(source: object, target: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", full)
        with pytest.raises(StorageError, match="No space left"):
            identity.next_sequence()
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == ["identity.json"]
    assert identity.next_sequence() > max(used)


def test_ephemeral_identities_follow_their_seed():
    first, again, other = (Identity.ephemeral(random.Random(seed)) for seed in (1, 1, 2))
    assert first.peer_id == again.peer_id != other.peer_id
    assert [first.next_sequence() for _ in range(3)] == [0, 1, 2]


def test_signatures_verify():
    identity = Identity.ephemeral(random.Random(0))
    record = PeerRecord(peer=identity.peer_id, incarnation="0" * 16, role="trainer", host="h", port=1, ttl_s=1, sequence=0)
    assert verify_record("key", identity.sign_record("key", record)) == record


def test_two_processes_with_one_file_never_hand_out_the_same_number(tmp_path):
    path = tmp_path / "identity.json"
    Identity.load_or_create(path)
    first, second = Identity.load_or_create(path), Identity.load_or_create(path)
    numbers = [one.next_sequence() for _ in range(2 * SEQUENCE_BLOCK) for one in (first, second)]
    assert len(set(numbers)) == len(numbers)
    assert Identity.load_or_create(path).next_sequence() > max(numbers)
    assert os.listdir(tmp_path) == ["identity.json"], "the lock leaves nothing behind"
