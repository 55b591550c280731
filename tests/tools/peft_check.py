#!/usr/bin/env python3
"""Does an adapter of ours load in PEFT and mean the same there?

usage:
    peft_check.py --base DIR --adapter DIR [--logits FILE] [--merged DIR] [--tolerance 1e-4]

  --base     Hugging Face directory of the base model
  --adapter  folder with adapter_config.json and adapter_model.safetensors, as a run of zlaunch saves it
  --logits   safetensors file with `input_ids` [batch, seq] int64 and `logits` [batch, seq, vocab] f32, as our runtime computed
             them with the adapter. Without it only loading and --merged are checked.
  --merged   directory written by `zlaunch merge`: its logits must equal those of base + adapter in PEFT

Everything runs in f32 on the CPU. Checks:
  1. PEFT loads the adapter; it has taken every tensor of the file and has none that the file lacks.
  2. PEFT's logits equal --logits within the tolerance (largest absolute difference), or within twice the distance of PEFT's f32
     logits from its f64 ones, where that is more.
  3. The merged model's logits equal PEFT's within the tolerance, or, where the base is stored in 16 bits and the merge had to
     round, within what rounding PEFT's own f32 merge to that type gives, doubled; top-1 agreement is printed.
Exit code 0 if all hold, 1 otherwise. Needs torch, transformers, peft, safetensors.
"""
import argparse, sys
import torch
from peft import PeftModel
from safetensors import safe_open
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM


def load(path):
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()


def stored_dtype(path):
    import glob, os
    file = sorted(glob.glob(os.path.join(path, "model*.safetensors")))[0]
    with safe_open(file, "pt") as f:
        return f.get_tensor(next(iter(f.keys()))).dtype


def logits_of(model, ids):
    with torch.no_grad():
        return model(input_ids=ids, use_cache=False).logits


def main():
    p = argparse.ArgumentParser(description="compare an adapter of ours with PEFT")
    p.add_argument("--base", required=True)
    p.add_argument("--adapter", required=True)
    p.add_argument("--logits")
    p.add_argument("--merged")
    p.add_argument("--tolerance", type=float, default=1e-4)
    a = p.parse_args()
    failed = []

    def check(what, ok, detail):
        print(f"{'ok  ' if ok else 'FAIL'} {what}: {detail}")
        if not ok:
            failed.append(what)

    model = PeftModel.from_pretrained(load(a.base), a.adapter).eval()
    file = load_file(f"{a.adapter}/adapter_model.safetensors")
    live = {n.replace(".default", ""): t for n, t in model.state_dict().items() if ".lora_" in n}
    check("names", set(file) == set(live), f"{len(file)} tensors in the file, {len(live)} in PEFT, {len(set(file) ^ set(live))} differ")
    taken = all(n in live and torch.equal(live[n].float(), t.float()) for n, t in file.items())
    check("values", taken, "PEFT holds the file's values" if taken else "PEFT holds other values than the file")

    if a.logits:
        ref = load_file(a.logits)
        ids, want = ref["input_ids"].long(), ref["logits"].float()
    else:
        g = torch.Generator().manual_seed(0)
        ids, want = torch.randint(0, model.config.vocab_size, (2, 64), generator=g), None
    ids = ids if ids.dim() == 2 else ids[None]
    got = logits_of(model, ids)
    if want is not None:
        want = want.reshape(got.shape)
        exact = logits_of(model.double(), ids)
        model.float()
        distance = lambda x, y: (x - y).abs().max().item()
        diff, noise = distance(got, want), distance(got, exact)
        # Large logits of a deep model: where PEFT's f32 logits are themselves far from its f64 ones, twice that.
        limit = max(a.tolerance, 2 * noise)
        check("logits of the runtime", diff <= limit,
              f"largest difference {diff:.3g}, limit {limit:.3g}; from PEFT in f64: runtime {distance(want, exact):.3g}, PEFT in f32 {noise:.3g}; largest logit {got.abs().max().item():.3g}")

    if a.merged:
        merged = logits_of(load(a.merged), ids)
        diff = (merged - got).abs().max().item()
        dtype = stored_dtype(a.merged)
        limit = a.tolerance
        if dtype != torch.float32:
            reference = model.merge_and_unload()
            with torch.no_grad():
                for t in reference.parameters():
                    t.copy_(t.to(dtype).float())
            # Two f32 sums in different order may fall on either side of a rounding boundary: rarely, and then by one unit.
            ours = load(a.merged).state_dict()
            pairs = [(t.to(dtype), ours[n].to(dtype)) for n, t in reference.state_dict().items()]
            share = sum((x != y).sum().item() for x, y in pairs) / sum(x.numel() for x, _ in pairs)
            check("merged weights", share < 1e-3, f"{share:.2e} of them differ from PEFT's f32 merge rounded to {dtype}")
            limit = max(limit, 2 * (logits_of(reference, ids) - got).abs().max().item())
        top1 = (merged.argmax(-1) == got.argmax(-1)).float().mean().item()
        check("merged model", diff <= limit, f"largest difference {diff:.3g}, limit {limit:.3g} ({dtype}), top-1 agreement {top1:.4f}")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
