"""What peers say to one another, line by line: the story of one ticket, from its lease to the commit record.

Run it: `python -m swarm.testing.simulation.transcript`. It prints what `docs/follow-one-micro-batch.md` shows, and a test
compares the two. Owns the wording; must not know how a simulation is built or what its messages lead to.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator

from swarm.base.ids import Address, Ticket
from swarm.testing.simulation.simulation import Simulation
from swarm.testing.simulation.small_model import small_config
from swarm.testing.simulation.tapped import Call
from swarm.testing.virtual_time import run_virtual
from swarm.wire import messages as m

SEED = 0
#: The ticket whose story is told.
TICKET = Ticket(1, 0)


class Transcript:
    """The requests of a simulation and their answers that concern one ticket and the end of its step, as lines of text."""

    def __init__(self, simulation: Simulation, ticket: Ticket) -> None:
        self._simulation = simulation
        self._ticket = ticket
        self._leased = self._done = False
        self.lines: list[str] = []
        simulation.before_request.append(self._asked)
        simulation.after_reply.append(self._answered)

    async def _asked(self, call: Call) -> None:
        text = self._request(call.message)
        if text and not isinstance(call.message, m.Lease):
            self._tell(call.source, call.target, text)

    def _answered(self, call: Call) -> None:
        if isinstance(call.message, m.Lease):
            self._lease(call, call.message)
        elif call.reply is not None and self._request(call.message):
            text = self._reply(call.reply)
            if text:
                self._tell(call.target, call.source, text)

    def _lease(self, call: Call, message: m.Lease) -> None:
        reply = call.reply
        if isinstance(reply, m.Leased) and self._ticket in reply.tickets and not self._leased:
            self._leased = True
            self._tell(call.target, call.source, f"Leased {' '.join(map(_name, reply.tickets))}")
        for ticket, accumulated in message.done:
            if ticket == self._ticket and not self._done:
                self._done = True
                self._tell(call.source, call.target, f"Lease done {_name(ticket)}, accumulated everywhere: {accumulated}")

    def _request(self, message: m.Message) -> str:
        """The request in words; empty if it is not part of the story."""
        step, index = self._ticket
        if isinstance(message, m.Train):
            return f"Train {_name(message.ticket)} at stage {message.stage}" if message.ticket == self._ticket else ""
        if isinstance(message, m.Commit):
            return f"Commit record of step {message.record.step}" if message.record.step == step else ""
        if getattr(message, "step", None) != step:
            return ""
        if isinstance(message, m.Claim):
            return f"Claim {_tickets(step, message.indexes)} at stage {message.stage}" if index in message.indexes else ""
        if isinstance(message, m.Gather | m.Collect):
            verb = "freeze" if message.freeze else "open"
            return f"{type(message).__name__} the ledgers of step {step}, stage {message.stage}: {verb}"
        if isinstance(message, m.AllReduce):
            return f"AllReduce step {step}, stage {message.stage}: {len(message.seals)} seals"
        if isinstance(message, m.Reduce):
            return f"Reduce step {step}, stage {message.stage}: shares {list(message.shares)}"
        if isinstance(message, m.Slice):
            return f"Slice chunk {message.number}" if message.number == 0 else ""
        return ""

    def _reply(self, message: m.Message) -> str:
        if isinstance(message, m.Trained):
            accumulated = [hop.stage for hop in message.hops if hop.accumulated]
            return f"Trained, loss sum {message.loss_sum:.4f} over {message.tokens} tokens, accumulated at stages {accumulated}"
        if isinstance(message, m.Claimed):
            return f"Claimed {_tickets(self._ticket.step, message.granted)}"
        if isinstance(message, m.Collected):
            return f"Collected: a seal of {len(message.seal.ledger)} tickets"
        if isinstance(message, m.Gathered):
            return f"Gathered {sum(len(seal.ledger) for seal in message.seals)} tickets in {len(message.seals)} seals"
        if isinstance(message, m.AllReduced):
            held = len(message.result.holders) if message.result is not None else 0
            return f"AllReduced: the stage is prepared, {held} members hold the sum"
        if isinstance(message, m.Reduced):
            return "Reduced: it holds the sum"
        if isinstance(message, m.ReducedSlice):
            return "ReducedSlice"
        if isinstance(message, m.Refusal):
            return f"Refusal {message.code}: {message.reason}"
        return ""

    def _tell(self, source: Address, target: Address, text: str) -> None:
        names = {node.address: node.name for node in self._simulation.nodes.values()}
        now = asyncio.get_running_loop().time() * 1000
        self.lines.append(f"{now:7.1f} ms  {names.get(source, '?'):>9} -> {names.get(target, '?'):<9}  {text}")


def _name(ticket: Ticket) -> str:
    return f"({ticket.step}, {ticket.index})"


def _tickets(step: int, indexes: tuple[int, ...]) -> str:
    return " ".join(_name(Ticket(step, index)) for index in indexes) or "nothing"


def story() -> Iterator[str]:
    """The lines of the transcript: 2 stages with 2 peers each, one trainer, one backbone; the same at each call."""

    async def main() -> list[str]:
        simulation = Simulation(small_config(num_stages=2, total_steps=TICKET.step + 1), seed=SEED)
        transcript = Transcript(simulation, TICKET)
        await simulation.start(peers_per_stage=2)
        await simulation.finish()
        await simulation.close()
        return transcript.lines

    yield from run_virtual(main())


if __name__ == "__main__":
    logging.disable()  # this swarm keeps no checkpoints, and says so
    for line in story():
        print(line)
