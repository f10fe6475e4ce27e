"""docs/cases.md rows 8, 10, 11, 12 and 13 in virtual time, and overflow as torch's GradScaler handles it."""

from __future__ import annotations

import asyncio
import itertools
import logging
import math

import numpy as np
import pytest
import torch

from swarm.base.ids import Ticket
from swarm.testing.simulation.invariants import run_checked
from swarm.testing.simulation.phases import HeldBack, Log, committed, kind, ledger, node_at, node_of, until
from swarm.testing.simulation.simulation import Simulation, check
from swarm.testing.simulation.small_model import SmallFeed, one_process, small_config
from swarm.wire import messages as m
from swarm.wire.compression import decode_tensor, encode_tensor
from swarm.wire.framing import Frame

# ------------------------------------------------------------------------------------------------ 8: all-reduce

STEP = 1
AVERAGE_S = 6.0


async def before_joining(simulation, victim, exclude):
    """It was sealed, and not yet told to start."""
    with HeldBack(simulation, kind(m.Reduce, step=STEP, target=victim)) as held:
        await held.reached()
        await exclude()


async def after_joining(simulation, victim, exclude):
    """It was told to start; no slice of it has left, and none has reached it."""
    with HeldBack(simulation, lambda c: kind(m.Slice, step=STEP, stage=1)(c) and victim.address in (c.source, c.target)) as held:
        await until(lambda: any(c.source == victim.address for c in held.calls), "the victim's first slice")
        await exclude()


async def while_sending(simulation, victim, exclude):
    """A part of its slice is on the link."""
    sent: list = []

    async def slow_down(call):
        if kind(m.Slice, step=STEP, source=victim)(call):
            simulation.network.link(call.source, call.target, bytes_per_s=2000.0, one_way=True)
            sent.append(call)

    simulation.before_request.append(slow_down)
    await until(lambda: bool(sent), "the victim sends a slice")
    await asyncio.sleep(0.05)
    assert sent[0] in simulation.open_calls
    await exclude()
    simulation.before_request.remove(slow_down)
    for call in sent:
        simulation.network.link(call.source, call.target)


async def while_reducing(simulation, victim, exclude):
    """It has the slice of one other member, and waits for the next."""
    to_victim = kind(m.Slice, step=STEP, target=victim)
    with HeldBack(simulation, to_victim, limit=1) as held:
        await held.reached()
        arrived = Log(simulation, to_victim)
        await until(lambda: len(arrived) > 0, "another slice on its way")
        await asyncio.sleep(0.01)
        await exclude()


async def before_commit(simulation, victim, exclude):
    """Everyone holds the average; nobody knows the record."""
    with HeldBack(simulation, kind(m.Commit, step=STEP)) as held:
        await held.reached()
        await exclude()


ALL_REDUCE_PHASES = (before_joining, after_joining, while_sending, while_reducing, before_commit)


@pytest.mark.parametrize("how", ["killed", "stopped"])
@pytest.mark.parametrize("phase", ALL_REDUCE_PHASES, ids=lambda phase: phase.__name__)
def test_case_08_a_peer_is_lost_in_each_phase_of_the_all_reduce(phase, how):
    """The others finish within the deadline plus a few seconds; `check` compares bits, and the mean over all tickets."""
    config = small_config(total_steps=4, timing={"average_s": AVERAGE_S})

    async def main():
        simulation = Simulation(config, seed=51)
        await simulation.start(peers_per_stage=3, trainers=1)
        await committed(simulation, STEP)
        leader, *_, last = simulation.commits[STEP - 1].members[1]
        victim = node_of(simulation, last)
        assert victim is not node_of(simulation, leader)
        key, excluded_at = victim.peer.stage_context.me.key, 0.0

        async def exclude():
            nonlocal excluded_at
            excluded_at = asyncio.get_running_loop().time()
            if how == "killed":
                await simulation.kill(victim.name)
            else:
                simulation.pause(victim)

        await phase(simulation, victim, exclude)
        await committed(simulation, STEP + 1)
        took = asyncio.get_running_loop().time() - excluded_at
        # A trainer may still ask the stopped peer for a ticket that must be computed again.
        allowed = max(AVERAGE_S, config.timing.stall_s) + 2.0
        assert took <= allowed, f"the step ended {took:.1f} s after the peer was {how}"
        record = simulation.commits[STEP]
        holders = {x.key for x in record.results[1].holders}
        assert len(holders - {key}) == 2, "the step was decided without the survivors"
        if how == "stopped":
            await committed(simulation, STEP + 2)  # long past the deadline
            simulation.resume(victim)  # what it was about to send goes out now
        await simulation.finish()
        check(simulation)
        if how == "stopped":
            newest = victim.peer.committed.versions.newest.version_id
            assert newest in simulation.version_ids[max(simulation.commits)] or not victim.peer.membership.serving
        await simulation.close()

    run_checked(main())


# ------------------------------------------------------------------------------------------------ 10: token weights


def test_case_10_loss_and_gradient_are_weighted_by_tokens_whatever_the_number_of_peers():
    """Tickets hold different numbers of tokens, so a mean of means would differ from one process and from run to run."""
    config = small_config(total_steps=4)
    tokens = {int((SmallFeed(config).batch(Ticket(0, i)).labels["y"] != -100).sum()) for i in range(config.tickets_per_step)}
    assert len(tokens) > 1, "every ticket holds as many tokens: the case is not met"
    losses = []

    async def main(peers, trainers):
        simulation = Simulation(config, seed=peers)
        await simulation.start(peers_per_stage=peers, trainers=trainers)
        averages = Log(simulation, kind(m.AllReduce))
        await simulation.finish()
        check(simulation)
        losses.append(simulation.records())
        if peers > 1:
            per_member = [{seal.tokens for seal in call.message.seals} for call in averages.calls]
            assert any(len(counts) > 1 for counts in per_member), "replicas never held different numbers of tokens"
        await simulation.close()

    for peers, trainers in ((1, 1), (2, 1), (3, 2)):
        run_checked(main(peers, trainers))
    for other in losses[1:]:
        assert other == pytest.approx(losses[0], rel=1e-12)


# ------------------------------------------------------------------------------------------------ 11: bad numbers

VALUES = [math.nan, math.inf, 1e30]


def spoil_gradient(simulation, node, value):
    """Its gradient of the parameters is wrong."""
    compute = node.peer.stage_context.compute
    backward = compute.backward

    def spoilt(*args, **options):
        result = backward(*args, **options)
        result.parameters[0] = result.parameters[0] + value
        return result

    compute.backward = spoilt


def spoil_activation(simulation, node, value):
    """What it hands to the next stage is wrong."""
    compute = node.peer.stage_context.compute
    forward = compute.forward

    def spoilt(*args, **options):
        activation = forward(*args, **options)
        if activation.outputs is not None:
            activation.outputs = {name: tensor + value for name, tensor in activation.outputs.items()}
        return activation

    compute.forward = spoilt


def spoil_input_gradient(simulation, node, value):
    """What it hands back to the stage before is wrong; its own gradient is not."""
    compute = node.peer.stage_context.compute
    backward = compute.backward

    def spoilt(*args, **options):
        result = backward(*args, **options)
        result.inputs = {name: tensor + value for name, tensor in result.inputs.items()}
        return result

    compute.backward = spoilt


def _spoilt(frame, value):
    """`frame` with `value` in the first element of each tensor."""
    specs, buffers = [], []
    for spec, buffer in zip(frame.message.tensors, frame.buffers, strict=True):
        tensor = decode_tensor(spec, buffer).clone()
        tensor.view(-1)[0] = value
        new, data = encode_tensor(spec.name, tensor, "raw", spec.role)
        specs.append(new)
        buffers.append(data)
    return Frame(frame.message.model_copy(update={"tensors": tuple(specs)}), tuple(buffers))


def spoil_slice(simulation, node, value):
    """Its part of the sum is wrong on the link."""
    simulation.falsify[node.address] = lambda f: _spoilt(f, value) if isinstance(f.message, m.Slice) else f


def spoil_reduced_slice(simulation, node, value):
    """The sum that it made for others is wrong."""
    simulation.falsify[node.address] = lambda f: _spoilt(f, value) if isinstance(f.message, m.ReducedSlice) else f


SPOILERS = (spoil_gradient, spoil_activation, spoil_input_gradient, spoil_slice, spoil_reduced_slice)


@pytest.mark.parametrize("value", VALUES)
@pytest.mark.parametrize("spoil", SPOILERS, ids=lambda spoil: spoil.__name__)
def test_case_11_one_peer_sends_bad_numbers(spoil, value, caplog):
    """Parameters and losses are those of one healthy process, no step is skipped, and the log names the peer."""
    caplog.set_level(logging.WARNING)

    async def main():
        simulation = Simulation(small_config(total_steps=3), seed=61)
        await simulation.start(peers_per_stage=3, trainers=1)
        await simulation.began()
        bad = simulation.nodes["stage1.1"]
        spoil(simulation, bad, value)
        await simulation.finish()
        check(simulation)
        assert not any(record.skipped for record in simulation.commits.values())
        for peer in simulation.stage_peers():
            assert bool(torch.isfinite(peer.committed.versions.newest.masters).all())
        name = bad.identity.peer_id[:8]
        assert any(name in entry.getMessage() for entry in caplog.records), f"{name} is not named in the log"
        await simulation.close()

    run_checked(main())


@pytest.mark.parametrize("value", VALUES)
def test_case_11_one_peer_sends_bad_state(value, caplog):
    """A joiner sees that the bytes are not those that the donor announced, and takes another's."""
    caplog.set_level(logging.INFO)

    async def main():
        simulation = Simulation(small_config(total_steps=12), seed=63)
        await simulation.start(peers_per_stage=2, trainers=1)
        await committed(simulation, 1)
        bad = simulation.nodes["stage1.0"]
        simulation.falsify[bad.address] = lambda f: _spoilt(f, value) if isinstance(f.message, m.StateChunk) else f
        asked = Log(simulation, kind(m.StateRange, target=bad))
        joiners = [await simulation.add_stage_peer(f"stage1.{i}", 1) for i in (2, 3, 4)]
        await simulation.finish()
        check(simulation)
        assert len(asked) > 0, "nobody asked the bad donor"
        for joiner in joiners:
            assert joiner.peer.membership.serving
            assert bool(torch.isfinite(joiner.peer.committed.versions.newest.masters).all())
        name = bad.identity.peer_id[:8]
        assert any(name in entry.getMessage() and "digest" in entry.getMessage() for entry in caplog.records)
        await simulation.close()

    run_checked(main())


def test_case_11_a_value_too_large_for_the_wire(caplog):
    """70000.0 is finite, but not in fp16: the ticket of the peer that would send it overflows, and others do its work."""
    config = small_config(total_steps=3, precision="fp32", compression="fp16")

    async def main():
        simulation = Simulation(config, seed=63)
        await simulation.start(peers_per_stage=2, trainers=1)
        await simulation.began()
        bad = simulation.nodes["stage1.1"]
        spoil_activation(simulation, bad, 70000.0)
        await simulation.finish()
        assert all([r.num_tickets for r in x.results] == [8] * 3 for s, x in simulation.commits.items() if s >= 0)
        assert not any(record.skipped for record in simulation.commits.values())
        assert "which the wire (--compression fp16) does not carry" in caplog.text
        name = bad.identity.peer_id[:8]
        assert any(name in entry.getMessage() for entry in caplog.records), f"{name} is not named in the log"
        losses = [simulation.commits[step].loss for step in range(3)]
        assert losses == pytest.approx(one_process(config).losses, rel=1e-2)
        await simulation.close()

    run_checked(main())


# ------------------------------------------------------------------------------------------------ 12: clipping


@pytest.mark.parametrize("max_grad_norm", [0.05, 0.3, 100.0])
def test_case_12_clipping_equals_clip_grad_norm_of_the_whole_model(max_grad_norm):
    config = small_config(total_steps=4, max_grad_norm=max_grad_norm)
    plain = one_process(config)

    async def main():
        simulation = Simulation(config, seed=71)
        await simulation.start(peers_per_stage=2, trainers=2)
        await simulation.finish()
        check(simulation)
        for step, norm in enumerate(plain.grad_norms):
            record = simulation.commits[step]
            assert record.grad_norm == pytest.approx(norm, rel=1e-9)
            assert record.clip_coefficient == pytest.approx(min(1.0, max_grad_norm / (norm + 1e-6)), rel=1e-9)
        await simulation.close()

    run_checked(main())
    assert any(norm > max_grad_norm for norm in plain.grad_norms) == (max_grad_norm < 1.0)


# ------------------------------------------------------------------------------------------------ 13: lost replies


def test_case_13_the_reply_to_a_backward_is_lost_and_the_caller_retries():
    """At one peer, then at the other, then on a new route at the first again: the ticket counts once all the same."""
    ticket = Ticket(1, 3)

    async def main():
        simulation = Simulation(small_config(total_steps=3), seed=81)
        await simulation.start(peers_per_stage=2, trainers=1)
        await simulation.began()
        mine = lambda call: kind(m.Train, stage=1)(call) and call.message.ticket == ticket  # noqa: E731
        calls = Log(simulation, mine)
        lost = []

        def lose(call):
            if mine(call) and len(lost) < 3:
                lost.append(call)
                return True
            return False

        simulation.lose_reply.append(lose)
        await simulation.finish()
        check(simulation)
        assert len(lost) == 3
        targets = [node_at(simulation, call.target).name for call in calls.calls]
        assert len(set(targets[:2])) == 2, f"the second try went to the same peer: {targets}"
        assert len(calls) == 4, f"three replies were lost, and {len(calls)} requests were sent"
        route_trips = [calls.calls[i].began_at for i in (0, 2)]
        assert route_trips[1] - route_trips[0] >= 0.05, "the trainer did not wait before its next pass"
        await simulation.close()

    run_checked(main())


def test_case_13_retries_are_bounded_and_wait_longer_each_time():
    ticket = Ticket(1, 3)

    async def main():
        simulation = Simulation(small_config(total_steps=3), seed=82)
        await simulation.start(peers_per_stage=2, trainers=1)
        await simulation.began()
        mine = lambda call: kind(m.Train, stage=0)(call) and call.message.ticket == ticket  # noqa: E731
        calls = Log(simulation, mine)
        until_s = 20.0
        simulation.lose_reply.append(lambda call: mine(call) and asyncio.get_running_loop().time() < until_s)
        await simulation.finish()
        check(simulation)
        began = sorted({call.began_at for call in calls.calls if call.began_at < until_s})
        gaps = [b - a for a, b in itertools.pairwise(began)]
        assert len(calls) <= 40, f"{len(calls)} requests for one ticket in {until_s:g} s"
        assert max(gaps[-4:]) > 0.9, f"no back-off: {gaps}"
        await simulation.close()

    run_checked(main())


# ------------------------------------------------------------------------------------------------ overflow


class _OneBadTicket(SmallFeed):
    """The numbers of one ticket overflow wherever they are computed."""

    bad = Ticket(1, 3)
    value = math.inf

    def batch(self, ticket):
        batch = super().batch(ticket)
        if ticket == self.bad:
            batch.inputs["x"][0] = self.value
        return batch


def test_a_ticket_that_overflows_everywhere_skips_the_step():
    """As torch's GradScaler does: the optimizer does not step, not even its moments, and the run goes on."""
    config = small_config(total_steps=4)
    feed = _OneBadTicket(config)
    plain = one_process(config, feed=feed)

    async def main():
        simulation = Simulation(config, seed=91, feed=feed)
        await simulation.start(peers_per_stage=2, trainers=1)
        await simulation.finish()
        assert [simulation.commits[step].skipped for step in range(4)] == [False, True, False, False]
        record = simulation.commits[1]
        assert [r.num_tickets for r in record.results] == [8] * 3, "the ticket is not counted"
        assert max(r.num_overflow for r in record.results) == 1
        distance = float((simulation.parameters() - plain.parameters).norm() / plain.parameters.norm())
        assert distance < 1e-8, f"parameters differ by {distance}"
        for step in (0, 2, 3):
            assert simulation.commits[step].loss == pytest.approx(plain.losses[step], rel=1e-8)
        await simulation.close()

    run_checked(main())


def test_with_one_peer_a_stage_there_is_no_second_opinion():
    config = small_config(total_steps=3)

    async def main():
        simulation = Simulation(config, seed=92, feed=_OneBadTicket(config))
        await simulation.start(peers_per_stage=1, trainers=1)
        await simulation.finish(within_s=60.0)
        assert [simulation.commits[step].skipped for step in range(3)] == [False, True, False]
        await simulation.close()

    run_checked(main())


def test_a_single_peer_that_calls_a_ticket_overflow_is_blamed_and_the_step_is_not_skipped(caplog):
    async def main():
        simulation = Simulation(small_config(total_steps=3), seed=93)
        await simulation.start(peers_per_stage=2, trainers=1)
        await until(lambda: len(ledger(simulation.nodes["stage1.1"], 1)) >= 1, "the peer serves")
        bad = simulation.nodes["stage1.1"]
        spoil_gradient(simulation, bad, math.nan)
        await simulation.finish()
        check(simulation)
        assert not any(record.skipped for record in simulation.commits.values())
        name = bad.identity.peer_id[:8]
        assert any(name in e.getMessage() and e.levelno >= logging.ERROR for e in caplog.records), "nobody was blamed"
        await simulation.close()

    run_checked(main())


def test_fp16_halves_the_loss_scale_after_an_overflow():
    """The scale belongs to the version, and every peer multiplies with the same one."""
    config = small_config(total_steps=5, precision="fp16", target_batch_size=16)
    feed = _OneBadTicket(config)
    feed.value = np.float32(7e4)  # finite in fp32 only

    async def main():
        simulation = Simulation(config, seed=94, feed=feed)
        await simulation.start(peers_per_stage=2, trainers=1)
        await simulation.finish()
        scales = [simulation.commits[step].loss_scale for step in range(-1, 5)]
        assert [simulation.commits[step].skipped for step in range(5)] == [False, True, False, False, False]
        assert scales == [2.0**14, 2.0**14, 2.0**13, 2.0**13, 2.0**13, 2.0**13]
        states = [
            {(p.committed.versions.newest.version_id, p.committed.state_digest) for p in simulation.stage_peers(k)}
            for k in range(3)
        ]
        assert all(len(state) == 1 for state in states)
        losses = [simulation.commits[step].loss for step in (0, 2, 3, 4)]
        expected = one_process(small_config(total_steps=5, precision="fp32", target_batch_size=16), feed=feed, skip={1}).losses
        assert losses == pytest.approx([expected[step] for step in (0, 2, 3, 4)], rel=1e-2)
        await simulation.close()

    run_checked(main())
