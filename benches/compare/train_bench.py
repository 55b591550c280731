"""Throughput/memory of fine-tuning SmolLM2-135M on CPU: plain, DDP, FSDP2, DeepSpeed.
single:  LAUNCH_TS=$(date +%s.%N) OMP_NUM_THREADS=2 python train_bench.py --backend single ...
2 ranks: LAUNCH_TS=... OMP_NUM_THREADS=1 torchrun --nproc-per-node 2 train_bench.py --backend ddp ...
"""
import argparse, json, os, sys, time, statistics as st
T0 = float(os.environ.get("LAUNCH_TS", time.time()))
ap = argparse.ArgumentParser()
ap.add_argument("--backend", required=True, choices=["single", "ddp", "fsdp2", "ds0", "ds1", "ds2", "ds3", "ds3off"])
ap.add_argument("--mode", default="lora"); ap.add_argument("--dtype", default="bf16", help="fp32 | bf16 (autocast) | purebf16")
ap.add_argument("--mb", type=int, default=4); ap.add_argument("--seq", type=int, default=512)
ap.add_argument("--steps", type=int, default=7); ap.add_argument("--warm", type=int, default=2)
ap.add_argument("--compile", action="store_true"); ap.add_argument("--ckpt", action="store_true")
ap.add_argument("--attn", default="sdpa"); ap.add_argument("--out"); ap.add_argument("--tag", default="")
ap.add_argument("--fused", type=int, default=1); ap.add_argument("--model", default="models/smollm2-135m")
ap.add_argument("--freeze", default=None)
ap.add_argument("--dist", default="gloo")
a, _ = ap.parse_known_args()
import torch, torch.distributed as dist
import transformers
transformers.utils.logging.set_verbosity_error(); transformers.utils.logging.disable_progress_bar()
from transformers import AutoModelForCausalLM
t_import = time.time() - T0
rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", 2)))
torch.manual_seed(0)
bf16, pure, fp32 = a.dtype == "bf16", a.dtype == "purebf16", a.dtype == "fp32"
is_ds = a.backend.startswith("ds")
if world > 1 or is_ds:
    if is_ds:
        import deepspeed
        deepspeed.init_distributed(dist_backend=a.dist)
    else:
        dist.init_process_group(a.dist)
# LoRA: the frozen base is kept in bf16 for bf16 runs (PEFT keeps adapters in fp32). Full: fp32 master weights + autocast.
base_dt = torch.float32 if fp32 or (bf16 and a.mode == "full") or (bf16 and a.backend == "fsdp2") else torch.bfloat16
if is_ds and bf16 and a.mode == "full": base_dt = torch.bfloat16
model = AutoModelForCausalLM.from_pretrained(a.model, dtype=base_dt, attn_implementation=a.attn)
model.config.use_cache = False
if a.mode == "lora":
    from peft import LoraConfig, get_peft_model
    model = get_peft_model(model, LoraConfig(r=16, lora_alpha=32, lora_dropout=0.0, task_type="CAUSAL_LM",
        target_modules=["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]),
        autocast_adapter_dtype=not pure)
if a.ckpt:
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    if a.mode == "lora": model.enable_input_require_grads()
model.train()
amp = bf16 and a.backend in ("single", "ddp")
core = model
if a.backend == "ddp":
    from torch.nn.parallel import DistributedDataParallel as DDP
    model = DDP(model, gradient_as_bucket_view=True, static_graph=a.ckpt)
elif a.backend == "fsdp2":
    from torch.distributed.fsdp import fully_shard, MixedPrecisionPolicy
    from torch.distributed.device_mesh import init_device_mesh
    mesh = init_device_mesh("cpu", (world,))
    kw = {"mesh": mesh}
    if bf16: kw["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    layers = (model.base_model.model if a.mode == "lora" else model).model.layers
    for l in layers: fully_shard(l, **kw)
    fully_shard(model, **kw)
params = [p for p in model.parameters() if p.requires_grad]
nparam = sum(p.numel() for p in params)
if is_ds:
    stage = 3 if a.backend.startswith("ds3") else int(a.backend[2:])
    z = {"stage": stage, "overlap_comm": False, "contiguous_gradients": True}
    if a.backend == "ds3off": z.update(offload_optimizer={"device": "cpu"}, offload_param={"device": "cpu"})
    cfg = {"train_micro_batch_size_per_gpu": a.mb, "gradient_accumulation_steps": 1, "zero_optimization": z,
           "zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": a.backend == "ds3off",
           "steps_per_print": 10**9}
    if bf16 or pure: cfg["bf16"] = {"enabled": True}
    if a.backend == "ds3off":
        from deepspeed.ops.adam import DeepSpeedCPUAdam
        opt = DeepSpeedCPUAdam(params, lr=2e-4, weight_decay=0.01, adamw_mode=True)
    else:
        opt = torch.optim.AdamW(params, lr=2e-4, weight_decay=0.01, fused=bool(a.fused))
    engine, opt, _, _ = deepspeed.initialize(model=model, optimizer=opt, config=cfg, dist_init_required=False)
else:
    opt = torch.optim.AdamW(params, lr=2e-4 if a.mode == "lora" else 1e-5, weight_decay=0.01, fused=bool(a.fused))
if a.compile: model = torch.compile(model)
from safetensors.torch import load_file
pool = load_file("tests/golden/smollm2_lora/tokens.safetensors")["input_ids"].flatten()
need = a.mb * a.seq
def batch(s):
    o = ((s * world + rank) * need) % (pool.numel() - need)
    return pool[o:o + need].view(a.mb, a.seq)
times, losses = [], []
t_ready = time.time() - T0; t_first = None
# Said as they happen, so that a run that is ended early still tells what it reached.
if rank == 0: print(f"READY {t_ready:.3f}", flush=True)
for s in range(a.steps):
    x = batch(s)
    t = time.perf_counter()
    if is_ds:
        loss = engine(input_ids=x, labels=x).loss
        engine.backward(loss); engine.step()
    else:
        opt.zero_grad(set_to_none=True)
        with torch.autocast("cpu", torch.bfloat16, enabled=amp):
            loss = model(input_ids=x, labels=x).loss
        loss.backward()
        opt.step()
    v = loss.item()
    if world > 1: dist.barrier()
    times.append(time.perf_counter() - t); losses.append(v)
    if rank == 0: print(f"STEP {s} {times[-1]:.4f}", flush=True)
    if t_first is None: t_first = time.time() - T0
stat = dict(l.split(":", 1) for l in open("/proc/self/status") if ":" in l)
mib = lambda k: int(stat[k].split()[0]) / 1024
tm = times[a.warm:]
r = {"backend": a.backend, "mode": a.mode, "dtype": a.dtype, "mb": a.mb, "seq": a.seq, "world": world, "threads": torch.get_num_threads(),
     "compile": a.compile, "ckpt": a.ckpt, "tag": a.tag, "trainable": nparam, "tok_s": world * need / st.median(tm), "tok_s_best": world * need / min(tm),
     "tok_s_worst": world * need / max(tm), "step_s": [round(t, 3) for t in times], "loss": [round(l, 4) for l in losses], "import_s": round(t_import, 2),
     "ready_s": round(t_ready, 2), "first_step_s": round(t_first, 2), "peak_rss_mib": round(mib("VmHWM")), "rss_anon_mib": round(mib("RssAnon")), "rss_file_mib": round(mib("RssFile"))}
if world > 1:
    g = [None] * world
    dist.all_gather_object(g, r["peak_rss_mib"]); r["peak_rss_ranks"] = g
if rank == 0:
    print("RESULT", json.dumps(r), flush=True)
    if a.out: open(a.out, "a").write(json.dumps(r) + "\n")
if dist.is_initialized(): dist.destroy_process_group()
