"""HTTP/1.1 message heads, as much of them as this protocol speaks (RFC 9112, sections 2 to 7). Pure; knows no socket.

One request is a POST that tells its length, one answer comes in chunks; whatever else a stranger sends is parsed strictly
or refused, so that two ends never disagree about where a message ends.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

PATH = "/v1"
HEAD_END = b"\r\n\r\n"
MAX_HEAD_BYTES = 8 * 2**10
#: The size line of a chunk is at most this long; extensions are not spoken.
MAX_CHUNK_LINE_BYTES = 32
CHUNK_LINE_END = b"\r\n"
LAST_CHUNK = b"0\r\n\r\n"

_TOKEN = re.compile(rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]+")
_REQUEST = re.compile(rb"([A-Z]{1,16}) ([!-~]{1,2000}) HTTP/1\.([01])")
_STATUS = re.compile(rb"HTTP/1\.([01]) ([1-5][0-9][0-9])(?: [^\x00-\x1f\x7f]*)?")
_LENGTH = re.compile(rb"[0-9]{1,18}")
_CHUNK_SIZE = re.compile(rb"[0-9A-Fa-f]{1,15}")
_REASONS = {200: "OK", 400: "Bad Request", 404: "Not Found", 405: "Method Not Allowed", 408: "Request Timeout",
            411: "Length Required", 413: "Content Too Large", 429: "Too Many Requests"}  # fmt: skip


class BadHead(Exception):
    """The bytes are no head of HTTP/1.1 that this protocol speaks."""


@dataclass(frozen=True, slots=True)
class RequestHead:
    """What the server must know of a request; `num_bytes` is None if it does not tell its length."""

    method: str
    path: str
    num_bytes: int | None
    keep_alive: bool


@dataclass(frozen=True, slots=True)
class ResponseHead:
    """What the client must know of an answer; `num_bytes` is None if it comes in chunks."""

    status: int
    num_bytes: int | None
    keep_alive: bool


def request_head(host: str, num_bytes: int) -> bytes:
    """The head of a request to `host` (as an address says it) with a body of `num_bytes`."""
    text = f"POST {PATH} HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/octet-stream\r\nContent-Length: {num_bytes}"
    return text.encode("ascii", "replace") + HEAD_END


def response_head(status: int) -> bytes:
    """The head of an answer in chunks; a status other than 200 ends the connection."""
    end = "" if status == 200 else "\r\nConnection: close"
    text = f"HTTP/1.1 {status} {_REASONS[status]}\r\nContent-Type: application/octet-stream\r\nTransfer-Encoding: chunked"
    return (text + end).encode() + HEAD_END


def chunk_line(num_bytes: int) -> bytes:
    """What stands before a chunk; `CHUNK_LINE_END` stands behind it."""
    return b"%x\r\n" % num_bytes


def parse_request_head(data: bytes) -> RequestHead:
    """Parse everything up to and with the empty line.

    Raises:
        BadHead: saying what is wrong.
    """
    first, *lines = data.removesuffix(HEAD_END).split(b"\r\n")
    found = _REQUEST.fullmatch(first)
    if found is None:
        raise BadHead("no request line of HTTP/1.1")
    fields = _fields(lines)
    length = None if b"transfer-encoding" in fields else _length(fields)
    return RequestHead(found[1].decode(), found[2].decode(), length, _keeps_alive(found[3], fields))


def parse_response_head(data: bytes) -> ResponseHead:
    """Parse everything up to and with the empty line.

    Raises:
        BadHead: saying what is wrong; also if the answer's end could not be told.
    """
    first, *lines = data.removesuffix(HEAD_END).split(b"\r\n")
    found = _STATUS.fullmatch(first)
    if found is None:
        raise BadHead("no status line of HTTP/1.1")
    fields = _fields(lines)
    coding = fields.get(b"transfer-encoding")
    if coding is not None and coding.lower() != b"chunked":
        raise BadHead("a transfer coding other than chunked")
    length = None if coding is not None else _length(fields)
    if coding is None and length is None:
        raise BadHead("neither chunks nor a length")
    return ResponseHead(int(found[2]), length, _keeps_alive(found[1], fields))


def parse_chunk_line(data: bytes) -> int:
    """The size that a chunk's line tells.

    Raises:
        BadHead: if it is no size.
    """
    size = data.removesuffix(CHUNK_LINE_END)
    if _CHUNK_SIZE.fullmatch(size) is None:
        raise BadHead("no size of a chunk")
    return int(size, 16)


def _fields(lines: Sequence[bytes]) -> dict[bytes, bytes]:
    fields: dict[bytes, bytes] = {}
    for line in lines:
        name, colon, value = line.partition(b":")
        if not colon or _TOKEN.fullmatch(name) is None or b"\n" in value or b"\r" in value or b"\0" in value:
            raise BadHead("a header line without a name")
        name = name.lower()
        if name in fields and name in (b"content-length", b"transfer-encoding"):
            raise BadHead(f"{name.decode()} twice")
        fields[name] = value.strip(b" \t")
    return fields


def _length(fields: dict[bytes, bytes]) -> int | None:
    value = fields.get(b"content-length")
    if value is None:
        return None
    if _LENGTH.fullmatch(value) is None:
        raise BadHead("a Content-Length that is no number")
    return int(value)


def _keeps_alive(minor: bytes, fields: dict[bytes, bytes]) -> bool:
    return minor == b"1" and b"close" not in fields.get(b"connection", b"").lower()
