"""What is a head of HTTP/1.1, and what is refused: two ends must never disagree about where a message ends."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm.net.http_heads import (
    HEAD_END,
    BadHead,
    RequestHead,
    ResponseHead,
    chunk_line,
    parse_chunk_line,
    parse_request_head,
    parse_response_head,
    request_head,
    response_head,
)


def head(*lines: str) -> bytes:
    return "\r\n".join(lines).encode() + HEAD_END


@given(st.integers(0, 10**15))
def test_what_is_written_is_what_is_read(num_bytes: int) -> None:
    assert parse_request_head(request_head("[::1]:80", num_bytes)) == RequestHead("POST", "/v1", num_bytes, True)
    assert parse_chunk_line(chunk_line(num_bytes)) == num_bytes
    assert parse_response_head(response_head(200)) == ResponseHead(200, None, True)
    assert parse_response_head(response_head(429)) == ResponseHead(429, None, False)


def test_what_others_may_write_is_read_too() -> None:
    curl = head("POST /v1 HTTP/1.1", "Host: a", "content-LENGTH:  7 ", "Accept: */*", "Connection: keep-alive")
    assert parse_request_head(curl) == RequestHead("POST", "/v1", 7, True)
    assert parse_request_head(head("GET /x?y=1 HTTP/1.0")) == RequestHead("GET", "/x?y=1", None, False)
    assert parse_request_head(head("GET / HTTP/1.1", "Connection: Close")).keep_alive is False
    assert parse_response_head(head("HTTP/1.1 204", "Content-Length: 0")) == ResponseHead(204, 0, True)


def test_a_request_with_a_transfer_coding_tells_no_length() -> None:
    both = head("POST /v1 HTTP/1.1", "Content-Length: 5", "Transfer-Encoding: chunked")
    assert parse_request_head(both).num_bytes is None, "whoever believes the other one would see another request"


@pytest.mark.parametrize(
    "lines",
    [
        ("",),
        ("post /v1 HTTP/1.1",),
        ("POST /v1",),
        ("POST /v1 HTTP/2.0",),
        ("POST  /v1 HTTP/1.1",),
        ("POST /v1 HTTP/1.1", "no colon"),
        ("POST /v1 HTTP/1.1", "A: 1", " folded: 2"),
        ("POST /v1 HTTP/1.1", "Content-Length : 5"),
        ("POST /v1 HTTP/1.1", "Content-Length: -5"),
        ("POST /v1 HTTP/1.1", "Content-Length: 5, 5"),
        ("POST /v1 HTTP/1.1", "Content-Length: 5", "content-length: 6"),
        ("POST /v1 HTTP/1.1", "Content-Length: " + "9" * 19),
        ("POST /v1 HTTP/1.1", "A: b\nContent-Length: 5"),
    ],
)
def test_a_bad_request_head_is_refused(lines: tuple[str, ...]) -> None:
    with pytest.raises(BadHead):
        parse_request_head(head(*lines))


@pytest.mark.parametrize(
    "lines",
    [
        ("SSH-2.0-OpenSSH_9.2",),
        ("HTTP/1.1 2000 OK", "Content-Length: 1"),
        ("HTTP/1.1 200 OK",),
        ("HTTP/1.1 200 OK", "Transfer-Encoding: gzip, chunked"),
    ],
)
def test_an_answer_whose_end_is_not_told_is_refused(lines: tuple[str, ...]) -> None:
    with pytest.raises(BadHead):
        parse_response_head(head(*lines))


@pytest.mark.parametrize("line", [b"\r\n", b"-1\r\n", b"0x10\r\n", b"5;ext\r\n", b"f" * 16 + b"\r\n", b" 5\r\n"])
def test_a_bad_size_of_a_chunk_is_refused(line: bytes) -> None:
    with pytest.raises(BadHead):
        parse_chunk_line(line)
