//! Which settings of the library does practice recommend? They are environment variables, read when it starts, so whoever starts the ranks sets
//! them; a rank only says what is missing.

use zrt_kernels::gpu::driver::Vendor;

/// (variable, value, reason).
const AMD: [(&str, &str, &str); 1] = [("HSA_NO_SCRATCH_RECLAIM", "1", "RCCL is known to hang without it since ROCm 7.1")];
const AMD_FEW: [(&str, &str, &str); 1] =
    [("NCCL_MIN_NCHANNELS", "32", "with fewer than 8 GPUs the default leaves bandwidth of the links unused")];

fn settings(vendor: Vendor, gpus: usize) -> impl Iterator<Item = (&'static str, &'static str, &'static str)> {
    let (always, few) = match vendor {
        Vendor::Nvidia => (&[][..], &[][..]),
        Vendor::Amd => (&AMD[..], &AMD_FEW[..]),
    };
    always.iter().chain(few.iter().filter(move |_| gpus < 8)).copied()
}

/// Variables to set for ranks of a job of `gpus` GPUs on a host, where the user has not set them.
pub fn recommended_env(vendor: Vendor, gpus: usize) -> Vec<(&'static str, &'static str)> {
    settings(vendor, gpus).map(|(name, value, _)| (name, value)).collect()
}

/// Says what is set and what is not.
pub(super) fn log(vendor: Vendor, gpus: usize) {
    for (name, value, reason) in settings(vendor, gpus) {
        match std::env::var(name) {
            Ok(set) if set == value => tracing::info!("{name}={set}: {reason}"),
            Ok(set) => tracing::info!("{name}={set} is kept; {value} is usual: {reason}"),
            Err(_) => tracing::warn!("{name} is not set, expected {value}: {reason}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn few_amd_gpus_get_more_channels() {
        let names = |vendor, gpus| recommended_env(vendor, gpus).into_iter().map(|(name, _)| name).collect::<Vec<_>>();
        assert_eq!(names(Vendor::Amd, 2), ["HSA_NO_SCRATCH_RECLAIM", "NCCL_MIN_NCHANNELS"]);
        assert_eq!(names(Vendor::Amd, 8), ["HSA_NO_SCRATCH_RECLAIM"]);
        assert!(names(Vendor::Nvidia, 2).is_empty());
    }
}
