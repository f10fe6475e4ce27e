"""Deliberate bugs: each makes one of these schedules fail, so the schedules would see such a bug. Unchanged code passes all.

A bug is a monkeypatch on the product, as small as the slip that it stands for. It counts as seen if a promise or an
invariant breaks, if a peer fails, or if the run does not end.
"""

from __future__ import annotations

import asyncio
import math

import pytest

from swarm.averaging.tied import TiedRanges
from swarm.base.errors import SwarmError
from swarm.lifecycle import commit_record
from swarm.lifecycle.coverage import Coverage
from swarm.lifecycle.step import STEP, Ledger
from swarm.peer.coordinator import chosen_leaders
from swarm.peer.coordinator import election as election
from swarm.peer.link import Link
from swarm.peer.stage.committed_state import CommittedState
from swarm.peer.stage.micro_batches import MicroBatchServer
from swarm.peer.stage.stage_member import StageMember
from swarm.stage.accumulator import Accumulator
from swarm.stage.compute import StageCompute
from swarm.testing.simulation.invariants import run_checked
from swarm.testing.simulation.phases import HeldBack, committed, coordinator_of, kind, ledger, node_at, node_of, until
from swarm.testing.simulation.simulation import Simulation, check
from swarm.testing.simulation.small_model import small_config
from swarm.testing.virtual_time import Deadlock
from swarm.wire import messages as m

# ---------------------------------------------------------------------------------------------------- schedules


async def _end(simulation, *, within_s=200.0):
    await simulation.finish(within_s=within_s)
    check(simulation)
    await simulation.abandon()


async def calm(seed):
    simulation = Simulation(small_config(total_steps=3), seed=seed)
    await simulation.start(peers_per_stage=2, trainers=1)
    await _end(simulation)


async def lost_replies(seed):
    """Backwards that were done, whose replies are lost: retried at the same peer and at others."""
    simulation = Simulation(small_config(total_steps=3), seed=seed, drop_reply=0.02)
    await simulation.start(peers_per_stage=2, trainers=2)
    await _end(simulation)


async def half_backward(seed):
    simulation = Simulation(small_config(total_steps=3), seed=seed)
    await simulation.start(peers_per_stage=2, trainers=1)
    node = simulation.nodes["stage1.0"]
    await until(lambda: len(ledger(node, 1)) >= 2, "two tickets in a ledger")
    node.fail_halfway = 1
    await _end(simulation)


async def restart_between_seal_and_average(seed):
    """In the very first step, when a newcomer knows as much as anyone."""
    simulation = Simulation(small_config(total_steps=3), seed=seed)
    await simulation.start(peers_per_stage=2, trainers=1)
    with HeldBack(simulation, kind(m.AllReduce, step=0, stage=1)) as held:
        call = await held.reached()
        leader = node_at(simulation, call.target)
        name = "stage1.0" if leader.name == "stage1.1" else "stage1.1"
        await simulation.kill(name)
        await simulation.add_stage_peer(name, 1, same_port=True)
        await asyncio.sleep(0.1)
    await _end(simulation)


async def backward_after_the_seal(seed):
    """A member's claim is void once another leads; its backward comes when it was sealed without that ticket."""
    simulation = Simulation(small_config(total_steps=3), seed=seed)
    await simulation.start(peers_per_stage=3, trainers=1)
    await committed(simulation, 1)
    leader, *_, late = [node_of(simulation, member) for member in simulation.commits[0].members[1]]
    with HeldBack(simulation, kind(m.Train, stage=2, step=1, source=late), limit=1) as backward:
        below = await backward.reached()
        above = next(
            c
            for c in simulation.open_calls
            if c.target == late.address and kind(m.Train)(c) and c.message.ticket == below.message.ticket
        )
        simulation.network.cut(above.source, late.address)
        await simulation.kill(leader.name)
        with HeldBack(simulation, kind(m.AllReduce, step=1, stage=1)) as average:
            call = await average.reached()
            assert late.peer.stage_context.me.key in {seal.member.key for seal in call.message.seals}
            backward.release()
            await until(lambda: below.reply is not None or below.error is not None, "the late backward")
            await asyncio.sleep(0.1)
    simulation.network.heal(above.source, late.address)
    await _end(simulation)


async def commit_between_forward_and_backward(seed):
    """With delayed updates, and no room for graphs."""
    simulation = Simulation(small_config(total_steps=4, delay_steps=1), seed=seed)
    await simulation.add_backbone("backbone0")
    for stage in range(3):
        await simulation.add_stage_peer(f"stage{stage}.0", stage, memory_limit_bytes=4 * 6 * 8 + 4 * 8 + 100)
    await simulation.add_trainer("trainer0", in_flight=1)
    versions = simulation.nodes["stage0.0"].peer.committed.versions
    with HeldBack(simulation, kind(m.Train, stage=1, step=2), limit=1) as held:
        await held.reached()
        before = versions.newest.version_id
        await until(lambda: versions.newest.version_id != before, "a commit")
    await _end(simulation)


async def calm_and_tied(seed):
    simulation = Simulation(small_config(total_steps=3, model_options={"tied": True}), seed=seed)
    await simulation.start(peers_per_stage=2, trainers=1)
    await _end(simulation, within_s=30.0)


async def prepared_at_different_attempts(seed):
    """The ends hold copies of one parameter. A peer of the first stage is prepared at an attempt that the others gave up,
    and is all that is left of its stage when they are prepared at a later one and their coordinator dies."""
    simulation = Simulation(small_config(total_steps=3, model_options={"tied": True}), seed=seed)
    await simulation.start(peers_per_stage=2, trainers=1, backbones=2)
    await committed(simulation, 1)
    left, other = simulation.nodes["stage0.0"], "stage0.1"

    def prepared(peer):
        state = peer.member.steps.get(1)
        return state is not None and state.accumulator.ledger.state == "prepared"

    with HeldBack(simulation, kind(m.AllReduce, step=1, stage=1)) as middle:
        call = await middle.reached()
        ends = [*simulation.stage_peers(0), *simulation.stage_peers(2)]
        await until(lambda: all(prepared(peer) for peer in ends), "both ends prepared")
        simulation.isolate(left)
        await simulation.kill(node_at(simulation, call.target).name)
    with HeldBack(simulation, kind(m.Commit, step=1)) as decided:
        await decided.reached()
        assert prepared(left.peer)
        await simulation.kill(coordinator_of(simulation).name)
        await simulation.kill(other)
        simulation.rejoin(left)
    await _end(simulation)


SCHEDULES = (
    calm,
    lost_replies,
    half_backward,
    restart_between_seal_and_average,
    backward_after_the_seal,
    commit_between_forward_and_backward,
    calm_and_tied,
    prepared_at_different_attempts,
)
SEEDS = (1, 2)

# ---------------------------------------------------------------------------------------------------- mutations


def count_a_retry_twice(patch):
    def may_add(self, index):
        return self.state == "open" and self._claims.get(index) == self.attempt.order

    patch.setattr(Ledger, "may_add", may_add)


def accept_a_claim_without_its_leader(patch):
    def may_add(self, index):
        return self.state == "open" and index not in self

    patch.setattr(Ledger, "may_add", may_add)


def seal_without_freezing(patch):
    """The ledger is read and the table moved, but claims stay and the compute thread is not told to stop."""

    def collect(self, attempt, *, freeze):
        self.state = STEP.next(self.state, "freeze" if freeze else "open")
        self.attempt = attempt

    def may_add(self, index):
        return index not in self and index in self._claims

    patch.setattr(Ledger, "collect", collect)
    patch.setattr(Ledger, "may_add", may_add)


def commit_without_coverage(patch):
    patch.setattr(Coverage, "covered", property(lambda self: frozenset(range(8))))


def clip_per_stage(patch):
    advance = CommittedState.advance

    async def clipped(self, record, flat, *adopt):
        norm = math.sqrt(record.results[self._context.stage].sum_squares) / record.tokens
        coefficient = min(1.0, self._context.config.max_grad_norm / (norm + 1e-6))
        await advance(self, record.model_copy(update={"clip_coefficient": coefficient}), flat, *adopt)

    patch.setattr(CommittedState, "advance", clipped)


def _around(patch, request, wrap):
    """Have `wrap(handler, link)` serve `request` at every peer."""
    register = Link.register
    patch.setattr(
        Link, "register", lambda self, kind, handler: register(self, kind, wrap(handler, self) if kind is request else handler)
    )


def ignore_an_incarnation(patch):
    """A restarted peer is taken for what it was: its former self's seal has it average, with nothing in its hands."""
    init, members = StageMember.__init__, {}

    def remembering(self, context, *args):
        members[context.link] = self
        init(self, context, *args)

    def as_before(handler, link):
        async def on_reduce(message, frame, progress):
            ledger = members[link].step_state(message.step).accumulator.ledger
            if ledger.attempt.order < message.attempt.order:
                ledger.collect(message.attempt, freeze=True)
            return await handler(message, frame, progress)

        return on_reduce

    patch.setattr(m.Member, "key", property(lambda self: (self.peer, "")))
    patch.setattr(StageMember, "__init__", remembering)
    _around(patch, m.Reduce, as_before)


def apply_a_record_twice(patch):
    advance = CommittedState.advance

    async def twice(self, record, flat, *adopt):
        await advance(self, record, flat, *adopt)
        await advance(self, record, flat, *adopt)

    patch.setattr(CommittedState, "advance", twice)


def recompute_with_newer_parameters(patch):
    init, backward = CommittedState.__init__, StageCompute.backward

    def remembering(self, context, *args, **options):
        init(self, context, *args, **options)
        context.compute.committed = self

    def newest(self, activation, output_gradients):
        if activation.outputs is None:
            activation.version = self.committed.versions.newest
        return backward(self, activation, output_gradients)

    patch.setattr(CommittedState, "__init__", remembering)
    patch.setattr(StageCompute, "backward", newest)


def keep_the_ledger_of_a_discarded_accumulator(patch):
    def discard(self):
        self._flat, self._views = None, []

    patch.setattr(Accumulator, "discard", discard)


def divide_by_micro_batches_instead_of_tokens(patch):
    advance = CommittedState.advance

    async def divided(self, record, flat, *adopt):
        await advance(self, record.model_copy(update={"tokens": record.results[0].num_tickets}), flat, *adopt)

    patch.setattr(CommittedState, "advance", divided)


def serve_whatever_version_is_newest(patch):
    """The head that a request names is not looked at."""

    async def version(self, message):
        return self._committed.versions.newest

    patch.setattr(MicroBatchServer, "_version", version)


def grant_every_claim(patch):
    """A leader grants without its book."""

    def generous(handler, link):
        async def on_claim(message, frame, progress):
            reply = await handler(message, frame, progress)
            return reply.model_copy(update={"granted": message.indexes})

        return on_claim

    _around(patch, m.Claim, generous)


def leave_out_what_other_stages_sum(patch):
    tie = TiedRanges.tie
    patch.setattr(TiedRanges, "tie", lambda self, flat, parts: tie(self, flat, {k: p * 0 for k, p in parts.items()}))


def count_tied_sums_in_every_stage(patch):
    patch.setattr(TiedRanges, "uncounted", property(lambda self: ()))


def decide_on_tied_sums_that_differ(patch):
    for module in (election, commit_record, chosen_leaders):
        patch.setattr(module, "torn_tie", lambda results: "")


MUTATIONS = {
    count_a_retry_twice: lost_replies,
    accept_a_claim_without_its_leader: lost_replies,
    seal_without_freezing: backward_after_the_seal,
    commit_without_coverage: half_backward,
    clip_per_stage: calm,
    ignore_an_incarnation: restart_between_seal_and_average,
    apply_a_record_twice: calm,
    recompute_with_newer_parameters: commit_between_forward_and_backward,
    keep_the_ledger_of_a_discarded_accumulator: half_backward,
    divide_by_micro_batches_instead_of_tokens: calm,
    serve_whatever_version_is_newest: commit_between_forward_and_backward,
    grant_every_claim: lost_replies,
    leave_out_what_other_stages_sum: calm_and_tied,
    count_tied_sums_in_every_stage: calm_and_tied,
    decide_on_tied_sums_that_differ: prepared_at_different_attempts,
}


@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda schedule: schedule.__name__)
def test_unchanged_code_passes(schedule):
    for seed in SEEDS:
        run_checked(schedule(seed), seed=seed)


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.__name__)
def test_the_schedules_see_this_bug(mutation, monkeypatch):
    mutation(monkeypatch)
    for seed in SEEDS:
        try:
            run_checked(MUTATIONS[mutation](seed), seed=seed)
        except (AssertionError, SwarmError, Deadlock) as error:
            print(f"seed {seed}: {type(error).__name__}: {error}")
            return
    pytest.fail(f"{MUTATIONS[mutation].__name__} passes with the bug {mutation.__name__!r}")
