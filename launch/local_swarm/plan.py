"""What a local swarm consists of: the plan, and from it each process with the command line that it is started with.

Must not know how processes are started, nor what their ends mean.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from launch.processes.devices import DEFAULT_MEMORY_PART, available_memory, num_cores
from launch.run.left_open import LeftOpen
from launch.run.run_files import DataPaths
from swarm.base.config import RunConfig
from swarm.base.ids import Address

#: The run's verbatim configuration, in its state directory.
RUN_FILE = "run.json"


#: Of a stage.
DEFAULT_PEERS_PER_STAGE = 2
DEFAULT_TRAINERS = 1
#: Writes `--metrics`.
METRICS_TRAINER = "trainer-0"


@dataclass(frozen=True, kw_only=True)
class SwarmPlan:
    """What to start on this machine, beside the run itself. Fields are `launch_local`'s options."""

    peers_per_stage: int
    trainers: int
    paths: DataPaths
    state_dir: Path
    #: `state_dir` did not exist before.
    state_dir_is_new: bool
    #: Configuration of the run that `state_dir` belongs to already.
    stored_config: bytes | None
    #: What follows from the data, which nobody has read yet.
    left_open: LeftOpen
    host: str
    port: int
    device: str
    threads: int | None
    memory_limit: int | None
    offload_optimizer: bool
    compile: bool
    in_flight: int | None
    metrics: Path | None
    log_level: str
    log_format: str

    @property
    def log_dir(self) -> Path:
        """Where every process writes its log."""
        return self.state_dir / "logs"

    @property
    def run_file(self) -> Path:
        """Where the run's configuration is kept."""
        return self.state_dir / RUN_FILE


@dataclass(frozen=True)
class Command:
    """One process and its words, without those that all have in common."""

    name: str
    program: str
    words: list[str]
    stage: int | None = None

    def argv(self, plan: SwarmPlan) -> list[str]:
        """All words of the process's command line, without the program's name."""
        return [
            *self.words,
            "--host",
            plan.host,
            "--state-dir",
            str(plan.state_dir / self.name),
            "--log-level",
            plan.log_level,
            "--log-format",
            plan.log_format,
        ]


def backbone_command(plan: SwarmPlan) -> Command:
    """The process that all others join."""
    return Command("backbone", "launch_backbone", ["--run", str(plan.run_file), "--port", str(plan.port)])


def peer_commands(config: RunConfig, plan: SwarmPlan, backbone: Address, num_devices: int) -> list[Command]:
    """Stage peers and trainers, which join through `backbone`; the machine's devices, cores and memory are shared out."""
    num_peers = config.num_stages * plan.peers_per_stage
    threads = plan.threads or max(1, num_cores() // num_peers)
    memory = plan.memory_limit or int(available_memory() * DEFAULT_MEMORY_PART / num_peers)
    join = ["--join", str(backbone), "--port", "0"]
    commands = []
    for index in range(plan.peers_per_stage):
        for stage in range(config.num_stages):
            device = plan.device
            if device == "auto":
                device = f"cuda:{(index * config.num_stages + stage) % num_devices}" if num_devices else "cpu"
            words = ["--stage", str(stage), *join, "--device", device, "--threads", str(threads)]
            if device == "cpu" or plan.memory_limit:
                words += ["--memory-limit", str(memory)]
            if plan.offload_optimizer:
                words.append("--offload-optimizer")
            if plan.compile:
                words.append("--compile")
            if plan.paths.model is not None:
                words += ["--model", plan.paths.model]
            for name in config.imports.values():
                words += ["--allow-import", name]
            commands.append(Command(f"stage-{stage}-{index}", "launch_stage", words, stage))
    for index in range(plan.trainers):
        words = [*join, *plan.paths.with_tokenizer().arguments()]
        if plan.in_flight is not None:
            words += ["--in-flight", str(plan.in_flight)]
        if plan.metrics is not None and f"trainer-{index}" == METRICS_TRAINER:
            words += ["--metrics", str(plan.metrics)]
        commands.append(Command(f"trainer-{index}", "launch_trainer", words))
    return commands
