//! Is every kernel run by a test? The small cases of all operations, on both lane counts, give the CPU's results, and what they launched is
//! the whole table of kernels.

use zrt_kernels::DType;
use zrt_kernels::gpu::{GpuOps, table};
use zrt_simt::cases::check;
use zrt_simt::testing::{Rig, assert_bits, can_run};
use zrt_simt::{SimtDevice, SimtOptions};

#[test]
fn every_kernel_runs_in_a_case() {
    if !can_run() {
        return;
    }
    for arch in ["sm_90", "gfx942"] {
        let device = SimtDevice::new(SimtOptions { arch, exact: true, ..Default::default() }).unwrap();
        check(&device, "").unwrap_or_else(|e| panic!("{arch}: {e}"));
        // For drivers; operations never call it.
        let rig = Rig::new(device.clone());
        let ops = GpuOps::new(device.launcher().clone());
        for dtype in [DType::F32, DType::BF16, DType::U8] {
            let out = rig.empty(1003, dtype);
            ops.fill(&out, 2.0, rig.stream()).unwrap();
            if dtype != DType::U8 {
                assert_bits(&format!("fill {dtype} on {arch}"), &rig.read(&out), &[2.0; 1003]);
            }
            rig.stream().sync().unwrap();
        }
        let launched = device.take_counters();
        let missing: Vec<_> = table::kernels().map(|k| k.name).filter(|k| !launched.contains_key(k)).collect();
        assert!(missing.is_empty(), "{arch}: no case launches {missing:?}");
    }
}
