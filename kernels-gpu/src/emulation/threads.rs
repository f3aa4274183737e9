//! Threads of a block as coroutines, and how an instruction reaches its block.

use core::cell::{Cell, RefCell};
use core::panic::Location;
use std::any::Any;
use std::boxed::Box;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::string::{String, ToString};
use std::vec::Vec;

use corosensei::stack::DefaultStack;
use corosensei::{Coroutine, CoroutineResult, Yielder};

use super::block::{Block, Wait};
use super::fault::{Fault, Violation};

/// Stack of a thread: debug builds keep every register array of a kernel there, several times.
const STACK: usize = 256 << 10;

/// Stacks that are used again from block to block.
#[derive(Default)]
pub(super) struct Stacks(Vec<DefaultStack>);

/// The running thread.
#[derive(Clone, Copy)]
struct Running {
    /// Its block, as long as the thread runs.
    block: *const (),
    thread: u32,
    yielder: *const Yielder<(), ()>,
}

std::thread_local! {
    static RUNNING: Cell<Option<Running>> = const { Cell::new(None) };
}

/// Runs a block to its end.
pub(super) fn run(block: Block<'_>, stacks: &mut Stacks, kernel: &impl Fn()) -> Result<(), Fault> {
    let (threads, index) = (block.threads, block.index);
    let block = RefCell::new(block);
    let mut coroutines: Vec<_> = (0..threads)
        .map(|thread| {
            let stack = stacks.0.pop().unwrap_or_else(|| {
                DefaultStack::new(STACK).expect("the system has memory for a stack of 256 KiB")
            });
            let block = (&raw const block).cast();
            let body = move |yielder: &Yielder<(), ()>, ()| {
                RUNNING.set(Some(Running { block, thread, yielder }));
                kernel();
            };
            // SAFETY: the coroutine is dropped before this function returns, and the kernel outlives that.
            Some(unsafe { Coroutine::with_stack_unchecked(stack, body) })
        })
        .collect();
    // A fault must leave the other threads' stacks unwound before `block` goes.
    let result = drive(&block, &mut coroutines, stacks);
    RUNNING.set(None);
    drop(coroutines);
    result.map_err(|fault| Fault { block: Some(index), ..fault })
}

fn drive(
    block: &RefCell<Block<'_>>,
    coroutines: &mut [Option<Coroutine<(), (), ()>>],
    stacks: &mut Stacks,
) -> Result<(), Fault> {
    let whole = |violation| Fault { block: None, thread: None, at: None, violation };
    let mut left = coroutines.len();
    loop {
        let next = block.borrow_mut().queue.next();
        let Some(thread) = next else {
            if left == 0 {
                return block.borrow().check_end().map_err(whole);
            }
            if !block.borrow_mut().complete_one().map_err(whole)? {
                return Err(whole(block.borrow().deadlock()));
            }
            continue;
        };
        let slot = &mut coroutines[thread as usize];
        let coroutine = slot.as_mut().expect("only threads that have not returned are ready");
        match catch_unwind(AssertUnwindSafe(|| coroutine.resume(()))) {
            Ok(CoroutineResult::Yield(())) => {}
            Ok(CoroutineResult::Return(())) => {
                stacks.0.extend(slot.take().map(Coroutine::into_stack));
                left -= 1;
            }
            Err(panic) => return Err(fault(panic, thread)),
        }
    }
}

/// What ended a thread's coroutine.
fn fault(panic: Box<dyn Any + Send>, thread: u32) -> Fault {
    let panic = match panic.downcast::<Fault>() {
        Ok(fault) => return *fault,
        Err(panic) => panic,
    };
    let text = panic.downcast_ref::<String>().cloned();
    let text = text.or_else(|| panic.downcast_ref::<&str>().map(ToString::to_string));
    let violation = Violation::Panic(text.unwrap_or_else(|| "of unknown kind".into()));
    Fault { block: None, thread: Some(thread), at: None, violation }
}

/// Ends the running thread with a fault, without the message of a panic.
fn raise(violation: Violation, thread: Option<u32>, at: &'static Location<'static>) -> ! {
    resume_unwind(Box::new(Fault { block: None, thread, at: Some(at), violation }))
}

/// The number of the running thread.
#[track_caller]
pub(super) fn current() -> u32 {
    let Some(running) = RUNNING.get() else { raise(Violation::Outside, None, Location::caller()) };
    running.thread
}

/// Executes an instruction that does not wait.
#[track_caller]
pub(super) fn execute<R>(f: impl FnOnce(&mut Block<'_>, u32) -> Result<R, Violation>) -> R {
    execute_at(Location::caller(), f)
}

fn execute_at<R>(
    at: &'static Location<'static>,
    f: impl FnOnce(&mut Block<'_>, u32) -> Result<R, Violation>,
) -> R {
    let Some(Running { block, thread, .. }) = RUNNING.get() else { raise(Violation::Outside, None, at) };
    // SAFETY: `run` keeps the block as long as its threads; nobody else borrows it while a thread runs, and the borrow
    // ends before this thread can be suspended.
    let block = unsafe { &*block.cast::<RefCell<Block<'_>>>() };
    let result = f(&mut block.borrow_mut(), thread);
    result.unwrap_or_else(|violation| raise(violation, Some(thread), at))
}

/// Executes an instruction that waits until `f` has a result; whoever makes that possible wakes the thread.
#[track_caller]
pub(super) fn wait<R>(
    operation: impl FnOnce() -> String,
    mut f: impl FnMut(&mut Block<'_>, u32) -> Result<Option<R>, Violation>,
) -> R {
    let at = Location::caller();
    if let Some(result) = execute_at(at, &mut f) {
        return result;
    }
    let operation = operation();
    execute_at(at, |block, thread| {
        block.waiting[thread as usize] = Some(Wait { operation, at });
        Ok(())
    });
    loop {
        let running = RUNNING.get().expect("a thread that executes is running");
        // SAFETY: the yielder lives at the bottom of this thread's own stack.
        unsafe { (*running.yielder).suspend(()) };
        RUNNING.set(Some(running));
        if let Some(result) = execute_at(at, &mut f) {
            execute_at(at, |block, thread| {
                block.waiting[thread as usize] = None;
                Ok(())
            });
            return result;
        }
    }
}
