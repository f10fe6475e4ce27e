"""What the fork server imports once for all its children. Owns the rules that make forking afterwards safe.

No thread may run, no parallel operation of torch may have run, and CUDA must be untouched when a child is forked.
"""

from __future__ import annotations

import gc
import importlib
import logging
import threading

from launch.processes.devices import before_importing_torch
from models.registry import require_known
from swarm.base.config import RunConfig, parse_config_bytes
from swarm.base.dotted import is_dotted

_MODULES = (
    "torch",
    "swarm.wire.compression",
    "models.registry",
    "launch.stage",
    "launch.trainer",
    "launch.backbone",
    "swarm.stage.executor",
    "swarm.peer.stage.stage_peer",
    "swarm.peer.trainer.trainer",
    "swarm.peer.backbone",
    "swarm.net.http.transport",
    "swarm.net.kademlia.dht",
    "swarm.feed.feed",
)


def modules_for(config: RunConfig) -> tuple[str, ...]:
    """What is imported for a run, in this order: transformers too, unless the model is a user's own."""
    return _MODULES if is_dotted(config.model) else (*_MODULES, "transformers")


def _import_model(config: RunConfig) -> None:
    """What every stage process would import for itself otherwise, two seconds long."""
    if config.imports:
        return  # a user's own code may do what must not be done before a fork
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    from models.registry import factory_of

    hugging_face_config = getattr(factory_of(config), "config", None)
    if hugging_face_config is not None and type(hugging_face_config) in MODEL_FOR_CAUSAL_LM_MAPPING:
        _ = MODEL_FOR_CAUSAL_LM_MAPPING[type(hugging_face_config)]  # the lookup imports the class


def nothing(argument: str) -> int:
    """For a server whose children need no torch."""
    return 0


def everything(config_json: str) -> int:
    """Import `modules_for` the run and its model, and return the number of CUDA devices, without initialising CUDA.

    Raises:
        ConfigError: the model's options do not fit.
        ImportError: naming the module that cannot be imported.
        RuntimeError: an import started a thread or initialised CUDA, so that children could hang.
    """
    before_importing_torch()
    config = parse_config_bytes(config_json.encode())
    require_known(config.model)  # told at once, not after the seconds of the imports
    for name in modules_for(config):
        try:
            importlib.import_module(name)
        except ImportError as error:
            raise ImportError(f"{name} cannot be imported: {error}") from error
    import torch

    torch.set_num_threads(1)
    num_devices = torch.cuda.device_count()
    # The import of bitsandbytes, a second long, asks a CUDA device for its capability, which would initialise it; peft,
    # which the model of a run with adapters needs, imports it.
    if num_devices == 0 or config.lora is None:
        _import_model(config)
    if torch.cuda.is_initialized():
        raise RuntimeError("an import initialised CUDA: forked children could not use it")
    if threading.active_count() > 1:
        raise RuntimeError(f"an import started threads: {[thread.name for thread in threading.enumerate()]}")
    logging.getLogger(__name__).debug("preloaded %d modules", len(modules_for(config)))
    gc.collect()
    gc.freeze()  # children share these objects; the collector need not touch, and so copy, them
    return num_devices
