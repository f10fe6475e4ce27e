"""Forward and backward of one stage, as jobs of the compute thread. Owns torch; must not know messages' routes or peers.

The module is called with a version's tensors in its parameters' places, so a ticket's forward, backward and
recomputation all use the parameters it was issued for.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from swarm.base.errors import ConfigError
from swarm.base.ids import Ticket
from swarm.stage.executor import Executor
from swarm.stage.frozen import freeze, stage_module
from swarm.stage.gpu.graphs import BorrowedCall, CapturedStage, captured_if_it_pays
from swarm.stage.memory_budget import MemoryBudget
from swarm.stage.module import (
    Compilable,
    Declaring,
    ParameterSlots,
    StageFactory,
    StreamingFactory,
    Tensors,
    replace_parameters,
    saved_buffers,
    tick_with,
)
from swarm.stage.state_buffers import BufferSlots, distances, stage_layout
from swarm.stage.versions import Version

PRECISION_DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
MASTER_DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.float32, "fp16": torch.float32}
_DROPOUTS = (torch.nn.Dropout, torch.nn.Dropout1d, torch.nn.Dropout2d, torch.nn.Dropout3d, torch.nn.AlphaDropout)


@dataclass
class Activation:
    """A micro-batch at a peer, between its forward and its backward.

    `outputs` hold the autograd graph. Where memory demands it all tensors are dropped: the backward gets the inputs once
    more, and recomputes.
    """

    ticket: Ticket
    version: Version
    inputs: Tensors = field(default_factory=dict)
    labels: Tensors | None = None
    outputs: Tensors | None = None
    #: Bytes of the saved autograd graph, without parameters and inputs; 0 if it is captured.
    graph_bytes: int = 0
    #: What its last forward made of the version's buffers: a recomputation takes the place of the one before.
    buffers: Tensors = field(default_factory=dict)
    recomputed: bool = False
    #: Where the forward was a CUDA graph: the backward is captured, too.
    lease: BorrowedCall | None = None

    @property
    def input_bytes(self) -> int:
        """Bytes of the inputs."""
        return sum(tensor.nbytes for tensor in self.inputs.values())

    def drop(self) -> None:
        """The backward computes the forward again, once `take` gave it the inputs."""
        self.outputs = self.lease = self.labels = None
        self.inputs, self.buffers = {}, {}

    def take(self, inputs: Tensors, labels: Tensors | None) -> None:
        """Floating inputs become leaves."""
        self.inputs = {n: t.detach().requires_grad_(True) if t.is_floating_point() else t for n, t in inputs.items()}
        self.labels = labels


@dataclass
class Gradients:
    """The outcome of one backward: by input name, and in the layout's order for the rest (None where unused).

    That is the gradients of the parameters, and what the ticket adds for each buffer (`state_buffers.distances`).
    """

    inputs: Tensors
    parameters: list[torch.Tensor | None] = field(repr=False)
    #: The next micro-batch wants the memory of `parameters`, and has it once nobody refers to that list.
    borrowed: bool = False


class StageCompute:
    """The stage's module on its device.

    With `compile` its blocks go through `torch.compile`, one region each, for the shapes that training uses: `warm_up`
    takes the time for it. With a `budget`, that of what in-flight micro-batches hold, a GPU uses CUDA graphs where they
    take no longer; they take memory of it until `let_go`.

    Raises:
        ConfigError: `compile`, and the module is not `Compilable`.
    """

    def __init__(
        self,
        factory: StageFactory,
        stage: int,
        *,
        precision: str,
        seed: int,
        device: str = "cpu",
        compile: bool = False,
        frozen: Sequence[str] = (),
        budget: MemoryBudget | None = None,
    ) -> None:
        self.stage = stage
        self.last = stage == factory.num_stages - 1
        self.device = device
        self.dtype = PRECISION_DTYPES[precision]
        self.master_dtype = MASTER_DTYPES[precision]
        self._seed = seed
        self._factory = factory
        streams = isinstance(factory, StreamingFactory)
        module = stage_module(factory, stage, frozen) if streams else factory.build(stage)
        freeze(module, frozen)
        self.layout = stage_layout(factory, module)
        #: Parameters that are not trained and that no seed gives: part of what a newcomer takes over.
        self.frozen: Tensors = self._place_frozen(module) if streams else {}
        #: Whether this peer can make the initial values by itself.
        self.has_values = factory.has_values if isinstance(factory, StreamingFactory) else True
        #: Whether `frozen` holds values: from files, or once they were taken over from another peer.
        self.has_frozen = self.has_values or not self.frozen
        self._first_masters: torch.Tensor | None = None if streams else self._masters_of(module)
        # Values of trained parameters live in versions: the module keeps their places only.
        replace_parameters(module, lambda _, p: torch.empty(0, dtype=p.dtype) if p.requires_grad else None)
        self._module = module.to(device)
        if streams:  # after they are on their device; what files hold of them is no seed's either
            self.frozen |= saved_buffers(self._module)
            self.has_frozen = self.has_values or not self.frozen
        if streams and self.has_values:
            self._first_masters = self._stream(self.frozen)
        self._places = ParameterSlots(self._module)
        self._buffers = BufferSlots(self._module, tuple(self.layout.buffers))
        self._compiled: list[torch.nn.Module] = self._compile() if compile else []
        self._captured: CapturedStage | None = None
        self._budget = budget
        self._ticket = Ticket(0, 0)
        self._calls: dict[str, int] = {}
        self._graph_bytes: dict[tuple[object, ...], int] = {}
        draws = False
        for name, child in self._module.named_modules():
            if (isinstance(child, _DROPOUTS) and child.p > 0) or getattr(child, "draws_at_random", False):
                child.register_forward_pre_hook(self._seed_dropout(name))
                draws = True
        #: CUDA graphs may be used and were not tried. What they replay has its buffers in fixed places.
        is_fixed = not draws and not self.layout.buffer_dtypes and isinstance(self._module, Compilable)
        self._may_capture = budget is not None and is_fixed and torch.device(device).type == "cuda"

    def initial_masters(self) -> torch.Tensor:
        """The initial values, flat [N]; handed out once, then made again, since they are hardly ever needed.

        Raises:
            LookupError: this peer cannot make them (`has_values`).
        """
        if not self.has_values:
            raise LookupError("this machine has no files with the initial values")
        masters, self._first_masters = self._first_masters, None
        if masters is not None:
            return masters
        if isinstance(self._factory, StreamingFactory):
            return self._stream({})
        return self._masters_of(self._factory.build(self.stage))

    def no_masters(self) -> torch.Tensor:
        """A place for values that are still to come, flat [N]."""
        return torch.zeros(self.layout.num_elements, dtype=self.master_dtype, device=self.device)

    def _stream(self, frozen: Tensors) -> torch.Tensor:
        """The initial values from files, straight into masters on the device; fills `frozen` on the way."""
        assert isinstance(self._factory, StreamingFactory)
        masters = torch.empty(self.layout.num_elements, dtype=self.master_dtype, device=self.device)
        self._factory.load(self.stage, {**self.layout.named(masters), **frozen})
        return masters

    def _place_frozen(self, module: torch.nn.Module) -> Tensors:
        """Give the parameters of an outline that are not trained their memory, in the precision of the computation."""
        placed: Tensors = {}

        def place(name: str, parameter: torch.Tensor) -> torch.Tensor | None:
            if not parameter.requires_grad:
                dtype = self.dtype if parameter.is_floating_point() else parameter.dtype
                placed[name] = torch.empty(parameter.shape, dtype=dtype, device=self.device)
            return placed.get(name)

        replace_parameters(module, place)
        return placed

    def _masters_of(self, module: torch.nn.Module) -> torch.Tensor:
        values = {**dict(module.named_parameters()), **dict(module.named_buffers())}
        return self.layout.flatten((values[name] for name in self.layout.names), dtype=self.master_dtype, device=self.device)

    def _compile(self) -> list[torch.nn.Module]:
        module = self._module
        if not isinstance(module, Compilable):
            raise ConfigError("--compile: the model's stage modules do not say which of their blocks to compile")
        for block in module.blocks:
            block.forward = torch.compile(block.forward, dynamic=False)
        return list(module.blocks)

    def received_frozen(self) -> None:
        """`frozen` holds what another peer sent."""
        self.has_frozen = True

    def warm_up(self, version: Version, *, num_samples: int, sequence_length: int) -> None:
        """Compile what is to be compiled, tens of seconds at the first time, by computing on an example."""
        if not self._compiled:
            return
        assert isinstance(self._module, Compilable)
        given = self._module.example(num_samples, sequence_length)
        inputs, labels = ({n: self._like_received(t) for n, t in (tensors or {}).items()} for tensors in given)
        self._train_on(version, inputs, labels)
        self.forward(version, Ticket(0, 0), inputs, labels, keep_graph=False)
        self.evaluate(version, inputs, labels)

    def _like_received(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(self.device, self.dtype if tensor.is_floating_point() else None)

    def _train_on(self, version: Version, inputs: Tensors, labels: Tensors | None) -> None:
        activation = self.forward(version, Ticket(0, 0), inputs, labels, keep_graph=True)
        outputs = activation.outputs or {}
        gradients = {n: torch.zeros_like(t) for n, t in outputs.items() if t.is_floating_point()}
        self.backward(activation, None if self.last else gradients)

    def try_graphs(self, version: Version, inputs: Tensors, labels: Tensors | None) -> bool:
        """Use CUDA graphs from now on if micro-batches like this one take no longer with them. It is tried once.

        Returns:
            Whether it was now, which takes the time of several micro-batches.
        """
        if not self._may_capture or not version.parameters:
            return False
        self._may_capture = False

        def call(parameters: Tensors, inputs: Tensors, labels: Tensors | None) -> Tensors:
            return self._call(parameters, Ticket(0, 0), inputs, labels, train=True)

        assert self._budget is not None
        self._captured = captured_if_it_pays(
            lambda: self._train_on(version, inputs, labels),
            call,
            version,
            inputs,
            labels,
            self._budget,
            lambda: self.graph_bytes_like(inputs),
        )
        return True

    def declared(self, num_samples: int, sequence_length: int) -> Mapping[str, tuple[int, ...]]:
        """See `module.Declaring`."""
        return self._module.largest_inputs(num_samples, sequence_length) if isinstance(self._module, Declaring) else {}

    def let_go(self) -> None:
        """Give up what CUDA graphs took of the budget; micro-batches under way keep theirs."""
        captured, self._captured, self._may_capture = self._captured, None, False
        if captured is not None:
            captured.close()

    def show_progress(self, executor: Executor) -> None:
        """Have the forward and the backward of every parametrised submodule advance the executor's counter."""
        inside = {id(child) for block in self._compiled for child in block.modules()}
        children = [c for c in self._module.modules() if id(c) not in inside and next(c.parameters(False), None) is not None]
        for child in [*children, *self._compiled]:
            tick_with(child, executor.tick)

    def _seed_dropout(self, name: str) -> Callable[[torch.nn.Module, object], None]:
        """A mask is a function of (run seed, ticket, layer name, call), so a recomputation draws the same one."""

        def hook(module: torch.nn.Module, args: object) -> None:
            call = self._calls[name] = self._calls.get(name, 0) + 1
            text = f"{self._seed}/{self._ticket.step}/{self._ticket.index}/{name}/{call}"
            torch.manual_seed(int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1)

        return hook

    def _call(self, parameters: Tensors, ticket: Ticket, inputs: Tensors, labels: Tensors | None, *, train: bool) -> Tensors:
        self._ticket = ticket
        self._calls.clear()
        if self._module.training != train:
            self._module.train(train)
        with self._places.holding(parameters):
            return self._module(inputs, labels)

    def _train(self, a: Activation) -> Tensors:
        """One training forward; it leaves the version's buffers as they are, and the ticket's with the activation."""
        with self._buffers.holding(a.version.buffers) as a.buffers:
            return self._call(a.version.parameters, a.ticket, a.inputs, a.labels, train=True)

    def forward(
        self, version: Version, ticket: Ticket, inputs: Tensors, labels: Tensors | None, *, keep_graph: bool
    ) -> Activation:
        """Training forward. Floating inputs become leaves; with `keep_graph` the outputs carry their autograd graph."""
        activation = Activation(ticket, version)
        activation.take(inputs, labels)
        if keep_graph and self._captured is not None:
            activation.lease = self._captured.forward(version, activation.inputs, labels)
        if activation.lease is not None:
            activation.outputs = activation.lease.outputs
        else:
            activation.outputs = self._outputs(activation, keep_graph)
        return activation

    def _outputs(self, activation: Activation, with_graph: bool) -> Tensors:
        a = activation
        signature = tuple((n, tuple(t.shape), t.dtype) for n, t in a.inputs.items())
        if not with_graph:
            with torch.no_grad():
                return self._train(a)
        known = self._graph_bytes.get(signature)
        if known is not None:
            a.graph_bytes = known
            return self._train(a)
        storages: dict[int, int] = {}
        held = [*a.version.parameters.values(), *a.inputs.values(), *(a.labels or {}).values()]
        held += [*self._module.parameters(), *self._module.buffers()]  # what is not trained is there once for all
        own = {t.untyped_storage().data_ptr() for t in held}

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in own:
                storages[storage.data_ptr()] = storage.nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            outputs = self._train(a)
        a.graph_bytes = self._graph_bytes[signature] = sum(storages.values())
        return outputs

    def graph_bytes_like(self, inputs: Tensors) -> int:
        """Bytes that an autograd graph for inputs of these shapes would take, as one did before; 0 if none was built yet."""
        if self._captured is not None and self._captured.has_room(inputs):
            return 0
        signature = tuple((n, tuple(t.shape), t.dtype) for n, t in inputs.items())
        return self._graph_bytes.get(signature, 0)

    def backward(self, activation: Activation, output_gradients: Tensors | None, *, tokens: int = 0) -> Gradients:
        """Gradients of one micro-batch; recomputes the forward with the ticket's own version if the autograd graph was dropped.

        Args:
            activation: from `forward`; its outputs are let go.
            output_gradients: by output name, or None at the last stage (the loss sum's gradient is the version's loss
                scale: all gradients of the micro-batch are multiplied with it).
            tokens: of the micro-batch, which its buffers count by; the last stage counts them itself.

        Raises:
            RuntimeError: one is missing, or has a wrong shape.
        """
        if not activation.version.parameters and not any(t.requires_grad for t in activation.inputs.values()):
            made, activation.outputs = activation.outputs, None  # nothing is trained here or before: nobody wants a gradient
            if activation.version.buffers and not activation.buffers:
                self._outputs(activation, False)
            return Gradients({}, self._distances(activation, made, tokens))
        lease, outputs = activation.lease, activation.outputs
        if lease is not None:
            if output_gradients is None:
                output_gradients = {"loss_sum": torch.full_like(lease.outputs["loss_sum"], activation.version.record.loss_scale)}
            activation.drop()
            return Gradients(*lease.backward(output_gradients), borrowed=lease.is_wanted)
        if outputs is None or not any(t.requires_grad for t in outputs.values()):
            outputs = self._outputs(activation, True)
            activation.recomputed = True
        activation.outputs = None
        if output_gradients is None:
            scale = activation.version.record.loss_scale
            roots, seeds = [outputs["loss_sum"]], [torch.full_like(outputs["loss_sum"], scale)]
        else:
            names = [n for n, t in outputs.items() if t.requires_grad]
            if missing := [n for n in names if n not in output_gradients]:
                raise RuntimeError(f"no gradient of {', '.join(missing)} came")
            roots = [outputs[n] for n in names]
            seeds = [output_gradients[n].to(outputs[n].dtype) for n in names]
        inputs = {n: t for n, t in activation.inputs.items() if t.requires_grad}
        parameters = list(activation.version.parameters.values())
        result = torch.autograd.grad(roots, [*inputs.values(), *parameters], seeds, allow_unused=True)
        by_input = {
            name: g if g is not None else torch.zeros_like(t) for (name, t), g in zip(inputs.items(), result, strict=False)
        }
        return Gradients(by_input, [*result[len(inputs) :], *self._distances(activation, outputs, tokens)])

    def _distances(self, activation: Activation, outputs: Tensors | None, tokens: int) -> list[torch.Tensor | None]:
        """What the ticket adds for each buffer, loss scale included: the accumulator divides all by that."""
        version = activation.version
        if not version.buffers:
            return []
        counted = outputs["tokens"].detach().to(self.master_dtype) if self.last and outputs is not None else float(tokens)
        return [*distances(version.buffers, activation.buffers, counted * version.record.loss_scale, self.master_dtype)]

    @torch.no_grad()
    def evaluate(self, version: Version, inputs: Tensors, labels: Tensors | None) -> Tensors:
        """Forward only, dropout off."""
        with self._buffers.holding(version.buffers, train=False):
            return self._call(version.parameters, Ticket(0, 0), inputs, labels, train=False)
