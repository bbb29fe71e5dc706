"""TRL's trainers on models whose experts are spread: gradients and saved weights are those of a model in one piece."""

from __future__ import annotations

import functools
import pathlib
from typing import Any

import pytest

pytest.importorskip("trl", reason="needs TRL, which is not installed")

import torch
import torch.distributed as dist
from ranks import run_ranks
from torch.distributed.tensor import DTensor
from transformers_cases import as_by_torchrun, made

import ep_ops
from ep_ops.nn import expert_parameters, keep_experts_apart

WORDS = 64  # of the models
SAMPLES = [[3 + (7 * i + j * j) % 61 for j in range(5 + i % 8)] for i in range(16)]


def tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(WORDS)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="w0", eos_token="w2", unk_token="w0")


def trained(kind: str, folder: str, spread: bool) -> tuple[Any, list[dict[str, torch.Tensor]]]:
    """Return the model after two steps, and the gradients of each step."""
    import trl
    from datasets import Dataset

    from ep_ops.integrations.transformers import spread_experts

    # Many tokens end a sequence, so ranks generate for different numbers of steps.
    stops = {"max_completion_length": 8, "num_generations": 4, "generation_kwargs": {"eos_token_id": [*range(2, 40)]}}
    args = getattr(trl, f"{kind}Config")(
        folder, use_cpu=True, bf16=False, per_device_train_batch_size=4, max_steps=2, max_grad_norm=0.0, report_to=[],
        save_strategy="no", disable_tqdm=True, learning_rate=0.1, **(stops if kind == "GRPO" else {}),
    )  # fmt: skip
    _ = args.device
    model = made("qwen3_moe", "grouped_mm")
    if spread:
        spread_experts(model, max_tokens_per_rank=4 * 32)
        keep_experts_apart(model, dist.get_world_size())
        model.generate = functools.partial(model.generate, synced_gpus=True)
    experts = expert_parameters(model)
    others = [p for p in model.parameters() if all(p is not expert for expert in experts)]
    optimizer = torch.optim.SGD([{"params": p} for p in (experts, others) if p], lr=0.1)
    steps: list[dict[str, torch.Tensor]] = []

    class Noting(getattr(trl, f"{kind}Trainer")):  # type: ignore[misc]
        def training_step(self, *given: Any, **more: Any) -> Any:
            loss = super().training_step(*given, **more)
            steps.append(
                {name: whole(p.grad).clone() for name, p in self.model.named_parameters() if p.grad is not None}
            )
            return loss

    if kind == "SFT":
        data, more = {"input_ids": SAMPLES}, {}
    else:
        data = {"prompt": [" ".join(f"w{word}" for word in sample) for sample in SAMPLES]}
        more = {"reward_funcs": lambda completion_ids, **_: [float(sum(ids)) for ids in completion_ids]}
    Noting(
        model=model, args=args, train_dataset=Dataset.from_dict(data), processing_class=tokenizer(),
        optimizers=(optimizer, None), **more,
    ).train()  # fmt: skip
    return model, steps


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def compared(kind: str, folder: str) -> None:
    from transformers import AutoModelForCausalLM

    with as_by_torchrun():
        model, steps = trained(kind, folder, True)
        dense, expected = trained(kind, folder, False)
        assert len(steps) == len(expected) == 2
        for at, (got, wanted) in enumerate(zip(steps, expected, strict=True)):
            assert got.keys() == wanted.keys() and sum("experts" in name for name in got) == 4
            for name, grad in wanted.items():
                assert bool(grad.any()), name
                torch.testing.assert_close(
                    got[name], grad, rtol=1e-3, atol=1e-5, msg=lambda text, of=(at, name): f"{of}: {text}"
                )
        saved = f"{folder}/saved"
        model.save_pretrained(saved)
        dist.barrier()
        for p, q in zip(AutoModelForCausalLM.from_pretrained(saved).parameters(), dense.parameters(), strict=True):
            torch.testing.assert_close(p, q, rtol=1e-3, atol=1e-5)
    for comm in list(ep_ops.registry.living.values()):
        comm.destroy()


@pytest.mark.parametrize("kind", ["SFT", "GRPO"])
def test_trainers(kind: str, tmp_path: pathlib.Path) -> None:
    run_ranks(2, compared, kind, str(tmp_path))
