//! tcgen05 in the emulation: products, loads and stores do what the PTX ISA says, and every rule of theirs is broken here
//! once. Nobody here has the hardware: nothing else checks the emulation's reading of the ISA.

use half::f16;
use kernels_gpu::emulation::{Fault, Launch, Memory, Schedule, Violation};
use kernels_gpu::formats::e4m3;
use kernels_gpu::kernels::tiles::swizzle_128;
use kernels_gpu::ptx::SharedAddr;
use kernels_gpu::ptx::mbarrier::{Barrier, fence_init, fence_proxy_async};
use kernels_gpu::ptx::memory::store_shared_v4;
use kernels_gpu::ptx::shared::{load_u32, store_u32};
use kernels_gpu::ptx::special::{sync_threads, thread_idx_x};
use kernels_gpu::ptx::tcgen05::{
    Descriptor, Instruction, TensorAddr, allocate, commit, deallocate, fence_after_sync, fence_before_sync,
    load_x1, load_x32, load_x64_packed, mma_f8, mma_f8_tensor, mma_f16, mma_f16_tensor, mma_i8, relinquish,
    store_x8, store_x32, wait_load, wait_store,
};

/// Operand tiles of up to 128 rows of 128 bytes.
const A: SharedAddr = SharedAddr(1024);
const B: SharedAddr = SharedAddr(1024 + (16 << 10));
/// Two barriers for one arrival, and one for 128.
const DONE: [Barrier; 2] =
    [Barrier::at(SharedAddr(1024 + (32 << 10))), Barrier::at(SharedAddr(1024 + (32 << 10) + 8))];
const ALL: Barrier = Barrier::at(SharedAddr(1024 + (32 << 10) + 16));
/// Where the address of the Tensor Memory goes.
const SLOT: SharedAddr = SharedAddr(1024 + (32 << 10) + 24);
const SHARED: u32 = (32 << 10) + 32;

/// Columns that the launches below allocate, and where things lie in them.
const COLUMNS: u32 = 256;
const D: u32 = 0;
const P: u32 = 128;

/// Calls of wrappers: the launches below either keep their contracts or break them on purpose.
macro_rules! gpu {
    ($($body:tt)*) => {
        // SAFETY: the emulation checks the contracts of the wrappers.
        unsafe { $($body)* }
    };
}

macro_rules! assert_violation {
    ($found:expr, $rule:pat) => {
        let found = $found;
        assert!(matches!(found, $rule), "{found}");
    };
}

/// Runs a block.
fn launch(threads: u32, schedule: Schedule, kernel: impl Fn()) -> Result<(), Fault> {
    Launch::new(threads, SHARED).schedule(schedule).run(&Memory::new(), kernel)
}

/// The rule that a kernel breaks under every schedule.
fn violation(threads: u32, kernel: impl Fn()) -> Violation {
    let run = |schedule| launch(threads, schedule, &kernel).expect_err("the kernel breaks a rule").violation;
    let first = run(Schedule::Oldest);
    for schedule in [Schedule::Newest, Schedule::Random(1), Schedule::Random(2)] {
        let other = run(schedule);
        let same = std::mem::discriminant(&first) == std::mem::discriminant(&other);
        assert!(same, "{schedule:?} finds {other}, not {first}");
    }
    first
}

/// Barriers, two tiles of `a` and `b` as swizzled rows of 128 bytes, and Tensor Memory; then `body` with its address, and
/// what a block has to do in the end.
fn around(a: impl Fn(usize, usize) -> u8, b: impl Fn(usize, usize) -> u8, body: impl Fn(TensorAddr)) {
    let thread = thread_idx_x();
    gpu! {
        if thread == 0 {
            DONE.iter().for_each(|barrier| barrier.init(1));
            ALL.init(128);
            fence_init();
        }
        for (tile, value) in [(A, &a as &dyn Fn(usize, usize) -> u8), (B, &b)] {
            let row = thread as usize % 128;
            for chunk in 0..8 {
                let words = std::array::from_fn(|w| {
                    u32::from_le_bytes(std::array::from_fn(|i| value(row, 16 * chunk + 4 * w + i)))
                });
                if thread < 128 {
                    store_shared_v4(tile.add(swizzle_128(row, 16 * chunk) as u32), words);
                }
            }
        }
        if thread < 32 {
            allocate::<COLUMNS>(SLOT);
            relinquish();
        }
        fence_proxy_async();
        sync_threads();
        let tensor = TensorAddr(load_u32(SLOT));
        body(tensor);
        sync_threads();
        if thread < 32 {
            deallocate::<COLUMNS>(tensor);
        }
    }
}

/// A block of 128 threads around `body`, with tiles of E4M3 ones.
fn block(body: impl Fn(TensorAddr)) -> impl Fn() {
    move || around(|_, _| 0x38, |_, _| 0x38, &body)
}

/// This thread's lanes.
fn mine(at: TensorAddr) -> TensorAddr {
    at.down(thread_idx_x() / 32 % 4 * 32)
}

/// D = A B^T over `steps` steps of 32 bytes, by thread 0, reported to the first barrier.
fn product(tensor: TensorAddr, steps: u32, shape: Instruction) {
    gpu! {
        if thread_idx_x() == 0 {
            for step in 0..steps {
                let (a, b) = (Descriptor::swizzled(A).add(32 * step), Descriptor::swizzled(B).add(32 * step));
                mma_f8(tensor.add(D), a, b, shape, step > 0);
            }
            commit(DONE[0]);
        }
    }
}

const F32: Instruction = Instruction::into_f32(64);

// What instructions do.

/// Bytes that decode to small numbers of every format.
fn small(row: usize, column: usize, salt: usize) -> u8 {
    let x = (row * 31 + column * 17 + salt) % 8;
    (x as u8) << 3 | (row + column) as u8 & 1 << 7
}

#[test]
fn products_are_right_to_the_bit() {
    // (bytes of an element, their value, D as f32 from a register)
    type Decode = fn(&[u8]) -> f32;
    let f8: Decode = |x| e4m3::decode(x[0]);
    let i8: Decode = |x| f32::from(x[0] as i8);
    let half: Decode = |x| f16::from_le_bytes([x[0], x[1]]).to_f32();
    let (a, b) = (|r, c| small(r, c, 0), |r, c| small(r, c, 3));
    for (name, width, decode, shape) in [
        ("f8 in f32", 1, f8, Instruction::into_f32(64)),
        ("f8 in f16", 1, f8, Instruction::into_f16(64)),
        ("i8", 1, i8, Instruction::s8_into_s32(64)),
        ("f16 in f32", 2, half, Instruction::into_f32(64)),
        ("f16 in f16", 2, half, Instruction::into_f16(64)),
    ] {
        let body = |tensor: TensorAddr| {
            let row = thread_idx_x() as usize;
            let mut d = [0; 32];
            gpu! {
                if row == 0 {
                    for step in 0..4 {
                        let (a, b) = (Descriptor::swizzled(A).add(32 * step), Descriptor::swizzled(B).add(32 * step));
                        match name {
                            "i8" => mma_i8(tensor, a, b, shape, step > 0),
                            _ if width == 1 => mma_f8(tensor, a, b, shape, step > 0),
                            _ => mma_f16(tensor, a, b, shape, step > 0),
                        }
                    }
                    commit(DONE[0]);
                }
                DONE[0].wait(0);
                fence_after_sync();
                load_x32(&mut d, mine(tensor).add(32));
                wait_load(&mut d);
            }
            for (i, d) in d.into_iter().enumerate() {
                let element = |f: &dyn Fn(usize, usize) -> u8, row: usize, k: usize| {
                    decode(&[f(row, k * width), f(row, k * width + width - 1)])
                };
                let exact = |from: usize, to: usize| -> f32 {
                    (from..to).map(|k| element(&a, row, k) * element(&b, 32 + i, k)).sum()
                };
                let step = 32 / width;
                let found = match name {
                    "i8" => d as i32 as f32,
                    n if n.ends_with("f32") => f32::from_bits(d),
                    _ => f16::from_bits(d as u16).to_f32(),
                };
                // f16 accumulators round after every k step.
                let round = |x: f32| if name.ends_with("in f16") { f16::from_f32(x).to_f32() } else { x };
                let expected = (0..4).fold(0.0, |d, s| round(d + exact(s * step, (s + 1) * step)));
                assert_eq!(found, expected, "{name}: row {row}, column {}", 32 + i);
            }
        };
        launch(128, Schedule::Oldest, || around(a, b, body))
            .unwrap_or_else(|fault| panic!("{name}: {fault}"));
    }
}

#[test]
fn pairs_of_f16_are_packed_by_the_load() {
    let body = |tensor: TensorAddr| {
        product(tensor, 4, Instruction::into_f16(128));
        let mut packed = [0; 64];
        gpu! {
            DONE[0].wait(0);
            fence_after_sync();
            load_x64_packed(&mut packed, mine(tensor));
            wait_load(&mut packed);
        }
        // Rows of ones against columns of which each has another magnitude.
        for (i, pair) in packed.into_iter().enumerate() {
            let value =
                |column: usize| f16::from_f32(128.0 * e4m3::decode(0x38 + (column as u8 & 7))).to_bits();
            assert_eq!(pair, u32::from(value(2 * i)) | u32::from(value(2 * i + 1)) << 16);
        }
    };
    launch(128, Schedule::Oldest, || around(|_, _| 0x38, |row, _| 0x38 + (row as u8 & 7), body))
        .expect("no fault");
}

#[test]
fn operand_a_comes_from_tensor_memory() {
    // Row r of P holds r % 8 + 1 in its position 5, and zeros: column j of D is that times element 5 of row j of B.
    let body = |tensor: TensorAddr| {
        let row = thread_idx_x();
        let code = u32::from(e4m3::encode((row % 8 + 1) as f32));
        let half = u32::from(f16::from_f32((row % 8 + 1) as f32).to_bits());
        let mut d = [0; 32];
        gpu! {
            let mut p = [0; 8];
            p[1] = code << 8;
            store_x8(mine(tensor).add(P), &p);
            p = [0; 8];
            p[2] = half << 16;
            store_x8(mine(tensor).add(P + 8), &p);
            wait_store();
            fence_before_sync();
            sync_threads();
            fence_after_sync();
            if row == 0 {
                mma_f8_tensor(tensor, tensor.add(P), Descriptor::swizzled(B), Instruction::into_f32(32), false);
                commit(DONE[0]);
                DONE[0].wait(0);
                fence_after_sync();
                // Plain core matrices: 8 rows of 16 bytes, two along K, then the next 8 rows.
                mma_f16_tensor(tensor.add(32), tensor.add(P + 8), Descriptor::plain(A, 128, 256), Instruction::into_f32(32), false);
                commit(DONE[1]);
            }
            DONE[1].wait(0);
            fence_after_sync();
            load_x32(&mut d, mine(tensor));
            wait_load(&mut d);
        }
        for (j, d) in d.into_iter().enumerate() {
            assert_eq!(f32::from_bits(d), (row % 8 + 1) as f32 * e4m3::decode(small(j, 5, 3)));
        }
        gpu! {
            load_x32(&mut d, mine(tensor).add(32));
            wait_load(&mut d);
        }
        for (j, d) in d.into_iter().enumerate() {
            // Element 5 of row j in core matrices, wherever the swizzled writer put those bytes.
            let byte = |at: usize| {
                let (r, chunk) = (at / 128, at / 16 % 8);
                small(r, (chunk ^ (r % 8)) * 16 + at % 16, 0)
            };
            let at = j / 8 * 256 + j % 8 * 16 + 10;
            let b = f16::from_le_bytes([byte(at), byte(at + 1)]).to_f32();
            assert_eq!(f32::from_bits(d), (row % 8 + 1) as f32 * b, "row {row}, column {j}");
        }
    };
    launch(128, Schedule::Oldest, || around(|r, c| small(r, c, 0), |r, c| small(r, c, 3), body))
        .expect("no fault");
}

#[test]
fn rules_kept_pass_in_every_order() {
    // Two warpgroups: one stores and loads, the other's first thread multiplies.
    let body = |tensor: TensorAddr| {
        let thread = thread_idx_x();
        gpu! {
            if thread < 128 {
                store_x32(mine(tensor).add(P), &[0x3838_3838; 32]);
                wait_store();
                fence_before_sync();
                ALL.arrive();
                for (round, done) in DONE.iter().enumerate() {
                    done.wait(0);
                    fence_after_sync();
                    let mut d = [0];
                    load_x1(&mut d, mine(tensor).add(D + 63));
                    wait_load(&mut d);
                    assert_eq!(f32::from_bits(d[0]), 128.0 * (1.0 + round as f32));
                    fence_before_sync();
                    ALL.arrive();
                }
            } else if thread == 128 {
                for round in 0..2 {
                    ALL.wait(round);
                    fence_after_sync();
                    for step in 0..4 {
                        let b = Descriptor::swizzled(B).add(32 * step);
                        mma_f8_tensor(tensor, tensor.add(P + 8 * step), b, F32, round + step > 0);
                    }
                    commit(DONE[round as usize]);
                }
            }
        }
    };
    for schedule in [Schedule::Oldest, Schedule::Newest, Schedule::Random(1), Schedule::Random(2)] {
        launch(256, schedule, block(body)).unwrap_or_else(|fault| panic!("{schedule:?}: {fault}"));
    }
}

// Rules, each broken once.

#[test]
fn an_accumulator_is_read_after_its_commit_was_seen() {
    let read = |wait: bool, fence: bool| {
        block(move |tensor| {
            product(tensor, 4, F32);
            let mut d = [0];
            gpu! {
                if wait {
                    DONE[0].wait(0);
                } else {
                    sync_threads();
                }
                if fence {
                    fence_after_sync();
                }
                load_x1(&mut d, mine(tensor));
                wait_load(&mut d);
            }
        })
    };
    launch(128, Schedule::Oldest, read(true, true)).expect("no fault");
    assert_violation!(violation(128, read(false, true)), Violation::TensorInFlight { column: 0, .. });
    let found = violation(128, read(true, false));
    assert_violation!(found, Violation::TensorOrder { missing: "tcgen05.fence::after_thread_sync", .. });
}

#[test]
fn a_commit_covers_what_was_issued_before_it() {
    let found = violation(
        128,
        block(|tensor| {
            product(tensor, 1, F32);
            gpu! {
                if thread_idx_x() == 0 {
                    mma_f8(tensor.add(D), Descriptor::swizzled(A), Descriptor::swizzled(B), F32, true);
                }
                DONE[0].wait(0);
                fence_after_sync();
                load_x1(&mut [0], mine(tensor));
            }
        }),
    );
    assert_violation!(found, Violation::TensorInFlight { .. });
}

#[test]
fn stores_are_waited_for_fenced_and_ordered() {
    let store = |wait: bool, before: bool, barrier: bool, after: bool| {
        block(move |tensor| {
            gpu! {
                store_x32(mine(tensor).add(P), &[0x3838_3838; 32]);
                if wait {
                    wait_store();
                }
                if before {
                    fence_before_sync();
                }
                if barrier {
                    sync_threads();
                }
                if after {
                    fence_after_sync();
                }
                if thread_idx_x() == 0 {
                    mma_f8_tensor(tensor, tensor.add(P), Descriptor::swizzled(B), F32, false);
                    commit(DONE[0]);
                }
                if !wait {
                    wait_store();
                }
                DONE[0].wait(0);
            }
        })
    };
    launch(128, Schedule::Oldest, store(true, true, true, true)).expect("no fault");
    let missing = |wait, before, barrier, after| {
        // Under some schedules another thread has not even stored yet.
        let fault = launch(128, Schedule::Newest, store(wait, before, barrier, after));
        match fault.expect_err("a rule is broken").violation {
            Violation::TensorOrder { missing, .. } => missing,
            other => panic!("{other}"),
        }
    };
    assert!(missing(false, true, true, true).contains("wait"));
    assert!(missing(true, false, true, true).contains("before_thread_sync"));
    assert!(missing(true, true, true, false).contains("after_thread_sync"));
    let without = launch(128, Schedule::Newest, store(true, true, false, true)).expect_err("no barrier");
    assert_violation!(without.violation, Violation::TensorOrder { .. } | Violation::TensorEmpty { .. });
}

#[test]
fn loads_are_waited_for_before_others_write() {
    let overwrite = |wait: bool| {
        block(move |tensor| {
            let mut p = [0; 32];
            gpu! {
                store_x32(mine(tensor), &[1; 32]);
                wait_store();
                load_x32(&mut p, mine(tensor));
                if wait {
                    wait_load(&mut p);
                    assert_eq!(p, [1; 32]);
                }
                store_x32(mine(tensor), &[2; 32]);
                wait_store();
            }
        })
    };
    launch(128, Schedule::Oldest, overwrite(true)).expect("no fault");
    let found = violation(128, overwrite(false));
    assert_violation!(found, Violation::TensorOrder { missing: "a tcgen05.wait for the other access", .. });
    let load = violation(
        128,
        block(|tensor| {
            gpu! {
                store_x32(mine(tensor), &[1; 32]);
                load_x1(&mut [0], mine(tensor));
            }
        }),
    );
    assert_violation!(load, Violation::TensorOrder { missing: "a tcgen05.wait for the other access", .. });
}

#[test]
fn registers_of_a_load_are_poison_until_its_wait() {
    let touch = |change: bool| {
        block(move |tensor| {
            gpu! {
                store_x32(mine(tensor), &[1; 32]);
                wait_store();
                let mut p = [0; 32];
                load_x32(&mut p, mine(tensor));
                assert!(p.iter().all(|x| f32::from_bits(*x).is_nan()));
                if change {
                    p[3] = 7;
                }
                wait_load(&mut p);
            }
        })
    };
    launch(128, Schedule::Oldest, touch(false)).expect("no fault");
    assert_violation!(violation(128, touch(true)), Violation::TensorRegisters(_));
    let other = violation(128, block(|_| gpu!(wait_load(&mut [0u32; 4]))));
    assert_violation!(other, Violation::TensorRegisters(_));
}

#[test]
fn warps_reach_their_own_lanes() {
    let found = violation(
        128,
        block(|tensor| {
            gpu! {
                store_x8(tensor, &[0; 8]);
            }
        }),
    );
    assert_violation!(found, Violation::TensorLanes { lane: 0, .. });
    let found = violation(128, block(|tensor| gpu!(store_x8(mine(tensor).down(1), &[0; 8]))));
    assert_violation!(found, Violation::TensorLanes { .. });
    let found = violation(
        128,
        block(|tensor| {
            gpu! {
                if thread_idx_x() == 0 {
                    mma_f8(tensor.down(32), Descriptor::swizzled(A), Descriptor::swizzled(B), F32, false);
                }
            }
        }),
    );
    assert_violation!(found, Violation::TensorLanes { lane: 32, .. });
}

#[test]
fn columns_are_allocated_and_written_first() {
    let found = violation(128, block(|tensor| gpu!(store_x8(mine(tensor).add(COLUMNS - 4), &[0; 8]))));
    assert_violation!(found, Violation::TensorBounds { column: COLUMNS, .. });
    let found = violation(128, block(|tensor| gpu!(load_x1(&mut [0], mine(tensor)))));
    assert_violation!(found, Violation::TensorEmpty { column: 0, .. });
    let multiply = |accumulate: bool, d: u32, from_tensor: bool| {
        block(move |tensor| {
            gpu! {
                if thread_idx_x() == 0 {
                    let b = Descriptor::swizzled(B);
                    if from_tensor {
                        mma_f8_tensor(tensor.add(d), tensor.add(P), b, F32, accumulate);
                    } else {
                        mma_f8(tensor.add(d), Descriptor::swizzled(A), b, F32, accumulate);
                    }
                }
            }
        })
    };
    assert_violation!(violation(128, multiply(true, D, false)), Violation::TensorEmpty { column: 0, .. });
    assert_violation!(violation(128, multiply(false, D, true)), Violation::TensorEmpty { column: P, .. });
    assert_violation!(violation(128, multiply(false, COLUMNS - 32, false)), Violation::TensorBounds { .. });
}

#[test]
fn allocations_follow_their_rules() {
    fn rule(kernel: impl Fn(u32)) -> &'static str {
        let found = violation(64, || kernel(thread_idx_x() / 32));
        let Violation::TensorAllocation(rule) = found else { panic!("{found}") };
        rule
    }
    let odd = rule(|warp| {
        gpu!(if warp == 0 {
            allocate::<96>(SLOT)
        })
    });
    assert!(odd.contains("power of two"));
    let full = rule(|warp| {
        gpu!(if warp == 0 {
            allocate::<512>(SLOT);
            allocate::<32>(SLOT);
        })
    });
    assert!(full.contains("no columns are left"));
    let growing = rule(|warp| {
        gpu!(if warp == 0 {
            allocate::<32>(SLOT);
            allocate::<64>(SLOT);
        })
    });
    assert!(growing.contains("may not grow"));
    let late = rule(|warp| {
        gpu!(if warp == 0 {
            relinquish();
            allocate::<64>(SLOT);
        })
    });
    assert!(late.contains("relinquished"));
    let other = rule(|warp| {
        gpu!(if warp == 0 {
            allocate::<64>(SLOT);
            deallocate::<32>(TensorAddr(0));
        })
    });
    assert!(other.contains("nothing like that"));
    let kept = violation(64, || {
        gpu!(if thread_idx_x() < 32 {
            allocate::<64>(SLOT)
        })
    });
    assert!(matches!(&kept, Violation::LeftInFlight(text) if text.contains("64 columns")), "{kept}");
    let divided = violation(32, || {
        gpu!(if thread_idx_x() < 31 {
            allocate::<64>(SLOT)
        });
    });
    assert_violation!(divided, Violation::Deadlock(_));
}

#[test]
fn columns_are_freed_when_nobody_uses_them() {
    let free = |used: fn(TensorAddr)| {
        violation(128, move || {
            around(
                |_, _| 0x38,
                |_, _| 0x38,
                |tensor| {
                    used(tensor);
                    gpu!(if thread_idx_x() < 32 {
                        deallocate::<COLUMNS>(tensor)
                    });
                },
            )
        })
    };
    let flight = free(|tensor| {
        gpu!(if thread_idx_x() == 0 {
            mma_f8(tensor, Descriptor::swizzled(A), Descriptor::swizzled(B), F32, false);
        })
    });
    assert_violation!(flight, Violation::TensorAllocation(_));
    let unordered = free(|tensor| {
        gpu! {
            store_x8(mine(tensor), &[0; 8]);
            wait_store();
        }
    });
    assert_violation!(unordered, Violation::TensorAllocation(_) | Violation::TensorBounds { .. });
}

#[test]
fn only_products_of_one_shape_and_kind_follow_each_other() {
    let follow = |second: fn(TensorAddr), wait: bool| {
        block(move |tensor| {
            gpu! {
                store_x32(mine(tensor).add(P), &[0x3838_3838; 32]);
                wait_store();
                fence_before_sync();
                sync_threads();
                fence_after_sync();
                product(tensor, 2, F32);
                if thread_idx_x() == 0 {
                    if wait {
                        DONE[0].wait(0);
                        fence_after_sync();
                    }
                    second(tensor);
                    commit(DONE[1]);
                    DONE[1].wait(0);
                }
                DONE[0].wait(0);
            }
        })
    };
    type Issue = fn(TensorAddr);
    let [same, other_shape, other_kind, overlapping, operand]: [Issue; 5] = [
        |tensor: TensorAddr| {
            gpu!(mma_f8(tensor, Descriptor::swizzled(A), Descriptor::swizzled(B), F32, false))
        },
        |tensor: TensorAddr| {
            let shape = Instruction::into_f32(32);
            gpu!(mma_f8(tensor, Descriptor::swizzled(A), Descriptor::swizzled(B), shape, true))
        },
        |tensor: TensorAddr| {
            gpu!(mma_f16(tensor, Descriptor::swizzled(A), Descriptor::swizzled(B), F32, true))
        },
        |tensor: TensorAddr| {
            gpu!(mma_f8(tensor.add(32), Descriptor::swizzled(A), Descriptor::swizzled(B), F32, false))
        },
        |tensor: TensorAddr| gpu!(mma_f8_tensor(tensor.add(64), tensor, Descriptor::swizzled(B), F32, false)),
    ];
    launch(128, Schedule::Oldest, follow(same, false)).expect("pipelined");
    for second in [other_shape, other_kind, overlapping, operand] {
        launch(128, Schedule::Oldest, follow(second, true)).expect("waited for");
        assert_violation!(violation(128, follow(second, false)), Violation::TensorInFlight { .. });
    }
}

#[test]
fn operands_in_tensor_memory_stay_until_the_product_is_complete() {
    let overwrite = |wait: bool| {
        block(move |tensor| {
            gpu! {
                store_x32(mine(tensor).add(P), &[0x3838_3838; 32]);
                wait_store();
                fence_before_sync();
                sync_threads();
                fence_after_sync();
                if thread_idx_x() == 0 {
                    mma_f8_tensor(tensor, tensor.add(P), Descriptor::swizzled(B), F32, false);
                    commit(DONE[0]);
                }
                if wait {
                    DONE[0].wait(0);
                } else {
                    sync_threads();
                }
                fence_after_sync();
                store_x32(mine(tensor).add(P), &[0; 32]);
                wait_store();
                DONE[0].wait(0);
            }
        })
    };
    launch(128, Schedule::Oldest, overwrite(true)).expect("no fault");
    assert_violation!(violation(128, overwrite(false)), Violation::TensorInFlight { column: P, .. });
}

#[test]
fn operands_in_shared_memory_stay_until_the_product_is_complete() {
    let overwrite = |wait: bool| {
        block(move |tensor| {
            product(tensor, 1, F32);
            gpu! {
                if wait {
                    DONE[0].wait(0);
                }
                if thread_idx_x() == 0 {
                    store_u32(B, 0);
                }
                DONE[0].wait(0);
            }
        })
    };
    launch(128, Schedule::Oldest, overwrite(true)).expect("no fault");
    assert_violation!(violation(128, overwrite(false)), Violation::OperandInFlight(_));
    // And they are there before it is issued, for the asynchronous proxy.
    let late = violation(128, || {
        around(
            |_, _| 0x38,
            |_, _| 0x38,
            |tensor| {
                gpu! {
                    if thread_idx_x() == 0 {
                        store_u32(A, 0);
                    }
                }
                product(tensor, 1, F32);
            },
        )
    });
    assert_violation!(late, Violation::ProxyFence { .. });
}

#[test]
fn work_is_not_left_in_flight() {
    fn left(body: impl Fn(TensorAddr)) -> String {
        // Without the end that `around` gives a block.
        let found = violation(128, || {
            gpu! {
                if thread_idx_x() < 32 {
                    allocate::<COLUMNS>(SLOT);
                }
                store_shared_v4(A.add(thread_idx_x() * 16), [0; 4]);
                fence_proxy_async();
                sync_threads();
                body(TensorAddr(load_u32(SLOT)));
            }
        });
        let Violation::LeftInFlight(text) = found else { panic!("{found}") };
        text
    }
    let load = left(|tensor| {
        gpu! {
            store_x8(mine(tensor), &[0; 8]);
            wait_store();
            load_x1(&mut [0], mine(tensor));
        }
    });
    assert!(load.contains("not waited for"), "{load}");
    assert!(left(|tensor| gpu!(store_x8(mine(tensor), &[0; 8]))).contains("not waited for"));
    let product = left(|tensor| {
        gpu!(if thread_idx_x() == 0 {
            let tile = Descriptor::plain(A, 128, 0);
            mma_f8(tensor, tile, tile, Instruction::into_f32(16), false);
        })
    });
    assert!(product.contains("tcgen05.mma"), "{product}");
}

#[test]
fn descriptors_are_read_bit_by_bit() {
    let multiply = |a: u64, shape: u32| {
        violation(
            128,
            block(move |tensor| {
                gpu!(if thread_idx_x() == 0 {
                    mma_f8(tensor, Descriptor(a), Descriptor::swizzled(B), Instruction(shape), false);
                })
            }),
        )
    };
    let (good, shape) = (Descriptor::swizzled(A).0, F32.0);
    let mut rules = std::collections::BTreeSet::new();
    // The constant of bits 46-48, an absolute offset, reserved bits, swizzles that do not exist, a k step over the edge.
    for bad in [
        good ^ 1 << 46,
        good | 1 << 52,
        good | 1 << 14,
        good | 1 << 57,
        good | 1 << 49,
        good ^ 1 << 61,
        good + 7,
    ] {
        let found = multiply(bad, shape);
        let Violation::Descriptor { rule, .. } = found else { panic!("{found}") };
        rules.insert(rule);
    }
    assert_eq!(rules.len(), 6, "{rules:?}");
    // Sparsity, the type of D, of A and of B, transposition, N, M and reserved bits.
    for bit in [2, 5, 7, 10, 13, 15, 17, 24, 6, 29, 30] {
        assert_violation!(multiply(good, shape ^ 1 << bit), Violation::InstructionDescriptor { .. });
    }
    // s8 into s32 is not for kind::f8f6f4.
    assert_violation!(
        multiply(good, Instruction::s8_into_s32(64).0),
        Violation::InstructionDescriptor { .. }
    );
}

#[test]
fn commits_need_a_published_barrier_and_no_more_arrivals_than_it_counts() {
    let found = violation(32, || gpu!(commit(DONE[0])));
    assert_violation!(found, Violation::NoBarrier(_));
    let unpublished = violation(1, || {
        gpu! {
            DONE[0].init(1);
            commit(DONE[0]);
        }
    });
    assert_violation!(unpublished, Violation::BarrierFence(_));
    // A phase of two arrivals of which only the commit comes.
    let alone = violation(128, || {
        gpu! {
            if thread_idx_x() == 0 {
                DONE[0].init(2);
                fence_init();
                commit(DONE[0]);
                DONE[0].wait(0);
            }
        }
    });
    assert_violation!(alone, Violation::Deadlock(_));
}
