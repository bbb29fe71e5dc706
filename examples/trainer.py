"""Train a small Qwen3-MoE with transformers' Trainer, its experts spread over the ranks.

torchrun --standalone --nproc-per-node 2 examples/trainer.py
"""

import tempfile

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, Qwen3MoeConfig, Trainer, TrainingArguments

from ep_ops.integrations.transformers import spread_experts
from ep_ops.nn import expert_parameters, keep_experts_apart


def main() -> None:
    args = TrainingArguments(
        output_dir=tempfile.mkdtemp(),
        use_cpu=not torch.cuda.is_available(),
        per_device_train_batch_size=4,
        max_steps=20,
        logging_steps=1,
        report_to=[],
        disable_tqdm=True,
        max_grad_norm=0.0,  # PyTorch clips no list of both plain parameters and DTensors
        save_strategy="no",  # checkpoints during training are written by one rank; see the end
    )
    device = args.device  # initializes torch.distributed
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=64,
        hidden_size=64,
        moe_intermediate_size=32,
        num_experts=8,
        num_experts_per_tok=2,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
    )
    model = AutoModelForCausalLM.from_config(config).to(device)  # the same weights on all ranks
    spread_experts(model, max_tokens_per_rank=4 * 16)
    keep_experts_apart(model, ranks=dist.get_world_size())  # Trainer wraps the model in DistributedDataParallel

    experts = expert_parameters(model)
    others = [p for p in model.parameters() if all(p is not expert for expert in experts)]
    optimizer = torch.optim.AdamW([{"params": experts}, {"params": others}], lr=0.01)  # no group has both kinds
    text = torch.arange(256) * 7 % 61
    samples = [{"input_ids": text[i : i + 16], "labels": text[i : i + 16]} for i in range(200)]
    trainer = Trainer(model, args, train_dataset=samples, optimizers=(optimizer, None))
    trainer.train()

    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)  # on every rank; rank 0 writes a checkpoint of all experts
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    if dist.get_rank() == 0:
        print(f"{dist.get_world_size()} ranks, {len(losses)} steps: loss {losses[0]:.3f} -> {losses[-1]:.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
