//! Does the trainer, unchanged, train on GPUs? The tiny model on emulated machines of both lane counts: gradients, and the losses and gradient
//! norms of PyTorch + PEFT, within the tolerances of the CPU's own test (`tests/tests/golden_tiny.rs`).

use std::sync::Arc;
use zrt_kernels::Device;
use zrt_simt::testing::can_run;
use zrt_simt::{SimtDevice, SimtOptions};
use zrt_tests::tiny::{MakeDevice, check_gradients, check_training, first_batch};

fn on_both(run: impl Fn(&MakeDevice)) {
    if !can_run() {
        return;
    }
    for arch in ["sm_90", "gfx942"] {
        println!("emulated {arch}");
        run(&move || -> Arc<dyn Device> { SimtDevice::new(SimtOptions { arch, ..Default::default() }).unwrap() });
    }
}

#[test]
fn lora() {
    let batch = first_batch("tiny_lora");
    on_both(|device| {
        check_gradients("tiny_lora", "adapter_random", "grads_random.safetensors", "random_adapter_loss", (&batch, &batch), device);
        check_training("tiny_lora", 3, 1e-2, false, device);
    });
}

#[test]
fn full() {
    let batch = first_batch("tiny_full");
    on_both(|device| {
        check_gradients("tiny_full", "adapter_init", "grads.safetensors", "first_batch_loss", (&batch, &batch), device);
        check_training("tiny_full", 3, 1e-3, true, device);
    });
}
