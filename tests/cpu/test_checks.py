"""Every rejection of ep_ops/checks.py: what is named, what was given, what is allowed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from calls import counted

import ep_ops
from ep_ops import arrivals, checks
from ep_ops.operators import OPERATORS
from ep_ops.specs import spec_of

T, K, H, EXPERTS, MAX_TOKENS, ALIGN, ROWS = 5, 2, 8, 3, 6, 4, 24


@pytest.fixture
def comm() -> Iterator[ep_ops.Communicator]:
    with ep_ops.Communicator(
        num_experts=EXPERTS,
        hidden_size=H,
        top_k=K,
        max_tokens_per_rank=MAX_TOKENS,
        alignment=ALIGN,
        backend="reference",
        device="cpu",
    ) as made:
        yield made


CHECKS = {op.name: op for op in OPERATORS}


def good(name: str) -> dict[str, Any]:
    """Arguments, by name, that the operator accepts."""
    ints = torch.int32
    values = {
        "x": torch.zeros(T, H, dtype=torch.bfloat16),
        "residual": torch.zeros(T, H, dtype=torch.bfloat16),
        "y": torch.zeros(ROWS, H, dtype=torch.bfloat16),
        "grad_out": torch.zeros(T, H, dtype=torch.bfloat16),
        "grad_recv_x": torch.zeros(ROWS, H, dtype=torch.bfloat16),
        "topk_weights": torch.zeros(T, K),
        "recv_weights": torch.zeros(ROWS),
        "grad_recv_weights": torch.zeros(ROWS),
        "topk_idx": torch.zeros(T, K, dtype=ints),
        "send_rows": torch.zeros(T, K, dtype=ints),
        "arrivals": torch.zeros(arrivals.size(ROWS, 1), dtype=ints),
        "offs": torch.zeros(EXPERTS, dtype=ints),
        "counts": torch.zeros(EXPERTS, dtype=ints),
        "capacity": ROWS,
        "num_rows": ROWS,
        "alignment": ALIGN,
        "slots": 0,
        "layout": "grouped",
        "max_tokens": MAX_TOKENS,
        "num_local_experts": EXPERTS,
        "world_size": 1,
        "ticket": torch.empty(0),
        "flight": 0,
        "given": [],
        "dtype": torch.bfloat16,
        "tokens": T,
        "hidden": H,
        "top_k": K,
        "scalars": True,
        "comm": "unheard of",
        "scales": None,
        "format": "",
        "scales_as": "",
        "zeros": True,
        "grad_format": "",
    }
    return {field: values[field] for field in CHECKS[name].arguments._fields}


def check(comm: ep_ops.Communicator, name: str, arguments: dict[str, Any]) -> None:
    """Run the checks of an operator without the operator."""
    if "flight" in arguments:
        checks.flight(arguments["flight"])
    a = CHECKS[name].arguments(**arguments)
    if (spec := spec_of(a)) is not None:
        checks.spec(comm, spec)
    CHECKS[name].check(comm, a)


OPTIONAL = ("topk_weights", "recv_weights", "grad_recv_weights", "grad_recv_x", "residual")


def call(name: str, arguments: dict[str, Any], comm: str) -> None:
    """The registered operator."""
    operator = getattr(torch.ops.ep, name)
    operator(*((arguments | {"comm": comm})[each.name] for each in operator.default._schema.arguments))


def those_with(argument: str) -> list[str]:
    return [name for name, op in CHECKS.items() if argument in op.arguments._fields]


def every(*arguments: str) -> list[tuple[str, str]]:
    return [(name, argument) for argument in arguments for name in those_with(argument)]


def rejected(comm: ep_ops.Communicator, name: str, error: type[Exception], *texts: str, **changed: Any) -> None:
    """``name``'s check raises ``error`` with all ``texts``; through the registered operator too."""
    arguments = good(name) | changed
    with pytest.raises(error) as raised:
        check(comm, name, arguments)
    for text in texts:
        assert text in str(raised.value)
    with pytest.raises(error, match=".") as raised:
        call(name, arguments, comm.name)
    for text in texts:
        assert text in str(raised.value)


@pytest.mark.parametrize("name", CHECKS)
def test_good_input_passes(comm: ep_ops.Communicator, name: str) -> None:
    arguments = good(name)
    check(comm, name, arguments)
    for optional in OPTIONAL:
        if optional in arguments:
            check(comm, name, arguments | {optional: None})


GROUPED = [name for name in those_with("capacity") if "slots" in CHECKS[name].arguments._fields]


@pytest.mark.parametrize("name", GROUPED)
def test_good_sizes_pass(comm: ep_ops.Communicator, name: str) -> None:
    arguments = good(name)
    for changed in (
        {"capacity": 0},
        {"capacity": 2**31 - 4},
        {"capacity": EXPERTS * 8, "slots": 8, "layout": "padded"},
        {"capacity": 7, "alignment": 1, "layout": "token_major"},
        {"capacity": 1024 * 5, "alignment": 1024},
        {"capacity": 7, "alignment": 1},
        {"max_tokens": T},
    ):
        check(comm, name, arguments | changed)
    nobody = {"topk_idx": torch.zeros(0, K, dtype=torch.int32), "max_tokens": 0}
    if name != "plan":
        nobody |= {"x": torch.zeros(0, H, dtype=torch.bfloat16), "topk_weights": torch.zeros(0, K)}
    check(comm, name, arguments | nobody)


ROW_TENSORS = ("y", "grad_recv_x", "recv_weights", "grad_recv_weights")  # the rows of the route


def of_rows(name: str, num_rows: int) -> dict[str, Any]:
    """Arguments that have to do with the number of rows."""
    rows = {"num_rows": num_rows, "arrivals": torch.zeros(arrivals.size(num_rows, 1), dtype=torch.int32)}
    given = good(name)
    rows |= {key: given[key][:1].expand(num_rows, *given[key].shape[1:]).clone() for key in ROW_TENSORS if key in given}
    return {key: value for key, value in rows.items() if key in given}


@pytest.mark.parametrize("name", those_with("arrivals"))
def test_any_number_of_rows_passes(comm: ep_ops.Communicator, name: str) -> None:
    """None at all as well; without y where that may be left out."""
    arguments = good(name)
    for num_rows in (0, 1, 7, 1000):
        check(comm, name, arguments | of_rows(name, num_rows))
    if (name, "y") in WITHOUT_Y:
        check(comm, name, arguments | {"y": None})


TENSORS = {
    "x": torch.bfloat16,
    "residual": torch.bfloat16,
    "y": torch.bfloat16,
    "grad_out": torch.bfloat16,
    "grad_recv_x": torch.bfloat16,
    "topk_weights": torch.float32,
    "recv_weights": torch.float32,
    "grad_recv_weights": torch.float32,
    "topk_idx": torch.int32,
    "send_rows": torch.int32,
    "arrivals": torch.int32,
    "offs": torch.int32,
    "counts": torch.int32,
}


@pytest.mark.parametrize(("name", "argument"), every(*TENSORS))
def test_dtype(comm: ep_ops.Communicator, name: str, argument: str) -> None:
    allowed = TENSORS[argument]
    wrong = torch.int64 if allowed == torch.int32 else torch.float16
    given = good(name)[argument].to(wrong)
    rejected(comm, name, TypeError, argument, f"dtype {wrong}", f"allowed: {allowed}", **{argument: given})


@pytest.mark.parametrize(("name", "argument"), every(*TENSORS))
def test_shape(comm: ep_ops.Communicator, name: str, argument: str) -> None:
    given = good(name)[argument]
    wider = torch.zeros(*given.shape[:-1], given.shape[-1] + 5, dtype=given.dtype)
    rejected(comm, name, ValueError, f"{argument} has shape {tuple(wider.shape)}", "allowed: [", **{argument: wider})
    deeper = torch.zeros(1, *given.shape, dtype=given.dtype)
    rejected(comm, name, ValueError, f"{argument} has shape {tuple(deeper.shape)}", "allowed: [", **{argument: deeper})
    flatter = given[..., None].contiguous()
    rejected(
        comm, name, ValueError, f"{argument} has shape {tuple(flatter.shape)}", "allowed: [", **{argument: flatter}
    )


WITHOUT_Y = [("combine_backward", "y"), ("combine_backward_start", "y")]
NEEDED = [each for each in every(*TENSORS) if each[1] not in OPTIONAL and each not in WITHOUT_Y]


@pytest.mark.parametrize(("name", "argument"), NEEDED)
def test_only_what_is_optional_may_be_none(comm: ep_ops.Communicator, name: str, argument: str) -> None:
    with pytest.raises(TypeError, match=f"{argument} is None; allowed: a tensor"):
        check(comm, name, good(name) | {argument: None})


@pytest.mark.parametrize(("name", "argument"), every("x", "grad_out", "residual", "topk_weights", "send_rows"))
def test_as_many_tokens_as_topk_idx(comm: ep_ops.Communicator, name: str, argument: str) -> None:
    fewer = good(name)[argument][:-1]
    rejected(comm, name, ValueError, f"{argument} has shape ({T - 1}, ", f"[{T}", "topk_idx", **{argument: fewer})


@pytest.mark.parametrize(
    ("name", "argument"), [each for each in every(*ROW_TENSORS, "num_rows") if "arrivals" in good(each[0])]
)
def test_as_many_rows_as_arrivals_was_planned_for(comm: ep_ops.Communicator, name: str, argument: str) -> None:
    for wrong in (0, ROWS - 1, ROWS + 1, 2 * ROWS):
        given = of_rows(name, wrong)[argument]
        texts = (f"{argument} is {wrong}; allowed: {ROWS}",) if argument == "num_rows" else (f"({wrong},", f"[{ROWS}")
        rejected(comm, name, ValueError, argument, *texts, **{argument: given})


@pytest.mark.parametrize("name", those_with("recv_weights") + those_with("grad_recv_weights"))
def test_as_many_weights_as_rows(comm: ep_ops.Communicator, name: str) -> None:
    argument = "grad_recv_weights" if name.startswith("dispatch") else "recv_weights"
    for wrong in (0, ROWS - 1):
        expected = (f"{argument} has shape ({wrong},", f"[{ROWS}", "pass None")
        rejected(comm, name, ValueError, *expected, **{argument: good(name)[argument][:wrong]})


def test_some_gradient_is_given(comm: ep_ops.Communicator) -> None:
    nothing = {"grad_recv_x": None, "grad_recv_weights": None}
    with pytest.raises(ValueError, match="both None"):
        check(comm, "dispatch_backward", good("dispatch_backward") | nothing)


@pytest.mark.parametrize(("name", "argument"), every(*TENSORS))
def test_contiguity(comm: ep_ops.Communicator, name: str, argument: str) -> None:
    given = good(name)[argument]
    spread = torch.zeros(*given.shape, 2, dtype=given.dtype)[..., 0]
    with pytest.raises(ValueError, match=f"{argument} has strides .* allowed: contiguous"):
        check(comm, name, good(name) | {argument: spread})


@pytest.mark.parametrize(("name", "argument"), every(*TENSORS))
def test_device(comm: ep_ops.Communicator, name: str, argument: str) -> None:
    elsewhere = torch.empty_like(good(name)[argument], device="meta")
    with pytest.raises(ValueError, match=f"{argument} is on meta; communicator '{comm.name}' is on cpu"):
        check(comm, name, good(name) | {argument: elsewhere})


@pytest.mark.parametrize(("name", "argument"), every("x", "y", "grad_out", "residual", "grad_recv_x"))
def test_rows_begin_at_multiples_of_16_bytes(comm: ep_ops.Communicator, name: str, argument: str) -> None:
    given = good(name)[argument]
    size = given.element_size()
    for off in sorted({size, 8}):  # a multiple of 8 is not enough
        whole = torch.zeros(given.numel() + off // size, dtype=given.dtype)
        shifted = whole[off // size :].view(given.shape)
        assert whole.data_ptr() % 16 == 0
        rejected(
            comm, name, ValueError, f"{argument} begins at address", "multiples of 16 bytes", **{argument: shifted}
        )


@pytest.mark.parametrize("name", those_with("topk_idx"))
def test_too_many_tokens(comm: ep_ops.Communicator, name: str) -> None:
    rejected(comm, name, ValueError, f"topk_idx has {T} tokens", "at most max_tokens 4", max_tokens=T - 1)


@pytest.mark.parametrize("name", those_with("arrivals"))
def test_arrivals_of_no_number_of_rows(comm: ep_ops.Communicator, name: str) -> None:
    """Arrivals that are too short, of another world size, or in another shape are rejected."""
    fits = arrivals.size(ROWS, 1)
    for shape in ((0,), (3,), (fits - 1,), (fits + 1,), (arrivals.size(ROWS, 2),), (1, fits), ()):
        texts = (f"arrivals has shape {shape}", "allowed: [4 R + 4] for R rows", "world_size 1")
        rejected(comm, name, ValueError, *texts, arrivals=torch.zeros(shape, dtype=torch.int32))


INTS = [
    ("max_tokens", MAX_TOKENS + 1, "allowed: 0..max_tokens_per_rank 6"),
    ("max_tokens", -1, "allowed: 0..max_tokens_per_rank 6"),
    ("alignment", 0, "allowed: 1..1024"),
    ("alignment", 1025, "allowed: 1..1024"),
    ("alignment", -4, "allowed: 1..1024"),
    ("capacity", -4, "allowed: 0..2**31 - 1"),
    ("capacity", 2**31, "allowed: 0..2**31 - 1"),
    ("capacity", 2, "multiple of alignment 4"),
    ("slots", 8, "allowed: 0 (only layout 'padded' has slots)"),
    ("num_rows", -1, "allowed: 24"),
    ("num_rows", 2**31, "allowed: 24"),
    ("num_local_experts", EXPERTS + 1, "has 3 on this rank"),
    ("world_size", 2, "has 1 ranks"),
]


@pytest.mark.parametrize(("argument", "given", "text"), INTS)
def test_ints(comm: ep_ops.Communicator, argument: str, given: int, text: str) -> None:
    for name in GROUPED if "multiple of alignment" in text else those_with(argument):
        if argument == "num_rows" and "arrivals" not in good(name):
            continue  # what its start knew
        rejected(comm, name, ValueError, f"{argument} is {given}", text, **{argument: given})


@pytest.mark.parametrize("name", those_with("layout"))
def test_layouts(comm: ep_ops.Communicator, name: str) -> None:
    rejected(
        comm, name, ValueError, "layout is 'by_token'; allowed: 'grouped', 'padded', 'token_major'", layout="by_token"
    )
    if "x" not in good(name) and name != "plan":
        return  # gradients: their sizes are those of the route
    rejected(comm, name, ValueError, "alignment is 4; allowed with layout 'token_major': 1", layout="token_major")
    if "slots" not in good(name):
        rejected(comm, name, ValueError, "layout is 'padded'", "allowed with exact sizes: 'grouped'", layout="padded")
        return
    for slots in (0, -8, 6):
        text = f"slots is {slots}, with layout 'padded'; allowed: positive multiples of alignment 4"
        rejected(comm, name, ValueError, text, layout="padded", slots=slots)


def test_rows_of_a_padded_route(comm: ep_ops.Communicator) -> None:
    text = "allowed: num_rows 24 / num_local_experts 3"
    rejected(comm, "dispatch_planned", ValueError, "slots is 4", text, layout="padded", slots=4)


@pytest.mark.parametrize("name", GROUPED)
def test_padded_layout_has_slots_for_every_expert(comm: ep_ops.Communicator, name: str) -> None:
    rejected(comm, name, ValueError, "capacity is 24", "num_local_experts 3 x slots = 12", layout="padded", slots=4)


@pytest.mark.parametrize("name", CHECKS)
def test_unknown_and_destroyed_communicators(comm: ep_ops.Communicator, name: str) -> None:
    arguments = good(name)
    with pytest.raises(RuntimeError, match="communicator 'nobody' does not exist in this process"):
        call(name, arguments, "nobody")
    comm.destroy()
    with pytest.raises(RuntimeError, match=f"communicator '{comm.name}' was destroyed"):
        call(name, arguments, comm.name)


def test_float64_weights_go_with_float64_rows() -> None:
    with ep_ops.Communicator(
        num_experts=1, hidden_size=2, top_k=1, max_tokens_per_rank=1, dtype=torch.float64, device="cpu"
    ) as comm:
        x, idx = torch.zeros(1, 2, dtype=torch.float64), torch.zeros(1, 1, dtype=torch.int32)
        comm.dispatch(x, idx, torch.zeros(1, 1, dtype=torch.float64))
        assert comm.dispatch(x, idx, torch.ones(1, 1)).weights.dtype == torch.float64  # methods widen
        with pytest.raises(TypeError, match="topk_weights has dtype torch.float32; allowed: torch.float64"):
            torch.ops.ep.dispatch(x, torch.zeros(1, 1), idx, 16, 16, 0, 1, 1, 1, comm.name)


@pytest.mark.parametrize("name", CHECKS)
def test_what_is_right_passes_with_few_calls(comm: ep_ops.Communicator, name: str) -> None:
    """A check runs in every eager step of a decoder, so what it may do is counted: a timing would tell of the machine.

    One Python function for each argument, and three more; of functions in C that it calls three for each tensor (its
    layout, its address, the length of its shape), and two that remember ints. About 0.1 us each.
    """
    arguments = CHECKS[name].arguments(**good(name))
    python, c = counted(lambda: CHECKS[name].check(comm, arguments))
    print(f"{name}: {python} Python functions, {c} C functions")
    assert 0 < python <= len(arguments) + 3
    assert (c > 0 or name.endswith("_backward_wait")) and c <= 2 + 3 * sum(
        isinstance(argument, torch.Tensor) for argument in arguments
    )


@pytest.mark.parametrize("name", those_with("flight"))
@pytest.mark.parametrize("flight", [-1, 2])
def test_flights(comm: ep_ops.Communicator, name: str, flight: int) -> None:
    check(comm, name, good(name) | {"flight": 1})
    rejected(comm, name, ValueError, f"flight is {flight}; allowed: 0..1", flight=flight)
