//! Queries to operand tiles: RoPE, rotation, scale, FP16 or E4M3 or INT8.
//!
//! # Parameters of every entry `quantize_q_{f16, e4m3, i8}_from_{bf16, f16}`
//! Tensor and strides are those of [`input`](super::input); heads are numbered batch * heads + head.
//!
//! | name | type | what |
//! |---|---|---|
//! | `q` | pointer | queries |
//! | `cos`, `sin` | f32 `[q_tokens, head_dim / 2]`, or null | RoPE |
//! | `balance` | f32 `[batch, kv_heads]`, or null | factor on `side`, from [`stats`](super::stats) |
//! | `k_mean` | f32 `[batch, kv_heads, 128]`, or null | the token mean of K |
//! | `tiles` | pointer, 16-byte aligned | receives the Q tiles of [`tiles`] (INT8 lies like E4M3); rows from `q_tokens` and channels from `head_dim` on become zeros (of the sign of `side`) |
//! | `factor` | f32 `[batch, q_heads, 128 ceil(q_tokens / 128)]`; INT8 only, else not touched | receives the factor of every row: the scale of its group (rows r and r + 8 of 16) times the magnitude of `scale` 8 log2 e, whose sign the codes carry; NaN for a row that is not finite, 0 from `q_tokens` on |
//! | `lse_shift` | f32 `[batch, q_heads, q_tokens]`, or null | receives `scale` q . k_mean, q after RoPE, summed as [`Part::dot`]; needs `k_mean` |
//! | `saturated` | u32 `[batch, kv_heads]`, or null, zeroed by the caller | set to 1 where a value is outside the format |
//! | `q_batch`, `q_head`, `q_token` | i64 | strides of `q` |
//! | `q_tokens`, `q_heads`, `kv_heads`, `head_dim` | u32 | sizes |
//! | `rotation` | u32 | channels of the Hadamard rotation: 0, or a power of two from 16 to 128, at least `head_dim` |
//! | `side` | f32 | FP16, E4M3: [`code_unit_factor`](crate::numerics::units::code_unit_factor) of the scale with the scale's sign |
//! | `scale` | f32 | factor on the scores |
//!
//! A row with a NaN or an infinity becomes NaN in FP16 and E4M3, and zeros with a NaN factor in INT8.
//!
//! The grid is 2 ceil(`q_tokens` / 128) * batch * `q_heads` blocks of [`THREADS`] in x, one a tile of 64 rows.

use super::input::{Bf16, CHUNK, Element, F16, Head, has_nonfinite, largest};
use super::rows::{Code, Divisor, E4m3, Half, Int8, LANES, Part};
use super::tiles::{self, ROWS};
use crate::formats::int8;
use crate::layout::scale_groups;
use crate::numerics::units;
use crate::ptx::collective::{any, shuffle_xor, sync_threads};
use crate::ptx::memory::max_global_u32;
use crate::ptx::shared;
use crate::ptx::special::{block_idx_x, thread_idx_x};

/// Threads of a block: four a row.
pub const THREADS: u32 = ROWS as u32 * LANES;

/// Scale groups of a tile.
const GROUPS: u32 = (ROWS / scale_groups::Q_TILE * scale_groups::Q_GROUPS) as u32;

crate::ptx::shared_symbol!(
    /// 32 words: the largest magnitude of every scale group of a tile.
    fn group_amax, "vc_quantize_q_amax", 16, 128
);

/// The parameters of an entry.
struct Call {
    q: *const u8,
    cos: *const f32,
    sin: *const f32,
    balance: *const f32,
    k_mean: *const f32,
    tiles: *mut u8,
    factor: *mut f32,
    lse_shift: *mut f32,
    saturated: *mut u32,
    strides: [i64; 3],
    q_tokens: u32,
    q_heads: u32,
    kv_heads: u32,
    head_dim: u32,
    rotation: u32,
    side: f32,
    scale: f32,
}

impl Call {
    #[inline(always)]
    unsafe fn run<E: Element, C: Code>(&self) {
        let tiles_per_head = 2 * self.q_tokens.div_ceil(2 * ROWS as u32);
        let (index, tile) = (block_idx_x() / tiles_per_head, block_idx_x() % tiles_per_head);
        let (batch, q_head) = (index / self.q_heads, index % self.q_heads);
        let kv_head = (batch * self.kv_heads + q_head / (self.q_heads / self.kv_heads)) as usize;
        let (row, lane) = (thread_idx_x() / LANES, thread_idx_x() % LANES);
        let token = tile * ROWS as u32 + row;
        let live = token < self.q_tokens;
        let head = Head::new(self.q, self.strides, batch, q_head, self.head_dim);
        // SAFETY: rows below q_tokens are read; warps and the block stay together.
        unsafe {
            let raw = Part::load(&head, token, lane, live);
            let max = raw.iter().fold(0, largest::<E>);
            let mut broken = has_nonfinite::<E>(max) as u32;
            broken |= shuffle_xor::<1>(broken);
            broken |= shuffle_xor::<2>(broken);
            let broken = broken != 0;

            let mut part = Part::unpack::<E>(&raw, lane);
            if live {
                part.turn(self.cos, self.sin, token, &head);
            }
            let mut shift = 0.0;
            if !self.lse_shift.is_null() {
                shift = self.scale * part.dot(self.k_mean.add(kv_head * 128));
            }
            if broken {
                part.x = [0.0; 32];
            }
            part.rotate(self.rotation);
            if C::INT8 {
                self.codes(&mut part, row, token, index, broken);
            } else {
                self.code_units::<C>(&mut part, kv_head, broken);
            }

            let tile_bytes = ROWS * 128 * C::BYTES;
            let to = self.tiles.add((index as usize * tiles_per_head as usize + tile as usize) * tile_bytes);
            for (i, x) in part.x.as_chunks().0.iter().enumerate() {
                let channel = (part.chunk(i) * CHUNK) as usize;
                let at = match C::BYTES {
                    2 => tiles::q_tile_offset_f16(row as usize, channel),
                    _ => tiles::q_tile_offset_e4m3(row as usize, channel),
                };
                C::store(to.add(at), x);
            }
            if !self.lse_shift.is_null() && live && lane == 0 {
                *self.lse_shift.add(index as usize * self.q_tokens as usize + token as usize) = shift;
            }
        }
    }

    /// x * side, NaN for a broken row.
    #[inline(always)]
    unsafe fn code_units<C: Code>(&self, part: &mut Part, kv_head: usize, broken: bool) {
        let mut side = self.side;
        // SAFETY: one balance and one flag a kv head; the whole warp is here.
        unsafe {
            if !self.balance.is_null() {
                side *= *self.balance.add(kv_head);
            }
            part.x.iter_mut().for_each(|x| *x *= side);
            if any(part.amax() > C::LIMIT) && !self.saturated.is_null() && thread_idx_x() % 32 == 0 {
                max_global_u32(self.saturated.add(kv_head), 1);
            }
        }
        if broken {
            part.x = [f32::NAN; 32];
        }
    }

    /// INT8 codes, and the factor of the row.
    #[inline(always)]
    unsafe fn codes(&self, part: &mut Part, row: u32, token: u32, index: u32, broken: bool) {
        let group = scale_groups::q_group(row as usize) as u32;
        // SAFETY: words of the block's own; the block meets between them; one factor a row.
        unsafe {
            if thread_idx_x() < GROUPS {
                shared::store_u32(group_amax().add(thread_idx_x() * 4), 0);
            }
            sync_threads();
            let amax = part.row_amax();
            if part.lane == 0 {
                // Floats that are not negative order as their bits do.
                shared::max_u32(group_amax().add(group * 4), amax.to_bits());
            }
            sync_threads();
            let s = int8::scale(f32::from_bits(shared::load_u32(group_amax().add(group * 4))));
            let divisor = Divisor::new(s);
            let sign = 1f32.copysign(self.scale);
            part.x.iter_mut().for_each(|x| *x = if s > 0.0 { divisor.int8_code(*x * sign) } else { 0.0 });
            if part.lane == 0 {
                let rows = self.q_tokens.next_multiple_of(2 * ROWS as u32) as usize;
                let factor = if broken { f32::NAN } else { s * (self.scale.abs() * units::PER_NAT) };
                let factor = if token < self.q_tokens { factor } else { 0.0 };
                *self.factor.add(index as usize * rows + token as usize) = factor;
            }
        }
    }
}

macro_rules! entry {
    ($name:ident, $element:ty, $code:ty) => {
        kernel! {
        #[doc = concat!("[`", stringify!($element), "`] queries to [`", stringify!($code), "`] tiles.")]
        ///
        /// # Safety
        /// Parameters and launch as the module says.
        pub unsafe fn $name(
            q: *const u8,
            cos: *const f32,
            sin: *const f32,
            balance: *const f32,
            k_mean: *const f32,
            tiles: *mut u8,
            factor: *mut f32,
            lse_shift: *mut f32,
            saturated: *mut u32,
            q_batch: i64,
            q_head: i64,
            q_token: i64,
            q_tokens: u32,
            q_heads: u32,
            kv_heads: u32,
            head_dim: u32,
            rotation: u32,
            side: f32,
            scale: f32,
        ) {
            let strides = [q_batch, q_head, q_token];
            let call = Call {
                q,
                cos,
                sin,
                balance,
                k_mean,
                tiles,
                factor,
                lse_shift,
                saturated,
                strides,
                q_tokens,
                q_heads,
                kv_heads,
                head_dim,
                rotation,
                side,
                scale,
            };
            // SAFETY: the entry's contract.
            unsafe { call.run::<$element, $code>() }
        }
        }
    };
}

entry!(quantize_q_f16_from_bf16, Bf16, Half);
entry!(quantize_q_f16_from_f16, F16, Half);
entry!(quantize_q_e4m3_from_bf16, Bf16, E4m3);
entry!(quantize_q_e4m3_from_f16, F16, E4m3);
entry!(quantize_q_i8_from_bf16, Bf16, Int8);
entry!(quantize_q_i8_from_f16, F16, Int8);
