"""A model's weights as files: sharded safetensors with an index. Owns names, offsets, digests; must not know any model.

Only headers are read at first; `read` then takes one tensor's bytes through a small buffer, so a peer opens only the
shards that it needs and holds nothing twice (a mapped file would). The same pass looks for numbers that are not finite.
Needs no torch: a run's creator may have none.

Format: https://huggingface.co/docs/safetensors (8 bytes header size, JSON header, then the tensors' bytes).
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from swarm.base.errors import ConfigError

CONFIG_FILE = "config.json"
INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
#: Bytes of each element by the format's name of the type. Some are of codes only, see `stored_codes`.
_ITEM_BYTES = {
    "F64": 8,
    "F32": 4,
    "F16": 2,
    "BF16": 2,
    "I64": 8,
    "I32": 4,
    "I16": 2,
    "I8": 1,
    "U8": 1,
    "BOOL": 1,
    "U64": 8,
    "U32": 4,
    "U16": 2,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "F8_E4M3FNUZ": 1,
    "F8_E5M2FNUZ": 1,
    "F8_E8M0": 1,
    "F6_E2M3": 0.75,
    "F6_E3M2": 0.75,
    "F4": 0.5,
}
#: Of each floating type: integers of its width, and the bits of its positive infinity. NaNs are above it.
_INFINITY: dict[str, tuple[Any, Any, int]] = {
    "F64": (np.int64, np.uint64, 0x7FF << 52),
    "F32": (np.int32, np.uint32, 0xFF << 23),
    "F16": (np.int16, np.uint16, 0x1F << 10),
    "BF16": (np.int16, np.uint16, 0xFF << 7),
}
_MAX_HEADER_BYTES = 10**8
_CHUNK_BYTES = 2**24
#: What is digested and looked at in one go: it stays in the processor's cache.
_WINDOW_BYTES = 2**18
_READING_THREADS = 4


class Source(Protocol):
    """Where a model's files are: a directory, or a hub that fetches what is asked for."""

    #: For errors: what the operator named.
    name: str

    def path(self, file: str) -> Path | None:
        """The file on this machine; None if the source has no such file."""
        ...

    def extra_shards(self, known: Iterable[str]) -> list[str]:
        """Files that look like shards and are none of `known`."""
        ...


class Directory:
    """A local directory.

    Raises:
        ConfigError: there is no such directory.
    """

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self.name = str(directory)
        self._path = Path(directory)
        if not self._path.is_dir():
            raise ConfigError(f"model {directory}: no such directory")

    def path(self, file: str) -> Path | None:
        """The path of a file of the directory."""
        path = self._path / file
        return path if path.is_file() else None

    def extra_shards(self, known: Iterable[str]) -> list[str]:
        """Files with weights that no index names."""
        return sorted({path.name for path in self._path.glob("*.safetensors")} - set(known))


@dataclass(frozen=True)
class ShardEntry:
    """Where one tensor lies: bytes `start:end` of `path`."""

    name: str
    path: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


def read_config(source: Source) -> dict[str, Any]:
    """The model's `config.json`.

    Raises:
        ConfigError: it is missing or malformed.
    """
    path = source.path(CONFIG_FILE)
    if path is None:
        raise ConfigError(f"model {source.name}: holds no {CONFIG_FILE}")
    config = _json(path)
    if not isinstance(config.get("model_type"), str):
        raise ConfigError(f"{path}: names no model_type")
    return config


def block_of(name: str) -> str:
    """The layer that a tensor belongs to, such as `model.layers.3`; the tensor itself outside all layers."""
    parts = name.split(".")
    number = next((i for i, part in enumerate(parts) if part.isdigit()), len(parts) - 1)
    return ".".join(parts[: number + 1])


class Shards:
    """The tensors of one model.

    Raises:
        ConfigError: one line naming the file: no weights, an index that is malformed, or a shard that is missing.
    """

    def __init__(self, source: Source) -> None:
        self.source = source
        self._headers: dict[str, dict[str, ShardEntry]] = {}
        index = source.path(INDEX_FILE)
        #: The file that says which tensors are the model's.
        self.listed_in = SINGLE_FILE if index is None else INDEX_FILE
        if index is not None:
            weight_map = _json(index).get("weight_map")
            if (
                not isinstance(weight_map, dict)
                or not weight_map
                or not all(isinstance(file, str) and Path(file).name == file for file in weight_map.values())
            ):
                raise ConfigError(f"{index}: has no weight_map of tensor names to files")
            self._files: dict[str, str] = dict(weight_map)
        elif source.path(SINGLE_FILE) is not None:
            self._files = {name: SINGLE_FILE for name in self._header(SINGLE_FILE)}
        else:
            pickled = any(source.path(file) for file in ("pytorch_model.bin", "pytorch_model.bin.index.json"))
            hint = (
                "its weights are pickled, which is never read: save it as safetensors first"
                if pickled
                else (f"holds no weights: neither {SINGLE_FILE} nor {INDEX_FILE}")
            )
            raise ConfigError(f"model {source.name}: {hint}")
        #: Files that look like shards and are none of the model's: another form of it, say.
        self.unused = source.extra_shards(set(self._files.values()))

    @property
    def names(self) -> frozenset[str]:
        """The names of all tensors in the index."""
        return frozenset(self._files)

    @property
    def opened(self) -> frozenset[str]:
        """Files that were opened so far."""
        return frozenset(self._headers)

    def entry(self, name: str) -> ShardEntry:
        """Where tensor `name` lies. Opens its shard.

        Raises:
            ConfigError: the shard is missing, truncated, malformed, or does not hold the tensor.
        """
        file = self._files[name]
        found = self._header(file).get(name)
        if found is None:
            raise ConfigError(f"model {self.source.name}: {file} does not hold {name}, which the index places there")
        return found

    def _header(self, file: str) -> dict[str, ShardEntry]:
        if file not in self._headers:
            path = self.source.path(file)
            if path is None:
                raise ConfigError(f"model {self.source.name}: {file}, which the index names, is missing")
            self._headers[file] = _read_header(path)
        return self._headers[file]

    def read(self, entry: ShardEntry, take: Callable[[int, memoryview], None], digest: Any) -> None:
        """Give `take(offset, chunk)` the tensor's bytes in order, and `digest` too. The chunk is valid during the call.

        Raises:
            ConfigError: the file cannot be read to its end, or the tensor holds a number that is not finite.
        """
        buffer = memoryview(bytearray(min(_CHUNK_BYTES, max(1, entry.end - entry.start))))
        try:
            with open(entry.path, "rb", buffering=0) as file:
                file.seek(entry.start)
                done, size = 0, entry.end - entry.start
                while done < size:
                    chunk = buffer[: min(len(buffer), size - done)]
                    filled = 0
                    while filled < len(chunk):
                        count = file.readinto(chunk[filled:])
                        if not count:
                            raise ConfigError(f"{entry.path}: is truncated")
                        filled += count
                    for window in (chunk[i : i + _WINDOW_BYTES] for i in range(0, len(chunk), _WINDOW_BYTES)):
                        digest.update(window)
                        if not _is_finite(window, entry.dtype):
                            raise ConfigError(
                                f"{entry.path}: {entry.name} holds a number that is not finite (NaN or infinity), and training "
                                "from it cannot work: take an intact copy, or an earlier checkpoint"
                            )
                    take(done, chunk)
                    done += filled
        except OSError as error:
            raise ConfigError(f"{entry.path}: {error.strerror}") from None

    def stated_digests(self) -> dict[str, str]:
        """What a run states of its weights: of each file, where the hub tells it, else of each layer's tensors."""
        tell = getattr(self.source, "file_digest", None)
        if tell is None:
            return self.digests()
        return {file: tell(file) or self.digest_of_file(file) for file in sorted(set(self._files.values()))}

    def digest_of_file(self, file: str) -> str:
        """SHA-256 of a whole shard."""
        self._header(file)
        path = self.source.path(file)
        assert path is not None
        try:
            with open(path, "rb") as handle:
                return hashlib.file_digest(handle, "sha256").hexdigest()
        except OSError as error:
            raise ConfigError(f"{path}: {error.strerror}") from None

    def file_of(self, name: str) -> str:
        """The shard that holds tensor `name`, by the index."""
        return self._files[name]

    def digests(self, names: Iterable[str] | None = None) -> dict[str, str]:
        """For each block its digest: of the whole model, or of the blocks that `names` make up. Reads all their bytes."""
        wanted = sorted(self.names if names is None else names)
        with ThreadPoolExecutor(_READING_THREADS, "digest") as pool:
            leaves = dict(zip(wanted, pool.map(self._leaf, [self.entry(name) for name in wanted]), strict=True))
        return block_digests({name: (self.entry(name), leaf) for name, leaf in leaves.items()})

    def _leaf(self, entry: ShardEntry) -> bytes:
        digest = hashlib.sha256()
        self.read(entry, lambda offset, chunk: None, digest)
        return digest.digest()


def block_digests(leaves: Mapping[str, tuple[ShardEntry, bytes]]) -> dict[str, str]:
    """From each tensor's SHA-256 to each block's: 64 hex digits over names, types, shapes and bytes."""
    blocks: dict[str, Any] = {}
    for name in sorted(leaves):
        entry, leaf = leaves[name]
        digest = blocks.setdefault(block_of(name), hashlib.sha256(b"swarm weights 1\0"))
        digest.update(f"{name} {entry.dtype} {entry.shape}\0".encode() + leaf)
    return {block: digest.hexdigest() for block, digest in blocks.items()}


def _is_finite(values: memoryview, dtype: str) -> bool:
    """Whether all are, of whatever type; by their bits, whose order is that of the numbers, without a temporary."""
    if dtype not in _INFINITY or not len(values):
        return True
    signed, unsigned, infinity = _INFINITY[dtype]
    bits = np.frombuffer(values, dtype=signed)  # the largest is the largest positive number, without a sign the most negative
    return int(bits.max()) < infinity and int(bits.view(unsigned).max()) < infinity | 1 << (8 * bits.itemsize - 1)


def _json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_bytes())
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None
    except (ValueError, RecursionError):
        raise ConfigError(f"{path}: is not JSON") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{path}: is no JSON object")
    return value


def _read_header(path: Path) -> dict[str, ShardEntry]:
    try:
        size = path.stat().st_size
        with open(path, "rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > min(_MAX_HEADER_BYTES, size - 8):
                raise ConfigError(f"{path}: is truncated, or is no safetensors file")
            header = json.loads(file.read(length))
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None
    except (ValueError, RecursionError):
        raise ConfigError(f"{path}: has a malformed header") from None
    if not isinstance(header, dict):
        raise ConfigError(f"{path}: has a malformed header")
    entries = dict(_entries(path, header, 8 + length))
    end = max((entry.end for entry in entries.values()), default=8 + length)
    if size != end:
        problem = "is truncated" if size < end else "has bytes after its last tensor"
        raise ConfigError(f"{path}: {problem}: {size} bytes, where its header tells of {end}")
    return entries


def _entries(path: Path, header: Mapping[str, Any], base: int) -> Iterator[tuple[str, ShardEntry]]:
    for name, fields in header.items():
        if name == "__metadata__":
            continue
        try:
            dtype, shape, (start, end) = fields["dtype"], tuple(map(int, fields["shape"])), map(int, fields["data_offsets"])
            name.encode()
        except (KeyError, TypeError, ValueError, OverflowError):
            raise ConfigError(f"{path}: has a malformed header at {name!r}") from None
        if not isinstance(dtype, str) or dtype not in _ITEM_BYTES:
            raise ConfigError(f"{path}: {name} is of type {dtype}, which is not supported")
        if min(shape, default=0) < 0 or start < 0 or end - start != math.prod(shape) * _ITEM_BYTES[dtype]:
            raise ConfigError(f"{path}: {name} of shape {shape} does not fill bytes {start} to {end}")
        yield name, ShardEntry(name, path, dtype, shape, base + start, base + end)
