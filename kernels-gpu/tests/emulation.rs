//! The emulation itself: instructions do what the PTX ISA says, and every rule that it holds kernels to is broken
//! here once.

use half::f16;
use kernels_gpu::emulation::{Fault, Launch, Memory, Schedule, Violation};
use kernels_gpu::formats::{e2m1, e4m3};
use kernels_gpu::kernels::tiles::swizzle_128;
use kernels_gpu::ptx::bulk_copy::global_to_shared;
use kernels_gpu::ptx::collective::{lanes_before, matching, shuffle_up, sync_warp};
use kernels_gpu::ptx::mbarrier::{Barrier, fence_init, fence_proxy_async};
use kernels_gpu::ptx::memory::{
    load_global_v4, load_shared_v4, max_global_u32, store_global_v4, store_shared_v4,
};
use kernels_gpu::ptx::shuffle::{any, permute, shuffle_xor, warp_max_u32};
use kernels_gpu::ptx::special::{
    arrive_named, block_idx_x, block_idx_y, block_idx_z, claim_registers, release_registers, sync_named,
    sync_threads, thread_idx_x,
};
use kernels_gpu::ptx::wgmma::{self, Descriptor, pin};
use kernels_gpu::ptx::{SharedAddr, async_copy, convert, f16x2, ldmatrix, mma, shared};
use proptest::prelude::*;

/// Start of dynamic shared memory in a launch.
const BASE: SharedAddr = SharedAddr(1024);

/// Runs one block without buffers.
fn launch(threads: u32, shared: u32, kernel: impl Fn()) -> Result<(), Fault> {
    Launch::new(threads, shared).run(&Memory::new(), kernel)
}

/// The rule that a kernel breaks under every schedule.
fn violation(threads: u32, shared: u32, kernel: impl Fn()) -> Violation {
    let run = |schedule| {
        let fault = Launch::new(threads, shared).schedule(schedule).run(&Memory::new(), &kernel);
        fault.expect_err("the kernel breaks a rule").violation
    };
    let first = run(Schedule::Oldest);
    for schedule in [Schedule::Newest, Schedule::Random(1), Schedule::Random(2)] {
        let other = run(schedule);
        let same = std::mem::discriminant(&first) == std::mem::discriminant(&other);
        assert!(same, "{schedule:?} finds {other}, not {first}");
    }
    first
}

macro_rules! assert_violation {
    ($found:expr, $rule:pat) => {
        let found = $found;
        assert!(matches!(found, $rule), "{found}");
    };
}

/// Calls of wrappers: the launches below either keep their contracts or break them on purpose.
macro_rules! gpu {
    ($($body:tt)*) => {
        // SAFETY: the emulation checks the contracts of the wrappers.
        unsafe { $($body)* }
    };
}

// Instructions.

#[test]
fn every_thread_of_every_block_runs_once() {
    let mut gpu = Memory::new();
    let seen = gpu.output::<u32>("seen", 2 * 3 * 2 * 40 * 4);
    let launch = Launch::new(40, 0).grid([2, 3, 2]);
    launch
        .run(&gpu, || {
            let block = block_idx_x() + 2 * (block_idx_y() + 3 * block_idx_z());
            let at = (block * 40 + thread_idx_x()) as usize;
            gpu!(store_global_v4(seen.add(4 * at).cast(), [at as u32; 4]));
        })
        .expect("no fault");
    let expected: Vec<u32> = (0..2 * 3 * 2 * 40).flat_map(|i| [i; 4]).collect();
    assert_eq!(gpu.read(seen), expected);
}

#[test]
fn lanes_exchange_values() {
    launch(64, 0, || {
        let thread = thread_idx_x();
        let (warp, lane) = (thread / 32, thread % 32);
        gpu! {
            assert_eq!(shuffle_xor::<5>(thread), warp * 32 + (lane ^ 5));
            assert_eq!(shuffle_up::<3>(thread), warp * 32 + lane.checked_sub(3).unwrap_or(lane));
            assert_eq!(any(thread == 40), warp == 1);
            assert_eq!(warp_max_u32(thread % 31), 30);
            assert_eq!(matching(lane % 3), (0..32).filter(|i| i % 3 == lane % 3).map(|i| 1 << i).sum::<u32>());
        }
        assert_eq!(lanes_before().count_ones(), lane);
    })
    .expect("no fault");
}

#[test]
fn bytes_are_picked_and_signs_spread() {
    assert_eq!(permute(0x3322_1100, 0x7766_5544, 0x6420), 0x6644_2200);
    assert_eq!(permute(0x3322_1180, 0x7766_5544, 0x9078), 0x0080_77ff);
}

#[test]
fn a_launch_is_needed() {
    let outside = std::panic::catch_unwind(thread_idx_x).expect_err("no launch");
    let fault = outside.downcast::<Fault>().expect("a fault");
    assert!(matches!(fault.violation, Violation::Outside));
}

proptest! {
    #[test]
    fn f16_arithmetic_rounds_once(a: u16, b: u16, c: u16) {
        let [x, y, z] = [a, b, c].map(f16::from_bits);
        let [xx, yy, zz] = [a, b, c].map(f16x2::splat);
        let value = |pair: u32| {
            let (low, high) = convert::f32_of_f16x2(pair);
            assert_eq!(low.to_bits(), high.to_bits(), "both halves alike");
            low
        };
        let nan = x.is_nan() || y.is_nan();
        let max = x.to_f32().max(y.to_f32());
        prop_assert!(value(f16x2::max(xx, yy)) == max || x.is_nan() && y.is_nan());
        let max_nan = value(f16x2::max_nan(xx, yy));
        prop_assert!(nan && max_nan.is_nan() || !nan && max_nan == max);
        let found = [f16x2::add(xx, yy), f16x2::sub(xx, yy), f16x2::mul(xx, yy), f16x2::fma(xx, yy, zz)].map(value);
        if x.is_finite() && y.is_finite() && z.is_finite() {
            // Exact in integers: units of 2^-48, at most 2^81.
            let [x, y, z] = [x, y, z].map(|x| (x.to_f64() * 2f64.powi(24)) as i128);
            let exact = [(x + y) << 24, (x - y) << 24, x * y, x * y + (z << 24)];
            for (exact, found) in exact.into_iter().zip(found) {
                prop_assert!(nearest(exact, found), "{exact} 2^-48 is not {found}");
            }
        } else if nan {
            prop_assert!(found.iter().all(|x| x.is_nan()));
        }
    }
}

/// Whether `found` is the f16 nearest to `exact` 2^-48, ties to even.
fn nearest(exact: i128, found: f32) -> bool {
    let found = f16::from_f32(found);
    if found.is_infinite() {
        // Halfway between the largest f16 and the next power of two.
        return exact.abs() >= 65520 << 48;
    }
    let distance = |x: f16| (exact - ((x.to_f64() * 2f64.powi(24)) as i128).wrapping_shl(24)).abs();
    let bits = found.to_bits();
    let neighbours = [bits.wrapping_add(1), bits.wrapping_sub(1)].map(f16::from_bits);
    neighbours.iter().filter(|n| n.is_finite()).all(|n| {
        let (own, other) = (distance(found), distance(*n));
        own < other || own == other && bits.is_multiple_of(2) || n.to_f32() == found.to_f32()
    })
}

// Shared memory and its barriers.

#[test]
fn a_block_transposes_through_shared_memory() {
    launch(128, 128 * 16, || {
        let thread = thread_idx_x();
        gpu! {
            store_shared_v4(BASE.add(thread * 16), [thread; 4]);
            sync_threads();
            assert_eq!(load_shared_v4(BASE.add((127 - thread) * 16)), [127 - thread; 4]);
            sync_threads();
            shared::store_u32(BASE.add(thread * 4), 0);
            sync_threads();
            shared::add_u32(BASE.add(thread % 2 * 4), 1);
            shared::max_u32(BASE.add(8), thread);
            sync_threads();
            assert_eq!(shared::load_v2(BASE), [64, 64]);
            assert_eq!(shared::load_u32(BASE.add(8)), 127);
        }
    })
    .expect("no fault");
}

#[test]
fn without_a_barrier_there_is_a_race() {
    let kernel = |barrier: bool, write_back: bool| {
        move || {
            let thread = thread_idx_x();
            gpu! {
                store_shared_v4(BASE.add(thread * 16), [thread; 4]);
                sync_threads();
                let other = load_shared_v4(BASE.add((thread ^ 32) * 16));
                if barrier {
                    sync_threads();
                }
                if write_back {
                    store_shared_v4(BASE.add(thread * 16), other);
                }
            }
        }
    };
    launch(64, 1024, kernel(true, true)).expect("ordered");
    launch(64, 1024, kernel(false, false)).expect("only read");
    assert_violation!(violation(64, 1024, kernel(false, true)), Violation::Race { .. });
    let read = || {
        gpu! {
            if thread_idx_x() == 40 {
                shared::store_u32(BASE, 1);
            }
            shared::load_u32(BASE);
        }
    };
    assert_violation!(violation(64, 16, read), Violation::Race { .. } | Violation::Uninitialized(_));
}

#[test]
fn shuffles_order_no_memory_but_warp_barriers_do() {
    let kernel = |barrier: bool| {
        move || {
            let lane = thread_idx_x();
            gpu! {
                shared::store_u32(BASE.add(lane * 4), lane);
                if barrier { sync_warp() } else { warp_max_u32(lane); }
                assert_eq!(shared::load_u32(BASE.add((31 - lane) * 4)), 31 - lane);
            }
        }
    };
    launch(32, 128, kernel(true)).expect("ordered");
    assert_violation!(violation(32, 128, kernel(false)), Violation::Race { access: "read", .. });
}

#[test]
fn reductions_race_with_everything_else() {
    let kernel = || {
        gpu! {
            if thread_idx_x() == 0 {
                shared::store_u32(BASE, 0);
            }
            sync_threads();
            shared::add_u32(BASE, 1);
            sync_warp();
            shared::load_u32(BASE);
        }
    };
    launch(32, 4, kernel).expect("one warp");
    assert_violation!(violation(64, 4, kernel), Violation::Race { .. });
}

#[test]
fn accesses_stay_inside_and_aligned() {
    let load = |address: u32| {
        move || {
            gpu!(load_shared_v4(SharedAddr(address)));
        }
    };
    assert_violation!(violation(1, 64, load(1024 + 64)), Violation::SharedBounds { .. });
    assert_violation!(violation(1, 64, load(1024 + 56)), Violation::SharedBounds { .. });
    assert_violation!(violation(1, 64, load(0)), Violation::SharedBounds { .. });
    assert_violation!(violation(1, 64, load(1024 + 8)), Violation::Misaligned { alignment: 16, .. });
    assert_violation!(violation(1, 64, load(1024)), Violation::Uninitialized(1024));
}

#[test]
fn global_accesses_stay_in_buffers() {
    let mut gpu = Memory::new();
    let input = gpu.input("input", &[1u32; 8]);
    let output = gpu.output::<u32>("output", 8);
    let run = |kernel: &dyn Fn()| Launch::new(1, 0).run(&gpu, kernel).map_err(|fault| fault.violation);
    run(&|| gpu!(store_global_v4(output.add(4).cast(), load_global_v4(input.add(4).cast()))))
        .expect("inside");
    let outside = run(&|| {
        gpu!(load_global_v4(input.add(8).cast()));
    });
    assert!(matches!(outside, Err(Violation::GlobalBounds { .. })));
    let outside = run(&|| gpu!(store_global_v4(input.cast_mut().cast(), [0; 4])));
    assert!(matches!(outside, Err(Violation::ReadOnly(name)) if name == "input"));
    let outside = run(&|| {
        gpu!(load_global_v4(input.cast::<u8>().add(4)));
    });
    assert!(matches!(outside, Err(Violation::Misaligned { .. })));
    run(&|| gpu!(max_global_u32(output.add(4), 7))).expect("inside");
    // Plain accesses are found after the launch.
    let outside = run(&|| gpu!(output.add(8).write(3)));
    assert!(matches!(outside, Err(Violation::RedZone { offset: 32, .. })));
    gpu!(output.add(8).write(u32::MAX));
    let outside = run(&|| gpu!(input.cast_mut().add(1).write(3)));
    assert!(matches!(outside, Err(Violation::InputChanged { offset: 4, .. })));
}

#[test]
fn a_missing_thread_is_a_deadlock_with_names() {
    let fault = launch(64, 0, || {
        if thread_idx_x() != 33 {
            gpu!(sync_threads());
        }
    });
    let fault = fault.expect_err("thread 33 is missing");
    let Violation::Deadlock(waiting) = &fault.violation else { panic!("{fault}") };
    assert_eq!(waiting.len(), 1);
    assert_eq!(waiting[0].operation, "bar.sync 0");
    assert_eq!(waiting[0].threads, (0..64).filter(|t| *t != 33).collect::<Vec<_>>());
    assert!(waiting[0].at.is_some_and(|at| at.file().ends_with("emulation.rs")));
    assert!(fault.to_string().contains("threads 0-32, 34-63 wait in bar.sync 0"), "{fault}");
    let warp = violation(32, 0, || {
        if thread_idx_x() != 7 {
            gpu!(any(true));
        }
    });
    assert_violation!(warp, Violation::Deadlock(_));
}

#[test]
fn warps_agree_on_what_they_execute() {
    let kernel = || {
        gpu!(if thread_idx_x().is_multiple_of(2) { shuffle_xor::<1>(0) } else { shuffle_xor::<2>(0) });
    };
    assert_violation!(violation(32, 0, kernel), Violation::Diverged { .. });
}

#[test]
fn named_barriers_hand_over() {
    let kernel = |wrong: bool| {
        move || {
            let thread = thread_idx_x();
            gpu! {
                if thread < 32 {
                    shared::store_u32(BASE.add(thread * 4), thread);
                    arrive_named::<3, 96>();
                } else if wrong && thread >= 64 {
                    sync_named::<3, 64>();
                } else {
                    sync_named::<3, 96>();
                    assert_eq!(shared::load_u32(BASE.add(thread % 32 * 4)), thread % 32);
                }
            }
        }
    };
    launch(96, 128, kernel(false)).expect("ordered");
    let found = violation(96, 128, kernel(true));
    assert_violation!(found, Violation::BarrierCount { id: 3, .. });
}

#[test]
fn panics_of_a_kernel_are_faults() {
    let fault = launch(32, 0, || {
        let beyond = thread_idx_x() as usize + 9;
        assert!(beyond < 32, "lane {beyond}");
    });
    let fault = fault.expect_err("an assertion fails");
    assert_eq!(fault.thread, Some(23));
    assert!(matches!(fault.violation, Violation::Panic(text) if text == "lane 32"));
}

#[test]
fn registers_move_between_warpgroups() {
    let kernel = |give: bool| {
        move || {
            gpu! {
                if thread_idx_x() < 256 {
                    claim_registers::<240>();
                } else if give {
                    release_registers::<24>();
                }
            }
        }
    };
    launch(384, 0, kernel(true)).expect("240 + 240 + 24 registers fit");
    assert_violation!(violation(384, 0, kernel(false)), Violation::Deadlock(_));
    let odd = || gpu!(release_registers::<20>());
    assert_violation!(violation(128, 0, odd), Violation::Registers { .. });
    let shrink = || gpu!(claim_registers::<24>());
    assert_violation!(violation(128, 0, shrink), Violation::Registers { .. });
}

// mbarriers and bulk copies.

/// The barrier of the launches below: behind 256 bytes of data.
const BARRIER: Barrier = Barrier::at(SharedAddr(1024 + 256));

/// Thread 0 initializes [`BARRIER`], then the block meets.
fn init(arrivals: u32) {
    gpu! {
        if thread_idx_x() == 0 {
            BARRIER.init(arrivals);
            fence_init();
        }
        sync_threads();
    }
}

/// A launch of 32 threads with an input of 256 bytes.
fn copying(kernel: impl Fn(*const u8)) -> Result<(), Violation> {
    let mut gpu = Memory::new();
    let input = gpu.input("input", &(0..=255u8).collect::<Vec<_>>());
    Launch::new(32, 264).run(&gpu, || kernel(input)).map_err(|fault| fault.violation)
}

#[test]
fn bulk_copies_arrive_with_their_phase() {
    copying(|input| {
        init(1);
        gpu! {
            if thread_idx_x() == 0 {
                BARRIER.arrive_expect(256);
                global_to_shared(BASE, input, 128, BARRIER);
                global_to_shared(BASE.add(128), input.add(128), 128, BARRIER);
            }
            BARRIER.wait(0);
            assert_eq!(load_shared_v4(BASE.add(16))[0], 0x1312_1110);
            assert_eq!(load_shared_v4(BASE.add(240))[3], 0xfffe_fdfc);
        }
    })
    .expect("no fault");
}

#[test]
fn bytes_of_a_copy_are_nobodys_until_its_phase_was_seen() {
    for waits in [false, true] {
        let found = copying(|input| {
            init(1);
            gpu! {
                if thread_idx_x() == 0 {
                    BARRIER.arrive_expect(16);
                    global_to_shared(BASE, input, 16, BARRIER);
                }
                // All wait, only one, or nobody: that one has waited helps only itself.
                if waits && thread_idx_x() != 9 {
                    BARRIER.wait(0);
                }
                sync_warp();
                if waits || thread_idx_x() == 9 {
                    load_shared_v4(BASE);
                }
            }
        });
        if waits {
            // The warp barrier hands over what the others have seen.
            found.expect("ordered by the warp barrier");
        } else {
            assert!(matches!(found, Err(Violation::CopyInFlight(1024))));
        }
    }
    let unseen = copying(|input| {
        init(1);
        gpu! {
            if thread_idx_x() == 0 {
                BARRIER.arrive_expect(16);
                global_to_shared(BASE, input, 16, BARRIER);
            }
            if thread_idx_x() < 31 {
                BARRIER.wait(0);
                any_of(1);
            } else {
                any_of(1);
            }
            load_shared_v4(BASE);
        }
    });
    assert!(matches!(unseen, Err(Violation::Race { access: "read", .. })), "{unseen:?}");
}

// Copies of a thread.

#[test]
fn async_copies_are_their_threads_after_the_wait() {
    copying(|input| {
        let lane = thread_idx_x();
        gpu! {
            if lane < 16 {
                async_copy::copy_16(BASE.add(lane * 16), input.add(lane as usize * 16));
            }
            async_copy::commit_group();
            async_copy::wait_group::<0>();
            if lane < 16 {
                assert_eq!(load_shared_v4(BASE.add(lane * 16))[0], 0x0302_0100 + lane * 0x1010_1010);
            }
            sync_warp();
            assert_eq!(load_shared_v4(BASE.add(240))[3], 0xfffe_fdfc);
        }
    })
    .expect("no fault");
}

/// Lane 0 copies two groups of 16 bytes each and waits for all but `PENDING`, then `reader` reads 16 bytes at `at`, behind
/// a warp barrier if there is one.
fn copied<const PENDING: u32>(commit: bool, reader: u32, at: u32, barrier: bool) -> Result<(), Violation> {
    copying(|input| {
        gpu! {
            if thread_idx_x() == 0 {
                async_copy::copy_16(BASE, input);
                async_copy::commit_group();
                async_copy::copy_16(BASE.add(16), input.add(16));
                if commit {
                    async_copy::commit_group();
                }
                async_copy::wait_group::<PENDING>();
            }
            if barrier { sync_warp() } else { any_of(1) }
            if thread_idx_x() == reader {
                load_shared_v4(BASE.add(at));
            }
            any_of(1);
            if thread_idx_x() == 0 {
                async_copy::commit_group();
                async_copy::wait_group::<0>();
            }
        }
    })
}

#[test]
fn unwaited_async_copies_may_not_be_touched() {
    copied::<0>(true, 0, 16, false).expect("its own thread");
    copied::<0>(true, 5, 16, true).expect("behind a barrier");
    copied::<1>(true, 5, 0, true).expect("the group that was waited for");
    assert!(matches!(copied::<1>(true, 0, 16, false), Err(Violation::AsyncCopyInFlight(1040))));
    assert!(matches!(copied::<2>(true, 5, 0, true), Err(Violation::AsyncCopyInFlight(1024))));
    // In no group yet.
    assert!(matches!(copied::<0>(false, 0, 16, false), Err(Violation::AsyncCopyInFlight(1040))));
    assert!(matches!(copied::<0>(true, 5, 16, false), Err(Violation::Race { access: "read", .. })));
}

#[test]
fn async_copies_take_what_the_instruction_takes() {
    let copy = |to: u32, from: isize| {
        copying(move |input| {
            gpu! {
                if thread_idx_x() == 0 {
                    async_copy::copy_16(SharedAddr(to), input.offset(from));
                    async_copy::commit_group();
                    async_copy::wait_group::<0>();
                }
            }
        })
    };
    copy(1024, 240).expect("no fault");
    assert!(matches!(copy(1032, 0), Err(Violation::Misaligned { alignment: 16, .. })));
    assert!(matches!(copy(1024, 8), Err(Violation::Misaligned { alignment: 16, .. })));
    assert!(matches!(copy(1024, 256), Err(Violation::GlobalBounds { .. })));
    assert!(matches!(copy(1024 + 256, 0), Err(Violation::SharedBounds { .. })));
}

#[test]
fn async_copies_overwrite_only_what_everybody_has_read() {
    let copy = |barrier: bool| {
        copying(move |input| {
            let lane = thread_idx_x();
            gpu! {
                if lane == 0 {
                    store_shared_v4(BASE, [1; 4]);
                }
                sync_warp();
                load_shared_v4(BASE);
                if barrier {
                    sync_warp();
                } else {
                    any_of(1);
                }
                if lane == 0 {
                    async_copy::copy_16(BASE, input);
                    async_copy::commit_group();
                    async_copy::wait_group::<0>();
                }
            }
        })
    };
    copy(true).expect("no fault");
    assert!(matches!(copy(false), Err(Violation::Race { access: "write", .. })));
    let left = copying(|input| {
        gpu! {
            if thread_idx_x() == 0 {
                async_copy::copy_16(BASE, input);
            }
            async_copy::commit_group();
            async_copy::wait_group::<1>();
        }
    });
    assert!(matches!(left, Err(Violation::LeftInFlight(_))));
    // A write over one that is in flight.
    let over = copying(|input| {
        gpu! {
            async_copy::copy_16(BASE.add(thread_idx_x() % 16 * 16), input);
            async_copy::commit_group();
            async_copy::wait_group::<0>();
        }
    });
    assert!(matches!(over, Err(Violation::AsyncCopyInFlight(_) | Violation::Race { access: "write", .. })));
}

/// A meeting of the warp that orders no memory.
fn any_of(value: u32) {
    gpu!(warp_max_u32(value));
}

#[test]
fn a_copy_into_used_bytes_is_found() {
    let written = |fence: bool, order: bool| {
        copying(move |input| {
            init(1);
            gpu! {
                shared::store_u32(BASE.add(thread_idx_x() * 4), 1);
                if fence {
                    fence_proxy_async();
                }
                if order {
                    sync_threads();
                }
                if thread_idx_x() == 0 {
                    BARRIER.arrive_expect(128);
                    global_to_shared(BASE, input, 128, BARRIER);
                }
                BARRIER.wait(0);
            }
        })
    };
    written(true, true).expect("ordered and fenced");
    assert!(matches!(written(false, true), Err(Violation::ProxyFence { .. })));
    assert!(matches!(written(true, false), Err(Violation::Race { .. } | Violation::CopyInFlight(_))));
}

#[test]
fn barriers_are_initialized_published_and_not_overrun() {
    let early = copying(|input| gpu!(global_to_shared(BASE, input, 16, BARRIER)));
    assert!(matches!(early, Err(Violation::NoBarrier(_))));
    let unpublished = copying(|input| {
        gpu! {
            if thread_idx_x() == 0 {
                BARRIER.init(1);
                BARRIER.arrive_expect(16);
                global_to_shared(BASE, input, 16, BARRIER);
            }
        }
    });
    assert!(matches!(unpublished, Err(Violation::BarrierFence(_))), "{unpublished:?}");
    let twice = || {
        gpu! {
            BARRIER.init(1);
            BARRIER.init(1);
        }
    };
    assert_violation!(violation(1, 264, twice), Violation::BarrierInit(_));
    assert_violation!(violation(1, 264, || gpu!(BARRIER.init(0))), Violation::BarrierInit(_));
    let bytes = || {
        init(1);
        gpu!(load_shared_v4(BARRIER.addr()));
    };
    assert_violation!(violation(1, 272, bytes), Violation::BarrierBytes(_));
    let unordered = || {
        gpu! {
            if thread_idx_x() == 0 {
                BARRIER.init(1);
            }
            BARRIER.wait(1);
        }
    };
    assert_violation!(violation(32, 264, unordered), Violation::NoBarrier(_));
}

#[test]
fn arrivals_are_counted() {
    // A phase of 2 arrivals and 16 bytes that never come: the third arrival is one too many.
    let beyond = || {
        init(2);
        gpu! {
            BARRIER.arrive_expect(16);
            BARRIER.arrive();
            BARRIER.arrive();
        }
    };
    assert_violation!(violation(1, 264, beyond), Violation::TooManyArrivals(_));
    let bytes = || {
        init(1);
        gpu!(BARRIER.arrive_expect(1 << 20));
    };
    assert_violation!(violation(1, 264, bytes), Violation::TransactionCount(_));
    let never = || {
        init(1);
        gpu!(BARRIER.wait(0));
    };
    assert_violation!(violation(1, 264, never), Violation::Deadlock(_));
    // The phase before the first counts as complete.
    let fresh = || {
        init(1);
        gpu!(BARRIER.wait(1));
    };
    launch(1, 264, fresh).expect("no fault");
}

#[test]
fn a_waiter_that_can_miss_a_phase_is_found() {
    let kernel = || {
        init(1);
        gpu! {
            if thread_idx_x() < 32 {
                BARRIER.wait(0);
            } else if thread_idx_x() == 32 {
                // Two phases, and nothing makes the second wait until all have seen the first.
                BARRIER.arrive();
                BARRIER.arrive();
            }
        }
    };
    let run = |schedule| Launch::new(64, 264).schedule(schedule).run(&Memory::new(), kernel);
    let found = run(Schedule::Oldest).expect_err("a waiter can miss it").violation;
    assert_violation!(found, Violation::PhaseMissed(_));
}

#[test]
fn nothing_is_left_in_flight() {
    let copy = copying(|input| {
        init(1);
        if thread_idx_x() == 0 {
            gpu! {
                BARRIER.arrive_expect(16);
                global_to_shared(BASE, input, 16, BARRIER);
            }
        }
    });
    assert!(matches!(copy, Err(Violation::LeftInFlight(_))));
}

// Products.

/// Bytes of an operand tile: as many swizzled rows of 128 bytes.
fn put_tile(at: SharedAddr, rows: u32, byte: impl Fn(usize, usize) -> u8) {
    let threads = 128;
    let mut chunk = thread_idx_x();
    while chunk < rows * 8 {
        let (row, column) = (chunk as usize / 8, chunk as usize % 8 * 16);
        let words = std::array::from_fn(|w| {
            u32::from_le_bytes(std::array::from_fn(|b| byte(row, column + 4 * w + b)))
        });
        gpu!(store_shared_v4(at.add(swizzle_128(row, column) as u32), words));
        chunk += threads;
    }
}

/// A byte that looks random.
fn noise(row: usize, column: usize, seed: usize) -> u8 {
    let x = (row * 131 + column * 31 + seed * 7919).wrapping_mul(0x9e37_79b9) >> 7;
    (x ^ x >> 11) as u8
}

/// Where register `register` of f32 or s32 accumulators lies for this thread: row and column.
fn place(register: usize) -> (usize, usize) {
    let thread = thread_idx_x() as usize;
    let row = thread / 32 * 16 + thread % 32 / 4 + register / 2 % 2 * 8;
    (row, register / 4 * 8 + thread % 4 * 2 + register % 2)
}

const A: SharedAddr = BASE;
const B: SharedAddr = SharedAddr(BASE.0 + 64 * 128);
const TILES: u32 = 64 * 128 + 136 * 128;

/// Fences and meets: what was written can be an operand.
fn publish() {
    gpu! {
        fence_proxy_async();
        sync_threads();
    }
}

#[test]
fn int8_products_are_exact() {
    launch(128, TILES, || {
        let (a, b) = (|r, c| noise(r, c, 1), |r, c| noise(r, c, 2));
        put_tile(A, 64, a);
        put_tile(B, 128, b);
        publish();
        let mut d = [7i32; 64];
        gpu! {
            pin(&mut d);
            wgmma::fence();
            for step in 0..4 {
                let (a, b) = (Descriptor::swizzled(A).add(32 * step), Descriptor::swizzled(B).add(32 * step));
                wgmma::m64n128k32_s32_s8(&mut d, a, b, true);
            }
            wgmma::commit();
            wgmma::wait::<0>();
            pin(&mut d);
        }
        for (i, d) in d.iter().enumerate() {
            let (row, column) = place(i);
            let products = (0..128).map(|k| i32::from(a(row, k) as i8) * i32::from(b(column, k) as i8));
            assert_eq!(*d, 7 + products.sum::<i32>(), "row {row}, column {column}");
        }
    })
    .expect("no fault");
}

#[test]
fn f16_scores_round_after_every_step() {
    let value = |x: u8| f16::from_f32((f32::from(x) - 128.0) / 64.0);
    let half = |row: usize, byte: usize, seed| value(noise(row, byte / 2, seed)).to_le_bytes()[byte % 2];
    launch(128, TILES, || {
        put_tile(A, 64, |r, c| half(r, c, 3));
        put_tile(B, 128, |r, c| half(r, c, 4));
        publish();
        let mut d = [0u32; 32];
        gpu! {
            pin(&mut d);
            wgmma::fence();
            for step in 0..4 {
                let (a, b) = (Descriptor::swizzled(A).add(32 * step), Descriptor::swizzled(B).add(32 * step));
                wgmma::m64n128k16_f16_f16(&mut d, a, b, step > 0);
            }
            wgmma::commit();
            wgmma::wait::<0>();
            pin(&mut d);
        }
        for (i, pair) in d.iter().enumerate() {
            // Register 2j + r: columns 8j + 2q + {0, 1} of row r; the same place as f32 registers 4j + 2r + {0, 1}.
            let found = convert::f32_of_f16x2(*pair);
            for (part, found) in [found.0, found.1].into_iter().enumerate() {
                let (row, column) = place(2 * i + part);
                let expected = (0..4).fold(0.0, |sum, step| {
                    let product = |k| value(noise(row, k, 3)).to_f32() * value(noise(column, k, 4)).to_f32();
                    // Products are multiples of 2^-12 below 4: f32 sums of 16 are exact.
                    f16::from_f32(sum + (16 * step..16 * step + 16).map(product).sum::<f32>()).to_f32()
                });
                assert_eq!(found, expected, "row {row}, column {column}");
            }
        }
    })
    .expect("no fault");
}

#[test]
fn fp8_products_from_registers_and_their_row_sums() {
    // Bytes of exponents around 1, so that f32 sums are exact.
    let code = |row, k, seed| noise(row, k, seed) & 0x8f | 0x30;
    launch(128, TILES, || {
        put_tile(B, 128, |r, c| code(r, c, 5));
        put_tile(B.add(128 * 128), 8, |_, _| 0x38);
        publish();
        let thread = thread_idx_x() as usize;
        let row = thread / 32 * 16 + thread % 32 / 4;
        // Register 2h + r of a step: 4 bytes at 16h + 4q of row r.
        let mut a: [u32; 16] = std::array::from_fn(|i| {
            let (step, half, lower) = (i / 4, i / 2 % 2, i % 2);
            let first = 32 * step + 16 * half + 4 * (thread % 4);
            u32::from_le_bytes(std::array::from_fn(|b| code(row + 8 * lower, first + b, 6)))
        });
        let (mut d, mut ones) = ([0f32; 64], [0f32; 4]);
        gpu! {
            pin(&mut d);
            pin(&mut ones);
            pin(&mut a);
            wgmma::fence();
            for step in 0..4 {
                let fragment = [a[4 * step], a[4 * step + 1], a[4 * step + 2], a[4 * step + 3]];
                let b = Descriptor::swizzled(B).add(32 * step as u32);
                wgmma::m64n136k32_f32_e4m3(&mut d, &mut ones, fragment, b, step > 0);
            }
            wgmma::commit();
            wgmma::wait::<0>();
            pin(&mut d);
            pin(&mut ones);
        }
        for (i, d) in d.iter().enumerate() {
            let (row, column) = place(i);
            let product = |k| e4m3::decode(code(row, k, 6)) * e4m3::decode(code(column, k, 5));
            assert_eq!(*d, (0..128).map(product).sum::<f32>(), "row {row}, column {column}");
        }
        for (r, sum) in [ones[0], ones[2]].into_iter().enumerate() {
            assert_eq!(sum, (0..128).map(|k| e4m3::decode(code(row + 8 * r, k, 6))).sum::<f32>());
        }
    })
    .expect("no fault");
}

#[test]
fn core_matrices_without_swizzle() {
    let value = |x: u8| f16::from_f32((f32::from(x) - 128.0) / 64.0);
    launch(128, TILES, || {
        // B: 128 rows of 16 f16 in core matrices, 128 bytes along K and 256 along rows.
        let thread = thread_idx_x() as usize;
        for chunk in [0, 8] {
            let words = std::array::from_fn(|w| {
                let pair = [0, 1].map(|i| value(noise(thread, chunk + 2 * w + i, 8)).to_bits());
                u32::from(pair[0]) | u32::from(pair[1]) << 16
            });
            gpu!(store_shared_v4(A.add((thread / 8 * 256 + chunk * 16 + thread % 8 * 16) as u32), words));
        }
        publish();
        let row = thread / 32 * 16 + thread % 32 / 4;
        let mut a: [u32; 4] = std::array::from_fn(|i| {
            let first = i / 2 * 8 + thread % 4 * 2;
            let pair = [0, 1].map(|b| value(noise(row + 8 * (i % 2), first + b, 9)).to_bits());
            u32::from(pair[0]) | u32::from(pair[1]) << 16
        });
        let mut d = [1f32; 64];
        gpu! {
            pin(&mut d);
            pin(&mut a);
            wgmma::fence();
            wgmma::m64n128k16_f32_f16(&mut d, a, Descriptor::plain(A, 128, 256), true);
            wgmma::commit();
            wgmma::wait::<0>();
            pin(&mut d);
        }
        for (i, d) in d.iter().enumerate() {
            let (row, column) = place(i);
            let product = |k| value(noise(row, k, 9)).to_f32() * value(noise(column, k, 8)).to_f32();
            assert_eq!(*d, 1.0 + (0..16).map(product).sum::<f32>(), "row {row}, column {column}");
        }
    })
    .expect("no fault");
}

/// A register of 16-bit values in a row, from column `k` on.
fn pair_of_f16(row: usize, k: usize, seed: usize) -> u32 {
    let [low, high] = [k, k + 1].map(|k| u32::from(small(noise(row, k, seed)).to_bits()));
    low | high << 16
}

/// An f16 of few bits.
fn small(x: u8) -> f16 {
    f16::from_f32((f32::from(x) - 128.0) / 64.0)
}

/// A register of bytes in a row, from column `k` on.
fn four_bytes(row: usize, k: usize, seed: usize) -> u32 {
    u32::from_le_bytes(std::array::from_fn(|i| e4m3_noise(row, k + i, seed)))
}

/// A byte of E4M3 between -2 and 2 that is not NaN.
fn e4m3_noise(row: usize, column: usize, seed: usize) -> u8 {
    noise(row, column, seed) & 0xbf
}

/// A lane's registers of A (16 x 8 `elements`) and B, figures of PTX ISA 9.7.14.5.8 and 9.7.14.5.10.
fn fragments(elements: usize, register: fn(usize, usize, usize) -> u32) -> ([u32; 4], [u32; 2]) {
    let (g, q) = (thread_idx_x() as usize % 32 / 4, thread_idx_x() as usize % 4);
    let a = std::array::from_fn(|i| register(g + i % 2 * 8, elements * q + i / 2 * 4 * elements, 1));
    let b = std::array::from_fn(|i| register(g, elements * q + i * 4 * elements, 2));
    (a, b)
}

/// Where element `i` of a lane's four of D lies.
fn place_of(i: usize) -> (usize, usize) {
    let (g, q) = (thread_idx_x() as usize % 32 / 4, thread_idx_x() as usize % 4);
    (g + i / 2 * 8, 2 * q + i % 2)
}

#[test]
fn warp_products() {
    launch(32, 0, || {
        let f16_product = |row: usize, column: usize| {
            (0..16)
                .map(|k| small(noise(row, k, 1)).to_f32() * small(noise(column, k, 2)).to_f32())
                .sum::<f32>()
        };
        let (a, b) = fragments(2, pair_of_f16);
        let (mut wide, mut narrow) = ([0.5; 4], [f16x2::splat(f16::from_f32(0.5).to_bits()); 2]);
        gpu! {
            mma::m16n8k16_f32_f16(&mut wide, a, b);
            mma::m16n8k16_f16_f16(&mut narrow, a, b);
        }
        let e4m3_product = |row: usize, column: usize| {
            let value = |row, k, seed| e4m3::decode(e4m3_noise(row, k, seed));
            (0..32).map(|k| value(row, k, 1) * value(column, k, 2)).sum::<f32>()
        };
        let (a, b) = fragments(4, four_bytes);
        let (mut wide8, mut narrow8) = ([0.25; 4], [f16x2::splat(f16::from_f32(0.25).to_bits()); 2]);
        let mut whole = [7u32; 4];
        gpu! {
            mma::m16n8k32_f32_e4m3(&mut wide8, a, b);
            mma::m16n8k32_f16_e4m3(&mut narrow8, a, b);
            mma::m16n8k32_s32_s8(&mut whole, a, b);
        }
        for i in 0..4 {
            let (row, column) = place_of(i);
            let rounded = |x: f32| f16::from_f32(x).to_bits();
            let half = |d: [u32; 2]| (d[i / 2] >> (i % 2 * 16)) as u16;
            assert_eq!(wide[i], 0.5 + f16_product(row, column));
            assert_eq!(half(narrow), rounded(0.5 + f16_product(row, column)), "row {row}, column {column}");
            assert_eq!(wide8[i], 0.25 + e4m3_product(row, column));
            assert_eq!(half(narrow8), rounded(0.25 + e4m3_product(row, column)));
            let signed = |row, k, seed| i32::from(e4m3_noise(row, k, seed) as i8);
            let exact: i32 = (0..32).map(|k| signed(row, k, 1) * signed(column, k, 2)).sum();
            assert_eq!(whole[i] as i32, 7 + exact);
        }
    })
    .expect("no fault");
}

fn eight_nibbles(row: usize, k: usize, seed: usize) -> u32 {
    (0..8).fold(0, |word, i| word | u32::from(noise(row, k + i, seed) & 0xf) << (4 * i))
}

/// The scales of a row or column along k, as they lie in a register.
fn four_scales(row: usize, seed: usize) -> u32 {
    u32::from_le_bytes(std::array::from_fn(|i| 0x30 + (noise(row, i, seed) & 0x1f)))
}

/// Every pair of selectors against sums in f64; what they do not select is NaN.
#[test]
fn block_scaled_products() {
    const UNREAD: u32 = 0x7f7f_7f7f;
    launch(32, 0, || {
        let (g, q) = (thread_idx_x() as usize % 32 / 4, thread_idx_x() as usize % 4);
        let (a, b) = fragments(8, eight_nibbles);
        let exact = |row: usize, column: usize| {
            let element = |row, k, seed| f64::from(e2m1::decode(noise(row, k, seed) & 0xf));
            let scale = |row, k: usize, seed| f64::from(e4m3::decode(four_scales(row, seed).to_le_bytes()[k / 16]));
            let term = |k| element(row, k, 1) * scale(row, k, 3) * element(column, k, 2) * scale(column, k, 4);
            (0..64).map(term).sum::<f64>()
        };
        macro_rules! check {
            ($($lanes_a:literal $lane_b:literal)*) => {$(
                let scales_a = if q / 2 == $lanes_a { four_scales(g + q % 2 * 8, 3) } else { UNREAD };
                let scales_b = if q == $lane_b { four_scales(g, 4) } else { UNREAD };
                let mut d = [0.5; 4];
                gpu! { mma::m16n8k64_f32_nvfp4::<$lanes_a, $lane_b>(&mut d, a, scales_a, b, scales_b) };
                for (i, d) in d.into_iter().enumerate() {
                    let (row, column) = place_of(i);
                    let want = 0.5 + exact(row, column);
                    let off = (f64::from(d) - want).abs();
                    assert!(off <= 1e-3, "selectors {} {}, row {row}, column {column}: {d}, not {want}", $lanes_a, $lane_b);
                }
            )*};
        }
        check!(0 0 0 1 0 2 0 3 1 0 1 1 1 2 1 3);
    })
    .expect("no fault");
}

#[test]
fn selectors_are_those_of_the_whole_warp() {
    let found = violation(32, 0, || {
        let mut d = [0.0; 4];
        gpu! {
            if thread_idx_x() == 3 {
                mma::m16n8k64_f32_nvfp4::<0, 1>(&mut d, [0; 4], 0, [0; 2], 0);
            } else {
                mma::m16n8k64_f32_nvfp4::<0, 0>(&mut d, [0; 4], 0, [0; 2], 0);
            }
        }
    });
    assert_violation!(found, Violation::Diverged { .. });
}

#[test]
fn nibbles_lie_in_order() {
    let x = [0.0, 0.5, 1.0, -1.5, 2.0, 3.0, -4.0, 100.0];
    assert_eq!(convert::e2m1x8(x), 0x7e54_b210);
}

#[test]
fn warp_products_meet_in_one_instruction() {
    let found = violation(32, 0, || {
        let mut d = [0.0; 4];
        gpu! {
            if thread_idx_x() == 3 {
                mma::m16n8k16_f32_bf16(&mut d, [0; 4], [0; 2]);
            } else {
                mma::m16n8k16_f32_f16(&mut d, [0; 4], [0; 2]);
            }
        }
    });
    assert_violation!(found, Violation::Diverged { .. });
}

#[test]
fn matrices_come_by_rows() {
    launch(64, 32 * 16, || {
        let thread = thread_idx_x();
        gpu! {
            if thread < 32 {
                store_shared_v4(BASE.add(thread * 16), std::array::from_fn(|word| 4 * thread + word as u32));
            }
            sync_threads();
            // Lane 8m + r names row r of matrix m; matrices in reverse, rows rotated.
            let (m, r) = (thread % 32 / 8, thread % 8);
            let found = ldmatrix::load_x4(BASE.add(((3 - m) * 8 + (r + 1) % 8) * 16));
            let (g, q) = (thread % 32 / 4, thread % 4);
            for (m, found) in found.into_iter().enumerate() {
                assert_eq!(found, 4 * ((3 - m as u32) * 8 + (g + 1) % 8) + q);
            }
        }
    })
    .expect("no fault");
    let load = |lane_0: u32, written: bool| {
        move || {
            let lane = thread_idx_x();
            gpu! {
                if written {
                    store_shared_v4(BASE.add(lane * 16), [lane; 4]);
                    sync_warp();
                }
                ldmatrix::load_x4(SharedAddr(if lane == 0 { lane_0 } else { BASE.0 + lane * 16 }));
            }
        }
    };
    launch(32, 512, load(1024, true)).expect("no fault");
    assert_violation!(violation(32, 512, load(1032, true)), Violation::Misaligned { alignment: 16, .. });
    assert_violation!(violation(32, 512, load(1024 + 512, true)), Violation::SharedBounds { .. });
    assert_violation!(violation(32, 512, load(1024, false)), Violation::Uninitialized(_));
    let missing = || {
        let lane = thread_idx_x();
        gpu! {
            store_shared_v4(BASE.add(lane * 16), [lane; 4]);
            if lane != 31 {
                ldmatrix::load_x4(BASE.add(lane * 16));
            }
        }
    };
    assert_violation!(violation(32, 512, missing), Violation::Deadlock(_));
}

/// What may go wrong around a product.
#[derive(Clone, Copy, Default)]
struct Slip {
    no_proxy_fence: bool,
    no_barrier: bool,
    no_pin: bool,
    no_fence: bool,
    no_wait: bool,
    no_pin_after: bool,
    touch_registers: bool,
    overwrite_operand: bool,
    leave_thread: bool,
    other_operand: bool,
    write_after_pin: bool,
}

fn product(slip: Slip) -> Result<(), Violation> {
    launch(128, TILES, move || {
        put_tile(A, 64, |r, c| noise(r, c, 1));
        put_tile(B, 128, |r, c| noise(r, c, 2));
        gpu! {
            if !slip.no_proxy_fence {
                fence_proxy_async();
            }
            if !slip.no_barrier {
                sync_threads();
            }
            let odd = thread_idx_x() == 77;
            let mut d = [0i32; 64];
            if !slip.no_pin {
                pin(&mut d);
            }
            if slip.write_after_pin {
                d[3] = 1;
            }
            if !slip.no_fence {
                wgmma::fence();
            }
            if !(slip.leave_thread && odd) {
                let k = if slip.other_operand && odd { 32 } else { 0 };
                wgmma::m64n128k32_s32_s8(&mut d, Descriptor::swizzled(A), Descriptor::swizzled(B).add(k), false);
            }
            wgmma::commit();
            if slip.touch_registers && odd {
                d[5] = 0;
            }
            if slip.overwrite_operand && odd {
                store_shared_v4(B, [0; 4]);
            }
            if !slip.no_wait {
                wgmma::wait::<0>();
            }
            if !slip.no_pin_after {
                pin(&mut d);
            }
            if !slip.no_wait {
                // Poison is a NaN; no sum of these bytes comes near it.
                assert!(d.iter().all(|d| d.abs() < 1 << 20), "poison");
            }
        }
    })
    .map_err(|fault| fault.violation)
}

#[test]
fn products_follow_their_protocol() {
    product(Slip::default()).expect("no fault");
    macro_rules! finds {
        ($slip:ident, $rule:pat) => {
            let found = product(Slip { $slip: true, ..Slip::default() });
            assert!(matches!(found, Err($rule)), "{}: {found:?}", stringify!($slip));
        };
    }
    finds!(no_proxy_fence, Violation::ProxyFence { .. });
    finds!(no_barrier, Violation::Race { .. } | Violation::Uninitialized(_));
    finds!(no_pin, Violation::RegisterFence("D"));
    finds!(no_fence, Violation::RegisterFence("D"));
    finds!(write_after_pin, Violation::RegisterFence("D"));
    finds!(no_wait, Violation::RegistersInFlight);
    finds!(no_pin_after, Violation::Panic(_));
    finds!(touch_registers, Violation::RegistersInFlight);
    finds!(overwrite_operand, Violation::OperandInFlight(_));
    finds!(leave_thread, Violation::Diverged { .. });
    finds!(other_operand, Violation::Diverged { .. });
}

#[test]
fn descriptors_are_decoded_not_guessed() {
    let with = |bits: u64| {
        violation(128, TILES, move || {
            let mut d = [0i32; 64];
            gpu! {
                pin(&mut d);
                wgmma::fence();
                wgmma::m64n128k32_s32_s8(&mut d, Descriptor::swizzled(A), Descriptor(bits), false);
            }
        })
    };
    let good = Descriptor::swizzled(B).0;
    assert_violation!(with(good | 1 << 14), Violation::Descriptor { .. });
    assert_violation!(with(good | 1 << 55), Violation::Descriptor { .. });
    assert_violation!(with(good | 1 << 49), Violation::Descriptor { .. });
    assert_violation!(with(good + 7), Violation::Descriptor { .. });
    assert_violation!(with(good), Violation::Uninitialized(_));
    // Rows behind the end of shared memory.
    assert_violation!(
        with(good + (TILES as u64 >> 4)),
        Violation::SharedBounds { .. } | Violation::Uninitialized(_)
    );
}
