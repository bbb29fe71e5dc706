"""The memory of a communicator is as large as planned: results of calls, rounds, ranks and experts."""

from __future__ import annotations

import dataclasses
import gc
import re
import weakref
from typing import Any

import pytest
import quacks
import torch
from test_communicator import SIZES, make
from torch._dynamo.backends.common import aot_autograd
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

import ep_ops
from cute_kernels import marks
from ep_ops.backends.cute.sizing import MOST_TOKENS_ACROSS, problem_with, sizes_of, token_bound
from ep_ops.memory import MemoryPlan, planned


def test_memory_plan() -> None:
    sizes = {key: SIZES[key] for key in ("num_experts", "hidden_size", "top_k", "max_tokens_per_rank")}
    plan = ep_ops.memory_plan(world_size=4, backend="reference", **sizes)
    rows = 4 * 4 * 2 + 2 * 15 + 2  # W * tokens * min(K, El), padding, rounded up to 16
    assert plan["call: recv_x"] == rows * 16 and plan["call: recv_weights"] == rows * 4
    assert all(line.endswith("B") for line in str(plan).splitlines()) and len(str(plan).splitlines()) == len(plan)
    last = ep_ops.memory_plan(world_size=4, backend="reference", rank=3, capacity=32, **sizes)
    assert last["call: recv_x"] == 32 * 16
    tokens = ep_ops.memory_plan(
        world_size=4, backend="reference", layer={"intermediate_size": 8, "rows": "token_major"}, **sizes
    )  # fmt: skip
    assert tokens["call: recv_x"] == 4 * 4 * 16, "each token of all ranks once"
    assert tokens["call: recv_weights"] == 4 * 4 * 2 * 4, "top_k for each of them"
    with pytest.raises(ValueError, match="top_k is 99"):
        ep_ops.memory_plan(world_size=4, backend="reference", **sizes | {"top_k": 99})
    with make(backend="reference") as comm:
        assert comm.memory_plan() == ep_ops.memory_plan(world_size=1, backend="reference", **sizes)


def test_what_auto_stands_for_in_plans() -> None:
    """Plans are those of the cute backend and of NVSHMEM, unless the configuration says otherwise."""
    sizes = dict(num_experts=4, hidden_size=64, top_k=2, max_tokens_per_rank=16)
    for wire, expected in (("auto", "nvshmem"), ("nvlink", "nvlink")):
        found = planned(ep_ops.Config(**sizes, domain_size=2, wire=wire), 4)
        assert (found.backend, found.wire, found.domains) == ("cute", expected, ((0, 1), (2, 3)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_planned_bytes_are_those_of_the_results(dtype: torch.dtype) -> None:
    with make(dtype=dtype, alignment=4) as comm:
        x, topk_idx = torch.zeros(4, 8, dtype=dtype), torch.zeros(4, 2, dtype=torch.int32)
        topk_idx[:, 1] = 1
        got = comm.dispatch(x, topk_idx, torch.ones(4, 2, dtype=comm.weights_dtype))
        route = (got.route.send_rows, got.route.arrivals, got.route.offs, got.route.counts, got.dropped)
        assert comm.memory_plan() == {  # the reference backend holds nothing
            "call: recv_x": got.x.nbytes,
            "call: recv_weights": got.weights.nbytes,
            "call: route": sum(tensor.nbytes for tensor in route),
            "call: combined out": comm.combine(got.x, got.route, got.weights).nbytes,
        }


class Watched(TorchDispatchMode):
    """Count the bytes of the memory that operators return and that is alive, and the most of them."""

    def __init__(self, known: list[torch.Tensor]) -> None:
        super().__init__()
        self.known = {tensor.untyped_storage()._cdata for tensor in known}
        self.alive: dict[int, int] = {}
        self.most = 0

    @property
    def now(self) -> int:
        return sum(self.alive.values())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        for tensor in pytree.tree_leaves(found):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                key = storage._cdata
                if key not in self.known and key not in self.alive:
                    self.alive[key] = storage.nbytes()
                    weakref.finalize(storage, self.alive.pop, key, None)
        self.most = max(self.most, self.now)
        return found


LAYERS: list[dict[str, Any]] = [
    {}, {"gemms": "quack"}, {"rows": "token_major"}, {"rows": "token_major", "redispatch": True},
    {"rows": "token_major", "gemms": "quack"}, {"rows": "token_major", "redispatch": True, "gemms": "quack"},
    {"rows": "token_major", "places": 1600, "capacity": 256},
]  # fmt: skip


class Layer:
    """Experts with inputs, and what is differentiated."""

    def __init__(self, comm: ep_ops.Communicator, **options: Any) -> None:
        tokens, hidden = comm.max_tokens_per_rank, comm.hidden_size
        self.experts = ep_ops.nn.Experts(comm, 64, **options)
        x = torch.randn(tokens, hidden).bfloat16().requires_grad_()
        idx = torch.rand(tokens, comm.num_experts).argsort(1)[:, : comm.top_k].int()
        self.inputs = x, idx, torch.rand(tokens, comm.top_k).requires_grad_()
        self.grad = torch.randn_like(x)
        self.leaves = [x, self.inputs[2], *self.experts.parameters()]
        self.known = [*self.leaves, idx, self.grad, self.experts.dropped]


@pytest.fixture(scope="module")
def few_objects() -> None:
    """Keep what earlier tests have left out of the collections of this file, which would take most of its time."""
    gc.collect()
    gc.freeze()


def sizes_of_layer(tokens: int) -> dict[str, Any]:
    return dict(num_experts=8, hidden_size=256, top_k=4, max_tokens_per_rank=tokens)


@pytest.mark.usefixtures("few_objects")
@pytest.mark.parametrize("tokens", [64, 256])
@pytest.mark.parametrize("options", LAYERS, ids=str)
def test_planned_bytes_of_a_layer(options: dict[str, Any], tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Plan what a layer keeps, and its peak, within 3 % of what operators allocate, with small and large matrices."""
    quacks.install(monkeypatch)
    sizes, planned = sizes_of_layer(tokens), {"intermediate_size": 64, **options}
    capacity = planned.pop("capacity", None)
    plan = ep_ops.memory_plan(world_size=1, backend="reference", capacity=capacity, layer=planned, **sizes)
    with ep_ops.Communicator(**sizes, dtype=torch.bfloat16, device="cpu", backend="reference") as comm:
        layer = Layer(comm, **options)
        for _ in range(2):  # the first call makes what all calls share
            gc.collect()
            watched = Watched(layer.known)
            with watched:
                out = layer.experts(*layer.inputs)
                gc.collect()
                held = watched.now - out.nbytes
                grads = torch.autograd.grad(out, layer.leaves, layer.grad)
            del out, grads
    assert plan["layer: weights"] == sum(parameter.nbytes for parameter in layer.experts.parameters())
    assert abs(held / plan["layer: kept for backward"] - 1) < 0.03, (held, plan)
    assert abs(watched.most / plan["layer: peak of forward and backward"] - 1) < 0.03, (watched.most, plan)


@pytest.mark.parametrize("options", LAYERS[2:4], ids=str)
def test_peak_of_compiled_layers(options: dict[str, Any]) -> None:
    """Graphs of token-major rows allocate no more than eager calls, if each tensor is freed after its last use."""
    sizes = sizes_of_layer(64)
    plan = ep_ops.memory_plan(world_size=1, backend="reference", layer={"intermediate_size": 64, **options}, **sizes)
    torch._dynamo.reset()
    with ep_ops.Communicator(**sizes, dtype=torch.bfloat16, device="cpu", backend="reference") as comm:
        layer = Layer(comm, **options)
        watched = Watched(layer.known)

        def compiler(graph: torch.fx.GraphModule, _: Any) -> Any:
            def run(args: list[Any]) -> Any:
                with watched:
                    return torch.fx.Interpreter(graph).boxed_run(args)

            run._boxed_call = True  # type: ignore[attr-defined]
            return run

        backend = aot_autograd(fw_compiler=compiler, bw_compiler=compiler)
        out = torch.compile(layer.experts, fullgraph=True, backend=backend)(*layer.inputs)
        torch.autograd.grad(out, layer.leaves, layer.grad)
    assert watched.most / plan["layer: peak of forward and backward"] < 1.0, (watched.most, plan)


@pytest.mark.parametrize(("layer", "most"), [
    ({}, 11.36), ({"gemms": "quack"}, 11.15),
])  # fmt: skip
def test_peak_at_large_sizes(layer: dict[str, Any], most: float) -> None:
    """GiB of weights, inputs, gradients and temporary rows, of which the matrices and their gradients are 10.5."""
    plan = ep_ops.memory_plan(
        num_experts=64, hidden_size=7168, top_k=8, max_tokens_per_rank=4096, world_size=1, capacity=4096,
        backend="reference", layer={"intermediate_size": 2048, "rows": "token_major", "places": 33728, **layer},
    )  # fmt: skip
    x_and_grad = 2 * plan["call: combined out"]
    assert plan["layer: weights"] + plan["layer: peak of forward and backward"] + x_and_grad < most * 2**30


def test_layers_that_are_not_planned() -> None:
    sizes: dict[str, Any] = dict(num_experts=8, hidden_size=256, top_k=4, max_tokens_per_rank=64, world_size=2)
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"intermediate_size": 0}, "intermediate_size is 0; allowed"), ({"rows": "padded"}, "rows is 'padded'"),
        ({"redispatch": True}, "redispatch is True with rows 'grouped'"), ({"gemms": "auto"}, "gemms is 'auto'"),
        ({"rows": "token_major", "places": -1}, "places is -1"),
        ({"rows": "token_major", "places": 12}, "places is 12; allowed: None, or a positive multiple of alignment 8"),
    ]  # fmt: skip
    for layer, text in wrong:
        with pytest.raises(ValueError, match=text):
            ep_ops.memory_plan(layer={"intermediate_size": 64, **layer}, alignment=8, **sizes)
    with pytest.raises(TypeError, match="layer is an int"):
        ep_ops.memory_plan(layer=64, **sizes)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="width"):
        ep_ops.memory_plan(layer={"width": 64}, **sizes)


def test_bounded_staging() -> None:
    """Memory keeps the bound, in as few rounds as it takes; one that cannot be kept is rejected with what can."""
    sizes = dict(
        world_size=16, num_experts=64, hidden_size=1024, top_k=4, max_tokens_per_rank=1000, domain_size=2,
        latency_max_tokens=0,
    )  # fmt: skip

    def held(bound: int | None) -> int:
        plan = ep_ops.memory_plan(staging_bytes=bound, **sizes)
        return sum(nbytes for purpose, nbytes in plan.items() if purpose.startswith("symmetric"))

    whole = held(None)
    assert held(whole + 4096) == whole, "guards apart"
    before = whole
    for part in (2, 3, 8):
        bound = whole // part
        assert bound * 0.5 < held(bound) <= bound < before
        before = held(bound)
    with pytest.raises(
        ValueError, match="staging_bytes is 1000; in 64 rounds of 16 tokens backend 'cute' holds"
    ) as told:
        held(1000)
    (least,) = re.findall(r"holds (\d+) bytes", str(told.value))
    assert held(int(least)) <= int(least) < whole / 8
    with pytest.raises(ValueError, match="allowed: at least as many"):
        held(int(least) - 1)
    with pytest.raises(ValueError, match="staging_bytes is 0; allowed: None or an int of at least 1"):
        held(0)
    sizes["domain_size"] = None  # one domain: bounded as well
    whole = held(None)
    assert held(whole // 2) <= whole // 2
    sizes["latency_max_tokens"] = 128  # their memory is within the bound, and no call of theirs goes in rounds
    most = held(None) // 4
    assert held(most) <= most
    given = {name: value for name, value in sizes.items() if name != "world_size"}
    small = planned(ep_ops.Config(**given, staging_bytes=most), 16)
    assert 0 < token_bound(small, sizes_of(small)) <= sizes_of(small).max_tokens < 1000


def test_memory_plan_of_uneven_experts() -> None:
    sizes = {key: SIZES[key] for key in ("num_experts", "hidden_size", "top_k", "max_tokens_per_rank")}
    plans = [
        ep_ops.memory_plan(world_size=2, experts_per_rank=(5, 1), alignment=1, backend="reference", rank=rank, **sizes)
        for rank in range(2)
    ]
    assert [plan["call: recv_x"] for plan in plans] == [2 * 4 * 2 * 16, 2 * 4 * 1 * 16]
    with pytest.raises(ValueError, match=r"experts_per_rank is \(-1, 7\); allowed: one int >= 0"):
        ep_ops.memory_plan(world_size=2, experts_per_rank=(-1, 7), backend="reference", **sizes)


def test_bytes_are_readable() -> None:
    sizes = {"none": 0, "bytes": 1023, "kibi": 1024, "more": 1536 * 1024, "giga": 5 * 2**29}
    text = str(MemoryPlan(sizes))
    assert [line.split() for line in text.splitlines()] == [
        ["none", "0", "B"],
        ["bytes", "1023", "B"],
        ["kibi", "1.00", "KiB"],
        ["more", "1.50", "MiB"],
        ["giga", "2.50", "GiB"],
    ]
    assert len({len(line) for line in text.splitlines()}) == 1, "columns"


def test_the_tokens_whose_puts_a_word_can_count() -> None:
    """Ranks of several NVLink domains count the puts of an operation in 20 bits."""
    sizes: dict[str, Any] = {"num_experts": 8, "hidden_size": 64, "top_k": 2, "name": "x"}

    def problem(tokens: int, domains: tuple[tuple[int, ...], ...], **more: Any) -> str | None:
        config = ep_ops.Config(**sizes, max_tokens_per_rank=tokens, **more)
        config = config.on(4, device_type="cuda", backend="cute", wire="nvlink")
        return problem_with(dataclasses.replace(config, domains=domains, domain_size=len(domains[0])))

    assert 2 * MOST_TOKENS_ACROSS + 128 <= 1 << marks.NUMBER_BITS
    pairs, one = ((0, 1), (2, 3)), ((0, 1, 2, 3),)
    assert problem(MOST_TOKENS_ACROSS, pairs) is None and problem(MOST_TOKENS_ACROSS + 1, one) is None
    assert "across NVLink domains backend 'cute' takes at most" in (problem(MOST_TOKENS_ACROSS + 1, pairs) or "")
    assert problem(MOST_TOKENS_ACROSS + 1, pairs, staging_bytes=2**30) is None
