//! Is the bench for real GPUs right, as far as a machine without one can tell? Its checks run on the emulator instead, and the text that
//! PyTorch's side hands over is read.

use zrt_kernels::cpu::{CpuDevice, CpuOptions, Mode};
use zrt_simt::bench::checks::{Host, Outcome, TOLERANCE, check, checked};
use zrt_simt::bench::times::{Peers, cases};
use zrt_simt::{SimtDevice, SimtOptions, testing};

#[test]
fn its_checks_pass_on_emulated_machines() {
    if !testing::can_run() {
        return;
    }
    let options = CpuOptions { threads: 1, mode: Mode::Threaded, track: false, trace: false };
    let cpu = Host::new(CpuDevice::new(options).expect("a CPU")).expect("a stream");
    for arch in ["sm_90", "gfx942"] {
        let device = SimtDevice::new(SimtOptions { arch, ..Default::default() }).expect("an emulated GPU");
        let device = Host::new(device).expect("a stream");
        let mut agreed = 0;
        for case in checked(false) {
            match check(&case, &device, &cpu).unwrap_or_else(|e| panic!("{} {}: {e}", case.op, case.sizes)) {
                Outcome::Distance(d) => {
                    assert!(d <= TOLERANCE, "{arch}: {} {}: off by {d:e}", case.op, case.sizes);
                    agreed += 1;
                }
                Outcome::Failed(e) => panic!("{arch}: {} {}: {e}", case.op, case.sizes),
            }
        }
        assert!(agreed >= 10, "{agreed} calls");
    }
}

#[test]
fn every_timed_call_has_a_name_of_its_own() {
    let mut names: Vec<String> = cases().iter().map(|c| format!("{}\t{}", c.op, c.sizes)).collect();
    let all = names.len();
    names.sort();
    names.dedup();
    assert_eq!(names.len(), all);
}

#[test]
fn the_best_peer_counts() {
    let peers = Peers::parse("rmsnorm\t2 x 4\t10.5\ttorch\nrmsnorm\t2 x 4\t7.25\tliger\nnonsense\n");
    assert_eq!(peers.best("rmsnorm", "2 x 4"), Some((7.25, "liger")));
    assert_eq!(peers.best("rmsnorm", "2 x 5"), None);
}
