"""The run's frozen configuration, and the run id. Owns validation; reads no file or variable.

The bytes of the creator's configuration are kept verbatim: `run_id` hashes them, so every peer of a run has the same.
"""

from __future__ import annotations

import datetime
import hashlib
import json
from collections.abc import Callable, Iterable
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from swarm.base.choices import COMPRESSOR_FACTS, DILOCO, OPTIMIZER_FACTS, ROUNDING, compressor_facts, one_of, optimizer_facts
from swarm.base.dotted import is_dotted
from swarm.base.errors import ConfigError
from swarm.base.ids import MAX_TICKETS, RunId
from swarm.base.lora import Lora
from swarm.base.timing import TIMING_PRESETS, Timing

#: What an option is for, as another field and its values that use it; `parse_config` refuses to set it beside others.
BELONGS_TO: dict[str, tuple[str, tuple[str, ...]]] = {
    "min_lr_ratio": ("lr_schedule", ("linear", "cosine")),
    "powersgd_rank": ("average_compression", ("powersgd",)),
    "cocktail_top": ("average_compression", ("cocktail",)),
    "clip_radius": ("aggregation", ("centered_clip",)),
    "inner_batch_size": ("mode", ("local",)),
    "inner_steps": ("mode", ("local",)),
    "outer_learning_rate": ("mode", ("local",)),
    "outer_momentum": ("mode", ("local",)),
    "fragments": ("mode", ("local",)),
}

#: Fields that runs had not at first. One that is empty is not written: so a run from before has the bytes, and the id, it had.
_LATER_FIELDS = ("no_decay", "inner_steps")
#: What `no_decay` is for a new run that does not say.
NEW_NO_DECAY = ("norms", "biases")
#: Fields that may name the owner's own code.
_MAY_IMPORT = ("model", "optimizer", "average_compression")


def _published(option: str) -> Callable[[dict[str, Any]], Any]:
    """The default of an option of local runs: what the compressor was published with."""

    def default(said: dict[str, Any]) -> float:
        if said.get("mode") != "local" or (option == "inner_steps" and said.get("inner_batch_size")):
            return DILOCO[option]
        return compressor_facts(said.get("average_compression", "none")).local[option]

    return default


class RunConfig(BaseModel):
    """One training job. The same on every peer; any change is another run."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    name: str = Field("swarm", min_length=1, max_length=64, description="a name for people")
    model: str = Field(
        "llama-tiny",
        description="a preset of models/, package.module:factory, a directory with config.json and weights, or a "
        "Hugging Face hub id; of the latter two the run keeps the configuration and digests, never the place",
    )
    model_options: dict[str, Any] = Field(default_factory=dict, description="overrides handed to the preset or factory")
    weights: dict[str, str] = Field(
        default_factory=dict, description="digests of the initial weights, by layer or file; empty where a seed makes them"
    )
    weights_source: str = Field("", max_length=200, description="hub id and revision of the initial weights, if they are public")
    frozen: tuple[str, ...] = Field(
        (), description="parameters that are not trained, as patterns such as model.embed_tokens.* or model.layers.[0-3].*"
    )
    lora: Lora | None = Field(
        None, description="train adapters only: r=8,alpha=16,dropout=0.05,targets=q_proj+v_proj,bits=8; each may be left out"
    )
    num_stages: int = Field(3, ge=1, le=1024, description="spans of layers the model is cut into")
    sequence_length: int = Field(64, ge=1, le=2**24, description="tokens per sample")
    micro_batch_size: int = Field(8, ge=1, le=2**20, description="samples per micro-batch (ticket)")
    target_batch_size: int = Field(64, ge=1, description="samples per optimizer step; a multiple of micro_batch_size")
    total_steps: int = Field(60, ge=1, le=2**32, description="optimizer steps of the run")
    optimizer: Annotated[str, AfterValidator(one_of(OPTIMIZER_FACTS))] = Field(
        "adamw",
        max_length=200,
        examples=[*OPTIMIZER_FACTS],
        description="adamw8bit keeps both moments in 8 bits, a quarter of their memory, on the wire and on disk too; lamb "
        "is for large batches; "
        "package.module:name is the owner's own",
    )
    learning_rate: float = Field(3e-3, ge=1e-12, le=10, description="peak learning rate of the optimizer")
    beta1: float = Field(0.9, ge=0, lt=1, description="decay of the first moment")
    beta2: float = Field(0.95, ge=0, lt=1, description="decay of the second moment")
    epsilon: float = Field(1e-8, gt=0, le=1, description="added to the root of the second moment")
    weight_decay: float = Field(0.01, ge=0, le=100, description="decoupled weight decay")
    no_decay: tuple[str, ...] = Field(
        (),
        description="parameters without weight decay: norms, biases, patterns such as *.embed_tokens.*; a new run has "
        "norms,biases, and one from before there was a choice none",
    )
    max_grad_norm: float = Field(
        1.0,
        ge=1e-6,
        description="global gradient norm over all stages is clipped to this; mode local: that of an inner update at each stage "
        "by itself, so that all of it may reach the root of num_stages times this",
    )
    lr_schedule: Literal["constant", "linear", "cosine"] = Field("cosine", description="shape after the warm-up")
    warmup_steps: int = Field(5, ge=0, description="steps of linear warm-up; inner ones with inner_steps")
    min_lr_ratio: float = Field(0.1, ge=0, le=1, description="learning rate at the end, as a part of the peak")
    precision: Literal["fp64", "fp32", "bf16", "fp16"] = Field("fp32", description="compute copy; masters are fp32 or wider")
    compression: Annotated[str, AfterValidator(one_of(ROUNDING, or_own=False))] = Field(
        "8bit", examples=[*ROUNDING], description="activations and their gradients"
    )
    average_compression: Annotated[str, AfterValidator(one_of(COMPRESSOR_FACTS))] = Field(
        "none",
        max_length=200,
        examples=[*COMPRESSOR_FACTS],
        description="averages on the wire; 8bit has a step for each 64 values, int8 for each 4,096; uniform8 keeps sums and "
        f"loses {COMPRESSOR_FACTS['uniform8'].loses} % of a real gradient's norm; powersgd sends thin matrices "
        f"({COMPRESSOR_FACTS['powersgd'].loses} % comes later), cocktail (mode local) the largest differences in 4 bits "
        f"({COMPRESSOR_FACTS['cocktail'].loses} % comes later); package.module:name is the owner's own",
    )
    powersgd_rank: int = Field(4, ge=1, le=1024, description="columns of the thin matrices of powersgd")
    cocktail_top: float = Field(0.2, ge=1e-4, le=1, description="part of a fragment's elements that cocktail sends")
    aggregation: Literal["mean", "centered_clip"] = Field(
        "mean", description="centered_clip: no peer can pull a stage's average farther than clip_radius (CenteredClip)"
    )
    clip_radius: float = Field(1.0, ge=1e-3, le=1e3, description="of centered_clip, as a norm of a stage's mean gradient")
    max_group: int = Field(16, ge=2, le=4096, description="more peers of a stage than this average in groups, level by level")
    auxiliaries: int = Field(
        0,
        ge=0,
        le=64,
        description="aggregators (launch_backbone --aggregate) that a stage lets reduce parts of its averages, "
        "at most, where that makes them faster; what they send is trusted",
    )
    mode: Literal["sync", "local"] = Field(
        "sync",
        description="sync: every step one update with the mean gradient. local: a step is an outer step, in which each "
        "peer updates its own copy, and at whose end the peers average what their copies moved by (DiLoCo)",
    )
    inner_batch_size: int = Field(
        0,
        ge=0,
        description="mode local, in place of inner_steps: a peer updates its own copy after so many samples of its own, so "
        "that the fewer peers there are, the more inner steps it takes; the schedule counts outer steps",
    )
    inner_steps: int = Field(
        default_factory=_published("inner_steps"),
        ge=0,
        le=MAX_TICKETS,
        description="mode local: updates of each peer's own copy in an outer step (H), however many peers there are; of "
        "each part of target_batch_size / inner_steps samples a peer takes an update with those that it computed. The "
        "learning rate and warmup_steps count inner steps; 1 with cocktail",
    )
    outer_learning_rate: float = Field(
        default_factory=_published("outer_learning_rate"),
        ge=1e-6,
        le=10,
        description="mode local: of the outer SGD with Nesterov momentum; 1 with cocktail",
    )
    outer_momentum: float = Field(
        default_factory=_published("outer_momentum"), ge=0, lt=1, description="mode local: of the outer SGD; 0 with cocktail"
    )
    fragments: int = Field(
        default_factory=_published("fragments"),
        ge=1,
        le=4096,
        description="mode local: each step averages one of so many parts of the parameters, in turn; 10 with cocktail",
    )
    seed: int = Field(0, ge=0, lt=2**63, description="seeds initial values, data order and dropout")
    delay_steps: int = Field(0, ge=0, le=1, description="1 overlaps averaging with the next step")
    dataset: str = Field("builtin", max_length=200, description="name of the data for people, never a path")
    data_digest: str = Field("", description="digest of training and evaluation data; a trainer with other data is refused")
    tokenizer_digest: str = Field("", description="digest of the tokenizer")
    template_date: str = Field(
        "",
        description="YYYY-MM-DD, told to a chat template that asks for today's; by default the day on which the run is "
        "created, in UTC, if it asks",
    )
    packing: bool = Field(
        True,
        description="several short conversations share a sample, and do not see each other; by default only where the "
        "model keeps them apart",
    )
    eval_fraction: float = Field(0.1, ge=0, lt=1, description="part of the data held out if no evaluation data is given")
    eval_every: int = Field(0, ge=0, description="steps between evaluations; 0 evaluates at the end only")
    eval_samples: int = Field(64, ge=0, description="samples per evaluation; 0 evaluates never")
    checkpoint_every: int = Field(20, ge=0, description="steps between checkpoints; 0 writes the last step only")
    checkpoint_copies: int = Field(2, ge=1, description="peers of a stage that write each checkpoint")
    checkpoint_keep: int = Field(2, ge=1, description="checkpoints kept per peer")
    min_peers_per_stage: int = Field(
        1,
        ge=1,
        le=4096,
        description="peers of every stage needed to start; above 1 also to go on, with a majority of the last members",
    )
    timing: Timing = Field(Timing(), description="deadlines")

    @field_validator("lora", mode="before")
    @classmethod
    def _adapter(cls, value: Any) -> Any:
        if not isinstance(value, str):
            return value
        pairs = [part.partition("=") for part in value.split(",") if part.strip()]
        return {key.strip(): text.strip() for key, _, text in pairs}

    @field_validator("frozen", "no_decay", mode="before")
    @classmethod
    def _patterns(cls, value: Any) -> Any:
        return [part.strip() for part in value.split(",") if part.strip()] if isinstance(value, str) else value

    @field_validator("template_date")
    @classmethod
    def _date(cls, value: str) -> str:
        if value and datetime.date.fromisoformat(value).isoformat() != value:
            raise ValueError(f"{value!r} is no date such as 2026-07-26")
        return value

    @model_validator(mode="after")
    def _cross_check(self) -> RunConfig:
        if self.target_batch_size % self.micro_batch_size:
            raise ValueError(
                f"target_batch_size {self.target_batch_size} is not a multiple of micro_batch_size {self.micro_batch_size}"
            )
        if self.tickets_per_step > MAX_TICKETS:
            raise ValueError(
                f"target_batch_size {self.target_batch_size} is more than {MAX_TICKETS} micro-batches of "
                f"{self.micro_batch_size}: raise micro_batch_size"
            )
        if self.average_compression != "none" and self.precision == "fp64":
            raise ValueError(
                f"average_compression {self.average_compression!r} excludes precision 'fp64', which is there to compare bits; "
                "use 'none', or fp32"
            )
        if optimizer_facts(self.optimizer).excludes_fp64 and self.precision == "fp64":
            raise ValueError(
                f"optimizer {self.optimizer!r} excludes precision 'fp64', whose digits it would lose; use 'adamw', or fp32"
            )
        compressor = compressor_facts(self.average_compression)
        if self.mode in compressor.unfit:
            raise ValueError(f"average_compression {self.average_compression!r} {compressor.unfit[self.mode]}")
        partial = "fragments" if self.fragments > 1 else ""
        if not partial and compressor.keeps_back:
            partial = f"average_compression {self.average_compression!r}"
        if self.aggregation != "mean" and partial:
            raise ValueError(f"aggregation {self.aggregation!r} compares whole averages: it excludes {partial}")
        if self.auxiliaries and (partial or self.aggregation != "mean"):
            what = partial or f"aggregation {self.aggregation!r}"
            raise ValueError(f"auxiliaries sum whole averages in one exchange: they exclude {what}")
        self._check_mode()
        return self

    def _check_mode(self) -> None:
        """What goes together is the table in averaging/MODES.md."""
        if self.mode == "local":
            if bool(self.inner_batch_size) == bool(self.inner_steps):
                which = "one of inner_steps and inner_batch_size, not both" if self.inner_steps else "inner_steps, such as 20"
                raise ValueError(f"mode 'local' needs {which}")
            if self.inner_steps and self.tickets_per_step % self.inner_steps:
                raise ValueError(
                    f"target_batch_size {self.target_batch_size} is not a multiple of {self.inner_steps} inner_steps times "
                    f"micro_batch_size {self.micro_batch_size}"
                )
            if self.inner_batch_size % self.micro_batch_size:
                raise ValueError(
                    f"inner_batch_size {self.inner_batch_size} is not a multiple of micro_batch_size {self.micro_batch_size}"
                )
            if self.inner_batch_size > self.target_batch_size:
                raise ValueError(
                    f"inner_batch_size {self.inner_batch_size} is above target_batch_size {self.target_batch_size}: no "
                    "peer would ever update its copy before the step ends"
                )
            if self.fragments > 1 and compressor_facts(self.average_compression).is_whole:
                raise ValueError(f"average_compression {self.average_compression!r} sends whole matrices: it excludes fragments")
            if self.fragments > self.total_steps:
                raise ValueError(
                    f"{self.fragments} fragments in {self.total_steps} steps: each step averages one; some would never be shared"
                )
            if self.delay_steps:
                raise ValueError("mode 'local' excludes delay_steps: a peer never waits for others between its own updates")
            return
        for option in ("inner_batch_size", "inner_steps", "fragments"):
            if getattr(self, option) != default_of(option):
                raise ValueError(_belongs(self, option))

    @property
    def imports(self) -> dict[str, str]:
        """The owner's own code that the run names: field -> `package.module:name`."""
        return {field: name for field in _MAY_IMPORT if is_dotted(name := getattr(self, field))}

    @property
    def updates_per_step(self) -> int:
        """Updates that one step counts for in the schedule."""
        return self.inner_steps or 1

    @property
    def tickets_per_step(self) -> int:
        """Micro-batches of one step."""
        return self.target_batch_size // self.micro_batch_size

    @property
    def eval_tickets(self) -> int:
        """Micro-batches of one evaluation; the last may be short."""
        return -(-self.eval_samples // self.micro_batch_size)

    def base_step(self, step: int) -> int:
        """Number of commits in the parameters that the tickets of `step` use."""
        return max(0, step - self.delay_steps)

    def to_bytes(self) -> bytes:
        """Canonical JSON; the creator's bytes travel verbatim and give the run id."""
        fields = self.model_dump(mode="json")
        for name in _LATER_FIELDS:
            if not fields[name]:
                del fields[name]
        return json.dumps(fields, sort_keys=True, separators=(",", ":")).encode()


def run_id_of(config_bytes: bytes) -> RunId:
    """The id of the run with this configuration, to the byte."""
    return hashlib.sha256(b"swarm run\0" + config_bytes).hexdigest()


def default_of(option: str) -> Any:
    """What a synchronous run has for `option` if nothing is said."""
    return RunConfig.model_fields[option].get_default(call_default_factory=True, validated_data={})


def _belongs(config: RunConfig, option: str) -> str:
    """Why `option` is of no use in `config`, and what to do."""
    field, values = BELONGS_TO[option]
    what = " or ".join(map(repr, values))
    default = default_of(option)
    return (
        f"{option} belongs to {field} {what}, and {field} is {getattr(config, field)!r}: leave it at {default:g} or set {field}"
    )


def _unused(config: RunConfig, given: Iterable[str]) -> str:
    """What is wrong with the first of the fields `given` that is set to something and that nothing uses, or ""."""
    for option in BELONGS_TO:
        field, values = BELONGS_TO[option]
        is_set = option in given and getattr(config, option) != default_of(option)
        if is_set and getattr(config, field) not in values:
            return _belongs(config, option)
    return ""


def parse_config(data: dict[str, Any], *, where: str, given: Iterable[str] | None = None) -> RunConfig:
    """Validate `data` (from TOML, JSON or the command line) into a `RunConfig`.

    `timing` may be a preset's name, or a table with an optional `preset` and overrides. `given` are the keys of `data` that
    the user wrote (default: all); the others come from a run that exists, and what they leave unused harms nobody.

    Raises:
        ConfigError: one line naming `where`, the field, and what is wrong.
    """
    data = dict(data)
    timing = data.get("timing", "local")
    if isinstance(timing, str):
        timing = {"preset": timing}
    if isinstance(timing, dict):
        timing = dict(timing)
        preset = timing.pop("preset", "local")
        if not isinstance(preset, str) or preset not in TIMING_PRESETS:
            raise ConfigError(f"{where}: timing preset {preset!r} is none of {', '.join(TIMING_PRESETS)}")
        data["timing"] = {**TIMING_PRESETS[preset], **timing}
    try:
        config = RunConfig(**data)
    except ValidationError as error:
        raise ConfigError(f"{where}: {first_problem(error)}") from None
    if problem := _unused(config, frozenset(data if given is None else given)):
        raise ConfigError(f"{where}: {problem}")
    return config


def first_problem(error: ValidationError) -> str:
    """One line: the field, and what is wrong with it."""
    first = error.errors()[0]
    field = ".".join(str(part) for part in first["loc"])
    if first["type"] == "extra_forbidden":
        return f"unknown key {field!r}"
    return ": ".join(part for part in (field, first["msg"].removeprefix("Value error, ")) if part)


def parse_config_bytes(config_bytes: bytes) -> RunConfig:
    """The configuration of a run that another peer created.

    Raises:
        ConfigError: if the bytes are no configuration that this version understands.
    """
    try:
        return RunConfig(**json.loads(config_bytes))
    except ValidationError as error:
        reason = first_problem(error)
    except (ValueError, TypeError, RecursionError) as error:
        raise ConfigError(f"the run's configuration is damaged: {str(error).splitlines()[0]}") from None
    raise ConfigError(f"the run's configuration is not understood by this version: {reason}")
