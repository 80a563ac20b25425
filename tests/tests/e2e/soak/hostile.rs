//! A hostile front end and its guest. Rings, descriptors, headers and messages contain arbitrary data, and memory is
//! removed at the end. Sessions are short, because a ring soon breaks.

use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use offcore_stats::SplitMix;
use offcore_vhost::connection::{Connection, ConnectionError};
use offcore_vhost::features::{
    PROTOCOL_OFFERED, VIRTIO_F_EVENT_IDX, VIRTIO_F_INDIRECT_DESC, VIRTIO_F_RING_PACKED, VIRTIO_NET_F_CSUM,
    VIRTIO_NET_F_GUEST_CSUM, VIRTIO_NET_F_HOST_TSO4, VIRTIO_NET_F_MRG_RXBUF,
};
use offcore_vhost::message::{Request, VringFd};
use rustix::fs::FallocateFlags;

use crate::peer::{FEATURES, Guest, addresses, eventfd, state};

/// Features that are negotiated at random.
const OPTIONAL: [u64; 7] = [
    VIRTIO_F_RING_PACKED,
    VIRTIO_F_EVENT_IDX,
    VIRTIO_F_INDIRECT_DESC,
    VIRTIO_NET_F_MRG_RXBUF,
    VIRTIO_NET_F_CSUM,
    VIRTIO_NET_F_GUEST_CSUM,
    VIRTIO_NET_F_CSUM | VIRTIO_NET_F_HOST_TSO4,
];
/// Number of descriptors of a ring.
const SIZE: u64 = 256;

/// Attacks the switch at `socket` until told to stop. Counts the sessions.
pub(super) fn misbehave(socket: &Path, seed: u64, stop: &AtomicBool, sessions: &AtomicU64) {
    let mut random = SplitMix::new(seed + 1);
    while !stop.load(Ordering::Relaxed) {
        let Ok(socket) = UnixStream::connect(socket) else {
            std::thread::sleep(Duration::from_millis(50));
            continue;
        };
        // Errors are expected.
        let _ = session(Connection::new(socket.into()).unwrap(), &mut random, stop);
        sessions.fetch_add(1, Ordering::Relaxed);
    }
}

fn session(connection: Connection, random: &mut SplitMix, stop: &AtomicBool) -> Result<(), ConnectionError> {
    let guest = Guest::new();
    let chosen = random.next();
    let features = OPTIONAL.iter().enumerate().filter(|(bit, _)| chosen >> bit & 1 != 0);
    let features = features.fold(FEATURES, |all, (_, feature)| all | feature);
    let send = |request| connection.send_request(request, false);
    send(Request::SetProtocolFeatures(PROTOCOL_OFFERED))?;
    send(Request::SetFeatures(features))?;
    send(guest.table())?;
    let call = eventfd();
    for index in 0..2 {
        send(Request::SetVringNum(state(index, SIZE as u32)))?;
        let base = if features & VIRTIO_F_RING_PACKED != 0 { 1 << 15 } else { 0 };
        send(Request::SetVringBase(state(index, base)))?;
        send(Request::SetVringAddr(addresses(index)))?;
        send(Request::SetVringCall(VringFd { index: index as u8, fd: Some(call.as_fd()) }))?;
        send(Request::SetVringEnable(state(index, 1)))?;
        send(Request::SetVringKick(VringFd { index: index as u8, fd: None }))?;
    }
    let most = 1 << random.below(8);
    for _ in 0..1 + random.below(most) {
        if stop.load(Ordering::Relaxed) {
            break;
        }
        (0..500).for_each(|_| scribble(&guest, features, random));
        if random.below(20) == 0 {
            message(&connection, &call, random)?;
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    match random.below(4) {
        0 => drop(rustix::fs::ftruncate(&guest.fd, random.below(1 << 20))),
        1 => {
            let holes = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
            let _ = rustix::fs::fallocate(&guest.fd, holes, 0, 1 << 20);
        }
        _ => {}
    }
    std::thread::sleep(Duration::from_millis(random.below(20)));
    Ok(())
}

/// Writes ring contents as a driver would, but at the wrong time, and sometimes random data.
fn scribble(guest: &Guest, features: u64, random: &mut SplitMix) {
    let ring = addresses(random.below(2) as u32);
    let [desc, avail] = [ring.desc, ring.avail].map(|address| (address - Guest::USER) as usize);
    let at = desc + random.below(SIZE) as usize * 16;
    let address = match random.below(64) {
        0 => random.next(),
        1 => Guest::PHYSICAL + (1 << 20) - random.below(64),
        _ => Guest::PHYSICAL + 0x2_0000 + random.below(0xc_0000),
    };
    let len = match random.below(64) {
        0 => random.next() as u32,
        1..4 => random.below(1 << 16) as u32,
        _ => 12 + random.below(1600) as u32,
    };
    let flags = if random.below(64) == 0 { random.next() as u16 } else { (ring.index == 0) as u16 * 2 };
    if features & VIRTIO_F_RING_PACKED != 0 {
        let flags = flags | [0x80, 0x8000, 0, 0x8080][random.below(4) as usize];
        let rest = u64::from(len) | random.below(SIZE) << 32 | u64::from(flags) << 48;
        guest.mapping.write_at(at, &address.to_le_bytes());
        guest.mapping.write_at(at + 8, &rest.to_le_bytes());
        return;
    }
    match random.below(8) {
        0..4 => {
            let rest = u64::from(len) | u64::from(flags) << 32 | random.below(SIZE) << 48;
            guest.mapping.write_at(at, &address.to_le_bytes());
            guest.mapping.write_at(at + 8, &rest.to_le_bytes());
        }
        4 | 5 => {
            // Publishes a few more chains if there is room, or a random index.
            let mut index = [0; 2];
            guest.mapping.read_at(avail + 2, &mut index);
            let more = if random.below(256) == 0 { random.next() as u16 } else { 1 };
            let next = u16::from_le_bytes(index).wrapping_add(more);
            let slot = avail + 4 + usize::from(next) % SIZE as usize * 2;
            guest.mapping.write_at(slot, &(random.below(SIZE) as u16).to_le_bytes());
            guest.mapping.write_at(avail + 2, &next.to_le_bytes());
        }
        _ => guest.mapping.write_at(random.below((1 << 20) - 8) as usize, &random.next().to_le_bytes()),
    }
}

/// Sends a random message with random contents.
fn message(connection: &Connection, fd: &OwnedFd, random: &mut SplitMix) -> Result<(), ConnectionError> {
    let words = random.below(6) as usize;
    let payload: Vec<u8> =
        (0..words).flat_map(|_| (random.next() >> random.below(64)).to_ne_bytes()).collect();
    let header = [random.below(44) as u32, 1 | (random.below(2) as u32) << 3, payload.len() as u32];
    let bytes: Vec<u8> = header.into_iter().flat_map(u32::to_ne_bytes).chain(payload).collect();
    let fds = [fd.as_fd(); 2];
    connection.send(&bytes, &fds[..random.below(3) as usize])
}
