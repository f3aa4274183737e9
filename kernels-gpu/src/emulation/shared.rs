//! Shared memory of a block, and of every byte who wrote it, who read it, and whether it has arrived.

use std::collections::HashMap;
use std::format;
use std::string::String;
use std::vec;
use std::vec::Vec;

use super::clock::{Causality, Epoch};
use super::fault::Violation;

/// Where the dynamic shared memory starts: as on Hopper, behind the kilobyte that the system keeps.
pub(crate) const BASE: u32 = 1024;

/// Bytes that a matrix descriptor addresses as a whole.
const CHUNK: u32 = 16;

/// What a byte holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// Nothing.
    Empty,
    /// A thread's write.
    Written,
    /// Reductions of threads, on top of whatever was there.
    Reduced,
    /// Bytes that a bulk copy brought.
    Copied,
    /// A bulk copy may write it any time.
    Arriving,
    /// A `cp.async` may write it any time.
    Loading,
    /// Part of an mbarrier.
    Barrier,
    /// Between two symbols: nobody's.
    Gap,
}

/// The history of a byte.
#[derive(Clone, Copy)]
struct Byte {
    state: State,
    written: Epoch,
    /// The last ordinary read; further ones that are not ordered to it are in `readers`.
    read: Epoch,
}

/// A writer of operand bytes that a product has to be ordered after.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Source {
    address: u32,
    copied: bool,
    written: Epoch,
}

impl Source {
    /// When it wrote.
    pub(super) fn written(self) -> Epoch {
        self.written
    }
}

/// The memory and its history.
pub(super) struct Shared {
    data: Vec<u8>,
    bytes: Vec<Byte>,
    /// Concurrent ordinary reads beyond the first.
    readers: HashMap<u32, Vec<Epoch>>,
    /// Concurrent reductions of a word beyond the last.
    reducers: HashMap<u32, Vec<Epoch>>,
    /// Products in flight that read a chunk, counted once a warp.
    in_flight: Vec<u16>,
    /// Reads of products that were waited for.
    product_reads: Vec<Vec<Epoch>>,
    /// Threads of the block: actors below are threads, the next are the products of warps, by wgmma and by tcgen05.
    threads: u16,
}

impl Shared {
    pub(super) fn new(size: u32, threads: u32) -> Self {
        let chunks = size.div_ceil(CHUNK) as usize;
        let byte = Byte { state: State::Empty, written: Epoch::default(), read: Epoch::default() };
        Self {
            // Whatever reads a byte that nobody wrote faults; the pattern only shows in a debugger.
            data: vec![0xa5; size as usize],
            bytes: vec![byte; size as usize],
            readers: HashMap::new(),
            reducers: HashMap::new(),
            in_flight: vec![0; chunks],
            product_reads: vec![Vec::new(); chunks],
            threads: threads as u16,
        }
    }

    /// Memory for a `.shared` symbol, behind what there is and a gap.
    pub(super) fn allocate(&mut self, bytes: u32, alignment: u32) -> u32 {
        const GAP: usize = 64;
        let start = (self.data.len() + GAP).next_multiple_of(alignment.max(CHUNK) as usize);
        let fresh = |state| Byte { state, written: Epoch::default(), read: Epoch::default() };
        self.bytes.resize(start, fresh(State::Gap));
        self.bytes.resize(start + bytes as usize, fresh(State::Empty));
        self.data.resize(self.bytes.len(), 0xa5);
        let chunks = self.data.len().div_ceil(CHUNK as usize);
        self.in_flight.resize(chunks, 0);
        self.product_reads.resize(chunks, Vec::new());
        BASE + start as u32
    }

    /// The range of `bytes` bytes at `address`.
    fn range(&self, address: u32, bytes: u32, alignment: u32) -> Result<core::ops::Range<usize>, Violation> {
        let size = self.data.len() as u32;
        let from =
            address.checked_sub(BASE).filter(|from| u64::from(*from) + u64::from(bytes) <= u64::from(size));
        let Some(from) = from else { return Err(Violation::SharedBounds { address, bytes, size }) };
        if !address.is_multiple_of(alignment) {
            return Err(Violation::Misaligned { address: address.into(), alignment });
        }
        let range = from as usize..(from + bytes) as usize;
        if self.bytes[range.clone()].iter().any(|b| b.state == State::Gap) {
            return Err(Violation::SharedBounds { address, bytes, size });
        }
        Ok(range)
    }

    /// What an actor did, in words.
    fn deed(&self, actor: u16, did: &str) -> String {
        let warps = self.threads.div_ceil(32);
        match actor {
            a if a < self.threads => format!("the {did} by thread {a}"),
            a if a < self.threads + warps => format!("the {did} by a wgmma of warp {}", a - self.threads),
            a if a < self.threads + 2 * warps => {
                format!("the {did} by a tcgen05.mma of warp {}", a - self.threads - warps)
            }
            _ => format!("the {did} by a bulk copy"),
        }
    }

    fn race(&self, at: usize, access: &'static str, other: Epoch, did: &str) -> Violation {
        Violation::Race { address: BASE + at as u32, access, other: self.deed(other.actor, did) }
    }

    /// An ordinary load by thread `me`.
    pub(super) fn load(
        &mut self,
        me: Epoch,
        known: &Causality,
        address: u32,
        alignment: u32,
        into: &mut [u8],
    ) -> Result<(), Violation> {
        let range = self.range(address, into.len() as u32, alignment)?;
        for i in range.clone() {
            let byte = self.bytes[i];
            let here = BASE + i as u32;
            match byte.state {
                State::Empty => return Err(Violation::Uninitialized(here)),
                State::Arriving => return Err(Violation::CopyInFlight(here)),
                State::Loading => return Err(Violation::AsyncCopyInFlight(here)),
                State::Barrier => return Err(Violation::BarrierBytes(here)),
                State::Gap => unreachable!("`range` refuses gaps"),
                State::Written | State::Reduced | State::Copied => {}
            }
            self.check_writers(known, i, "read")?;
            if byte.read.actor == me.actor || known.seen.knows(byte.read) {
                self.bytes[i].read = me;
            } else {
                let readers = self.readers.entry(i as u32).or_default();
                readers.retain(|r| r.actor != me.actor && !known.seen.knows(*r));
                readers.push(me);
            }
        }
        into.copy_from_slice(&self.data[range]);
        Ok(())
    }

    /// Who wrote a byte must be known.
    fn check_writers(&self, known: &Causality, i: usize, access: &'static str) -> Result<(), Violation> {
        let byte = self.bytes[i];
        let more = (byte.state == State::Reduced).then(|| self.reducers.get(&(i as u32 / 4))).flatten();
        for written in [byte.written].iter().chain(more.into_iter().flatten()) {
            if !known.seen.knows(*written) {
                return Err(self.race(i, access, *written, "write"));
            }
        }
        Ok(())
    }

    /// And who read it, before it is written.
    fn check_readers(&self, known: &Causality, i: usize) -> Result<(), Violation> {
        let more = self.readers.get(&(i as u32)).into_iter().flatten();
        for read in [self.bytes[i].read].iter().chain(more).chain(&self.product_reads[i / CHUNK as usize]) {
            if !known.seen.knows(*read) {
                return Err(self.race(i, "write", *read, "read"));
            }
        }
        Ok(())
    }

    /// What every write needs: nobody else is at these bytes.
    fn check_write(&self, known: &Causality, range: core::ops::Range<usize>) -> Result<(), Violation> {
        for i in range {
            let byte = self.bytes[i];
            let here = BASE + i as u32;
            match byte.state {
                State::Arriving => return Err(Violation::CopyInFlight(here)),
                State::Loading => return Err(Violation::AsyncCopyInFlight(here)),
                State::Barrier => return Err(Violation::BarrierBytes(here)),
                State::Gap => unreachable!("`range` refuses gaps"),
                State::Empty | State::Written | State::Reduced | State::Copied => {}
            }
            if self.in_flight[i / CHUNK as usize] > 0 {
                return Err(Violation::OperandInFlight(here));
            }
            self.check_writers(known, i, "write")?;
            self.check_readers(known, i)?;
        }
        Ok(())
    }

    fn overwrite(&mut self, range: core::ops::Range<usize>, state: State, written: Epoch) {
        for i in range.clone() {
            self.bytes[i] = Byte { state, written, read: Epoch::default() };
            if !self.readers.is_empty() {
                self.readers.remove(&(i as u32));
            }
        }
        // Reads of a chunk are forgotten when all of it is written, else they stay and are already ordered.
        for chunk in range.start.div_ceil(CHUNK as usize)..range.end / CHUNK as usize {
            self.product_reads[chunk].clear();
        }
    }

    /// An ordinary store by thread `me`.
    pub(super) fn store(
        &mut self,
        me: Epoch,
        known: &Causality,
        address: u32,
        alignment: u32,
        from: &[u8],
    ) -> Result<(), Violation> {
        let range = self.range(address, from.len() as u32, alignment)?;
        self.check_write(known, range.clone())?;
        self.overwrite(range.clone(), State::Written, me);
        self.data[range].copy_from_slice(from);
        Ok(())
    }

    /// `red.shared` on a word by thread `me`: in any order with its like, but with nothing else.
    pub(super) fn reduce(
        &mut self,
        me: Epoch,
        known: &Causality,
        address: u32,
        f: impl FnOnce(u32) -> u32,
    ) -> Result<(), Violation> {
        let range = self.range(address, 4, 4)?;
        let state = self.bytes[range.start].state;
        for i in range.clone() {
            if self.bytes[i].state == State::Empty {
                return Err(Violation::Uninitialized(BASE + i as u32));
            }
            if state == State::Reduced {
                self.check_readers(known, i)?;
            }
        }
        let word = range.start as u32 / 4;
        if state == State::Reduced {
            let last = self.bytes[range.start].written;
            let others = self.reducers.entry(word).or_default();
            others.retain(|r| r.actor != me.actor && !known.seen.knows(*r));
            if last.actor != me.actor && !known.seen.knows(last) {
                others.push(last);
            }
        } else {
            self.check_write(known, range.clone())?;
            self.reducers.remove(&word);
        }
        self.overwrite(range.clone(), State::Reduced, me);
        let old = u32::from_le_bytes(self.data[range.clone()].try_into().expect("a word has 4 bytes"));
        self.data[range].copy_from_slice(&f(old).to_le_bytes());
        Ok(())
    }

    /// Makes 8 bytes an mbarrier's.
    pub(super) fn make_barrier(
        &mut self,
        me: Epoch,
        known: &Causality,
        address: u32,
    ) -> Result<(), Violation> {
        let range = self.range(address, 8, 8)?;
        if self.bytes[range.start].state == State::Barrier {
            return Err(Violation::BarrierInit(address));
        }
        self.check_write(known, range.clone())?;
        self.overwrite(range, State::Barrier, me);
        Ok(())
    }

    /// A bulk copy into these bytes was issued: from now on they may change.
    pub(super) fn copy_issued(
        &mut self,
        known: &Causality,
        address: u32,
        bytes: u32,
    ) -> Result<(), Violation> {
        let range = self.range(address, bytes, CHUNK)?;
        self.check_write(known, range.clone())?;
        for i in range.clone() {
            let byte = self.bytes[i];
            if matches!(byte.state, State::Written | State::Reduced) && !known.fenced.knows(byte.written) {
                let writer = self.deed(byte.written.actor, "write");
                return Err(Violation::ProxyFence { address: BASE + i as u32, writer });
            }
        }
        self.overwrite(range, State::Arriving, Epoch::default());
        Ok(())
    }

    /// The copy completes as `written`.
    pub(super) fn copy_completed(&mut self, written: Epoch, address: u32, from: &[u8]) {
        let start = (address - BASE) as usize;
        let range = start..start + from.len();
        self.overwrite(range.clone(), State::Copied, written);
        self.data[range].copy_from_slice(from);
    }

    /// A `cp.async` into these bytes was issued: from now on they may change. It is an ordinary write, of the generic
    /// proxy, that only takes its time.
    pub(super) fn async_copy_issued(
        &mut self,
        known: &Causality,
        address: u32,
        bytes: u32,
    ) -> Result<(), Violation> {
        let range = self.range(address, bytes, bytes)?;
        self.check_write(known, range.clone())?;
        self.overwrite(range, State::Loading, Epoch::default());
        Ok(())
    }

    /// The `cp.async` was waited for by its thread, at `written`.
    pub(super) fn async_copy_landed(&mut self, written: Epoch, address: u32, from: &[u8]) {
        let start = (address - BASE) as usize;
        let range = start..start + from.len();
        self.overwrite(range.clone(), State::Written, written);
        self.data[range].copy_from_slice(from);
    }

    /// A product that reads these chunks was issued, and `waits` waits will end it. Returns the writers that every
    /// thread that issues it has to be ordered after.
    pub(super) fn product_issued(&mut self, chunks: &[u32], waits: u16) -> Result<Vec<Source>, Violation> {
        let mut sources: Vec<Source> = Vec::new();
        for &address in chunks {
            for i in self.range(address, CHUNK, CHUNK)? {
                let byte = self.bytes[i];
                let here = BASE + i as u32;
                let copied = match byte.state {
                    State::Empty => return Err(Violation::Uninitialized(here)),
                    State::Arriving => return Err(Violation::CopyInFlight(here)),
                    State::Loading => return Err(Violation::AsyncCopyInFlight(here)),
                    State::Barrier => return Err(Violation::BarrierBytes(here)),
                    State::Gap => unreachable!("`range` refuses gaps"),
                    State::Written | State::Reduced => false,
                    State::Copied => true,
                };
                let known = |s: &Source| s.written == byte.written;
                // Neighbours mostly have one writer: the last is the first to look at.
                if !sources.last().is_some_and(known) && !sources.iter().any(known) {
                    sources.push(Source { address: here, copied, written: byte.written });
                }
            }
        }
        for &address in chunks {
            self.in_flight[((address - BASE) / CHUNK) as usize] += waits;
        }
        Ok(sources)
    }

    /// Whether a thread that issues a product is ordered after a writer of its operands.
    pub(super) fn check_source(&self, known: &Causality, source: Source) -> Result<(), Violation> {
        let Source { address, copied, written } = source;
        if !known.seen.knows(written) {
            return Err(self.race((address - BASE) as usize, "read", written, "write"));
        }
        if !copied && !known.fenced.knows(written) {
            return Err(Violation::ProxyFence { address, writer: self.deed(written.actor, "write") });
        }
        Ok(())
    }

    /// One of the waits for a product.
    pub(super) fn product_waited(&mut self, warp: Epoch, chunks: &[u32]) {
        for &address in chunks {
            let chunk = ((address - BASE) / CHUNK) as usize;
            self.in_flight[chunk] -= 1;
            let reads = &mut self.product_reads[chunk];
            match reads.iter_mut().find(|r| r.actor == warp.actor) {
                Some(read) => read.clock = warp.clock,
                None => reads.push(warp),
            }
        }
    }

    /// The 16 bytes of a chunk, for a product.
    pub(super) fn chunk(&self, address: u32) -> [u8; CHUNK as usize] {
        let at = (address - BASE) as usize;
        self.data[at..][..CHUNK as usize].try_into().expect("a chunk has 16 bytes")
    }
}
