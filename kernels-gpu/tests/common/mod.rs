//! Oracles that share nothing with the code under test: exact arithmetic and tables.
#![allow(dead_code, reason = "each test program uses its own part")]

/// The nonnegative values of a small float with `exponent_bits` and `mantissa_bits`, by code, from the
/// defining formula in f64; the first `count` codes.
pub fn magnitudes(bias: i32, mantissa_bits: u32, count: usize) -> Vec<f64> {
    let per_binade = 1usize << mantissa_bits;
    (0..count)
        .map(|code| {
            let (e, m) = (code / per_binade, (code % per_binade) as f64 / per_binade as f64);
            if e == 0 { m * 2f64.powi(1 - bias) } else { (1.0 + m) * 2f64.powi(e as i32 - bias) }
        })
        .collect()
}

/// The code of the entry of a sorted table nearest to `x >= 0`, ties to the even code, saturating.
pub struct NearestInTable {
    /// Halfway points between neighbours, as f32 (exact for every format tested).
    halves: Vec<f32>,
}

impl NearestInTable {
    pub fn new(values: &[f64]) -> Self {
        let halves = values.windows(2).map(|w| (w[0] + w[1]) / 2.0);
        let halves = halves
            .map(|h| {
                assert_eq!(f64::from(h as f32), h, "a halfway point is an f32");
                h as f32
            })
            .collect();
        Self { halves }
    }

    pub fn code(&self, x: f32) -> u8 {
        // Halves below x push it up; an equal one does so only when that leads to an even code.
        let below = self.halves.partition_point(|&h| h < x);
        let tie_up = self.halves.get(below) == Some(&x) && below % 2 == 1;
        (below + usize::from(tie_up)) as u8
    }
}

/// Every f32 bit pattern of interest that a dense sample would miss: around every power of two and
/// every multiple of 1/8 of it, and a stride over everything.
pub fn sample_f32() -> impl Iterator<Item = f32> {
    let near = (0u32..=0xFFF).flat_map(|top| {
        let at = top << 20;
        [at.wrapping_sub(1), at, at.wrapping_add(1), at | 0x7_FFFF, at | 0x8_0000, at | 0x8_0001]
    });
    near.chain((0u32..=u32::MAX).step_by(4_099)).map(f32::from_bits)
}

/// Calls `check` with every one of the 2^31 floats whose sign bit is clear, NaNs too, on all cores.
pub fn for_every_magnitude(check: impl Fn(f32) + Sync) {
    const CHUNK: u64 = 1 << 22;
    let next = std::sync::atomic::AtomicU64::new(0);
    let threads = std::thread::available_parallelism().map_or(2, usize::from);
    std::thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                loop {
                    let start = next.fetch_add(CHUNK, std::sync::atomic::Ordering::Relaxed);
                    if start >= 1 << 31 {
                        return;
                    }
                    for bits in start..start + CHUNK {
                        check(f32::from_bits(bits as u32));
                    }
                }
            });
        }
    });
}

/// Every finite binary16 value.
pub fn finite_f16() -> impl Iterator<Item = f32> {
    (0..=u16::MAX).map(|bits| half::f16::from_bits(bits).to_f32()).filter(|x| x.is_finite())
}

/// A binary16 value as an integer multiple of `2^-24`, which every one is.
pub fn fixed_point(x: f32) -> i64 {
    (f64::from(x) * 2f64.powi(24)) as i64
}

/// Rounds `x * 2^-24` to binary16 in integers: an oracle that never rounds twice.
pub fn f16_of_fixed_point(x: i64) -> f32 {
    let magnitude = x.unsigned_abs();
    let drop = (64 - magnitude.leading_zeros()).saturating_sub(11);
    let (quotient, rest) = (magnitude >> drop, magnitude & ((1 << drop) - 1));
    let half = if drop == 0 { 1 } else { 1 << (drop - 1) };
    let up = rest > half || rest == half && quotient % 2 == 1;
    let value = ((quotient + u64::from(up)) << drop) as f64 * 2f64.powi(-24);
    let value = if value >= 65536.0 { f32::INFINITY } else { value as f32 };
    if x < 0 { -value } else { value }
}

/// `a * b + c` of binary16 values in exact integers, rounded to binary16 once.
pub fn f16_fma_exact(a: f32, b: f32, c: f32) -> f32 {
    // Multiples of 2^-48. What lies below the last bit that can be kept becomes one sticky bit.
    let x = i128::from(fixed_point(a)) * i128::from(fixed_point(b)) + (i128::from(fixed_point(c)) << 24);
    let magnitude = x.unsigned_abs();
    let drop = (128 - magnitude.leading_zeros()).saturating_sub(11).max(24);
    let (quotient, rest, half) = (magnitude >> drop, magnitude & ((1 << drop) - 1), 1u128 << (drop - 1));
    let up = rest > half || rest == half && quotient % 2 == 1;
    let value = ((quotient + u128::from(up)) << drop) as f64 * 2f64.powi(-48);
    let value = if value >= 65536.0 { f32::INFINITY } else { value as f32 };
    if x < 0 { -value } else { value }
}

/// A small generator of repeatable noise (xorshift64*, Vigna 2016).
pub struct Noise(u64);

impl Noise {
    pub fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1)
    }

    /// Uniform in [0, 1).
    pub fn uniform(&mut self) -> f64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        (self.0.wrapping_mul(0x2545_F491_4F6C_DD1D) >> 11) as f64 / (1u64 << 53) as f64
    }

    /// About normal: the sum of twelve uniforms, less six.
    pub fn normal(&mut self) -> f32 {
        ((0..12).map(|_| self.uniform()).sum::<f64>() - 6.0) as f32
    }
}
