//! How many blocks does a compute unit hold at once? As many as its registers, threads, shared memory and block slots allow, whichever
//! runs out first. A kernel that waits for memory needs several, to have something to do meanwhile.

/// What a compute unit has.
#[derive(Clone, Copy, Debug)]
pub struct Unit {
    /// Lanes of a warp.
    pub lanes: u32,
    /// Parts that share nothing but memory; a warp lives in one.
    pub parts: u32,
    /// Warps that a part holds.
    pub warps: u32,
    /// 32-bit registers of a part.
    pub registers: u32,
    /// Registers are given to a warp in multiples of this.
    pub granule: u32,
    /// Blocks that a unit holds.
    pub blocks: u32,
    /// Bytes of shared memory.
    pub shared_bytes: u32,
    /// Of those, bytes that each block takes for the system.
    pub reserved_bytes: u32,
}

impl Unit {
    /// NVIDIA: CUDA C++ Programming Guide, "Compute Capabilities". AMD: CDNA 2 and 3 ISA guides, "Vector Registers" (512 a lane, shared by accumulators),
    /// 8 waves a SIMD, 16 workgroups with barriers.
    pub fn of(arch: &str) -> Option<Unit> {
        let nvidia = Unit {
            lanes: 32,
            parts: 4,
            warps: 16,
            registers: 16_384,
            granule: 256,
            blocks: 32,
            shared_bytes: 164 << 10,
            reserved_bytes: 1024,
        };
        let amd = Unit {
            lanes: 64,
            parts: 4,
            warps: 8,
            registers: 512 * 64,
            granule: 8 * 64,
            blocks: 16,
            shared_bytes: 64 << 10,
            reserved_bytes: 0,
        };
        Some(match arch {
            "sm_80" => nvidia,
            "sm_90" => Unit { shared_bytes: 228 << 10, ..nvidia },
            "gfx90a" | "gfx942" => amd,
            "gfx950" => Unit { shared_bytes: 160 << 10, ..amd },
            _ => return None,
        })
    }

    /// Blocks of so many threads, registers a thread and bytes of shared memory that a unit holds.
    pub fn blocks(&self, threads: u32, registers: u32, shared_bytes: u32) -> u32 {
        let of_warp = (registers.max(1) * self.lanes).next_multiple_of(self.granule);
        let warps = self.warps.min(self.registers / of_warp) * self.parts;
        let by_warps = warps / threads.div_ceil(self.lanes).max(1);
        let by_shared = match shared_bytes + self.reserved_bytes {
            0 => u32::MAX,
            bytes => self.shared_bytes / bytes,
        };
        by_warps.min(by_shared).min(self.blocks)
    }

    /// Warps that a unit holds at most.
    pub fn most_warps(&self) -> u32 {
        self.warps * self.parts
    }
}

#[cfg(test)]
mod tests {
    use super::Unit;

    /// Numbers of the vendors' own calculators.
    #[test]
    fn blocks_of_known_kernels() {
        let h100 = Unit::of("sm_90").expect("known");
        assert_eq!(h100.blocks(256, 32, 0), 8, "64 warps");
        assert_eq!(h100.blocks(256, 64, 0), 4, "65,536 registers");
        assert_eq!(h100.blocks(256, 65, 0), 3, "72 registers are given");
        assert_eq!(h100.blocks(128, 255, 0), 2);
        assert_eq!(h100.blocks(32, 16, 0), 32, "block slots");
        assert_eq!(h100.blocks(256, 32, 113 << 10), 2, "114 KiB each, with the system's");
        let mi300 = Unit::of("gfx942").expect("known");
        assert_eq!(mi300.blocks(256, 64, 0), 8, "8 waves of 64 registers");
        assert_eq!(mi300.blocks(256, 72, 0), 7);
        assert_eq!(mi300.blocks(256, 128, 33 << 10), 1);
        assert_eq!(mi300.blocks(512, 256, 0), 1);
    }
}
