//! What does a fresh adapter hold? A: Kaiming-uniform with a = sqrt(5) as PEFT starts it, that is U(-1/sqrt(in), 1/sqrt(in)); B: zeros.
//!
//! Random numbers are keyed by (seed, module path, element), so the start depends neither on the rank that makes it nor on how
//! the tensor is cut.

use zrt_kernels::philox::{key_of, philox4x32, unit_f32};

/// Fills `dst` with elements `start..` of A `[r, inputs]` of the module at `path`.
pub fn init_a(dst: &mut [f32], start: usize, seed: u64, path: &str, inputs: usize) {
    let key = key_of(seed, path);
    let bound = 1.0 / (inputs as f64).sqrt();
    let mut block = usize::MAX;
    let mut words = [0u32; 4];
    for (i, value) in dst.iter_mut().enumerate() {
        let e = start + i;
        if e / 4 != block {
            block = e / 4;
            words = philox4x32([block as u32, (block as u64 >> 32) as u32, 0, 0], key);
        }
        *value = ((f64::from(unit_f32(words[e % 4])) * 2.0 - 1.0) * bound) as f32;
    }
}

#[cfg(test)]
mod tests {
    use super::init_a;

    #[test]
    fn any_cut_gives_the_same_uniform_numbers() {
        let (inputs, n) = (64, 16 * 64);
        let mut whole = vec![0f32; n];
        init_a(&mut whole, 0, 7, "model.layers.0.mlp.up_proj", inputs);
        for cut in [1, 3, 4, 513] {
            let mut part = vec![0f32; n - cut];
            init_a(&mut part, cut, 7, "model.layers.0.mlp.up_proj", inputs);
            assert_eq!(part, whole[cut..]);
        }
        let bound = 1.0 / 8.0;
        assert!(whole.iter().all(|v| v.abs() <= bound));
        // Variance of U(-b, b) is b^2/3; the estimate from 1024 samples is within 15 % with a margin of five sigma.
        let variance = whole.iter().map(|v| v * v).sum::<f32>() / n as f32;
        assert!((variance / (bound * bound / 3.0) - 1.0).abs() < 0.15, "{variance}");
        let mut other = vec![0f32; n];
        init_a(&mut other, 0, 7, "model.layers.1.mlp.up_proj", inputs);
        assert_ne!(whole, other);
    }
}
