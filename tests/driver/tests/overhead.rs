//! What does an operation cost the host? Time on a launch path where the driver does nothing, at most 10 us so that small models are not
//! bound by the host. The figure is for optimized builds (`benches/gpu.sh` prints it); here it is only asked for.

mod common;

use zrt_kernels::gpu::driver::{Libraries, Vendor};
use zrt_kernels::gpu::probe;
use zrt_simt::bench::gpu::overhead_ns;

#[test]
fn the_host_path_is_timed() {
    if !common::inside("the_host_path_is_timed", "null=1") {
        return;
    }
    let library = zrt_driver::library().expect("the emulated driver");
    let libraries = Libraries { driver: Some(library.clone()), compiler: Some(library), ..Libraries::default() };
    for vendor in Vendor::ALL {
        let device = probe::open(vendor, &libraries, 0).expect("a device");
        let ns = overhead_ns(&device, 20_000).expect("operations that run");
        assert!(ns.is_finite() && ns > 0.0, "{ns}");
        println!("{}: {:.2} us an operation on the host", vendor.kind(), ns / 1e3);
    }
}
