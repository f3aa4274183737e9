//! Tensor Memory and the products of tcgen05 (PTX ISA 9.7.16).
//!
//! Every cell, one of 128 lanes in one of 512 columns, remembers who wrote it and who has read it since, in two orders:
//! the ordinary one of barriers, and that of tcgen05, into which an operation enters by `fence::before_thread_sync` (or
//! a commit), and which a thread's operations follow from its `fence::after_thread_sync` on. Both travel with
//! barriers. An access that the second order does not cover is a fault under every schedule.
//!
//! Nothing happens before it must: a product runs when a commit behind it arrives, which is when no thread can
//! run; a load reads when it is waited for. Products of one thread run in the order of their issue, and only those of
//! the same accumulator, shape and kind may rely on that (9.7.16.6.2).

use std::collections::VecDeque;
use std::format;
use std::string::String;
use std::vec;
use std::vec::Vec;

use super::clock::{Causality, Clock, Epoch};
use super::descriptor::{self, STEP};
use super::fault::Violation;
use super::product::{self, Accumulator, Element};
use super::shared::Shared;
use super::warpgroup::POISON;

/// Lanes, and rows of a product.
const LANES: usize = 128;
/// Columns of a block.
const COLUMNS: u32 = 512;
/// Columns of A that a k step takes.
const STEP_COLUMNS: u32 = STEP / 4;

/// `.kind` of a product.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum TensorKind {
    /// 16-bit operands.
    F16,
    /// 8-bit floats.
    F8,
    /// Bytes.
    I8,
}

/// Where operand A lies.
#[derive(Clone, Copy, Debug)]
pub(crate) enum TensorOperand {
    /// A shared memory descriptor.
    Shared(u64),
    /// An address in Tensor Memory.
    Tensor(u32),
}

/// What an instruction descriptor says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Shape {
    kind: TensorKind,
    element: Element,
    accumulator: Accumulator,
    columns: u32,
}

impl Shape {
    /// Reads the 32 bits (9.7.16.4.2) of a product of this kind.
    fn new(kind: TensorKind, bits: u32) -> Result<Self, Violation> {
        let fail = |rule| Err(Violation::InstructionDescriptor { bits, rule });
        let field = |at: u32, width: u32| bits >> at & ((1 << width) - 1);
        if field(6, 1) | field(23, 1) | field(29, 1) != 0 {
            return fail("reserved bits are set");
        }
        if field(0, 4) != 0 || field(13, 2) != 0 || field(30, 2) != 0 {
            return fail("sparsity, saturation, negation and shifts are not emulated");
        }
        if field(15, 2) != 0 {
            return fail("operands that are not K-major are not emulated");
        }
        let accumulator = match (kind, field(4, 2)) {
            (TensorKind::F16 | TensorKind::F8, 0) => Accumulator::F16,
            (TensorKind::F16 | TensorKind::F8, 1) => Accumulator::F32,
            (TensorKind::I8, 2) => Accumulator::S32,
            _ => return fail("this kind has no such accumulator"),
        };
        let element = match (kind, field(7, 3), field(10, 3)) {
            (TensorKind::F16, 0, 0) => Element::F16,
            (TensorKind::F8, 0, 0) => Element::E4m3,
            (TensorKind::I8, 1, 1) => Element::S8,
            _ => return fail("operands other than f16, E4M3 and signed bytes are not emulated"),
        };
        if field(24, 5) != 8 {
            return fail("M other than 128 is not emulated");
        }
        let columns = field(17, 6) * 8;
        if !(16..=256).contains(&columns) || !columns.is_multiple_of(16) {
            return fail("N must be a multiple of 16 up to 256 where M is 128");
        }
        Ok(Self { kind, element, accumulator, columns })
    }
}

/// A moment of an actor in both orders.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Access {
    actor: u16,
    /// Of tcgen05: the number of the actor's operation.
    operation: u32,
    ordinary: u32,
}

/// 32 bits of Tensor Memory.
#[derive(Clone, Default)]
struct Cell {
    value: u32,
    allocated: bool,
    /// By nobody if the operation is 0.
    written: Access,
    reads: Vec<Access>,
}

/// A load that was not waited for.
struct Load {
    operation: u32,
    place: usize,
    column: u32,
    lane: usize,
    /// Registers.
    count: usize,
    packed: bool,
    /// What it read, once a wait was executed.
    values: Option<Vec<u32>>,
}

/// What one thread has under way.
#[derive(Default)]
struct Thread {
    /// Loads and stores so far.
    operations: u32,
    loads: Vec<Load>,
    /// Stores that were not waited for.
    stores: Vec<u32>,
    /// What its operations are ordered after.
    after: Clock,
}

impl Thread {
    /// Operations that were not waited for.
    fn pending(&self) -> impl Iterator<Item = u32> {
        let loads = self.loads.iter().filter(|l| l.values.is_none()).map(|l| l.operation);
        loads.chain(self.stores.iter().copied())
    }

    /// The number up to which all operations are complete.
    fn complete(&self) -> u32 {
        self.pending().min().map_or(self.operations, |first| first - 1)
    }
}

/// A product that was issued.
struct Product {
    number: u32,
    shape: Shape,
    d: u32,
    accumulate: bool,
    a: Operand,
    b: Vec<u32>,
    /// Who wrote its operands in shared memory.
    sources: Clock,
}

/// A of a product.
enum Operand {
    /// Chunks of shared memory.
    Shared(Vec<u32>),
    /// The first column.
    Tensor(u32),
}

/// Products of a warp's issuing thread.
#[derive(Default)]
struct Issuer {
    issued: u32,
    /// What those that ran came after.
    sources: Clock,
    /// Those that did not run yet.
    queue: VecDeque<Product>,
}

/// A commit that has not arrived.
struct Commit {
    warp: usize,
    /// Products that it covers.
    products: u32,
    barrier: u32,
}

/// What stands between two accesses, or should.
enum Order {
    Known,
    /// A wait of the same thread.
    Wait,
    /// A commit.
    Product,
    Before,
    After,
    Nothing,
}

/// The Tensor Memory of a block.
pub(super) struct Tensor {
    /// By column, then lane; empty before the first allocation.
    cells: Vec<Cell>,
    allocations: Vec<(u32, u32)>,
    relinquished: bool,
    /// Columns of the last allocation.
    last: u32,
    threads: Vec<Thread>,
    issuers: Vec<Issuer>,
    commits: Vec<Commit>,
    /// The shape of the product that wrote a column's cells last, with its first column.
    accumulators: Vec<Option<(Shape, u32)>>,
    /// The first of the actors that stand for the products of a warp.
    actor: u16,
}

impl Tensor {
    /// Of a block of so many threads; `actor` is the first that stands for the products of a warp.
    pub(super) fn new(threads: u32, actor: u16) -> Self {
        Self {
            cells: Vec::new(),
            allocations: Vec::new(),
            relinquished: false,
            last: COLUMNS,
            threads: (0..threads).map(|_| Thread::default()).collect(),
            issuers: (0..threads.div_ceil(32)).map(|_| Issuer::default()).collect(),
            commits: Vec::new(),
            accumulators: vec![None; COLUMNS as usize],
            actor,
        }
    }

    fn actor_of(&self, warp: usize) -> u16 {
        self.actor + warp as u16
    }

    // Allocation.

    /// `tcgen05.alloc`: the first column.
    pub(super) fn allocate(&mut self, columns: u32) -> Result<u32, Violation> {
        let fail = |rule| Err(Violation::TensorAllocation(rule));
        if !(32..=COLUMNS).contains(&columns) || !columns.is_power_of_two() {
            return fail("columns are a power of two from 32 to 512");
        }
        if self.relinquished {
            return fail("the permit was relinquished");
        }
        if columns > self.last {
            return fail("allocations may not grow");
        }
        let free =
            |at: &u32| self.allocations.iter().all(|(from, n)| at + columns <= *from || from + n <= *at);
        let Some(at) = (0..=COLUMNS - columns).step_by(columns as usize).find(free) else {
            return fail("no columns are left, and nobody else would free some");
        };
        self.cells.resize(COLUMNS as usize * LANES, Cell::default());
        for cell in &mut self.cells[at as usize * LANES..][..columns as usize * LANES] {
            *cell = Cell { value: POISON, allocated: true, ..Cell::default() };
        }
        self.allocations.push((at, columns));
        self.last = columns;
        Ok(at)
    }

    /// `tcgen05.relinquish_alloc_permit`.
    pub(super) fn relinquish(&mut self) {
        self.relinquished = true;
    }

    /// `tcgen05.dealloc` by a thread that knows `known`.
    pub(super) fn deallocate(&mut self, known: &Causality, at: u32, columns: u32) -> Result<(), Violation> {
        let fail = |rule| Err(Violation::TensorAllocation(rule));
        let Some(i) = self.allocations.iter().position(|a| *a == (at, columns)) else {
            return fail("nothing like that was allocated");
        };
        if self.issuers.iter().any(|i| !i.queue.is_empty()) {
            return fail("columns are freed while products are in flight");
        }
        if self.threads.iter().any(|t| t.complete() != t.operations) {
            return fail("columns are freed while loads or stores are in flight");
        }
        for cell in &mut self.cells[at as usize * LANES..][..columns as usize * LANES] {
            let ordered = |a: &Access| known.seen.knows(Epoch { actor: a.actor, clock: a.ordinary });
            if !cell.reads.iter().chain([&cell.written]).all(ordered) {
                return fail("columns are freed while others may still use them");
            }
            *cell = Cell::default();
        }
        self.allocations.swap_remove(i);
        Ok(())
    }

    // Order.

    /// `tcgen05.fence::before_thread_sync`.
    pub(super) fn fence_before(&self, thread: u32, known: &mut Causality) {
        known.tensor.set(thread as u16, self.threads[thread as usize].complete());
    }

    /// `tcgen05.fence::after_thread_sync`.
    pub(super) fn fence_after(&mut self, thread: u32, known: &Causality) {
        self.threads[thread as usize].after.join(&known.tensor);
    }

    /// How an earlier access is ordered before what `thread` does now.
    fn order(&self, thread: u32, known: &Causality, access: Access) -> Order {
        let me = &self.threads[thread as usize];
        let Access { actor, operation, ordinary } = access;
        if u32::from(actor) == thread {
            return if me.pending().any(|o| o == operation) { Order::Wait } else { Order::Known };
        }
        if me.after.get(actor) >= operation {
            return Order::Known;
        }
        if known.tensor.get(actor) >= operation {
            return Order::After;
        }
        match self.threads.get(usize::from(actor)) {
            None => Order::Product,
            Some(other) if other.complete() < operation => Order::Wait,
            Some(_) if known.seen.get(actor) >= ordinary => Order::Before,
            Some(_) => Order::Nothing,
        }
    }

    /// Asks for order after `access` to a cell.
    fn check(
        &self,
        thread: u32,
        known: &Causality,
        access: Access,
        (lane, column): (usize, u32),
    ) -> Result<(), Violation> {
        let missing = match self.order(thread, known, access) {
            Order::Known => return Ok(()),
            Order::Wait => "a tcgen05.wait for the other access",
            Order::Product => return Err(Violation::TensorInFlight { lane: lane as u32, column }),
            Order::Before => "tcgen05.fence::before_thread_sync after the other access",
            Order::After => "tcgen05.fence::after_thread_sync",
            Order::Nothing => "a barrier after the other access",
        };
        Err(Violation::TensorOrder { lane: lane as u32, column, missing })
    }

    /// The place of a cell.
    fn at(&self, lane: usize, column: u32) -> Result<usize, Violation> {
        let at = column as usize * LANES + lane;
        match self.cells.get(at) {
            Some(cell) if cell.allocated => Ok(at),
            _ => Err(Violation::TensorBounds { lane: lane as u32, column }),
        }
    }

    // Loads and stores.

    /// The lane that a thread reaches at an address, and the column.
    fn place(thread: u32, address: u32) -> Result<(usize, u32), Violation> {
        let (lane, column, warp) = (address >> 16, address & 0xffff, thread / 32 % 4);
        if lane != warp * 32 {
            return Err(Violation::TensorLanes { warp, lane });
        }
        Ok(((lane + thread % 32) as usize, column))
    }

    /// The next operation of a thread.
    fn operation(&mut self, now: Epoch) -> Access {
        let thread = &mut self.threads[usize::from(now.actor)];
        thread.operations += 1;
        Access { actor: now.actor, operation: thread.operations, ordinary: now.clock }
    }

    /// `tcgen05.ld.32x32b`: the registers become poison until the wait.
    pub(super) fn load(
        &mut self,
        now: Epoch,
        known: &Causality,
        registers: &mut [u32],
        address: u32,
        packed: bool,
    ) -> Result<(), Violation> {
        let thread = u32::from(now.actor);
        let (lane, column) = Self::place(thread, address)?;
        let columns = registers.len() as u32 * if packed { 2 } else { 1 };
        let access = self.operation(now);
        for column in column..column + columns {
            let at = self.at(lane, column)?;
            if self.cells[at].written.operation == 0 {
                return Err(Violation::TensorEmpty { lane: lane as u32, column });
            }
            self.check(thread, known, self.cells[at].written, (lane, column))?;
            let reads = &mut self.cells[at].reads;
            reads.retain(|r| r.actor != access.actor);
            reads.push(access);
        }
        let (place, count) = (registers.as_ptr() as usize, registers.len());
        let load = Load { operation: access.operation, place, column, lane, count, packed, values: None };
        self.threads[thread as usize].loads.push(load);
        registers.fill(POISON);
        Ok(())
    }

    /// `tcgen05.wait::ld`: all loads of the thread read now; those into `registers` are handed over.
    pub(super) fn wait_load(&mut self, thread: u32, registers: &mut [u32]) -> Result<(), Violation> {
        let (cells, thread) = (&self.cells, &mut self.threads[thread as usize]);
        let place = registers.as_ptr() as usize;
        let Some(mine) = thread.loads.iter().position(|l| l.place == place) else {
            return Err(Violation::TensorRegisters("no load went into them"));
        };
        for load in thread.loads.iter_mut().filter(|l| l.values.is_none()) {
            let cell = |column: u32| cells[column as usize * LANES + load.lane].value;
            let value = |i: u32| match load.packed {
                true => cell(load.column + 2 * i) & 0xffff | cell(load.column + 2 * i + 1) << 16,
                false => cell(load.column + i),
            };
            load.values = Some((0..load.count as u32).map(value).collect());
        }
        let load = thread.loads.swap_remove(mine);
        let values = load.values.unwrap_or_default();
        if registers.iter().any(|r| *r != POISON) || registers.len() != values.len() {
            return Err(Violation::TensorRegisters("they changed since the load"));
        }
        registers.copy_from_slice(&values);
        Ok(())
    }

    /// `tcgen05.st.32x32b`.
    pub(super) fn store(
        &mut self,
        now: Epoch,
        known: &Causality,
        address: u32,
        registers: &[u32],
    ) -> Result<(), Violation> {
        let thread = u32::from(now.actor);
        let (lane, column) = Self::place(thread, address)?;
        let access = self.operation(now);
        for (column, value) in (column..).zip(registers) {
            let at = self.at(lane, column)?;
            self.check_write(thread, known, at, (lane, column))?;
            let cell = &mut self.cells[at];
            (cell.value, cell.written) = (*value, access);
            cell.reads.clear();
            self.accumulators[column as usize] = None;
        }
        self.threads[thread as usize].stores.push(access.operation);
        Ok(())
    }

    /// `tcgen05.wait::st`.
    pub(super) fn wait_store(&mut self, thread: u32) {
        self.threads[thread as usize].stores.clear();
    }

    /// What every write needs: all that used the cell came before.
    fn check_write(
        &self,
        thread: u32,
        known: &Causality,
        at: usize,
        place: (usize, u32),
    ) -> Result<(), Violation> {
        let cell = &self.cells[at];
        if cell.written.operation > 0 {
            self.check(thread, known, cell.written, place)?;
        }
        cell.reads.iter().try_for_each(|read| self.check(thread, known, *read, place))
    }

    // Products.

    /// `tcgen05.mma`.
    #[expect(clippy::too_many_arguments, reason = "the operands of the instruction, and who issues it")]
    pub(super) fn product(
        &mut self,
        thread: u32,
        known: &Causality,
        shared: &mut Shared,
        kind: TensorKind,
        d: u32,
        a: TensorOperand,
        b: u64,
        shape: u32,
        accumulate: bool,
    ) -> Result<(), Violation> {
        let shape = Shape::new(kind, shape)?;
        let warp = thread as usize / 32;
        let number = self.issuers[warp].issued + 1;
        let access = Access { actor: self.actor_of(warp), operation: number, ordinary: number };
        let b = descriptor::tensor_chunks(b, shape.columns)?;
        let mut chunks = b.clone();
        let a = match a {
            TensorOperand::Shared(bits) => {
                let a = descriptor::tensor_chunks(bits, LANES as u32)?;
                chunks.extend(&a);
                Operand::Shared(a)
            }
            TensorOperand::Tensor(address) => {
                self.read_operand(thread, known, access, address)?;
                Operand::Tensor(address)
            }
        };
        let mut sources = Clock::default();
        for source in shared.product_issued(&chunks, 1)? {
            shared.check_source(known, source)?;
            let Epoch { actor, clock } = source.written();
            sources.set(actor, clock.max(sources.get(actor)));
        }
        self.write_accumulators(thread, known, access, shape, d, accumulate)?;
        let issuer = &mut self.issuers[warp];
        issuer.issued = number;
        issuer.queue.push_back(Product { number, shape, d, accumulate, a, b, sources });
        Ok(())
    }

    /// The cells of A.
    fn read_operand(
        &mut self,
        thread: u32,
        known: &Causality,
        access: Access,
        address: u32,
    ) -> Result<(), Violation> {
        if address >> 16 != 0 {
            return Err(Violation::TensorLanes { warp: 0, lane: address >> 16 });
        }
        for column in address..address + STEP_COLUMNS {
            for lane in 0..LANES {
                let at = self.at(lane, column)?;
                let written = self.cells[at].written;
                if written.operation == 0 {
                    return Err(Violation::TensorEmpty { lane: lane as u32, column });
                }
                self.check(thread, known, written, (lane, column))?;
                let reads = &mut self.cells[at].reads;
                reads.retain(|r| r.actor != access.actor);
                reads.push(access);
            }
        }
        Ok(())
    }

    /// The cells of D: behind a product of the same thread on the same accumulators nothing else is needed.
    fn write_accumulators(
        &mut self,
        thread: u32,
        known: &Causality,
        access: Access,
        shape: Shape,
        d: u32,
        accumulate: bool,
    ) -> Result<(), Violation> {
        if d >> 16 != 0 {
            return Err(Violation::TensorLanes { warp: 0, lane: d >> 16 });
        }
        for column in d..d + shape.columns {
            let follows = self.accumulators.get(column as usize) == Some(&Some((shape, d)));
            for lane in 0..LANES {
                let at = self.at(lane, column)?;
                let cell = &self.cells[at];
                if accumulate && cell.written.operation == 0 {
                    return Err(Violation::TensorEmpty { lane: lane as u32, column });
                }
                if follows && cell.written.actor == access.actor {
                    cell.reads.iter().try_for_each(|r| self.check(thread, known, *r, (lane, column)))?;
                } else {
                    self.check_write(thread, known, at, (lane, column))?;
                }
                let cell = &mut self.cells[at];
                cell.written = access;
                cell.reads.clear();
            }
            self.accumulators[column as usize] = Some((shape, d));
        }
        Ok(())
    }

    /// `tcgen05.commit`.
    pub(super) fn commit(&mut self, thread: u32, barrier: u32) {
        let warp = thread as usize / 32;
        self.commits.push(Commit { warp, products: self.issuers[warp].issued, barrier });
    }

    /// The barriers of the commits that have not arrived.
    pub(super) fn commits(&self) -> impl Iterator<Item = u32> {
        self.commits.iter().map(|c| c.barrier)
    }

    /// Runs the products that a commit covers. Returns its barrier, and what those that wait for it may know.
    pub(super) fn arrive(&mut self, commit: usize, shared: &mut Shared) -> (u32, Causality) {
        let Commit { warp, products, barrier } = self.commits.remove(commit);
        let actor = self.actor_of(warp);
        while let Some(product) = self.issuers[warp].queue.pop_front_if(|p| p.number <= products) {
            self.run(&product, shared);
            self.issuers[warp].sources.join(&product.sources);
            let mut chunks = product.b;
            if let Operand::Shared(a) = product.a {
                chunks.extend(a);
            }
            shared.product_waited(Epoch { actor, clock: product.number }, &chunks);
        }
        let mut known = Causality { seen: self.issuers[warp].sources.clone(), ..Causality::default() };
        known.seen.set(actor, products);
        known.tensor.set(actor, products);
        (barrier, known)
    }

    fn run(&mut self, product: &Product, shared: &Shared) {
        let Shape { element, accumulator, columns, .. } = product.shape;
        let read = |chunks: &[u32]| {
            let mut elements = Vec::with_capacity(chunks.len() * 16);
            for pair in chunks.as_chunks::<2>().0 {
                let mut row = [0; STEP as usize];
                row[..16].copy_from_slice(&shared.chunk(pair[0]));
                row[16..].copy_from_slice(&shared.chunk(pair[1]));
                product::decode(element, &row, &mut elements);
            }
            elements
        };
        let a = match &product.a {
            Operand::Shared(chunks) => read(chunks),
            Operand::Tensor(first) => {
                let mut elements = Vec::new();
                for lane in 0..LANES {
                    let mut row = [0; STEP as usize];
                    for (column, bytes) in (*first as usize..).zip(row.as_chunks_mut::<4>().0) {
                        *bytes = self.cells[column * LANES + lane].value.to_le_bytes();
                    }
                    product::decode(element, &row, &mut elements);
                }
                elements
            }
        };
        let b = read(&product.b);
        let step = product::step(a.len() / LANES, &a, &b);
        for column in 0..columns as usize {
            let cells = &mut self.cells[(product.d as usize + column) * LANES..][..LANES];
            for (lane, cell) in cells.iter_mut().enumerate() {
                let old = if product.accumulate { cell.value } else { 0 };
                let sum = product::add(accumulator, old, step[lane * columns as usize + column]);
                // Nothing says what is beside an f16.
                let beside = if accumulator == Accumulator::F16 { POISON & 0xffff_0000 } else { 0 };
                cell.value = sum | beside;
            }
        }
    }

    /// What a block may not leave behind; `None` if there is nothing.
    pub(super) fn left(&self) -> Option<String> {
        if self.issuers.iter().any(|i| !i.queue.is_empty()) {
            return Some("a tcgen05.mma in flight".into());
        }
        if self.threads.iter().any(|t| !t.loads.is_empty() || !t.stores.is_empty()) {
            return Some("a tcgen05.ld or tcgen05.st that was not waited for".into());
        }
        let columns: u32 = self.allocations.iter().map(|(_, n)| n).sum();
        (columns > 0).then(|| format!("{columns} columns of Tensor Memory allocated"))
    }
}
