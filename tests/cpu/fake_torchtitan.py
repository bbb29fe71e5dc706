"""A stand-in for torchtitan 0.3 with the names that ``ep_ops.integrations.torchtitan`` imports, so that its tests run
without torchtitan."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import sys
import types
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

OURS = "ep_ops.integrations.torchtitan"


def derive(config: Any, kind: Any, **fields: Any) -> Any:
    """A config of another kind with the fields of ``config`` that both have, and these."""
    allowed = {field.name for field in dataclasses.fields(kind)}
    if unknown := fields.keys() - allowed:
        raise ValueError(f"{kind.__qualname__} has no fields {sorted(unknown)}")
    shared = {f.name: getattr(config, f.name) for f in dataclasses.fields(config) if f.name in allowed}
    return kind(**shared | fields)


class BaseEPTokenDispatcher:
    def __init__(self, config: Any) -> None:
        self.ep_mesh: Any = None

    def wire_meshes(self, *, ep_mesh: Any) -> None:
        self.ep_mesh = ep_mesh
        self.init_buffer()

    def init_buffer(self) -> None:
        pass


class HybridEPTokenDispatcher(BaseEPTokenDispatcher):
    @dataclass(kw_only=True, slots=True)
    class Config:
        num_experts: int
        top_k: int
        hidden_dim: int | None = None
        num_max_tokens_per_rank: int | None = None
        non_blocking_capacity_factor: float | None = None
        pad_multiple: int | None = None


class SelectiveAC:
    @dataclass(kw_only=True, slots=True)
    class Config:
        pass

    def get_save_ops(self) -> set[Any]:
        return {torch.ops.aten.mm.default}


class RoutedExperts:
    @dataclass(kw_only=True, slots=True)
    class Config:
        inner_experts: Any
        token_dispatcher: Any


@dataclass
class Model:
    """Configs by their names, which `traverse` finds."""

    parts: dict[str, Any]

    def traverse(self, kind: Any) -> Iterator[tuple[str, Any, Any, str]]:
        for name, part in self.parts.items():
            if isinstance(part, kind):
                yield name, part, _Parent(self.parts), name


class _Parent:
    def __init__(self, parts: dict[str, Any]) -> None:
        self.__dict__ = parts


@contextlib.contextmanager
def installed() -> Iterator[Any]:
    """The integration, on these classes in the place of torchtitan's."""
    contents: dict[str, dict[str, Any]] = {
        "torchtitan": {},
        "torchtitan.config": {
            "TORCH_DTYPE_MAP": {str(t)[6:]: t for t in (torch.float16, torch.float32, torch.bfloat16)}
        },
        "torchtitan.config.override": {"derive": derive},
        "torchtitan.distributed": {},
        "torchtitan.distributed.activation_checkpoint": {"SelectiveAC": SelectiveAC},
        "torchtitan.models": {},
        "torchtitan.models.common": {},
        "torchtitan.models.common.moe": {"RoutedExperts": RoutedExperts},
        "torchtitan.models.common.token_dispatcher": {
            "BaseEPTokenDispatcher": BaseEPTokenDispatcher,
            "HybridEPTokenDispatcher": HybridEPTokenDispatcher,
        },
    }
    before = {name: sys.modules.pop(name, None) for name in (*contents, OURS)}
    try:
        for name, attributes in contents.items():
            sys.modules[name] = types.ModuleType(name)
            vars(sys.modules[name]).update(attributes)
        yield importlib.import_module(OURS)
    finally:
        for name, module in before.items():
            sys.modules.pop(name, None)
            if module is not None:
                sys.modules[name] = module
