"""Calls of a communicator's methods with one wrong argument on one of two ranks, drawn from a seed."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy
import torch
import torch.distributed as dist
from torch._subclasses import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.utils._python_dispatch import TorchDispatchMode

import ep_ops

T, K, H, EXPERTS, MOST = 4, 2, 32, 6, 8
Call = Callable[[dict[str, Any]], Any]

SPLIT = ("dispatch_start", "combine_start")
SURPLUS = "positional"  # arguments behind those that can be given by position
POSITIONAL = ("x", "topk_idx", "y", "route", "topk_weights", "weights")  # in the order of every method
ROUTE_TENSORS = ("topk_idx", "send_rows", "arrivals", "offs", "counts")


class Calls:
    """The right calls of each method, on this rank, and what they return."""

    def __init__(self, comm: ep_ops.Communicator, gradients: bool) -> None:
        self.comm = comm
        gen = torch.Generator().manual_seed(comm.rank)
        self.x = torch.randn(T, H, generator=gen)
        self.idx = torch.stack([torch.randperm(EXPERTS, generator=gen)[:K] for _ in range(T)]).int()
        self.weights = torch.rand(T, K, generator=gen)
        if gradients:
            self.x.requires_grad_(), self.weights.requires_grad_()
        self.sent = comm.dispatch(self.x, self.idx, self.weights)
        self.rows = torch.randn(self.sent.x.shape, generator=gen, requires_grad=gradients)
        self.mesh = DeviceMesh("cpu", range(comm.world_size))

    def arguments(self, method: str) -> dict[str, Any]:
        """The arguments of a right call, by name."""
        sizes = dict(layout="grouped", capacity=None, slots=0, max_tokens=MOST, alignment=None)
        how = dict(scales=None, format="", scales_as="", zeros=None)
        tokens = dict(x=self.x, topk_idx=self.idx, topk_weights=self.weights)
        back = dict(y=self.rows, route=self.sent.route, weights=self.sent.weights)
        return {
            "plan": dict(topk_idx=self.idx, **sizes),
            "dispatch": dict(**tokens, **sizes, **how, exact=False),
            "dispatch_planned": dict(x=self.x, route=self.sent.route, topk_weights=self.weights, **how),
            "combine": dict(**back, residual=self.x, format="", grad_format=""),
            "combine_gathered": dict(y=self.rows, route=self.sent.route),
            "dispatch_start": dict(**tokens, **sizes, **how, flight=0),
            "combine_start": dict(**back, format="", flight=0),
        }[method]

    def run(self, method: str, arguments: dict[str, Any]) -> list[torch.Tensor]:
        """Call a method, with the wait of a start, and return its results."""
        by_place = [arguments[name] for name in POSITIONAL if name in arguments] if SURPLUS in arguments else []
        by_name = {name: value for name, value in arguments.items() if not by_place or name not in POSITIONAL}
        found = getattr(self.comm, method)(*by_place, *by_name.pop(SURPLUS, ()), **by_name)
        if method in SPLIT:
            found = getattr(self.comm, method.replace("start", "wait"))(found)
        return [found] if isinstance(found, torch.Tensor) else [t for t in found if isinstance(t, torch.Tensor)]


METHODS = ("plan", "dispatch", "dispatch_planned", "combine", "combine_gathered", *SPLIT)


def misaligned(tensor: torch.Tensor) -> torch.Tensor:
    memory = torch.empty(tensor.numel() + 1, dtype=tensor.dtype)
    memory[1:] = tensor.detach().flatten()
    return memory[1:].view(tensor.shape)


def fake(tensor: torch.Tensor) -> torch.Tensor:
    return FakeTensorMode().from_tensor(tensor)


def wrong_tensors(name: str, right: torch.Tensor, calls: Calls) -> dict[str, Callable[[], Any]]:
    """Makers of wrong values of a tensor argument."""
    made: dict[str, Callable[[], Any]] = {
        "str": lambda: "x", "int": lambda: 3, "list": lambda: right.tolist(), "array": lambda: right.detach().numpy(),
        "object": object, "bool": lambda: right.bool(), "complex": lambda: right.to(torch.complex64),
        "int16": lambda: right.to(torch.int16), "float16": lambda: right.to(torch.float16),
        "more": lambda: torch.cat([right, right[:1]]), "meta": lambda: right.to("meta"), "fake": lambda: fake(right),
        "nested": lambda: torch.nested.nested_tensor([right]), "sparse": lambda: right.to_sparse(),
        "jagged": lambda: torch.nested.nested_tensor([right], layout=torch.jagged),
        "dtensor": lambda: DTensor.from_local(right, calls.mesh, [Shard(0)], run_check=False),
        "scalar": lambda: right.flatten()[0], "deep": lambda: torch.stack([right] * 2),
    }  # fmt: skip
    if right.dim() == 2:
        made |= {
            "csr": lambda: right.to_sparse_csr(), "flat": lambda: right.flatten(), "narrow": lambda: right[:, 1:],
            "strided": lambda: torch.stack([right, right], 2)[..., 0], "wide": lambda: torch.cat([right, right], 1),
        }  # fmt: skip
        if right.dtype == torch.float32:
            made["mkldnn"] = lambda: right.to_mkldnn()
    if name in ("x", "y", "residual", "arrivals"):
        made["misaligned"] = lambda: misaligned(right)
    if name in ("topk_weights", "weights"):  # converted
        del made["float16"]
    if name == "arrivals":
        made["more"] = lambda: right[:-1]
    return made


INTS = {
    "text": lambda: "8", "float": lambda: 2.5, "negative": lambda: -1, "array": lambda: numpy.array([8, 8]),
    "tensor": lambda: torch.tensor([8, 8]), "huge": lambda: 2**70, "bool": lambda: True, "nan": lambda: float("nan"),
    "object": object, "list": lambda: [8], "long": lambda: 2**31,
}  # fmt: skip
TEXTS = {"other": lambda: "other", "int": lambda: 3, "array": lambda: numpy.array(["grouped"]), "list": lambda: ["x"]}
FLAGS = {"text": lambda: "no", "int": lambda: 2, "array": lambda: numpy.array([1, 0]), "object": object}
WRONG = {
    "layout": TEXTS | {"none": lambda: None, "padded": lambda: "padded"},
    "capacity": INTS | {"odd": lambda: 17}, "alignment": INTS | {"large": lambda: 2048},
    "max_tokens": INTS | {"fewer": lambda: MOST - 1, "few": lambda: 1, "more": lambda: MOST + 1},
    "slots": INTS | {"grouped": lambda: 16}, "flight": INTS, "exact": FLAGS | {"none": lambda: None}, "zeros": FLAGS,
    "format": TEXTS | {"none": lambda: None}, "scales_as": TEXTS, "grad_format": TEXTS,
}  # fmt: skip
del WRONG["max_tokens"]["long"]  # is huge
UNREADABLE = {"text": lambda: "route", "none": lambda: None, "int": lambda: 3, "tuple": lambda: (1, 2)}
DIFFERS = {"max_tokens": "max_tokens", "layout": "layout"}


def cases(method: str, calls: Calls) -> Iterator[tuple[str, str, Callable[[], dict[str, Any]]]]:
    """Yield (argument, kind of error, arguments of a wrong call)."""
    right = calls.arguments(method)

    def with_value(name: str, make: Callable[[], Any]) -> Callable[[], dict[str, Any]]:
        return lambda: right | {name: make()}

    for name, value in right.items():
        if name == "route":
            for kind, make in UNREADABLE.items():
                yield name, kind, with_value(name, make)
            fields = ROUTE_TENSORS if method != "combine_gathered" else ROUTE_TENSORS[1:]
            for field in fields:
                for kind, make in {**wrong_tensors(field, getattr(value, field), calls), "none": lambda: None}.items():
                    made = lambda make=make, field=field, value=value: value._replace(**{field: make()})  # noqa: E731
                    yield field, kind, with_value(name, made)
        elif isinstance(value, torch.Tensor):
            for kind, make in wrong_tensors(name, value, calls).items():
                if method != "plan" or kind not in ("more", "deep", "meta", "fake"):  # right without another tensor
                    yield name, kind, with_value(name, make)
            if name in ("x", "y", "topk_idx"):
                yield name, "none", with_value(name, lambda: None)
        elif name in WRONG:
            for kind, make in WRONG[name].items():
                yield name, kind, with_value(name, make)
    yield "misspelled", "unknown", lambda: right | {"misspelled": 1}
    for kind, surplus in {"one": ("padded",), "two": (None, torch.ones(2))}.items():
        yield SURPLUS, kind, lambda surplus=surplus: right | {SURPLUS: surplus}
    if "scales" in right:
        yield "scales", "without format", lambda: right | {"scales": torch.ones(T, 1)}
    if "exact" in right:
        yield "exact", "with capacity", lambda: right | {"exact": True, "capacity": 64}


class Through(TorchDispatchMode):
    """A mode through which operators reach PyTorch's dispatcher."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


MODES: dict[str, Callable[[], Any]] = {
    "no gradients": torch.no_grad, "gradients": contextlib.nullcontext, "dispatcher": Through,
    "inference": torch.inference_mode, "checked": torch.no_grad,
}  # fmt: skip


def run_calls(seed: int, count: int | None, mode: str = "no gradients") -> list[str]:
    """Make ``count`` drawn calls (None: all) with a wrong argument on one rank; return what was not as it must be.

    Both ranks must raise an error that names the argument, and the next call must return the right results.
    """
    with MODES[mode]():
        return _run_calls(seed, count, mode)


def _run_calls(seed: int, count: int | None, mode: str) -> list[str]:
    rank, draw, problems = dist.get_rank(), random.Random(seed), []
    more = dict(device="cpu", timeout=20, symmetric_rows=256, check=str(int(mode == "checked")))
    sizes = dict(num_experts=EXPERTS, hidden_size=H, top_k=K, max_tokens_per_rank=MOST, dtype=torch.float32)
    with ep_ops.Communicator(**sizes, **more) as comm:
        calls = Calls(comm, mode == "gradients")
        every = [(method, *case) for method in METHODS for case in cases(method, calls)]
        chosen = every if count is None else [draw.choice(every) for _ in range(count)]
        rights = {method: calls.run(method, calls.arguments(method)) for method in METHODS}
        for method, argument, kind, make in chosen:
            wrong = draw.randrange(2)
            what = f"{method}({argument}: {kind}) on rank {wrong}"
            given = make() if rank == wrong else calls.arguments(method)
            text = ""
            try:
                calls.run(method, given)
            except Exception as error:  # noqa: BLE001 - which one is compared below
                text = f"{type(error).__name__}: {error}"
            if argument not in text:
                problems.append(f"{what}, seen by rank {rank}: {text[:200] or 'accepted'}")
            again = draw.choice(METHODS)
            try:
                found = calls.run(again, calls.arguments(again))
            except Exception as error:  # noqa: BLE001
                problems.append(f"{again} after {what}, on rank {rank}: {type(error).__name__}: {str(error)[:200]}")
                raise AssertionError("\n".join(problems)) from error  # the communicator is lost
            for got, right in zip(found, rights[again], strict=True):
                if not torch.equal(got.nan_to_num(7), right.nan_to_num(7)):
                    problems.append(f"{again} after {what}, on rank {rank}: other results")
    return problems
