"""The processes of a local swarm, from the first to the last: start order, who may die, clean-up, summary.

Owns what a child's end means: a stage process may die and the run goes on; so may a trainer beside another, not the backbone.
"""

from __future__ import annotations

import asyncio
import shlex
import shutil
import signal
import time
from pathlib import Path
from typing import Any

from launch.arguments import EXIT_USAGE
from launch.local_swarm.kept import Kept, adopt_complete, bytes_under_way, held_text, newest_checkpoint, require_own
from launch.local_swarm.plan import (
    DEFAULT_PEERS_PER_STAGE,
    DEFAULT_TRAINERS,
    METRICS_TRAINER,
    Command,
    SwarmPlan,
    backbone_command,
    peer_commands,
)
from launch.local_swarm.view import Picture, PlainView, Row
from launch.local_swarm.watching import watch_peers
from launch.processes.children import Child, Children
from launch.processes.daemon_thread import in_daemon_thread
from launch.processes.runner import Stopper
from launch.run.metrics import MetricsFile
from launch.run.models import TOKENIZER_DIRECTORY, copy_tokenizer, note_place
from launch.run.run_files import create_run, require_same, still_needed
from launch.run.step_lines import goes_on_text, loss_text
from models.presets import PRETRAINED
from swarm.base.config import RunConfig, run_id_of
from swarm.base.errors import ConfigError, SwarmError
from swarm.base.ids import Address
from swarm.peer.link import together

#: Time for children to end by themselves, in seconds: after a finished run they may still write a checkpoint.
GRACE_DONE_S = 30.0
GRACE_STOPPED_S = 3.0
_REFRESH_S = 0.25
#: Characters of a child's log that a failure quotes at most.
_MAX_WORDS = 300
_LOOPBACK = {"0.0.0.0": "127.0.0.1", "::": "::1"}


class LocalSwarm:
    """Runs the swarm once."""

    def __init__(self, config: RunConfig, plan: SwarmPlan, picture: Picture, view: PlainView) -> None:
        self._config = config
        self._described = config  # with the digests of its data, once they are known
        self._plan = plan
        self._picture = picture
        self._view = view
        self._began = time.monotonic()
        self._messages: dict[str, str] = {}  # a child's own words on why it failed
        self._is_refused = False  # by a child that cannot serve what it was told to
        self._serving: dict[str, asyncio.Future[Address]] = {}
        self._children: dict[str, Child] = {}
        self._ended: asyncio.Queue[Child | SwarmError] = asyncio.Queue()
        self._kept = Kept()
        #: Committed in an earlier life of the run.
        self._num_steps_before = 0
        self._backbone = Address("", 0)  # known once it serves
        #: Of this process, once the trainer that wrote it has died.
        self._metrics: MetricsFile | None = None
        #: Torch-free processes come from a server that imports little, and so at once.
        self._light = Children(plan.log_dir, self._report, preload="launch.processes.preload:nothing", name="light_fork_server")
        self._heavy = Children(plan.log_dir, self._report, argument=config.to_bytes().decode())

    async def run(self, stopper: Stopper) -> None:
        """Start everything, wait for the trainers, clean up.

        Raises:
            SwarmError: the run failed; one line with the reason and where to read more.
        """
        showing = [asyncio.create_task(self._refresh()), asyncio.create_task(self._watch_peers())]
        self._plan.log_dir.mkdir(parents=True, exist_ok=True)
        grace_s = GRACE_STOPPED_S
        try:
            await self._heavy.start()
            # What stages and trainers would refuse is told before anything is announced.
            found: list[Any] = await together(self._check(), self._start_backbone())
            num_devices, address = found
            here = f" --host {address.host}" if address.host in _LOOPBACK.values() else ""
            join = f"launch_stage --join {address}{here} --state-dir {shlex.quote(str(self._plan.state_dir / 'joined-1'))}"
            self._view.event(f"backbone at {address}; another peer joins with: {join}", address=str(address))
            await self._take_over()
            await self._start_peers(num_devices)
            await self._until_trainers_are_done()
            grace_s = GRACE_DONE_S
        finally:
            for task in showing:
                task.cancel()
            await asyncio.gather(*showing, return_exceptions=True)
            await asyncio.shield(asyncio.create_task(self._clean_up(grace_s)))

    # -------------------------------------------------------------------------------------------- start

    async def _check(self) -> int:
        """The number of CUDA devices, once the model is known to fit the configuration.

        Raises:
            ConfigError: it does not, or `--device` names a device that is not there.
        """
        num_devices = await self._heavy.ready()
        device = self._plan.device
        if device.startswith("cuda:") and int(device.removeprefix("cuda:")) >= num_devices:
            raise ConfigError(f"--device {device}: this machine has {num_devices} CUDA devices that torch can use")
        if self._plan.offload_optimizer and (device == "cpu" or not num_devices):
            raise ConfigError("--offload-optimizer: the stages compute on the CPU: all their state is in main memory already")
        return num_devices

    async def _start_backbone(self) -> Address:
        await self._light.start()
        plan = self._plan
        self._described = described = await in_daemon_thread(
            lambda: create_run(self._config, plan.paths, left_open=plan.left_open)
        )
        self._picture.plan(described.total_steps)
        config_bytes = plan.stored_config or described.to_bytes()
        if plan.stored_config is not None:
            require_same(plan.stored_config, described, plan.state_dir)
        require_own(plan.state_dir, run_id_of(config_bytes))
        plan.run_file.write_bytes(config_bytes)
        if plan.stored_config is None and (told := plan.left_open.told(described)):
            self._view.event(told)
        if plan.paths.model is not None:
            note_place(plan.state_dir, plan.paths.model)
        tokenizer = plan.paths.with_tokenizer().tokenizer
        if tokenizer is not None:
            copy_tokenizer(Path(tokenizer), None, plan.state_dir / TOKENIZER_DIRECTORY)
        await self._spawn(self._light, backbone_command(plan))
        address = await self._first_of_serving("backbone")
        self._backbone = Address(_LOOPBACK.get(plan.host, address.host), address.port)
        return address

    async def _start_peers(self, num_devices: int) -> None:
        commands = peer_commands(self._config, self._plan, self._backbone, num_devices)
        await asyncio.gather(*(self._spawn(self._heavy, command) for command in commands))
        stages = ", ".join(f"{name} {row.pid}" for name, row in sorted(self._picture.rows.items()) if row.stage is not None)
        self._view.event(f"stage processes and their pids: {stages}")

    async def _spawn(self, server: Children, command: Command) -> None:
        name, program, argv = command.name, command.program, command.argv(self._plan)
        self._picture.rows[name] = Row(role=program, stage=command.stage)
        self._serving[name] = asyncio.get_running_loop().create_future()
        entry = f"{program.replace('launch_', 'launch.')}:main"
        child = await server.spawn(name, entry, argv, title=f"{program} {shlex.join(argv)}")
        self._children[name] = child
        self._picture.rows[name].start(child.pid)
        child.ended.add_done_callback(lambda _: self._ended.put_nowait(child))

    async def _first_of_serving(self, name: str) -> Address:
        """Wait until the child serves; if it ends first, its failure is raised."""
        serving, child = self._serving[name], self._children[name]
        either: list[asyncio.Future[Any]] = [serving, child.ended]
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if not serving.done():
            raise self._failure(child)
        return serving.result()

    # -------------------------------------------------------------------------------------------- while it runs

    async def _until_trainers_are_done(self) -> None:
        running = {name for name in self._children if name.startswith("trainer-")}
        while running:
            child = await self._ended.get()
            if isinstance(child, SwarmError):
                raise child
            code = child.ended.result()
            row = self._picture.rows[child.name]
            row.end(_how(code))
            if child.name in running and code == 0:
                running.discard(child.name)
            elif child.name in running and code != EXIT_USAGE and self._serving[child.name].done() and len(running) > 1:
                running.discard(child.name)
                self._lost_trainer(child, sorted(running))
            elif not child.name.startswith("stage-") or (code > 0 and not self._serving[child.name].done()):
                raise self._failure(child)
            else:
                self._lost_stage_process(child, row.stage)

    def _lost_trainer(self, child: Child, left: list[str]) -> None:
        """The others get its tickets; what it wrote of the steps is written here from now on."""
        self._view.event(f"{self._end_of(child)}; the run goes on with {', '.join(left)}")
        if child.name == METRICS_TRAINER and self._plan.metrics is not None:
            self._metrics = MetricsFile(self._plan.metrics)
            if self._picture.step is not None:
                self._metrics.append(self._picture.step)

    def _end_of(self, child: Child) -> str:
        text = f"{child.name} (pid {child.pid}) ended: {_how(child.ended.result())}"
        message = self._messages.get(child.name)
        return f"{text}: {message}" if message else text

    def _lost_stage_process(self, child: Child, stage: int | None) -> None:
        left = [name for name, row in self._picture.rows.items() if row.stage == stage and self._children[name].alive]
        text = self._end_of(child)
        if left:
            text += f"; stage {stage} goes on with {', '.join(left)}"
        else:
            text += f"; stage {stage} has no process left here: unless another peer serves it, the run waits for one"
        self._view.event(text)

    def _report(self, name: str, report: dict[str, Any]) -> None:
        event = report.pop("event")
        row = self._picture.rows[name]
        if event == "serving":
            address = Address(report["host"], report["port"])
            row.serve(str(address))
            self._serving[name].set_result(address)
        elif event == "moved":
            self._view.event(f"{name} moves from stage {row.stage} to stage {report['stage']}")
            row.move(report["stage"])
        elif event == "failed":
            self._messages[name] = report["message"]
        elif event == "refused":
            self._kept.refuse(report["message"])
            self._view.event(f"{name}: {report['message']}; training goes on")
        elif event == "damaged":
            if self._kept.note_news(report["message"]):
                self._view.event(f"{name}: {report['message']}")
        elif event == "remark" and name == "stage-0-0":  # all say the same of the model
            self._view.event(report["message"])
        elif event == "checked":
            self._kept.check(name, report["steps"])
            self._look_at_what_is_kept()
        elif event == "step" and self._picture.advance(report):
            if self._metrics is not None:
                self._metrics.append(report)
            self._view.step(report)
        elif event == "goes_on":
            begins = self._picture.step is None
            if not self._picture.advance(report):
                return
            if begins:  # else a trainer was started again, and steps had committed meanwhile
                self._num_steps_before = report["step"]
            self._view.event(goes_on_text(report, self._described.total_steps), goes_on_after=report["step"])
        elif event == "data" and name == "trainer-0":
            self._view.event(report["text"], **report["facts"])
        elif event == "waiting" and name == "trainer-0":
            self._view.event(f"waiting for {report['reason']}", **report)
        elif event == "evaluation" and self._picture.evaluate(report["step"], report["loss"]):
            if self._metrics is not None:
                self._metrics.evaluate(**report)
            self._view.event(f"evaluation at step {report['step']}: loss {report['loss']:.4f}", **report)

    async def _take_over(self) -> None:
        """What a peer that had joined wrote of complete checkpoints becomes this swarm's own.

        Raises:
            SwarmError: the disk refuses.
        """
        state_dir, num_stages = self._plan.state_dir, self._config.num_stages
        try:
            copied = await asyncio.to_thread(adopt_complete, state_dir, num_stages, self._plan.peers_per_stage)
        except OSError as error:
            raise SwarmError(f"cannot copy checkpoints within {state_dir}: {error.strerror or error}") from None
        for path in copied:
            self._view.event(f"copied {path}, which another peer wrote")

    def _look_at_what_is_kept(self) -> None:
        """A run is not begun again over what is left of it, and not unsaid."""
        state_dir, begins = self._plan.state_dir, self._picture.step is None
        held = self._kept.held(self._stages_of_live_processes())
        if self._kept.is_lost(held, begins=begins):
            self._ended.put_nowait(
                SwarmError(
                    f"no checkpoint of these processes in {state_dir} is intact in every stage ({held_text(held)}): put intact "
                    "copies in the places of those that are damaged, or name another --state-dir to begin again"
                )
            )
        elif begins and any(held.values()) and not frozenset.intersection(*held.values()):
            self._view.event(
                f"these processes have no checkpoint of one step in {state_dir} ({held_text(held)}): the run waits for peers "
                "that have what is missing; it begins again without them only if no step has been complete in every stage"
            )

    def _stages_of_live_processes(self) -> dict[str, int]:
        """By name; one that is being started counts as alive."""
        gone = {name for name, child in self._children.items() if not child.alive}
        return {name: row.stage for name, row in self._picture.rows.items() if row.stage is not None and name not in gone}

    async def _refresh(self) -> None:
        while True:
            self._view.refresh()
            await asyncio.sleep(_REFRESH_S)

    async def _watch_peers(self) -> None:
        if self._view.redraws:
            await watch_peers(self._picture, self._children, self._serving)

    # -------------------------------------------------------------------------------------------- end

    def _failure(self, child: Child) -> SwarmError:
        """One line: who, how, why as far as it said and where to read more, or how to go on if it was killed."""
        code, message = child.ended.result(), self._messages.get(child.name)
        ended = f"{child.name} ended ({_how(code)})"
        if code < 0 and message is None and self._serving[child.name].done():
            again = f"go on from its last checkpoint with: {self._again}"
            return SwarmError(f"{ended}, and the run stops without it; {again}")
        why = message or " | ".join(child.last_words(num_lines=3))[-_MAX_WORDS:] or "it said nothing"
        self._is_refused = code == EXIT_USAGE
        kind = ConfigError if self._is_refused else SwarmError
        return kind(f"{ended}: {why}" if self._leaves_no_trace else f"{ended}: {why}; see {child.log}")

    @property
    def _again(self) -> str:
        """The command that goes on with the run."""
        kept = [] if self._plan.metrics is None else ["--metrics", str(self._plan.metrics)]
        counts = []
        if self._plan.peers_per_stage != DEFAULT_PEERS_PER_STAGE:
            counts += ["--peers-per-stage", str(self._plan.peers_per_stage)]
        if self._plan.trainers != DEFAULT_TRAINERS:
            counts += ["--trainers", str(self._plan.trainers)]
        command = shlex.join(["launch_local", "--state-dir", str(self._plan.state_dir), *counts, *kept])
        return " ".join([command, *still_needed(self._described, self._plan.state_dir)])

    @property
    def _leaves_no_trace(self) -> bool:
        """It never came to training, and the directory was made for it."""
        is_refused = self._is_refused and self._picture.step is None
        return self._plan.state_dir_is_new and (is_refused or set(self._children) <= {"backbone"})

    async def _clean_up(self, grace_s: float) -> None:
        """Afterwards no process is left, and what had committed is on disk.

        Trainers go first, so that no step ends while stages write; the backbone last, so that all can say goodbye to it.
        """
        await self._heavy.stop(grace_s=grace_s, among="trainer-")
        await self._heavy.close(
            grace_s=grace_s, written=lambda child: bytes_under_way(self._plan.state_dir / child.name, child.pid)
        )
        await self._light.close(grace_s=GRACE_STOPPED_S)
        if self._metrics is not None:
            self._metrics.close()
        if self._leaves_no_trace:
            shutil.rmtree(self._plan.state_dir, ignore_errors=True)

    def summary(self, *, is_done: bool) -> list[tuple[str, dict[str, Any]]]:
        """Lines for people, each with its values for machines, once `run` has ended."""
        state_dir, total_steps = self._plan.state_dir, self._described.total_steps
        step, evaluation, best = self._picture.step, self._picture.evaluation, self._picture.best
        seconds = time.monotonic() - self._began
        num_steps = step["step"] if step else 0
        new_steps = num_steps - self._num_steps_before
        is_over = num_steps == total_steps  # an operator may have stopped it before
        text = f"done: {num_steps} steps" if is_done and is_over else f"stopped at step {num_steps} of {total_steps}"
        text += f" ({new_steps} new)" if self._num_steps_before else ""
        text += f" in {seconds:.1f} s"
        values: dict[str, Any] = {"steps": num_steps, "new_steps": new_steps, "seconds": seconds}
        if step is not None:
            text += f", final loss {loss_text(step)}"
            values["loss"] = step["loss"]
        if evaluation is not None:
            text += f", eval loss {evaluation[1]:.4f}"
            values["eval_loss"] = evaluation[1]
        lines: list[tuple[str, dict[str, Any]]] = [(text, values)]
        newest = newest_checkpoint(state_dir, self._config.num_stages)
        if newest is not None:
            export = f"export_model --checkpoints {shlex.quote(str(state_dir))} --out exported"
            if self._config.model == PRETRAINED and self._config.frozen and self._config.lora is None:
                export += " --model DIR"  # what is not trained is in no checkpoint
            text = f"checkpoint of step {newest} in {state_dir}"
            if is_done and newest < num_steps:
                text += f": not every stage has one of step {num_steps} there, as its peers keep theirs elsewhere or nowhere"
            elif newest > num_steps:
                text += ": it committed as the trainers ended, so that its loss was not told"
            lines.append((text, {"checkpoint": str(state_dir), "checkpoint_step": newest}))
            lines.append((f"export it with: {export}", {"command": export}))
            if not is_over:
                lines.append((f"go on from it with: {self._again}", {"go_on": self._again}))
            if best is not None and best != evaluation:
                text = f"the best evaluation was {best[1]:.4f} at step {best[0]}: add --best to export that"
                lines.append((text, {"best_step": best[0], "best_eval_loss": best[1]}))
        return lines

    def require_checkpoint(self) -> None:
        """Once the run is done.

        Raises:
            SwarmError: what it trained is not on disk; says what the disk said last.
        """
        newest = newest_checkpoint(self._plan.state_dir, self._config.num_stages)
        fault = self._kept.fault(self._picture.step["step"] if self._picture.step else 0, newest)
        if fault:
            raise SwarmError(f"{fault}; see {self._plan.log_dir}")


def _how(code: int) -> str:
    """An exit code for people."""
    return f"exit code {code}" if code >= 0 else f"killed by {signal.Signals(-code).name}"
