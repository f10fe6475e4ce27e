"""Asks other peers and dispatches what they ask. Owns the mapping from message types to handlers; decides nothing."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, TypeVar, Union

from swarm.base.errors import LinkError, RemoteError, RemoteProtocolError, RemoteRefused, SwarmError
from swarm.base.ids import Address
from swarm.net.exchange import one_line
from swarm.net.transport import Progress
from swarm.peer.context import PeerContext
from swarm.peer.presence import Presence
from swarm.wire.framing import Buffer, Frame
from swarm.wire.messages import REQUEST_KINDS, Ack, Member, Message, Refusal, Status, StatusReply

logger = logging.getLogger(__name__)

M = TypeVar("M", bound=Message)
T = TypeVar("T")
Reply = Union[Message, Frame]
MessageHandler = Callable[[Any, Frame, Progress], Awaitable[Reply]]


class Refuse(RemoteRefused):
    """Raised by a handler to say no, with a code of `REFUSAL_CODES` and perhaps the stage and newest record."""

    def __init__(self, code: str, reason: str, **extra: Any) -> None:
        super().__init__(code, reason)
        self.refusal = Refusal(code=code, reason=reason[:2000], **extra)


class RefusedBy(RemoteRefused):
    """A peer said no; `refusal` is its message."""

    def __init__(self, refusal: Refusal) -> None:
        super().__init__(refusal.code, refusal.reason)
        self.refusal = refusal


class Link:
    """Asks other peers for one peer, and answers them."""

    def __init__(self, context: PeerContext) -> None:
        self.context = context
        #: Which of the members that were asked are there.
        self.presence = Presence(self._status, context.config.timing)
        self._handlers: dict[type[Message], MessageHandler] = {}

    def register(self, kind: type[Message], handler: MessageHandler) -> None:
        """Have `handler` answer messages of this kind, in the place of the one before."""
        self._handlers[kind] = handler

    async def serve(self) -> None:
        """Begin to answer."""
        await self.context.transport.start(self._handle)

    async def _handle(self, frame: Frame, progress: Progress) -> Frame:
        reply = await self._dispatch(frame, progress)
        return reply if isinstance(reply, Frame) else Frame(reply)

    async def _dispatch(self, frame: Frame, progress: Progress) -> Reply:
        message = frame.message
        handler = self._handlers.get(type(message))
        if handler is None:
            known = "is no request" if message.kind not in REQUEST_KINDS else "is not served here"
            return Refusal(code="unknown", reason=f"{message.kind} {known}")
        run = getattr(message, "run", None)
        if run is not None and run != self.context.run:
            return Refusal(code="wrong_run", reason=f"this peer belongs to run {self.context.run[:12]}")
        try:
            return await handler(message, frame, progress)
        except (Refuse, RefusedBy) as refused:
            return refused.refusal

    async def ask(
        self,
        target: Member | Address,
        message: Message,
        expect: type[M],
        *,
        buffers: Sequence[Buffer] = (),
        stall_s: float | None = None,
        progress: Progress | None = None,
    ) -> tuple[M, Frame]:
        """Send `message` and return the reply, which must be of type `expect`.

        A message to this very peer is handled without the network. `stall_s` defaults to the short `request_s`.

        Raises:
            RefusedBy: the peer said no.
            LinkError, RemoteProtocolError: nothing useful came back.
        """
        context = self.context
        request = Frame(message, tuple(buffers))
        if isinstance(target, Member) and target.key == (context.peer, context.incarnation):
            reply = await self._answer_own(request, progress or Progress())
        else:
            address = Address(target.host, target.port)
            stall = context.config.timing.request_s if stall_s is None else stall_s
            try:
                reply = await self._call(target, address, request, stall, progress)
            except LinkError as error:
                if isinstance(target, Member):
                    self.presence.failed(target, error)
                raise
        if isinstance(reply.message, Refusal):
            raise RefusedBy(reply.message)
        if isinstance(target, Member) and self.presence.liveness.is_suspected(target.key) and expect is not StatusReply:
            self.presence.heard(target)
        if not isinstance(reply.message, expect):
            raise RemoteProtocolError(f"{message.__class__.__name__} was answered by {reply.message.__class__.__name__}")
        return reply.message, reply

    async def _call(
        self, target: Member | Address, address: Address, request: Frame, stall_s: float, progress: Progress | None
    ) -> Frame:
        transport = self.context.transport
        if isinstance(target, Address) or stall_s <= self.context.config.timing.request_s:
            return await transport.call(address, request, stall_s=stall_s, progress=progress)
        return await self.presence.watched(
            target, lambda counted: transport.call(address, request, stall_s=stall_s, progress=counted), progress
        )

    async def status_of(self, member: Member) -> StatusReply | None:
        """Ask a peer how it is; None if it does not answer, or refuses."""
        try:
            return (await self.ask(member, Status(), StatusReply))[0]
        except (LinkError, RemoteError):
            return None

    async def tell(self, member: Member, message: Message) -> bool:
        """Send what needs no more than an `Ack`; False if it was not taken."""
        try:
            await self.ask(member, message, Ack)
        except (LinkError, RemoteError) as error:
            logger.debug("%s not taken by %s: %s", type(message).__name__, member.peer[:8], error)
            return False
        return True

    async def _status(self, member: Member) -> StatusReply:
        return (await self.ask(member, Status(), StatusReply))[0]

    async def _answer_own(self, request: Frame, progress: Progress) -> Frame:
        """A failure is told as to anybody else."""
        try:
            return await self._handle(request, progress)
        except Exception as error:
            logger.warning("own %s request failed: %s", request.message.kind, one_line(error))
            return Frame(Refusal(code="failed", reason=one_line(error)))


async def together(*work: Coroutine[Any, Any, T]) -> list[T]:
    """Run all at once; the first failure cancels the rest and is raised when they have ended."""
    tasks = [asyncio.ensure_future(one) for one in work]
    try:
        return await asyncio.gather(*tasks)
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise


class Tasks:
    """Owns background tasks: none is lost, failures are logged, and all end with their owner."""

    def __init__(self) -> None:
        #: In the order in which they began: the same seed is the same run, also when they end.
        self._tasks: dict[asyncio.Task[Any], None] = {}
        #: First unexpected failure of a task started with `vital=True`.
        self.failure: asyncio.Future[None] | None = None

    def start(self, work: Coroutine[Any, Any, Any], name: str, *, vital: bool = False) -> asyncio.Task[Any]:
        """Run `work` in the background; `until` raises the failure of what is vital."""
        task = asyncio.get_running_loop().create_task(work, name=name)
        self._tasks[task] = None
        if vital and self.failure is None:
            self.failure = asyncio.get_running_loop().create_future()
        task.add_done_callback(lambda t: self._ended(t, vital))
        return task

    def _ended(self, task: asyncio.Task[Any], vital: bool) -> None:
        self._tasks.pop(task, None)
        if task.cancelled() or (error := task.exception()) is None:
            return
        if isinstance(error, SwarmError) and not vital:
            logger.warning("%s: %s", task.get_name(), error)
        else:
            logger.error("%s failed: %r", task.get_name(), error, exc_info=error)
        if vital:
            self.fail(error)

    def fail(self, error: BaseException) -> None:
        """Have `until` raise `error`, as if something vital had failed with it."""
        if self.failure is not None and not self.failure.done():
            self.failure.set_exception(error)

    async def until(self, event: asyncio.Event) -> None:
        """Wait for `event`, or raise the failure of a vital task."""
        waiter = asyncio.ensure_future(event.wait())
        watched: list[asyncio.Future[Any]] = [waiter] if self.failure is None else [waiter, self.failure]
        try:
            await asyncio.wait(watched, return_when=asyncio.FIRST_COMPLETED)
        finally:
            waiter.cancel()
        if self.failure is not None and self.failure.done():
            self.failure.result()

    async def close(self) -> None:
        """Cancel all tasks, and wait until they have ended."""
        tasks = [task for task in self._tasks if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self.failure is not None and not self.failure.done():
            self.failure.cancel()
