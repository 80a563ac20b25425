//! Two connected ports, with faults at chosen packets.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex};

use offcore_mem::{Burst, HEADROOM};
use offcore_port::PortBase;
use offcore_port::{
    Accepts, Context, Port, PortError, QueueSetup, RxCounters, RxQueue, TxCounters, TxQueue, address,
};

/// A fault that happens to a packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fault {
    Lost,
    /// It arrives twice.
    Twice,
    /// It arrives after this number of later packets.
    Late(usize),
    /// One bit is flipped in the byte at this distance from the end.
    Flipped(usize),
    /// Its last byte is missing.
    Cut,
    /// These bytes arrive before it.
    Before(&'static [u8]),
    /// The port accepts neither this packet nor any later one.
    Refused,
}

/// Returns the fault of a packet by its number, if any.
pub(crate) type Faults = fn(u64) -> Option<Fault>;

#[derive(Debug, Default)]
struct Wire {
    packets: VecDeque<Vec<u8>>,
    /// Late packets, each with the number of packets that must pass first.
    late: Vec<(usize, Vec<u8>)>,
    seen: u64,
}

impl Wire {
    fn carry(&mut self, faults: Faults, mut packet: Vec<u8>) {
        let number = self.seen;
        self.seen += 1;
        match faults(number) {
            Some(Fault::Lost) => return self.pass_one(),
            Some(Fault::Late(by)) => return self.late.push((by, packet)),
            Some(Fault::Twice) => self.packets.push_back(packet.clone()),
            Some(Fault::Flipped(from_end)) => {
                let at = packet.len() - from_end;
                packet[at] ^= 0x10;
            }
            Some(Fault::Cut) => packet.truncate(packet.len() - 1),
            Some(Fault::Before(other)) => self.packets.push_back(other.to_vec()),
            Some(Fault::Refused) | None => {}
        }
        self.packets.push_back(packet);
        self.pass_one();
    }

    fn pass_one(&mut self) {
        for (after, _) in &mut self.late {
            *after -= 1;
        }
        let (due, late) = std::mem::take(&mut self.late).into_iter().partition(|(after, _)| *after == 0);
        self.late = late;
        self.packets.extend(Vec::into_iter(due).map(|(_, packet)| packet));
    }
}

#[derive(Debug)]
pub(crate) struct FaultyPort {
    base: PortBase,
    out: Arc<Mutex<Wire>>,
    into: Arc<Mutex<Wire>>,
    faults: Faults,
}

/// Returns a port with a loop behind it.
pub(crate) fn looped(faults: Faults) -> Vec<Box<dyn Port>> {
    let wire = Arc::<Mutex<Wire>>::default();
    vec![Box::new(FaultyPort {
        base: PortBase::new("faulty".into(), address::derived("faulty"), 1),
        out: Arc::clone(&wire),
        into: wire,
        faults,
    })]
}

/// Returns two ports. Packets from the second to the first have no faults.
pub(crate) fn pair(faults: Faults) -> Vec<Box<dyn Port>> {
    let [there, back] = [(); 2].map(|()| Arc::<Mutex<Wire>>::default());
    let first = FaultyPort {
        base: PortBase::new("faulty".into(), address::derived("faulty"), 1),
        out: Arc::clone(&there),
        into: Arc::clone(&back),
        faults,
    };
    let second = FaultyPort {
        base: PortBase::new("faulty".into(), address::derived("faulty"), 1),
        out: back,
        into: there,
        faults: |_| None,
    };
    vec![Box::new(first), Box::new(second)]
}

impl Port for FaultyPort {
    fn base(&self) -> &PortBase {
        &self.base
    }

    fn rx_queue(&mut self, index: u16, setup: QueueSetup<'_>) -> Result<Box<dyn RxQueue>, PortError> {
        let counters = self.base.take_rx(index, &setup)?;
        Ok(Box::new(FaultyRx { wire: Arc::clone(&self.into), counters }))
    }

    fn tx_queue(&mut self, index: u16, setup: QueueSetup<'_>) -> Result<Box<dyn TxQueue>, PortError> {
        let counters = self.base.take_tx(index, &setup)?;
        Ok(Box::new(FaultyTx { wire: Arc::clone(&self.out), faults: self.faults, counters }))
    }

    fn status(&self) -> String {
        String::new()
    }
}

#[derive(Debug)]
struct FaultyRx {
    wire: Arc<Mutex<Wire>>,
    counters: RxCounters,
}

impl RxQueue for FaultyRx {
    fn rx(&mut self, ctx: &mut Context<'_>, burst: &mut Burst) {
        let pool = ctx.cache.pool();
        let mut wire = self.wire.lock().unwrap();
        while !burst.is_full()
            && let Some(bytes) = wire.packets.front()
        {
            let Some(mut packet) = ctx.cache.take_chain(HEADROOM, bytes.len()) else { break };
            let mut at = 0;
            for segment in pool.segments_mut(&mut packet) {
                let end = at + segment.len();
                segment.copy_from_slice(&bytes[at..end]);
                at = end;
            }
            self.counters.add(1, bytes.len() as u64);
            wire.packets.pop_front();
            burst.push(packet);
        }
    }

    fn counters(&self) -> &RxCounters {
        &self.counters
    }
}

#[derive(Debug)]
struct FaultyTx {
    wire: Arc<Mutex<Wire>>,
    faults: Faults,
    counters: TxCounters,
}

impl TxQueue for FaultyTx {
    fn tx(&mut self, ctx: &mut Context<'_>, burst: &mut Burst) {
        let pool = ctx.cache.pool();
        let mut wire = self.wire.lock().unwrap();
        if (self.faults)(wire.seen) == Some(Fault::Refused) {
            return;
        }
        // Packets that the other side does not fetch stay with the sender.
        let room = 4096_usize.saturating_sub(wire.packets.len()).min(burst.len());
        for packet in burst.drain(..room) {
            let bytes: Vec<u8> = pool.segments(&packet).flatten().copied().collect();
            self.counters.add(1, bytes.len() as u64);
            wire.carry(self.faults, bytes);
            ctx.cache.free(packet);
        }
    }

    fn accepts(&self) -> Accepts {
        Accepts { segments: true, ..Accepts::default() }
    }

    fn counters(&self) -> &TxCounters {
        &self.counters
    }
}
