"""Creation, agreement between ranks, lookup by name, tracing and the end of communicators."""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import re
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import cases
import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks

import ep_ops
from ep_ops import communicator, creation, registry, symmetric
from ep_ops import config as config_file
from ep_ops.commands import compile as ahead
from ep_ops.commands import doctor

SIZES: dict[str, Any] = {"num_experts": 6, "hidden_size": 8, "top_k": 2, "max_tokens_per_rank": 4, "device": "cpu"}


def make(group: Any = None, **changed: Any) -> ep_ops.Communicator:
    return ep_ops.Communicator(group, **SIZES | changed)


# ---------------------------------------------------------------------- one rank


def test_alone() -> None:
    with make() as comm:
        assert (comm.rank, comm.world_size, comm.group) == (0, 1, None)
        assert (comm.num_experts, comm.num_local_experts, comm.first_local_expert) == (6, 6, 0)
        assert (comm.experts_per_rank, comm.first_expert) == ((6,), (0,))
        assert (comm.hidden_size, comm.top_k, comm.max_tokens_per_rank, comm.alignment) == (8, 2, 4, 16)
        assert (comm.dtype, comm.weights_dtype, comm.device) == (torch.bfloat16, torch.float32, torch.device("cpu"))
        assert comm.backend.name == "reference"  # "auto" on a CPU
        assert registry.get(comm.name) is comm
        assert comm.name in repr(comm) and "rank 0/1" in repr(comm)
        comm.check_errors()
    assert "destroyed" in repr(comm)


def test_ranks_meet_around_a_warmup() -> None:
    """No rank runs kernels before all have compiled them, and none goes on before all have run them."""
    with make() as comm:
        parts = mock.Mock()
        with mock.patch.multiple(comm.backend, compile=parts.compile, warmup=parts.warmup):
            with mock.patch.object(comm.exchange, "barrier", parts.barrier):
                comm.warmup([("e4m3/32/mx", "rows")])
        assert parts.mock_calls == [
            mock.call.compile([("e4m3/32/mx", "rows")]), mock.call.barrier(), mock.call.warmup(), mock.call.barrier()
        ]  # fmt: skip
        comm.warmup()


class Unmade(ep_ops.Communicator):
    """A communicator on any device, which has no backend."""

    def __init__(self, group: Any, config: Any, device: Any) -> None:
        self.destroyed, self.given_device = False, device


def test_devices_do_not_share_a_communicator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(communicator, "_shared", {})
    sizes = {name: size for name, size in SIZES.items() if name != "device"}
    made = [Unmade.shared(device=device, **sizes) for device in ("cuda:0", "cuda:1", "cuda:0")]
    assert [comm.given_device for comm in made] == ["cuda:0", "cuda:1", "cuda:0"]
    assert made[0] is made[2] and made[0] is not made[1]


@pytest.mark.parametrize(("changed", "text"), [
    ({"num_experts": 0}, "num_experts is 0; allowed: an int of at least 1"),
    ({"num_experts": 2.0}, "num_experts is 2.0; allowed: an int of at least 1"),
    ({"top_k": True}, "top_k is True; allowed: an int"),
    ({"top_k": 7}, "top_k is 7; allowed: at most num_experts, which is 6"),
    ({"top_k": 33}, "top_k is 33; allowed: an int from 1 to 32"),
    ({"hidden_size": -8}, "hidden_size is -8"),
    ({"hidden_size": 12}, "hidden_size is 12, which makes rows of 24 bytes in torch.bfloat16; allowed: a multiple"),
    ({"max_tokens_per_rank": 0}, "max_tokens_per_rank is 0"),
    ({"max_tokens_per_rank": 2**30}, "exceeds the 2**31 rows"),
    ({"dtype": torch.int8}, "dtype is torch.int8; allowed: one of torch.bfloat16"),
    ({"experts_per_rank": (3, 3)}, "experts_per_rank is (3, 3); allowed: one int >= 0 for each of 1 ranks"),
    ({"experts_per_rank": (5,)}, "experts_per_rank (5,) adds up to 5, but num_experts is 6"),
    ({"experts_per_rank": (-6,)}, "one int >= 0"),
    ({"alignment": 0}, "alignment is 0"),
    ({"alignment": 2048}, "alignment is 2048; allowed: an int from 1 to 1024"),
    ({"backend": "fast"}, "backend is 'fast'; allowed: one of 'auto', 'reference', 'cute'"),
    ({"backend": "cute"}, "backend 'cute' runs on CUDA devices; the device is 'cpu'"),
    ({"timeout": 0}, "timeout is 0; allowed: a positive number of seconds"),
    ({"timeout": "1"}, "timeout is '1'"),
    ({"dispatch_sms": 0}, "dispatch_sms is 0"),
    ({"combine_sms": 1.5}, "combine_sms is 1.5"),
    ({"combine_sms": 1}, "combine_sms is 1; allowed: None or an int of at least 2"),
    ({"symmetric_rows": -1}, "symmetric_rows is -1; allowed: an int from 0"),
    ({"symmetric_rows": 1.0}, "symmetric_rows is 1.0"),
    ({"symmetric_rows": 2**31}, "symmetric_rows is 2147483648; allowed: an int from 0 to 2147483647"),
    ({"latency_max_tokens": -1}, "latency_max_tokens is -1; allowed: None or an int of at least 0"),
    ({"latency_max_tokens": 1.5}, "latency_max_tokens is 1.5"),
    ({"timeout": float("inf")}, "timeout is inf"),
    ({"domain_size": 0}, "domain_size is 0; allowed: None or an int of at least 1"),
    ({"domain_size": 2}, "domain_size is 2; allowed: a divisor of the 1 ranks"),
    ({"domain_size": True}, "domain_size is True"),
    ({"name": 5}, "name is 5; allowed: a str"),
])  # fmt: skip
def test_rejected_values(changed: dict[str, Any], text: str) -> None:
    living = len(registry.living)
    with pytest.raises(ValueError) as raised:
        make(**changed)
    assert text in str(raised.value)
    assert len(registry.living) == living


@pytest.mark.parametrize(
    "changed",
    [
        {"num_experts": 1, "top_k": 1},
        {"num_experts": 32, "top_k": 32},
        {"alignment": 1},
        {"alignment": 1024},
        {"timeout": 0.5},
        {"dispatch_sms": 1, "combine_sms": 2},
        {"symmetric_rows": 2**31 - 1},
        {"latency_max_tokens": 0},
        {"experts_per_rank": (6,)},
        {"domain_size": 1},
    ],
    ids=str,
)
def test_the_least_and_the_most_are_taken(changed: dict[str, Any]) -> None:
    with make(**changed) as comm:
        assert all(getattr(comm.config, field) == value for field, value in changed.items())


def test_options_by_name_or_in_a_config() -> None:
    """Keyword arguments are fields of a Config, and replace those of one that is given."""
    sizes = {name: value for name, value in SIZES.items() if name != "device"}
    config = ep_ops.Config(**sizes, alignment=8)
    with (
        ep_ops.Communicator(config=config, device="cpu") as comm,
        ep_ops.Communicator(config=comm.config, device="cpu", name="other", top_k=1) as other,
    ):
        assert (comm.alignment, comm.top_k, comm.config.experts_per_rank) == (8, 2, (6,))
        assert (other.alignment, other.top_k, other.name) == (8, 1, "other")
        assert other.config == dataclasses.replace(comm.config, name="other", top_k=1)


@pytest.mark.parametrize(("given", "text"), [
    ({**SIZES, "top_kk": 2}, "Communicator got unknown arguments top_kk; allowed: num_experts, hidden_size, top_k,"),
    ({**SIZES, "world_size": 2}, "Communicator got unknown arguments world_size; allowed: "),
    ({"top_k": 2}, "Communicator needs num_experts, hidden_size, max_tokens_per_rank, or an ep_ops.Config"),
    ({"config": 64}, "Communicator: config is 64; expected an ep_ops.Config"),
])  # fmt: skip
def test_options_that_there_are_none_of(given: dict[str, Any], text: str) -> None:
    with pytest.raises(TypeError) as raised:
        ep_ops.Communicator(**given)
    assert text in str(raised.value)


def test_an_option_is_listed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything that lists options has one that is added to Config: validation, agreement, doctor, the commands."""
    assert set(config_file.options()) <= set(re.findall(r"^    (\w+): ", inspect.getdoc(ep_ops.Config) or "", re.M))
    kept = inspect.getdoc(ep_ops.Config)
    rule = {**ep_ops.Config.__dataclass_fields__["alignment"].metadata, "variable": "EP_OPS_SPEED"}

    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Config(ep_ops.Config):
        speed: int = dataclasses.field(default=3, metadata=rule)

    Config.__doc__ = f"{kept}\n\n    speed: of light. And more."
    for module in (config_file, creation, ahead, doctor):
        monkeypatch.setattr(module, "Config", Config)
    sizes = {name: value for name, value in SIZES.items() if name != "device"}
    with make(speed=5) as comm:
        assert comm.config.speed == 5 and "speed=5" in repr(comm.config)
    with pytest.raises(ValueError, match=r"speed is 0; allowed: an int from 1 to 1024 .default: EP_OPS_SPEED in"):
        make(speed=0)
    assert creation.disagreement([Config(**sizes), Config(**sizes, speed=4)]) == (
        "ranks disagree on speed: 3 on ranks [0]; 4 on ranks [1]"
    )
    with pytest.raises(ValueError, match="speed is 0"):
        ep_ops.memory_plan(world_size=2, speed=0, **sizes)
    parser = argparse.ArgumentParser()
    ahead.add_options(parser)
    words = "--num-experts 6 --hidden-size 8 --top-k 2 --max-tokens-per-rank 4 --speed 7".split()
    assert ahead.config_of(parser.parse_args(words)).speed == 7 and "of light\n" in parser.format_help()
    assert any(line.startswith("EP_OPS_SPEED") for line in doctor.environment())


def test_rows_that_an_int32_can_number() -> None:
    """2 rows a token, and up to 15 of padding for each of 6 experts, rounded up to 16: less than 2**31."""
    sizes = {"world_size": 1, "num_experts": 6, "hidden_size": 8, "top_k": 2, "backend": "reference"}
    least_too_many = 2**30 - (6 * 15 + 16) // 2
    with pytest.raises(ValueError, match=r"exceeds the 2\*\*31 rows"):
        ep_ops.memory_plan(max_tokens_per_rank=least_too_many, **sizes)
    assert ep_ops.memory_plan(max_tokens_per_rank=least_too_many - 1, **sizes)["call: recv_weights"] < 4 * 2**31


class _Unreachable:
    """An exchange whose other ranks have died."""

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("connection closed")


def test_a_name_is_free_after_an_exchange_that_failed() -> None:
    with pytest.raises(RuntimeError, match="connection closed"):
        creation.reserve_name(_Unreachable(), "lonely")  # type: ignore[arg-type]
    with make(name="lonely") as comm:
        assert comm.name == "lonely"


def test_names() -> None:
    with make(name="mine") as mine, make() as first, make() as second:
        assert mine.name == "mine" and first.name != second.name
        assert int(second.name[2:]) == int(first.name[2:]) + 1
        with pytest.raises(ValueError, match="communicator 'mine' exists already"):
            make(name="mine")
        with pytest.raises(RuntimeError, match="'yours' does not exist in this process; living communicators: .*'min"):
            registry.get("yours")
    with pytest.raises(RuntimeError, match="'mine' was destroyed"):
        registry.get("mine")
    with make(name="mine") as again:  # a name may be used again
        assert registry.get("mine") is again
        with pytest.raises(RuntimeError, match="'mine' was destroyed"):
            mine.empty_rows(0)


def _compiled(run: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(run, backend="aot_eager")


@pytest.mark.parametrize("way", [lambda run: run, _compiled], ids=["eager", "compiled"])
def test_methods_of_a_destroyed_communicator_whose_name_is_used_again(way: Callable[..., Any]) -> None:
    """Methods of a destroyed communicator raise, with right and wrong arguments, and reach neither the new communicator
    of that name nor freed memory."""
    old = make(name="again", dtype=torch.float32, symmetric_rows=64)
    x, idx, weights = torch.ones(4, 8), torch.tensor([[0, 1]] * 4, dtype=torch.int32), torch.ones(4, 2)
    with torch.no_grad():
        for _ in range(3):  # calls that are remembered
            sent = old.dispatch(x, idx, weights)
            old.combine(sent.x, sent.route, sent.weights)
    started, combined = old.dispatch_start(x, idx, flight=0), old.combine_start(sent.x, sent.route, flight=1)
    methods: dict[str, tuple[Any, ...]] = {
        "plan": (idx,), "dispatch": (x, idx, weights), "dispatch_planned": (x, sent.route), "dispatch_wait": (started,),
        "combine": (sent.x, sent.route, sent.weights), "combine_gathered": (sent.x, sent.route),
        "dispatch_start": (x, idx), "combine_start": (sent.x, sent.route), "combine_wait": (combined,),
    }  # fmt: skip
    calls = {name: way(lambda *given, name=name: getattr(old, name)(*given)) for name in methods}
    with torch.no_grad():
        for name in ("dispatch_wait", "combine_wait", "plan", "dispatch", "dispatch_planned", "combine"):
            calls[name](*methods[name])
    old.destroy()
    with make(name="again", dtype=torch.float32, symmetric_rows=64) as new:
        new.dispatch_start(x, idx, flight=0), new.combine_start(sent.x, sent.route, flight=1)
        before = new.backend.calls
        for name, given in methods.items():
            for arguments in (given, [None] * len(given)):
                with (
                    torch.no_grad(),
                    pytest.raises(Exception, match="communicator 'again' was destroyed, and another one has"),
                ):
                    calls[name](*arguments)
        assert new.backend.calls == before
        new.backend.end_flights()


def test_destroy_twice() -> None:
    comm = make()
    comm.destroy()
    comm.destroy()
    with comm:
        pass


def test_capacity_holds_the_worst_case() -> None:
    seed = cases.fresh_seed()
    draw = torch.Generator().manual_seed(seed)
    for _ in range(20):
        experts, top_k, tokens, align = (int(torch.randint(1, 9, (), generator=draw)) for _ in range(4))
        top_k = min(top_k, experts)
        with make(num_experts=experts, top_k=top_k, max_tokens_per_rank=tokens, alignment=align) as comm:
            assert comm.capacity() % align == 0
            noise = torch.rand(tokens, experts, generator=draw)
            topk_idx = noise.argsort(1)[:, :top_k].int()  # distinct experts in each token
            _, dropped = comm.plan(topk_idx)
            assert not dropped.any()
            assert comm.capacity(max_tokens=1) <= comm.capacity()
            assert comm.capacity(alignment=align + 1) % (align + 1) == 0


def _filled(experts: tuple[int, ...], top_k: int, tokens: int) -> list[tuple[int, int, int]]:
    """For each rank, if all tokens name as many of its experts as they can: (capacity, rows, dropped), there."""
    held = torch.arange(sum(experts)).split(experts)
    found = []
    with make(
        num_experts=sum(experts), experts_per_rank=experts, top_k=top_k, max_tokens_per_rank=tokens, alignment=1
    ) as comm:
        for target, own in enumerate(held):
            others = torch.cat([ids for rank, ids in enumerate(held) if rank != target])
            topk_idx = torch.cat([own, others])[:top_k].int().expand(tokens, top_k).contiguous()
            route, dropped = comm.plan(topk_idx)
            if target == comm.rank:
                found.append((comm.capacity(), int(route.counts.sum()), int(dropped.sum())))
    return found


@pytest.mark.parametrize(("experts", "top_k"), [((5, 1), 3), ((2, 4), 2), ((1, 2, 3, 4), 3)])
def test_capacity_is_no_more_than_the_worst_case(experts: tuple[int, ...], top_k: int) -> None:
    """A rank with fewer experts than top_k gets no more rows of a token than it has experts."""
    tokens = 4
    for held, found in zip(experts, run_ranks(len(experts), _filled, experts, top_k, tokens), strict=True):
        rows = len(experts) * tokens * min(held, top_k)
        assert found == [(rows, rows, 0)]


def test_methods_on_one_rank() -> None:
    with make(alignment=4, dtype=torch.float32) as comm:
        x, weights = torch.randn(3, 8), torch.rand(3, 2)
        topk_idx = torch.tensor([[0, 5], [1, -1], [0, 1]], dtype=torch.int32)
        expected = x * (weights * (topk_idx >= 0)).sum(1, keepdim=True)
        static = comm.dispatch(x, topk_idx, weights)
        padded = comm.dispatch(x, topk_idx, weights, layout="padded", slots=4)
        exact = comm.dispatch(x, topk_idx, weights, exact=True)
        assert static.x.shape == (comm.capacity(), 8) and padded.x.shape == (24, 8) and exact.x.shape == (12, 8)
        for got in (static, padded, exact):
            torch.testing.assert_close(comm.combine(got.x, got.route, got.weights), expected)
        route, dropped = comm.plan(topk_idx, capacity=4, max_tokens=3)
        assert dropped.tolist() == [0, 2, 0, 0, 0, 1]
        rows, no_weights, *_ = comm.dispatch_planned(x, route)
        assert no_weights is None and torch.equal(rows[:2], x[[0, 2]])
        assert comm.dispatch(x, topk_idx).weights is None


def test_methods_trace_in_one_graph() -> None:
    with make(alignment=4, dtype=torch.float32) as comm:

        def layer(x: torch.Tensor, topk_idx: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
            got = comm.dispatch(x, topk_idx, weights)
            home = comm.combine(torch.tanh(got.x), got.route, got.weights)
            padded = comm.dispatch(x, topk_idx, layout="padded", slots=8, max_tokens=4, alignment=2)
            home = home + comm.combine(padded.x, padded.route)
            route, _ = comm.plan(topk_idx, capacity=comm.capacity(3))
            rows, row_weights, *_ = comm.dispatch_planned(x, route, weights)
            return home + comm.combine(rows, route, row_weights)

        compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
        for tokens in (3, 2):
            given = (torch.randn(tokens, 8), torch.rand(tokens, 6).topk(2).indices.int(), torch.rand(tokens, 2))
            torch.testing.assert_close(compiled(*given), layer(*given))


def test_a_wire_that_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EP_OPS_WIRE", "ethernet")
    with pytest.raises(ValueError, match="wire is 'ethernet'; allowed: one of 'auto', 'nvlink', 'nvshmem'"):
        make()


def test_rows_that_go_in_one_put(monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment variable decides how many rows are put at once, otherwise whether NVSHMEM uses libfabric."""
    given = {("", ""): "0", ("", "ibrc"): "0", ("", "libfabric"): "1", ("0", "libfabric"): "0", ("1", ""): "1"}
    for (bundle, transport), expected in given.items():
        monkeypatch.setenv("EP_OPS_BUNDLE", bundle)
        monkeypatch.setenv("NVSHMEM_REMOTE_TRANSPORT", transport)
        with make() as comm:
            assert comm.config.bundle == expected
    monkeypatch.setenv("EP_OPS_BUNDLE", "2")
    with pytest.raises(ValueError, match="bundle is '2'; allowed: one of '0', '1' .default: EP_OPS_BUNDLE in"):
        make()


def test_symmetric_memory_of_one_rank() -> None:
    buffer = symmetric.allocate(256, None, torch.device("cpu"))
    assert buffer.local.dtype == torch.uint8 and buffer.local.shape == (256,) and not buffer.local.any()
    assert buffer.addresses == (buffer.local.data_ptr(),)
    buffer.free()
    buffer.free()
    assert buffer.local.numel() == 0 and buffer.addresses == ()


# ---------------------------------------------------------------------- several ranks


def _attributes() -> tuple[Any, ...]:
    with make(experts_per_rank=(4, 0, 2), group=None) as uneven, make(num_experts=5) as even:
        assert uneven.group is dist.group.WORLD
        return uneven.first_expert, uneven.num_local_experts, uneven.first_local_expert, even.experts_per_rank


def test_experts_of_ranks() -> None:
    results = run_ranks(3, _attributes)
    assert [result[0] for result in results] == [(0, 4, 4)] * 3
    assert [result[1] for result in results] == [4, 0, 2]
    assert [result[2] for result in results] == [0, 4, 4]
    assert [result[3] for result in results] == [(2, 2, 1)] * 3


def _disagree(field: str, values: list[Any]) -> None:
    make(**{field: values[dist.get_rank()]})


@pytest.mark.parametrize(("field", "values", "text"), [
    ("num_experts", [6, 8], "ranks disagree on num_experts: 6 on ranks [0]; 8 on ranks [1]"),
    ("hidden_size", [8, 16], "ranks disagree on hidden_size: 8 on ranks [0]; 16 on ranks [1]"),
    ("top_k", [2, 3], "ranks disagree on top_k"),
    ("max_tokens_per_rank", [4, 5], "ranks disagree on max_tokens_per_rank"),
    ("dtype", [torch.bfloat16, torch.float16], "dtype: torch.bfloat16 on ranks [0]; torch.float16 on ranks [1]"),
    ("experts_per_rank", [(3, 3), (2, 4)], "experts_per_rank: (3, 3) on ranks [0]; (2, 4) on ranks [1]"),
    ("alignment", [16, 8], "ranks disagree on alignment"),
    ("backend", ["auto", "reference"], "ranks disagree on backend: 'auto' on ranks [0]; 'reference' on ranks [1]"),
    ("timeout", [1.0, 2.0], "ranks disagree on timeout"),
    ("dispatch_sms", [None, 8], "ranks disagree on dispatch_sms"),
    ("combine_sms", [4, 8], "ranks disagree on combine_sms"),
    ("domain_size", [1, 2], "ranks disagree on domain_size: 1 on ranks [0]; 2 on ranks [1]"),
    ("symmetric_rows", [4, 8], "ranks disagree on symmetric_rows"),
    ("name", ["a", "b"], "ranks disagree on name: 'a' on ranks [0]; 'b' on ranks [1]"),
    ("top_k", [2, 0], "rank 1: top_k is 0; allowed: an int from 1 to 32"),
    ("hidden_size", [9, 8], "rank 0: hidden_size is 9, which"),
])  # fmt: skip
def test_disagreement_is_told_on_every_rank(field: str, values: list[Any], text: str) -> None:
    for error in run_ranks(2, _disagree, field, values, return_exceptions=True):
        assert type(error) is ValueError, error
        assert text in str(error)


def _three_ranks_two_values() -> None:
    make(alignment=[4, 8, 4, 8][dist.get_rank()])


def test_disagreement_groups_ranks_by_value() -> None:
    for error in run_ranks(4, _three_ranks_two_values, return_exceptions=True):
        assert "alignment: 4 on ranks [0, 2]; 8 on ranks [1, 3]" in str(error)


def _subgroups() -> list[Any]:
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    mine = pairs[dist.get_rank() // 2]
    with make(mine, name="pair", alignment=4) as pair, make(name="all", num_experts=8, alignment=4) as everyone:
        x = torch.full((1, 8), float(dist.get_rank()), dtype=torch.bfloat16)
        to_other = torch.tensor([[3 * (1 - pair.rank), -1]], dtype=torch.int32)
        came = pair.dispatch(x, to_other, exact=True)
        to_next = torch.tensor([[2 * ((everyone.rank + 1) % 4), -1]], dtype=torch.int32)
        came_too = everyone.dispatch(x, to_next, exact=True)
        both = pair.combine(came.x, came.route) + everyone.combine(came_too.x, came_too.route)
        return [came.x[0, 0].item(), came_too.x[0, 0].item(), both[0, 0].item()]


def test_several_communicators_and_subgroups() -> None:
    assert run_ranks(4, _subgroups) == [[1, 3, 0], [0, 0, 2], [3, 1, 4], [2, 2, 6]]


def _destroy_waits() -> tuple[float, float]:
    comm = make()
    if comm.rank == 1:
        time.sleep(0.5)
    began = time.monotonic()  # one clock for all processes of a host
    comm.destroy()
    comm.destroy()
    return began, time.monotonic()


def test_destroy_waits_for_the_other_ranks() -> None:
    (_, ended), (began, _) = run_ranks(2, _destroy_waits)
    assert ended >= began


def test_reports_of_a_destroyed_communicator_are_not_read() -> None:
    """Failures of a destroyed communicator that had not failed are not read: its kernels' reports were freed."""
    comm = make()
    comm.destroy()
    comm.backend.check_errors = lambda: pytest.fail("read")  # type: ignore[method-assign]
    comm.check_errors()
    comm.backend.has_failed = lambda: True  # type: ignore[method-assign]
    with pytest.raises(pytest.fail.Exception, match="read"):
        comm.check_errors()


def _warmed_up_when_gone() -> None:
    with make() as comm:
        pass
    if comm.rank == 0:  # alone: it would wait for the other rank
        with pytest.raises(RuntimeError, match="was destroyed"):
            comm.warmup()


def test_what_is_gone_waits_for_nobody() -> None:
    run_ranks(2, _warmed_up_when_gone)


def _one_never_comes() -> str:
    comm = make(timeout=0.5)
    if comm.rank == 1:
        return ""
    began = time.monotonic()
    late = r"(0, )?1(, 2)?"  # the third rank may be slow
    with pytest.raises(RuntimeError, match=rf"after waiting 0.5 s for ranks \[{late}\], which did not call"):
        comm.destroy()
    assert time.monotonic() - began > 0.4
    assert comm.destroyed
    return "told"


def test_destroy_does_not_wait_for_ever() -> None:
    assert run_ranks(3, _one_never_comes) == ["told", "", "told"]


def _error_inside() -> str:
    comm = make()
    comm._missing = lambda: pytest.fail("waited for ranks that may never come")
    try:
        with comm:
            raise KeyError("the first error")
    except KeyError:
        return "destroyed" if comm.destroyed else "living"


def test_an_error_does_not_wait() -> None:
    assert run_ranks(2, _error_inside) == ["destroyed", "destroyed"]


def _group_gone() -> str:
    comm, other, late = make(), make(dist.new_group([0, 1])), make()
    dist.barrier()
    dist.destroy_process_group()
    comm.destroy()
    other.destroy()
    other.destroy()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    late.destroy()  # its group is gone, though there is another default group by now
    return "fine"


def test_destroy_after_the_process_group() -> None:
    assert run_ranks(2, _group_gone) == ["fine", "fine"]


# ---------------------------------------------------------------------- a process of its own


def run_python(code: str) -> None:
    """Run ``code`` with warnings as errors; nothing may be printed and no error may occur."""
    root = Path(__file__).parents[2]
    command = [sys.executable, "-W", "error::ResourceWarning", "-W", "error::UserWarning:ep_ops", "-c"]
    done = subprocess.run([*command, textwrap.dedent(code)], cwd=root, capture_output=True, text=True, timeout=280)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_import_needs_nothing_and_exit_is_silent() -> None:
    """Importing registers the operators and loads no kernels, no Inductor and no benchmarks; commands name what they
    lack."""
    run_python(
        """
        import sys
        sys.modules["cutlass"] = None  # importing it fails
        import torch
        before = set(sys.modules)
        import ep_ops
        torch.ops.ep.dispatch.default
        heavy = {"torch._inductor.lowering", "torch._dynamo", "cute_kernels", "ep_ops.nn"}
        assert not (set(sys.modules) - before) & heavy, (set(sys.modules) - before) & heavy
        assert not torch.distributed.is_initialized() and not torch.cuda.is_initialized()
        assert ep_ops.nn.MoELayer and ep_ops.__version__
        assert {"Communicator", "Route", "Dispatched", "memory_plan"} <= set(ep_ops.__all__)
        try:
            ep_ops.nothing
        except AttributeError as error:
            assert "nothing" in str(error)
        comm = ep_ops.Communicator(num_experts=2, hidden_size=8, top_k=1, max_tokens_per_rank=1, device="cpu")
        comm.dispatch(torch.zeros(1, 8).bfloat16(), torch.zeros(1, 1, dtype=torch.int32))
        from ep_ops.commands import cli
        assert not [name for name in sys.modules if "bench" in name.split(".")]
        import contextlib, io
        said = io.StringIO()
        sizes = "--ranks 1 --num-experts 8 --hidden-size 64 --top-k 2 --max-tokens-per-rank 8 --arch sm_90a"
        with contextlib.redirect_stderr(said):
            assert cli.main(["compile", *sizes.split()]) == 2
        assert "ep-ops compile needs cutlass: pip install 'ep_ops[cu13]'" in said.getvalue()
        # neither destroyed nor dropped: the interpreter ends with it
        """
    )


def test_exit_with_a_living_group_is_silent() -> None:
    run_python(
        """
        import torch.distributed as dist
        import ep_ops
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        kept = ep_ops.Communicator(num_experts=2, hidden_size=8, top_k=1, max_tokens_per_rank=1, device="cpu")
        with ep_ops.Communicator(num_experts=2, hidden_size=8, top_k=1, max_tokens_per_rank=1, device="cpu"):
            pass
        dist.destroy_process_group()
        """
    )
