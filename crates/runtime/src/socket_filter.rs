//! Programs that applications attach to sockets (`SO_ATTACH_FILTER`), within the memory that a domain may use
//! for them.

use core::fmt;
use core::sync::atomic::{AtomicUsize, Ordering};
use ginnel_matcher::{BadProgram, SocketPacket, SocketProgram};
use ginnel_stack::socket_filter::{FilteredPacket, SocketFilter};
use rustix::thread::sched_getcpu;
use std::collections::hash_map::RandomState;
use std::hash::BuildHasher;
use std::sync::Arc;

/// Bytes that a program is charged besides its instructions: its entries in the tables of the engine.
const OVERHEAD: usize = 1024;
/// Index of link 0 as an interface. The kernel counts its interfaces from 1 and does not get that far.
pub const FIRST_INTERFACE_INDEX: u32 = 1 << 30;
/// Index of the loopback interface.
const LOOPBACK_INDEX: u32 = 1;
/// Types of interfaces (`ARPHRD_ETHER`, `ARPHRD_LOOPBACK`).
const HARDWARE_ETHERNET: u16 = 1;
const HARDWARE_LOOPBACK: u16 = 772;
/// Types of packets (`PACKET_HOST`, `PACKET_BROADCAST`, `PACKET_MULTICAST`).
const PACKET_HOST: u8 = 0;
const PACKET_BROADCAST: u8 = 1;
const PACKET_MULTICAST: u8 = 2;

/// The program of a socket that was opened again, after a restart of the shards, by a process which does not
/// know the program of its filter: `ld #0x67696e6e; ret #0`, which drops everything. Programs of applications
/// differ from it, so the first process that knows the program replaces it.
pub const UNKNOWN_PROGRAM: [u8; 16] = {
    let ([l0, l1], [r0, r1]) = (0_u16.to_ne_bytes(), 6_u16.to_ne_bytes());
    let [k0, k1, k2, k3] = 0x6769_6e6e_u32.to_ne_bytes();
    [l0, l1, 0, 0, k0, k1, k2, k3, r0, r1, 0, 0, 0, 0, 0, 0]
};

/// Why a socket did not get a filter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FilterError {
    /// The socket does not exist, or the client does not own it.
    Stale,
    /// The program is not valid (`EINVAL`).
    Invalid,
    /// The programs of the domain use as much memory as they may (`ENOMEM`).
    NoMemory,
}

impl fmt::Display for FilterError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Stale => "the socket does not exist",
            Self::Invalid => "invalid program",
            Self::NoMemory => "no memory for programs",
        })
    }
}

impl std::error::Error for FilterError {}

/// Steps of a domain's programs in one turn of the shard, beyond which its packets are dropped: other domains
/// must not wait. Programs of the longest kind may look at 64 packets.
// limit: steps of filters of a domain in one turn
pub(crate) const STEPS_PER_TURN_MAX: usize = 1 << 18;

/// The memory of the programs of a domain, and the steps that they have done in this turn.
#[derive(Debug)]
pub(crate) struct FilterBudget {
    /// Index of the domain.
    domain: u8,
    used: AtomicUsize,
    max: usize,
    steps: AtomicUsize,
}

impl FilterBudget {
    pub fn new(domain: u8, max: usize) -> Arc<Self> {
        Arc::new(Self { domain, used: AtomicUsize::new(0), max, steps: AtomicUsize::new(0) })
    }

    /// Begins a turn. Returns the steps since the last one began.
    pub fn begin_turn(&self) -> usize {
        let steps = self.steps.load(Ordering::Relaxed);
        if steps > 0 {
            self.steps.store(0, Ordering::Relaxed);
        }
        steps
    }

    /// Returns whether programs may run in this turn.
    fn has_steps(&self) -> bool {
        self.steps.load(Ordering::Relaxed) < STEPS_PER_TURN_MAX
    }

    /// Takes memory, if there is enough.
    fn take(&self, bytes: usize) -> Result<(), FilterError> {
        let taken = |used: usize| used.checked_add(bytes).filter(|used| *used <= self.max);
        let result = self.used.fetch_update(Ordering::Relaxed, Ordering::Relaxed, taken);
        result.map(|_| ()).map_err(|_| FilterError::NoMemory)
    }
}

/// A program that a domain has attached to a socket. It gives its memory back when the last socket that has
/// it is closed or gets another one.
#[derive(Debug)]
pub(crate) struct AttachedProgram {
    program: SocketProgram,
    code: Box<[u8]>,
    budget: Arc<FilterBudget>,
    bytes: usize,
    /// Source of the random numbers that the program loads: key and counter.
    random: Option<(RandomState, AtomicUsize)>,
    loads_cpu: bool,
}

impl AttachedProgram {
    /// Verifies a program in the encoding of `struct sock_filter`, and takes memory for it.
    ///
    /// # Errors
    /// [`FilterError::Invalid`], [`FilterError::NoMemory`].
    pub fn new(code: &[u8], budget: &Arc<FilterBudget>) -> Result<Self, FilterError> {
        let program = decode(code)?;
        let bytes = OVERHEAD + code.len() + program.memory_bytes();
        budget.take(bytes)?;
        Ok(Self::with_memory(program, code, budget, bytes))
    }

    /// As `new`, for a program that was attached before. The limit may be lower now.
    fn restore(code: &[u8], budget: &Arc<FilterBudget>) -> Result<Self, FilterError> {
        let program = decode(code)?;
        let bytes = OVERHEAD + code.len() + program.memory_bytes();
        budget.used.fetch_add(bytes, Ordering::Relaxed);
        Ok(Self::with_memory(program, code, budget, bytes))
    }

    fn with_memory(program: SocketProgram, code: &[u8], budget: &Arc<FilterBudget>, bytes: usize) -> Self {
        let random = program.loads_random().then(|| (RandomState::new(), AtomicUsize::new(0)));
        let loads_cpu = program.loads_cpu();
        Self { program, code: code.into(), budget: Arc::clone(budget), bytes, random, loads_cpu }
    }

    /// Returns what [`restore`] needs.
    fn saved_as(&self, kind: u8) -> Vec<u8> {
        [&[kind, self.budget.domain], &*self.code].concat()
    }
}

/// Kinds of programs in a saved state.
const FILTERING: u8 = 0;
const SELECTING: u8 = 1;

/// Returns a program of a saved state; `budget` returns the memory of the programs of a domain.
pub(crate) fn restore<'a>(
    saved: &[u8],
    budget: impl FnOnce(u8) -> Option<&'a Arc<FilterBudget>>,
) -> Option<Arc<dyn SocketFilter>> {
    let (&[kind, domain], code) = saved.split_first_chunk()?;
    let program = AttachedProgram::restore(code, budget(domain)?).ok()?;
    match kind {
        FILTERING => Some(Arc::new(program)),
        SELECTING => Some(Arc::new(SelectingProgram(program))),
        _ => None,
    }
}

impl Drop for AttachedProgram {
    fn drop(&mut self) {
        self.budget.used.fetch_sub(self.bytes, Ordering::Relaxed);
    }
}

impl SocketFilter for AttachedProgram {
    fn run(&self, packet: &FilteredPacket<'_>) -> u32 {
        if !self.budget.has_steps() {
            return 0;
        }
        let destination = packet.destination;
        let packet_type = match (packet.is_broadcast, destination.is_multicast()) {
            (true, _) => PACKET_BROADCAST,
            (false, true) => PACKET_MULTICAST,
            (false, false) => PACKET_HOST,
        };
        let (interface, hardware_type) = if packet.is_loopback {
            (LOOPBACK_INDEX, HARDWARE_LOOPBACK)
        } else {
            (FIRST_INTERFACE_INDEX + u32::from(packet.link.0), HARDWARE_ETHERNET)
        };
        let random = self.random.as_ref().map(|(state, count)| {
            // Truncates on purpose.
            state.hash_one(count.fetch_add(1, Ordering::Relaxed)) as u32
        });
        let (kept, steps) = self.program.run_counted(&SocketPacket {
            bytes: packet.bytes,
            network: packet.network,
            link: packet.frame,
            ethertype: if destination.is_ipv4() { 0x0800 } else { 0x86dd },
            packet_type,
            interface,
            hardware_type,
            // Cannot truncate: headers are short.
            payload_offset: packet.header_len as u32,
            random: random.unwrap_or(0),
            // Cannot truncate: there are fewer CPUs.
            cpu: if self.loads_cpu { sched_getcpu() as u32 } else { 0 },
        });
        self.budget.steps.fetch_add(steps, Ordering::Relaxed);
        kept
    }

    fn code(&self) -> &[u8] {
        &self.code
    }

    fn saved(&self) -> Vec<u8> {
        self.saved_as(FILTERING)
    }
}

/// A program that selects the member of a group of sockets (`SO_ATTACH_REUSEPORT_CBPF`). If the domain has no
/// steps left in this turn, the program selects none.
#[derive(Debug)]
pub(crate) struct SelectingProgram(AttachedProgram);

impl SelectingProgram {
    /// Verifies a program, and takes memory for it.
    ///
    /// # Errors
    /// As [`AttachedProgram::new`].
    pub fn new(code: &[u8], budget: &Arc<FilterBudget>) -> Result<Self, FilterError> {
        AttachedProgram::new(code, budget).map(Self)
    }
}

impl SocketFilter for SelectingProgram {
    fn run(&self, packet: &FilteredPacket<'_>) -> u32 {
        // A group has fewer members.
        if self.0.budget.has_steps() { self.0.run(packet) } else { u32::MAX }
    }

    fn code(&self) -> &[u8] {
        &self.0.code
    }

    fn saved(&self) -> Vec<u8> {
        self.0.saved_as(SELECTING)
    }
}

fn decode(code: &[u8]) -> Result<SocketProgram, FilterError> {
    let program: Option<Result<_, BadProgram>> = SocketProgram::decode(code);
    program.and_then(Result::ok).ok_or(FilterError::Invalid)
}

/// Checks a program in the encoding of `struct sock_filter`.
///
/// # Errors
/// [`FilterError::Invalid`].
pub fn check_program(code: &[u8]) -> Result<(), FilterError> {
    decode(code).map(|_| ())
}

#[cfg(test)]
mod tests {
    use super::*;
    use core::net::Ipv4Addr;
    use ginnel_stack::handle::LinkId;

    fn packet() -> FilteredPacket<'static> {
        FilteredPacket {
            bytes: &[0; 100],
            header_len: 8,
            network: &[0; 120],
            frame: &[0; 14],
            destination: Ipv4Addr::LOCALHOST.into(),
            is_broadcast: false,
            link: LinkId(0),
            is_loopback: true,
        }
    }

    // limit: steps of filters of a domain in one turn
    #[test]
    fn programs_of_a_domain_do_a_bounded_number_of_steps_in_a_turn() {
        // 4,095 times the length of the packet, which is returned then.
        let load_length = [0x80, 0, 0, 0, 0, 0, 0, 0];
        let code = [load_length.repeat(4095), vec![0x16, 0, 0, 0, 0, 0, 0, 0]].concat();
        let [busy, other] = [(); 2].map(|()| FilterBudget::new(0, 1 << 20));
        let [filter, same_domain] = [(); 2].map(|()| AttachedProgram::new(&code, &busy).unwrap());
        let other_domain = AttachedProgram::new(&code, &other).unwrap();
        for _ in 0..2 {
            for _ in 0..STEPS_PER_TURN_MAX / 4096 {
                assert_eq!(filter.run(&packet()), 100);
            }
            assert_eq!((filter.run(&packet()), same_domain.run(&packet())), (0, 0));
            assert_eq!(other_domain.run(&packet()), 100);
            assert_eq!((busy.begin_turn(), busy.begin_turn()), (STEPS_PER_TURN_MAX, 0));
        }
        assert_eq!(same_domain.run(&packet()), 100);
    }

    #[test]
    fn selecting_programs_select_none_without_steps() {
        // The length of the packet after as many steps as a turn has.
        let load_length = [0x80, 0, 0, 0, 0, 0, 0, 0];
        let code = [load_length.repeat(4095), vec![0x16, 0, 0, 0, 0, 0, 0, 0]].concat();
        let budget = FilterBudget::new(0, 1 << 20);
        let program = SelectingProgram::new(&code, &budget).unwrap();
        let selected: Vec<u32> = (0..=STEPS_PER_TURN_MAX / 4096).map(|_| program.run(&packet())).collect();
        assert_eq!(selected[..2], [100, 100]);
        assert_eq!(selected.last(), Some(&u32::MAX));
    }
}
