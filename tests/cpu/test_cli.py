"""The command line: in processes of its own, or its entry point in this one, whose ranks are processes."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import re
import runpy
import signal
import subprocess
import sys
import time
import types
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from forks import forks
from ranks import run_ranks

import ep_ops
from ep_ops.commands import cli, doctor
from ep_ops.commands.demo import Language, Mismatch, Model, check, gradients, without_moe
from ep_ops.commands.launch import launch, process_group
from ep_ops.group import topology
from ep_ops.nn import DenseMoE, MoELayer

ROOT = Path(ep_ops.__file__).parent.parent
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
PROGRAM = [sys.executable, "-m", "ep_ops"]
NIGHTLY = pytest.mark.skipif(
    os.environ.get("EP_OPS_ALL_CHECKS") != "1", reason="two compilers work for a minute: EP_OPS_ALL_CHECKS=1 runs it"
)
DEMO = ["demo", "--device", "cpu", "--hidden-size", "32", "--sequences", "4"]


def run(command: list[str], timeout: float = 200, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, capture_output=True, text=True, timeout=timeout, env=ENVIRONMENT | environment, cwd=ROOT
    )


@pytest.fixture
def own_signals() -> Iterator[None]:
    """Keep the handler of this process for SIGTERM, which the demo replaces."""
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.mark.usefixtures("own_signals")
@pytest.mark.parametrize("compiler", ["aot_eager", pytest.param("inductor", marks=NIGHTLY)])
def test_demo_trains_compiled_on_two_ranks(
    compiler: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The compiled demo trains on two ranks. Without a C++ compiler the graph is traced and differentiated, which takes
    a third of the time."""
    if compiler == "aot_eager":
        monkeypatch.setenv("PATH", str(tmp_path))
        monkeypatch.setenv("CXX", "")
    assert cli.main([*DEMO, "--steps", "12"]) == 0, capfd.readouterr().err
    said = capfd.readouterr().out
    assert "2 rank(s), 16 experts" in said
    assert ("no C++ compiler was found" in said) == (compiler == "aot_eager")
    assert "self-check: loss and all gradients equal the dense model's" in said
    assert f"backend reference, torch.float32, compiled as one graph ({compiler})" in said
    first, last = map(float, re.search(r"^loss +([\d.]+) -> ([\d.]+) nats", said, re.M).groups())
    assert last < 0.8 * first


def test_demo_reports_what_a_rank_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ENVIRONMENT, "EP_OPS_CHECK", "2")
    done = run([*PROGRAM, *DEMO, "--eager", "--steps", "2", "--ranks", "1"])
    assert done.returncode == 1
    assert "Traceback" in done.stderr and "check is '2'; allowed: one of '0', '1'" in done.stderr


@pytest.fixture
def forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `launch` start forks (tests/forks.py), which have imported everything."""
    forks()
    start = torch.multiprocessing.start_processes
    as_forks = {"start_method": "forkserver"}
    monkeypatch.setattr(torch.multiprocessing, "start_processes", lambda *args, **how: start(*args, **how | as_forks))


@pytest.mark.usefixtures("own_signals", "forked")
def test_decode_steps(capfd: pytest.CaptureFixture[str]) -> None:
    """The decode demo runs, and says how long a step takes."""
    assert cli.main(["demo", "--decode", "--device", "cpu", "--steps", "2"]) == 0, capfd.readouterr().err
    said = capfd.readouterr().out
    assert re.search(r"2 decode steps: \d+ µs per step.*a second run differs by \d", said), said


@pytest.mark.drawn
@pytest.mark.parametrize("how", ["Ctrl-C", "terminate parent"])
def test_a_signal_ends_every_process(how: str) -> None:
    """A signal ends every process, sent to all of them, or to the one that the user has started."""
    with subprocess.Popen(
        [*PROGRAM, *DEMO, "--eager", "--steps", "1000000"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=ENVIRONMENT,
        cwd=ROOT,
        start_new_session=True,
        # A job in the background of a shell ignores Ctrl-C, and what it starts inherits that.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    ) as process:
        try:
            assert process.stdout is not None
            while "step 10/" not in (line := process.stdout.readline()):
                assert line, "ended too early"
            send = os.killpg if how == "Ctrl-C" else os.kill
            send(process.pid, signal.SIGTERM if how == "terminate parent" else signal.SIGINT)
            _, errors = process.communicate(timeout=200)
            assert process.returncode == (143 if how == "terminate parent" else 130)
            assert errors.strip() == "interrupted; all processes have ended"
            with pytest.raises(ProcessLookupError):
                for _ in range(100):  # multiprocessing's helper leaves last; the system may take a while to bury it
                    os.killpg(process.pid, 0)
                    time.sleep(0.2)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)


def fail_on_rank_one(rank: int, store: str, world_size: int) -> None:
    with process_group(rank, store, world_size, "cpu"):
        if rank == 1:
            raise ValueError("no good")
        torch.distributed.barrier()


def look_at_the_store(rank: int, store: str, world_size: int, found: str) -> None:
    with process_group(rank, store, world_size, "cpu"):
        torch.distributed.barrier()
        if rank == 0:
            folder, sockets = Path(store).parent, []
            for process in (os.getpid(), os.getppid()):
                for file in Path(f"/proc/{process}/fd").iterdir():
                    with contextlib.suppress(OSError):
                        sockets.append(os.readlink(file))
            listening = [
                line.split()[1]
                for name in ("tcp", "tcp6") for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]
                if line.split()[3] == "0A" and f"socket:[{line.split()[9]}]" in sockets
            ]  # fmt: skip
            Path(found).write_text(json.dumps([store, folder.stat().st_mode & 0o777, folder.stat().st_uid, listening]))
        torch.distributed.barrier()


def test_nobody_else_reaches_the_store_of_a_launch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The store of a launch is a file in a private folder, which is removed. The processes listen on the loopback
    interface at most."""
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    launch(look_at_the_store, 2, str(tmp_path / "found"))
    store, mode, owner, listening = json.loads((tmp_path / "found").read_text())
    assert (mode, owner) == (0o700, os.getuid()) and not Path(store).parent.exists()
    local = "0100007F", "00000000000000000000000001000000"  # 127.0.0.1 and ::1
    assert all(address.partition(":")[0] in local for address in listening), listening


@pytest.mark.timeout(250)
@pytest.mark.usefixtures("forked")
def test_a_failing_rank_ends_the_waiting_one() -> None:
    """A rank that fails ends the one that waits for it, whose barrier alone would wait for 300 s."""
    with pytest.raises(torch.multiprocessing.ProcessRaisedException, match="(?s)Process 1 .*ValueError: no good"):
        launch(fail_on_rank_one, 2)


def leave_work_behind(rank: int, store: str, world_size: int) -> None:
    global still_held
    with process_group(rank, store, world_size, "cpu"):
        still_held = torch.distributed.group.WORLD
    for _ in range(200):
        still_held.allgather([[torch.empty(200_000) for _ in range(world_size)]], [torch.zeros(200_000)])


@pytest.mark.usefixtures("forked")
def test_a_group_that_somebody_holds_does_not_spoil_the_end() -> None:
    """A process ends well although somebody holds its process group, whose threads must not free tensors while Python
    is finalized: that aborts the process."""
    launch(leave_work_behind, 2)


def self_check(spoil: str) -> float:
    """The demo's self-check after adding 1 % to the parameter ``spoil`` of the expert-parallel model on one rank."""
    with ep_ops.Communicator(
        num_experts=5, hidden_size=32, top_k=2, max_tokens_per_rank=128, dtype=torch.float32, device="cpu"
    ) as comm:
        torch.manual_seed(0)
        model = Model(32, MoELayer(comm, 32), torch.float32)
        dense = Model(32, DenseMoE(comm, 32), torch.float32)
        dense.load_state_dict(without_moe(model), strict=False)
        if spoil and comm.rank == 1:
            parameter = dict(model.named_parameters())[spoil].data
            (parameter.to_local() if "experts" in spoil else parameter).mul_(1.01)
        batch = Language(comm.rank, 4, comm.device).batch()
        shared = [p for name, p in model.named_parameters() if not name.startswith("moe.experts.")]
        loss = gradients(model, batch, shared)
        return check(model, loss, dense, batch, 1e-4)


def test_self_check_passes() -> None:
    assert max(run_ranks(2, self_check, "")) < 1e-4


@pytest.mark.parametrize("parameter", ["moe.experts.w_in", "moe.experts.w_out", "moe.router.weight", "head.weight"])
def test_self_check_notices_a_wrong_weight_on_every_rank(parameter: str) -> None:
    results = run_ranks(2, self_check, parameter, return_exceptions=True)
    assert [type(result) for result in results] == [Mismatch, Mismatch]


def test_doctor() -> None:
    done = run([*PROGRAM, "doctor"])
    assert done.returncode == 0, done.stderr
    assert re.search(rf"^  torch +{re.escape(torch.__version__)}", done.stdout, re.M)
    titles = [line for line in done.stdout.splitlines() if not line.startswith(" ")]
    assert titles == [
        "versions",
        "CUDA",
        "GPUs",
        "peer access",
        "NVLink",
        "NVLink domain",
        "symmetric memory",
        "backend",
        "grouped GEMMs",
        "environment",
        "module loading",
        "caches",
    ]
    assert "could not tell" not in done.stdout
    if not torch.cuda.is_available():
        assert "reference, because torch sees no GPU" in done.stdout and "  auto: torch\n" in done.stdout


@pytest.mark.parametrize(
    "wanted, compiler, bindings, said",
    [
        (None, "12.9", "13.5.0", "torch is a CPU build, so kernels cannot run"),
        ("13.0", "13.0", "13.5.0", "the extra cu13 matches torch (CUDA 13.0)"),
        ("12.8", "12.9", "12.9.4", "the extra cu12 matches torch (CUDA 12.8)"),
        ("13.0", "12.9", "13.5.0", "the CuTe DSL has CUDA 12.9, but torch has CUDA 13.0: pip install 'ep_ops[cu13]'"),
        ("13.0", "13.0", "12.9", "cuda-bindings has CUDA 12.9, but torch has CUDA 13.0: pip install 'ep_ops[cu13]'"),
        (
            "12.8", "13.0", "13.5.0",
            "the CuTe DSL has CUDA 13.0 and cuda-bindings has CUDA 13.5.0, but torch has CUDA 12.8:"
            " pip uninstall nvidia-cutlass-dsl-libs-cu13 && pip install 'ep_ops[cu12]'",
        ),
    ],
)  # fmt: skip
def test_doctor_compares_the_extra_with_torch(
    wanted: str | None, compiler: str, bindings: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    jit = types.ModuleType("cute_kernels.jit")
    jit.versions = lambda: {"cuda": compiler}  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "cute_kernels.jit", jit)
    monkeypatch.setitem(sys.modules, "cute_kernels", types.SimpleNamespace(jit=jit))  # type: ignore[arg-type]
    monkeypatch.setattr(torch.version, "cuda", wanted)
    monkeypatch.setattr(doctor, "installed", lambda name: bindings)
    assert doctor.cuda() == [said]


def test_doctor_without_an_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cute_kernels", None)  # type: ignore[arg-type]  as if it could not be imported
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    (said,) = doctor.cuda()
    assert said.startswith("no extra is installed (") and said.endswith("): pip install 'ep_ops[cu12]'")


def test_version() -> None:
    done = run([*PROGRAM, "--version"])
    assert (done.returncode, done.stdout) == (0, f"ep_ops {ep_ops.__version__}\n"), done.stderr


def pretend_gpus(monkeypatch: pytest.MonkeyPatch, capabilities: list[tuple[int, int]], closed: set) -> None:
    """torch sees such GPUs; the pairs in ``closed`` cannot map each other's memory."""

    def properties(index: object) -> types.SimpleNamespace:
        number = index if isinstance(index, int) else index.index  # type: ignore[attr-defined]
        major, minor = capabilities[number]
        return types.SimpleNamespace(
            name="NVIDIA Something",
            major=major,
            minor=minor,
            total_memory=80 * 2**30,
            multi_processor_count=132,
            uuid=f"GPU-{number}",
            shared_memory_per_block_optin=(99 if major == 12 else 227) * 1024,
        )

    fakes = {
        "is_available": lambda: True,
        "device_count": lambda: len(capabilities),
        "get_device_properties": properties,
        "can_device_access_peer": lambda i, j: (i, j) not in closed,
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)


@pytest.mark.parametrize(
    ("capabilities", "closed", "expected"),
    [
        (
            [(9, 0), (9, 0)],
            set(),
            ["cute: 2 GPU(s) of capability 9.0 or newer", "auto: kernels for few rows without gradients"],
        ),
        ([(9, 0), (8, 0)], set(), ["reference, because:", "GPU 1 (NVIDIA Something, capability 8.0) is too old"]),
        (
            [(9, 0), (12, 0)],
            set(),
            [
                "reference, because:",
                "GPU 1 (NVIDIA Something, capability 12.0) has 101376 bytes of shared memory a block;"
                " backend 'cute' needs 232448",
            ],
        ),
        ([(9, 0), (9, 0)], {(0, 1)}, ["reference, because:", "GPU 0 cannot map the memory of GPUs [1]", "auto: torch"]),
    ],
    ids=["cute", "old", "small", "closed"],
)
def test_doctor_on_gpus(
    monkeypatch: pytest.MonkeyPatch, capabilities: list[tuple[int, int]], closed: set, expected: list[str]
) -> None:
    pytest.importorskip("cutlass")
    pretend_gpus(monkeypatch, capabilities, closed)
    monkeypatch.setattr(topology, "fabric_of", lambda uuid, device: topology.Fabric("ab", 7))
    apart = frozenset(str(second) for _, second in closed)
    monkeypatch.setattr(topology, "no_nvlink", lambda uuid: apart)
    text = doctor.report()
    joined = "none between GPUs 0 and 1: latency kernels are off" if closed else "between all GPUs"
    assert joined in text
    assert "could not tell" not in text
    assert "1: fabric cluster ab, clique 7" in text
    together = f"0..{len(capabilities) - 1} (fabric cluster ab, clique 7)"
    assert f"with one process for each: one NVLink domain: {together}" in text
    assert "1: NVIDIA Something, capability" in text and "80 GiB, 132 SMs" in text
    for words in expected:
        assert words in text
    row = next(line for line in text.splitlines() if line.split()[:2] == ["0", "-"])
    assert row.split()[2] == ("no" if closed else "yes")


def test_doctor_without_nvml(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_gpus(monkeypatch, [(9, 0)] * 2, set())
    monkeypatch.setattr(topology, "no_nvlink", lambda uuid: None)
    assert doctor.nvlink() == ["NVML cannot tell; latency kernels are on"]


@pytest.mark.parametrize(("given", "said"), [(None, "LAZY"), ("LAZY", "LAZY"), ("EAGER", "EAGER: with")])
def test_doctor_on_module_loading(given: str | None, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_MODULE_LOADING", raising=False)
    if given is not None:
        monkeypatch.setenv("CUDA_MODULE_LOADING", given)
    (line,) = doctor.module_loading()
    assert line.startswith(said) and ("may block" in line) == (said == "LAZY")


def test_doctor_reports_the_table_of_choices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("EP_OPS_TUNING", raising=False)
    assert doctor.environment()[-1] == "EP_OPS_TUNING   not set  (a file of ep-ops bench tune)"
    monkeypatch.setenv("EP_OPS_TUNING", "/nowhere.json")
    assert "'/nowhere.json': the file cannot be read" in doctor.environment()[-1]


def test_doctor_on_unequal_domains(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_gpus(monkeypatch, [(9, 0)] * 3, set())
    cliques = {"GPU-0": 1, "GPU-1": 2, "GPU-2": 1}
    monkeypatch.setattr(topology, "fabric_of", lambda uuid, device: topology.Fabric("ab", cliques[uuid]))
    text = doctor.report()
    where = "ranks are in 2 NVLink domains: 0, 2 (fabric cluster ab, clique 1); 1 (fabric cluster ab, clique 2)"
    assert f"with one process for each: {where}; all domains must have the same number of ranks" in text
    assert f"none, because {where}" in text


def test_usage(capsys: pytest.CaptureFixture[str]) -> None:
    for asked, code in ([], 2), (["everything"], 2), (["--help"], 0):
        with pytest.raises(SystemExit) as stop:
            cli.main(["bench", *asked])
        assert stop.value.code == code
    said = capsys.readouterr()
    assert (
        "{throughput,latency,decode,layer,tune,gemms,model} ..." in said.err and "'everything' (choose from" in said.err
    )
    assert all(kind in said.out and what.split()[0] in said.out for kind, what in cli.BENCHMARKS.items())
    for wrong, error in (
        ([], "the following arguments are required"),
        (["demo", "--steps", "0"], "0 is not an int of at least 1"),
        (["demo", "--hidden-size", "48"], "48 is not a multiple of 32"),
        (["demo", "--device", "cpu", "--backend", "cute"], "--backend is cute, which runs on GPUs"),
        *([] if torch.cuda.is_available() else [(["demo", "--device", "cuda"], "torch sees no GPU")]),
    ):
        with pytest.raises(SystemExit) as stop:
            cli.main(wrong)
        assert stop.value.code == 2 and error in capsys.readouterr().err


COMMAND = re.compile(
    r"^ *(?:\w+=\S+ )*(?:ep-ops|torchrun [^#\n]*-m ep_ops) (compile|bench \w+)((?: [^#\s][^#\n]*?)?)(?:  +#.*)?$", re.M
)
"""A command of ``ep-ops`` on a line of its own: its name and its arguments."""


def test_commands_that_pages_and_help_texts_show_are_accepted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Options that were removed or renamed appear in no page and in no help text. Runs that ``--against`` compares with
    are left out, because their files do not exist here."""
    monkeypatch.chdir(tmp_path)  # for the files of --out
    pages = [ROOT / "README.md", *ROOT.glob("docs/**/*.md"), *ROOT.glob("benchmarks/**/*.md")]
    texts = [path.read_text() for path in (*pages, *ROOT.glob("ep_ops/bench/*.py"))]
    found = {m.groups() for text in texts for m in COMMAND.finditer(text)}
    assert len(found) > 30
    for command, given in sorted(found):
        argv = re.sub(r" --against \S+", "", given).split()
        if command == "compile":
            assert cli.parser().parse_args([command, *argv]).run is not None
        elif (kind := command.split()[1]) != "model":
            try:
                importlib.import_module(f"ep_ops.bench.{kind}").parser().parse_args(argv)
            except SystemExit:
                pytest.fail(f"ep-ops {command}{given}: {capsys.readouterr().err}")


def test_ranks_are_at_most_the_gpus(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    pretend_gpus(monkeypatch, [(9, 0)] * 2, set())
    for command in (["demo"], ["demo", "--decode"]):
        with pytest.raises(SystemExit) as stop:
            cli.main([*command, "--ranks", "3"])
        assert stop.value.code == 2 and "--ranks is 3; allowed: at most 2" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("kind", "options", "text"),
    [
        ("throughput", "--backend cute", "--backend is cute, which runs on GPUs"),
        ("tune", "", "the reference backend has no blocks to choose; allowed: GPUs, with the cute backend"),
        ("gemms", "", "quack's GEMMs need GPUs, and quack-kernels 0.6.5"),
        ("layer", "--only quack", "--only quack needs GPUs, and quack-kernels"),
    ],
)
def test_benchmarks_reject_before_they_start(
    kind: str, options: str, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        cli.main(["bench", kind, "--device", "cpu", *options.split()])
    assert stop.value.code == 2 and text in capsys.readouterr().err


def test_bench_takes_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    class Throughput:
        @staticmethod
        def main(argv: list[str]) -> int:
            return len(argv)

    monkeypatch.setitem(sys.modules, "ep_ops.bench.throughput", Throughput)  # type: ignore[arg-type]
    assert cli.main(["bench", "throughput", "--tokens", "8", "x"]) == 3


OF_THE_README = "\nassert x.grad.isfinite().all() and x.grad.any() and y.shape == x.shape\n"
GRAPH = [("fullgraph=True", 'fullgraph=True, backend="aot_eager"')]
OF_THE_QUICKSTART = "\nassert all(w.grad.isfinite().all() and w.grad.any() for w in (router, w_in, w_out))\n"


def run_script(path: str) -> None:
    """On a rank that has its process group already."""
    with mock.patch.object(dist, "init_process_group"), mock.patch.object(dist, "destroy_process_group"):
        runpy.run_path(path)


@pytest.mark.parametrize(
    ("page", "smaller", "behind"),
    [
        ("README.md", [*GRAPH, ("512", "32"), ("256", "64")], OF_THE_README),
        ("docs/quickstart.md", [*GRAPH, ("= 256, 256, 128,", "= 32, 64, 32,")], OF_THE_QUICKSTART),
    ],
    ids=["README", "quickstart"],
)
def test_examples_of_the_documentation_run(
    page: str, smaller: list[tuple[str, str]], behind: str, tmp_path: Path
) -> None:
    """Examples run with smaller sizes, traced as one graph but not lowered."""
    example = re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.S)[0]
    for old, new in smaller:
        assert old in example
        example = example.replace(old, new)
    script = tmp_path / "example.py"
    script.write_text(example + behind)
    run_ranks(1, run_script, str(script))


TINY = {
    "throughput": "--preset tiny --ranks 2 --iterations 2".split(),
    "latency": "--tokens 1 --hidden 64 --experts 8 --top-k 2 --pairs 2 --replays 2".split(),
}


@pytest.mark.parametrize("kind", [pytest.param(kind, marks=pytest.mark.drawn) for kind in TINY])
def test_bench_on_a_cpu_without_the_kernels_packages(kind: str, tmp_path: Path) -> None:
    for name in ("cutlass", "cuda", "tvm_ffi"):
        (tmp_path / f"{name}.py").write_text(f"raise ModuleNotFoundError('No module named {name}', name='{name}')")
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH"), str(ROOT)])])
    command = [*PROGRAM, "bench", kind, "--device", "cpu", *TINY[kind]]
    part = {"throughput": "dispatch", "latency": "pair"}[kind]
    done = run([*command, "--only", part, "--out", "/dev/full"], PYTHONPATH=path)
    assert done.returncode == 74, done.stderr
    assert "/dev/full cannot be written: No space left on device" in done.stderr and "Traceback" not in done.stderr
    done = run([*command, "--out", str(tmp_path / "out.json")], PYTHONPATH=path)
    assert done.returncode == 0 and (tmp_path / "out.json").read_text().startswith("{"), done.stderr


SMALL_DEMO = ["demo", "--device", "cpu", "--eager", "--steps", "4", "--sequences", "2", "--ranks", "1"]


@pytest.mark.parametrize(("command", "reason"), [
    (["doctor"], "No space left on device"), pytest.param(SMALL_DEMO, "", marks=pytest.mark.drawn),
    pytest.param(SMALL_DEMO, "No space left on device", marks=pytest.mark.drawn),
    pytest.param(["doctor"], "", marks=pytest.mark.drawn),
])  # fmt: skip
def test_output_that_nobody_reads_and_a_full_disk(command: list[str], reason: str) -> None:
    reading, writing = os.pipe()
    os.close(reading)  # as after | head
    given = os.open("/dev/full", os.O_WRONLY) if reason else writing
    done = subprocess.run([*PROGRAM, *command], stdout=given, stderr=subprocess.PIPE, text=True, timeout=200)
    assert (done.returncode, "Traceback" in done.stderr) == (74, False), done.stderr
    assert f"standard output cannot be written: {reason}" in done.stderr if reason else "written" not in done.stderr
    for descriptor in {given, writing}:
        os.close(descriptor)
