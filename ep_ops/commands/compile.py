"""`ep-ops compile`: compile a communicator's kernels into the disk cache, on all cores.

It needs no GPU, so it can be a step of an image build. Otherwise each kernel is compiled when it is first used, or in
`Communicator.warmup`, with all cores as well.
"""

from __future__ import annotations

import argparse
import inspect
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from ep_ops.backends import no_device_library
from ep_ops.backends.cute.sizing import across
from ep_ops.config import Config, options
from ep_ops.formats import format_of, layout_of
from ep_ops.formats.quantize import reject_hidden
from ep_ops.memory import planned

_METAVARS = {"tuple[int, ...]": "N,N", "bool": "True|False"}
"""How help texts show values of options, by the annotation of the field; others by their name."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add a command line option for each field of :class:`Config` that can be read from text."""
    about = _first_sentences()
    for name, field in options().items():
        if "parse" in field.metadata:
            parser.add_argument(
                "--" + name.replace("_", "-"), type=field.metadata["parse"],
                metavar=_METAVARS.get(str(field.type), name.upper()),
                required=field.default is field.default_factory, default=argparse.SUPPRESS, help=about[name],
            )  # fmt: skip


def _first_sentences() -> dict[str, str]:
    """Return the first sentence about each option in the docstring of :class:`Config`."""
    entries = re.findall(r"^    (\w+): (.*(?:\n        .*)*)", inspect.getdoc(Config) or "", re.MULTILINE)
    plain = {name: re.sub(r":\w+:`|`", "", re.split(r"\.\s", text)[0]) for name, text in entries}
    return {name: text.replace("\n", " ").rstrip(".") for name, text in plain.items()}


def config_of(args: argparse.Namespace) -> Config:
    """Return the configuration that command line options describe."""
    given = {name: getattr(args, name) for name in options() if hasattr(args, name)}
    return Config(backend="cute", **given)


def checked_config(config: Config, world_size: int) -> Config:
    """Return what the ranks would agree on. ValueError if no communicator accepts it or this host cannot compile it."""
    from cute_kernels.heap import MOST_RANKS_ACROSS

    if world_size > MOST_RANKS_ACROSS:  # before anything of that size is made
        raise ValueError(f"world_size is {world_size}; backend 'cute' takes at most {MOST_RANKS_ACROSS} ranks")
    config = planned(config, world_size)
    if across(config) and config.wire == "nvshmem" and (problem := no_device_library()):
        raise ValueError(problem)
    return config


def formats_of(texts: Sequence[str], hidden_size: int) -> list[tuple[str, str]]:
    """Parse formats and layouts of scales, "NAME=LAYOUT" or "NAME". Raises ValueError if dispatch would."""
    found = []
    for text in texts:
        name, _, layout = text.partition("=")
        reject_hidden(hidden_size, format_of(name))
        layout_of(format_of(name), layout)
        found.append((name, layout))
    return found


def compile_communicator(config: Config, arch: str, formats: Sequence[tuple[str, str]] = ()) -> int:
    """Compile a communicator's kernels, also for these formats, and return their number. RuntimeError without a
    cache."""
    from ep_ops.backends.cute.backend import all_kernels

    wanted = all_kernels(config, formats)
    folder()
    compile_all(wanted, arch)
    return len(wanted)


def folder() -> Path:
    """Return the cache folder. RuntimeError if there is none."""
    from cute_kernels import jit

    try:
        found = jit.cache_dir()
        if found is None:
            raise RuntimeError("EP_OPS_CACHE_DIR is empty: there is no folder to keep compiled kernels in")
        found.mkdir(mode=0o700, parents=True, exist_ok=True)
        why = jit.rejection(found)
    except OSError as error:
        raise _unusable(error) from error
    if why is not None:
        raise _unusable(why)
    return found


def _unusable(why: object) -> RuntimeError:
    from cute_kernels import jit

    return RuntimeError(f"{jit.named()} cannot keep compiled kernels: {why}; EP_OPS_CACHE_DIR names another folder")


def compile_all(wanted: Sequence[Any], arch: str) -> None:
    """Compile kernels that are not in the cache yet, with one process for each core. RuntimeError if it cannot keep
    them."""
    from cute_kernels import jit, prepare

    prepare.prepare_all(wanted, arch, prepare.share_of_cores())
    try:
        for kernel in wanted:
            jit.prepare(kernel, arch)  # raises what a process could not
    except OSError as error:
        raise _unusable(error) from error


def arch_here() -> str | None:
    """Return the architecture of this host's first GPU, or None."""
    return arch_of(torch.device("cuda", 0)) if torch.cuda.is_available() else None


def arch_of(device: torch.device) -> str:
    """Return the architecture of a GPU, such as sm_90a."""
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}a"
