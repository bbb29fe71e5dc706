"""Entry points for vLLM and SGLang: a spawned worker process finds ep_ops in the place of DeepEP and dispatches."""

from __future__ import annotations

import configparser
import importlib
import importlib.util
import multiprocessing
import os
import sys
import tempfile
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
DECLARED = tomllib.loads((Path(__file__).resolve().parents[2] / "pyproject.toml").read_text())["project"]


def _worker(rank: int, group: str, file: str, queue: Any) -> None:
    """What a worker of either framework does: run all plugins, by its own loader if it is installed, then import DeepEP
    and use it."""
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


def test_both_groups_name_the_same_function() -> None:
    for group in LOADERS:
        (value,) = DECLARED["entry-points"][group].values()
        assert EntryPoint("ep_ops", value, group).load() is plugins.stand_in_for_deep_ep


def test_without_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    for value in ("", "0"):
        monkeypatch.setenv("EP_OPS_DEEP_EP", value)
        plugins.stand_in_for_deep_ep()
        assert "deep_ep" not in sys.modules
    monkeypatch.setenv("EP_OPS_DEEP_EP", "yes")
    with pytest.raises(ValueError, match="EP_OPS_DEEP_EP is 'yes'; allowed: 0, or 1"):
        plugins.stand_in_for_deep_ep()
