//! A script for a hostile front end and its guest, as a string of bytes. It defines the messages, the data that is
//! written, the memory that is removed, and the rounds of the worker. Any byte string is a valid script.

use std::cell::RefCell;
use std::os::fd::{AsFd, OwnedFd};

use offcore_ring::split::{VIRTQ_DESC_F_INDIRECT, VIRTQ_DESC_F_WRITE};
use offcore_vhost::features::*;
use offcore_vhost::message::{
    LogArea, MemoryRegion, Request, VHOST_VRING_F_LOG, VringAddr, VringFd, VringState,
};
use rustix::event::EventfdFlags;
use rustix::fs::OFlags;

use crate::bytes::Script;
use crate::live::{BUFFERS, EVERYTHING, LOG, Live, MEMORY, PATHS, PHYSICAL, SIZE, USER, addresses};

/// Longer scripts are cut off, so that every case ends soon.
const MAX_STEPS: usize = 150;

thread_local! {
    /// State of the last successful case, for reuse.
    static LIVE: RefCell<Option<Live>> = const { RefCell::new(None) };
}

/// Statistics of a script, so that tests can check that scripts exercise the code.
#[derive(Clone, Copy, Debug, Default)]
#[allow(dead_code, reason = "a fuzz target looks at none of it")]
pub(crate) struct Outcome {
    /// Packets from the hostile guest, and chains that were not valid packets.
    pub(crate) packets: usize,
    pub(crate) dropped: usize,
    /// Virtqueues that were broken at the end.
    pub(crate) broken: usize,
    /// Messages received by the back end, and how many of them it refused.
    pub(crate) messages: u64,
    pub(crate) refused: u64,
}

/// Runs a script and adds its results to `outcome`.
///
/// # Panics
/// Panics if the hostile front end has broken an invariant.
pub(crate) fn play(script: &[u8], outcome: &mut Outcome) {
    let mut live = LIVE.take().unwrap_or_else(Live::new);
    let mut script = Script(script);
    let before = live.backend.device().status();
    live.begin(PATHS[usize::from(script.u8()) % PATHS.len()], script.u8() & 1 != 0);
    let mut events = [0, 1].map(|_| event());
    if script.u8() < 200 {
        live.start(features(&mut script));
    } else {
        live.connect();
    }
    for _ in 0..MAX_STEPS {
        if script.0.is_empty() {
            break;
        }
        step(&mut script, &mut live, &mut events);
    }
    let (packets, dropped) = live.counts();
    outcome.packets += packets;
    outcome.dropped += dropped;
    outcome.broken += [0, 1].into_iter().filter(|&queue| live.broken(queue).is_some()).count();
    let after = live.backend.device().status();
    drop(events);
    live.finish();
    LIVE.set(Some(live));
    outcome.messages += after.messages - before.messages;
    outcome.refused += after.refused - before.refused;
}

fn event() -> OwnedFd {
    rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).unwrap()
}

/// Returns a set of features: in most cases, all of them.
fn features(script: &mut Script<'_>) -> u64 {
    match script.u8() {
        0..128 => EVERYTHING,
        128..160 => 0,
        160..200 => VIRTIO_NET_F_MRG_RXBUF | VIRTIO_F_INDIRECT_DESC,
        _ => u64::from(script.u16()) & EVERYTHING | VIRTIO_F_INDIRECT_DESC,
    }
}

fn step(script: &mut Script<'_>, live: &mut Live, events: &mut [OwnedFd; 2]) {
    let (op, queue) = op(script);
    match op {
        0..12 => message(script, live, events, queue as u32),
        12..26 => offer(script, live, queue),
        26..30 => {
            // Writes a virtio-net header, which may be invalid, to the start of a buffer.
            let header = [script.u8() & 7, [0, 0, 1, 4, 0x81, 3][usize::from(script.u8()) % 6], 54, 0];
            let rest = [script.u8(), script.u8() & 31, script.u8(), script.u8() & 1, 16, 0, 0, 0];
            let at = BUFFERS + u64::from(script.u8() & 31) * 4096;
            live.write(at, &[&header[..], &rest, &[2, 0, 0, 0, 0, 1, 2, 0, 0, 0, 0, 2, 8, 0, 0x45]].concat());
        }
        30..32 => live.write(queue as u64 * 0x1_0000 + u64::from(script.u16()), &script.u64().to_le_bytes()),
        32 => live.write(u64::from(script.u16()) * 16, &script.u64().to_le_bytes()),
        33 => {
            // Changes the available index of a split virtqueue.
            live.write(queue as u64 * 0x1_0000 + 0x4002, &script.u16().to_le_bytes());
        }
        34 if script.u8() < 64 => {
            // Truncates the memory, or extends it again with other content.
            live.len = [0, 4096, BUFFERS, MEMORY / 2, MEMORY - 4096, MEMORY][usize::from(script.u8()) % 6];
            rustix::fs::ftruncate(&live.memory, live.len).unwrap();
        }
        35 => {
            // Changes the flags of a shared eventfd.
            let flags = if script.u8() < 128 { OFlags::empty() } else { OFlags::NONBLOCK };
            rustix::fs::fcntl_setfl(&events[queue], flags).unwrap();
        }
        36 => {
            // Fills the eventfd, without blocking.
            let flags = rustix::fs::fcntl_getfl(&events[queue]).unwrap();
            rustix::fs::fcntl_setfl(&events[queue], flags | OFlags::NONBLOCK).unwrap();
            let _ = rustix::io::write(&events[queue], &(u64::MAX - 1).to_ne_bytes());
            rustix::fs::fcntl_setfl(&events[queue], flags).unwrap();
        }
        37 => events[queue] = event(),
        38 => live.sleep(),
        39 if script.u8() < 64 => {
            live.reboot();
            live.start(features(script));
        }
        40 => raw(script, live),
        41..44 => {
            while live
                .connection
                .as_mut()
                .is_some_and(|connection| matches!(connection.receive(), Ok(Some(_))))
            {}
        }
        44..46 => _ = live.stepper.step(),
        46..50 => {
            live.partner.send(14 + usize::from(script.u16()) % 1700);
        }
        _ => live.turn(),
    }
}

/// Makes a chain available, which is valid in most cases.
fn offer(script: &mut Script<'_>, live: &mut Live, queue: usize) {
    let write = [VIRTQ_DESC_F_WRITE, 0][queue];
    let entries = match script.u8() {
        0..160 => 1,
        160..240 => 2 + usize::from(script.u8()) % 5,
        _ => usize::from(script.u8()) % 70,
    };
    let mut buffers: Vec<(u64, u32, u16)> = (0..entries)
        .map(|_| {
            let flags = if script.u8() < 250 { write } else { script.u16() };
            (address(script), len(script), flags)
        })
        .collect();
    if script.u8() >= 220 {
        // Puts the same chain into an indirect table.
        let table = BUFFERS + 0x2_0000 + u64::from(script.u8() & 15);
        for (i, &(addr, len, flags)) in buffers.iter().enumerate() {
            let more = u16::from(i + 1 < buffers.len() && !live.packed);
            let next = if script.u8() < 250 { i as u16 + 1 } else { script.u16() };
            live.descriptor(table + i as u64 * 16, addr, len, flags | more, next);
        }
        buffers = vec![(PHYSICAL + table, 16 * entries as u32, VIRTQ_DESC_F_INDIRECT)];
    }
    live.offer(queue, SIZE, &buffers);
}

fn message(script: &mut Script<'_>, live: &mut Live, events: &[OwnedFd; 2], index: u32) {
    let need_reply = script.u8() & 1 != 0;
    let event = |script: &mut Script<'_>| script.u8() < 200;
    let own = events[index as usize].try_clone().unwrap();
    let memory = live.memory.try_clone().unwrap();
    let vring = |fd: bool| VringFd { index: index as u8, fd: fd.then(|| own.as_fd()) };
    let (region, packed) = (live.region(), if live.packed { VIRTIO_F_RING_PACKED } else { 0 });
    let kind = script.u8();
    if kind >= 240 {
        return log(script, live, index, kind % 4);
    }
    let request = match kind % 24 {
        0 => Request::SetFeatures(features(script) | VIRTIO_F_VERSION_1 | packed),
        1 => Request::SetFeatures(script.u64()),
        2 => Request::SetProtocolFeatures(if script.u8() < 128 { PROTOCOL_OFFERED } else { script.u64() }),
        3 => Request::SetMemTable(vec![(region, memory.as_fd())]),
        4 => {
            let parts = 1 + u64::from(script.u8() % 4);
            let size = MEMORY / 4;
            let part = |i: u64| {
                let skew = if script.u8() < 200 { 0 } else { u64::from(script.u8()) << 12 };
                let at = i * size;
                (
                    MemoryRegion { guest: PHYSICAL + at, size, user: USER + at, mmap_offset: at + skew },
                    memory.as_fd(),
                )
            };
            Request::SetMemTable((0..parts).map(part).collect())
        }
        5 => Request::SetVringNum(VringState {
            index,
            num: [64, 8, 256, 0, 32768, 33][usize::from(script.u8()) % 6],
        }),
        6 => Request::SetVringBase(VringState { index, num: script.u16().into() }),
        7 => Request::SetVringBase(VringState { index, num: if live.packed { 0x8000_8000 } else { 0 } }),
        8 => Request::SetVringAddr(addresses(index)),
        9 => {
            let shift = |script: &mut Script<'_>| u64::from(script.u8()) << 4;
            let good = addresses(index);
            let (desc, avail, used) =
                (good.desc + shift(script), good.avail + shift(script), good.used + shift(script));
            Request::SetVringAddr(VringAddr { desc, avail, used, ..good })
        }
        10 => Request::SetVringKick(vring(event(script))),
        11 => Request::SetVringCall(vring(event(script))),
        12 => Request::SetVringErr(vring(event(script))),
        13 | 14 => Request::SetVringEnable(VringState { index, num: u32::from(script.u8() < 200) }),
        15 => Request::GetVringBase(VringState { index, num: 0 }),
        16 => Request::ResetDevice,
        17 => Request::SetStatus(u64::from(script.u8()) & 15),
        18 => {
            let at = u64::from(script.u8() % 8) << 17;
            let (guest, user) = (PHYSICAL + MEMORY + at, USER + MEMORY + at);
            Request::AddMemReg(MemoryRegion { guest, size: 1 << 17, user, mmap_offset: at }, memory.as_fd())
        }
        19 => {
            let at = u64::from(script.u8() % 8) << 17;
            let (guest, user) = (PHYSICAL + MEMORY + at, USER + MEMORY + at);
            let region = MemoryRegion { guest, size: 1 << 17, user, mmap_offset: at };
            Request::RemMemReg(if script.u8() < 200 { region } else { live.region() }, None)
        }
        20 => Request::GetFeatures,
        21 => Request::GetStatus,
        22 => Request::NetSetMtu(script.u16().into()),
        _ => Request::ResetOwner,
    };
    live.send(request, need_reply);
}

/// Sends a migration message: the dirty log, the feature, or the log address of a virtqueue's used ring.
fn log(script: &mut Script<'_>, live: &mut Live, index: u32, kind: u8) {
    let packed = if live.packed { VIRTIO_F_RING_PACKED } else { 0 };
    let request = match kind {
        0 | 1 => {
            let file = live.log();
            let area = match script.u8() {
                0..220 => LogArea { size: LOG - u64::from(script.u8()), offset: 0 },
                220..240 => LogArea { size: LOG / 8, offset: u64::from(script.u16()) },
                _ => LogArea { size: script.u64(), offset: script.u64() },
            };
            live.send(Request::SetLogBase(area, file.as_fd()), false);
            if script.u8() < 64 {
                rustix::fs::ftruncate(&file, 0).unwrap();
            }
            return;
        }
        2 => Request::SetFeatures(features(script) | VIRTIO_F_VERSION_1 | VHOST_F_LOG_ALL | packed),
        _ => {
            let log = if script.u8() < 128 { PHYSICAL } else { script.u64() };
            Request::SetVringAddr(VringAddr { flags: VHOST_VRING_F_LOG, log, ..addresses(index) })
        }
    };
    live.send(request, false);
}

/// Sends raw bytes. The connection may be unusable afterwards.
fn raw(script: &mut Script<'_>, live: &mut Live) {
    let (code, flags, len) = (u32::from(script.u8() % 50), 1 | u32::from(script.u8() & 8), script.u8() % 64);
    let mut bytes = [code, flags, len.into()].map(u32::to_ne_bytes).concat();
    bytes.extend((0..len).map(|_| script.u8()));
    bytes.truncate(bytes.len() - usize::from(script.u8() < 32) * (bytes.len() / 2));
    let fd = live.memory.try_clone().unwrap();
    let fds = vec![fd.as_fd(); usize::from(script.u8() % 3)];
    if let Some(connection) = &live.connection {
        let _ = connection.send(&bytes, &fds);
    }
    live.turn();
}

/// Returns the next operation and its virtqueue.
fn op(script: &mut Script<'_>) -> (u8, usize) {
    let byte = script.u8();
    (byte & 0x7f, usize::from(byte >> 7))
}

fn address(script: &mut Script<'_>) -> u64 {
    let near = u64::from(script.u8());
    match script.u8() {
        0..230 => PHYSICAL + BUFFERS + (near & 31) * 4096 + (near >> 5),
        230..240 => PHYSICAL + MEMORY - near,
        240..248 => PHYSICAL + near * 16,
        _ => script.u64(),
    }
}

fn len(script: &mut Script<'_>) -> u32 {
    let near = u32::from(script.u8());
    match script.u8() {
        0..128 => near * 8 + 14,
        128..160 => near,
        160..200 => 12 + near % 64,
        200..220 => 65535 + near,
        220..230 => u32::MAX - near,
        _ => 1526,
    }
}
