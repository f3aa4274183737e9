//! What quantizing Q and K needs to know first: the balance of a query group, the token mean of K, and whether a
//! key is not finite.
//!
//! Tensors and their strides are those of [`input`](super::input). Grids are in x.
//!
//! # `balance_bf16`, `balance_f16`: one block of 256 threads per (batch, kv head)
//! | name | type | what |
//! |---|---|---|
//! | `q` | pointer | queries |
//! | `balance` | f32 `[batch, kv_heads]` | receives [`head_balance::of_amax`] of max abs q * `factor`, over the first 128 rows of the group's query heads, rows with a NaN or an infinity left out, without RoPE or rotation |
//! | `q_batch`, `q_head`, `q_token` | i64 | strides of `q` |
//! | `q_tokens`, `q_heads`, `kv_heads`, `head_dim` | u32 | sizes |
//! | `factor` | f32 | [`code_unit_factor`](crate::numerics::units::code_unit_factor) of the scale |
//!
//! # `k_stats_bf16`, `k_stats_f16`: ceil(ceil(`kv_tokens` / 128) / 8) * batch * `kv_heads` blocks of 128 threads
//! | name | type | what |
//! |---|---|---|
//! | `k` | pointer | keys |
//! | `cos`, `sin` | f32 `[kv_tokens, head_dim / 2]`, or null | RoPE of the keys: the sums are of turned keys |
//! | `kv_lens` | u32 `[batch]`, or null | keys that count |
//! | `sums` | f32 `[batch, kv_heads, ceil(kv_tokens / 128), 128]` | receives the sums over 128 keys each, 0 beyond the keys that count |
//! | `poisoned` | u32 `[batch, kv_heads]`, zeroed by the caller | set to 1 where a key that counts is not finite |
//! | `k_batch`, `k_head`, `k_token` | i64 | strides of `k` |
//! | `kv_tokens`, `kv_heads`, `head_dim` | u32 | sizes |
//!
//! # `k_mean`: one block of 128 threads per (batch, kv head)
//! | name | type | what |
//! |---|---|---|
//! | `sums` | as above | |
//! | `kv_lens` | u32 `[batch]`, or null | |
//! | `mean` | f32 `[batch, kv_heads, 128]` | receives the token mean, the bits of [`token_mean`](crate::numerics::mean::token_mean) |
//! | `kv_tokens`, `kv_heads` | u32 | sizes |

use core::arch::{asm, global_asm};

use super::head_balance;
use super::input::{
    Bf16, CHANNELS, CHUNK, CHUNKS, Element, F16, Head, has_nonfinite, largest, store_f32_chunk, turn,
    unpack_chunk, valid_tokens, walk,
};
use crate::layout::KEY_TILE;
use crate::ptx::SharedAddr;
use crate::ptx::collective::{any, shuffle_xor, sync_threads, warp_max_u32};
use crate::ptx::memory::max_global_u32;
use crate::ptx::shared;
use crate::ptx::special::{block_idx_x, thread_idx_x};

global_asm!(".shared .align 4 .b8 vc_balance_max[4];");

/// The word in which a block of `balance` meets.
#[inline(always)]
fn balance_max() -> SharedAddr {
    let at: u32;
    // SAFETY: reads the address of a symbol declared above.
    unsafe { asm!("mov.u32 {}, vc_balance_max;", out(reg32) at, options(pure, nomem, nostack)) }
    SharedAddr(at)
}

const BALANCE_THREADS: u32 = 256;

/// The group of query heads of one (batch, kv head), and where its balance goes.
struct Balance {
    q: *const u8,
    balance: *mut f32,
    strides: [i64; 3],
    q_tokens: u32,
    q_heads: u32,
    kv_heads: u32,
    head_dim: u32,
    factor: f32,
}

impl Balance {
    /// 16 lanes a row, 16 rows a pass.
    #[inline(always)]
    unsafe fn run<E: Element>(&self) {
        let (batch, kv_head) = (block_idx_x() / self.kv_heads, block_idx_x() % self.kv_heads);
        let (row, chunk) = (thread_idx_x() / CHUNKS, thread_idx_x() % CHUNKS);
        let group = self.q_heads / self.kv_heads;
        let mut amax = 0u32;
        // SAFETY: all threads of the block run the same passes; rows below q_tokens are read.
        unsafe {
            if thread_idx_x() == 0 {
                shared::store_u32(balance_max(), 0);
            }
            sync_threads();
            for i in 0..group {
                let head = Head::new(self.q, self.strides, batch, kv_head * group + i, self.head_dim);
                for pass in 0..head_balance::ROWS / (BALANCE_THREADS / CHUNKS) {
                    let token = pass * (BALANCE_THREADS / CHUNKS) + row;
                    let x = head.load(token, chunk, token < self.q_tokens);
                    let mut m = largest::<E>(0, &x);
                    // The max of the row, NaN or infinite if one of its values is.
                    m = E::max(m, shuffle_xor::<1>(m));
                    m = E::max(m, shuffle_xor::<2>(m));
                    m = E::max(m, shuffle_xor::<4>(m));
                    m = E::max(m, shuffle_xor::<8>(m));
                    if !has_nonfinite::<E>(m) {
                        let [low, high] = E::unpack(m);
                        // Floats that are not negative order as their bits do.
                        amax = amax.max(low.to_bits()).max(high.to_bits());
                    }
                }
            }
            let amax = warp_max_u32(amax);
            if thread_idx_x() % 32 == 0 {
                shared::max_u32(balance_max(), amax);
            }
            sync_threads();
            if thread_idx_x() == 0 {
                let amax = f32::from_bits(shared::load_u32(balance_max()));
                *self.balance.add(block_idx_x() as usize) = head_balance::of_amax(amax * self.factor);
            }
        }
    }
}

macro_rules! balance_entry {
    ($name:ident, $element:ty) => {
        #[doc = concat!("The balance of every query group of [`", stringify!($element), "`] queries.")]
        ///
        /// # Safety
        /// Parameters and launch as the module says.
        #[unsafe(no_mangle)]
        pub unsafe extern "ptx-kernel" fn $name(
            q: *const u8,
            balance: *mut f32,
            q_batch: i64,
            q_head: i64,
            q_token: i64,
            q_tokens: u32,
            q_heads: u32,
            kv_heads: u32,
            head_dim: u32,
            factor: f32,
        ) {
            let strides = [q_batch, q_head, q_token];
            let call = Balance { q, balance, strides, q_tokens, q_heads, kv_heads, head_dim, factor };
            // SAFETY: the entry's contract.
            unsafe { call.run::<$element>() }
        }
    };
}

balance_entry!(balance_bf16, Bf16);
balance_entry!(balance_f16, F16);

/// Blocks of 128 keys that a thread block sums, 16 lanes each.
const BLOCKS: u32 = 8;

/// Keys, and where their sums go.
struct Stats {
    k: *const u8,
    cos: *const f32,
    sin: *const f32,
    kv_lens: *const u32,
    sums: *mut f32,
    poisoned: *mut u32,
    strides: [i64; 3],
    kv_tokens: u32,
    kv_heads: u32,
    head_dim: u32,
}

impl Stats {
    #[inline(always)]
    unsafe fn run<E: Element>(&self) {
        let blocks = self.kv_tokens.div_ceil(KEY_TILE as u32);
        let per_head = blocks.div_ceil(BLOCKS);
        let index = block_idx_x() / per_head;
        let (batch, kv_head) = (index / self.kv_heads, index % self.kv_heads);
        let block = block_idx_x() % per_head * BLOCKS + thread_idx_x() / CHUNKS;
        let chunk = thread_idx_x() % CHUNKS;
        let head = Head::new(self.k, self.strides, batch, kv_head, self.head_dim);
        let mut sums = [0.0; CHUNK as usize];
        let mut max = 0;
        // SAFETY: keys that count are read, sums of blocks of the head written; the warp votes together.
        unsafe {
            let first = block * KEY_TILE as u32;
            let count =
                valid_tokens(self.kv_lens, batch, self.kv_tokens).saturating_sub(first).min(KEY_TILE as u32);
            walk(&head, chunk, core::ptr::null(), first, count, |token, x| {
                max = largest::<E>(max, &x);
                let mut x = unpack_chunk::<E>(x);
                if !self.cos.is_null() && head.has(chunk) {
                    turn(&mut x, self.cos, self.sin, token, &head, chunk);
                }
                sums.iter_mut().zip(&x).for_each(|(sum, x)| *sum += x);
            });
            if block < blocks {
                let at = (index as usize * blocks as usize + block as usize) * CHANNELS as usize;
                store_f32_chunk(self.sums.add(at + (chunk * CHUNK) as usize), &sums);
            }
            if any(has_nonfinite::<E>(max)) && thread_idx_x() % 32 == 0 {
                max_global_u32(self.poisoned.add(index as usize), 1);
            }
        }
    }
}

macro_rules! stats_entry {
    ($name:ident, $element:ty) => {
        #[doc = concat!("Sums over blocks of [`", stringify!($element), "`] keys, and whether all are finite.")]
        ///
        /// # Safety
        /// Parameters and launch as the module says.
        #[unsafe(no_mangle)]
        pub unsafe extern "ptx-kernel" fn $name(
            k: *const u8,
            cos: *const f32,
            sin: *const f32,
            kv_lens: *const u32,
            sums: *mut f32,
            poisoned: *mut u32,
            k_batch: i64,
            k_head: i64,
            k_token: i64,
            kv_tokens: u32,
            kv_heads: u32,
            head_dim: u32,
        ) {
            let strides = [k_batch, k_head, k_token];
            let call = Stats { k, cos, sin, kv_lens, sums, poisoned, strides, kv_tokens, kv_heads, head_dim };
            // SAFETY: the entry's contract.
            unsafe { call.run::<$element>() }
        }
    };
}

stats_entry!(k_stats_bf16, Bf16);
stats_entry!(k_stats_f16, F16);

/// The token mean of K from the sums over blocks, added in order.
///
/// # Safety
/// Parameters and launch as the module says.
#[unsafe(no_mangle)]
pub unsafe extern "ptx-kernel" fn k_mean(
    sums: *const f32,
    kv_lens: *const u32,
    mean: *mut f32,
    kv_tokens: u32,
    kv_heads: u32,
) {
    const AHEAD: u32 = 16;
    let index = block_idx_x() as usize;
    let channel = thread_idx_x() as usize;
    let blocks = kv_tokens.div_ceil(KEY_TILE as u32);
    // SAFETY: sums of the head's blocks are read, its mean written.
    unsafe {
        let valid = valid_tokens(kv_lens, block_idx_x() / kv_heads, kv_tokens);
        let sums = sums.add(index * blocks as usize * CHANNELS as usize + channel);
        let used = valid.div_ceil(KEY_TILE as u32);
        let (mut total, mut block) = (0.0f32, 0);
        while block + AHEAD <= used {
            let mut next = [0.0; AHEAD as usize];
            for (i, next) in next.iter_mut().enumerate() {
                *next = *sums.add((block as usize + i) * CHANNELS as usize);
            }
            next.iter().for_each(|sum| total += sum);
            block += AHEAD;
        }
        while block < used {
            total += *sums.add(block as usize * CHANNELS as usize);
            block += 1;
        }
        *mean.add(index * CHANNELS as usize + channel) = total / valid.max(1) as f32;
    }
}
