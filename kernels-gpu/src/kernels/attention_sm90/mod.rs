//! Fused low-bit attention for Hopper, section 2 of the method on wgmma.
//!
//! A block serves 128 query rows of one head: one producer warp streams K and V tiles through a ring in shared
//! memory ([`memory`]), and two warpgroups of 64 rows each run a loop over the key blocks on what [`consumer`] keeps. Scores are
//! in *code units* (eighths of an octave: Q and K carry sqrt(scale * 8 log2 e) each), probabilities are E4M3 bytes whose
//! largest in a row is 256, and the tiles are those of [`tiles`](super::tiles).
//!
//! How the scores become probabilities decides the loop: [`packed`] for FP16 and E4M3, [`int8`].
//!
//! * **Row sums** come from 8 rows of ones behind every V tile (ExpCast), or from the f32 exponentials (exp2).
//! * **Block means** are deferred: the row sums of 16 key blocks are the A fragment of one 16-bit product with
//!   their 16 means.
//! * **Promotion**: FP8 products keep about 14 bits while accumulating, so they accumulate into a partial that is
//!   added to the f32 accumulator every `promote` key blocks.
//! * **Rescaling** by alpha happens only where a warp saw one of its row maxima move, beside the product that
//!   is still under the old ones; that one takes alpha when it is added.
//! * **Not finite**: the row max keeps a NaN, and one of a score or an overflow makes it NaN or infinite; such a
//!   row is NaN in the output. `poisoned` marks (batch, kv head)s whose keys or values were not finite.
//!
//! Parameters and grid: [`call`](super::call).

mod consumer;
mod int8;
mod memory;
mod packed;

use self::consumer::{Consumer, Partial, State};
use self::int8::Int8;
use self::memory::{Shared, produce};
use self::packed::{E4m3, F16};
use super::call::{Call, Work, entry};
use super::epilogue::{BLOCK_ROWS, PEAK_E4M3, RowEnd, finish};
use super::softmax::{Encoder, Exp2, ExpCast, Quadratic};
use super::{STAGES_E4M3, STAGES_F16};
use crate::ptx::SharedAddr;
use crate::ptx::shuffle::broadcast;
use crate::ptx::special::{claim_registers, release_registers, thread_idx_x};
use crate::ptx::wgmma::{self, Descriptor};

/// The tiles of queries and keys.
trait Format {
    /// Bytes of the queries of a warpgroup.
    const Q_BYTES: usize;
    /// Bytes of a key tile.
    const K_BYTES: usize;
    /// K and V tiles in flight.
    const STAGES: usize;
}

/// A format and the loop that its scores take.
trait Attend<W>: Format + Sized {
    /// Running maxima of a thread's two rows.
    type Max: Copy;
    /// Below all scores.
    const LOWEST: Self::Max;
    /// All key blocks; there is at least one key.
    unsafe fn run<const STAGES: u32, const SMOOTH: bool>(
        consumer: &mut Consumer<Self, STAGES>,
        work: &Work,
        state: &mut State<Self::Max>,
    );
    /// The maxima, and what codes take for them.
    fn ends(max: Self::Max) -> [RowEnd; 2];
}

/// The product of probabilities with the values.
trait Values {
    /// Issues partial += P R for one value tile.
    unsafe fn issue(partial: &mut Partial, p: &[u32; 16], v: SharedAddr, accumulate: bool);
}

impl<E: Encoder> Values for E {
    #[inline(always)]
    unsafe fn issue(partial: &mut Partial, p: &[u32; 16], v: SharedAddr, accumulate: bool) {
        let v = Descriptor::swizzled(v);
        for step in 0..4 {
            let a = [p[4 * step], p[4 * step + 1], p[4 * step + 2], p[4 * step + 3]];
            let (values, ones) = (&mut partial.values, &mut partial.ones);
            // SAFETY: the caller's protocol; the ones rows lie behind the tile.
            unsafe {
                wgmma::m64n136k32_f32_e4m3(values, ones, a, v.add(step as u32 * 32), accumulate || step > 0)
            }
        }
    }
}

impl Values for Exp2 {
    #[inline(always)]
    unsafe fn issue(partial: &mut Partial, p: &[u32; 16], v: SharedAddr, accumulate: bool) {
        let v = Descriptor::swizzled(v);
        for step in 0..4 {
            let a = [p[4 * step], p[4 * step + 1], p[4 * step + 2], p[4 * step + 3]];
            // SAFETY: the caller's protocol.
            unsafe {
                wgmma::m64n128k32_f32_e4m3(
                    &mut partial.values,
                    a,
                    v.add(step as u32 * 32),
                    accumulate || step > 0,
                )
            }
        }
    }
}

/// The kernel: roles by warpgroup.
#[inline(always)]
unsafe fn attention<S: Attend<W>, W, const STAGES: u32, const SMOOTH: bool>(call: Call) {
    let shared = Shared::<S>::new();
    let warpgroup = thread_idx_x() / 128;
    // SAFETY: all threads of the block are here; after that each warpgroup has its role.
    unsafe {
        shared.prepare(thread_idx_x());
        if warpgroup == 2 {
            release_registers::<24>();
            if thread_idx_x() == 256 {
                let work = call.work(BLOCK_ROWS);
                // Nobody would wait for a copy without keys, and a block must not end before its copies.
                if work.tiles > 0 {
                    produce::<S, STAGES, SMOOTH>(&call, &work, &shared);
                }
            }
        } else {
            claim_registers::<240>();
            let work = call.work(BLOCK_ROWS);
            let mut state = State::new(S::LOWEST);
            if work.tiles > 0 {
                let mut consumer =
                    Consumer::<S, STAGES>::new(&call, &shared, broadcast(warpgroup), work.keys);
                S::run::<STAGES, SMOOTH>(&mut consumer, &work, &mut state);
            }
            // The work anew, so that nothing of it occupies registers during the loop.
            finish(&call, &call.work(BLOCK_ROWS), PEAK_E4M3, &state.out, &state.sum, || S::ends(state.max));
        }
    }
}

entry!(attention_sm90_f16_expcast_smooth, attention::<F16, ExpCast, { STAGES_F16 as u32 }, true>);
entry!(attention_sm90_f16_expcast_plain, attention::<F16, ExpCast, { STAGES_F16 as u32 }, false>);
entry!(attention_sm90_f16_quadratic_smooth, attention::<F16, Quadratic, { STAGES_F16 as u32 }, true>);
entry!(attention_sm90_f16_quadratic_plain, attention::<F16, Quadratic, { STAGES_F16 as u32 }, false>);
entry!(attention_sm90_f16_exp2_smooth, attention::<F16, Exp2, { STAGES_F16 as u32 }, true>);
entry!(attention_sm90_f16_exp2_plain, attention::<F16, Exp2, { STAGES_F16 as u32 }, false>);
entry!(attention_sm90_e4m3_expcast_smooth, attention::<E4m3, ExpCast, { STAGES_E4M3 as u32 }, true>);
entry!(attention_sm90_e4m3_expcast_plain, attention::<E4m3, ExpCast, { STAGES_E4M3 as u32 }, false>);
entry!(attention_sm90_e4m3_quadratic_smooth, attention::<E4m3, Quadratic, { STAGES_E4M3 as u32 }, true>);
entry!(attention_sm90_e4m3_quadratic_plain, attention::<E4m3, Quadratic, { STAGES_E4M3 as u32 }, false>);
entry!(attention_sm90_e4m3_exp2_smooth, attention::<E4m3, Exp2, { STAGES_E4M3 as u32 }, true>);
entry!(attention_sm90_e4m3_exp2_plain, attention::<E4m3, Exp2, { STAGES_E4M3 as u32 }, false>);
entry!(attention_sm90_i8_expcast_smooth, attention::<Int8, ExpCast, { STAGES_E4M3 as u32 }, true>);
entry!(attention_sm90_i8_expcast_plain, attention::<Int8, ExpCast, { STAGES_E4M3 as u32 }, false>);
entry!(attention_sm90_i8_quadratic_smooth, attention::<Int8, Quadratic, { STAGES_E4M3 as u32 }, true>);
entry!(attention_sm90_i8_quadratic_plain, attention::<Int8, Quadratic, { STAGES_E4M3 as u32 }, false>);
entry!(attention_sm90_i8_exp2_smooth, attention::<Int8, Exp2, { STAGES_E4M3 as u32 }, true>);
entry!(attention_sm90_i8_exp2_plain, attention::<Int8, Exp2, { STAGES_E4M3 as u32 }, false>);
