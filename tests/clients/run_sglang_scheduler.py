"""Print as JSON which deep_ep module a spawned scheduler of SGLang imports. Needs SGLang, but no GPU.

    EP_OPS_DEEP_EP=1 python tests/clients/run_sglang_scheduler.py

The process is started as SGLang starts it: its target is a function of SGLang, so it imports SGLang's modules first and
calls plugins then. It ends with an AttributeError afterwards, because it gets no server arguments.
"""

import atexit
import inspect
import json
import multiprocessing
import sys


def report() -> None:
    found = {"deep_ep": getattr(sys.modules.get("deep_ep"), "__name__", None)}
    for name, names in (("deepep", ("Buffer", "Config")), ("deepep_v2", ("ElasticBuffer",))):
        module = sys.modules.get(f"sglang.srt.layers.moe.token_dispatcher.{name}")
        if module is not None:
            found[name] = [getattr(module, f"use_{name}"), *(getattr(module, n, None).__module__ for n in names)]
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    from sglang.srt.managers.scheduler import run_scheduler_process

    arguments = (None,) * len(inspect.signature(run_scheduler_process).parameters)
    child = multiprocessing.get_context("spawn").Process(target=run_scheduler_process, args=arguments)
    child.start()
    child.join()
else:  # the child imports this file before its target
    atexit.register(report)
