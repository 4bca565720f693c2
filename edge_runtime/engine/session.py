"""Sessions of onnxruntime: what is the same for every graph that a device runs."""

from __future__ import annotations

import ctypes
import functools
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from federation.errors import BundleError, InputError, OutOfMemory

PROVIDERS = ["CPUExecutionProvider"]
RUNTIME = f"onnxruntime {ort.__version__}"
Profile = Literal["fast", "low_memory"]
FrozenType = Literal["float32", "int8"]
_LARGE_BLOCK, _MOST_HEAPS = -3, -8  # M_MMAP_THRESHOLD and M_ARENA_MAX of mallopt(3)


@dataclass(frozen=True)
class RuntimeSettings:
    """How a device computes. The defaults behave when several agents share a machine."""

    threads: int = 1
    spinning: bool = (
        True  # several threads wait actively within a step; without it other programs get more of the cores
    )
    profile: Profile = "fast"
    frozen: FrozenType = "float32"  # what the layers that a device does not train are computed in

    def __post_init__(self) -> None:
        if not 1 <= self.threads <= 256:
            raise InputError(f"threads: expected a number from 1 to 256, got {self.threads}")
        if self.profile not in get_args(Profile):
            raise InputError(f"profile: expected {' or '.join(get_args(Profile))}, got {self.profile!r}")
        if self.frozen not in get_args(FrozenType):
            raise InputError(f"frozen: expected {' or '.join(get_args(FrozenType))}, got {self.frozen!r}")


@dataclass
class _Process:
    """What sessions have done to this process, which has one arena."""

    has_run_graphs: bool = False


_PROCESS = _Process()


def is_untouched() -> bool:
    """Whether no graph was opened in this process yet: afterwards its arena has memory that a measurement misses."""
    return not _PROCESS.has_run_graphs


def inference_session(
    graph: Path | bytes, settings: RuntimeSettings, weights: Mapping[str, NDArray[np.float32]] | None = None
) -> ort.InferenceSession:
    """Open a frozen layer. `fast` packs its weights for the processor; `low_memory` leaves them in the mapped file.

    `weights` are those that lie outside of the graph, by name, instead of the ones in the file beside it.
    """
    options = _options(settings)
    if weights:
        values = [ort.OrtValue.ortvalue_from_numpy(value) for value in weights.values()]
        options.add_external_initializers(list(weights), values)
    disabled: list[str] = []
    if settings.profile == "low_memory":
        disabled = ["ConstantFolding"]  # makes copies of weights: five times their size for an LSTM
        options.add_session_config_entry("session.disable_prepacking", "1")
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_EXTENDED  # without NCHWc: it packs too
    return _open(graph, options, disabled)


def training_session(
    graph: Path | bytes, settings: RuntimeSettings, *, trace: Path | None = None
) -> ort.InferenceSession:
    """Open a training graph, to be run exactly as it was written.

    The exporter decides in which order nodes run and what is computed twice, because that decides how much is alive at
    once; the runtime's optimiser would undo both and gains no time here. `trace` is a file name without its ending:
    the first runs write there how long each node took.
    """
    options = _options(settings)
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.execution_order = ort.ExecutionOrder.PRIORITY_BASED
    options.enable_mem_reuse = False  # planning it takes most of the loading time and holds blocks for later values
    if trace is not None:
        options.enable_profiling = True
        options.profile_file_prefix = str(trace)
    return _open(graph, options)


def _options(settings: RuntimeSettings) -> ort.SessionOptions:
    _identity()  # before any other graph: it has the one region that stays
    _PROCESS.has_run_graphs = True
    return _plain_options(settings)


def _plain_options(settings: RuntimeSettings) -> ort.SessionOptions:
    _share_arena()
    options = ort.SessionOptions()
    options.intra_op_num_threads = settings.threads
    options.inter_op_num_threads = 1
    options.log_severity_level = 4  # errors come as exceptions
    options.enable_mem_pattern = False  # one block planned ahead for all values, on top of the first run's own
    spins = settings.spinning and settings.threads > 1
    # Within a step a thread that sleeps wakes too late for the next node: so several threads spin until the step ends.
    options.add_session_config_entry("session.intra_op.allow_spinning", str(int(spins)))
    options.add_session_config_entry("session.force_spinning_stop", "1")
    options.add_session_config_entry("session.use_env_allocators", "1")
    return options


@functools.cache
def _share_arena() -> None:
    """Use one arena for all sessions of the process: the training step reuses what the frozen layers needed.

    By default onnxruntime hands out blocks up to twice as large as asked for. Here what is left over stays usable:
    peak of a ResNet20 step at batch 32 on 1.31, training everything / the weak tier: 70 / 16 MiB instead of 83 / 20.
    Without an arena it is more, not less (freed blocks lie scattered), or seven times slower (pages given back).
    """
    arena = ort.OrtArenaCfg(
        {
            "max_mem": 0,
            "arena_extend_strategy": 0,  # regions double
            "initial_chunk_size_bytes": 256,  # the least; this region is never given back, so no graph is to have it
            "initial_growth_chunk_size_bytes": 16 << 20,  # the next one's; pages never touched cost nothing
            "max_dead_bytes_per_chunk": 1 << 10,
        }
    )
    cpu = ort.OrtMemoryInfo("Cpu", ort.OrtAllocatorType.ORT_ARENA_ALLOCATOR, 0, ort.OrtMemType.DEFAULT)
    ort.create_and_register_allocator(cpu, arena)


# y = Identity(x) for one number, as `onnx` would write it: a device does not have that package.
_IDENTITY = bytes.fromhex(
    "08073a370a100a017812017922084964656e746974791201675a0f0a0178120a0a08080112040a020801620f0a0179120a0a0808011204"
    "0a02080142040a00100d"
)


@functools.cache
def _identity() -> ort.InferenceSession:
    """Open it and let its result have the arena's first region; all that follow can be given back."""
    session = _open(_IDENTITY, _plain_options(RuntimeSettings()))
    session.run(["y"], {"x": np.zeros(1, np.float32)}, _shrinking())
    return session


def _shrinking() -> ort.RunOptions:
    """Make options of a run after which the arena returns free regions; the next one is as large as at the start."""
    options = ort.RunOptions()
    options.add_run_config_entry("memory.enable_memory_arena_shrinkage", "cpu:0")
    return options


def give_back_memory() -> None:
    """Return to the system what no session uses: regions of the arena, and free blocks of the heap.

    The first call also gets the runtime ready, so that what it takes itself counts as idle from then on.
    """
    session, number, result = _identity(), np.zeros(1, np.float32), np.zeros(1, np.float32)
    binding = session.io_binding()  # a result of its own would lie in a region, which then could not go
    binding.bind_input("x", "cpu", 0, np.float32, (1,), number.ctypes.data)
    binding.bind_output("y", "cpu", 0, np.float32, (1,), result.ctypes.data)
    session.run_with_iobinding(binding, _shrinking())
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:
        trim(0)


def keep_heap_small() -> None:
    """Have large blocks go back to the system when they are freed, and all threads use one heap.

    By itself glibc stops the former when the first region of the arena is freed, and never trims the heaps of threads:
    an agent's memory grew by two megabytes in twenty rounds.
    """
    choose = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if choose is not None:
        choose(_LARGE_BLOCK, 128 << 10)  # glibc's own value at the start
        choose(_MOST_HEAPS, 1)


def _open(model: Path | bytes, options: ort.SessionOptions, disabled: Sequence[str] = ()) -> ort.InferenceSession:
    source = str(model) if isinstance(model, Path) else model
    what = model.name if isinstance(model, Path) else "a graph"
    try:
        return ort.InferenceSession(source, options, providers=PROVIDERS, disabled_optimizers=list(disabled))
    except Exception as error:  # onnxruntime raises several unrelated types
        if is_out_of_memory(error):
            raise OutOfMemory(f"not enough memory to load {what}") from None
        raise BundleError(f"{RUNTIME} cannot load {what}: {str(error).splitlines()[0]}") from None


def is_out_of_memory(error: BaseException) -> bool:
    """Recognise it by the words of the message: onnxruntime has no type for it."""
    words = ("bad allocation", "bad_alloc", "Failed to allocate memory", "Cannot allocate memory", "std::bad")
    return isinstance(error, MemoryError) or any(word in str(error) for word in words)
