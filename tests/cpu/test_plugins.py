"""Entry points for vLLM and SGLang: a spawned worker imports ep_ops as ``deep_ep``, dispatches and combines."""

from __future__ import annotations

import configparser
import functools
import importlib
import importlib.util
import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
import types
from collections.abc import Iterator
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any

import pytest

from ep_ops.integrations import plugins

if sys.version_info < (3, 11):
    pytest.skip("reads pyproject.toml: needs Python 3.11", allow_module_level=True)
import tomllib

LOADERS = {
    "vllm.general_plugins": ("vllm.plugins", "load_general_plugins"),
    "sglang.srt.plugins": ("sglang.srt.plugins", "load_plugins"),
}
"""By group of entry points: the module and the function by which the framework calls them."""
ROOT = Path(__file__).resolve().parents[2]
DECLARED = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def _worker(rank: int, group: str, file: str, queue: Any) -> None:
    """Do what a worker of either framework does: run all plugins, by its own loader if it is installed, then import
    DeepEP and use it."""
    sys.path.insert(0, os.environ["EP_OPS_TEST_METADATA"])
    module, function = LOADERS[group]
    if importlib.util.find_spec(module.partition(".")[0]) is not None:
        getattr(importlib.import_module(module), function)()
    else:
        for plugin in entry_points(group=group):
            plugin.load()()
    import deep_ep
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=2)
    buffer = deep_ep.Buffer(dist.group.WORLD, explicitly_destroy=True)
    x, idx = torch.full((2, 128), rank + 1.0).bfloat16(), torch.tensor([[0, 1], [1, -1]])
    per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(idx, 2)
    rows, _, _, counts, handle, _ = buffer.dispatch(
        x, topk_idx=idx, topk_weights=idx.float(), num_tokens_per_rank=per_rank, is_token_in_rank=in_rank,
        num_tokens_per_expert=per_expert,
    )  # fmt: skip
    home = buffer.combine(rows, handle)[0]
    queue.put((rank, (deep_ep.__name__, buffer.max_tokens_per_rank, rows[:, 0].tolist(), counts, home[:, 0].tolist())))
    buffer.destroy()
    dist.destroy_process_group()


def _workers(group: str, metadata: Path, ranks: int) -> list[Any]:
    context = multiprocessing.get_context("spawn")  # as both frameworks do, so that nothing is inherited
    queue = context.Queue()
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setenv("EP_OPS_TEST_METADATA", str(metadata))
        started = [context.Process(target=_worker, args=(r, group, f"{folder}/store", queue)) for r in range(ranks)]
        for process in started:
            process.start()
        try:
            return [result for _, result in sorted(queue.get(timeout=240) for _ in started)]
        finally:
            for process in started:
                process.join(20)
                process.kill()


@pytest.fixture
def metadata(tmp_path: Path) -> Path:
    """A folder with the entry points that an installation would have, and no package."""
    info, text = tmp_path / "ep_ops_of_this_checkout-0.dist-info", configparser.ConfigParser()
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: ep_ops_of_this_checkout\nVersion: 0\n")
    for group in LOADERS:
        text[group] = DECLARED["entry-points"][group]
    with (info / "entry_points.txt").open("w") as file:
        text.write(file)
    return tmp_path


@pytest.mark.parametrize("group", LOADERS)
def test_workers_dispatch_through_ep_ops(metadata: Path, group: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if group != "vllm.general_plugins" and importlib.util.find_spec("sglang") is None:
        pytest.skip("without SGLang it does the same as with the group of vLLM")
    monkeypatch.setenv("EP_OPS_DEEP_EP", "1")
    monkeypatch.setenv("EP_OPS_DEEP_EP_MAX_TOKENS", "4")
    name = "ep_ops.integrations.deep_ep"
    wanted = [
        (name, 4, [1.0, 2.0], [2], [2.0, 1.0]),  # expert 0: the first token of each rank
        (name, 4, [1.0, 1.0, 2.0, 2.0], [4], [4.0, 2.0]),
    ]
    assert _workers(group, metadata, 2) == wanted


def test_each_group_names_its_function() -> None:
    for group, function in (("vllm.general_plugins", plugins.vllm), ("sglang.srt.plugins", plugins.sglang)):
        (value,) = DECLARED["entry-points"][group].values()
        assert EntryPoint("ep_ops", value, group).load() is function


NATIVE = {plugins.vllm: "EP_OPS_VLLM", plugins.sglang: "EP_OPS_SGLANG"}


@pytest.mark.parametrize("plugin", NATIVE)
def test_variables_choose_the_way(plugin: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    ways: list[str] = []
    monkeypatch.setattr(plugins, "stand_in_for_deep_ep", lambda: ways.append("deep_ep"))
    for name in ("vllm_server", "sglang"):
        fake: Any = types.ModuleType(name)
        fake.install = functools.partial(ways.append, name)
        monkeypatch.setitem(sys.modules, f"ep_ops.integrations.{name}", fake)
    native = NATIVE[plugin]
    other = next(variable for variable in NATIVE.values() if variable != native)
    for given, wanted in (
        ({}, []), ({"EP_OPS_DEEP_EP": "0", native: ""}, []), ({other: "1"}, []), ({other: "nonsense"}, []),
        ({"EP_OPS_DEEP_EP": "1"}, ["deep_ep"]), ({"EP_OPS_DEEP_EP": "1", native: "0"}, ["deep_ep"]),
        ({native: "1"}, ["vllm_server" if plugin is plugins.vllm else "sglang"]),
    ):  # fmt: skip
        ways.clear()
        for name in ("EP_OPS_DEEP_EP", *NATIVE.values()):
            monkeypatch.setenv(name, given.get(name, ""))
        plugin()
        assert ways == wanted, given
    monkeypatch.setenv("EP_OPS_DEEP_EP", "1")
    with pytest.raises(ValueError, match=f"{native} and EP_OPS_DEEP_EP are 1; allowed: one of them"):
        plugin()
    for name in (native, "EP_OPS_DEEP_EP"):
        monkeypatch.setenv(name, "yes")
        with pytest.raises(ValueError, match=rf"{name} is 'yes'; allowed: 0, or 1 \("):
            plugin()
        monkeypatch.setenv(name, "")


# ------------------------------------------------------- DeepEP is installed or imported before the plugin is called

OURS = "ep_ops.integrations.deep_ep"
TOKEN_DISPATCHER = "sglang.srt.layers.moe.token_dispatcher"
KERNELS = {
    "0.5.14": "sglang.srt.layers.quantization.fp8_kernel",
    "0.5.23": "sglang.kernels.ops.quantization.fp8_kernel",
}
DEEP_EP = """
import deep_ep.utils
class Buffer: pass
class ElasticBuffer: pass
class Config: pass
"""
DISPATCHERS = {
    "deepep": """
try:
    from deep_ep import Buffer, Config
    from {kernels} import sglang_per_token_group_quant_fp8
    use_deepep = True
except ImportError:
    use_deepep = False
""",
    "deepep_v2": """
sglang_per_token_group_quant_fp8 = None
try:
    from deep_ep import ElasticBuffer
    use_deepep_v2 = True
except ImportError:
    use_deepep_v2 = False
if use_deepep_v2:
    from {kernels} import sglang_per_token_group_quant_fp8
""",
}
"""How SGLang's modules import DeepEP."""


@pytest.fixture
def modules(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """Restores all modules named here afterwards. The plugin is enabled."""
    from ep_ops.integrations import deep_ep  # noqa: F401  stays imported

    def named() -> list[str]:
        return [name for name in sys.modules if name.split(".")[0] in ("deep_ep", "sglang", "vllm")]

    before = {name: sys.modules.pop(name) for name in named()}
    monkeypatch.setenv("EP_OPS_DEEP_EP", "1")
    yield monkeypatch
    for name in named():
        del sys.modules[name]
    sys.modules.update(before)


def _sglang(version: str) -> dict[str, Any]:
    """Import stand-ins of SGLang's dispatchers and return their variables."""
    kernels = KERNELS[version]
    parts = kernels.split(".")
    for end in range(1, len(parts)):
        sys.modules[".".join(parts[:end])] = types.ModuleType("package")
    sys.modules[kernels] = types.ModuleType(kernels)
    sys.modules[kernels].sglang_per_token_group_quant_fp8 = "quantize"  # type: ignore[attr-defined]
    found = {}
    for name, source in DISPATCHERS.items():
        module = sys.modules[f"{TOKEN_DISPATCHER}.{name}"] = types.ModuleType(name)
        exec(source.format(kernels=kernels), vars(module))
        found[name] = module
    return found


def _uses(dispatchers: dict[str, Any]) -> list[Any]:
    v1, v2 = dispatchers["deepep"], dispatchers["deepep_v2"]
    if not v1.use_deepep or not v2.use_deepep_v2:
        return [v1.use_deepep, v2.use_deepep_v2]
    assert v1.sglang_per_token_group_quant_fp8 == v2.sglang_per_token_group_quant_fp8 == "quantize"
    return [
        sys.modules[kind.__module__].__name__.partition(".")[0] for kind in (v1.Buffer, v1.Config, v2.ElasticBuffer)
    ]


@pytest.mark.parametrize("version", KERNELS)
@pytest.mark.parametrize("installed", [False, True])
@pytest.mark.parametrize("imported", [False, True])
def test_dispatchers_of_sglang_use_ep_ops(
    version: str, installed: bool, imported: bool, tmp_path: Path, modules: pytest.MonkeyPatch
) -> None:
    """SGLang requires DeepEP, and its spawned schedulers import it before they call plugins."""
    if installed:
        (tmp_path / "deep_ep").mkdir()
        (tmp_path / "deep_ep" / "__init__.py").write_text(DEEP_EP)
        (tmp_path / "deep_ep" / "utils.py").write_text("")
        modules.syspath_prepend(tmp_path)
    if imported:
        dispatchers = _sglang(version)
        assert _uses(dispatchers) == (["deep_ep"] * 3 if installed else [False, False])
        plugins.stand_in_for_deep_ep()
    else:
        plugins.stand_in_for_deep_ep()
        dispatchers = _sglang(version)
    for _ in range(2):
        assert _uses(dispatchers) == ["ep_ops"] * 3
        assert importlib.import_module("deep_ep").__name__ == OURS
        assert importlib.import_module("deep_ep.utils").__name__ == f"{OURS}.utils"
        plugins.stand_in_for_deep_ep()  # again


@pytest.mark.parametrize("kind", ["Buffer", "ElasticBuffer"])
def test_a_buffer_of_deep_ep_exists(kind: str, tmp_path: Path, modules: pytest.MonkeyPatch) -> None:
    (tmp_path / "deep_ep").mkdir()
    (tmp_path / "deep_ep" / "__init__.py").write_text(DEEP_EP)
    (tmp_path / "deep_ep" / "utils.py").write_text("")
    modules.syspath_prepend(tmp_path)
    dispatchers = _sglang("0.5.23")
    real = sys.modules["deep_ep"]
    buffer = getattr(real, kind)()
    with pytest.raises(RuntimeError, match=r"DeepEP \(.*deep_ep.__init__.py\) has created a buffer in this process"):
        plugins.stand_in_for_deep_ep()
    assert _uses(dispatchers) == ["deep_ep"] * 3 and sys.modules["deep_ep"] is real
    del buffer
    modules.setenv("EP_OPS_DEEP_EP_MAX_TOKENS", "0")
    with pytest.raises(ValueError, match="EP_OPS_DEEP_EP_MAX_TOKENS is '0'"):
        plugins.stand_in_for_deep_ep()
    assert _uses(dispatchers) == ["deep_ep"] * 3 and sys.modules["deep_ep"] is real


def test_vllm_decided_before_the_plugin(modules: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder) -> None:
    plugins.stand_in_for_deep_ep()
    assert not recwarn.list
    name = "vllm.model_executor.layers.fused_moe.all2all_utils"
    sys.modules[name] = types.ModuleType(name)
    plugins.stand_in_for_deep_ep()  # vLLM imported it afterwards
    assert not recwarn.list
    del sys.modules["deep_ep"]
    with pytest.warns(RuntimeWarning, match="before ep_ops' plugin ran, so its deepep backends do not use ep_ops"):
        plugins.stand_in_for_deep_ep()


@pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="needs SGLang")
@pytest.mark.parametrize("installed", [False, True])
def test_a_spawned_scheduler_of_sglang(installed: bool, metadata: Path, tmp_path: Path) -> None:
    if installed:
        (metadata / "deep_ep").mkdir()
        (metadata / "deep_ep" / "__init__.py").write_text(DEEP_EP)
        (metadata / "deep_ep" / "utils.py").write_text("")
    path = os.pathsep.join([str(metadata), str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "EP_OPS_DEEP_EP": "1", "PYTHONPATH": path}
    environment["SGLANG_IS_FLASHINFER_AVAILABLE"] = "false"
    environment.pop("PYTHONDONTWRITEBYTECODE", None)  # two processes import SGLang
    command = [sys.executable, str(ROOT / "tests" / "clients" / "run_sglang_scheduler.py")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, env=environment)
    found = json.loads(done.stdout.splitlines()[-1])
    assert found.pop("deep_ep") == OURS and "deepep" in found, done.stderr
    for use, *names in found.values():
        assert use is True and all(name.startswith(OURS) for name in names), found
