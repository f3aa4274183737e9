//! Instructions as the wrappers of [`ptx`](crate::ptx) call them. Every function is one, executed by the running
//! thread; all of them fault by unwinding with the caller's place in the kernel.

use std::format;

use super::product::Kind;
use super::shared::BASE;
use super::tensor::{TensorKind, TensorOperand};
use super::threads::{current, execute, wait};
use super::warpgroup::OperandA;

/// `%tid.x`.
#[track_caller]
pub(crate) fn thread_index() -> u32 {
    current()
}

/// `%ctaid`.
#[track_caller]
pub(crate) fn block_index() -> [u32; 3] {
    execute(|block, _| Ok(block.index))
}

/// Start of the dynamic shared memory.
pub(crate) const fn dynamic_shared() -> u32 {
    BASE
}

/// The address of a `.shared` symbol, which takes its place in the block when it is first named.
#[track_caller]
pub(crate) fn static_shared(name: &'static str, bytes: u32, alignment: u32) -> u32 {
    execute(|block, _| Ok(block.symbol(name, bytes, alignment)))
}

/// `ld.shared` of `N` bytes.
#[track_caller]
pub(crate) fn load_shared<const N: usize>(address: u32) -> [u8; N] {
    let mut bytes = [0; N];
    execute(|block, thread| block.load(thread, address, N as u32, &mut bytes));
    bytes
}

/// `st.shared` of `N` bytes.
#[track_caller]
pub(crate) fn store_shared<const N: usize>(address: u32, bytes: [u8; N]) {
    execute(|block, thread| block.store(thread, address, N as u32, &bytes));
}

/// `red.shared` on a word.
#[track_caller]
pub(crate) fn reduce_shared(address: u32, f: impl FnOnce(u32) -> u32) {
    execute(|block, thread| block.reduce(thread, address, f));
}

/// Checks an access of `bytes` bytes to global memory, aligned to its size.
#[track_caller]
pub(crate) fn check_global(address: usize, bytes: usize, write: bool) {
    execute(|block, _| block.memory.check(address, bytes, bytes as u32, write));
}

/// `bar.sync`.
#[track_caller]
pub(crate) fn barrier_sync(id: u32, threads: Option<u32>) {
    let mut round = None;
    wait(
        || format!("bar.sync {id}"),
        |block, thread| {
            if let Some(round) = round {
                return Ok(block.named_passed(thread, id, round).then_some(()));
            }
            round = block.named_arrive(thread, id, threads.unwrap_or(block.threads), true)?;
            Ok(round.is_none().then_some(()))
        },
    );
}

/// `bar.arrive`.
#[track_caller]
pub(crate) fn barrier_arrive(id: u32, threads: u32) {
    execute(|block, thread| block.named_arrive(thread, id, threads, false).map(|_| ()));
}

/// `setmaxnreg`.
#[track_caller]
pub(crate) fn set_registers(to: u32, claim: bool) {
    let mut round = None;
    wait(
        || format!("setmaxnreg {to}"),
        |block, thread| {
            let round = match round {
                Some(round) => round,
                None => *round.insert(block.registers_arrive(thread, to, claim)?),
            };
            Ok(block.registers_passed(thread, round).then_some(()))
        },
    );
}

/// An exchange of a full warp, which has to agree on the operation and its `parameter`: everybody's values.
/// `ordered` ones order memory too.
#[track_caller]
pub(crate) fn warp(operation: &str, parameter: u32, value: u64, ordered: bool) -> [u64; 32] {
    warp_wide(operation, parameter, [value, 0, 0], ordered).map(|[value, ..]| value)
}

/// An exchange of the 16-byte rows or operand registers of a full warp, as [`warp`].
#[track_caller]
pub(crate) fn warp_wide(operation: &str, parameter: u32, value: [u64; 3], ordered: bool) -> [[u64; 3]; 32] {
    let mut round = None;
    wait(
        || operation.into(),
        |block, thread| {
            let round = match round {
                Some(round) => round,
                None => *round.insert(block.warp_bring(thread, (operation, parameter), value, ordered)?),
            };
            Ok(block.warp_result(thread, round))
        },
    )
}

/// `mbarrier.init`.
#[track_caller]
pub(crate) fn mbarrier_init(address: u32, arrivals: u32) {
    execute(|block, thread| block.barrier_init(thread, address, arrivals));
}

/// `mbarrier.arrive`, expecting `bytes` copied bytes.
#[track_caller]
pub(crate) fn mbarrier_arrive(address: u32, bytes: u32) {
    execute(|block, thread| block.barrier_arrive(thread, address, bytes));
}

/// `mbarrier.try_wait.parity` until it succeeds.
#[track_caller]
pub(crate) fn mbarrier_wait(address: u32, parity: u32) {
    wait(
        || format!("mbarrier.try_wait {address:#x}, parity {parity}"),
        |block, thread| Ok(block.barrier_test(thread, address, parity)?.then_some(())),
    );
}

/// `fence.mbarrier_init`.
#[track_caller]
pub(crate) fn fence_mbarrier_init() {
    execute(|block, thread| {
        block.fence_init(thread);
        Ok(())
    });
}

/// `fence.proxy.async`.
#[track_caller]
pub(crate) fn fence_proxy_async() {
    execute(|block, thread| {
        block.fence_proxy(thread);
        Ok(())
    });
}

/// `cp.async.bulk.shared.global`.
#[track_caller]
pub(crate) fn bulk_copy(to: u32, from: *const u8, bytes: u32, barrier: u32) {
    execute(|block, thread| block.bulk_copy(thread, to, from, bytes, barrier));
}

/// `cp.async.cg.shared.global` of 16 bytes.
#[track_caller]
pub(crate) fn async_copy(to: u32, from: *const u8) {
    execute(|block, thread| block.async_copy(thread, to, from));
}

/// `cp.async.commit_group`.
#[track_caller]
pub(crate) fn async_commit() {
    execute(|block, thread| {
        block.async_commit(thread);
        Ok(())
    });
}

/// `cp.async.wait_group`.
#[track_caller]
pub(crate) fn async_wait(pending: u32) {
    execute(|block, thread| {
        block.async_wait(thread, pending);
        Ok(())
    });
}

/// `pin`, of 32-bit registers.
#[track_caller]
pub(crate) fn pin(registers: &mut [u32]) {
    execute(|block, thread| {
        let (group, me, ..) = block.warpgroup(thread);
        group.pin(me, registers)
    });
}

/// `wgmma.fence`.
#[track_caller]
pub(crate) fn wgmma_fence() {
    execute(|block, thread| {
        let (group, me, ..) = block.warpgroup(thread);
        group.fence(me)
    });
}

/// `wgmma.commit_group`.
#[track_caller]
pub(crate) fn wgmma_commit() {
    execute(|block, thread| {
        let (group, me, ..) = block.warpgroup(thread);
        group.commit(me)
    });
}

/// `wgmma.mma_async`.
#[track_caller]
pub(crate) fn wgmma(kind: Kind, d: &mut [&mut [u32]], a: OperandA, b: u64, accumulate: bool) {
    execute(|block, thread| {
        let (group, me, known, shared) = block.warpgroup(thread);
        let woken = group.issue(me, known, shared, kind, d, a, b, accumulate)?;
        block.wake_warpgroup(thread, &woken);
        Ok(())
    });
}

/// `wgmma.wait_group`.
#[track_caller]
pub(crate) fn wgmma_wait(pending: u32) {
    let mut started = false;
    wait(
        || format!("wgmma.wait_group {pending}"),
        |block, thread| {
            let warp = block.warp_actor(thread);
            let (group, me, known, shared) = block.warpgroup(thread);
            if !started {
                started = true;
                group.start_wait(me, pending)?;
            }
            Ok(group.wait(me, pending, warp, known, shared).then_some(()))
        },
    );
}

/// `tcgen05.alloc`, which the warp executes together; lane 0 writes the address.
#[track_caller]
pub(crate) fn tensor_allocate(to: u32, columns: u32) {
    warp("tcgen05.alloc", columns, u64::from(to), false);
    if thread_index().is_multiple_of(32) {
        execute(|block, thread| {
            let at = block.tensor(thread).0.allocate(columns)?;
            block.store(thread, to, 4, &at.to_le_bytes())
        });
    }
    warp("tcgen05.alloc", columns, 0, false);
}

/// `tcgen05.relinquish_alloc_permit`.
#[track_caller]
pub(crate) fn tensor_relinquish() {
    warp("tcgen05.relinquish_alloc_permit", 0, 0, false);
    execute(|block, thread| {
        block.tensor(thread).0.relinquish();
        Ok(())
    });
}

/// `tcgen05.dealloc`.
#[track_caller]
pub(crate) fn tensor_deallocate(at: u32, columns: u32) {
    warp("tcgen05.dealloc", columns, u64::from(at), false);
    if thread_index().is_multiple_of(32) {
        execute(|block, thread| {
            let (tensor, known, _) = block.tensor(thread);
            tensor.deallocate(known, at, columns)
        });
    }
}

/// `tcgen05.fence::before_thread_sync`.
#[track_caller]
pub(crate) fn tensor_fence_before() {
    execute(|block, thread| {
        let (tensor, known, _) = block.tensor(thread);
        tensor.fence_before(thread, known);
        Ok(())
    });
}

/// `tcgen05.fence::after_thread_sync`.
#[track_caller]
pub(crate) fn tensor_fence_after() {
    execute(|block, thread| {
        let (tensor, known, _) = block.tensor(thread);
        tensor.fence_after(thread, known);
        Ok(())
    });
}

/// `tcgen05.mma`.
#[track_caller]
pub(crate) fn tensor_product(
    kind: TensorKind,
    d: u32,
    a: TensorOperand,
    b: u64,
    shape: u32,
    accumulate: bool,
) {
    execute(|block, thread| block.tensor_product(thread, kind, d, a, b, shape, accumulate));
}

/// `tcgen05.commit`.
#[track_caller]
pub(crate) fn tensor_commit(barrier: u32) {
    execute(|block, thread| block.tensor_commit(thread, barrier));
}

/// `tcgen05.ld.32x32b`; `packed` is `.pack::16b`.
#[track_caller]
pub(crate) fn tensor_load(registers: &mut [u32], from: u32, packed: bool) {
    warp("tcgen05.ld", from, 0, false);
    execute(|block, thread| {
        let (tensor, known, now) = block.tensor(thread);
        tensor.load(now, known, registers, from, packed)
    });
}

/// `tcgen05.wait::ld`, which hands over the registers of a load.
#[track_caller]
pub(crate) fn tensor_wait_load(registers: &mut [u32]) {
    warp("tcgen05.wait::ld", 0, 0, false);
    execute(|block, thread| block.tensor(thread).0.wait_load(thread, registers));
}

/// `tcgen05.st.32x32b`.
#[track_caller]
pub(crate) fn tensor_store(to: u32, registers: &[u32]) {
    warp("tcgen05.st", to, 0, false);
    execute(|block, thread| {
        let (tensor, known, now) = block.tensor(thread);
        tensor.store(now, known, to, registers)
    });
}

/// `tcgen05.wait::st`.
#[track_caller]
pub(crate) fn tensor_wait_store() {
    warp("tcgen05.wait::st", 0, 0, false);
    execute(|block, thread| {
        block.tensor(thread).0.wait_store(thread);
        Ok(())
    });
}
