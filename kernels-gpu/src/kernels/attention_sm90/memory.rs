//! Shared memory of a block, and the warp that fills it.

use core::marker::PhantomData;

use super::super::ONES_BYTES;
use super::super::call::{Call, Work};
use super::super::tiles::{KEYS, MEAN_BLOCKS, MEAN_BYTES, ROWS, V_BYTES};
use super::Format;
use crate::ptx::SharedAddr;
use crate::ptx::bulk_copy::global_to_shared;
use crate::ptx::mbarrier::{Barrier, fence_init, fence_proxy_async};
use crate::ptx::memory::store_shared_v4;
use crate::ptx::special::sync_threads;

crate::ptx::shared_symbol!(
    /// Start of the dynamic shared memory, a multiple of 1024.
    fn shared_base, "vc_shared", 1024
);

/// Shared memory of a block.
pub(super) struct Shared<S> {
    base: SharedAddr,
    scores: PhantomData<S>,
}

impl<S: Format> Shared<S> {
    const K: u32 = 2 * S::Q_BYTES as u32;
    const V: u32 = Self::K + (S::STAGES * S::K_BYTES) as u32;
    const MEANS: u32 = Self::V + (S::STAGES * (V_BYTES + ONES_BYTES)) as u32;
    const BARRIERS: u32 = Self::MEANS + 2 * MEAN_BYTES as u32;
    const STAGES: u32 = S::STAGES as u32;

    #[inline(always)]
    pub(super) fn new() -> Self {
        Self { base: shared_base(), scores: PhantomData }
    }
    #[inline(always)]
    pub(super) fn q(&self, warpgroup: u32) -> SharedAddr {
        self.base.add(warpgroup * S::Q_BYTES as u32)
    }
    #[inline(always)]
    pub(super) fn k(&self, stage: u32) -> SharedAddr {
        self.base.add(Self::K + stage * S::K_BYTES as u32)
    }
    #[inline(always)]
    pub(super) fn v(&self, stage: u32) -> SharedAddr {
        self.base.add(Self::V + stage * (V_BYTES + ONES_BYTES) as u32)
    }
    #[inline(always)]
    pub(super) fn means(&self, slot: u32) -> SharedAddr {
        self.base.add(Self::MEANS + slot * MEAN_BYTES as u32)
    }
    #[inline(always)]
    pub(super) fn barrier(&self, index: u32) -> Barrier {
        Barrier::at(self.base.add(Self::BARRIERS + index * Barrier::BYTES))
    }
    #[inline(always)]
    pub(super) fn q_full(&self) -> Barrier {
        self.barrier(0)
    }
    #[inline(always)]
    pub(super) fn k_full(&self, stage: u32) -> Barrier {
        self.barrier(1 + stage)
    }
    #[inline(always)]
    pub(super) fn v_full(&self, stage: u32) -> Barrier {
        self.barrier(1 + Self::STAGES + stage)
    }
    #[inline(always)]
    pub(super) fn means_full(&self, slot: u32) -> Barrier {
        self.barrier(1 + 2 * Self::STAGES + slot)
    }
    #[inline(always)]
    pub(super) fn k_free(&self, stage: u32) -> Barrier {
        self.barrier(3 + 2 * Self::STAGES + stage)
    }
    #[inline(always)]
    pub(super) fn v_free(&self, stage: u32) -> Barrier {
        self.barrier(3 + 3 * Self::STAGES + stage)
    }
    #[inline(always)]
    pub(super) fn means_free(&self, slot: u32) -> Barrier {
        self.barrier(3 + 4 * Self::STAGES + slot)
    }

    /// Barriers and rows of ones, once a block.
    #[inline(always)]
    pub(super) unsafe fn prepare(&self, thread: u32) {
        // SAFETY: the block's own memory before anybody uses it; every thread is here.
        unsafe {
            if thread == 0 {
                // A producer fills; the 8 consumer warps free.
                for i in 0..3 + 2 * Self::STAGES {
                    self.barrier(i).init(1);
                }
                for i in 3 + 2 * Self::STAGES..5 + 4 * Self::STAGES {
                    self.barrier(i).init(8);
                }
                fence_init();
            }
            const PIECES: u32 = ONES_BYTES as u32 / 16;
            if thread < PIECES * Self::STAGES {
                let at = self.v(thread / PIECES).add(V_BYTES as u32 + thread % PIECES * 16);
                store_shared_v4(at, [0x3838_3838; 4]); // E4M3 ones
            }
            fence_proxy_async();
            sync_threads();
        }
    }
}

/// A place in a ring of `STAGES`, counted over two rounds: the second round waits for the other parity of the barriers.
///
/// One word that is the same in all lanes: the assembler keeps it in a uniform register.
#[derive(Clone, Copy)]
pub(super) struct Ring<const STAGES: u32>(u32);

impl<const STAGES: u32> Ring<STAGES> {
    #[inline(always)]
    pub(super) fn start() -> Self {
        Self(0)
    }
    /// The place before the first.
    #[inline(always)]
    pub(super) fn before() -> Self {
        Self(2 * STAGES - 1)
    }
    #[inline(always)]
    pub(super) fn stage(self) -> u32 {
        if self.0 < STAGES { self.0 } else { self.0 - STAGES }
    }
    #[inline(always)]
    pub(super) fn parity(self) -> u32 {
        (self.0 >= STAGES) as u32
    }
    #[inline(always)]
    pub(super) fn advance(&mut self) {
        self.0 = if self.0 == 2 * STAGES - 1 { 0 } else { self.0 + 1 };
    }
}

/// One lane streams the operands of a block: Q once, then K, V and every 16th tile the means.
#[inline(always)]
pub(super) unsafe fn produce<S: Format, const STAGES: u32, const SMOOTH: bool>(
    call: &Call,
    work: &Work,
    shared: &Shared<S>,
) {
    let tiles_a_head = call.kv_tokens.div_ceil(KEYS as u32) as usize;
    let kv_head = work.kv_head as usize;
    let q_tile = (work.batch * call.q_heads + work.h) as usize
        * (call.q_tokens.div_ceil(2 * ROWS as u32) as usize * 2)
        + work.row as usize / ROWS;
    // SAFETY: offsets inside the tiles of this head; every slot is filled after its consumers freed it.
    unsafe {
        let q = call.q.add(q_tile * S::Q_BYTES);
        let mut k = call.k.add(kv_head * tiles_a_head * S::K_BYTES);
        let mut v = call.v.add(kv_head * tiles_a_head * V_BYTES);
        let mut means = call.means.wrapping_add(kv_head * tiles_a_head.div_ceil(MEAN_BLOCKS) * MEAN_BYTES);

        shared.q_full().arrive_expect(2 * S::Q_BYTES as u32);
        global_to_shared(shared.q(0), q, 2 * S::Q_BYTES as u32, shared.q_full());
        let (mut k_ring, mut v_ring) = (Ring::<STAGES>::start(), Ring::<STAGES>::start());
        let mut slot = Ring::<2>::start();
        // Consumers are up to two scores ahead of the values.
        for tile in 0..work.tiles + 2 {
            if tile < work.tiles {
                // The phase before the first counts as complete: fresh slots are free.
                shared.k_free(k_ring.stage()).wait(k_ring.parity() ^ 1);
                shared.k_full(k_ring.stage()).arrive_expect(S::K_BYTES as u32);
                global_to_shared(
                    shared.k(k_ring.stage()),
                    k,
                    S::K_BYTES as u32,
                    shared.k_full(k_ring.stage()),
                );
                k = k.add(S::K_BYTES);
                k_ring.advance();
            }
            if tile >= 2 {
                shared.v_free(v_ring.stage()).wait(v_ring.parity() ^ 1);
                shared.v_full(v_ring.stage()).arrive_expect(V_BYTES as u32);
                global_to_shared(shared.v(v_ring.stage()), v, V_BYTES as u32, shared.v_full(v_ring.stage()));
                v = v.add(V_BYTES);
                v_ring.advance();
            }
            if SMOOTH && tile >= 2 && (tile - 2) % MEAN_BLOCKS as u32 == 0 {
                shared.means_free(slot.stage()).wait(slot.parity() ^ 1);
                shared.means_full(slot.stage()).arrive_expect(MEAN_BYTES as u32);
                global_to_shared(
                    shared.means(slot.stage()),
                    means,
                    MEAN_BYTES as u32,
                    shared.means_full(slot.stage()),
                );
                means = means.wrapping_add(MEAN_BYTES);
                slot.advance();
            }
        }
    }
}
