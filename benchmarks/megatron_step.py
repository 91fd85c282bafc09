"""Steps of a preset by Megatron-Core on one GPU, for comparison; ``vs_megatron.py`` runs it.

``python benchmarks/megatron_step.py h200-fine --data tokens.bin --settings fused,cutlass --out result.json``. Needs
megatron-core and transformer-engine. The model, batch, data, optimizer and clipping are those of ``moeplan run``; the
settings are Megatron's fastest for a GPU alone: TE layers, grouped GEMM, fused permutation, router, RoPE, SwiGLU and
cross entropy, fp32 main gradients in a distributed optimizer.
"""

import argparse
import json
import os
import socket
import statistics
import time
from pathlib import Path
from typing import Any

SEQ_LEN, MICRO_BATCH, NUM_MICRO_BATCHES = 4096, 4, 8
# What may follow --settings: environment or configuration that is not always fastest, or not always runs.
ENVIRONMENT = {"cutlass": {"NVTE_USE_CUTLASS_GROUPED_GEMM": "1"}}
SETTINGS = ("fused", "cutlass", "flash", "fp8", "fp8_blockwise")


def main() -> None:
    """Train, time each step, write one JSON object."""
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("--data", required=True, help="flat file of 16-bit token ids")
    parser.add_argument("--settings", default="", help=f"any of {', '.join(SETTINGS)}")
    parser.add_argument("--steps", type=int, default=13)
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--layers", type=int, help="fewer than the model has, to try things out")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    settings = [one for one in options.settings.split(",") if one]
    if unknown := set(settings) - set(SETTINGS):
        parser.error(f"unknown settings {sorted(unknown)}; known: {', '.join(SETTINGS)}")
    os.environ.update({"CUDA_DEVICE_MAX_CONNECTIONS": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": _free_port()})
    for one in settings:
        os.environ.update(ENVIRONMENT.get(one, {}))
    result = _run(options, settings)
    options.out.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


def _free_port() -> str:
    """So that two GPUs of a host can each run one."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return str(one.getsockname()[1])


def _run(options: argparse.Namespace, settings: list[str]) -> dict[str, Any]:
    import torch  # after the environment is set

    from moeplan.flops import training_flops_per_token
    from moeplan.presets import load_model

    spec = load_model(options.model)
    if options.layers:
        spec = spec.model_copy(update={"num_layers": options.layers})
    torch.cuda.set_device(0)
    torch.distributed.init_process_group("nccl", rank=0, world_size=1, device_id=torch.device("cuda", 0))
    step = _Megatron(spec, settings, options.data)
    times_s, losses = [], []
    for number in range(options.steps):
        torch.cuda.synchronize()
        start_s = time.perf_counter()
        losses.append(step(number))
        torch.cuda.synchronize()
        times_s.append(time.perf_counter() - start_s)
    step_s = statistics.median(times_s[options.warmup :])
    tokens = SEQ_LEN * MICRO_BATCH * NUM_MICRO_BATCHES
    torch.distributed.destroy_process_group()
    return {
        "engine": "megatron-core",
        "model": spec.name,
        "settings": settings,
        "step_s": step_s,
        "step_times_s": times_s,
        "tokens_per_s_per_gpu": tokens / step_s,
        "model_tflops_per_gpu": tokens / step_s * training_flops_per_token(spec, SEQ_LEN) / 1e12,
        "peak_allocated_bytes": torch.cuda.max_memory_allocated(),
        "losses": losses,
    }


class _Megatron:
    """A model in Megatron's DDP with its optimizer; a call is one step."""

    def __init__(self, spec: Any, settings: list[str], data: str) -> None:
        import torch
        from megatron.core import parallel_state, tensor_parallel
        from megatron.core.distributed import (
            DistributedDataParallel,
            DistributedDataParallelConfig,
            finalize_model_grads,
        )
        from megatron.core.models.gpt.gpt_layer_specs import (
            get_gpt_layer_with_transformer_engine_spec,
        )
        from megatron.core.models.gpt.gpt_model import GPTModel
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
        from megatron.core.pipeline_parallel import get_forward_backward_func
        from megatron.core.tensor_parallel import layers
        from megatron.core.transformer.module import Float16Module

        parallel_state.initialize_model_parallel()
        tensor_parallel.model_parallel_cuda_manual_seed(1234)
        # Apex has the kernel of the head alone; every other layer is TE's, which needs none.
        layers._grad_accum_fusion_available = True
        config = _config(spec, settings)
        model = GPTModel(
            config,
            get_gpt_layer_with_transformer_engine_spec(spec.moe.num_experts, moe_grouped_gemm=True),
            spec.vocab_size,
            SEQ_LEN,
            position_embedding_type="rope",
            rotary_base=int(spec.rope_theta),
        ).cuda()
        model.output_layer.gradient_accumulation_fusion = False
        ddp = DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=True)
        self.model = DistributedDataParallel(config, ddp, Float16Module(config, model))
        optimizer = OptimizerConfig(
            optimizer="adam", lr=3e-4, weight_decay=0.1, adam_beta1=0.9, adam_beta2=0.95, clip_grad=1.0, bf16=True,
            params_dtype=torch.bfloat16, use_distributed_optimizer=True,
        )  # fmt: skip
        self.optimizer = get_megatron_optimizer(optimizer, [self.model], use_gloo_process_groups=False)
        config.finalize_model_grads_func = finalize_model_grads
        config.grad_scale_func = self.optimizer.scale_loss
        self.run, self.tokens = get_forward_backward_func(), _tokens(data, spec.vocab_size)

    def __call__(self, number: int) -> float:
        self.model.zero_grad_buffer()
        self.optimizer.zero_grad()
        losses = self.run(
            forward_step_func=_forward,
            data_iterator=iter(self.tokens(number)),
            model=self.model,
            num_microbatches=NUM_MICRO_BATCHES,
            seq_length=SEQ_LEN,
            micro_batch_size=MICRO_BATCH,
        )
        self.optimizer.step()
        return sum(float(one["loss"]) for one in losses) / len(losses)


def _config(spec: Any, settings: list[str]) -> Any:
    import torch
    from megatron.core.transformer.enums import AttnBackend
    from megatron.core.transformer.transformer_config import TransformerConfig

    is_fp8 = any(one.startswith("fp8") for one in settings)
    more: dict[str, Any] = {}
    if is_fp8:
        more = {"fp8": "hybrid", "fp8_recipe": "blockwise" if "fp8_blockwise" in settings else "tensorwise"}
        if spec.moe is not None:
            more["moe_router_padding_for_quantization"] = True
    return TransformerConfig(
        num_layers=spec.num_layers,
        hidden_size=spec.hidden_size,
        num_attention_heads=spec.attention.num_heads,
        num_query_groups=spec.attention.num_kv_heads,
        kv_channels=spec.attention.head_dim,
        ffn_hidden_size=spec.moe.expert_ffn_size,
        moe_ffn_hidden_size=spec.moe.expert_ffn_size,
        num_moe_experts=spec.moe.num_experts,
        moe_router_topk=spec.moe.top_k,
        moe_aux_loss_coeff=spec.moe.router.aux_loss_coeff,
        moe_router_load_balancing_type="aux_loss",
        moe_token_dispatcher_type="alltoall",
        moe_grouped_gemm=True,
        moe_permute_fusion=True,
        moe_router_fusion=not is_fp8,
        normalization="RMSNorm",
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        bias_activation_fusion=True,
        add_bias_linear=False,
        apply_rope_fusion=True,
        cross_entropy_loss_fusion=True,
        cross_entropy_fusion_impl="te",
        gradient_accumulation_fusion="fused" in settings,
        # cuDNN's, which TE takes where no FlashAttention is installed; "flash" leaves it the choice.
        attention_backend=AttnBackend.auto if "flash" in settings else AttnBackend.fused,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        attention_softmax_in_fp32=False,
        bf16=True,
        params_dtype=torch.bfloat16,
        pipeline_dtype=torch.bfloat16,
        **more,
    )


def _forward(batches: Any, model: Any) -> tuple[Any, Any]:
    tokens, targets, positions = next(batches)
    loss = model(tokens, positions, None, labels=targets)

    def mean(output: Any) -> tuple[Any, dict[str, Any]]:
        value = output.float().mean()
        return value, {"loss": value.detach().clone()}  # the schedule divides the value itself

    return loss, mean


def _tokens(path: str, vocab_size: int) -> Any:
    """The batch of a step: consecutive sequences of the file, from the start again at its end."""
    import torch

    ids = torch.from_file(path, size=Path(path).stat().st_size // 2, dtype=torch.uint16).to(torch.int64).cuda()
    assert int(ids.max()) < vocab_size
    positions = torch.arange(SEQ_LEN, device="cuda").expand(MICRO_BATCH, -1).contiguous()

    def batch(number: int) -> list[tuple[Any, Any, Any]]:
        batches = []
        for index in range(NUM_MICRO_BATCHES):
            places = (number * NUM_MICRO_BATCHES + index) * MICRO_BATCH + torch.arange(MICRO_BATCH, device="cuda")
            starts = places % ((len(ids) - 1) // SEQ_LEN) * SEQ_LEN
            at = starts[:, None] + torch.arange(SEQ_LEN, device="cuda")
            batches.append((ids[at], ids[at + 1], positions))
        return batches

    return batch


if __name__ == "__main__":
    main()
