//! One line of dispatch: loops written plainly, compiled for the instruction set that this CPU has.

/// Runs `f` as compiled for the widest vector instructions of this CPU (AVX-512, AVX2 with FMA, NEON, ...);
/// the loops in `f` vectorize with them as long as everything that they call is inlined.
#[inline(always)]
pub fn vectorized<R>(f: impl FnOnce() -> R) -> R {
    pulp::Arch::new().dispatch(f)
}
