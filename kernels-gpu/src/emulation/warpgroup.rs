//! Asynchronous products of a warpgroup (PTX ISA 9.7.15): issue, groups, waits, and who owns the registers.
//!
//! The 128 threads of a warpgroup run at their own pace here, so each logs the instructions that it should execute
//! together with the others, and a thread that logs something else than the first did has diverged. A product
//! runs when the first thread waits for it, and its registers read as [`POISON`] from the issue until that thread
//! pins them after the wait.

use std::collections::VecDeque;
use std::format;
use std::string::String;
use std::vec;
use std::vec::Vec;

use super::clock::{Causality, Epoch};
use super::descriptor::{self, STEP};
use super::fault::Violation;
use super::product::{self, Element, Kind, ROWS};
use super::shared::{Shared, Source};

/// What registers in flight read as: a NaN as f32, as two f16 and in its highest byte as E4M3.
pub(crate) const POISON: u32 = 0x7fa5_7fa5;

/// Threads of a warpgroup.
pub(super) const THREADS: usize = 128;

/// Warps of a warpgroup, each of which waits for its products.
const WARPS: u16 = 4;

/// Where operand A of a product comes from.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum OperandA {
    /// A matrix descriptor.
    Shared(u64),
    /// Four registers of every thread.
    Registers([u32; 4]),
}

/// An instruction that the warpgroup executes together.
#[derive(Clone, Debug, PartialEq)]
enum Entry {
    Fence,
    Commit,
    Wait(u32),
    Product { kind: Kind, a: Option<u64>, b: u64, accumulate: bool },
}

impl Entry {
    fn text(&self) -> String {
        match self {
            Self::Fence => "`wgmma.fence`".into(),
            Self::Commit => "`wgmma.commit_group`".into(),
            Self::Wait(n) => format!("`wgmma.wait_group {n}`"),
            Self::Product { kind, a, b, accumulate } => {
                format!("`wgmma.mma_async {}` (A {a:x?}, B {b:#x}, accumulate {accumulate})", kind.name)
            }
        }
    }
}

/// Registers that a thread gave to products, by the place of the array that stands for them.
struct InFlight {
    place: usize,
    values: Vec<u32>,
    /// The last product that writes them, and fences of the thread before it.
    last: u64,
    kind: Kind,
    fences: u64,
}

/// A value that passed through `pin`.
struct Pinned {
    place: usize,
    values: Vec<u32>,
    /// Fences of this thread before.
    fences: u64,
}

/// The wgmma state of one thread.
#[derive(Default)]
struct Thread {
    /// Instructions logged.
    position: u64,
    fences: u64,
    /// Products issued, and the ends of committed groups.
    issued: u64,
    groups: Vec<u64>,
    /// Products that this thread has waited for.
    waited: u64,
    in_flight: Vec<InFlight>,
    pinned: Vec<Pinned>,
}

/// A product on its way.
struct Product {
    kind: Kind,
    accumulate: bool,
    a: Option<Vec<u32>>,
    b: Vec<u32>,
    /// Writers that every thread must be ordered after.
    sources: Vec<Source>,
    /// A in registers, and the places of D, of every thread.
    fragments: Vec<[u32; 4]>,
    places: Vec<Vec<usize>>,
    issued: usize,
    done: bool,
}

/// A warpgroup's queue of products.
pub(super) struct Warpgroup {
    threads: Vec<Thread>,
    log: VecDeque<Entry>,
    /// Instructions that all threads have logged.
    passed: u64,
    products: VecDeque<Product>,
    /// Products that left the queue.
    retired: u64,
    /// Products that each warp has waited for.
    waited: [u64; 4],
    pub(super) waiters: Vec<u32>,
}

impl Warpgroup {
    pub(super) fn new() -> Self {
        Self {
            threads: (0..THREADS).map(|_| Thread::default()).collect(),
            log: VecDeque::new(),
            passed: 0,
            products: VecDeque::new(),
            retired: 0,
            waited: [0; 4],
            waiters: Vec::new(),
        }
    }

    /// Logs the next instruction of a thread.
    fn log(&mut self, me: usize, entry: Entry) -> Result<(), Violation> {
        let at = (self.threads[me].position - self.passed) as usize;
        match self.log.get(at) {
            None => self.log.push_back(entry),
            Some(first) if *first == entry => {}
            Some(first) => return Err(Violation::Diverged { expected: first.text(), found: entry.text() }),
        }
        self.threads[me].position += 1;
        if at == 0 {
            let all = self.threads.iter().map(|t| t.position).min().unwrap_or(0);
            self.log.drain(..(all - self.passed) as usize);
            self.passed = all;
        }
        Ok(())
    }

    /// `wgmma.fence`.
    pub(super) fn fence(&mut self, me: usize) -> Result<(), Violation> {
        self.log(me, Entry::Fence)?;
        self.threads[me].fences += 1;
        Ok(())
    }

    /// `wgmma.commit_group`.
    pub(super) fn commit(&mut self, me: usize) -> Result<(), Violation> {
        self.log(me, Entry::Commit)?;
        let thread = &mut self.threads[me];
        thread.groups.push(thread.issued);
        Ok(())
    }

    /// Takes the registers `d` for a product: their values leave, poison enters.
    fn take(
        &mut self,
        me: usize,
        product: u64,
        kind: Kind,
        d: &mut [&mut [u32]],
    ) -> Result<Vec<usize>, Violation> {
        let thread = &mut self.threads[me];
        let mut places = Vec::new();
        for d in d {
            let place = d.as_ptr() as usize;
            if let Some(known) = thread.in_flight.iter_mut().find(|f| f.place == place) {
                if d.iter().any(|x| *x != POISON) {
                    return Err(Violation::RegistersInFlight);
                }
                // Only products of one shape follow each other on the same accumulators without a fence.
                if known.kind != kind && known.fences == thread.fences {
                    return Err(Violation::RegisterFence("D, of a product of another shape"));
                }
                (known.last, known.kind, known.fences) = (product, kind, thread.fences);
            } else {
                thread.check_fence(place, d, "D")?;
                let (values, last, fences) = (d.to_vec(), product, thread.fences);
                thread.in_flight.push(InFlight { place, values, last, kind, fences });
                d.fill(POISON);
            }
            places.push(place);
        }
        Ok(places)
    }

    /// `wgmma.mma_async`.
    #[expect(clippy::too_many_arguments, reason = "the operands of the instruction, and who issues it")]
    pub(super) fn issue(
        &mut self,
        me: usize,
        known: &Causality,
        shared: &mut Shared,
        kind: Kind,
        d: &mut [&mut [u32]],
        a: OperandA,
        b: u64,
        accumulate: bool,
    ) -> Result<Vec<u32>, Violation> {
        let a_bits = if let OperandA::Shared(bits) = a { Some(bits) } else { None };
        self.log(me, Entry::Product { kind, a: a_bits, b, accumulate })?;
        let number = self.threads[me].issued;
        if let OperandA::Registers(fragment) = a {
            self.threads[me].check_fragment(fragment)?;
        }
        if number == self.retired + self.products.len() as u64 {
            let a = a_bits.map(|bits| descriptor::chunks(bits, ROWS as u32)).transpose()?;
            let b = descriptor::chunks(b, kind.columns as u32)?;
            let all: Vec<u32> = a.iter().flatten().chain(&b).copied().collect();
            self.products.push_back(Product {
                kind,
                accumulate,
                a,
                b,
                sources: shared.product_issued(&all, WARPS)?,
                fragments: vec![[0; 4]; THREADS],
                places: vec![Vec::new(); THREADS],
                issued: 0,
                done: false,
            });
        }
        let places = self.take(me, number, kind, d)?;
        self.threads[me].issued += 1;
        let product = &mut self.products[(number - self.retired) as usize];
        for source in &product.sources {
            shared.check_source(known, *source)?;
        }
        product.places[me] = places;
        if let OperandA::Registers(fragment) = a {
            product.fragments[me] = fragment;
        }
        product.issued += 1;
        let complete = product.issued == THREADS;
        Ok(if complete { core::mem::take(&mut self.waiters) } else { Vec::new() })
    }

    /// `wgmma.wait_group`, logged once; then [`wait`](Self::wait) until it says yes.
    pub(super) fn start_wait(&mut self, me: usize, pending: u32) -> Result<(), Violation> {
        self.log(me, Entry::Wait(pending))
    }

    /// Whether the products up to the `pending` latest groups are complete for this thread. `warp` is its actor.
    pub(super) fn wait(
        &mut self,
        me: usize,
        pending: u32,
        warp: u16,
        known: &mut Causality,
        shared: &mut Shared,
    ) -> bool {
        let groups = &self.threads[me].groups;
        let end = groups.len().checked_sub(pending as usize + 1).map_or(0, |last| groups[last]);
        let end = end.max(self.threads[me].waited);
        let count = end.saturating_sub(self.retired) as usize;
        if self.products.iter().take(count).any(|p| p.issued < THREADS) {
            self.waiters.push((me) as u32);
            return false;
        }
        for i in 0..count {
            self.run(i, shared);
        }
        let waited = &mut self.waited[me / 32];
        if *waited < end {
            let first = (*waited - self.retired) as usize;
            let epoch = Epoch { actor: warp, clock: end as u32 };
            for product in self.products.range(first..count) {
                let all: Vec<u32> = product.a.iter().flatten().chain(&product.b).copied().collect();
                shared.product_waited(epoch, &all);
            }
            *waited = end;
        }
        self.threads[me].waited = end;
        known.seen.set(warp, known.seen.get(warp).max(end as u32));
        let retire = self.waited.iter().min().copied().unwrap_or(0) - self.retired;
        self.products.drain(..retire as usize);
        self.retired += retire;
        true
    }

    /// Runs product `i` of the queue, whose predecessors have run.
    fn run(&mut self, i: usize, shared: &Shared) {
        let product = &mut self.products[i];
        if core::mem::replace(&mut product.done, true) {
            return;
        }
        let kind = product.kind;
        let read = |chunks: &[u32]| {
            let mut elements = Vec::with_capacity(chunks.len() * 16);
            for pair in chunks.as_chunks::<2>().0 {
                let mut row = [0; STEP as usize];
                row[..16].copy_from_slice(&shared.chunk(pair[0]));
                row[16..].copy_from_slice(&shared.chunk(pair[1]));
                product::decode(kind.element, &row, &mut elements);
            }
            elements
        };
        let a = match &product.a {
            Some(chunks) => read(chunks),
            None => fragment_rows(kind.element, &product.fragments),
        };
        let b = read(&product.b);
        let mut d: Vec<Vec<u32>> = Vec::with_capacity(THREADS);
        for (thread, places) in self.threads.iter().zip(&product.places) {
            d.push(places.iter().flat_map(|p| thread.values(*p).iter().copied()).collect());
        }
        product::multiply(kind, &a, &b, &mut d, product.accumulate);
        for ((thread, places), d) in self.threads.iter_mut().zip(&product.places).zip(d) {
            let mut rest = d.as_slice();
            for place in places {
                let values = thread.values_mut(*place);
                let (mine, others) = rest.split_at(values.len());
                values.copy_from_slice(mine);
                rest = others;
            }
        }
    }

    /// `pin`: hands over what was waited for, and remembers the values for the next fence.
    pub(super) fn pin(&mut self, me: usize, registers: &mut [u32]) -> Result<(), Violation> {
        self.threads[me].pin(registers)
    }

    /// What a block may not leave behind; `None` if there is nothing.
    pub(super) fn left(&self) -> Option<String> {
        if self.threads.iter().any(|t| t.waited < t.issued) {
            return Some("a wgmma in flight".into());
        }
        let behind = self.threads.iter().filter(|t| t.position > self.passed).count();
        (behind > 0).then(|| {
            format!("wgmma instructions that {behind} of 128 threads executed and the others did not")
        })
    }
}

impl Thread {
    fn values(&self, place: usize) -> &[u32] {
        &self.in_flight.iter().find(|f| f.place == place).expect("issued registers are in flight").values
    }

    fn values_mut(&mut self, place: usize) -> &mut [u32] {
        &mut self
            .in_flight
            .iter_mut()
            .find(|f| f.place == place)
            .expect("issued registers are in flight")
            .values
    }

    /// Values that go into a product must have been pinned before the last fence and be what they were then.
    fn check_fence(&self, place: usize, values: &[u32], what: &'static str) -> Result<(), Violation> {
        let fine = |p: &Pinned| p.place == place && p.values == values && p.fences < self.fences;
        if self.pinned.iter().any(fine) { Ok(()) } else { Err(Violation::RegisterFence(what)) }
    }

    /// The same for a fragment of A, which is passed by value: any pinned array may hold it.
    fn check_fragment(&self, fragment: [u32; 4]) -> Result<(), Violation> {
        let fine = |p: &Pinned| p.fences < self.fences && p.values.windows(4).any(|w| *w == fragment);
        if self.pinned.iter().any(fine) { Ok(()) } else { Err(Violation::RegisterFence("A")) }
    }

    fn pin(&mut self, registers: &mut [u32]) -> Result<(), Violation> {
        let (place, bytes) = (registers.as_ptr() as usize, size_of_val(registers));
        let overlaps = |f: &InFlight| f.place < place + bytes && place < f.place + f.values.len() * 4;
        while let Some(i) = self.in_flight.iter().position(overlaps) {
            let known = &self.in_flight[i];
            let whole = known.place == place && known.values.len() == registers.len();
            if !whole || known.last >= self.waited || registers.iter().any(|x| *x != POISON) {
                return Err(Violation::RegistersInFlight);
            }
            registers.copy_from_slice(&known.values);
            self.in_flight.swap_remove(i);
        }
        let fences = self.fences;
        match self.pinned.iter_mut().find(|p| p.place == place && p.values.len() == registers.len()) {
            Some(p) => {
                p.values.copy_from_slice(registers);
                p.fences = fences;
            }
            None => self.pinned.push(Pinned { place, values: registers.to_vec(), fences }),
        }
        Ok(())
    }
}

/// A of a product from the fragments of 128 threads: register 2h + r holds, of row t/4 + 8r of the warp's 16, the
/// 4 bytes at 4(t%4) of half h of the step (figures of PTX ISA 9.7.15.5.1.1).
fn fragment_rows(element: Element, fragments: &[[u32; 4]]) -> Vec<f32> {
    let mut elements = Vec::new();
    for row in 0..ROWS {
        let mut bytes = [0; STEP as usize];
        for (half, quad) in [(0, 0), (0, 1), (0, 2), (0, 3), (1, 0), (1, 1), (1, 2), (1, 3)] {
            let thread = row / 16 * 32 + row % 8 * 4 + quad;
            let register = fragments[thread][2 * half + row % 16 / 8];
            bytes[16 * half + 4 * quad..][..4].copy_from_slice(&register.to_le_bytes());
        }
        product::decode(element, &bytes, &mut elements);
    }
    elements
}
