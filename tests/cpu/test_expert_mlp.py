"""Weight gradients in the late order: the same bits as in the ordinary one, and computed between start and wait."""

from __future__ import annotations

import functools
import re
import sys
import types
from typing import Any
from unittest import mock

import pytest
import quacks
import torch
from functorch.compile import make_boxed_func
from ranks import run_ranks
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._inductor.utils import run_and_get_code
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import ep_ops
from ep_ops.backends.cute.tuning import Row
from ep_ops.integrations import quack
from ep_ops.nn import TORCH, Gemms, MoELayer, expert_mlp, interleave, quack_mm, weights_gradient
from ep_ops.nn.quack_mm import gathered_product
from ep_ops.operators import SAVE_FOR_CHECKPOINT

H, F, E, K, TOKENS = 32, 24, 5, 2, 16
LATE = TORCH._replace(late=True)
START, WAIT = "dispatch_backward_start", "dispatch_backward_wait"


def communicator(dtype: torch.dtype) -> ep_ops.Communicator:
    sizes = dict(num_experts=E, hidden_size=H, top_k=K, max_tokens_per_rank=TOKENS)
    return ep_ops.Communicator(**sizes, dtype=dtype, device="cpu", backend="reference")


class FixedRouter(nn.Module):
    """Ids that leave experts 2 and 4 empty, some of them -1, and trainable weights."""

    ids: Tensor

    def __init__(self, seed: int) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(seed)
        ids = torch.tensor([0, 1, 3])[torch.rand(TOKENS, 3, generator=draw).argsort(1)[:, :K]]
        ids[torch.rand(TOKENS, K, generator=draw) < 0.2] = -1
        self.register_buffer("ids", ids)
        self.weights = nn.Parameter(torch.rand(TOKENS, K, generator=draw))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, None]:
        return self.ids[: x.shape[0]], self.weights[: x.shape[0]], None


class Order(TorchDispatchMode):
    """Notes the operators of ep and the matrix products that run."""

    def __init__(self) -> None:
        super().__init__()
        self.ran: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "ep" or "mm" in func._opname:
            self.ran.append(func._opname)
        return func(*args, **(kwargs or {}))


def between(ran: list[str]) -> list[list[str]]:
    """Return the operators that ran between each start and its wait."""
    return [part[: part.index(WAIT)] for at, name in enumerate(ran) if name == START for part in [ran[at + 1 :]]]


def trained(
    comm: ep_ops.Communicator, gemms: Gemms, tokens: int, how: str = "", backend: str | None = None,
    frozen: tuple[str, ...] = (), transposed: bool = False, **options: Any,
) -> tuple[dict[str, Tensor], list[str]]:  # fmt: skip
    """Output, gradients and dropped rows of a layer, and the order of operators in its last backward."""
    torch._dynamo.reset()
    layer = MoELayer(comm, F, router=FixedRouter(comm.rank), seed=3, **options)
    layer.experts.gemms = gemms
    if transposed:
        layer.experts.w_in = nn.Parameter(quacks.transposed(layer.experts.w_in.detach()))
    x = torch.randn(tokens, H, generator=torch.Generator().manual_seed(comm.rank)).to(comm.dtype)
    leaves = dict(layer.named_parameters()) | {"x": x}
    for name, leaf in leaves.items():
        leaf.requires_grad_(name not in frozen)

    def model(x: Tensor) -> Tensor:
        if how == "twice":
            return layer(layer(x))
        if how == "checkpoint":
            return checkpoint(layer, x, use_reentrant=False)  # type: ignore[no-any-return]
        if how == "selective":
            contexts = functools.partial(create_selective_checkpoint_contexts, SAVE_FOR_CHECKPOINT)
            return checkpoint(layer, x, use_reentrant=False, context_fn=contexts)  # type: ignore[no-any-return]
        if how == "turns":
            half = x.shape[0] // 2
            return torch.cat(interleave(layer.steps(x[:half], 0), layer.steps(x[half:], 1)))
        return layer(x)  # type: ignore[no-any-return]

    run = torch.compile(model, fullgraph=True, backend=backend) if backend else model
    for _ in range(2 if how == "accumulate" else 1):
        out = run(x)
        loss = out.float().sin().sum()
        with Order() as order:
            loss.backward()
    local = {name: leaf.grad for name, leaf in leaves.items() if name not in frozen}
    found = {"out": out.detach(), "dropped": layer.experts.dropped.clone(), **local}
    return {name: getattr(value, "_local_tensor", value) for name, value in found.items()}, order.ran


@torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True)
def differences(dtype: torch.dtype, cases: list[dict[str, Any]]) -> list[tuple[Any, ...]]:
    """For each case: names of what differs from the ordinary order, what ran between start and wait, dropped rows."""
    found, ordinary = [], {}
    with communicator(dtype) as comm:
        for case in cases:
            given = {**case, "tokens": case["tokens"][comm.rank]}
            compiled = given.pop("backend", None)
            if str(given) not in ordinary:
                ordinary[str(given)] = trained(comm, TORCH, **given)
            expected, plain = ordinary[str(given)]
            got, ran = trained(comm, LATE, backend=compiled, **given)
            assert START not in plain or "shared_intermediate_size" in case or case.get("how") == "turns"
            wrong = [name for name, value in got.items() if not torch.equal(value, expected[name])]
            found.append((wrong, between(ran), int(got["dropped"].sum())))
    return found


CASES: list[dict[str, Any]] = [
    {"tokens": (16, 7)},
    {"tokens": (0, 9)},
    {"tokens": (16, 7), "capacity": 16},
    {"tokens": (16, 7), "shared_intermediate_size": 8},
    {"tokens": (16, 7), "dynamic": True},
    {"tokens": (16, 7), "format": "wire:e4m3/row/fp32"},
    {"tokens": (16, 7), "dtype": torch.float32},  # of the parameters
    {"tokens": (16, 7), "shared_intermediate_size": 8, "how": "checkpoint"},
    *({"tokens": (16, 7), "how": how} for how in ("twice", "accumulate", "checkpoint", "selective", "turns")),
]
FROZEN: list[dict[str, Any]] = [
    {"tokens": (16, 7), "frozen": names} for names in (("x",), ("router.weights",), ("experts.w_in",))
]
COMPILED: list[dict[str, Any]] = [
    {**case, "backend": "aot_eager"} for case in (CASES[2], CASES[3], CASES[4], CASES[-1])
]


def check(found: list[tuple[Any, ...]], cases: list[dict[str, Any]], products: tuple[str, ...]) -> None:
    for (wrong, ran, dropped), case in zip(found, cases, strict=True):
        assert not wrong, case
        each = products[:1] if "experts.w_in" in case.get("frozen", ()) else products
        assert ran and all(tuple(part) == each for part in ran), (case, ran)
        assert len(ran) == (2 if case.get("how") in ("twice", "turns") else 1)
        assert dropped == 0 or "capacity" in case


def test_the_same_bits_between_ranks() -> None:
    """Late and ordinary gradients have the same bits with torch's grouped GEMM, which runs once for each matrix."""
    cases = CASES + FROZEN + COMPILED
    results = run_ranks(2, differences, torch.bfloat16, cases)
    for found in results:
        check(found, cases, ("_grouped_mm", "_grouped_mm"))
    assert sum(dropped for found in results for *_, dropped in found), "some case drops rows"


def test_the_same_bits_in_float32() -> None:
    """Late and ordinary gradients have the same bits with a product for each expert and matrix."""
    cases = CASES[:1] + FROZEN[:1]
    check(differences(torch.float32, cases), cases, ("mm",) * 2 * E)


def test_when_late_gemms_use_the_ordinary_order() -> None:
    """If nothing can overlap, or rows arrive as codes for a GEMM in FP8."""
    weights = ("experts.w_in", "experts.w_out")
    cases: list[dict[str, Any]] = [
        {"format": "e4m3/row/fp32"}, {"frozen": weights}, {"frozen": ("x", "router.weights")}
    ]  # fmt: skip
    with communicator(torch.bfloat16) as comm:
        for case in cases:
            expected, plain = trained(comm, TORCH, 7, **case)
            got, ran = trained(comm, LATE, 7, **case)
            assert ran == plain and START not in ran, case
            assert all(torch.equal(got[name], value) for name, value in expected.items()), case
            assert expected["out"].any() and all(grad.any() for name, grad in expected.items() if name != "dropped")


@pytest.mark.drawn
def test_inductor_keeps_the_late_order() -> None:
    with communicator(torch.bfloat16) as comm:

        def train() -> None:
            trained(comm, LATE, 7, backend="inductor")

        _, (_, backward) = run_and_get_code(train)
    ran = re.findall(rf"\.({START}|{WAIT}|_grouped_mm)(?:\.default)?\(", backward)
    assert ran == ["_grouped_mm", "_grouped_mm", START, "_grouped_mm", "_grouped_mm", WAIT]


@pytest.mark.parametrize("backend", [None, "aot_eager"])
def test_quacks_gemms(backend: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for quack's GEMM runs in both orders, as one operator for each product."""
    quacks.install(monkeypatch)
    with communicator(torch.bfloat16) as comm:
        expected, _ = trained(comm, TORCH, 7)
        for late in (True, False):
            got, ran = trained(comm, quack.GEMMS._replace(late=late), 7, backend=backend)
            assert all(torch.equal(got[name], value) for name, value in expected.items())
            assert between(ran) == ([["quack_mm"] * 2] if late else [])
    offs = torch.zeros(0, dtype=torch.int32)
    rows = torch.ones(4, H, dtype=torch.bfloat16)
    assert not quack.grouped_mm(rows, torch.ones(0, H, F, dtype=torch.bfloat16), offs).any()
    assert weights_gradient(rows, rows, offs).shape == quack.weights_gradient(rows, rows, offs).shape == (0, H, H)
    gated = quack.GEMMS.gated
    assert gated is not None
    for product in (quack.grouped_mm, *(functools.partial(f, rows=offs) for f in (gathered_product, gated.product))):
        with pytest.raises(
            TypeError, match="x is torch.float32 and w is torch.float32; allowed: both torch.bfloat16 o"
        ):
            product(torch.ones(4, H), torch.ones(2, H, F), offs)
        with pytest.raises(ValueError, match=r"w has shape \(0, 32, 23\); allowed: .*, multiples of 8"):
            product(rows, torch.ones(0, H, 23, dtype=torch.bfloat16), offs)
    with pytest.raises(ValueError, match=r"w has shape \(2, 32, 24\); allowed: \[0, 32, N\]"):
        quack.grouped_mm(rows, torch.ones(2, H, F, dtype=torch.bfloat16), offs)


@pytest.mark.parametrize("found", [None, types.ModuleType("quack")], ids=["nothing", "another package"])
def test_quack_is_not_installed(found: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers and GEMMs name the package that quack's GEMMs need, also if another one has its name."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "quack"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "quack", found)
    error = pytest.raises(ModuleNotFoundError, match="need quack-kernels, .*: pip install quack-kernels==0.6.5$")
    x = torch.ones(8, H, dtype=torch.bfloat16)
    w, offs = torch.ones(1, H, H, dtype=torch.bfloat16), torch.tensor([8], dtype=torch.int32)
    with communicator(torch.bfloat16) as comm:
        for rows in ("grouped", "token_major"):
            with error:
                MoELayer(comm, F, gemms="quack", rows=rows)(x)
    for product in (quack.grouped_mm, torch.compile(quack.grouped_mm, backend="eager")):
        with error:
            product(x, w, offs)
    with error:
        quack.weights_gradient(x, x, offs)
    for step, count in ((quack_mm.gated, 4), (quack_mm.gated_gradient, 6)):
        with error:
            step(*[x] * count, "")


@pytest.mark.parametrize("backend", [None, "aot_eager"])
def test_quacks_gemms_on_token_major_rows(backend: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The stand-in for quack's GEMM returns the bits of torch's GEMM on copied rows, in both orders, and with rows that
    are dispatched again. Rows are gathered or copied as the tuning table says for the sizes."""
    called, tuning = quacks.install(monkeypatch), quack_mm.tuning(torch.device("cpu"))
    sizes = f"{H}x{2 * F}"
    copies = {"gathers": False}
    with communicator(torch.bfloat16) as comm:
        expected, _ = trained(comm, TORCH, 7, rows="token_major")
        for rows, gathers in (([], [True, True]), ([Row("gemm", copies, sizes=sizes)], [False, True]),
                              ([Row("gemm weights", copies, rows="token_major", sizes=sizes)], [True, False]),
                              ([Row("gemm weights", copies, rows="grouped")], [True, True]),
                              ([Row("gemm weights", copies, sizes=f"{F}x{H}")], [True, True]),
                              ([Row("gemm weights", copies, tokens=10**6)], [True, True])):  # fmt: skip
            tuning.put(*rows)
            for late, redispatch in ((True, False), (False, True)):
                called.clear()
                gemms = quack.GEMMS._replace(late=late)
                got, ran = trained(comm, gemms, 7, backend=backend, rows="token_major", redispatch=redispatch)
                assert all(torch.equal(got[name], value) for name, value in expected.items())
                assert between(ran) == ([["quack_mm"] * 2] if late else [])
                assert ("dispatch_planned" in ran) and "quack_mm" in ran
                assert [gathered for _, gathered in called] == [gathers[0], False, False, False, False, gathers[1]]
        tuning.put()


@pytest.mark.parametrize("backend", [None, "aot_eager", pytest.param("inductor", marks=pytest.mark.drawn)])
def test_quacks_gemms_with_swiglu(backend: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """With matrices w_in that are the transpose of contiguous ones SwiGLU is in the epilogues: values of torch's GEMMs,
    gradients with the strides of the matrices, and the same bits in both orders, dispatched again, and, in eager
    mode, if saved tensors come back with other strides."""
    called = quacks.install(monkeypatch)
    with communicator(torch.bfloat16) as comm:
        expected, _ = trained(comm, TORCH, 7, rows="token_major", transposed=True)
        results = []
        for late, redispatch in ((True, False), (False, True)):
            called.clear()
            gemms = quack.GEMMS._replace(late=late)
            given: dict[str, Any] = dict(rows="token_major", redispatch=redispatch, transposed=True)
            got, ran = trained(comm, gemms, 7, backend=backend, **given)
            assert between(ran) == ([["quack_mm"] * 2] if late else [])
            assert "quack_gated_backward" in ran and not any("swiglu" in name for name in ran)
            assert [name for name, _ in called] == ["gated", "gemm", "gated_gradient", "gemm", "gemm", "gemm"]
            assert got["experts.w_in"].stride() == expected["experts.w_in"].stride() != got["experts.w_out"].stride()
            results.append(got)
            if backend is None:
                with torch.autograd.graph.saved_tensors_hooks(torch.Tensor.contiguous, lambda kept: kept):
                    results.append(trained(comm, gemms, 7, **given)[0])
            for name, value in expected.items():
                far = (got[name].double() - value.double()).norm() / value.double().norm().clamp(min=1e-9)
                assert far < 2e-2, (name, far)
        for other in results[1:]:
            assert all(torch.equal(one, other[name]) for name, one in results[0].items())


@pytest.mark.parametrize("rows", ["grouped", "token_major"])
def test_tensors_of_a_start_are_those_of_its_wait(rows: str) -> None:
    """Compiled graphs keep all tensors of the start until the wait, to which they are passed as well."""
    graphs = []

    def kept(graph: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append(graph)
        return make_boxed_func(graph.forward)

    with communicator(torch.bfloat16) as comm:
        backend: Any = aot_autograd(fw_compiler=kept, bw_compiler=kept)
        trained(comm, LATE, 7, backend=backend, rows=rows)
    *_, backward = graphs
    calls = {str(node.target).split(".")[1]: node for node in backward.graph.nodes if "ep." in str(node.target)}
    given = calls[START].all_input_nodes
    assert len(given) == 7 and set(given) <= set(calls[WAIT].all_input_nodes)


@pytest.mark.parametrize("gemms", [TORCH, LATE])
def test_no_gradient_of_routing_weights_that_need_none(gemms: Gemms) -> None:
    """Backward computes the products of rows and gradients, for which rows are kept, only if weights need them."""
    found = []
    with communicator(torch.float32) as comm:
        bind = comm.backend.bind

        def noted(spec: Any, a: Any) -> Any:
            found.append(spec)
            return bind(spec, a)

        with mock.patch.object(comm.backend, "bind", noted):
            for frozen in (("router.weights",), ()):
                trained(comm, gemms, 7, frozen=frozen)
    assert [spec.products for spec in found if spec.kind == "combine_backward"] == [False, True]


def test_what_raises() -> None:
    """Second derivatives; and a product between start and wait, after which the communicator goes on."""

    def broken(x: Tensor, grad: Tensor, offs: Tensor) -> Tensor:
        raise KeyError("no memory")

    with communicator(torch.bfloat16) as comm:
        with pytest.raises(KeyError, match="no memory"):
            trained(comm, LATE._replace(weights_gradient=broken), 7)
        with pytest.raises(KeyError, match="no memory"), mock.patch.object(comm.backend, "reject") as told:
            product = TORCH._replace(product=broken)
            given = torch.randn(3, H).bfloat16(), *FixedRouter(0)(torch.empty(3))[:2]
            weights = torch.zeros(E, H, 2 * F).bfloat16(), torch.zeros(E, F, H).bfloat16()
            expert_mlp(comm, *given, *weights, gemms=product, max_tokens=5)
        told.assert_called_once_with("combine", "KeyError: 'no memory'", 0, 5)  # as other ranks call it
        for exact, operator in ((False, "dispatch"), (True, "dispatch_dynamic")):
            with pytest.raises(ValueError, match="gemms is"), mock.patch.object(comm.backend, "reject") as told:
                expert_mlp(comm, *given, *weights, gemms="fast", exact=exact)
            told.assert_called_once_with(operator, mock.ANY, 0, TOKENS)
        router, draw = FixedRouter(0), functools.partial(torch.randn, dtype=torch.bfloat16)
        x, w_in, w_out = (leaf.requires_grad_() for leaf in (draw(7, H), draw(E, H, 2 * F), draw(E, F, H)))
        ids, weights, _ = router(x)
        out, dropped = expert_mlp(comm, x, ids, weights, w_in, w_out, gemms=LATE)
        assert out.shape == x.shape and dropped.shape == (E,)
        (grad,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        with pytest.raises(NotImplementedError, match="expert_mlp does not support second derivatives"):
            grad.sum().backward()
