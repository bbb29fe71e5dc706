"""`ep-ops doctor`: print the facts for a bug report, and why a backend is selected. Missing parts are printed as
text."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import os
import platform
import subprocess
from collections.abc import Callable

import torch

from ep_ops.backends import tuning_problem
from ep_ops.commands.launch import gpu_count
from ep_ops.config import Config

DISTRIBUTIONS = ("numpy", "nvidia-cutlass-dsl", "apache-tvm-ffi", "cuda-bindings")


def report() -> str:
    sections = {
        "versions": versions,
        "CUDA": cuda,
        "GPUs": gpus,
        "peer access": peer_access,
        "NVLink": nvlink,
        "NVLink domain": nvlink_domain,
        "symmetric memory": symmetric_memory,
        "backend": backend,
        "grouped GEMMs": gemms,
        "environment": environment,
        "module loading": module_loading,
        "caches": caches,
    }
    lines: list[str] = []
    for title, section in sections.items():
        lines += [title, *(f"  {line}" for line in attempt(section))]
    return "\n".join(lines)


def attempt(section: Callable[[], list[str]]) -> list[str]:
    """Return the lines of a section, or the error of a broken installation."""
    try:
        return section()
    except Exception as error:
        return [f"could not tell: {type(error).__name__}: {error}"]


def versions() -> list[str]:
    import ep_ops

    lines = [
        f"ep_ops               {ep_ops.__version__}  ({os.path.dirname(ep_ops.__file__)})",
        f"python               {platform.python_version()}  ({platform.platform()})",
        f"torch                {torch.__version__}  (CUDA {torch.version.cuda or 'none: a CPU build'})",
        f"driver               {driver()}",
    ]
    for name in DISTRIBUTIONS:
        lines.append(f"{name:<20} {installed(name) or 'not installed'}")
    return lines


def installed(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def cuda() -> list[str]:
    """Compare the CUDA version of the installed extra with torch's."""
    wanted = torch.version.cuda
    if wanted is None:
        return ["torch is a CPU build, so kernels cannot run"]
    major = wanted.partition(".")[0]
    try:
        from cute_kernels import jit
    except ImportError as error:
        return [f"no extra is installed ({error}): pip install 'ep_ops[cu{major}]'"]
    found = {"the CuTe DSL": jit.versions()["cuda"], "cuda-bindings": installed("cuda-bindings") or "unknown"}
    others = [f"{name} has CUDA {version}" for name, version in found.items() if version.partition(".")[0] != major]
    if not others:
        return [f"the extra cu{major} matches torch (CUDA {wanted})"]
    remove = "pip uninstall nvidia-cutlass-dsl-libs-cu13 && " if major == "12" else ""
    return [f"{' and '.join(others)}, but torch has CUDA {wanted}: {remove}pip install 'ep_ops[cu{major}]'"]


def driver() -> str:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except FileNotFoundError:
        return "none found (no nvidia-smi)"
    except subprocess.SubprocessError as error:
        return f"unknown ({error})"
    return ", ".join(sorted(set(found.stdout.split())))


def gpus() -> list[str]:
    lines = []
    for index in range(gpu_count()):
        gpu = torch.cuda.get_device_properties(index)
        memory = f"{gpu.total_memory / 2**30:.0f} GiB, {gpu.multi_processor_count} SMs"
        lines.append(f"{index}: {gpu.name}, capability {gpu.major}.{gpu.minor}, {memory}")
    return lines or ["none visible to torch"]


def peer_access() -> list[str]:
    count = gpu_count()
    if count < 2:
        return ["needs two GPUs"]
    lines = ["from\\to " + " ".join(f"{j:>3}" for j in range(count))]
    for i in range(count):
        cells = ("-" if i == j else "yes" if torch.cuda.can_device_access_peer(i, j) else "no" for j in range(count))
        lines.append(f"{i:>7} " + " ".join(f"{cell:>3}" for cell in cells))
    return lines


def nvlink() -> list[str]:
    """Return whether NVLink connects the visible GPUs, which latency kernels need."""
    from ep_ops.group.topology import GpuFacts, no_nvlink, pair_without_nvlink

    count = gpu_count()
    if count < 2:
        return ["needs two GPUs"]
    uuids = [str(torch.cuda.get_device_properties(index).uuid) for index in range(count)]
    facts = [GpuFacts("", uuid, None, None, no_nvlink(uuid)) for uuid in uuids]
    if (pair := pair_without_nvlink(facts)) is not None:
        return [f"none between GPUs {pair[0]} and {pair[1]}: latency kernels are off (latency_max_tokens is 0)"]
    if any(fact.no_nvlink is None for fact in facts):
        return ["NVML cannot tell; latency kernels are on"]
    return ["between all GPUs; latency kernels are on"]


def symmetric_memory() -> list[str]:
    if gpu_count() == 0:
        return ["needs GPUs"]
    from torch.distributed import _symmetric_memory

    provider = "torch.distributed._symmetric_memory: importable"
    backend = getattr(_symmetric_memory, "get_backend", lambda device: "unknown")(torch.device("cuda"))
    return [f"{provider}, allocator {backend}", f"NVSHMEM, for several NVLink domains: {nvshmem()}"]


def nvshmem() -> str:
    from ep_ops.backends import lack_across
    from ep_ops.symmetric.nvshmem import loaded

    if lack := lack_across():
        return f"not usable: {lack}"
    version, path = loaded()
    return f"{'.'.join(map(str, version))} ({path})"


def nvlink_domain() -> list[str]:
    """Return the NVLink domain of each GPU, and the domains of ranks with one process for each visible GPU."""
    from ep_ops.group.topology import Fabric, describe, divide, domain_name, fabric_of, gpu_facts

    lines = []
    for index in range(gpu_count()):
        found = fabric_of(str(torch.cuda.get_device_properties(index).uuid), index)
        lines.append(f"{index}: {domain_name(found) if isinstance(found, Fabric) else f'this host alone: {found}'}")
    if not lines:
        return ["needs GPUs"]
    facts = [gpu_facts(torch.device("cuda", i)) for i in range(len(lines))]
    try:
        where = describe(facts, divide(facts, None))
    except ValueError as error:
        where = str(error)
    return [*lines, f"with one process for each: {where}"]


def backend() -> list[str]:
    """Return what ``Communicator(backend="auto")`` selects with one process per visible GPU, and why not cute."""
    from ep_ops.backends import lack_across
    from ep_ops.group.topology import choose_backend, divide, gpu_facts

    count = gpu_count()
    if count == 0:
        return ["reference, because torch sees no GPU"]
    facts = [gpu_facts(torch.device("cuda", i)) for i in range(count)]
    try:
        domains = divide(facts, None)
    except ValueError as error:
        return [f"none, because {error}"]
    chosen, why = choose_backend(facts)
    if chosen == "cute" and len(domains) > 1:
        lack = lack_across()
        if lack is None:
            return [f"cute: {count} GPUs of capability 9.0 or newer in {len(domains)} NVLink domains, over NVSHMEM"]
        return [f"reference, because kernels that cross between NVLink domains lack something: {lack}"]
    if chosen == "cute":
        return [f"cute: {count} GPU(s) of capability 9.0 or newer, each of which maps the memory of all others"]
    lacks = dict.fromkeys(fact.lack for fact in facts if fact is not None and fact.lack)
    return ["reference, because:", *(f"- {lack}" for lack in lacks or (why,))]


def gemms() -> list[str]:
    """Return what ``gemms="auto"`` selects with the backend that is selected."""
    from ep_ops.nn.gemms import MOST_MEAN_ROWS

    if backend()[0].startswith("cute"):
        few = f"without gradients, and with at most {MOST_MEAN_ROWS} rows of an expert on average"
        return [f"auto: kernels for few rows {few}, for bfloat16 and float16; else torch"]
    return ["auto: torch"]


def environment() -> list[str]:
    """Return the variables that set defaults of options, and the one of the tuning table: value, meaning."""
    lines = []
    for option in dataclasses.fields(Config):
        if variable := option.metadata.get("variable"):
            value = os.environ.get(variable)
            lines.append(f"{variable:<15} {value or 'not set'}  ({option.name}: {option.metadata['words']})")
    tuning = os.environ.get("EP_OPS_TUNING") or "not set"
    lines.append(f"{'EP_OPS_TUNING':<15} {tuning}  ({tuning_problem() or 'a file of ep-ops bench tune'})")
    return lines


def module_loading() -> list[str]:
    """Return when CUDA loads kernels (docs/progress.md)."""
    if os.environ.get("CUDA_MODULE_LOADING") == "EAGER":
        return ["EAGER: with the libraries that they are in"]
    return ["LAZY: at their first launch, which may block the host while a kernel waits (CUDA_MODULE_LOADING=EAGER)"]


def caches() -> list[str]:
    lines = []
    try:
        from cute_kernels import jit

        folder = jit.cache_dir()
        why = None if folder is None else jit.rejection(folder)
        line = f"kernels    {folder or 'not kept on disk (EP_OPS_CACHE_DIR is empty)'}"
        lines.append(line + (f"  (not used: {why})" if why else ""))
    except (ImportError, AttributeError, OSError) as error:
        lines.append(f"kernels    none ({error})")
    from torch._inductor.runtime.runtime_utils import cache_dir

    lines.append(f"inductor   {cache_dir()}")
    return lines
