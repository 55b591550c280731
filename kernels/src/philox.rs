//! Philox 4x32-10 (Salmon et al., SC'11): counter-based random numbers, keyed by position, never by rank.

/// Ten rounds of Philox 4x32 of a 128-bit counter under a 64-bit key.
pub fn philox4x32(counter: [u32; 4], key: [u32; 2]) -> [u32; 4] {
    let (mut c, mut k) = (counter, key);
    for _ in 0..10 {
        let p0 = u64::from(c[0]) * 0xD251_1F53;
        let p1 = u64::from(c[2]) * 0xCD9E_8D57;
        c = [(p1 >> 32) as u32 ^ c[1] ^ k[0], p1 as u32, (p0 >> 32) as u32 ^ c[3] ^ k[1], p0 as u32];
        k = [k[0].wrapping_add(0x9E37_79B9), k[1].wrapping_add(0xBB67_AE85)];
    }
    c
}

/// The upper 24 bits of `bits` as a number in `[0, 1)`, exact in `f32`.
pub fn unit_f32(bits: u32) -> f32 {
    (bits >> 8) as f32 * (1.0 / 16_777_216.0)
}

/// Two standard normals from two words (Box-Muller), computed in f64 and rounded.
pub fn normal_pair(a: u32, b: u32) -> (f32, f32) {
    let u = (f64::from(a) + 1.0) / 4_294_967_296.0;
    let (radius, angle) = ((-2.0 * u.ln()).sqrt(), std::f64::consts::TAU * f64::from(b) / 4_294_967_296.0);
    ((radius * angle.cos()) as f32, (radius * angle.sin()) as f32)
}

/// A 64-bit key of a name: FNV-1a mixed with the seed. Used to key initialization by parameter name.
pub fn key_of(seed: u64, name: &str) -> [u32; 2] {
    let mut h = 0xcbf2_9ce4_8422_2325u64 ^ seed.wrapping_mul(0x9E37_79B9_7F4A_7C15);
    for b in name.bytes() {
        h = (h ^ u64::from(b)).wrapping_mul(0x0000_0100_0000_01B3);
    }
    h ^= h >> 29;
    [h as u32, (h >> 32) as u32]
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Known answers of the Random123 distribution (kat_vectors).
    #[test]
    fn known_answers() {
        assert_eq!(philox4x32([0; 4], [0; 2]), [0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8]);
        assert_eq!(philox4x32([u32::MAX; 4], [u32::MAX; 2]), [0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd]);
        assert_eq!(
            philox4x32([0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344], [0xa4093822, 0x299f31d0]),
            [0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1]
        );
    }
}
