"""SwiGLU experts on token-major rows: values and gradients against a dense model in fp64, the bits of grouped rows, and
what backward keeps, eager and compiled."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any
from unittest import mock

import cases
import pytest
import quacks
import tokens as oracle
import torch
import toy
from cases import RouteCase, Tokens
from ranks import run_ranks
from test_reference import communicator
from torch import Tensor, nn
from torch.library import opcheck
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import ep_ops
from ep_ops.backends.cute.tuning import Row
from ep_ops.nn import TORCH, Computed, Experts, MoELayer, expert_mlp, interleave, keep_experts_apart, quack_mm
from ep_ops.nn.live_rows import SWIGLU_WEIGHTED_BACKWARD
from ep_ops.operators import SAVE_FOR_CHECKPOINT

LATE = TORCH._replace(late=True)
QUACK = quack_mm.GEMMS
HIDDEN, WIDTH = 6, 5
HOWS: dict[str, dict[str, Any]] = {
    "plain": {}, "redispatch": {"redispatch": True}, "late": {"gemms": LATE},
    "late redispatch": {"gemms": LATE, "redispatch": True}, "exact": {"exact": True},
    "exact redispatch": {"exact": True, "redispatch": True}, "checkpoint": {}, "late checkpoint": {"gemms": LATE},
    "selective": {}, "twice": {"redispatch": True}, "few places": {}, "gathered": {"gemms": QUACK},
    "gated": {"gemms": QUACK._replace(late=False)}, "gated late": {"gemms": QUACK},
    "gated late redispatch": {"gemms": QUACK, "redispatch": True},
}  # fmt: skip


def dense(x: Tensor, idx: Tensor, weights: Tensor, w_in: Tensor, w_out: Tensor, kept: Tensor) -> Tensor:
    """On one rank that holds all experts. kept: (token, k) that count."""
    out = torch.zeros_like(x)
    for k in range(idx.shape[1]):
        for expert in range(w_in.shape[0]):
            at = (idx[:, k] == expert) & kept[:, k]
            gate, up = (x[at] @ w_in[expert]).chunk(2, 1)
            out[at] += weights[at, k, None] * ((gate * torch.sigmoid(gate) * up) @ w_out[expert])
    return out


def run_one(comm: ep_ops.Communicator, how: str, sizes: dict[str, Any], leaves: list[Tensor], idx: Tensor) -> Any:
    given = {**HOWS[how], **sizes, "rows": "token_major"}

    def call(*tensors: Tensor) -> tuple[Tensor, Tensor]:
        x, weights, w_in, w_out = tensors
        return expert_mlp(comm, x, idx, weights, w_in, w_out, **given)

    if "checkpoint" in how:
        return checkpoint(call, *leaves, use_reentrant=False)
    if how == "selective":
        contexts = functools.partial(create_selective_checkpoint_contexts, SAVE_FOR_CHECKPOINT)
        return checkpoint(call, *leaves, use_reentrant=False, context_fn=contexts)
    return call(*leaves)


def _experts(
    case: RouteCase, tokens: list[Tokens], matrices: list[Tensor], room: list[int], places: list[int]
) -> dict[str, list[Tensor]]:  # fmt: skip
    rank, found = torch.distributed.get_rank(), {}
    called = quacks.install(mock.Mock(setattr=setattr), checks=False)
    with communicator(case, HIDDEN, torch.float64) as comm:
        held = slice(comm.first_local_expert, comm.first_local_expert + comm.num_local_experts)
        idx, tuning = case.topk_idx[rank], quack_mm.tuning(comm.device)
        for how in HOWS:
            tuning.put(*[Row("gemm weights", {"gathers": False})] * (how == "gated late"))
            stored = quacks.transposed if "gated" in how else torch.clone
            start = tokens[rank].x, tokens[rank].weights, stored(matrices[0][held]), matrices[1][held]
            leaves = [each.clone().requires_grad_() for each in start]
            sizes: dict[str, Any] = {"max_tokens": case.max_tokens}
            if "exact" not in how:
                sizes |= {"capacity": room[rank], "places": places[rank]}
            if how == "few places":
                sizes["places"] = case.alignment
            results = [run_one(comm, how, sizes, leaves, idx) for _ in range(2 if how == "twice" else 1)]
            for out, _ in results:
                out.sin().sum().backward()
            if "gated" in how and comm.num_local_experts:  # as strides of the parameter are, optimizers need no copy
                assert leaves[2].grad.stride() == leaves[2].stride()
            found[how] = [results[0][0].detach(), *(leaf.grad for leaf in leaves), results[0][1]]
    names = {name for name, _ in called}
    assert names == {"gemm", "gated", "gated_gradient"} or not comm.num_local_experts or not names, names
    return found


def _kept(case: RouteCase, copies: list[oracle.Copies], places: list[int]) -> tuple[list[Tensor], list[list[int]]]:
    """Which (token, k) count, and how many of each local expert do not."""
    kept = [torch.zeros(idx.shape, dtype=torch.bool) for idx in case.topk_idx]
    lost = []
    for rank, here in enumerate(copies):
        begin, dropped = 0, here.dropped.tolist()
        for expert in range(case.experts_per_rank[rank]):
            number = 0
            for row, (owner, token) in enumerate(here.rows):
                for k, local in enumerate(here.local_idx[row].tolist()):
                    if local == expert:
                        fits = begin + number < places[rank]
                        kept[owner][token, k] = fits
                        dropped[expert] += not fits
                        number += fits
            begin += -(-number // case.alignment) * case.alignment
        lost.append(dropped)
    return kept, lost


@pytest.mark.parametrize(("world_size", "name", "room"), [
    (1, "random_with_none", "all"), (2, "random", "few"), (2, "no_tokens_on_last_rank", "all"),
    (2, "repeated_experts", "all"), (3, "uneven_experts", "few"), (2, "only_none", "all"),
])  # fmt: skip
def test_equal_to_a_dense_model(world_size: int, name: str, room: str) -> None:
    """Values, gradients and drops: in both orders, dispatched again, with exact sizes, checkpointed, called twice."""
    seed = cases.fresh_seed()
    case = cases.route_cases(world_size, seed)[name]
    capacity = oracle.rooms(case, room)
    assert capacity is not None
    tokens = cases.random_tokens(case, HIDDEN, torch.float64, seed)
    draw = torch.Generator().manual_seed(seed + 5)
    shapes = (case.num_experts, HIDDEN, 2 * WIDTH), (case.num_experts, WIDTH, HIDDEN)
    matrices = [torch.randn(shape, generator=draw, dtype=torch.float64) for shape in shapes]
    align = case.alignment
    places = [(rows * case.top_k + held * (align - 1)) // align * align + align
              for rows, held in zip(capacity, case.experts_per_rank, strict=True)]  # fmt: skip
    results = run_ranks(world_size, _experts, case, tokens, matrices, capacity, places)

    for how in HOWS:
        copies = oracle.expected_copies(case, None if "exact" in how else capacity)
        room_of = {"few places": [align] * world_size}.get(how, [10**6] * world_size if "exact" in how else places)
        kept, lost = _kept(case, copies, room_of)
        w_in, w_out = (w.clone().requires_grad_() for w in matrices)
        outs, inputs = [], []
        for source, idx in enumerate(case.topk_idx):
            x, weights = (t.clone().requires_grad_() for t in (tokens[source].x, tokens[source].weights))
            inputs += [x, weights]
            outs.append(dense(x, idx, weights, w_in, w_out, kept[source]))
        loss = sum(out.sin().sum() for out in outs) * (2 if how == "twice" else 1)
        grads = torch.autograd.grad(loss, [*inputs, w_in, w_out], allow_unused=True, materialize_grads=True)
        first = 0
        for rank, result in enumerate(results):
            held = slice(first, first + case.experts_per_rank[rank])
            first += case.experts_per_rank[rank]
            *got, dropped = result[how]
            wanted = [outs[rank], *grads[2 * rank : 2 * rank + 2], grads[-2][held], grads[-1][held]]
            for one, other in zip(got, wanted, strict=True):
                torch.testing.assert_close(one, other, msg=lambda text, how=how: f"{how}: {text}")
            assert dropped.tolist() == lost[rank], how


# ---------------------------------------------------------------------- layers


H, F, E, K, TOKENS = 32, 24, 5, 2, 16
SIZES = dict(num_experts=E, hidden_size=H, top_k=K, max_tokens_per_rank=TOKENS, device="cpu", backend="reference")


def layer_of(comm: ep_ops.Communicator, **options: Any) -> MoELayer:
    return MoELayer(comm, F, seed=3, **options)


def trained(layer: MoELayer, x: Tensor, run: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
    """Output, gradients and drops of one step."""
    x = x.clone().requires_grad_()
    out = run(x)
    out.float().sin().sum().backward()
    found = {"out": out.detach(), "x": x.grad, "dropped": layer.experts.dropped.clone()}
    found |= {name: p.grad for name, p in layer.named_parameters()}
    return {name: getattr(value, "_local_tensor", value) for name, value in found.items()}


def checkpointed(reentrant: bool, layer: MoELayer, x: Tensor) -> Tensor:
    return checkpoint(layer, x, use_reentrant=reentrant)  # type: ignore[no-any-return]


def turns(layer: MoELayer, x: Tensor) -> Tensor:
    half = x.shape[0] // 2
    return torch.cat(interleave(layer.steps(x[:half], 0), layer.steps(x[half:], 1)))


LAYERS: dict[str, dict[str, Any]] = {
    "plain": {}, "redispatch": {"redispatch": True}, "late": {"gemms": LATE}, "dynamic": {"dynamic": True},
    "late redispatch": {"gemms": LATE, "redispatch": True}, "shared": {"shared_intermediate_size": 8, "gemms": LATE},
    "shared redispatch": {"shared_intermediate_size": 8, "redispatch": True},
    "wire": {"format": "wire:e4m3/32/mx", "redispatch": True},
}  # fmt: skip
WAYS: dict[str, Callable[..., Tensor]] = {
    "whole": lambda layer, x: layer(x), "turns": turns, "checkpointed": functools.partial(checkpointed, False),
    "reentrant": functools.partial(checkpointed, True),
}  # fmt: skip
GROUPED = {"dynamic", "shared_intermediate_size", "format"}


@torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True)
def _beside_grouped(dtype: torch.dtype, backend: str | None, ways: list[str]) -> list[tuple[str, str, bool, float]]:
    """For each layer and way: forward bits, and the largest relative difference of gradients."""
    found = []
    with ep_ops.Communicator(**SIZES, dtype=dtype) as comm:
        draw = torch.Generator().manual_seed(comm.rank)
        x = torch.randn(TOKENS - 3 * comm.rank, H, generator=draw).to(dtype)
        for named in ways:
            way, _, name = named.partition(" ")
            options = LAYERS[name]
            others = {key: value for key, value in options.items() if key in GROUPED}
            torch._dynamo.reset()
            results = []
            for kind in (others, {**options, "rows": "token_major"}):
                layer = layer_of(comm, **kind)
                run: Any = functools.partial(WAYS[way], layer)
                if backend is not None and "rows" in kind:
                    run = torch.compile(run, fullgraph=True, backend=backend)
                results.append(trained(layer, x, run))
            grouped, token_major = results
            far = max(
                float((token_major[key].double() - value.double()).norm() / value.double().norm().clamp(min=1e-9))
                for key, value in grouped.items()
            )
            found.append((name, way, torch.equal(grouped["out"], token_major["out"]), far))
    return found


EAGER = [f"{way} {name}" for way in WAYS for name in LAYERS if f"{way} {name}" != "turns dynamic"]
COMPILED = ["whole redispatch", "whole dynamic", "turns late redispatch", "checkpointed redispatch"]


@pytest.mark.parametrize(("backend", "dtype", "most", "ways"), [
    (None, torch.bfloat16, 2e-2, EAGER), ("aot_eager", torch.float32, 1e-5, COMPILED[:2]),
    *(pytest.param("aot_eager", torch.float32, 1e-5, [way], marks=pytest.mark.drawn) for way in COMPILED[2:]),
    pytest.param("inductor", torch.bfloat16, 2e-2, ["whole late redispatch"], marks=pytest.mark.drawn),
])  # fmt: skip
def test_layers_beside_grouped_rows(backend: str | None, dtype: torch.dtype, most: float, ways: list[str]) -> None:
    """Results have the same bits in eager mode, and gradients up to rounding; both compile to one graph."""
    for found in run_ranks(2, _beside_grouped, dtype, backend, ways):
        for name, way, same, far in found:
            assert same or backend is not None, (name, way)
            assert far < most, (name, way, far)


def saved_bytes(run: Callable[[], Tensor], known: list[Tensor]) -> tuple[dict[tuple[int, ...], int], int]:
    """Bytes of floats and of ints that backward keeps, each memory once, without that of ``known``."""
    mine = {tensor.untyped_storage().data_ptr() for tensor in known}
    floats: dict[int, Tensor] = {}
    ints = 0

    def pack(tensor: Tensor) -> Tensor:
        nonlocal ints
        at = tensor.untyped_storage().data_ptr()
        if at not in mine and at not in floats:
            if tensor.is_floating_point():
                floats[at] = tensor
            else:
                ints += tensor.nbytes
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = run()
    assert out.requires_grad
    shapes: dict[tuple[int, ...], int] = {}
    for tensor in floats.values():
        shapes[tuple(tensor.shape)] = shapes.get(tuple(tensor.shape), 0) + tensor.untyped_storage().nbytes()
    return shapes, ints


@pytest.mark.parametrize("backend", [None, "aot_eager", "aot_eager_decomp_partition"])
@pytest.mark.parametrize("late", [False, True])
def test_kept_bytes(late: bool, backend: str | None) -> None:
    """Received rows and the first GEMM's output, without the rows if they are dispatched again: nothing else of their
    sizes. Grouped rows keep the second GEMM's operands too."""
    copies, places = 12, 32
    with ep_ops.Communicator(**SIZES, dtype=torch.bfloat16) as comm:
        draw = torch.Generator().manual_seed(0)
        x = torch.randn(11, H, generator=draw).bfloat16().requires_grad_()
        idx = torch.rand(11, E, generator=draw).argsort(1)[:, :K].int()
        weights = torch.rand(11, K, generator=draw).requires_grad_()
        sizes = {"grouped": {"capacity": 96}, "token_major": {"capacity": copies, "places": places}}
        for rows, redispatch in (("token_major", False), ("token_major", True), ("grouped", False)):
            torch._dynamo.reset()
            experts = Experts(
                comm, F, rows=rows, redispatch=redispatch, gemms=LATE if late else TORCH, **sizes[rows]
            )  # fmt: skip

            def call(x: Tensor, weights: Tensor, experts: Experts = experts) -> Tensor:
                return experts(x, idx, weights)  # type: ignore[no-any-return]

            run = call if backend is None else torch.compile(call, fullgraph=True, backend=backend)
            shapes, ints = saved_bytes(lambda run=run: run(x, weights), [x, idx, weights, *experts.parameters()])
            if rows == "grouped":
                assert backend is not None or sum(shapes.values()) >= 96 * (2 * H + 3 * F) * 2
                continue
            wanted = {(places, 2 * F): places * 2 * F * 2}
            if not redispatch:
                wanted[copies, H] = copies * H * 2
            large = {shape: size for shape, size in shapes.items() if size > copies * K * 4}
            assert large == wanted, (late, backend, redispatch)
            assert sum(shapes.values()) == sum(wanted.values()) + copies * K * 4  # and the weights
            assert ints < 4 * (4 * places + 16 * copies + 8 * E + 11 * 2 * K + 100)


@pytest.mark.parametrize("options", [
    {}, {"gemms": LATE}, {"rows": "token_major"}, {"rows": "token_major", "gemms": LATE, "redispatch": True},
])  # fmt: skip
def test_kept_graph(options: dict[str, Any]) -> None:
    """Backward frees what it has used, unless the graph is kept: then it repeats, with the same bits."""
    with ep_ops.Communicator(**SIZES, dtype=torch.bfloat16) as comm:
        x = torch.randn(9, H).bfloat16().requires_grad_()
        layer = layer_of(comm, **options)
        out, leaves = layer(x).float().sin().sum(), [x, *layer.parameters()]
        kept = [torch.autograd.grad(out, leaves, retain_graph=True) for _ in range(2)]
        last = torch.autograd.grad(out, leaves)
        for other in (*kept[1:], last):
            assert all(torch.equal(one, two) for one, two in zip(kept[0], other, strict=True))
        with pytest.raises(RuntimeError, match="backward through the graph a second time"):
            torch.autograd.grad(out, leaves)


@pytest.mark.parametrize("options", [{}, {"gemms": LATE}, {"redispatch": True}, {"gemms": LATE, "redispatch": True}])
def test_frozen_tensors_and_batches(options: dict[str, Any]) -> None:
    """Gradients of those tensors that require one, with x [B, S, H] and parameters of another dtype."""
    with ep_ops.Communicator(**SIZES, dtype=torch.float64) as comm:
        draw = torch.Generator().manual_seed(cases.fresh_seed())
        x = torch.randn(2, 5, H, generator=draw, dtype=torch.float64)
        idx = torch.rand(2, 5, E, generator=draw).argsort(-1)[..., :K]
        weights = torch.rand(2, 5, K, generator=draw, dtype=torch.float64)
        for trained in ("x", "weights", "w_in", "w_out", "x w_out", "weights w_in", "x weights w_in w_out"):
            results = []
            for kind in ({}, {**options, "rows": "token_major"}):
                experts = Experts(comm, F, seed=3, dtype=torch.float32, **kind)
                leaves = {"x": x.clone(), "weights": weights.clone(), "w_in": experts.w_in, "w_out": experts.w_out}
                for name, leaf in leaves.items():
                    leaf.requires_grad_(name in trained.split())
                out = experts(leaves["x"], idx, leaves["weights"])
                asked = [leaves[name] for name in trained.split()]
                results.append([out, *torch.autograd.grad(out.sin().sum(), asked)])
                assert out.shape == x.shape
            torch.testing.assert_close(*results)


class Model(nn.Module):
    """A layer of experts between linear ones."""

    def __init__(self, comm: ep_ops.Communicator, **options: Any) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first, self.moe, self.last = nn.Linear(8, H), MoELayer(comm, F, seed=3, **options), nn.Linear(H, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        return self.last(x + self.moe(x))  # type: ignore[no-any-return]


def _losses() -> list[list[float]]:
    """Return the losses with grouped rows, and with token-major rows that are dispatched again, on the same data."""
    found: list[list[float]] = []
    with ep_ops.Communicator(**SIZES, dtype=torch.float32) as comm:
        teacher = torch.randn(8, 8, generator=torch.Generator().manual_seed(9))
        for options in ({}, {"rows": "token_major", "redispatch": True, "gemms": LATE}):
            model = keep_experts_apart(Model(comm, **options), ranks=comm.world_size)
            ddp, losses = DistributedDataParallel(model), []
            optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, foreach=False)
            draw = torch.Generator().manual_seed(comm.rank)
            for _ in range(60):
                x = torch.randn(TOKENS, 8, generator=draw)
                loss = (ddp(x) - torch.tanh(x @ teacher)).square().mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                losses.append(float(loss.detach()))
            found.append(losses)
    return found


def test_losses_of_60_steps() -> None:
    """Losses fall, and those of both kinds of rows agree at every step."""
    for grouped, token_major in run_ranks(2, _losses):
        assert sum(grouped[-10:]) < 0.5 * sum(grouped[:10])
        worst = max(abs(a - b) / b for a, b in zip(token_major, grouped, strict=True))
        assert worst < 1e-5, worst


# ---------------------------------------------------------------------- ranks that differ, and what is rejected


def _different(options: list[dict[str, Any]]) -> list[str]:
    rank, texts = torch.distributed.get_rank(), []
    with ep_ops.Communicator(**SIZES, dtype=torch.float32) as comm:
        layer = layer_of(comm, **options[rank])
        x = torch.randn(7, H)
        try:
            layer(x).sum().backward()
        except Exception as error:  # noqa: BLE001
            texts.append(f"{type(error).__name__}: {error}")
    return texts


@pytest.mark.parametrize("second", [{}, {"rows": "token_major"}])
def test_ranks_that_differ(second: dict[str, Any]) -> None:
    """Ranks that differ in rows, or in whether backward dispatches again, get an error on every rank."""
    first = {"rows": "token_major", "redispatch": bool(second)}
    for texts in run_ranks(2, _different, [first, second]):
        assert texts and ("ranks disagree on layout" if not second else "dispatch") in texts[0], texts


def test_rejections() -> None:
    with ep_ops.Communicator(**SIZES, dtype=torch.bfloat16) as comm:
        made: Any = functools.partial(Experts, comm, 8)
        for options, text in [
            ({"rows": "padded"}, r"rows is 'padded'; allowed: 'grouped', 'token_major'"),
            ({"places": 8}, r"places is 8 with rows 'grouped'; allowed only with rows 'token_major'"),
            ({"redispatch": True}, r"redispatch is True with rows 'grouped'; allowed only with rows 'token_major'"),
            ({"rows": "token_major", "places": 6}, r"places is 6; allowed: None, or a positive multiple of alignment"),
            ({"rows": "token_major", "places": 0}, r"places is 0; allowed: None, or a positive multiple of alignment"),
            ({"rows": "token_major", "places": 16, "dynamic": True}, r"places is 16 with an exact number of rows"),
            ({"rows": "token_major", "format": "e4m3/row/fp32"}, r"format is 'e4m3/row/fp32' with rows 'token_major'"),
        ]:
            with pytest.raises(ValueError, match=text):
                made(**options)


def test_drops_are_reported() -> None:
    """Places that do not suffice count like rows that do not fit, and once in a region that runs again in backward."""
    with toy.communicator(overflow="raise") as comm:
        x, idx, weights = toy.inputs(9, grad=True)
        experts = Experts(comm, 8, rows="token_major", places=4)
        done: Computed = experts(x, idx, weights, return_dropped=True)
        lost = int(done.dropped.sum())
        assert lost > 0 and torch.equal(done.dropped, experts.dropped)
        with pytest.raises(ValueError, match=rf"dropped {lost} rows since the last check"):
            comm.check_errors()
        for reentrant in (False, True):
            experts.dropped.zero_()

            def region(x: Tensor) -> Tensor:
                return experts(x, idx, weights).sin()  # type: ignore[no-any-return]

            checkpoint(region, x, use_reentrant=reentrant).sum().backward()
            assert torch.equal(done.dropped, experts.dropped), reentrant
            with pytest.raises(ValueError, match=rf"dropped {lost} rows since the last check"):
                comm.check_errors()
            comm.check_errors()


def test_kernels_for_few_rows() -> None:
    """Without gradients the kernels of decode compute token-major rows too, with the bits of grouped rows."""
    with ep_ops.Communicator(**SIZES, dtype=torch.bfloat16) as comm:
        x = torch.randn(9, H, generator=torch.Generator().manual_seed(0)).bfloat16()
        layers = [layer_of(comm, gemms="memory", **options) for options in ({}, {"rows": "token_major"})]
        with torch.no_grad():
            one, two = (layer(x) for layer in layers)
        assert torch.equal(one, two)
        one, two = (trained(layer, x, layer) for layer in layers)
        for name, value in one.items():
            assert float((value.double() - two[name].double()).norm()) <= 2e-2 * float(value.double().norm()), name
        # The routing weights alone have a gradient.
        idx, weights = torch.rand(9, E).argsort(1)[:, :K].int(), torch.rand(9, K).requires_grad_()
        matrices = torch.randn(E, H, 2 * F).bfloat16(), torch.randn(E, F, H).bfloat16()
        one, two = (
            torch.autograd.grad(
                expert_mlp(comm, x, idx, weights, *matrices, gemms=gemms, rows="token_major").out.float().sin().sum(),
                weights,
            )[0]
            for gemms in ("memory", "torch")
        )
        assert torch.equal(one, two) and one.all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_weighted_swiglu(dtype: torch.dtype) -> None:
    """The gradients of weight * SwiGLU against fp64, whatever undefined rows hold, and what is defined of them."""
    draw = torch.Generator().manual_seed(cases.fresh_seed())
    offs, counts = torch.tensor([4, 4, 12], dtype=torch.int32), torch.tensor([3, 0, 7], dtype=torch.int32)
    kept = [0, 1, 2, *range(4, 11)]
    x, grad = (torch.full((16, n), torch.nan, dtype=dtype) for n in (10, 5))
    weights = torch.full((16,), torch.nan, dtype=torch.float64 if dtype == torch.float64 else torch.float32)
    for tensor in (x, grad, weights):
        tensor[kept] = torch.randn(tensor[kept].shape, generator=draw).to(tensor.dtype)
    of_x, out, dots = SWIGLU_WEIGHTED_BACKWARD(grad, x, weights, offs, counts, 4)
    exact, by = x[kept].double().requires_grad_(), weights[kept].double().requires_grad_()
    gate, up = exact.chunk(2, 1)
    result = gate * torch.sigmoid(gate) * up * by[:, None]
    wanted = torch.autograd.grad(result, (exact, by), grad[kept].double())
    close = functools.partial(torch.testing.assert_close, rtol=1e-2 if dtype == torch.bfloat16 else 1e-5, atol=1e-5)
    for got, want in ((of_x, wanted[0]), (out, result.detach()), (dots, wanted[1])):
        close(got[kept].double(), want)
        assert (got[[3, 11]] == 0).all() and got[12:].isnan().all()
    assert of_x.dtype == out.dtype == dtype and dots.dtype == weights.dtype
    offs, counts = (torch.tensor(ints, dtype=torch.int32) for ints in ([4, 16], [4, 12]))
    whole = (grad.nan_to_num(1.0), x.nan_to_num(1.0), weights.nan_to_num(1.0))
    opcheck(torch.ops.ep.swiglu_weighted_backward.default, (*whole, offs, counts, 4))
    ids = torch.tensor([[0, 2], [-1, 1], [2, -1]], dtype=torch.int32)
    opcheck(torch.ops.ep.exact_lists.default, (ids, 3, 4))
