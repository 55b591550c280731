//! What DeepSpeed's own estimator (`estimate_zero2_model_states_mem_needs`, `estimate_zero3_...`) would say of the same job, for a
//! column beside ours. Model states only: no activations, frozen weights counted as trained, `1.5` for buffers on the host.

use serde::Serialize;

/// Bytes by DeepSpeed's formulas.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Estimate {
    /// Of each device.
    pub device_bytes: f64,
    /// Of each host.
    pub host_bytes: f64,
}

/// What the estimator asks for.
#[derive(Clone, Copy, Debug)]
pub struct Question {
    /// ZeRO stage; below 2 the estimator has no answer.
    pub stage: u8,
    /// All parameters.
    pub parameters: f64,
    /// Parameters of the largest single tensor's module.
    pub largest: f64,
    /// Devices of a host.
    pub devices: f64,
    /// Hosts.
    pub hosts: f64,
    /// `offload_param`.
    pub offload_param: bool,
    /// `offload_optimizer`.
    pub offload_optimizer: bool,
}

const BUFFERS: f64 = 1.5;

/// The estimate with `zero.Init`, as the estimator prints it.
pub fn estimate(q: Question) -> Option<Estimate> {
    let (p, live, all) = (q.parameters, 4.0 * q.largest, q.devices * q.hosts);
    let (device_bytes, host_bytes) = match (q.stage, q.offload_param, q.offload_optimizer) {
        (2, _, false) => (2.0 * p + 18.0 * p / all, 4.0 * p * q.devices * BUFFERS),
        (2, _, true) => (2.0 * p, (4.0 * all).max(16.0) * p * BUFFERS),
        (3, false, false) => (live + 18.0 * p / all, live * q.devices * BUFFERS),
        (3, false, true) => (live + 2.0 * p / all, 16.0 * p / q.hosts * BUFFERS),
        (3, true, _) => (live, 18.0 * p / q.hosts * BUFFERS),
        _ => return None,
    };
    Some(Estimate { device_bytes, host_bytes })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn formulas_are_those_of_the_estimator() {
        // Its documentation's example: 2.851 G parameters, largest layer 32 M, 8 GPUs of one host.
        let q = Question {
            stage: 3,
            parameters: 2851e6,
            largest: 32e6,
            devices: 8.0,
            hosts: 1.0,
            offload_param: true,
            offload_optimizer: true,
        };
        let gib = |b: f64| b / 2f64.powi(30);
        let e = estimate(q).unwrap();
        assert!((gib(e.host_bytes) - 71.7).abs() < 0.1 && (gib(e.device_bytes) - 0.12).abs() < 0.01);
        let e = estimate(Question { offload_param: false, ..q }).unwrap();
        assert!((gib(e.host_bytes) - 63.7).abs() < 0.1 && (gib(e.device_bytes) - 0.78).abs() < 0.01);
        let e = estimate(Question { offload_param: false, offload_optimizer: false, ..q }).unwrap();
        assert!((gib(e.host_bytes) - 1.43).abs() < 0.01 && (gib(e.device_bytes) - 6.09).abs() < 0.01);
        assert_eq!(estimate(Question { stage: 0, ..q }), None);
    }
}
