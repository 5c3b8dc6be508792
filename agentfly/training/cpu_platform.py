"""verl on a machine without an accelerator: collectives by gloo, memory by the operating system.

Guarantees:
1. Only public hooks are used, but for two functions of verl 0.9.1 that are wrong on a CPU (``_patch_...``).
2. Memory figures are resident memory of the process, in bytes, so that verl's reports stay meaningful.

Use: ``VERL_PLATFORM=cpu VERL_ENGINE_DEVICE=cuda`` (the second selects the FSDP engine, which verl registers
for cuda and npu only).
"""

import contextlib
import resource
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import psutil
import torch
from verl.plugin.platform import PlatformBase, PlatformRegistry
from verl.utils import distributed, fsdp_utils


class _CpuDevice(str):
    """The current device: ``cpu`` where torch wants a device, 0 where verl formats or indexes one."""

    __slots__ = ()

    def __new__(cls) -> "_CpuDevice":
        return super().__new__(cls, "cpu")

    def __format__(self, spec: str) -> str:
        return "0"

    def __index__(self) -> int:
        return 0

    def __int__(self) -> int:
        return 0


class _Event:
    """torch.cuda.Event where everything is synchronous."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def record(self, *_: Any) -> None: ...

    def wait(self, *_: Any) -> None: ...

    def synchronize(self) -> None: ...

    def elapsed_time(self, other: "_Event") -> float:
        return 0.0


def _resident(*_: Any, **__: Any) -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _mem_get_info(*_: Any) -> tuple[int, int]:
    memory = psutil.virtual_memory()
    return memory.available, memory.total


def _nothing(*_: Any, **__: Any) -> None: ...


def _device_module() -> ModuleType:
    """``torch.cpu`` with the rest of the interface of ``torch.cuda`` that verl calls."""
    module = ModuleType("agentfly_torch_cpu")
    module.__dict__.update({k: v for k, v in vars(torch.cpu).items() if not k.startswith("__")})
    for name in (
        *("empty_cache", "ipc_collect", "set_device", "synchronize", "reset_peak_memory_stats"),
        *("set_per_process_memory_fraction", "set_rng_state", "set_rng_state_all"),
    ):
        setattr(module, name, _nothing)
    for name in ("memory_allocated", "memory_reserved", "max_memory_allocated", "max_memory_reserved"):
        setattr(module, name, _resident)
    module.__dict__.update(
        Event=_Event,
        is_available=lambda: True,
        device_count=lambda: 1,
        current_device=_CpuDevice,
        get_device_name=lambda *_: "cpu",
        get_rng_state=lambda *_: torch.get_rng_state(),
        manual_seed=torch.manual_seed,
        manual_seed_all=torch.manual_seed,
        mem_get_info=_mem_get_info,
    )
    return module


_DEVICE_MODULE = _device_module()


class CpuPlatform(PlatformBase):  # type: ignore[misc]
    """See ``PlatformBase`` of verl for what each method means."""

    @property
    def device_name(self) -> str:
        return "cpu"

    @property
    def vendor_name(self) -> str:
        return "cpu"

    @property
    def device_module(self) -> ModuleType:
        return _DEVICE_MODULE

    def is_available(self) -> bool:
        return True

    def current_device(self) -> Any:
        return _CpuDevice()

    def device_count(self) -> int:
        return 1

    def set_device(self, device_index: int) -> None: ...

    def synchronize(self, device_index: int | None = None) -> None: ...

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        torch.manual_seed(seed)

    def set_allocator_settings(self, settings: str) -> None: ...

    def empty_cache(self) -> None: ...

    def get_device_capability(self, device_index: int = 0) -> tuple[int | None, int | None]:
        return None, None

    def communication_backend_name(self) -> str:
        return "gloo"

    def visible_devices_envvar(self) -> str:
        return "CUDA_VISIBLE_DEVICES"

    @contextlib.contextmanager
    def nvtx_range(self, msg: str) -> Iterator[None]:
        yield

    def profiler_start(self) -> None: ...

    def profiler_stop(self) -> None: ...

    def ray_resource_name(self) -> str:
        return "GPU"  # verl counts no other; Ray takes any number of logical ones

    def ray_noset_envvars(self) -> list[str]:
        return ["RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"]

    def is_ipc_supported(self) -> bool:
        return False

    def cudart(self) -> None:
        return None


def register() -> None:
    """Make the platform known to verl and correct the two functions. Safe to call again."""
    PlatformRegistry.register(platform="cpu")(CpuPlatform)
    _patch_process_group()
    _patch_weight_snapshot()


def _patch_process_group() -> None:
    """verl asks torch for ``cpu:gloo,cpu:gloo``, which it refuses as a duplicate."""
    original = distributed.initialize_global_process_group_ray
    if getattr(original, "_agentfly", False):
        return

    def initialize(timeout_second: float | None = None, backend: str | None = None) -> Any:
        return original(timeout_second=timeout_second, backend=backend or "cpu:gloo")

    initialize._agentfly = True  # type: ignore[attr-defined]
    distributed.initialize_global_process_group_ray = initialize


def _patch_weight_snapshot() -> None:
    """verl copies weights by ``.cpu()``; on a CPU that is the same memory, which the optimizer then changes.

    ``separate_async`` with ``parameter_sync_step`` above 1 would compute the old policy's log-probabilities
    with the new policy, without any error.
    """
    original = fsdp_utils.fsdp2_sharded_save_to_cpu
    if getattr(original, "_agentfly", False):
        return

    def save(model: Any) -> tuple[dict[str, Any], Any]:
        state, spec = original(model)
        return {name: (tensor.clone(), placement) for name, (tensor, placement) in state.items()}, spec

    save._agentfly = True  # type: ignore[attr-defined]
    fsdp_utils.fsdp2_sharded_save_to_cpu = save
