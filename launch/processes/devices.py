"""Which device a stage computes on, with how many threads and how much memory. Imports torch only when asked."""

from __future__ import annotations

import os
import resource
import sys
import tempfile
import time
from pathlib import Path

from launch.processes.control_groups import cpus_allowed, memory_left
from swarm.base.errors import ConfigError

#: Part of the memory that is free at the start which stages may take if nothing else is said.
DEFAULT_MEMORY_PART = 0.8
#: Python's own is 5 ms: a third of a micro-batch.
SWITCH_INTERVAL_S = 1e-4
#: Size and length of the benchmark that compares devices.
_BENCHMARK_WIDTH = 512
_BENCHMARK_S = 0.05


def before_importing_torch() -> None:
    """Settle what torch and bitsandbytes do as they are imported. Variables that are set already stay as they are."""
    # bitsandbytes, for adapters, decorates with torch.compile, which creates this directory; nothing is put into it.
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", tempfile.gettempdir())
    # `torch.cuda.is_available()` asks the management library instead of starting the driver, which no fork survives.
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")


def before_compiling(cache_dir: Path) -> None:
    """Keep what `torch.compile` makes, so that the next start is quick, and compile in this process alone."""
    if os.environ.get("TORCHINDUCTOR_CACHE_DIR") == tempfile.gettempdir():
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(cache_dir)
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # more are processes, which might outlive this one


def share_interpreter(device: str) -> None:
    """On a GPU the compute thread only starts kernels: it must get the interpreter back at once from the event loop."""
    if device.startswith("cuda"):
        sys.setswitchinterval(SWITCH_INTERVAL_S)


def resolve_device(name: str) -> str:
    """`auto` becomes the CUDA device with the most free memory, else `cpu`.

    Raises:
        ConfigError: a CUDA device that this machine does not have.
    """
    import torch

    num_devices = torch.cuda.device_count()
    if name == "auto":
        if not torch.cuda.is_available():
            return "cpu"
        return f"cuda:{max(range(num_devices), key=lambda index: torch.cuda.mem_get_info(index)[0])}"
    if name.startswith("cuda:") and int(name.removeprefix("cuda:")) >= num_devices:
        raise ConfigError(f"--device {name}: this machine has {num_devices} CUDA devices that torch can use")
    return name


def device_memory(device: str) -> int:
    """Bytes that this process can still get on `device`."""
    if device.startswith("cuda"):
        import torch

        return torch.cuda.mem_get_info(torch.device(device))[0]
    return available_memory()


def available_memory() -> int:
    """Bytes of main memory that this process can still get: its control groups' and its own limits included."""
    try:
        fields = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
        free = int(fields["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        free = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return max(min(free, memory_left(), _below_own_limits()), 2**20)


def _below_own_limits() -> int:
    """What the limits that the operating system holds this process to (`ulimit -d`, `ulimit -v`) leave of memory."""
    left = sys.maxsize
    try:
        status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
        for kind, key in ((resource.RLIMIT_DATA, "VmData"), (resource.RLIMIT_AS, "VmSize")):
            limit, _ = resource.getrlimit(kind)
            if limit != resource.RLIM_INFINITY:
                left = min(left, limit - int(status[key].split()[0]) * 1024)
    except (OSError, KeyError, ValueError):
        pass
    return left


def measured_flops(device: str) -> float:
    """Floating-point operations per second of `device` in a matrix product that takes a moment: to compare devices by."""
    import torch

    a = torch.ones(_BENCHMARK_WIDTH, _BENCHMARK_WIDTH, device=device)
    num_products, began = 0, 0.0
    (a @ a).sum().item()  # the first one pays for what is set up once
    began = time.perf_counter()
    while (seconds := time.perf_counter() - began) < _BENCHMARK_S or not num_products:
        (a @ a).sum().item()  # waits for the device
        num_products += 1
    return 2 * _BENCHMARK_WIDTH**3 * num_products / seconds


def use_threads(num_threads: int | None) -> int:
    """Set how many threads torch computes with on the CPU; None takes every core this process may run on."""
    import torch

    torch.set_num_threads(num_threads or num_cores())
    return num_threads or num_cores()


def num_cores() -> int:
    """Cores that this process may run on, and no more than what its control groups let it have of them."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, round(min(cores, cpus_allowed())))
