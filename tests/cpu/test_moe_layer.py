"""MoELayer against the dense model: values and all gradients, on one and two ranks.

The dense model shares the code for routing and for an expert with the layer; ``expected_moe`` shares none.
"""

from __future__ import annotations

import logging
import pickle
import re
from collections.abc import Callable
from typing import Any

import cases
import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from torch.profiler import ProfilerActivity, profile

import ep_ops
from ep_ops.nn import DenseMoE, MoELayer, grouped_mm, interleave

H, F, E, K = 32, 24, 5, 2  # five experts: ranks hold different numbers of them


def communicator(dtype: torch.dtype, max_tokens: int = 16) -> ep_ops.Communicator:
    return ep_ops.Communicator(
        num_experts=E, hidden_size=H, top_k=K, max_tokens_per_rank=max_tokens, dtype=dtype, device="cpu"
    )


def relative_error(got: torch.Tensor, expected: torch.Tensor) -> float:
    assert got.shape == expected.shape and got.dtype == expected.dtype
    if expected.numel() == 0:
        return 0.0
    return ((got.double() - expected.double()).norm() / expected.double().norm().clamp(min=1e-9)).item()


@torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True)
def errors_against_dense(tokens: list[int], dtype: torch.dtype, compiled: bool, options: dict) -> dict[str, float]:
    """Relative error of the output and of each gradient; ``tokens``: of each rank."""
    shared = {"shared_intermediate_size": options.get("shared_intermediate_size", 0)}
    with communicator(dtype) as comm:
        layer, dense = MoELayer(comm, F, seed=3, **options), DenseMoE(comm, F, seed=3, **shared)
        run = layer
        if compiled:
            run = torch.compile(layer, fullgraph=True)
        generator = torch.Generator().manual_seed(comm.rank)
        x = torch.randn(tokens[comm.rank], H, generator=generator).to(dtype)
        grad_out = torch.randn(x.shape, generator=generator).to(dtype)
        ours, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
        out, expected = run(ours), dense(theirs)
        out.backward(grad_out)
        expected.backward(grad_out)
        errors = {"out": relative_error(out, expected), "x": relative_error(ours.grad, theirs.grad)}
        local = slice(comm.first_local_expert, comm.first_local_expert + comm.num_local_experts)
        for (name, got), (same, wanted) in zip(layer.named_parameters(), dense.named_parameters(), strict=True):
            assert name == same
            if comm.world_size == 1:
                errors[name] = relative_error(got.grad, wanted.grad)
                continue
            dist.all_reduce(wanted.grad)
            if name.startswith("experts."):
                assert relative_error(got.grad.full_tensor(), wanted.grad) < 0.1
                errors[name] = relative_error(got.grad.to_local(), wanted.grad[local])
            else:
                dist.all_reduce(got.grad)
                errors[name] = relative_error(got.grad, wanted.grad)
        assert int(layer.experts.dropped.sum()) == 0
    return errors


def check(results: list[dict[str, float]], dtype: torch.dtype) -> None:
    allowed = 2e-2 if dtype == torch.bfloat16 else 1e-5
    for rank, errors in enumerate(results):
        assert {"out", "x", "router.weight", "experts.w_in", "experts.w_out"} <= set(errors)
        wrong = {name: error for name, error in errors.items() if not error <= allowed}
        assert not wrong, f"rank {rank}"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("options", [{}, {"dynamic": True}, {"shared_intermediate_size": 16}], ids=str)
def test_one_rank(options: dict, dtype: torch.dtype) -> None:
    check([errors_against_dense([13], dtype, False, options)], dtype)


@pytest.mark.parametrize("tokens", [[16, 7], [0, 9], [0, 0]], ids=str)
@pytest.mark.parametrize("options", [{}, {"dynamic": True}], ids=str)
def test_two_ranks(options: dict, tokens: list[int]) -> None:
    check(run_ranks(2, errors_against_dense, tokens, torch.float32, False, options), torch.float32)


@pytest.mark.parametrize(("options", "dtype"), [
    pytest.param({"shared_intermediate_size": 16}, torch.float32, marks=pytest.mark.drawn),
    pytest.param({"shared_intermediate_size": 16}, torch.bfloat16, marks=pytest.mark.drawn),
    pytest.param({"capacity": 16 * 2 * 2 + 64}, torch.float32, marks=pytest.mark.drawn),
    pytest.param({"dynamic": True}, torch.float32, marks=pytest.mark.drawn),
], ids=str)  # fmt: skip
def test_two_ranks_compiled_fullgraph(options: dict, dtype: torch.dtype) -> None:
    check(run_ranks(2, errors_against_dense, [16, 7], dtype, True, options), dtype)


@pytest.mark.drawn
def test_no_tokens_compiled_fullgraph() -> None:
    check(run_ranks(2, errors_against_dense, [0, 5], torch.float32, True, {}), torch.float32)


def expected_swiglu(token: torch.Tensor, w_in: torch.Tensor, w_out: torch.Tensor) -> torch.Tensor:
    """One token [H] through one expert: the first half of its inner values passes through silu and scales the other."""
    inner = w_out.shape[0]
    values = [sum(token[h] * w_in[h, f] for h in range(len(token))) for f in range(2 * inner)]
    between = [values[f] / (1 + torch.exp(-values[f])) * values[inner + f] for f in range(inner)]
    return torch.stack([sum(between[f] * w_out[f, h] for f in range(inner)) for h in range(w_out.shape[1])])


def expected_moe(x: torch.Tensor, layer: MoELayer, top_k: int) -> torch.Tensor:
    """Straight from the definition, in float64, token by token: what the layer gives on one rank."""
    router, w_in, w_out = (p.double() for p in (layer.router.weight, layer.experts.w_in, layer.experts.w_out))
    rows = []
    for token in x.double():
        logits = [sum(token[h] * weight[h] for h in range(len(token))) for weight in router]
        powers = [torch.exp(logit) for logit in logits]
        probabilities = [power / sum(powers) for power in powers]
        chosen = sorted(range(len(logits)), key=lambda e: -logits[e].item())[:top_k]
        kept = sum(probabilities[e] for e in chosen) if top_k > 1 else 1.0
        row = torch.zeros_like(token)
        for e in chosen:
            row = row + probabilities[e] / kept * expected_swiglu(token, w_in[e], w_out[e])
        if layer.shared is not None:
            row = row + expected_swiglu(token, layer.shared.w_in.double(), layer.shared.w_out.double())
        rows.append(row)
    return torch.stack(rows)


@pytest.mark.parametrize("kind", ["layer", "dense"])
@pytest.mark.parametrize("shared", [0, 3])
@pytest.mark.parametrize("top_k", [1, 2, 4])
def test_an_oracle_that_shares_no_code(top_k: int, shared: int, kind: str) -> None:
    hidden, inner, experts, tokens = 4, 3, 5, 6
    seed = cases.fresh_seed()
    draw = torch.Generator().manual_seed(seed)
    with ep_ops.Communicator(
        num_experts=experts, hidden_size=hidden, top_k=top_k, max_tokens_per_rank=tokens, dtype=torch.float32,
        device="cpu",
    ) as comm:  # fmt: skip
        made = MoELayer if kind == "layer" else DenseMoE
        layer = made(comm, inner, shared_intermediate_size=shared, seed=seed % 1000)
        with torch.no_grad():
            layer.router.weight.mul_(4)  # weights far from equal
        x = (torch.randn(tokens, hidden, generator=draw) * 2).requires_grad_()
        grad_out = torch.randn(tokens, hidden, generator=draw)
        leaves = (x, *layer.parameters())
        out, expected = layer(x), expected_moe(x, layer, top_k)
        torch.testing.assert_close(out.double(), expected, rtol=1e-4, atol=1e-5)
        got = torch.autograd.grad(out, leaves, grad_out)
        wanted = torch.autograd.grad(expected, leaves, grad_out.double())
        for mine, theirs in zip(got, wanted, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-4)


def initial_experts() -> list[torch.Tensor]:
    with communicator(torch.float32) as comm:
        return [getattr(p, "_local_tensor", p).detach() for p in MoELayer(comm, F, seed=5).experts.parameters()]


def test_names_in_traces_and_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    """A profiler sees the layer, its dispatch, experts and combine by name, and creation logs one line."""
    with caplog.at_level(logging.INFO, logger="ep_ops"), communicator(torch.float32) as comm:
        layer, x = MoELayer(comm, F), torch.randn(5, H, generator=torch.Generator().manual_seed(0))
        with profile(activities=[ProfilerActivity.CPU]) as seen:
            layer(x)
    names = {event.name for event in seen.events() or ()}
    assert {"ep_ops.nn.moe_layer", "ep_ops.nn.experts", "ep::dispatch", "ep::combine"} <= names
    created = [record.message for record in caplog.records if record.message.startswith("communicator")]
    assert created == [f"communicator {comm.name}: rank 0 of 1, backend reference, 0 bytes of device memory"]


def test_a_layer_whose_communicator_was_replaced_is_pickled() -> None:
    """A layer that was given another communicator is saved and loaded after the first one was destroyed."""
    with communicator(torch.float32) as comm:
        layer = MoELayer(comm, F, seed=5)
    with communicator(torch.float32) as other:
        layer.experts.comm = other
        loaded = pickle.loads(pickle.dumps(layer.experts))
        assert loaded.comm is other
        assert all(torch.equal(a, b) for a, b in zip(loaded.parameters(), layer.experts.parameters(), strict=True))


def test_initial_weights_do_not_depend_on_the_ranks() -> None:
    alone = initial_experts()
    for whole, *parts in zip(alone, *run_ranks(2, initial_experts), strict=True):
        assert [len(part) for part in parts] == [3, 2]
        torch.testing.assert_close(torch.cat(parts), whole, rtol=0, atol=0)


def test_a_full_buffer_drops_counts_and_stays_finite() -> None:
    with communicator(torch.float32) as comm:
        layer = MoELayer(comm, F, capacity=48)  # 16 tokens send 32 rows to 5 segments of at least 16
        x = torch.randn(16, H, generator=torch.Generator().manual_seed(0), requires_grad=True)
        out = layer(x)
        out.sum().backward()
        dropped = int(layer.experts.dropped.sum())
        assert 0 < dropped < 32
        layer(x)
        assert int(layer.experts.dropped.sum()) == 2 * dropped, "dropped rows add up over calls"
        for tensor in (out, x.grad, *(p.grad for p in layer.parameters())):
            assert torch.isfinite(tensor).all()
        untouched = (out == MoELayer(comm, F)(x)).all(dim=1)
        assert 16 - dropped <= int(untouched.sum()) < 16


def test_capacity_contradicts_dynamic() -> None:
    with communicator(torch.float32) as comm, pytest.raises(ValueError, match="capacity is 64 and dynamic is True"):
        MoELayer(comm, F, capacity=64, dynamic=True)


@pytest.mark.parametrize(("sizes", "text"), [
    ((0,), "^intermediate_size is 0; allowed: an int of at least 1"), (("8",), "^intermediate_size is '8'"),
    ((8, -1), "^shared_intermediate_size is -1; allowed: an int of at least 0"),
])  # fmt: skip
def test_sizes_that_are_none(sizes: tuple, text: str) -> None:
    with communicator(torch.float32) as comm, pytest.raises(ValueError, match=text):
        MoELayer(comm, sizes[0], **({"shared_intermediate_size": sizes[1]} if sizes[1:] else {}))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_garbage_rows_reach_nothing(dtype: torch.dtype) -> None:
    """NaN past the last segment, in the rows and in the gradient that comes back."""
    generator = torch.Generator().manual_seed(0)
    offs, live = torch.tensor([16, 16, 48], dtype=torch.int32), 48
    x = torch.randn(64, H, generator=generator).to(dtype)
    w = torch.randn(3, H, F, generator=generator).to(dtype).requires_grad_()
    grad = torch.randn(64, F, generator=generator).to(dtype)
    x[live:], grad[live:] = torch.nan, torch.nan
    x.requires_grad_()
    out = grouped_mm(x, w, offs)
    out.backward(grad)

    start, wanted = 0, torch.zeros(3, H, F)
    for e, end in enumerate(offs.tolist()):
        rows = slice(start, end)
        torch.testing.assert_close(out[rows], x[rows] @ w[e], rtol=2e-2, atol=2e-2)
        torch.testing.assert_close(x.grad[rows], grad[rows] @ w[e].t(), rtol=2e-2, atol=2e-2)
        wanted[e] = x[rows].float().t() @ grad[rows].float()
        start = end
    torch.testing.assert_close(w.grad.float(), wanted.detach(), rtol=2e-2, atol=5e-2)


def test_micro_batches_in_turns() -> None:
    """Two micro-batches on one communicator return what forward returns, and count the same drops."""
    with communicator(torch.float32) as comm:
        layer = MoELayer(comm, F, capacity=64, shared_intermediate_size=16)
        first, second = torch.randn(2, 3, H), torch.randn(7, H)
        expected = [layer(first), layer(second)]
        dropped = layer.experts.dropped.clone()
        got = interleave(layer.steps(first, 0), layer.steps(second, 1))
        torch.testing.assert_close(got, expected, rtol=0, atol=0)
        assert torch.equal(layer.experts.dropped, 2 * dropped)
        with pytest.raises(RuntimeError, match="not available with dynamic=True"):
            next(MoELayer(comm, F, dynamic=True).steps(first))


def test_nothing_stays_under_way_where_something_is_raised():
    def broken(x: torch.Tensor) -> torch.Tensor:
        raise KeyError("no such expert")

    with communicator(torch.float32) as comm:
        layer = MoELayer(comm, F, shared_intermediate_size=F)
        x = torch.randn(4, H)
        expected, shared = layer(x), layer.shared
        layer.shared.forward = broken
        with pytest.raises(KeyError, match="no such expert"):
            layer(x)
        del shared.forward
        for halves in (1, 2):
            left = layer.steps(x)
            for _ in range(halves):
                next(left)
            left.close()
            assert torch.equal(layer(x), expected)


@pytest.mark.parametrize("reports", [RuntimeError, ValueError, NotImplementedError])
def test_what_a_wait_reports_does_not_hide_what_was_raised(
    reports: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A wait that completes an operation after an exception may report what another rank has rejected."""
    raised: list[Exception] = []
    with communicator(torch.float32) as comm:
        layer, x, wait = MoELayer(comm, F), torch.randn(4, H), comm.backend.wait

        def reporting(*args: Any) -> Any:
            results = wait(*args)
            for error in raised:
                raise error
            return results

        monkeypatch.setattr(comm.backend, "wait", reporting)
        topk_idx, topk_weights, _ = layer.router(x)
        for reached in (1, 2):
            steps = layer.experts.steps(x, topk_idx, topk_weights)
            for _ in range(reached):
                next(steps)
            raised.append(reports("rejected by rank 1"))
            with pytest.raises(KeyError, match="own"):
                steps.throw(KeyError("own"))
            raised.clear()
        assert layer(x).isfinite().all()


def test_a_layer_needs_a_communicator() -> None:
    with pytest.raises(TypeError, match="comm is an int; allowed: a Communicator"):
        MoELayer(64, 8)  # type: ignore[arg-type]


WRONG_INPUTS: dict[str, tuple[Callable[[torch.Tensor], object], type[Exception], str]] = {
    "hidden": (lambda x: x[:, 1:], ValueError, f"x has shape (3, {H - 1}); allowed: [..., T, {H}] (hidden_size)"),
    "dimensions": (lambda x: x[0], ValueError, f"x has shape ({H},); allowed: [..., T, {H}] (hidden_size)"),
    "number": (lambda x: x[0, 0], ValueError, f"x has shape (); allowed: [..., T, {H}] (hidden_size)"),
    "dtype": (lambda x: x.double(), TypeError, "x has dtype torch.float64; allowed: torch.float32"),
    "list": (lambda x: x.tolist(), TypeError, "x is a list; allowed: a tensor"),
}


def rejected_inputs(options: dict, steps: bool) -> None:
    with communicator(torch.float32) as comm:
        layer, x = MoELayer(comm, F, **options), torch.randn(3, H)
        run = layer
        if steps:
            run = lambda given: list(layer.steps(given, flight=1))[-1]  # noqa: E731
        expected = DenseMoE(comm, F, shared_intermediate_size=options.get("shared_intermediate_size", 0))(x)
        for change, kind, text in WRONG_INPUTS.values():
            if comm.rank == 0:
                with pytest.raises(kind) as error:
                    run(change(x))
                assert str(error.value) == text
            else:
                with pytest.raises(ValueError, match="rejected by rank 0") as error:
                    run(x)
                assert text in str(error.value)
            torch.testing.assert_close(run(x), expected)


@pytest.mark.parametrize("shared", [0, 16])
@pytest.mark.parametrize(("dynamic", "steps"), [(False, False), (False, True), (True, False)])
def test_a_wrong_input_is_rejected_on_all_ranks(dynamic: bool, steps: bool, shared: int) -> None:
    run_ranks(2, rejected_inputs, {"dynamic": dynamic, "shared_intermediate_size": shared}, steps)


def test_wrong_inputs_on_one_rank() -> None:
    """The experts alone check before their shared expert; autocast casts other dtypes; dynamic layers have no steps."""
    with communicator(torch.float32) as comm:
        layer, x = MoELayer(comm, F, dynamic=True, shared_intermediate_size=16), torch.randn(2, 3, H)
        ids, weights, _ = layer.router(x)
        with pytest.raises(ValueError, match=r"x has shape \(2, 3, 31\); allowed: \[..., T, 32\] \(hidden_size\)"):
            layer.experts(x[..., 1:], ids, weights, shared=layer.shared)
        with pytest.raises(RuntimeError, match="steps\\(\\) is not available with dynamic=True"):
            next(layer.steps(x[..., 1:]))
        with torch.autocast("cpu", torch.bfloat16):
            torch.testing.assert_close(layer(x.bfloat16()), layer(x.bfloat16().float()))
            with pytest.raises(TypeError, match="x has dtype torch.int64; allowed: torch.float32"):
                layer(x.long())


def test_a_wrong_input_of_a_compiled_layer() -> None:
    with communicator(torch.float32) as comm:
        layer = MoELayer(comm, F, shared_intermediate_size=16)
        compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
        for change, _, text in WRONG_INPUTS.values():
            torch._dynamo.reset()  # texts of a second trace name sizes by symbols
            with pytest.raises(Exception, match=re.escape(text)):
                compiled(change(torch.randn(3, H)))
        x = torch.randn(3, H)
        torch.testing.assert_close(compiled(x), layer(x))
