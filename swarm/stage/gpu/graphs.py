"""A stage's forward and backward as CUDA graphs: one launch each, however many kernels they start. Owns the trial of
whether that pays, captured memory and which micro-batch uses it; must not know jobs, tickets or messages.

Captured kernels read and write fixed places. So a captured call, a forward and its backward, holds one micro-batch at a
time, until its gradients are in the sum, and as many are captured as are under way at once. They share a copy of the
parameters, used by one after the other in the order of the device's stream: a version is copied into it when it takes turns
with another.
"""

from __future__ import annotations

import gc
import logging
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch

from swarm.stage.memory_budget import MemoryBudget
from swarm.stage.module import Tensors
from swarm.stage.versions import Version

logger = logging.getLogger(__name__)

#: (parameters, inputs, labels) -> outputs.
Call = Callable[[Tensors, Tensors, Tensors | None], Tensors]
#: Part of the memory for in-flight micro-batches that may be captured: it stays so while nobody uses it, and requests, and
#: micro-batches of other shapes, need some.
_LARGEST_PART = 0.5
#: Graphs are used where they take at most this part of the time. They hold memory, a copy of the parameters and gradients in
#: each call, but where both take as long the thread that starts kernels is left to others, who want Python's lock beside it.
_PAY = 1.0


def captured_if_it_pays(
    launch: Callable[[], object],
    call: Call,
    version: Version,
    inputs: Tensors,
    labels: Tensors | None,
    budget: MemoryBudget,
    graph_bytes: Callable[[], int],
) -> CapturedStage | None:
    """The stage captured for micro-batches like this one; None if it cannot be, or takes longer than launches.

    It takes the time of a few micro-batches.

    Args:
        launch: the same forward and backward without CUDA graphs.
        graph_bytes: once that was done.

    The others as for `CapturedStage`.
    """

    def seconds(compute: Callable[[], object]) -> float:
        torch.cuda.synchronize()
        began = time.perf_counter()
        compute()
        torch.cuda.synchronize()
        return time.perf_counter() - began

    captured = None

    def replay() -> None:
        lease = captured.forward(version, inputs, labels) if captured is not None else None
        if lease is None:
            raise RuntimeError("there is no memory for one micro-batch")
        lease.backward({name: torch.zeros_like(t) for name, t in lease.outputs.items()})

    try:
        launched_s = min(seconds(launch) for _ in range(4))
        if run_and_tell_if_it_waits(launch):
            raise RuntimeError("its model asks the device for values")
        captured = CapturedStage(call, version, inputs, labels, budget, graph_bytes())
        captured_s = min(seconds(replay) for _ in range(4))
    except Exception as error:  # a model's code may object to anything
        logger.info("no CUDA graphs: %s", str(error).partition("\n")[0])
    else:
        pays = captured_s <= _PAY * launched_s
        logger.info(
            "a micro-batch takes %.1f ms, by CUDA graphs %.1f ms: they are %s",
            1e3 * launched_s,
            1e3 * captured_s,
            "used" if pays else "not used",
        )
        if pays:
            return captured
    if captured is not None:
        captured.close()
    captured = None
    torch.cuda.empty_cache()
    return None


class CapturedStage:
    """All captured calls of one stage, for micro-batches of one shape.

    Args:
        call: the stage's forward, which draws nothing at random.
        version: some version; its shapes matter.
        inputs, labels: of the micro-batches that it is for; their shapes matter.
        budget: of what in-flight micro-batches hold. What is captured takes memory of it until `close`.
        graph_bytes: what a micro-batch that is not captured holds between its forward and its backward.

    Raises:
        RuntimeError: what the stage does cannot be captured (it asks the device for something), or memory is short.
    """

    def __init__(
        self, call: Call, version: Version, inputs: Tensors, labels: Tensors | None, budget: MemoryBudget, graph_bytes: int
    ) -> None:
        self.call = call
        self._budget = budget
        self._most_bytes = int(_LARGEST_PART * (budget.limit_bytes - budget.used_bytes))
        self._reserved_bytes = 0
        parameter_bytes = sum(t.nbytes for t in version.parameters.values())
        #: What each call takes, at most until the first is there.
        self._call_bytes = graph_bytes + parameter_bytes
        if not self._reserve(parameter_bytes + self._call_bytes):
            raise RuntimeError("the memory for micro-batches is small")
        self.free: list[_CapturedCall] = []
        self._is_full = False
        try:
            self._capture_first(version, inputs, labels or {})
        except BaseException:
            self.close()
            raise

    def _capture_first(self, version: Version, inputs: Tensors, labels: Tensors) -> None:
        self.parameters = {name: t.detach().clone().requires_grad_(True) for name, t in version.parameters.items()}
        #: The version whose values `parameters` have; weak, for it must not outlive its place among the versions.
        self._holds = weakref.ref(version)
        self.inputs, self.labels = _blank(inputs), _blank(labels)
        self.stream = torch.cuda.Stream()
        first = _CapturedCall(self)
        self._release(self._call_bytes)
        self._call_bytes = first.num_bytes
        if not self._reserve(self._call_bytes):
            raise RuntimeError("the memory for micro-batches is small")
        self.free.append(first)

    def has_room(self, inputs: Tensors) -> bool:
        """Whether a forward of `inputs` takes no more memory than is captured already."""
        return bool(self.free) and _shapes(inputs) == _shapes(self.inputs)

    @property
    def is_short(self) -> bool:
        """Whether there is no call for one more micro-batch until one is free."""
        return not self.free and (self._is_full or not self._may_reserve(self._call_bytes))

    def forward(self, version: Version, inputs: Tensors, labels: Tensors | None) -> BorrowedCall | None:
        """Start the forward of one micro-batch; None if it has other shapes or there is no memory for one more."""
        labels = labels or {}
        if _shapes(inputs) != _shapes(self.inputs) or _shapes(labels) != _shapes(self.labels):
            return None
        call = self._free_call()
        if call is None:
            return None
        lease = BorrowedCall(self, call, version)
        self.hold(version)
        _fill(call.inputs, inputs)
        _fill(call.labels, labels)
        call.forward.replay()
        return lease

    def hold(self, version: Version) -> None:
        """Have what is started next compute with `version`."""
        if self._holds() is not version:
            with torch.no_grad():
                torch._foreach_copy_(list(self.parameters.values()), list(version.parameters.values()))
            self._holds = weakref.ref(version)

    def close(self) -> None:
        """Give the budget back what this has of it; micro-batches under way can still end."""
        self._release(self._reserved_bytes)

    def _may_reserve(self, num_bytes: int) -> bool:
        is_left = self._budget.used_bytes + num_bytes <= self._budget.limit_bytes
        return is_left and self._reserved_bytes + num_bytes <= self._most_bytes

    def _reserve(self, num_bytes: int) -> bool:
        if not self._may_reserve(num_bytes) or not self._budget.reserve(num_bytes):
            return False
        self._reserved_bytes += num_bytes
        return True

    def _release(self, num_bytes: int) -> None:
        self._reserved_bytes -= num_bytes
        self._budget.release(num_bytes)

    def _free_call(self) -> _CapturedCall | None:
        if self.free:
            return self.free.pop()
        if self._is_full or not self._reserve(self._call_bytes):
            return None
        try:
            return _CapturedCall(self)
        except Exception as error:  # a model's code may object to anything
            logger.info("no CUDA graphs for one more micro-batch at once: %s", str(error).partition("\n")[0])
            self._is_full = True
            self._release(self._call_bytes)
            return None


class BorrowedCall:
    """A captured call in use; it is free for others once nobody refers to this, nor to its gradients."""

    def __init__(self, stage: CapturedStage, call: _CapturedCall, version: Version) -> None:
        self._stage = stage
        self._call = call
        self._version = version

    @property
    def outputs(self) -> Tensors:
        """The outputs without their autograd graph; their memory is another's once the call is free."""
        return self._call.outputs

    @property
    def is_wanted(self) -> bool:
        """Whether the next micro-batch has to do without a captured call."""
        return self._stage.is_short

    def backward(self, seeds: Tensors) -> tuple[Tensors, BorrowedGradients]:
        """Start the backward.

        Args:
            seeds: gradients of all outputs that have one, by name.

        Raises:
            RuntimeError: one is missing or has a wrong shape, as torch says without CUDA graphs.

        Returns:
            Gradients of the inputs, by name, and of the parameters.
        """
        stage, call = self._stage, self._call
        stage.hold(self._version)
        for name, place in call.seeds.items():
            if name not in seeds or seeds[name].shape != place.shape:
                found = tuple(seeds[name].shape) if name in seeds else "none"
                raise RuntimeError(f"gradient of {name}: {tuple(place.shape)} is wanted, {found} came")
        _fill(call.seeds, seeds)
        call.backward.replay()
        inputs = {n: torch.zeros_like(call.inputs[n]) if g is None else g.clone() for n, g in call.input_gradients.items()}
        return inputs, BorrowedGradients(call.gradients, self)

    def __del__(self) -> None:
        self._stage.free.append(self._call)


class BorrowedGradients(list[torch.Tensor | None]):
    """The gradients in a captured call, which is not free before this is."""

    def __init__(self, gradients: Sequence[torch.Tensor | None], lease: BorrowedCall) -> None:
        super().__init__(gradients)
        self._lease = lease


class _CapturedCall:
    """A forward and its backward. Nothing is computed here: what is launched is recorded."""

    def __init__(self, stage: CapturedStage) -> None:
        self.inputs = {name: t.requires_grad_(t.is_floating_point()) for name, t in _blank(stage.inputs).items()}
        self.labels = _blank(stage.labels)
        self.forward, self.backward = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        # In memory of its own, where nothing else is ever captured: what this forward keeps for its backward, which is free
        # for torch once the backward is captured, and these gradients might be what another call throws away.
        pool = torch.cuda.graph_pool_handle()
        gc.collect()
        torch.cuda.empty_cache()
        before_bytes = torch.cuda.memory_reserved()
        with _recording(self.forward, stage.stream, pool):
            outputs = stage.call(stage.parameters, self.inputs, self.labels or None)
        self.outputs = {name: t.detach() for name, t in outputs.items()}
        wanted = {name: t for name, t in outputs.items() if t.requires_grad}
        self.seeds = {name: torch.zeros_like(t) for name, t in wanted.items()}
        leaves = {name: t for name, t in self.inputs.items() if t.requires_grad}
        with _recording(self.backward, stage.stream, pool):
            found = torch.autograd.grad(
                list(wanted.values()),
                [*leaves.values(), *stage.parameters.values()],
                list(self.seeds.values()),
                allow_unused=True,
            )
        #: Gradients of inputs by name; None where unused, as in `gradients`. Both stay until this call's next backward.
        self.input_gradients = dict(zip(leaves, found, strict=False))
        self.gradients = found[len(leaves) :]
        self.num_bytes = torch.cuda.memory_reserved() - before_bytes


@contextmanager
def _recording(graph: torch.cuda.CUDAGraph, stream: torch.cuda.Stream, pool: Any) -> Iterator[None]:
    """What this thread launches is recorded. Other threads may go on with the device.

    Python's collector waits: to free another CUDA graph, or a kernel that was compiled, ends a recording in its thread.
    """
    is_collecting, before = gc.isenabled(), torch.cuda.current_stream()
    generator = torch.cuda.default_generators[torch.cuda.current_device()]
    drawn = generator.clone_state()
    gc.disable()
    try:
        with torch.cuda.graph(graph, pool, stream, capture_error_mode="thread_local"):
            yield
    except BaseException:
        # A recording that CUDA ended leaves this thread on its stream, the generator recording, which then refuses to draw,
        # and before torch 2.13 the allocator: it frees no memory that two streams have used (pytorch#180395).
        torch.cuda.set_stream(before)
        generator.graphsafe_set_state(drawn)
        with suppress(Exception):
            torch._C._cuda_endAllocateToPool(torch.cuda.current_device(), pool)
        raise
    finally:
        if is_collecting:
            gc.enable()


def run_and_tell_if_it_waits(compute: Callable[[], object]) -> bool:
    """Run `compute`, and return whether it waits for a value from the device: no recording survives that, nor torch's allocator.

    torch tells it as a warning in the thread that waits: this one, or one of its own in which a backward runs Python code.
    Other threads of this program may wait meanwhile.
    """
    here, before = threading.current_thread(), torch.cuda.get_sync_debug_mode()
    asked = False
    with warnings.catch_warnings():
        show = warnings.showwarning

        def listen(message: Warning | str, *args: Any, **options: Any) -> None:
            nonlocal asked
            if "synchronizing CUDA operation" not in str(message):
                show(message, *args, **options)
            elif (thread := threading.current_thread()) is here or isinstance(thread, threading._DummyThread):
                asked = True

        warnings.showwarning = listen
        warnings.filterwarnings("always", ".*synchronizing CUDA operation")
        warnings.filterwarnings("ignore", "Synchronization debug mode is a prototype")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            compute()
        finally:
            torch.cuda.set_sync_debug_mode(before)
    return asked


def _shapes(tensors: Tensors) -> dict[str, tuple[torch.Size, torch.dtype]]:
    return {name: (t.shape, t.dtype) for name, t in tensors.items()}


def _blank(tensors: Tensors) -> Tensors:
    return {name: torch.zeros_like(t, requires_grad=False) for name, t in tensors.items()}


@torch.no_grad()
def _fill(places: Tensors, values: Tensors) -> None:
    for name, place in places.items():
        place.copy_(values[name])
