"""Memory comes back when, and only when, nobody can see it any more."""

from __future__ import annotations

import random

import numpy
import torch

from swarm.base.buffers import Recycler

MIB = 2**20


def address(view: memoryview) -> int:
    return numpy.frombuffer(view, numpy.uint8).ctypes.data


def test_a_buffer_that_nobody_holds_is_given_out_again() -> None:
    memory = Recycler(max_idle=2, max_idle_bytes=8 * MIB)
    first = memory.take(MIB)
    where = address(first)
    assert memory.idle_bytes == 0
    del first
    assert memory.idle_bytes == MIB
    assert address(memory.take(MIB - 5)) == where, "sizes that are nearly equal share buffers"


def test_any_view_of_a_buffer_keeps_it() -> None:
    memory = Recycler(max_idle=2, max_idle_bytes=8 * MIB)
    view = memory.take(MIB)
    part = view[100:200]
    array = numpy.frombuffer(part, numpy.uint8)[10:20]
    tensor = torch.from_numpy(array)[2:4].view(torch.int16)
    back = tensor.numpy()
    del view, part, array, tensor
    assert memory.idle_bytes == 0, "another tensor would be written over this one"
    del back
    assert memory.idle_bytes == MIB


def test_what_is_idle_is_bounded() -> None:
    memory = Recycler(max_idle=3, max_idle_bytes=5 * MIB)
    rng = random.Random(1)
    held: list[memoryview] = []
    for _ in range(300):
        held.append(memory.take(rng.choice([1000, MIB // 2, MIB, 2 * MIB, 6 * MIB])))
        held[-1][:] = bytes([len(held) % 256]) * len(held[-1])
        if len(held) > 5:
            view = held.pop(rng.randrange(len(held)))
            assert view[0] == view[-1], "two holders share this buffer"
        assert memory.idle_bytes <= 5 * MIB
    held.clear()
    assert memory.idle_bytes <= 5 * MIB


def test_a_size_that_is_no_longer_asked_for_makes_room() -> None:
    memory = Recycler(max_idle=2, max_idle_bytes=100 * MIB)
    old = [memory.take(MIB) for _ in range(2)]
    del old
    new = [memory.take(4 * MIB) for _ in range(2)]
    del new
    assert memory.idle_bytes == 8 * MIB
